"""The peers: what their commands refuse, their rows, and the tables and picture made from them."""

import importlib.metadata
import itertools
import json
import os
import sys
import types

import gguf_cases
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_checkpoints import model_config
from transformers import PreTrainedTokenizerFast

from benchmarks import loading, pictures, step_tables
from benchmarks import step as own_step
from benchmarks.peers import decode, rows, serve, step, update
from benchmarks.random_checkpoint import model_folder, word, write_random
from qerl_jax.errors import UserError
from qerl_jax.policy import architectures

CARD = "NVIDIA H100 80GB HBM3"


def row(peer="TRL + vLLM", model="qwen2.5-7b", batch=8, rollout_format="bf16", **changes):
    given = {
        "peer": peer,
        "packages": "trl 1.16.0, vllm 0.22.0",
        "model": model,
        "format": "bf16",
        "rollout_format": rollout_format,
        "batch": batch,
        "prompt": 256,
        "new_tokens": 2048,
        "rollout_s": 12.0,
        "update_s": 3.0,
        "step_s": 15.0,
        "peak_gb": 61.0,
        "our_rollout_s": 5.0,
        "our_update_s": 1.0,
        "our_step_s": 6.0,
        "our_peak_gb": 22.0,
        "device": CARD,
        "commit": "0123456789abcdef",
    }
    return given | changes


def step_row(**changes):
    given = {
        "model": "qwen2.5-7b",
        "format": "nvfp4",
        "batch": 8,
        "group": 8,
        "prompt": 256,
        "new_tokens": 2048,
        "lora_rank": 32,
        "updates": 1,
        "mean_length": 0,
        "devices": 1,
        "rollout_s": 5.0,
        "update_s": 1.0,
        "step_s": 6.0,
        "peak_gb": 22.0,
        "device": "cpu",
        "commit": "abc",
    }
    return given | changes


def arguments(tmp_path, module=decode, **changes):
    paths = [f"--folder={tmp_path / 'm'}", f"--ours={tmp_path / 'o.json'}"]
    parsed = module.make_parser().parse_args([*paths, f"--out={tmp_path / 'p.json'}"])
    for name, value in changes.items():
        setattr(parsed, name, value)
    return parsed


