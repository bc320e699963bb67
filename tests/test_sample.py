"""The answer that appears while it is decoded: its text, the policies and the prompt."""

import dataclasses
import io
import json
import shutil
import sys
import types
from contextlib import nullcontext

import finished_run
import jax
import numpy as np
import pytest
from refusal import refused
from tiny_checkpoints import byte_tokens, gguf_metadata

from qerl_jax.commands import cli
from qerl_jax.commands import sample as command
from qerl_jax.compile import executable_cache
from qerl_jax.compile.count import count_compilations
from qerl_jax.compile.operation import Operation
from qerl_jax.compile.run_cache import set_cache_folder
from qerl_jax.data.prompts import Problem, Prompt
from qerl_jax.errors import UserError
from qerl_jax.evaluation import sample as sample_lib
from qerl_jax.evaluation.load_policy import open_policy, warn_of_another_base
from qerl_jax.evaluation.sample import SampleConfig, sample, stream_text
from qerl_jax.memory import report
from qerl_jax.memory.run_plan import Device
from qerl_jax.policy import transformer
from qerl_jax.policy.policy import Policy
from qerl_jax.rollout.config import EngineConfig, SamplingConfig
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.system.live_line import waiting
from qerl_jax.weights import tokenizer as tokenizer_lib


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    settings = {"data.system_prompt": "t20 t21", "data.question_suffix": " t22"}
    return finished_run.write_run(tmp_path_factory.mktemp("sample") / "run", tiny, **settings)


def byte_tokenizer():
    """Returns a tokenizer in which every byte is a token."""
    return tokenizer_lib.from_gguf(gguf_metadata("qwen2", byte_tokens("<|im_end|>")))


# --- The text -------------------------------------------------------------------------------------


def test_characters_appear_when_their_last_byte_is_there():
    tokenizer = byte_tokenizer()
    ids, written = tokenizer.encode("aé🌊b"), []
    show = stream_text(tokenizer, written.append)
    after = []
    for end in range(1, len(ids) + 1):
        show(ids[:end])
        after.append("".join(written))
    assert after == ["a", "a", "aé", "aé", "aé", "aé", "aé🌊", "aé🌊b"]


def test_incomplete_characters_are_shown_at_the_end():
    tokenizer = byte_tokenizer()
    ids, written = tokenizer.encode("a🌊")[:3], []
    show = stream_text(tokenizer, written.append)
    show(ids)
    assert written == ["a"]
    show(ids, final=True)
    assert "".join(written) == tokenizer.decode(ids)
    assert "\ufffd" in written[-1]


@pytest.mark.parametrize("seed", range(5))
def test_the_pieces_are_the_text(seed):
    tokenizer, written = byte_tokenizer(), []
    ids = np.random.default_rng(seed).integers(0, 257, 60).tolist()
    show = stream_text(tokenizer, written.append)
    for end in range(0, 60, 3):
        show(ids[:end])
    show(ids, final=True)
    assert "".join(written) == tokenizer.decode(ids)
    assert len(written) > 5


# --- Policies and prompts -------------------------------------------------------------------------


def answer(source, question="t3 t4", **options):
    """Returns what the sampler gives for the prompt of a run with the settings of the run."""
    policy = open_policy(str(source), **options)
    prompt = policy.model.tokenizer.encode(question)
    sampling = SamplingConfig(max_new_tokens=4, temperature=0.0)
    engine = EngineConfig(chunk_steps=4)
    sampler = Sampler(policy.model.config, policy.model.tokenizer, sampling, engine)
    dense = jax.jit(transformer.dequantize_params)(policy.model.params)
    rollout = sampler.rollout(jax.random.key(0), Policy(dense, policy.lora), [prompt])
    return policy.model.tokenizer.decode(rollout.tokens[0, : rollout.lengths[0]])


def test_a_run_stops_where_its_training_stops(run, tmp_path, capsys):
    run = shutil.copytree(run, tmp_path / "run")
    whole = answer(run, "t20 t21 t3 t4 t22 t1 t2").split()
    settings = json.loads((run / "config.json").read_text())
    settings["config"]["rollout"]["stop"] = [whole[1]]
    (run / "config.json").write_text(json.dumps(settings))
    sample(SampleConfig(source=str(run), question="t3 t4", adapter="adapter"))
    assert capsys.readouterr().out == " ".join(whole[: whole.index(whole[1]) + 1]) + "\n"
    with pytest.raises(UserError, match="the question: not valid Unicode: character 2 is the lone"):
        sample(SampleConfig(source=str(run), question="t\udc80", adapter="adapter"))


