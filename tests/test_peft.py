"""PEFT adapters: files that are written, files from PEFT, and adapters that do not fit."""

import json
import pathlib

import jax
import numpy as np
import pytest
import trees
from refusal import refused
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import model_config

from qerl_jax.errors import UserError
from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.trainable import Trainable
from qerl_jax.weights import names, peft
from qerl_jax.weights.names import LAYER_NORMS

GOLDEN = pathlib.Path(__file__).parent / "golden"
CONFIG = model_config("qwen3")
LORA_CONFIG = LoraConfig(rank=4, alpha=8.0, rslora=False)


def random_adapter(lora_config=LORA_CONFIG, *, norms=False):
    rng = np.random.default_rng(0)

    def shapes(key):
        params = {}
        if norms:
            scale = jax.numpy.zeros(CONFIG.embed_dim)
            params["layers"] = [dict.fromkeys(LAYER_NORMS, scale)] * CONFIG.num_layers
        return Trainable(lora_lib.init(key, CONFIG, lora_config), params)

    return jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape, np.float32),
        jax.eval_shape(shapes, jax.random.key(0)),
    )


def saved(tmp_path, lora_config=LORA_CONFIG, *, norms=False):
    folder = tmp_path / "adapter"
    adapter = random_adapter(lora_config, norms=norms)
    peft.save_peft_adapter(folder, adapter, lora_config, base_model="someone/base")
    return folder, adapter


def edited(tmp_path, **changes):
    """The folder of an adapter with other fields in its adapter_config.json."""
    folder, _ = saved(tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    "lora_config",
    [
        LORA_CONFIG,
        LoraConfig(rank=2, alpha=3.5, rslora=True),
        LoraConfig(rank=2, alpha=4.0, rslora=False, targets=("down_proj", "q_proj")),
    ],
)
def test_round_trip(tmp_path, lora_config, norms):
    folder, adapter = saved(tmp_path, lora_config, norms=norms)
    read_config, base = peft.read_peft_config(folder)
    assert base == "someone/base"
    assert sorted(read_config.targets) == sorted(lora_config.targets)
    read = peft.load_peft_adapter(folder, CONFIG, read_config)
    trees.assert_equal(read, adapter)
    assert read.lora.scale == lora_config.scale


def test_a_folder_that_is_not_an_adapter(tmp_path):
    words = r"has no adapter_config.json: pass a folder that PEFT"
    refused(words, peft.read_peft_config, tmp_path / "nowhere")
    refused(words, peft.load_peft_adapter, tmp_path, CONFIG, LORA_CONFIG)


def test_the_written_files(tmp_path):
    """`test_golden_peft` compares their content with that of PEFT's own files."""
    folder, _ = saved(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    written = json.loads((folder / "adapter_config.json").read_text())
    assert isinstance(written["lora_alpha"], int)


def test_an_existing_adapter_is_replaced(tmp_path):
    folder, _ = saved(tmp_path)
    (folder / "stale").write_text("")
    _, adapter = saved(tmp_path)
    assert not (folder / "stale").exists()
    trees.assert_equal(peft.load_peft_adapter(folder, CONFIG, LORA_CONFIG), adapter)


def test_a_failed_write_leaves_the_old_adapter(tmp_path, monkeypatch):
    folder, adapter = saved(tmp_path)

    def save_file(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(peft, "save_file", save_file)
    with pytest.raises(UserError, match="No space left on device"):
        peft.save_peft_adapter(folder, random_adapter(), LORA_CONFIG, base_model="x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]
    trees.assert_equal(peft.load_peft_adapter(folder, CONFIG, LORA_CONFIG), adapter)


@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        (LoraConfig(rank=8, alpha=8.0, rslora=False), ["r is 4"]),
        (LoraConfig(rank=4, alpha=16.0, rslora=True), ["lora_alpha is 8", "use_rslora is False"]),
        (LoraConfig(rank=4, alpha=8.0, rslora=False, targets=("q_proj",)), ["target_modules"]),
    ],
)
def test_differing_options_are_listed(tmp_path, asked, fields):
    folder, _ = saved(tmp_path)
    with pytest.raises(UserError) as caught:
        peft.load_peft_adapter(folder, CONFIG, asked)
    for field in fields:
        assert field in str(caught.value)
    assert str(caught.value).count(" is ") == len(fields)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["input_layernorm"]}, "modules_to_save"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.*only input_layernorm and post_attention"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"target_modules": "all-linear"}, "target_modules"),
        *(
            (changes, f"{next(iter(changes))} is .* no plain LoRA")
            for changes in (
                {"init_lora_weights": "pissa_niter_16"},
                {"init_lora_weights": "corda"},
                {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}},
                {"eva_config": {"rho": 2.0}},
                {"alora_invocation_tokens": [5]},
                {"use_qalora": True},
                {"target_parameters": ["mlp.experts"]},
                {"an_option_of_the_future": 1},
            )
        ),
    ],
)
def test_other_kinds_of_adapters_are_refused(tmp_path, changes, words):
    folder = edited(tmp_path, **changes)
    refused(words, peft.load_peft_adapter, folder, CONFIG, LORA_CONFIG)
    if "no plain LoRA" in words:
        refused(words, peft.read_peft_config, folder)


