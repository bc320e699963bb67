"""Tiny random policies in float32, dense or in NVFP4, and rows of tokens for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoints import VOCAB, model_config

from qerl_jax.policy import transformer
from qerl_jax.policy.layers.kinds import (
    ALL_PROJECTIONS,
    PACKED,
    array_shapes,
    fused_of,
    projection_shapes,
    stack_shapes,
)
from qerl_jax.policy.lora import Lora, LoraConfig, matrix_shapes
from qerl_jax.policy.quant import QuantTensor, dequantize, quantize_nvfp4
from qerl_jax.weights.load import load

KINDS = ("qwen2", "qwen3", "llama")


def tiny_policy(model_type="qwen3", *, quantized=False, seed=0, **changes):
    """Returns the architecture and the parameters of a random policy, as in `model_config`."""
    config = model_config(model_type, **changes)
    rng = np.random.default_rng(seed)
    shapes = projection_shapes(config)

    def norm(size):
        return jnp.asarray(1.0 + 0.2 * rng.standard_normal(size), jnp.float32)

    def projection(fused, members):
        return stored(fused, [shapes[name] for name in members])

    def stored(fused, sizes):
        weights = [rng.standard_normal(size, np.float32) / size[1] ** 0.5 for size in sizes]
        if quantized and fused in PACKED:
            return jax.tree.map(jnp.asarray, quantize_nvfp4(weights))
        return jnp.asarray(np.concatenate(weights))

    def layer(number):
        groups = fused_of(config, number)
        weights = {fused: projection(fused, members) for fused, members in groups.items()}
        for name, (experts, rows, columns) in stack_shapes(config, number).items():
            parts = [stored(name, [(rows, columns)]) for _ in range(experts)]
            weights[name] = jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts)
        weights["input_layernorm"] = norm(config.embed_dim)
        weights["post_attention_layernorm"] = norm(config.embed_dim)
        for name, shape in array_shapes(config, number).items():
            if name.endswith("norm"):
                weights[name] = norm(shape)
            elif name == "a_log":
                weights[name] = jnp.asarray(rng.uniform(-3, 1, shape), jnp.float32)
            else:
                size = 0.3 if name == "qkv_bias" else 1.0
                weights[name] = jnp.asarray(size * rng.standard_normal(shape), jnp.float32)
        return weights

    table = (config.vocab_size, config.embed_dim)
    params = {
        "embed_tokens": jnp.asarray(rng.standard_normal(table, np.float32)),
        "norm": norm(config.embed_dim),
        "layers": [layer(number) for number in range(config.num_layers)],
    }
    if not config.tie_embeddings:
        params["lm_head"] = jnp.asarray(rng.standard_normal(table, np.float32) / 4)
    return config, params


def rounded_to_bfloat16(params):
    """Weights as compressed-tensors decompresses them: rounded to bfloat16, in float32."""
    layers = [
        {
            name: dequantize(value, jnp.bfloat16).astype(jnp.float32)
            if isinstance(value, QuantTensor)
            else value
            for name, value in layer.items()
        }
        for layer in params["layers"]
    ]
    return {**params, "layers": layers}


def random_lora(config, *, rank=4, scale=0.5, targets=None, seed=1, expert_rank=0):
    """Returns adapters with random numbers in both factors, by default of all projections."""
    rng = np.random.default_rng(seed)
    shapes = projection_shapes(config)
    targets = [name for name in ALL_PROJECTIONS if name in shapes] if targets is None else targets
    options = LoraConfig(rank, 1.0, targets=tuple(targets), expert_rank=expert_rank)

    def factor(shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32) / shape[-1] ** 0.5)

    layers = [
        {name: {matrix: factor(shape) for matrix, shape in own.items()}
         for name, own in matrix_shapes(config, layer, options).items()}
        for layer in range(config.num_layers)
    ]  # fmt: skip
    return Lora(layers=layers, scale=scale)


def random_tokens(*shape, seed=2):
    """Returns random int32 token ids."""
    return np.random.default_rng(seed).integers(0, VOCAB, shape, np.int32)


def assert_transformers_agrees(folder):
    """Transformers computes the logits of a model folder in NVFP4, or the test is skipped."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")

    model = load(str(folder), dtype="float32")
    # compressed-tensors rounds each weight to bfloat16 after it has applied the scales.
    params = transformer.dequantize_params(
        {**model.params, "embed_tokens": model.params["embed_tokens"].astype(jnp.bfloat16)}
    )
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    ids = np.arange(2, 18, dtype=np.int32)[None]
    logits = transformer.forward(params, None, ids, jnp.array([16]), config=model.config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        theirs(torch.tensor(ids, dtype=torch.long))  # decompresses
        # Float64, because the float32 logits of transformers are less exact than the project's.
        plain = {key: value.double() for key, value in theirs.state_dict().items()}
        config = transformers.AutoConfig.from_pretrained(folder)
        del config.quantization_config
        fresh = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
        missing, _ = fresh.load_state_dict(plain, strict=False)
        assert set(missing) <= {"lm_head.weight"}
        fresh.tie_weights()
        expected = fresh(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=0)  # of logits up to 20
