"""Hugging Face's tensor names for the parameter tree, used by loading, exports and adapters."""

from collections.abc import Collection

from qerl_jax.policy.aqn import LAYER_NORMS
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import FUSED, projection_shapes

EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
HEAD_NORMS = ("q_norm", "k_norm")
BIASED = ("q_proj", "k_proj", "v_proj")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", *HEAD_NORMS)


def layer_module(layer: int, module: str) -> str:
    """Returns the path of a layer's projection or norm, as 'model.layers.0.self_attn.q_proj'."""
    if module in LAYER_NORMS:
        return f"model.layers.{layer}.{module}"
    block = "self_attn" if module in _ATTENTION else "mlp"
    return f"model.layers.{layer}.{block}.{module}"


def peft_tensor(layer: int, projection: str, matrix: str) -> str:
    """Returns PEFT's name of an adapter matrix; `matrix` is 'a' ([R, K]) or 'b' ([N, R])."""
    return f"base_model.model.{layer_module(layer, projection)}.lora_{matrix.upper()}.weight"


def peft_norm(layer: int, norm: str) -> str:
    """Returns PEFT's name of a layer's norm that is trained together with an adapter."""
    return f"base_model.model.{layer_module(layer, norm)}.weight"


def stored_tensors(config: ModelConfig, layer: int) -> dict[str, list[str]]:
    """Returns by name of an array of the parameter tree the stored tensors whose rows it stacks.

    Args:
        config: the architecture.
        layer: number of the layer, or -1 for the arrays outside of the layers.
    """
    if layer < 0:
        arrays = {"embed_tokens": [EMBED], "norm": [NORM]}
        return arrays if config.tie_embeddings else arrays | {"lm_head": [HEAD]}
    modules = {norm: (norm,) for norm in LAYER_NORMS + (HEAD_NORMS if config.qk_norm else ())}
    arrays = {
        array: [f"{layer_module(layer, member)}.weight" for member in members]
        for array, members in (modules | FUSED).items()
    }
    if config.attention_bias:
        arrays["qkv_bias"] = [f"{layer_module(layer, member)}.bias" for member in BIASED]
    return arrays


def expected_shapes(
    config: ModelConfig, *, packed: Collection[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of a checkpoint by its name.

    Args:
        config: the architecture.
        packed: names of the modules that are stored in the NVFP4 of compressed-tensors, as
            weight_packed [N, K/2], weight_scale [N, K/16] and weight_global_scale [1] instead of
            weight [N, K].
    """
    shapes: dict[str, tuple[int, ...]] = {
        EMBED: (config.vocab_size, config.embed_dim),
        NORM: (config.embed_dim,),
    }
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, config.embed_dim)
    for layer in range(config.num_layers):
        for norm in LAYER_NORMS:
            shapes[f"{layer_module(layer, norm)}.weight"] = (config.embed_dim,)
        if config.qk_norm:
            for norm in HEAD_NORMS:
                shapes[f"{layer_module(layer, norm)}.weight"] = (config.head_dim,)
        for projection, (outputs, inputs) in projection_shapes(config).items():
            module = layer_module(layer, projection)
            if module in packed:
                shapes[f"{module}.weight_packed"] = (outputs, inputs // 2)
                shapes[f"{module}.weight_scale"] = (outputs, inputs // 16)
                shapes[f"{module}.weight_global_scale"] = (1,)
            else:
                shapes[f"{module}.weight"] = (outputs, inputs)
            if config.attention_bias and projection in BIASED:
                shapes[f"{module}.bias"] = (outputs,)
    return shapes
