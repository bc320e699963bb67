"""Architectures of known models, for code that needs their shapes but not their weights."""

import dataclasses
import math

from qerl_jax.policy.config import (
    ExpertsConfig,
    ModelConfig,
    RecurrentConfig,
    RopeScaling,
    YarnScaling,
)


def _qwen2(vocab: int, embed: int, mlp: int, layers: int, heads: int, kv_heads: int) -> ModelConfig:
    """Returns an architecture of Qwen2.5; up to 3B its embedding is also the output head."""
    return ModelConfig(
        model_type="qwen2",
        vocab_size=vocab,
        embed_dim=embed,
        mlp_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        rope_theta=1e6,
        rope_scaling=None,
        norm_eps=1e-6,
        tie_embeddings=embed <= 2048,
        attention_bias=True,
        qk_norm=False,
        max_position=32768,
    )


def _qwen3(embed: int, mlp: int, layers: int, heads: int, kv_heads: int) -> ModelConfig:
    """Returns an architecture of Qwen3; up to 4B its embedding is also the output head."""
    return dataclasses.replace(
        _qwen2(151936, embed, mlp, layers, heads, kv_heads),
        model_type="qwen3",
        tie_embeddings=embed <= 2560,
        attention_bias=False,
        qk_norm=True,
        max_position=40960,
    )


def _qwen3_5(
    embed: int, mlp: int, layers: int, heads: int, kv_heads: int, value_heads: int
) -> ModelConfig:
    """Returns an architecture of Qwen3.5; up to 4B its embedding is also the output head.

    Shapes are those of config.json in Qwen/Qwen3.5-0.8B to -27B and Qwen/Qwen3.6-27B.
    """
    return dataclasses.replace(
        _qwen3(embed, mlp, layers, heads, kv_heads),
        model_type="qwen3_5",
        vocab_size=248320,
        head_dim=256,
        rope_theta=1e7,
        max_position=262144,
        recurrent=RecurrentConfig(
            key_heads=16, value_heads=value_heads, key_dim=128, value_dim=128, window=4
        ),
        recurrent_layers=tuple(layer for layer in range(layers) if (layer + 1) % 4),
        rotary_dim=64,
        gated_attention=True,
        centered_norms=True,
    )


def _mixture(dense: ModelConfig, experts: ExpertsConfig) -> ModelConfig:
    """Returns an architecture whose MLPs are mixtures of experts, with a head of its own."""
    return dataclasses.replace(
        dense,
        model_type=f"{dense.model_type}_moe",
        tie_embeddings=False,
        experts=experts,
    )


_QWEN_35B = _mixture(_qwen3_5(2048, 4608, 40, 16, 2, 32), ExpertsConfig(256, 8, 512, 512, True))
_QWEN_27B = _qwen3_5(5120, 17408, 64, 24, 4, 48)
_LLAMA_8B = ModelConfig(
    model_type="llama",
    vocab_size=128256,
    embed_dim=4096,
    mlp_dim=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=5e5,
    rope_scaling=RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    ),
    norm_eps=1e-5,
    tie_embeddings=False,
    attention_bias=False,
    qk_norm=False,
    max_position=131072,
)

ARCHITECTURES = {
    "smollm2-135m": ModelConfig(
        model_type="llama",
        vocab_size=49152,
        embed_dim=576,
        mlp_dim=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=1e5,
        rope_scaling=None,
        norm_eps=1e-5,
        tie_embeddings=True,
        attention_bias=False,
        qk_norm=False,
        max_position=8192,
    ),
    "qwen2.5-coder-1.5b": _qwen2(151936, 1536, 8960, 28, 12, 2),
    "qwen2.5-1.5b": _qwen2(151936, 1536, 8960, 28, 12, 2),
    "qwen2.5-3b": _qwen2(151936, 2048, 11008, 36, 16, 2),
    "qwen2.5-7b": _qwen2(152064, 3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _qwen2(152064, 5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _qwen2(152064, 5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _qwen2(152064, 8192, 29568, 80, 64, 8),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8),
    "qwen3-30b-a3b": _mixture(
        _qwen3(2048, 6144, 48, 32, 4), ExpertsConfig(128, 8, 768, 0, normalized=True)
    ),
    "qwen3.5-0.8b": _qwen3_5(1024, 3584, 24, 8, 2, 16),
    "qwen3.5-2b": _qwen3_5(2048, 6144, 24, 8, 2, 16),
    "qwen3.5-4b": _qwen3_5(2560, 9216, 32, 16, 4, 32),
    "qwen3.5-9b": _qwen3_5(4096, 12288, 32, 16, 4, 32),
    "qwen3.5-27b": _QWEN_27B,
    "qwen3.5-35b-a3b": _QWEN_35B,
    "qwen3.6-27b": _QWEN_27B,
    "qwen3.6-35b-a3b": _QWEN_35B,
    "mistral-7b": dataclasses.replace(
        _LLAMA_8B,
        model_type="mistral",
        vocab_size=32768,
        rope_theta=1e6,
        rope_scaling=None,
        max_position=32768,
    ),
    "llama3.1-8b": _LLAMA_8B,
    # config.json in openai/gpt-oss-20b
    "gpt-oss-20b": ModelConfig(
        model_type="gpt_oss",
        vocab_size=201088,
        embed_dim=2880,
        mlp_dim=4 * 2880,
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        rope_theta=150000.0,
        rope_scaling=YarnScaling(
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            original_max_position=4096,
            truncate=False,
            attention_factor=0.1 * math.log(32) + 1,
        ),
        norm_eps=1e-5,
        tie_embeddings=False,
        attention_bias=True,
        qk_norm=False,
        max_position=131072,
        experts=ExpertsConfig(32, 4, 2880, 0, normalized=True),
        sinks=True,
        window=128,
        window_layers=tuple(range(0, 24, 2)),
        other_biases=True,
        swiglu_limit=7.0,
    ),
}