def test_a_missing_package_is_one_line():
    version = importlib.metadata.version("numpy")
    assert rows.installed("numpy==1.0") == f"numpy {version}"
    with pytest.raises(UserError) as caught:
        rows.installed("numpy==1.0 no-such-engine==2.0")
    assert str(caught.value) == (
        "no-such-engine: not installed; this peer needs an environment with: pip install "
        "numpy==1.0 no-such-engine==2.0"
    )


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        (decode, {"rows": 1}, "--rows"),
        (decode, {"model": "qwen9"}, "qwen9"),
        (decode, {"new_tokens": 16}, "--new-tokens"),
        (step, {"rollout_format": "nf4"}, "--rollout-format=nf4 needs --format=nf4"),
        (step, {"micro": 3}, "--micro=3: pass a divisor of --rows=8"),
        (step, {"micro": -1}, "--micro=-1: pass a divisor of --rows=8"),
        (update, {"steps": 0}, "--steps"),
    ],
)
def test_bad_arguments_are_refused_first(module, changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        module.run(arguments(tmp_path, module, **changes))


_PLACES = {
    "folder": "it is a folder; pass a file as --out",
    "file/new/out.json": "could not be written: Not a directory",
    "/proc/absent/out.json": "could not be written",
}
_OTHERS = dict.fromkeys(("file", "other.json"), "holds no rows of this benchmark")


@pytest.mark.parametrize(
    ("module", "required", "outs"),
    [
        (own_step, "", _PLACES | _OTHERS),
        (loading, "--folder=absent", _PLACES | _OTHERS),
        (decode, "--folder=absent --ours=absent", _PLACES | _OTHERS),
        (serve, "absent --base=absent", _PLACES),  # It replaces its file.
    ],
)
def test_an_out_that_cannot_be_written_is_refused_first(
    module, required, outs, tmp_path, monkeypatch
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("no JSON")
    (tmp_path / "other.json").write_text('{"rows": [{"model": "qwen2.5-7b"}]}')
    monkeypatch.setattr(own_step, "measure", None)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for out, message in outs.items():
        given = module.make_parser().parse_args([*required.split(), f"--out={tmp_path / out}"])
        with pytest.raises(UserError, match=message):
            module.run(given)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_row_is_compared_with_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "device_name", lambda: CARD)
    parsed, ours = arguments(tmp_path), step_row(device=CARD)
    command = (
        "python -m benchmarks.step --model=qwen2.5-7b --format=nvfp4 --group=8 --prompt=256 "
        f"--new-tokens=2048 --lora-rank=32 --out={parsed.ours}"
    )
    with pytest.raises(UserError, match=command):
        rows.begin(parsed, "numpy")
    others = [step_row(), ours | {"format": "bf16"}, ours | {"new_tokens": 512}]
    parsed.ours.write_text(json.dumps({"rows": others}))
    with pytest.raises(UserError, match=f"holds no row of {CARD} to compare with"):
        rows.begin(parsed, "numpy")
    parsed.ours.write_text(json.dumps({"rows": [*others, ours | {"step_s": 7.0}]}))
    begun = rows.begin(parsed, "numpy")
    assert (begun["our_step_s"], begun["our_commit"], begun["device"]) == (7.0, "abc", CARD)
    measured = {"peer": "vLLM", "format": "bf16", "rollout_format": "bf16", "peak_gb": None}
    for rollout_s in (9.0, 8.0):  # The second row replaces the first.
        times = {"rollout_s": rollout_s, "update_s": None, "step_s": None}
        rows.save(parsed, "benchmarks.peers.decode", begun | measured | times)
    (saved,) = json.loads(parsed.out.read_text())["rows"]
    wanted = {"peer", "packages", "model", "format", "batch", "prompt", "new_tokens", "update_s",
              "step_s", "peak_gb", "device", "commit", "date", "command", "our_rollout_s",
              "our_update_s", "our_peak_gb"}  # fmt: skip
    assert wanted <= saved.keys()
    assert saved["rollout_s"] == 8.0
    rows.save(parsed, "benchmarks.peers.decode", begun | measured | {"lora_rank": 16})
    assert [row["lora_rank"] for row in json.loads(parsed.out.read_text())["rows"]] == [16, 32]


def test_a_clock_tells_rollouts_from_steps(monkeypatch):
    times = iter([0.0, 2.0, 5.0, 9.0])  # a step begins, its rollout begins and ends, the step ends
    monkeypatch.setattr(step, "now", lambda: next(times))
    clock = step.Clock()
    clock.begin()
    assert clock.rollout(lambda value: value + 1)(1) == 2
    clock.end()
    assert (clock.rollouts, clock.steps) == ([3.0], [9.0])


class FakeTrainer:
    """Takes the steps of TRL's trainer: a rollout in each."""

    def __init__(self, **options):
        self.__dict__.update(options)

    def train(self):
        for _ in range(self.args.max_steps):
            self.callbacks[0].on_step_begin()
            rows = self.rollout_func(["a b"] * self.args.num_generations, self)
            self.completions = rows["completion_ids"]
            self.callbacks[0].on_step_end()


def test_a_drawn_step_is_the_update_alone(tmp_path, monkeypatch):
    trainers, saved, needed = [], {}, []

    def trainer(**options):
        trainers.append(FakeTrainer(**options))
        return trainers[-1]

    def begin(arguments, requirements):
        needed.extend(requirements.split())
        return {}

    cuda = types.SimpleNamespace(max_memory_allocated=lambda: 5e9)
    trl = types.SimpleNamespace(GRPOConfig=types.SimpleNamespace, GRPOTrainer=trainer)
    datasets = types.SimpleNamespace(Dataset=types.SimpleNamespace(from_dict=lambda rows: rows))
    transformers = types.SimpleNamespace(
        TrainerCallback=object,
        PreTrainedTokenizerFast=types.SimpleNamespace(
            from_pretrained=lambda folder: lambda texts: {"input_ids": [[1, 2]] * len(texts)}
        ),
    )
    fakes = {"torch": types.SimpleNamespace(cuda=cuda), "trl": trl, "datasets": datasets}
    for name, module in (fakes | {"transformers": transformers}).items():
        monkeypatch.setitem(sys.modules, name, module)
    model = types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=7))
    monkeypatch.setattr(update, "load_policy", lambda arguments: model)
    monkeypatch.setattr(update, "reset_peak", lambda: None)
    monkeypatch.setattr(decode, "engine_fraction", lambda *_: 0.5)
    monkeypatch.setattr(decode, "set_environment", lambda: None)
    monkeypatch.setattr(rows, "begin", begin)
    monkeypatch.setattr(rows, "save", lambda arguments, module, row: saved.update(row))
    times = (float(number**2) for number in itertools.count())
    monkeypatch.setattr(step, "now", lambda: next(times))
    step.run(arguments(tmp_path, step, drawn=True, micro=2, liger=True, new_tokens=5, steps=1))

    # The second step begins at 16 and ends at 49, and its rollout takes from 25 to 36.
    assert (saved["rollout_s"], saved["update_s"], saved["step_s"]) == (None, 22, None)
    assert (saved["peer"], saved["rollout_format"], saved["micro"]) == ("TRL", "", 2)
    names = [requirement.partition("==")[0] for requirement in needed]
    assert "vllm" not in names
    assert {"torch", "trl", "liger-kernel"} <= set(names)
    (trainer_made,) = trainers
    given = trainer_made.args
    assert (given.per_device_train_batch_size, given.gradient_accumulation_steps) == (2, 4)
    assert (given.num_generations, given.use_vllm, given.use_liger_kernel) == (8, False, True)
    drawn = trainer_made.completions
    assert [len(tokens) for tokens in drawn] == [5] * 8
    assert {token for tokens in drawn for token in tokens} == set(range(1, 7))


