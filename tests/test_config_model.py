"""Reading and writing config.json."""

import math
import pathlib
import re

import pytest
import transformers
from refusal import refused
from tiny_checkpoints import model_config

from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.config import (
    MODEL_TYPES,
    ExpertsConfig,
    RopeScaling,
    YarnScaling,
    from_hf_config,
    text_config_json,
    to_hf_config,
)

ROOT = pathlib.Path(__file__).resolve().parents[1]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


def hf_config(model_type="qwen2", **changes):
    return {
        "model_type": model_type,
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
    } | changes


def test_qwen2_has_biases_and_derives_head_dim_from_its_width():
    config = from_hf_config(hf_config(use_sliding_window=False, sliding_window=32768))
    assert config.attention_bias
    assert not config.qk_norm
    assert config.head_dim == 128
    assert config.tie_embeddings
    assert config.rope_theta == 1e6
    assert config.rope_scaling is None


def test_qwen3_has_qk_norm_and_states_its_head_dim():
    config = from_hf_config(hf_config("qwen3", attention_bias=False))
    assert config.qk_norm
    assert not config.attention_bias
    assert config.head_dim == 128
    assert from_hf_config(hf_config("qwen3", head_dim=64)).head_dim == 64


def test_mistral_is_read_as_its_versions_state_it():
    """The config.json of Mistral-7B-Instruct-v0.3, and what Nemo and a window change."""
    v3 = hf_config(
        "mistral", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
        sliding_window=None, tie_word_embeddings=False, rms_norm_eps=1e-5, vocab_size=32768,
        intermediate_size=14336, num_hidden_layers=32,
    )  # fmt: skip
    assert from_hf_config(v3) == ARCHITECTURES["mistral-7b"]
    assert from_hf_config(v3 | {"hidden_size": 5120, "head_dim": 128}).head_dim == 128
    assert from_hf_config(v3 | {"hidden_size": 5120}).head_dim == 160
    # A window that no context exceeds hides nothing.
    assert from_hf_config(v3 | {"sliding_window": 32768}) == ARCHITECTURES["mistral-7b"]
    # Without the key transformers takes a window of 4,096, that of the first version.
    without = {key: value for key, value in v3.items() if key != "sliding_window"}
    assert transformers.MistralConfig(**without).sliding_window == 4096
    refused("sliding_window='absent' of 32768 positions", from_hf_config, without)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
        {"rope_theta": None, "rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_type"}
            | {"type": "llama3"},
        },
    ],
)
def test_both_spellings_of_llama3_scaling(rope):
    config = from_hf_config(hf_config("llama", **rope))
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma3"}, "gemma3"),
        ({"model_type": None}, "None"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}, "4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"model_type": "llama", "sliding_window": 4096}, "4096"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window=4096 of 32768 positi"),
        ({"model_type": "mistral", "sliding_window": "4096"}, "sliding_window is '4096'"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias=true is not supported"),
        ({"model_type": "ministral3"}, "ministral3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 5}, "12 heads"),
        ({"num_attention_heads": 0, "num_key_value_heads": 1}, "0 heads"),
        ({"head_dim": 33}, "head_dim"),
        ({"hidden_size": -1}, "embed_dim"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ({"use_sliding_window": 1, "sliding_window": 4096}, "use_sliding_window is 1"),
        ({"max_window_layers": "28", "sliding_window": 4096}, "max_window_layers is '28'"),
        ({"layer_types": 5}, "sliding"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": -1e-6}, "norm_eps is -1e-06"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_theta": 0}, "rope_theta is 0.0"),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}}, "between 4.0 and 4.0"),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": 0}}, "rope scaling by 0.0"),
        (
            {"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 0}},
            "original_max_position is 0",
        ),
        ({"hidden_act": "x" * 5000}, "hidden_act"),
    ],
)
def test_unsupported_fields_are_rejected_by_name(changes, named):
    caught = refused(named, from_hf_config, hf_config() | changes)
    assert len(caught) < 300


