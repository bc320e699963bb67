"""The import graph: one direction between packages and between folders, and no circles."""

import ast
import functools
import graphlib
import pathlib
import subprocess
import sys

import pytest

import qerl_jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("pallas_kernels", "qerl_jax", "experiments", "benchmarks")
# The folders of qerl_jax by floor, the lowest first. A folder imports from lower floors only.
FLOORS = (
    ("errors",),
    ("system",),
    ("policy", "compile", "rewards", "config", "environments"),
    ("rollout", "rl", "weights", "run"),
    ("data", "memory", "processes", "show"),
    ("quantization",),
    ("evaluation",),
    ("training", "export"),
    ("commands",),
)
# Modules of qerl_jax that `training/step.py` reaches, imports inside of functions included.
MOST_OF_A_STEP = 70
FLOOR = {folder: number for number, floor in enumerate(FLOORS) for folder in floor}


def modules(root):
    """The paths of all modules of the packages by name."""
    found = {}
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def statements(tree, *, everywhere):
    """The import statements of a module; with `everywhere` also those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif everywhere or not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        ):
            yield from statements(node, everywhere=everywhere)


@functools.cache
def imports(root, *, everywhere=True):
    """The imports between modules of the packages: from each module's name to a set of names."""
    known = modules(root)
    graph = {}
    for name, path in known.items():
        graph[name] = set()
        for node in statements(parsed(path), everywhere=everywhere):
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


def folder(module):
    """The folder of a module directly under its package, or the module itself if it has none."""
    return ".".join(module.split(".")[:2])


def imports_of_folders(root):
    """The imports between folders, those inside functions included; packages are left out.

    A package's __init__ may import from its folders, which does not order them.
    """
    graph = {}
    for name, targets in imports(root).items():
        found = graph.setdefault(folder(name), set())
        found |= {folder(target) for target in targets} - {folder(name), *PACKAGES}
    return {name: targets for name, targets in graph.items() if name not in PACKAGES}


def circle(graph):
    """The names on a circle, first and last the same, or () without a circle."""
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return tuple(error.args[1])
    return ()


def qerl_edges():
    """The imports between modules of qerl_jax, without those of its __init__."""
    for name, targets in imports(ROOT).items():
        for target in targets:
            if name.startswith("qerl_jax.") and target.startswith("qerl_jax."):
                yield name, target


def test_imports_are_found():
    graph = imports(ROOT)
    assert "qerl_jax.policy.transformer" in graph["qerl_jax.rollout.decode"]
    assert "pallas_kernels.fp4_matmul" in graph["qerl_jax.policy.layers.linear"]
    assert "qerl_jax.errors" in graph["qerl_jax.commands.cli"]
    folders = imports_of_folders(ROOT)
    assert "pallas_kernels.fp4_matmul" in folders["pallas_kernels.decode"]
    assert "pallas_kernels.fp4_matmul" in folders["qerl_jax.policy"]


def reached(module, root=ROOT):
    """A module and everything that it imports, directly or through others."""
    graph, names, waiting = imports(root), set(), [module]
    while waiting:
        name = waiting.pop()
        if name not in names:
            names.add(name)
            waiting += graph[name]
    return names


def test_the_method_is_read_without_the_rest_of_the_house():
    """A step gets the model, the rewards and the processes handed in."""
    names = {name for name in reached("qerl_jax.training.step") if name.startswith("qerl_jax.")}
    assert len(names) <= MOST_OF_A_STEP, sorted(names)
    folders = {folder(name) for name in names}
    assert "qerl_jax.policy" in folders
    others = {"weights", "memory", "run", "evaluation", "export", "config", "commands"}
    assert not folders & {f"qerl_jax.{name}" for name in others}


def test_no_circles_between_modules():
    assert circle(imports(ROOT, everywhere=False)) == ()


def test_no_circles_between_folders():
    assert circle(imports_of_folders(ROOT)) == ()


def write_modules(root, texts):
    for package in PACKAGES:
        (root / package).mkdir()
        (root / package / "__init__.py").touch()
    for path, text in texts.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text)


def test_a_circle_and_what_a_module_reaches_would_be_found(tmp_path):
    write_modules(
        tmp_path,
        {
            "qerl_jax/a.py": "import qerl_jax.b\n",
            "qerl_jax/b.py": "if True:\n    from qerl_jax import c\n",
            "qerl_jax/c.py": "def f():\n    from qerl_jax.a import x\n",
            "qerl_jax/d.py": "",
        },
    )
    assert circle(imports(tmp_path, everywhere=False)) == ()
    assert set(circle(imports(tmp_path))) == {"qerl_jax.a", "qerl_jax.b", "qerl_jax.c"}
    assert reached("qerl_jax.a", tmp_path) == {"qerl_jax.a", "qerl_jax.b", "qerl_jax.c"}


def test_a_circle_between_folders_would_be_found(tmp_path):
    write_modules(
        tmp_path,
        {
            "pallas_kernels/a/x.py": "import pallas_kernels.b\n",
            "pallas_kernels/a/y.py": "",
            "pallas_kernels/b.py": "def f():\n    from pallas_kernels.a import y\n",
        },
    )
    assert circle(imports(tmp_path)) == ()
    found = circle(imports_of_folders(tmp_path))
    assert set(found) == {"pallas_kernels.a", "pallas_kernels.b"}


def test_packages_have_one_direction():
    for name, targets in imports(ROOT).items():
        rank = PACKAGES.index(name.split(".")[0])
        above = {target for target in targets if PACKAGES.index(target.split(".")[0]) > rank}
        assert not above, f"{name} imports {above}"


def test_folders_have_one_direction():
    for name, target in qerl_edges():
        source, imported = (module.split(".")[1] for module in (name, target))
        assert imported == source or FLOOR[imported] < FLOOR[source], f"{name} imports {target}"


def test_every_folder_has_a_floor_and_no_other_file_lies_beside_them():
    package = ROOT / "qerl_jax"
    names = {path.stem for path in package.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert names - {"__init__", "__pycache__"} == set(FLOOR)


def test_no_experiment_imports_another():
    for name, targets in imports(ROOT).items():
        if name.startswith("experiments."):
            others = {target for target in targets if target.startswith("experiments")}
            assert not others, f"{name} imports {others}"


def test_packages_are_light():
    packages = {name for name, path in modules(ROOT).items() if path.name == "__init__.py"}
    heavy = {f"pallas_kernels.{name}" for name in ("attention", "decode", "experts", "fp4_matmul")}
    kernels = {f"pallas_kernels.fp4_matmul.{name}" for name in ("mma", "sm90")}
    light = packages - heavy - kernels
    names = ", ".join(sorted(light))
    program = f"import sys, {names}\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_the_public_names_exist():
    for name in qerl_jax.__all__:
        _, _, attribute = qerl_jax._PUBLIC[name].partition(":")
        assert getattr(qerl_jax, name).__name__ == (attribute or name)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = qerl_jax.nonsense
