"""The site: every public name has an entry with an example, every config field a heading."""

import importlib.util
import inspect
import json
import pathlib
import re

import pytest

import qerl_jax
from qerl_jax.config.fields import FIELDS, Field

ROOT = pathlib.Path(__file__).resolve().parents[1]
API = "".join(path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md")))
# The text after each `::: qerl_jax.NAME`, up to the next one.
ENTRIES = re.findall(r"^::: qerl_jax\.(\w+)\n(.*?)(?=^:::|\Z)", API, re.MULTILINE | re.DOTALL)
PYTHON = (ROOT / "docs" / "python.md").read_text()


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "site" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_of_section(anchor):
    """The Python of the section of docs/python.md that an anchor names."""
    for section in PYTHON.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        if re.sub(r"\W+", "-", title.lower()) == anchor:
            return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    raise AssertionError(f"docs/python.md has no section {anchor}")


def test_every_public_name_has_one_entry():
    assert sorted(name for name, _ in ENTRIES) == sorted(qerl_jax.__all__)


@pytest.mark.parametrize(("name", "entry"), ENTRIES, ids=[name for name, _ in ENTRIES])
def test_an_entry_has_an_example(name, entry):
    """Code of its own, or a section of docs/python.md; test_python_page.py runs both."""
    blocks = re.findall(r"```python\n(.*?)```", entry, re.DOTALL)
    linked = re.findall(r"\]\(\.\./python\.md#([\w-]+)\)", entry)
    code = "\n".join([*blocks, *map(code_of_section, linked)])
    assert code
    if inspect.isfunction(getattr(qerl_jax, name)) or linked:  # A result has another name.
        assert re.search(rf"\b{name}\b", code)


@pytest.mark.parametrize("name", qerl_jax.__all__)
def test_a_docstring_explains_every_argument(name):
    value = getattr(qerl_jax, name)
    if value is qerl_jax.UserError:
        return
    section = "Attributes" if inspect.isclass(value) else "Args"
    _, _, entries = inspect.getdoc(value).partition(f"\n{section}:\n")
    explained = re.findall(r"^    (\w+(?:, \w+)*):", entries, re.MULTILINE)
    assert set(inspect.signature(value).parameters) <= set(", ".join(explained).split(", "))


def test_every_config_field_has_a_heading():
    page = (ROOT / "docs" / "config.md").read_text()
    fields = [row.name for row in FIELDS if isinstance(row, Field)]
    assert re.findall(r"^### `(.*)`$", page, re.MULTILINE) == fields
    assert "rollout.max_new_tokens" in fields


def test_the_config_page_opens_with_ten_fields():
    first, _, _ = (ROOT / "docs" / "config.md").read_text().partition("\n## ")
    rows = re.findall(r"^\| `([\w.]+)` \| .+ \|$", first, re.MULTILINE)
    assert len(rows) == len(set(rows)) == 10
    assert set(rows) <= {row.name for row in FIELDS}


def test_the_navigation_has_every_page(hooks):
    nav = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    outside = [uri for uri in hooks.site_paths().values() if uri.endswith(".md")]
    assert sorted(nav) == sorted(docs + outside)


@pytest.mark.parametrize(
    ("text", "source", "expected"),
    [
        ("[a](docs/gpu.md#x)", "README.md", "[a](gpu.md#x)"),
        ("[a](CHANGELOG.md)", "README.md", "[a](changelog.md)"),
        ("![a](docs/peers.svg)", "README.md", "![a](peers.svg)"),
        ("[a](../README.md#start)", "docs/gpu.md", "[a](index.md#start)"),
        ("[a](../python.md#x)", "docs/api/runs.md", "[a](../python.md#x)"),
        ("[a](../examples/own_reward.py)", "docs/gpu.md", "[a](examples/own_reward.md)"),
        ("`docs/gpu.md`", "docs/api/runs.md", "[`docs/gpu.md`](../gpu.md)"),
        ("`docs/gpu.md`", "README.md", "[`docs/gpu.md`](gpu.md)"),
        ("[`a`](https://a.b/docs/gpu.md)", "README.md", "[`a`](https://a.b/docs/gpu.md)"),
        ("`qerl_jax/rl/losses.py`", "README.md", "`qerl_jax/rl/losses.py`"),
        ("    cat `docs/gpu.md`", "README.md", "    cat `docs/gpu.md`"),
        ("```\n[a](docs/gpu.md)\n```", "README.md", "```\n[a](docs/gpu.md)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(hooks, text, source, expected):
    uri = hooks.site_paths().get(source, source.removeprefix("docs/"))
    assert hooks.with_links(text, source, uri) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\n\n    def f():\n\n        g\n\nb", "a\n\n```python\ndef f():\n\n    g\n```\n\nb\n"),
        ("a:\n\n    uv run x  # y", "a:\n\n```bash\nuv run x  # y\n```\n"),
        ("a\n\n    3 of 4", "a\n\n```text\n3 of 4\n```\n"),
        ("- a\n\n    b", "- a\n\n    b\n"),
        ("```\nx\n\n    y\n```", "```\nx\n\n    y\n```\n"),
    ],
)
def test_indented_blocks_name_their_language(hooks, text, expected):
    assert hooks.with_languages(text) == expected


def test_an_example_becomes_a_page(hooks, tmp_path, monkeypatch):
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    module, notebook = tmp_path / "a.py", tmp_path / "b.ipynb"
    module.write_text('"""A title.\n\n    run it\n"""\n\nx = 1\n')
    cell = {"cell_type": "code", "source": ["x\n", "y"], "outputs": [{"text": ["7\n"]}]}
    notebook.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": "# B"}, cell]}))
    assert hooks.example_page(module) == (
        "# A title\n\n    run it\n\n## a.py\n\n```python\nx = 1\n```\n"
    )
    assert hooks.example_page(notebook) == "# B\n\n```python\nx\ny\n```\n\n```text\n7\n```"