def test_a_window_that_no_layer_uses_is_accepted():
    from_hf_config(hf_config(use_sliding_window=True, sliding_window=4096, max_window_layers=28))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("scaling", [None, RopeScaling(8.0, 1.0, 4.0, 8192)])
def test_hf_config_round_trip(model_type, scaling):
    config = model_config(model_type, rope_scaling=scaling, tie_embeddings=True)
    assert from_hf_config(to_hf_config(config)) == config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 5, "sliding_window": 64, "swiglu_limit": 3.5, "head_dim": 32},
        {"layer_types": ["full_attention"] * 36},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
        {
            "max_position_embeddings": 32768,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "original_max_position_embeddings": 8192,
                "mscale": 0.7,
                "mscale_all_dim": 0.5,
            },
        },
    ],
)
def test_gpt_oss_of_transformers_own_class(changes):
    """Its windows and YaRN are read as transformers computes them, and written to be so read."""
    theirs = transformers.GptOssConfig(**changes)
    config = from_hf_config(theirs.to_dict())
    kinds = ["full_attention"] * config.num_layers
    for number in config.window_layers:
        kinds[number] = "sliding_attention"
        assert config.of_layer(number).window == theirs.sliding_window
    assert kinds == theirs.layer_types
    full = kinds.index("full_attention")
    assert config.of_layer(full).window == 0
    assert config.experts == ExpertsConfig(128, 4, 2880, 0, normalized=True)
    assert (config.swiglu_limit, config.head_dim) == (theirs.swiglu_limit, theirs.head_dim)
    read = transformers.GptOssConfig(**to_hf_config(config))
    for name in ("layer_types", "num_local_experts", "num_experts_per_tok", "intermediate_size"):
        assert getattr(read, name) == getattr(theirs, name), name
    assert from_hf_config(read.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": False}, "attention_bias=False is not supported for gpt_oss"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported for gpt_oss"),
        ({"swiglu_limit": 0.0}, "swiglu_limit is 0.0, must be positive"),
        ({"swiglu_limit": None, "num_local_experts": 3}, "4 experts of a token are more than all"),
        ({"sliding_window": 0}, "sliding_window is 0, must be positive"),
        ({"sliding_window": None}, "sliding_window is None, must be positive"),
        ({"layer_types": ["sliding_attention"]}, "must name one of sliding_attention, full_att"),
        ({"layer_types": "sliding_attention"}, "layer_types is 'sliding_attention'"),
        ({"layer_types": [["full_attention"]] * 28}, r"layer_types is \[\['full_attention'\]"),
        ({"num_hidden_layers": 1 << 60}, "layers are more than"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "original_max_position_embed"),
        ({"rope_scaling": YARN | {"factor": 0.5}}, "YaRN by 0.5 between"),
        ({"rope_scaling": YARN | {"beta_slow": 64}}, "YaRN by 2.0 between 64.0 and 32.0"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor 0.0"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate is 1"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, "from 0 positions"),
    ],
)
def test_gpt_oss_that_is_not_supported(changes, named):
    hf = hf_config("gpt_oss", num_local_experts=8, num_experts_per_tok=4)
    assert from_hf_config(hf).rope_scaling == YarnScaling(
        32.0, 32.0, 1.0, 4096, False, attention_factor=0.1 * math.log(32) + 1
    )
    assert len(refused(named, from_hf_config, hf | changes)) < 300


