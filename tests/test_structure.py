"""The size of functions, and what modules do not import.

The imports between the project's packages and folders are in test_import_graph.py.
"""

import ast
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
PRODUCT = ("qerl_jax", "pallas_kernels", "experiments", "benchmarks")
FUNCTION_LINES = 100


def read(pattern, root=ROOT):
    """The text of the files that match, by path from the root."""
    paths = sorted(root.glob(pattern))
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}


def product():
    return {path: text for name in PRODUCT for path, text in read(f"{name}/**/*.py").items()}


@functools.cache
def nodes(text):
    """The imports and functions of a module."""
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]


def long_functions(files):
    """Path, name and number of lines, signature and docstring included, of long functions."""
    return [
        (path, node.name, node.end_lineno - node.lineno + 1)
        for path, text in files.items()
        for node in nodes(text)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= FUNCTION_LINES
    ]


def imports(files):
    """Path, line and full name of everything that is imported, inside functions too."""
    for path, text in files.items():
        for node in nodes(text):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    yield path, node.lineno, module + alias.name


def private_imports(files):
    """The imports of modules of JAX that may change without notice."""
    return [found for found in imports(files) if found[2].startswith("jax._src")]


def imports_of_tests(files):
    """The imports of modules that pytest collects; most tests have none and are not parsed."""
    some = {p: text for p, text in files.items() if re.search(r"\b(from|import)\b.*\btest_", text)}
    return [
        (path, line, name)
        for path, line, name in imports(some)
        if any(f"tests/{part}.py" in files for part in name.split(".") if part.startswith("test_"))
    ]


def test_functions_are_short():
    assert long_functions(product()) == []


def test_long_functions_are_found():
    body = "        pass\n" * (FUNCTION_LINES - 1)
    text = f"class A:\n    def fits(self):\n{body}    def long(self):\n{body}        pass\n"
    assert long_functions({"a.py": text}) == [("a.py", "long", FUNCTION_LINES + 1)]


def test_jax_is_used_through_its_public_modules():
    assert private_imports(product()) == []


def test_no_module_uses_the_backend_that_jax_is_going_to_remove():
    """Pallas's Triton backend is deprecated since JAX 0.11."""
    names = [name for *_, name in imports(product())]
    assert "jax.experimental.pallas.mosaic_gpu" in names
    assert [name for name in names if "triton" in name] == []


# A path of the user that is taken as it is: `~` stays in it, see `qerl_jax.system.paths.user_path`.
PLAIN_PATH = re.compile(r"type=(?:pathlib\.)?Path\b|\bPath\((?:arguments|args|config)\.")


def test_the_home_folder_is_expanded_in_paths_of_the_user():
    assert {path for path, text in product().items() if PLAIN_PATH.search(text)} == set()
    for text in ("type=pathlib.Path,", "type=Path)", "Path(arguments.out)", "Path(config.source)"):
        assert PLAIN_PATH.search(text)
    assert not PLAIN_PATH.search("type=user_path, Path(arguments)")


def test_one_function_tells_import_paths_from_names():
    asked = re.compile(r'":" (?:not )?in ')
    places = [path for path, text in product().items() if asked.search(text)]
    assert places == ["qerl_jax/system/import_path.py"]


def test_no_test_module_imports_another():
    assert imports_of_tests(read("tests/**/*.py")) == []


def test_imports_are_found():
    files = {
        "tests/test_a.py": "def f():\n    from jax._src import core\n\nimport jax, test_b\n",
        "tests/test_b.py": "from test_a import f\nfrom test_tools import g\n",
    }
    assert private_imports(files) == [("tests/test_a.py", 2, "jax._src.core")]
    assert imports_of_tests(files) == [
        ("tests/test_a.py", 4, "test_b"),
        ("tests/test_b.py", 1, "test_a.f"),
    ]