def test_what_the_user_sets_for_vllm_stays(monkeypatch):
    monkeypatch.setattr(os, "environ", {"VLLM_LOGGING_LEVEL": "INFO"})
    decode.set_environment()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_the_fastest_rollouts_of_a_peer_count():
    slow = row("QLoRA", rollout_format="nf4", step_s=30.0)
    rows = [row("QLoRA", model="qwen2.5-14b"), slow, row("QLoRA"), row(), row(batch=2)]
    steps = step_tables.peer_steps([*rows, row("vLLM", step_s=None)])
    assert [key[:2] for key in steps] == [
        ("qwen2.5-7b", 2), ("qwen2.5-7b", 8), ("qwen2.5-14b", 8),
    ]  # fmt: skip
    assert [found["peer"] for found in steps["qwen2.5-7b", 8, 256, 2048, CARD]] == [
        "QLoRA", "TRL + vLLM",
    ]  # fmt: skip
    assert slow not in steps["qwen2.5-7b", 8, 256, 2048, CARD]


def test_the_tables_of_peers():
    own = step_row(format="bf16", device=CARD, rollout_s=11.0, step_s=12.0, peak_gb=31.0)
    lines = step_tables.peer_steps_table([row(), row(batch=2)], [own]).splitlines()
    assert lines[0] == (
        "| model | completions | here, NVFP4 | here, bf16 LoRA | TRL + vLLM | commit |"
    )
    assert lines[3] == (
        "| qwen2.5-7b | 8 x 256 + 2,048 | 6.0 s (5.0 + 1.0), 22.0 GB, 2,731 tokens/s; 2.0x faster "
        "than bf16 LoRA here, 2.5x faster than TRL + vLLM | 12.0 s (11.0 + 1.0), 31.0 GB, 1,365 "
        "tokens/s | 15.0 s (12.0 + 3.0), 61.0 GB, 1,092 tokens/s | 01234567 |"
    )
    assert "|  |" in lines[2]  # no row in bf16 of 2 completions
    parts = step_tables.peer_parts_table([row("vLLM", update_s=None, step_s=None)])
    assert (
        "| vLLM | qwen2.5-7b | bf16 | 8 x 256 + 2,048 | 12.00 | 5.00 (2.4x faster) |  |  | 61.0 |"
        in (parts)
    )
    (line,) = (line for line in parts.splitlines() if "| vLLM |" in line)
    assert line.endswith("| 61.0 |  | 01234567 |")  # Our peak is that of an update.
    assert "| 61.0 | 22.0 | 01234567 |" in step_tables.peer_parts_table([row()])
    rows = [row("QLoRA", step_s=18.0), row(batch=8)]
    short = step_tables.short_steps_table(rows, [own]).splitlines()
    assert short[0] == "| model | here, NVFP4 | here, bf16 LoRA | QLoRA | TRL + vLLM |"
    assert short[2] == (
        "| qwen2.5-7b | 6.0 s, 22.0 GB: **2.5x faster than TRL + vLLM** | 12.0 s, 31.0 GB "
        "| 18.0 s, 61.0 GB | 15.0 s, 61.0 GB |"
    )
    assert step_tables.faster(6.0, 6.0) == "1.0x faster"
    assert step_tables.faster(5.0, 6.0) == "1.2x slower"