@pytest.mark.parametrize(
    ("theirs", "experts"),
    [
        # norm_topk_prob=false is the default of the class, which no published model has.
        (transformers.Qwen3MoeConfig(), ExpertsConfig(128, 8, 768, 0, normalized=False)),
        (
            transformers.Qwen3MoeConfig(
                num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, head_dim=32
            ),
            ExpertsConfig(6, 2, 768, 0, normalized=True),
        ),
        (transformers.Qwen3_5MoeTextConfig(), ExpertsConfig(256, 8, 512, 512, normalized=True)),
        (
            transformers.Qwen3_5MoeConfig(
                text_config={"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 9}
            ),
            ExpertsConfig(4, 4, 9, 512, normalized=True),
        ),
    ],
)
def test_mixtures_of_transformers_own_classes(theirs, experts):
    """What transformers writes is read, and what is written transformers reads."""
    config = from_hf_config(theirs.to_dict())
    assert config.experts == experts
    assert config.mlp_dim == experts.active_width
    text = theirs.get_text_config()
    default = text.hidden_size // text.num_attention_heads
    assert config.head_dim == getattr(text, "head_dim", default)
    read = type(text)(**to_hf_config(config))
    for name in (
        *("hidden_size", "num_hidden_layers", "num_experts", "num_experts_per_tok", "vocab_size"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob"),
        *("layer_types", "mlp_only_layers", "rope_parameters", "max_position_embeddings"),
    ):
        if hasattr(text, name):
            assert getattr(read, name) == getattr(text, name), name
    assert from_hf_config(text_config_json(theirs.to_dict())) == config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported"),
        ({"num_experts_per_tok": 9}, "9 experts of a token are more than all 8"),
        ({"num_experts": 0}, "count of the experts is 0"),
        ({"num_experts": "8"}, "num_experts is '8'"),
        ({"moe_intermediate_size": -1}, "width of the experts is -1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_mixtures_that_are_not_supported(changes, named):
    hf = hf_config("qwen3_moe", num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)
    from_hf_config(hf)
    assert len(refused(named, from_hf_config, hf | changes)) < 300


def test_the_digest_of_a_model_without_experts_stays():
    """Runs have it in their folders: a new field with its default leaves it as it was."""
    assert ARCHITECTURES["qwen2.5-7b"].digest == "bee783a6c58cf607"
    assert ARCHITECTURES["qwen3.5-27b"].digest == "8f692c0035fe79bd"
    digests = [architecture.digest for architecture in ARCHITECTURES.values()]
    assert len({*digests}) == len({*ARCHITECTURES.values()})


def test_contributing_lists_the_places_of_a_family():
    """Every file of the product that names a family is in the list, and what is listed exists."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    steps = page.partition("## Add a model family")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`([a-z_/]+/[a-z_0-9]+\.py)`", steps))
    assert all((ROOT / path).is_file() for path in listed)
    named = re.compile("|".join(f"[\"']{name}[\"']" for name in MODEL_TYPES))
    found = {
        path.relative_to(ROOT).as_posix()
        for package in ("qerl_jax", "pallas_kernels", "experiments", "benchmarks")
        for path in (ROOT / package).rglob("*.py")
        if named.search(path.read_text())
    }
    assert "qerl_jax/policy/config.py" in found
    assert found <= listed


def test_transformers_reads_the_written_config():
    written = to_hf_config(model_config("llama", rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192)))
    read = transformers.LlamaConfig(**written)
    assert read.head_dim == 8
    assert read.rope_parameters["rope_type"] == "llama3"
    assert read.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize("theta", [None, 3e5])
@pytest.mark.parametrize("scaling", [None, {}, LLAMA3_ROPE, LLAMA3_ROPE | {"rope_theta": 2e5}])
def test_rope_scaling_beside_rope_parameters_is_read_as_in_transformers(scaling, theta):
    hf = hf_config(
        "llama", rope_scaling=scaling, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    hf = {k: v for k, v in hf.items() if k != "rope_theta"} | (
        {"rope_theta": theta} if theta else {}
    )
    config = from_hf_config(hf)
    theirs = transformers.LlamaConfig(**hf).rope_parameters
    assert config.rope_theta == theirs["rope_theta"]
    assert (config.rope_scaling is not None) == (theirs["rope_type"] == "llama3")
