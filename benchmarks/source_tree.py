"""The folders of the project, each with the first docstring line of its package."""

import ast
import pathlib

# Levels of folders that are listed of each package.
_PACKAGES = {"pallas_kernels": 2, "qerl_jax": 2, "experiments": 1, "benchmarks": 1}
# Folders that hold no package.
_OTHERS = {"tests": "One file per module, end-to-end runs, golden files with their generators."}
_COLUMN = 18


def source_tree(root: pathlib.Path) -> str:
    """The upper packages below `root` as an indented Markdown block, a line for each folder."""
    lines = []
    for package, levels in _PACKAGES.items():
        for path in sorted((root / package).rglob("__init__.py")):
            folder = path.parent.relative_to(root)
            if len(folder.parts) > levels:
                continue
            name = f"{'  ' * (len(folder.parts) - 1)}{folder.name}/"
            lines.append((name, _first_line(path)))
    lines += [(f"{name}/", text) for name, text in _OTHERS.items()]
    return "\n".join(f"    {name:{_COLUMN}}{text}".rstrip() for name, text in lines)


def _first_line(path: pathlib.Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]