def test_a_run_shows_base_and_adapter(run, tiny, capsys):
    sample(SampleConfig(source=str(run), question="t3 t4"))
    captured = capsys.readouterr()
    prompt = "t20 t21 t3 t4 t22 t1 t2"  # the same prompt as in training
    base, adapted = answer(run, prompt, adapter="none"), answer(run, prompt)
    assert base != adapted
    assert captured.out == f"--- {tiny.model} in nvfp4\n{base}\n\n--- {run}/adapter\n{adapted}\n"
    lines = [line for line in captured.err.splitlines() if not line.startswith("compiling")]
    assert len(lines) == 2
    assert all(" tokens" in line for line in lines)


@pytest.mark.parametrize("adapter", ["none", "adapter"])
def test_a_named_policy_is_shown_alone(adapter, run, capsys):
    config = SampleConfig(source=str(run), question="t3", adapter=adapter, system="", suffix="")
    sample(config)
    expected = answer(run, "t3 t1 t2", adapter=adapter)
    assert capsys.readouterr().out == expected + "\n"


def test_a_run_that_trained_norms_has_them_in_the_second_answer(tiny, tmp_path):
    folder = finished_run.write_run(tmp_path / "run", tiny, norms=True)
    asked = sample_lib._policies(SampleConfig(source=str(folder), question="t3"))
    norms = [policy.model.params["layers"][0]["input_layernorm"] for _, policy, _ in asked]
    assert np.all(norms[0] == 1)
    assert not np.all(norms[1] == 1)
    assert [lora is None for _, _, lora in asked] == [True, False]


def test_a_program_that_does_not_fit_is_refused_before_the_answer(tiny, monkeypatch, capsys):
    monkeypatch.setattr(report, "this_device", lambda: Device(10**4, "xla", 0.0))
    config = SampleConfig(source=str(tiny.model), question="t3 t4", max_new_tokens=4)
    words = r"the program '\w+' takes .* that JAX has; lower --max-new-tokens"
    refused(words, sample, config)
    monkeypatch.setattr(report, "_compare", lambda *_, planned, held, remedy: [remedy])
    sample(config)
    assert "warning: --max-new-tokens" in capsys.readouterr().err


def test_samples_follow_the_seed(tiny, capsys):
    shown = []
    for seed in (0, 0, 1):
        options = {"max_new_tokens": 4, "temperature": 1.0, "seed": seed}
        sample(SampleConfig(source=str(tiny.model), question="t3", **options))
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"question": " \n"}, "question is empty"),
        ({"temperature": -1.0}, "--temperature=-1.0"),
        ({"temperature": float("nan")}, "--temperature=nan"),
        ({"top_p": 0.0}, "--top-p=0.0"),
        ({"top_p": 0.5}, "--top-p=0.5 with greedy decoding"),
        ({"seed": 1}, "--seed=1 with greedy decoding"),
        ({"max_new_tokens": 0}, "--max-new-tokens=0"),
        ({"max_new_tokens": 500}, "smaller --max-new-tokens"),
        (
            {"adapter": "best_adapter"},
            "no best_adapter yet: .* better than the one before training; --adapter=adapter is",
        ),
        ({"adapter": "absent"}, "--adapter=absent: there is no such folder.* has adapter;"),
    ],
)
def test_what_cannot_be_asked(options, named, run):
    refused(named, sample, SampleConfig(**({"source": str(run), "question": "t3"} | options)))


@pytest.mark.parametrize("adapter", ["", "none"])
def test_a_model_has_no_other_base(tiny, adapter):
    with pytest.raises(UserError, match=r"--base=other: .*model is itself the model"):
        open_policy(str(tiny.model), adapter=adapter, base="other")


@pytest.mark.parametrize(
    ("named", "used", "same"),
    [
        ("Qwen/Qwen2.5-7B", "/models/qwen2.5-7b/", True),
        ("Qwen/Qwen2.5-7B", "/cache/models--Qwen--Qwen2.5-7B/snapshots/0123abcd", True),
        ("/x/qwen2.5-7b.gguf", "Qwen/Qwen2.5-7B", True),
        ("", "Qwen/Qwen2.5-7B", True),
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct", False),
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-Coder-7B", False),
    ],
)
def test_an_adapter_of_another_base_is_told_once(named, used, same, tmp_path, capsys):
    for _ in range(2):
        warn_of_another_base(tmp_path, named, [used])
    said = capsys.readouterr().err
    assert said.count("\n") == (not same)
    assert same or f"{tmp_path} names the base {named}, and is used on {used}" in said