# What PEFT 0.21.2 writes beside the fields of `fill_peft_adapter`, and harmless other values.
PEFT_DEFAULTS = {
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "auto_mapping": {"unsloth_fixed": True},
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": ["lm_head"],
    "init_lora_weights": "gaussian",
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_dropout": 0.1,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_qalora": False,
}


@pytest.mark.parametrize("whole", [True, False])
def test_harmless_options_and_the_targets_of_all_linear(tmp_path, whole):
    """PEFT writes whole paths for 'all-linear' below 20 targets, and ends of paths beyond."""
    paths = [names.layer_module(i, p) for i in range(2) for p in kinds.PROJECTIONS]
    targets = paths if whole else [path.split(".", 3)[-1] for path in paths]
    folder = edited(tmp_path, **PEFT_DEFAULTS | {"target_modules": targets})
    read_config, _ = peft.read_peft_config(folder)
    assert read_config == LORA_CONFIG
    read = peft.load_peft_adapter(folder, CONFIG, read_config)
    trees.assert_equal(read, random_adapter())
    edited(tmp_path, target_modules=[*targets, "lm_head"])
    refused("lm_head", peft.read_peft_config, folder)


def test_every_setting_of_targets_is_read_back(tmp_path):
    for mask in range(1, 1 << len(kinds.PROJECTIONS)):
        targets = tuple(p for i, p in enumerate(kinds.PROJECTIONS) if mask >> i & 1)
        (tmp_path / "adapter_config.json").write_text(
            json.dumps(
                peft._peft_config(LoraConfig(rank=4, alpha=-1e6, targets=targets), "x", norms=False)
            )
        )
        assert peft.read_peft_config(tmp_path)[0].targets == targets


def test_the_base_of_an_adapter(tmp_path):
    assert peft.read_peft_base(edited(tmp_path)) == "someone/base"
    for base in (None, "", "  "):
        folder = edited(tmp_path, base_model_name_or_path=base)
        refused(rf"{folder}: .* pass it as --base=MODEL", peft.read_peft_base, folder)
    refused("revision 'v2' of someone/base", peft.read_peft_base, edited(tmp_path, revision="v2"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: {k.replace("layers.1", "layers.7"): v for k, v in t.items()}, "lacks"),
        (lambda t: t | {"extra": np.ones(1, np.float32)}, "extra"),
        (lambda t: {k: v[:, :3].copy() for k, v in t.items()}, "shape"),
        (lambda t: {k: v.astype(np.int32) for k, v in t.items()}, "int32"),
    ],
)
def test_weights_that_do_not_fit(tmp_path, change, named):
    folder, _ = saved(tmp_path)
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)
    refused(named, peft.load_peft_adapter, folder, CONFIG, LORA_CONFIG)
