"""Exports of runs: the content of the folders, and what cannot be exported."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import finished_run
import gguf
import gguf_cases
import jax
import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoints
import tiny_run
import transformers
import trees
import yaml
from refusal import refused
from tiny_model import assert_transformers_agrees

from qerl_jax.commands import evaluate
from qerl_jax.commands import export as export_command
from qerl_jax.errors import UserError
from qerl_jax.evaluation.greedy import GreedyScore
from qerl_jax.evaluation.load_policy import open_policy
from qerl_jax.evaluation.results_folder import EvaluateConfig, locate_results
from qerl_jax.export import card_scores, merge, model_card
from qerl_jax.export import write as export_lib
from qerl_jax.export.model_card import Card, serve_lines
from qerl_jax.export.write import ExportConfig, export
from qerl_jax.policy import transformer
from qerl_jax.policy.layers.kinds import projection_shapes
from qerl_jax.policy.quant import QuantTensor, dequantize
from qerl_jax.policy.trainable import Trainable
from qerl_jax.run.folder import RunFolder
from qerl_jax.training.saving import save_policy
from qerl_jax.weights import safetensors
from qerl_jax.weights.load import load
from qerl_jax.weights.peft import save_peft_adapter
from qerl_jax.weights.save import checkpoint_tensors, companion_files, write_checkpoint

GOLDEN = Path(__file__).parent / "golden"
TOKENS = np.arange(2, 12, dtype=np.int32)[None]


forward = jax.jit(transformer.forward, static_argnames="config")


def logits(policy):
    lengths = np.array([TOKENS.shape[1]])
    config = policy.model.config
    return forward(policy.model.params, policy.lora, TOKENS, lengths, config=config)


def run_export(source, form, **options):
    options = {"score_problems": 0} | options
    return export(ExportConfig(source=str(source), format=form, **options))


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    return finished_run.write_run(tmp_path_factory.mktemp("run") / "mine", tiny, own=True)


# --- Mixtures of experts --------------------------------------------------------------------------


def mixture_export(family, form, folder, name="default", **options):
    """An export of PEFT's adapter of a tiny mixture: of its default targets, or experts as well."""
    adapter = GOLDEN / "peft_experts" / family / name
    out = run_export(adapter, form, base=str(GOLDEN / family), out=str(folder), **options)
    policy = open_policy(str(adapter), base=str(GOLDEN / family), format="bf16", dtype="float32")
    return out, policy


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "qwen3_5_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)]
)
def test_a_mixture_is_merged(family, tmp_path):
    out, policy = mixture_export(family, "merged", tmp_path / "out")
    tensors = safetensors.read_folder(out)
    stacked = "model.layers.0.mlp.experts.gate_up_proj" in tensors
    assert stacked == (family != "qwen3_moe")  # as each family is published
    assert ("model.layers.0.mlp.experts.3.up_proj.weight" in tensors) != stacked
    config = transformers.AutoConfig.from_pretrained(out)
    classes = {"qwen3_moe": "Qwen3MoeForCausalLM", "gpt_oss": "GptOssForCausalLM"}
    assert config.architectures == [classes.get(family, "Qwen3_5MoeForCausalLM")]
    merged = load(str(out), format="stored", dtype="float32")
    for ours, theirs in zip(merged.params["layers"], policy.model.params["layers"], strict=True):
        for name in ("experts_gate_up", "experts_down", "router"):
            want = theirs[name].astype(ml_dtypes.bfloat16).astype(np.float32)
            np.testing.assert_array_equal(ours[name], want)