def test_the_base_of_the_command_line_may_be_another_one(tiny, run, tmp_path, capsys):
    open_policy(str(run))
    assert capsys.readouterr().err == ""
    other = shutil.copytree(tiny.model, tmp_path / "other")
    open_policy(str(run), base=str(other))
    said = f"warning: the adapter {run}/adapter names the base {tiny.model}, and is used on {other}"
    assert capsys.readouterr().err.startswith(said)


def test_a_question_from_stdin(tiny, monkeypatch, capsys):
    said = []
    monkeypatch.setattr(cli, "waiting", lambda text: nullcontext(said.append(text)))
    monkeypatch.setattr(sys, "stdin", io.StringIO("t3\n"))
    command.run(command.make_parser().parse_args([str(tiny.model), "-", "--max-new-tokens=4"]))
    assert capsys.readouterr().out == answer(tiny.model, "t3 t1 t2") + "\n"
    assert said == ["importing JAX and the package"]


def test_a_chat_keeps_the_conversation(run, monkeypatch, capsys):
    lines = "t3 t4\n\nt5\n/new\nt3 t4\n/quit\nt6\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    command.run(command.make_parser().parse_args([str(run), "--chat", "--max-new-tokens=4"]))
    first = answer(run, "t20 t21 t3 t4 t22 t1 t2")
    second = answer(run, f"t20 t21 t3 t4 t22 {first} t5 t22 t1 t2")
    captured = capsys.readouterr()
    assert captured.out == f"{first}\n{second}\n{first}\n"
    assert captured.err.startswith(f"--- {run}/adapter\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("t3 t4\n"))
    arguments = [str(run), "--chat", "--max-new-tokens=4", "--adapter=none"]
    command.run(command.make_parser().parse_args(arguments))
    base = answer(run, "t20 t21 t3 t4 t22 t1 t2", adapter="none")
    assert capsys.readouterr().out == f"{base}\n"
    for arguments in ([str(run)], [str(run), "t3", "--chat"]):
        with pytest.raises(UserError, match="pass a question, or --chat"):
            command.run(command.make_parser().parse_args(arguments))


def test_what_is_compiled_is_said(tiny, monkeypatch):
    said = []
    monkeypatch.setattr(sample_lib, "waiting", lambda text: (said.append(text), waiting(text))[1])
    sample(SampleConfig(source=str(tiny.model), question="t3", max_new_tokens=4))
    assert "compiling the programs of this prompt's length" in said


def test_a_chat_compiles_its_programs_once(run):
    programs = []

    def messages():
        for message in ("t3 t4", "t5", "t6 " * 9, "t7 " * 20, "t8 " * 30):
            programs.append(compilations.take()["compiled_programs"])
            yield message

    config = SampleConfig(source=str(run), question="", max_new_tokens=4)
    jax.clear_caches()  # Other tests have the same programs.
    with count_compilations() as compilations:
        sample_lib.chat(config, messages())
    assert programs[1] > 0
    assert programs[2:] == [0, 0, 0]
    assert compilations.take()["compiled_programs"] == 0


def test_a_second_start_loads_its_programs(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(executable_cache, "_is_used", lambda: True)
    lowered, lower = [], Operation.lower
    monkeypatch.setattr(Operation, "lower", lambda one: lowered.append(one) or lower(one))
    config = SampleConfig(source=str(tiny.model), question="t3", max_new_tokens=4)
    jax.clear_caches()  # Other tests have the same programs.
    with set_cache_folder(tmp_path / "programs"):
        sample(config)
        first = len(lowered)
        sample(dataclasses.replace(config, question="t3 " * 20))
    shown = capsys.readouterr().out.splitlines()
    assert len(lowered) == first > 0
    assert len(shown) == 2


@pytest.mark.parametrize(
    ("tokens", "new_tokens", "width"),
    [
        (1, 512, 256),
        (256, 512, 256),
        (257, 512, 512),
        (4097, 512, 8192),
        (8193, 512, 12288),
        (20000, 512, 20480),
        (32000, 512, 32256),
        (32000, 768, 32000),
    ],
)
def test_the_widths_of_prompts(tokens, new_tokens, width):
    prompt = Prompt(Problem("", ""), "", (0,) * tokens)
    model = types.SimpleNamespace(config=types.SimpleNamespace(max_position=32768))
    assert sample_lib._prompt_width(prompt, None, new_tokens, model) == width
    environments = types.SimpleNamespace(max_prompt_tokens=300)
    with_environments = sample_lib._prompt_width(prompt, environments, new_tokens, model)
    assert with_environments == max(width, 512)
