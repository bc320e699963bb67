"""The server against verifiers 0.4, unchanged: its own record of an episode is the oracle.

QERL_VERIFIERS_PYTHON names the Python of an environment with verifiers 0.4.
"""

import json
import os
import pathlib
import subprocess

import pytest
import verifiers_episode
from agent_cases import Engine
from runner_cases import write_tokenizer

from qerl_jax.environments.chat import ChatWriter
from qerl_jax.weights.tokenizer import from_folder

PYTHON = os.environ.get("QERL_VERIFIERS_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="QERL_VERIFIERS_PYTHON names no Python with verifiers"),
]
CALL = {"name": "bash", "arguments": {"command": "echo The number is 7."}}
TURNS = [
    f"<think>\nLet me look.\n</think>\n\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
    "It is 7.",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tokenizer of SmolLM2 with some tokens of Qwen3, as a folder."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def episode(folder, tmp_path, kind):
    """The branches of an episode, and the record of its session."""
    (tmp_path / "guess.py").write_text(verifiers_episode.GUESS)
    tokenizer = from_folder(folder)
    end = tokenizer.encode("<|im_end|>")
    turns = [[*tokenizer.encode(text), *end] for text in TURNS]
    writer = ChatWriter(tokenizer, tokenizer.for_tools(), {}, "hermes")
    limits = {"vocab_size": tokenizer.vocab_size, "seconds": 120.0}
    with Engine(tokenizer, writer, answer=lambda ids: turns.pop(0), **limits) as engine:
        session = engine.open()
        url = f"{session.root_url}/v1" if kind == "train" else session.base_url
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        script = pathlib.Path(verifiers_episode.__file__)
        ended = subprocess.run(
            [PYTHON, script, url, session.key, folder, kind],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )
        lines = [line for line in ended.stdout.splitlines() if line.startswith("BRANCHES ")]
        assert lines, ended.stderr
        branches = json.loads(lines[0].removeprefix("BRANCHES "))
        engine.server.close(session.id, reward=branches[0]["reward"])
        return branches, engine.gateway.records()[0]


def test_rows_are_the_branches_of_verifiers(folder, tmp_path):
    (branch,), record = episode(folder, tmp_path, "train")
    ((row, end),) = record.trained_rows()
    assert branch["ids"] == row.ids[:end]
    mask, logprobs = [0] * end, [0.0] * end
    for turn in row.turns:
        mask[turn.start : turn.end] = [1] * len(turn.ids)
        logprobs[turn.start : turn.end] = turn.logprobs
    assert branch["mask"] == mask
    assert branch["logprobs"] == logprobs
    assert len(row.turns) == 2
    assert record.reward == 1.0


def test_its_other_client_takes_the_stream_of_the_chat_route(folder, tmp_path):
    (branch,), record = episode(folder, tmp_path, "eval")
    assert branch["reward"] == 1.0
    ((row, _),) = record.trained_rows()
    assert len(row.turns) == 2