def test_decode_steps_of_vllm_are_compared_with_ours():
    measured = [(32, 1, 4.0), (32, 8, 5.0), (0, 1, 3.0)]
    names = ("lora_rank", "batch", "ms_per_step")
    rows = [dict(zip(names, row, strict=True)) | {"our_ms_per_step": 2.0} for row in measured]
    assert step_tables.decode_of_vllm_table(rows).splitlines() == [
        "|  | 1 | 8 |",
        "| --- | --- | --- |",
        "| vLLM, no adapter | 3.00 (1.50x) |  |",
        "| vLLM, LoRA rank 32 | 4.00 (2.00x) | 5.00 (2.50x) |",
        "| here, LoRA rank 32 | 2.00 | 2.00 |",
    ]


def test_what_is_said_of_the_peers_together():
    alone = row("vLLM", rollout_s=12.0, packages="vllm 1, torch 2")
    qlora = row("TRL (QLoRA) + vLLM", format="nf4", rollout_s=15.5, packages="torch 2, trl 3")
    assert step_tables.peer_packages([alone, qlora]) == "vllm 1, torch 2, trl 3"
    text = step_tables.adapter_seconds([qlora, alone, row(rollout_s=30.0)])
    assert text == "3.5 s (qwen2.5-7b)"
    assert not step_tables.adapter_seconds([qlora | {"rollout_format": "nf4"}, alone])


def test_the_picture_of_peers(tmp_path, monkeypatch):
    (tmp_path / "peers.json").write_text(json.dumps({"rows": [row(), row(batch=2)]}))
    monkeypatch.setattr(pictures, "_RESULTS", tmp_path)
    data = pictures.peers_data()
    assert data["qwen2.5-7b"]["rows"] == 8
    assert data["qwen2.5-7b"]["steps"] == {
        "here, NVFP4": {"rollout_s": 5.0, "update_s": 1.0, "step_s": 6.0},
        "TRL + vLLM": {"rollout_s": 12.0, "update_s": 3.0, "step_s": 15.0},
    }
    figure = pictures.draw_peers(data)
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [5.0, 12.0, 1.0, 3.0]
    assert [bar.get_x() for bar in axes.patches] == [0.0, 0.0, 5.0, 12.0]
    pictures.save(figure, tmp_path / "x.svg", data)
    assert pictures.data_in(tmp_path / "x.svg") == data


def test_a_random_checkpoint_has_what_transformers_requires(tmp_path):
    size = write_random(tmp_path / "m", model_config("qwen2"), packed=False, shard_bytes=10_000)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": size}
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    held = {file: set(load_file(tmp_path / "m" / file)) for file in files}
    assert {name: file for file, names in held.items() for name in names} == index["weight_map"]