@pytest.mark.parametrize("name", ["default", pytest.param("stacked", marks=pytest.mark.slow)])
def test_a_merged_gpt_oss_keeps_its_blocks(name, tmp_path):
    """Unless the adapter changes the experts, whose sum with it is dense then."""
    base, adapter = GOLDEN / "gpt_oss_mxfp4", GOLDEN / "peft_experts" / "gpt_oss" / name
    out = run_export(adapter, "merged", base=str(base), out=str(tmp_path / "out"))
    written, stored = safetensors.read_folder(out), safetensors.read_folder(base)
    quantized = json.loads((out / "config.json").read_text()).get("quantization_config")
    if name == "stacked":
        assert quantized is None
        assert "model.layers.0.mlp.experts.gate_up_proj" in written
    else:
        assert quantized == json.loads((base / "config.json").read_text())["quantization_config"]
        assert written.keys() == stored.keys()
        packed = [name for name in stored if name.endswith(("_blocks", "_scales"))]
        assert all(written[name].tobytes() == stored[name].tobytes() for name in packed)
        assert len(packed) == 8
    policy = open_policy(str(adapter), base=str(GOLDEN / "gpt_oss"), format="bf16", dtype="float32")
    model = load(str(out), format="stored", dtype="float32")
    found = forward(model.params, None, TOKENS, np.array([TOKENS.size]), config=model.config)
    assert np.abs(found - logits(policy)).max() < 0.2
    for form, number_format, words in (
        ("nvfp4", "", "--format=nvfp4: a gpt_oss is exported by"),
        ("gguf", "mxfp4", "--format=gguf: a gpt_oss is exported by"),
        ("gguf", "bf16", "GGUF files of gpt_oss are read, not written"),
    ):
        with pytest.raises(UserError, match=words):
            run_export(adapter, form, base=str(base), out=str(tmp_path / form), merge=number_format)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_a_mixture_in_nvfp4(family, tmp_path):
    """Experts keep the bytes of the quantized base, and what no format packs is on vLLM's list."""
    out, _ = mixture_export(family, "nvfp4", tmp_path / "out")
    model, base = load(str(out), format="stored"), load(str(GOLDEN / family), format="nvfp4")
    assert model.format == "nvfp4"
    for ours, theirs in zip(model.params["layers"], base.params["layers"], strict=True):
        for name in ("experts_gate_up", "experts_down"):
            trees.assert_equal(ours[name], theirs[name])
    # Written again, they keep their bytes.
    write_checkpoint(
        tmp_path / "again",
        checkpoint_tensors(model.params, model.config),
        files=companion_files(model, packed=True),
    )
    files = [folder / "model.safetensors" for folder in (out, tmp_path / "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    tensors = safetensors.read_folder(out)
    linear = {
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.ndim == 2 and "embed_tokens" not in name
    }
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert linear == set(ignored)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_an_adapter_of_a_mixture_with_its_base(family, tmp_path):
    out, _ = mixture_export(family, "peft", tmp_path / "out")
    stored = GOLDEN / "peft_experts" / family / "default" / "adapter_model.safetensors"
    names = safetensors.read_file(out / "adapter_model.safetensors").keys()
    theirs = safetensors.read_file(stored).keys()
    if family == "qwen3_5_moe":  # the base has a vision tower
        assert names == {n.replace(".layers.", ".language_model.layers.") for n in theirs}
    else:
        assert names == theirs
    assert open_policy(str(out), base=str(GOLDEN / family)).lora is not None


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "qwen3_5_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)]
)
def test_an_adapter_of_routed_experts(family, tmp_path, capsys):
    """It is written as vLLM reads the family."""
    out, policy = mixture_export(family, "peft", tmp_path / "out", "stacked")
    names = safetensors.read_file(out / "adapter_model.safetensors").keys()
    stacked = family != "qwen3_moe"
    assert any(".experts.5.up_proj.lora_A" in name for name in names) != stacked
    again = open_policy(str(out), base=str(GOLDEN / family), format="bf16", dtype="float32")
    trees.assert_equal(again.lora, policy.lora)
    assert again.lora_config.expert_rank == 2
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("vllm serve"))
    assert ("--enable-mixed-moe-lora-format" in line) == stacked
    assert ('"is_3d_lora_weight": true' in line) == stacked
    assert "adapter of rank 2, and 2 of routed experts," in (out / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_transformers_reads_a_calibrated_merge(name, tiny, tmp_path):
    """Requires torch and compressed-tensors: uv run --with torch --with compressed-tensors."""
    run = finished_run.write_golden_run(tmp_path, tiny, f"nvfp4_{name}")
    assert_transformers_agrees(run_export(run, "nvfp4", calibration="gptq"))


def test_a_calibrated_merge_refuses_an_adapter_of_routed_experts(tiny, tmp_path):
    run = finished_run.write_run(tmp_path / "run", tiny, own=True, model=GOLDEN / "qwen3_moe")
    shutil.rmtree(run / "adapter")
    shutil.copytree(GOLDEN / "peft_experts" / "qwen3_moe" / "stacked", run / "adapter")
    words = "its adapter changes routed experts, .* --format=merged, .* --calibrate=TEXT"
    with pytest.raises(UserError, match=words):
        run_export(run, "nvfp4", calibration="gptq", out=str(tmp_path / "out"))


@pytest.mark.parametrize(
    "family", ["qwen3_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("form", ["merged", "nvfp4"])
def test_routed_experts_with_an_adapter_are_merged(family, form, tmp_path):
    out, policy = mixture_export(family, form, tmp_path / "out", "stacked")
    card = (out / "README.md").read_text()
    assert all(f"| experts.{name} " in card for name in ("gate_proj", "up_proj", "down_proj"))
    model, base, lora = load(str(out), format="stored"), policy.model.params, policy.lora
    for number, adapters in enumerate(lora.layers):
        for name in ("experts_gate_up", "experts_down"):
            a, b = (np.float32(adapters[name][matrix]) for matrix in "ab")
            update = lora.scale * np.einsum("enr,erk->enk", b, a)
            want = base["layers"][number][name] + update.reshape(-1, update.shape[2])
            found = model.params["layers"][number][name]
            if form == "nvfp4":
                found = dequantize(found, np.float32)
            error = np.linalg.norm(np.float32(found) - want) / np.linalg.norm(want)
            assert error < {"merged": 2**-8, "nvfp4": 0.15}[form]
            assert np.linalg.norm(update) > 0.15 * np.linalg.norm(want)


# --- The three formats ----------------------------------------------------------------------------


def test_peft(run, tiny, tmp_path, capsys):
    out = run_export(run, "peft", out=str(tmp_path / "out"))
    assert {path.name for path in out.iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    card = (out / "README.md").read_text()
    assert "on its weights in NVFP4: LoRA of rank 4." in card
    assert "The adapter belongs to these NVFP4 weights" in card
    stored = (run / "adapter" / "adapter_model.safetensors").read_bytes()
    assert (out / "adapter_model.safetensors").read_bytes() == stored
    written = json.loads((out / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tiny.model)
    again = open_policy(str(out), format="nvfp4", dtype="float32")
    np.testing.assert_array_equal(logits(again), logits(open_policy(str(run))))
    assert open_policy(str(out)).base.format == "bf16"  # outside of a run: as stored
    assert open_policy(str(run / "adapter")).base.format == "nvfp4"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        f"python -m experiments.quantize {tiny.model} {out}-base",
        f"vllm serve {out}-base --enable-lora --max-lora-rank 8 --generation-config vllm "
        f"""--lora-modules '{{"name": "mine", "path": "{out}"}}'""",
    ]


def parsed_by_vllm(item):
    """Name and path of a value of --lora-modules, as vLLM's LoRAParserAction reads it."""
    if "=" in item and "," not in item:
        name, path = item.split("=")
        return name, path
    module = json.loads(item)
    return module["name"], module["path"]


def foreign_card(**changes):
    """The card of an adapter without a run."""
    facts = {"name": "n", "format": "peft", "base": "Q/q", "source": "Q/q", "served_base": "Q/q"}
    facts |= {"base_format": "bf16", "onto": "trained", "rank": 48, "trained_norms": False}
    return Card(**facts | {"run": None, "steps": None} | changes)


@pytest.mark.parametrize(
    "name", ["mine", "seed=0-1a2b3c4d", "lr=1e-5,seed=0", "a b", "it's", '"', "\u00e9", "a=b=c"]
)
def test_vllm_reads_the_line_that_is_printed(name):
    folder = f"runs/s/{name}/exports/peft"
    *command, item = shlex.split(serve_lines(foreign_card(name=name, folder=folder))[-1])
    assert command[-1] == "--lora-modules"
    assert parsed_by_vllm(item) == (name, folder)


@pytest.mark.parametrize(
    ("served_base", "served"),
    [("openai/gpt-oss-20b", True), ("gpt-oss.gguf", False), ("", False)],
)
def test_vllm_serves_gpt_oss_as_it_is_published(served_base, served):
    card = foreign_card(folder="out", base_format="mxfp4", served_base=served_base)
    (line,) = serve_lines(card)
    assert line.startswith(f"vllm serve {served_base} --enable-lora") == served
    assert ("cannot serve this base in MXFP4" in line) != served


PENALTIES = {
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
    "repetition_penalty": 1.1,
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
}


@pytest.mark.parametrize("form", ["merged", "nvfp4", "peft", "with_base", "full"])
def test_an_export_has_the_sampling_of_its_scores(form, tiny, tmp_path):
    """That of evaluations: greedy, with all stop tokens, and without the base's penalty."""
    model = shutil.copytree(tiny.model, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps(PENALTIES))
    if form == "full":
        loaded, config = load(str(model), format="stored"), {"train.parameters": "full"}
        setup = types.SimpleNamespace(model=loaded, config=tiny.config(config))
        folder = RunFolder(tmp_path / "run")
        save_policy(folder, setup, Trainable(lora=None, params=setup.model.params))
        written = [folder.model()]
    else:
        run = finished_run.write_run(tmp_path / "run", tiny, model=model)
        with_base = form == "with_base"
        out = tmp_path / "out"
        run_export(run, "peft" if with_base else form, out=str(out), with_base=with_base)
        written = [out, *([tmp_path / "out-base"] if with_base else [])]
    for folder in written:
        found = transformers.GenerationConfig.from_pretrained(folder)
        found.validate(strict=True)
        assert not found.do_sample
        assert set(found.eos_token_id) >= {2, 5}
        assert sorted(found.eos_token_id) == list(load(str(model)).tokenizer.eos_ids)
        stored = json.loads((folder / "generation_config.json").read_text())
        assert stored["repetition_penalty"] == stored["temperature"] == stored["top_p"] == 1.0
        assert "top_k" not in stored
    assert json.loads((model / "generation_config.json").read_text()) == PENALTIES


@pytest.mark.e2e
@pytest.mark.slow  # 6 s; `test_scores` and `test_the_card` have its parts
@pytest.mark.parametrize("form", ["merged", "peft", "with_base"])
def test_the_command_on_the_card_repeats_the_score(form, tiny, tmp_path):
    run = tmp_path / "lr=1e-5,seed=0"
    finished_run.write_run(run, tiny, own=True, norms=form == "with_base")
    out = run / "exports" / "out"
    options = {"out": str(out), "with_base": form == "with_base", "score_problems": 3}
    run_export(run, "peft" if form == "with_base" else form, **options)
    card = (out / "README.md").read_text()
    assert ("KL" in card) == (form == "merged")
    (command,) = [line for line in card.splitlines() if "experiments.evaluate" in line]
    arguments = shlex.split(command)
    assert arguments[:3] == ["python", "-m", "experiments.evaluate"]
    evaluate.run(evaluate.make_parser().parse_args(arguments[3:]))
    (results,) = (run / "evaluations").glob("*/results.json")
    (figures,) = json.loads(results.read_text())["tasks"].values()
    name = "this model" if form == "merged" else "NVFP4 base + adapter"
    row, *_ = [line for line in card.splitlines() if line.startswith(f"| {name} ")]
    assert f" {figures['accuracy']['value']:.3f} " in row
    assert figures["problems"] == 3


@pytest.mark.parametrize("norms", [False, True])
def test_with_base(norms, tiny, tmp_path, capsys):
    run = finished_run.write_run(tmp_path / "run", tiny, norms=norms)
    out = run_export(run, "peft", out=str(tmp_path / "out"), with_base=True)
    base = tmp_path / "out-base"
    written = json.loads((out / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(base)
    assert written["modules_to_save"] is None
    assert load(str(base), format="stored").format == "nvfp4"
    again, policy = open_policy(str(out), dtype="float32"), open_policy(str(run))
    np.testing.assert_array_equal(logits(again), logits(policy))
    assert f"vllm serve {base} --enable-lora" in capsys.readouterr().out
    card = (base / "README.md").read_text()
    assert "# run-base\n" in card
    assert f"in NVFP4: the weights that the adapter {out} was trained on" in card
    assert "tags:\n- nvfp4\n" in card


def test_an_adapter_with_norms_names_the_remedy(tiny, tmp_path, capsys):
    run = finished_run.write_run(tmp_path / "run", tiny, norms=True)
    out = run_export(run, "peft")
    assert out == run / "exports" / "peft"
    assert json.loads((out / "adapter_config.json").read_text())["modules_to_save"]
    assert "--with-base" in capsys.readouterr().out
    card = (out / "README.md").read_text()
    assert f'AutoModelForCausalLM.from_pretrained("{out}-base"' in card
    assert f"python -m experiments.quantize {tiny.model} {out}-base\n# vLLM" in card
    again = open_policy(str(out), dtype="float32")
    np.testing.assert_array_equal(logits(again), logits(open_policy(str(run))))


@pytest.mark.parametrize("norms", [False, True])
def test_merged(norms, tiny, tmp_path, capsys):
    run = finished_run.write_run(tmp_path / "run", tiny, norms=norms)
    policy = open_policy(str(run))
    out = run_export(run, "merged")
    merged = load(str(out), format="stored", dtype="float32")
    assert merged.format == "bf16"
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    np.testing.assert_allclose(
        logits(open_policy(str(out), dtype="float32")), logits(policy), atol=0.1
    )
    layer, adapters = policy.model.params["layers"][-1], policy.lora.layers[-1]["down_proj"]
    weight = np.asarray(transformer.dequantize_params(layer | policy.model.params)["down_proj"])
    weight = weight + policy.lora.scale * (adapters["b"] @ adapters["a"])
    np.testing.assert_allclose(merged.params["layers"][-1]["down_proj"], weight, rtol=2**-8)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        np.testing.assert_array_equal(merged.params["layers"][-1][norm], layer[norm])
    assert f"vllm serve {out}\n" in capsys.readouterr().out


def test_nvfp4_is_the_merged_model_quantized(run, tmp_path):
    """By default it starts from the unquantized weights."""
    weights = {}
    for onto in ("", "bf16", "trained"):
        packed = run_export(run, "nvfp4", onto=onto, out=str(tmp_path / f"nvfp4{onto}"))
        weights[onto] = (packed / "model.safetensors").read_bytes()
        if onto:
            merged = run_export(run, "merged", onto=onto, out=str(tmp_path / f"merged{onto}"))
            trees.assert_equal(
                load(str(merged), format="nvfp4").params, load(str(packed), format="stored").params
            )
    assert weights[""] == weights["bf16"] != weights["trained"]


# --- GGUF -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_run(tiny, tmp_path_factory):
    """The run of a Qwen2 with a tokenizer that llama.cpp has."""
    folder = tmp_path_factory.mktemp("byte")
    model = gguf_cases.write_folder(folder / "model", "qwen2")
    changes = {"data.system_prompt": "ab <|im_end|>", "data.max_prompt_tokens": 64}
    changes |= {"data.examples": ("a", "b"), "data.question_suffix": "!", "rollout.stop": ("ab",)}
    return finished_run.write_run(folder / "r u n", tiny, own=True, model=model, **changes)


@pytest.mark.parametrize("problems", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_gguf_is_the_adapter_and_its_base(problems, byte_run, tmp_path, capsys):
    options = {"out": str(tmp_path / "out"), "dense": "bf16", "score_problems": problems}
    out = run_export(byte_run, "gguf", **options)
    assert {path.name for path in out.iterdir()} == {
        "README.md", "adapter.gguf", "base-NVFP4.gguf"
    }  # fmt: skip
    policy = open_policy(str(byte_run), dtype="float32")
    base = load(str(out / "base-NVFP4.gguf"), format="stored", dtype="float32")
    for ours, theirs in zip(base.params["layers"], policy.base.params["layers"], strict=True):
        trees.assert_equal(ours["qkv_proj"], theirs["qkv_proj"])
    fields = gguf.GGUFReader(out / "adapter.gguf").fields
    assert fields["adapter.lora.alpha"].contents() == finished_run.LORA.alpha
    printed = capsys.readouterr().out
    pair = f"{out}/base-NVFP4.gguf --lora {out}/adapter.gguf --temp 0"
    assert f"llama-cli -m {pair}\nllama-server -m {pair}\n" in printed
    card = (out / "README.md").read_text()
    assert "exactly those that the adapter was trained on" in card
    assert f"llama-cli -m {pair}" in card
    assert ("these files" in card) == (problems > 0)  # their KL
    assert "vllm" not in card


@pytest.mark.parametrize(
    "form", ["bf16", *(pytest.param(f, marks=pytest.mark.slow) for f in ("q8_0", "mxfp4", "nvfp4"))]
)
def test_gguf_merged(form, byte_run, tmp_path, capsys):
    out = run_export(byte_run, "gguf", merge=form, out=str(tmp_path / "out"))
    file = out / f"model-{form.upper()}.gguf"
    found = {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert form.upper() in found
    lines = capsys.readouterr().out
    assert f"llama-cli -m {file} --temp 0" in lines
    has_file = form in ("q8_0", "bf16")
    assert (f"ollama create r-u-n -f {out}/Modelfile" in lines) == has_file
    assert ("llama-quantize" in lines) == (form == "bf16")
    if has_file:
        text = (out / "Modelfile").read_text()
        assert text.startswith(f"FROM ./{file.name}\n")
        assert 'PARAMETER stop """<|im_end|>"""\n' in text
        assert 'PARAMETER stop """ab"""\n' in text
        assert 'MESSAGE user """a!"""\nMESSAGE assistant """b"""\n' in text
        assert 'SYSTEM """ab <|im_end|>"""' in text
    again = load(str(file), format="stored", dtype="float32")
    merged = run_export(byte_run, "merged", out=str(tmp_path / "merged"))
    exact = load(str(merged), format="stored", dtype="float32")
    if form == "bf16":
        trees.assert_equal(again.params, exact.params)
    forms = {"q8_0": 0.01, "bf16": 0.0, "mxfp4": 0.2, "nvfp4": 0.2}
    for ours, theirs in zip(again.params["layers"], exact.params["layers"], strict=True):
        ours = transformer.dequantize_params(ours | {"embed_tokens": exact.params["embed_tokens"]})
        difference = np.linalg.norm(ours["down_proj"] - theirs["down_proj"])
        assert difference <= forms[form] * np.linalg.norm(theirs["down_proj"])


@pytest.mark.slow
def test_a_calibrated_merge_in_gguf_is_that_of_the_folder(tiny, tmp_path):
    model = gguf_cases.write_folder(tmp_path / "model", "llama", packed=True)
    changes = {"data.max_prompt_tokens": 64}
    run = finished_run.write_run(tmp_path / "run", tiny, own=True, model=model, **changes)
    folder = run_export(run, "nvfp4", calibration="gptq")
    options = {"merge": "nvfp4", "dense": "bf16", "calibration": "gptq"}
    out = run_export(run, "gguf", **options)
    assert out.name == "gguf-nvfp4-gptq"
    found = load(str(out / "model-NVFP4.gguf"), format="stored", dtype="float32")
    kept = load(str(folder), format="stored", dtype="float32")
    trees.assert_equal(found.params, kept.params)


@pytest.mark.parametrize(("size", "fraction"), [(1e-4, 0.0), (1.0, 1.0)])
def test_what_four_bits_keep(size, fraction, tiny, tmp_path):
    """An update below half a step of the 4-bit grid is lost, and a large update is kept."""
    run = finished_run.write_run(tmp_path / "run", tiny, size=size)
    kept = {}
    policy = open_policy(str(run))
    list(merge.merged_layers(policy.model, policy.lora, format="nvfp4", retention=kept))
    assert kept.keys() == projection_shapes(policy.model.config).keys()
    for part in kept.values():
        assert abs(part.kept_fraction - fraction) < 0.1
        assert abs(part.relative_error - (1 - fraction)) < 0.2


def test_an_update_of_zero_changes_nothing(tiny, tmp_path):
    run = finished_run.write_run(tmp_path / "run", tiny, size=0.0)
    policy, kept = open_policy(str(run)), {}
    layers = list(merge.merged_layers(policy.model, policy.lora, format="nvfp4", retention=kept))
    assert kept == {}
    for layer, before in zip(layers, policy.model.params["layers"], strict=True):
        np.testing.assert_array_equal(
            transformer.dequantize_params(layer | policy.model.params)["down_proj"],
            transformer.dequantize_params(before | policy.model.params)["down_proj"],
        )


def test_what_bfloat16_keeps_of_norms(tiny, tmp_path, capsys):
    run = finished_run.write_run(tmp_path / "run", tiny, norms=True)
    run_export(run, "merged")
    assert "| norms      | 100.0 % | 0.000 |" in capsys.readouterr().out
    base = {"layers": [dict.fromkeys(("input_layernorm", "post_attention_layernorm"), np.ones(4))]}
    moved = {"layers": [{name: norm + 1e-3 for name, norm in base["layers"][0].items()}]}
    assert merge.norm_retention(base, moved)["norms"].kept_fraction == 0.0
    assert merge.norm_retention(base, base) == {}


@pytest.mark.parametrize("form", ["merged", "nvfp4", "peft", "full"])
def test_small_updates_of_norms_are_kept(form, tiny, tmp_path):
    """Updates of less than 4e-3, which bfloat16 rounds away next to 1, are what training makes."""
    full = {"train.parameters": "full", "model.format": "bf16"}
    changes = full if form == "full" else {}
    run = finished_run.write_run(tmp_path / "run", tiny, norms=True, **changes)
    base = load(str(tiny.model), format="stored")
    trained = finished_run.random_adapter(base.config, norms=True)
    params = jax.tree.map(lambda norm: np.ones_like(norm) + norm * 1e-3, trained.params)
    if form == "full":
        (run / "adapter").rename(tmp_path / "adapter")
        layers = zip(base.params["layers"], params["layers"], strict=True)
        policy = base.params | {"layers": [layer | norms for layer, norms in layers]}
        write_checkpoint(
            run / "model",
            checkpoint_tensors(policy, base.config, norms="float32"),
            files=companion_files(base, packed=False),
        )
    else:
        trained = trained.replace(params=params)
        save_peft_adapter(run / "adapter", trained, finished_run.LORA, base_model=base.source)
    written = "merged" if form == "full" else form
    out = run_export(run, written, out=str(tmp_path / "out"), with_base=form == "peft")
    if form != "peft":
        assert "The trained norms are in float32" in (out / "README.md").read_text()
    folder = tmp_path / "out-base" if form == "peft" else out
    found = load(str(folder), format="stored").params["layers"]
    for layer, expected in zip(found, params["layers"], strict=True):
        for name, norm in expected.items():
            np.testing.assert_array_equal(layer[name], norm)
    tensors = dict(safetensors.read_file(folder / "model.safetensors"))
    assert tensors["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16


def scored_card(run, tmp_path):
    out = run_export(run, "peft", out=str(tmp_path / "out"), score_problems=3)
    return (out / "README.md").read_text()


def test_scores(tiny, tmp_path, monkeypatch, capsys):
    asked, changes = [], {"data.examples": ("t5", "t6")}
    run = finished_run.write_run(tmp_path / "run", tiny, own=True, **changes)

    def accuracy(sampler, policy, prompts, **_):
        packed = isinstance(policy.params["layers"][0]["qkv_proj"], QuantTensor)
        new_tokens = sampler.sampling.max_new_tokens
        assert all("t5" in prompt.text for prompt in prompts)  # as in the training
        assert sampler.engine.shared_tokens > 0
        asked.append((packed, policy.lora is not None, len(prompts), new_tokens))
        return GreedyScore(accuracy=len(asked) / 4, truncated=0.0)

    monkeypatch.setattr(card_scores, "greedy_accuracy", accuracy)
    card = scored_card(run, tmp_path)
    assert asked == [(True, False, 3, 4), (True, True, 3, 4), (False, True, 3, 4)]
    assert "pass@1 0.500 on 3 held-out problems: NVFP4 base + adapter\n" in capsys.readouterr().out
    for name, score in (("NVFP4 base", 0.25), ("bf16 base + adapter", 0.75)):
        assert any(name in line and f"{score:.3f}" in line for line in card.splitlines())


def test_a_score_with_missing_rewards_is_not_on_the_card(run, tmp_path, monkeypatch, capsys):
    found = iter([GreedyScore(1.0, 0.0, missing=2), GreedyScore(0.25, 0.0), GreedyScore(0.75, 0.0)])
    monkeypatch.setattr(card_scores, "greedy_accuracy", lambda *_, **__: next(found))
    card = scored_card(run, tmp_path)
    assert "no pass@1: 2 of 3 completions have no score: NVFP4 base\n" in capsys.readouterr().out
    assert "1.000" not in card
    assert "| NVFP4 base + adapter | 0.250 " in card


def test_kl():
    """Checks against the KL of (1/4, 3/4) to (1/2, 1/2), and of equal distributions, by hand.

    The likeliest of two equal ones is the first.
    """
    p, q = np.log(np.array([[0.25, 0.75]])), np.log(np.array([[0.5, 0.5]]))
    expected = 0.25 * np.log(0.5) + 0.75 * np.log(1.5)
    found = card_scores.probe_kl([p.astype(np.float32), q], [q.astype(np.float32), q])
    assert found == pytest.approx((expected / 2, 0.5))


# --- Number formats -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Writes a model whose projections have whole blocks in every number format."""
    folder = tmp_path_factory.mktemp("wide")
    config = tiny_checkpoints.model_config(embed_dim=64, mlp_dim=128, head_dim=16)
    tensors = tiny_checkpoints.random_tensors(config)
    tensors = {n: (t * np.float32(0.1)).astype(ml_dtypes.bfloat16) for n, t in tensors.items()}
    return tiny_checkpoints.write_folder(folder, config, tensors)


@pytest.mark.parametrize(
    "number_format", ["nf4", *(pytest.param(f, marks=pytest.mark.slow) for f in ("bf16", "mxfp4"))]
)
def test_other_number_formats(number_format, wide, tiny, tmp_path, capsys):
    changes = {"model.format": number_format}
    run = finished_run.write_run(tmp_path / "run", tiny, model=wide, **changes)
    written = json.loads((run_export(run, "peft") / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(wide)
    printed = capsys.readouterr().out
    if number_format == "bf16":
        assert f"vllm serve {wide} --enable-lora" in printed
    else:
        assert "--format=merged" in printed
    policy = open_policy(str(run))
    merged = open_policy(str(run_export(run, "merged")), dtype="float32")
    np.testing.assert_allclose(logits(merged), logits(policy), atol=0.2)
    for onto in ("trained", "bf16"):
        packed = run_export(run, "nvfp4", onto=onto, out=str(tmp_path / onto))
        assert load(str(packed), format="stored").format == "nvfp4"
    with pytest.raises(UserError, match="there is no NVFP4 base"):
        run_export(run, "peft", with_base=True, out=str(tmp_path / "other"))


def test_a_relative_path_of_the_model_is_that_of_the_start(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tiny.model.parent)
    run = finished_run.write_run(tmp_path / "run", tiny, model=Path(tiny.model.name))
    monkeypatch.chdir(tmp_path)
    for adapter in ("", "none"):
        assert open_policy(str(run), adapter=adapter).base.path == tiny.model
    (tmp_path / tiny.model.name).mkdir()  # another folder of this name
    assert open_policy(str(run)).base.path == tiny.model
    shutil.rmtree(run / "adapter")
    refused(tiny.model.name, open_policy, str(run), adapter="none")


def test_an_adapter_that_was_trained_elsewhere(tiny, tmp_path):
    """The folder of such an adapter does not state the format of its base: it is as stored."""
    run = finished_run.write_run(tmp_path / "run", tiny, **{"model.format": "bf16"})
    source = shutil.copytree(run / "adapter", tmp_path / "adapter")
    weights = [
        (run_export(source, "merged", out=str(tmp_path / f"of_{form}"), base_format=form))
        for form in ("", "nvfp4", "bf16")
    ] + [run_export(run, "merged")]
    found = [(path / "model.safetensors").read_bytes() for path in weights]
    assert found[0] == found[2] == found[3] != found[1]
    for form, said in (
        ("peft", "rank 4 for "),
        ("merged", "into its weights in bf16; the sum is rounded to bfloat16."),
        ("nvfp4", "into its weights in bf16; the sum is rounded to NVFP4."),
    ):
        out = run_export(source, form, out=str(tmp_path / form))
        card = (out / "README.md").read_text()
        assert said in card
        assert "trained with" not in card
        assert "qerl" not in card


def test_an_adapter_without_a_base(tiny, tmp_path):
    run = finished_run.write_run(tmp_path / "run", tiny)
    source = shutil.copytree(run / "adapter", tmp_path / "adapter")
    path = source / "adapter_config.json"
    text = json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": None})
    path.write_text(text)
    refused(f"{source}: .*--base=MODEL", open_policy, str(source))
    assert open_policy(str(source), base=str(tiny.model)).lora is not None
    refused("the source is empty", open_policy, "")


def test_a_base_that_is_in_nvfp4_already(tiny, tmp_path, capsys):
    base = GOLDEN / "nvfp4_llama"
    run = finished_run.write_run(tmp_path / "run", tiny, model=base)
    run_export(run, "peft")
    assert f"vllm serve {base} --enable-lora" in capsys.readouterr().out
    run_export(run, "nvfp4")
    refused("holds NVFP4 weights; leave it out", run_export, run, "merged", onto="bf16")


def test_a_run_that_trained_everything(tiny, tmp_path):
    folder = finished_run.write_run(
        tmp_path / "run", tiny, **{"train.parameters": "full", "model.format": "bf16"}
    )
    (folder / "adapter").rename(tmp_path / "adapter")
    shutil.copytree(tiny.model, folder / "model")
    refused("all parameters were trained", run_export, folder, "peft")
    merged = run_export(folder, "merged")
    stored = load(str(folder / "model"), format="bf16")
    trees.assert_equal(stored.params, load(str(merged), format="bf16").params)
    packed = run_export(folder, "nvfp4")
    assert load(str(packed), format="stored").format == "nvfp4"
    for out, rounded in ((merged, "in bfloat16"), (packed, "rounded to NVFP4")):
        card = (out / "README.md").read_text()
        # The model of the run is what was trained, and not its base.
        assert f"{tiny.model}, trained with reinforcement learning on its weights in bf16" in card
        assert f"all parameters.\n\nThese are the trained weights, {rounded}" in card
        assert "merged" not in card.partition("## Use")[0]


@pytest.mark.parametrize("form", ["merged", "nvfp4"])
def test_an_exported_model_is_evaluated_as_it_is_written(form, run, tmp_path):
    """Rounded to the format of the run, a merged model would be the base again."""
    out = run_export(run, form, out=str(tmp_path / "mine"))
    policy = open_policy(str(run), adapter=str(out))
    written = load(str(out), format="stored", dtype="float32")
    assert policy.base.format == written.format == ("bf16" if form == "merged" else "nvfp4")
    trees.assert_equal(policy.model.params, written.params)
    config = EvaluateConfig(source=str(run), adapters=("none", str(out)))
    names = [locate_results(open_policy(str(run), adapter=a), config)[0] for a in config.adapters]
    assert names == ["base", "mine"]
    with pytest.raises(UserError, match="no adapter to export; to write a model in NVFP4"):
        run_export(run, "nvfp4", adapter=str(out), out=str(tmp_path / "again"))


def test_the_card_says_which_adapter_it_is(tiny, tmp_path, capsys):
    run = finished_run.write_run(tmp_path / "run", tiny)
    shutil.copytree(run / "adapter", run / "best_adapter")
    (run / "best.json").write_text('{"step": 2, "accuracy": 0.5}')
    for adapter, words in (("", "the best adapter, of step 2"), ("adapter", "the last adapter")):
        out = run_export(run, "peft", adapter=adapter, out=str(tmp_path / f"out{adapter}"))
        assert f"4 steps; this is {words}: commit" in (out / "README.md").read_text()
        assert f"{run}: exporting {words}\n" in capsys.readouterr().out
    (run / "best_adapter" / "adapter_config.json").unlink()
    words = "incomplete, adapter_config.json is missing; --adapter=adapter is another one"
    refused(words, run_export, run, "peft", out=str(tmp_path / "incomplete"))


# --- The card -------------------------------------------------------------------------------------


def test_the_card(run, tmp_path):
    out = run_export(run, "merged", out=str(tmp_path / "out"))
    tensors = dict(safetensors.read_file(out / "model.safetensors"))
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
    text = (out / "README.md").read_text()
    assert "trained norms" not in text
    front, _, body = text.removeprefix("---\n").partition("\n---\n")
    matter = yaml.safe_load(front)
    assert matter["library_name"] == "transformers"
    assert "base_model" not in matter  # because a local path means nothing to the hub
    for part in (
        "# mine",
        "python -m experiments.grpo_gsm8k --config.steps=4",
        "0123abcd",
        "4 steps",
        "| lora.rank ",
        "| all ",
        '"group_size": 4',
        f"vllm serve {out}",
    ):
        assert part in body
    training = body.partition("## Training")[2]
    assert "| data.path " in training
    assert "| data.source " not in training  # because data.path replaces it
    assert str(tmp_path.parent) not in training


def test_the_card_names_a_base_of_the_hub():
    text = model_card.model_card(foreign_card(folder="out", served_base=""))
    matter = yaml.safe_load(text.split("---")[1])
    assert (matter["base_model"], matter["base_model_relation"]) == ("Q/q", "adapter")
    assert "--max-lora-rank 64" in text


# --- What cannot be exported ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "options", "named"),
    [
        ("ggml", {}, "peft, merged, nvfp4, gguf"),
        ("gguf", {}, r"\(WordLevel\) has no name in GGUF"),
        (
            "gguf",
            {"merge": "q4_k"},
            "merge=q4_k: must be one of nvfp4, mxfp4, q8_0, bf16; llama-quantize",
        ),
        ("gguf", {"dense": "f16"}, "dense=f16: must be one of q8_0, bf16"),
        ("gguf", {"onto": "bf16"}, "merges nothing"),
        ("gguf", {"with_base": True}, "needs no base"),
        ("merged", {"merge": "q8_0"}, "it is a form of --format=gguf"),
        ("merged", {"dense": "bf16"}, "it is a form of --format=gguf"),
        ("gguf", {"calibration": "gptq"}, "it merges into 4 bits"),
        ("nvfp4", {"calibration": "awq"}, "calibration=awq: must be one of none, gptq"),
        ("merged", {"onto": "fp8"}, "trained, bf16"),
        ("peft", {"onto": "bf16"}, "merges nothing"),
        ("merged", {"with_base": True}, "needs no base"),
        ("peft", {"adapter": "none"}, "no adapter to export"),
        ("peft", {"adapter": "best_adapter"}, "no best_adapter yet"),
        ("peft", {"score_problems": -1}, "score-problems=-1"),
    ],
)
def test_what_does_not_go_together(form, options, named, run, tmp_path):
    refused(named, run_export, run, form, out=str(tmp_path / "out"), **options)
    assert list(tmp_path.iterdir()) == []


def test_a_model_has_no_adapter(tiny, tmp_path):
    refused(r"experiments\.quantize", run_export, tiny.model, "nvfp4", out=str(tmp_path / "out"))
    refused("--out=FOLDER", run_export, tiny.model, "nvfp4")
    refused("absent: there is no such folder", run_export, tmp_path / "absent", "nvfp4")


def test_a_folder_of_another_trainer_is_no_run(run, tmp_path):
    source = shutil.copytree(run / "adapter", tmp_path / "theirs")
    (source / "checkpoints").mkdir()
    (source / "config.json").write_text('{"config": {}, "steps": 4}')
    refused(r"theirs is not a run folder.*--out=FOLDER", run_export, source, "merged")
    assert not (source / "exports").exists()
    for options in ({}, {"out": str(tmp_path / "out")}):
        with pytest.raises(UserError, match="is neither a run nor a PEFT adapter; pass one of"):
            run_export(tmp_path, "peft", **options)


def test_a_run_that_is_not_finished(tiny, tmp_path, capsys):
    run = finished_run.write_run(tmp_path / "run", tiny, summary=False)
    (run / "adapter").rename(run / "best_adapter")
    out = run_export(run, "peft")
    assert "not finished" in capsys.readouterr().out
    assert "Not finished yet" in (out / "README.md").read_text()
    (run / "best_adapter").rename(tmp_path / "gone")
    refused("no adapter yet", run_export, run, "merged")


def test_no_problems_to_score_on(tiny, tmp_path, capsys):
    run = finished_run.write_run(tmp_path / "run", tiny, own=True, **{"eval.every": 0})
    export(ExportConfig(source=str(run), format="peft", out=str(tmp_path / "out")))
    assert "not scored: the run held out no problems" in capsys.readouterr().out
    refused("held out no problems", run_export, run, "peft", score_problems=3)


def test_an_export_is_not_overwritten(run, tmp_path, monkeypatch):
    out = run_export(run, "peft", out=str(tmp_path / "out"))
    before = (out / "README.md").read_bytes()
    # The error comes before anything is loaded.
    monkeypatch.setattr(export_lib, "open_policy", None)
    with pytest.raises(UserError, match="exists already; remove it or choose another folder"):
        run_export(run, "merged", out=str(out))
    assert (out / "README.md").read_bytes() == before
    refused("surrogate", run_export, run, "gguf", out=os.fsdecode(b"%s/a\xff" % bytes(tmp_path)))


def test_a_place_that_cannot_be_written_is_refused_first(run, tmp_path, monkeypatch):
    monkeypatch.setattr(export_lib, "open_policy", None)
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "new" / "out", Path("/proc/absent/out")):
        with pytest.raises(UserError, match=r"out: could not be written: .*choose another path"):
            run_export(run, "merged", out=str(out))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("form", "number"),
    [("peft", signal.SIGTERM), ("merged", signal.SIGHUP)],
    ids=["peft", "merged"],
)
def test_an_interrupted_export_leaves_nothing(form, number, run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export_lib, "open_policy", open_policy)
    target = "fill_peft_adapter" if form == "peft" else "model_card"

    def interrupted(*_, **__):
        os.kill(os.getpid(), number)
        signal.pause()

    monkeypatch.setattr(export_lib.peft if form == "peft" else export_lib, target, interrupted)
    arguments = ["--format", form, "--out", str(tmp_path / "out"), "--score-problems=0"]
    arguments += ["--with-base"] if form == "peft" else []
    with pytest.raises(SystemExit) as caught:
        export_command.run(export_command.make_parser().parse_args([str(run), *arguments]))
    assert caught.value.code == 128 + number
    assert capsys.readouterr().err.endswith(f"{number.name}: stopping\n")
    assert list(tmp_path.iterdir()) == []


def test_the_command(run, tmp_path):
    (tmp_path / "mine").write_text("")
    command = [sys.executable, "-m", "experiments.export", str(run), "--format=merged"]
    command += [f"--out={tmp_path / 'mine'}"]
    result = subprocess.run(command, cwd=tiny_run.ROOT, capture_output=True, text=True)
    words = f"error: {tmp_path / 'mine'} exists already; remove it or choose another folder\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", words)
