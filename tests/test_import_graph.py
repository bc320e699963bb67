"""Who imports whom: one direction between the packages and between the rooms, and no circles."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

import qerl_jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("pallas_kernels", "qerl_jax", "experiments", "benchmarks")
# `python -m experiments.benchmark_rollout` is another name for `python -m benchmarks.rollout`.
ALIASES = {("experiments.benchmark_rollout", "benchmarks.rollout.__main__")}
# What each room of qerl_jax, and each file beside them, may import of qerl_jax.
ALLOWED = {
    "errors": set(),
    "import_path": {"errors"},
    "buckets": set(),
    "worker_process": set(),
    "policy": {"import_path", "errors"},
    "rollout": {"policy", "buckets", "worker_process", "errors"},
    "rl": {"policy", "rollout", "buckets", "import_path", "worker_process", "errors"},
    "weights": {"policy", "errors"},
    "data": {"rl", "weights", "errors"},
    "statistics": set(),
    "run": {"statistics", "errors"},
    "evaluation": {"policy", "rollout", "rl", "weights", "data", "run"}
    | {"buckets", "statistics", "errors"},
    "export": {
        "policy",
        "rollout",
        "rl",
        "weights",
        "data",
        "evaluation",
        "run",
        "statistics",
        "errors",
    },
    "training": {"policy", "rollout", "rl", "weights", "data", "evaluation", "run", "errors"},
}


def modules(root):
    """The paths of all modules of the packages by name."""
    found = {}
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def statements(tree, *, everywhere):
    """The import statements of a module, with everywhere those inside functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif everywhere or not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        ):
            yield from statements(node, everywhere=everywhere)


def imports(root, *, everywhere=True):
    """The modules of the packages that each of them imports."""
    known = modules(root)
    graph = {}
    for name, path in known.items():
        graph[name] = set()
        for node in statements(ast.parse(path.read_text()), everywhere=everywhere):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                assert node.level == 0, f"{path}:{node.lineno}: a relative import"
                members = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [member if member in known else node.module for member in members]
            for target in targets:
                if target.split(".")[0] in PACKAGES:
                    assert target in known, f"{path}:{node.lineno}: no module {target}"
                    graph[name].add(target)
    return graph


def room(module):
    return module.split(".")[1]


def qerl_edges():
    """The imports between modules of qerl_jax, its own __init__ left out."""
    for name, targets in imports(ROOT).items():
        for target in targets:
            if name.startswith("qerl_jax.") and target.startswith("qerl_jax."):
                yield name, target


def test_there_is_something_to_look_at():
    graph = imports(ROOT)
    assert "qerl_jax.policy.transformer" in graph["qerl_jax.rollout.decode"]
    assert "pallas_kernels.fp4_matmul" in graph["qerl_jax.policy.linear"]
    assert "qerl_jax.errors" in graph["experiments.cli"]


def test_no_circles():
    order = tuple(graphlib.TopologicalSorter(imports(ROOT, everywhere=False)).static_order())
    assert len(order) == len(modules(ROOT))


def test_no_circles_between_the_folders_of_pallas_kernels():
    """Imports inside functions count, and a file beside the folders is a folder of its own."""
    folders = {}
    for name, targets in imports(ROOT).items():
        for target in targets:
            parts, others = name.split("."), target.split(".")
            if parts[0] == others[0] == "pallas_kernels" and len(others) > 1:
                found = folders.setdefault(parts[1], set())
                if parts[1] != others[1]:
                    found.add(others[1])
    assert folders["fp4_matmul"] >= {"device", "matvec"}
    tuple(graphlib.TopologicalSorter(folders).static_order())


def test_a_circle_would_be_found(tmp_path):
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    (tmp_path / "qerl_jax/a.py").write_text("import qerl_jax.b\n")
    (tmp_path / "qerl_jax/b.py").write_text("if True:\n    from qerl_jax import c\n")
    (tmp_path / "qerl_jax/c.py").write_text("def f():\n    from qerl_jax.a import x\n")
    (tmp_path / "qerl_jax/__init__.py").touch()
    tuple(graphlib.TopologicalSorter(imports(tmp_path, everywhere=False)).static_order())
    with pytest.raises(graphlib.CycleError):
        tuple(graphlib.TopologicalSorter(imports(tmp_path)).static_order())


def test_packages_have_one_direction():
    for name, targets in imports(ROOT).items():
        rank = PACKAGES.index(name.split(".")[0])
        above = {
            target
            for target in targets
            if PACKAGES.index(target.split(".")[0]) > rank and (name, target) not in ALIASES
        }
        assert not above, f"{name} imports {above}"


def test_rooms_have_one_direction():
    for name, target in qerl_edges():
        allowed = ALLOWED[room(name)] | {room(name)}
        assert room(target) in allowed, f"{name} imports {target}"


def test_no_experiment_imports_another():
    for name, targets in imports(ROOT).items():
        if name.startswith("experiments."):
            shared = ("experiments.cli", "experiments.configs")
            others = {
                target
                for target in targets
                if target.startswith("experiments") and not target.startswith(shared)
            }
            assert not others, f"{name} imports {others}"
            if name.startswith(shared):
                assert "experiments.cli" not in targets, f"{name} imports experiments.cli"


def test_packages_are_light():
    packages = {name for name, path in modules(ROOT).items() if path.name == "__init__.py"}
    heavy = {"pallas_kernels.decode", "pallas_kernels.fp4_matmul"}
    light = packages - heavy - {"pallas_kernels.fp4_matmul.sm90"}
    names = ", ".join(sorted(light))
    program = f"import sys, {names}\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_the_public_names_exist():
    for name in qerl_jax.__all__:
        assert getattr(qerl_jax, name).__name__ == name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = qerl_jax.nonsense