def test_a_prompt_has_as_many_tokens_as_words(tmp_path, monkeypatch):
    monkeypatch.setitem(architectures.ARCHITECTURES, "tiny", model_config("qwen2"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder(tmp_path / "m", "tiny"))
    assert tokenizer([" ".join(map(word, (5, 1, 7)))])["input_ids"] == [[5, 1, 7]]


def half_right(prompt, completion, answer, num_tokens, finished):
    return 0.8 if "7" in completion else None


def test_what_serve_compares(tmp_path):
    settings = {"system_prompt": "Think.", "question_suffix": "!", "max_new_tokens": 8}
    settings |= {"judge": "qerl_jax.rewards.functions:boxed_answer"}
    results = {"settings": {"samples": 1, "temperature": 0.0}, "tasks": {"gsm8k": settings}}
    with pytest.raises(UserError, match="has no results"):
        serve.read_evaluation(tmp_path, "gsm8k")
    (tmp_path / "results.json").write_text(json.dumps(results))
    rows = [
        {"question": "q", "gold": "7", "completion": r"\boxed{7}", "correct": True},
        {"question": "r", "gold": "8", "completion": "none", "correct": False},
    ] * 10
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert serve.read_evaluation(tmp_path, "gsm8k") == (settings, rows)
    others = {"settings": results["settings"], "tasks": {"gsm8k": settings | {"judge": "a:b"}}}
    (tmp_path / "results.json").write_text(json.dumps(others))
    with pytest.raises(UserError, match=r"names the reward 'a:b'.* --judge=a:b"):
        serve.read_evaluation(tmp_path, "gsm8k")
    assert serve.read_evaluation(tmp_path, "gsm8k", "a:b")[0]["judge"] == "a:b"
    with pytest.raises(UserError, match="no task math500, only gsm8k"):
        serve.read_evaluation(tmp_path, "math500")
    results["settings"]["samples"] = 8
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(UserError, match="not greedy"):
        serve.read_evaluation(tmp_path, "gsm8k")
    assert serve.messages_of(settings, "q") == [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "q!"},
    ]
    shots = serve.messages_of(settings | {"examples": ["a", "b"], "system_prompt": ""}, "q")
    assert [(one["role"], one["content"]) for one in shots] == [
        ("user", "a!"), ("assistant", "b"), ("user", "q!")
    ]  # fmt: skip
    served = [(r"\boxed{7.0}", 4, True), (r"\boxed{9}", 4, True)] * 10
    assert serve.scored(settings, rows, served) == [True, False] * 10
    # What counts in an evaluation: more than 0.5 is correct, a missing score is not.
    assert serve.scored(settings | {"judge": f"{__name__}:half_right"}, rows, served) == [
        True, False,
    ] * 10  # fmt: skip
    missing = [rows[0], rows[1] | {"correct": None}] * 10
    again = serve.compare(missing, [text for text, *_ in served], [True, False] * 10, engine="vllm")
    assert (again["here"]["value"], again["same_outcome"], again["agrees"]) == (0.5, 1.0, True)
    same = serve.compare(rows, [text for text, *_ in served], [True, False] * 10, engine="vllm")
    assert (same["here"]["value"], same["vllm"]["value"], same["agrees"]) == (0.5, 0.5, True)
    assert (same["same_outcome"], same["same_text"]) == (1.0, 0.0)
    texts = [row["completion"] for row in rows]
    worse = serve.compare(rows, texts, [False] * 20, engine="transformers")
    assert worse["transformers"]["value"] == 0.0
    assert (worse["difference"]["value"], worse["agrees"], worse["same_text"]) == (-0.5, False, 1.0)


def test_llama_cpp_is_compared_by_tokens(monkeypatch, tmp_path):
    tokenizer = gguf_cases.tokenizer_of("qwen2")
    end, texts = tokenizer.eos_ids[0], ["ab", "abc", "b"]
    answers = [[*tokenizer.encode("ab"), end], tokenizer.encode("xbcd"), [end]]
    found = {f"new{number}": np.array(tokens) for number, tokens in enumerate(answers)}
    asked = []

    def llama_cpp(arguments, prompts, **job):
        asked.append((prompts, job))
        return found

    monkeypatch.setattr(serve, "_llama_cpp", llama_cpp)
    monkeypatch.setattr(serve, "_tokenizer_of", lambda file: tokenizer)
    settings = {"system_prompt": "Think.", "question_suffix": "!", "max_new_tokens": 4}
    settings |= {"stop": [], "chat_template_args": {}}
    problems = [{"question": "q", "completion": text} for text in texts]
    options = [str(tmp_path), "--base=b/base.gguf", f"--out={tmp_path / 'o.json'}"]
    options = serve.make_parser().parse_args([*options, "--engine=llama.cpp"])
    served = serve.complete_with_llama_cpp(options, settings, problems)
    assert served == [("ab", 2, True), ("xbcd", 4, False), ("", 1, True)]
    assert asked == [(["Think.q!"] * 3, {"new": 4, "scored": 0})]
    result = serve.compare_with_llama_cpp(
        options, settings, problems, [text for text, *_ in served]
    )
    assert result["first_token"] == pytest.approx(1 / 3)
    with pytest.raises(UserError, match="stop strings"):
        serve.complete_with_llama_cpp(options, settings | {"stop": ["x"]}, problems)
    # Answers that are kept are not asked for again.
    options.answers, part = tmp_path / "a.jsonl", problems[:2]
    assert serve.complete_with_llama_cpp(options, settings, part) == served[:2]
    found["new0"] = found["new2"]
    assert serve.complete_with_llama_cpp(options, settings, problems) == served
    assert serve.complete_with_llama_cpp(options, settings, part) == served[:2]
    assert [len(prompts) for prompts, _ in asked] == [3, 2, 1]
    with pytest.raises(UserError, match="other problems"):
        serve.complete_with_llama_cpp(options, settings, [problems[0] | {"question": "r"}])
