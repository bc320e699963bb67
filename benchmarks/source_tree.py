"""The folders of the project, each with the first docstring line of its package."""

import ast
import pathlib

# Levels of folders that are listed of each package.
_PACKAGES = {"pallas_kernels": 2, "qerl_jax": 2, "experiments": 1, "benchmarks": 1}
_TESTS = "One file per module, end-to-end runs, golden files with their generators."


def source_tree(root: pathlib.Path) -> str:
    """The upper packages below `root` as an indented Markdown block, a line for each folder."""
    lines = []
    for package, levels in _PACKAGES.items():
        for path in sorted((root / package).rglob("__init__.py")):
            folders = path.parent.relative_to(root).parts
            if len(folders) <= levels:
                docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
                name = f"{'  ' * (len(folders) - 1)}{folders[-1]}/"
                lines.append((name, docstring.partition("\n")[0]))
    return "\n".join(f"    {name:18}{text}".rstrip() for name, text in [*lines, ("tests/", _TESTS)])
