"""Hugging Face's tensor names for the parameter tree, used by loading, exports and adapters."""

from collections.abc import Collection, Mapping
from typing import Any

from qerl_jax.policy.aqn import LAYER_NORMS
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import RECURRENT, fused_of, projection_shapes

EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
HEAD_NORMS = ("q_norm", "k_norm")
BIASED = ("q_proj", "k_proj", "v_proj")
# Other arrays of a recurrent layer, and the tensors that hold them.
RECURRENT_TENSORS = {
    "conv": "conv1d.weight",
    "a_log": "A_log",
    "dt_bias": "dt_bias",
    "gated_norm": "norm.weight",
}
# Arrays that the parameter tree, and an export, have in float32 like the norms.
_WIDE = ("a_log", "dt_bias")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", *HEAD_NORMS)
_RECURRENT = tuple(name for members in RECURRENT.values() for name in members)
# Where the text model is in a checkpoint that also has a vision tower.
_NESTED_ROOT = "model.language_model."
_NOT_TEXT = ("model.visual.", "mtp.")


def layer_module(layer: int, module: str) -> str:
    """Returns the path of a layer's projection or norm, as 'model.layers.0.self_attn.q_proj'."""
    if module in LAYER_NORMS:
        return f"model.layers.{layer}.{module}"
    block = (
        "self_attn" if module in _ATTENTION else "linear_attn" if module in _RECURRENT else "mlp"
    )
    return f"model.layers.{layer}.{block}.{module}"


def is_wide(array: str) -> bool:
    """Whether an array of the parameter tree is in float32 whatever the policy's dtype."""
    return array.endswith("norm") or array in _WIDE


def centered_at(config: ModelConfig, array: str) -> float:
    """Returns what an array of the parameter tree is more than the stored tensor: 0 or 1."""
    norms = (*LAYER_NORMS, *HEAD_NORMS, "norm")
    return 1.0 if config.centered_norms and array in norms else 0.0


def text_tensors(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the tensors of a text model by their names, and which other parts were left out.

    These are a vision tower and a head for several tokens (MTP).
    """
    text = {
        name.replace(_NESTED_ROOT, "model.", 1) if name.startswith(_NESTED_ROOT) else name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(_NOT_TEXT)
    }
    parts = zip(_NOT_TEXT, ("the vision tower", "the MTP head"), strict=True)
    return text, [part for start, part in parts if any(n.startswith(start) for n in tensors)]


def dense_modules(config: ModelConfig) -> list[str]:
    """Returns the projections of a model that no format packs, by the paths of their modules."""
    return [layer_module(layer, name) for layer in config.recurrent_layers for name in _RECURRENT]


def peft_tensor(layer: int, projection: str, matrix: str) -> str:
    """Returns PEFT's name of an adapter matrix; `matrix` is 'a' ([R, K]) or 'b' ([N, R])."""
    return f"base_model.model.{layer_module(layer, projection)}.lora_{matrix.upper()}.weight"


def nested_peft(name: str) -> str:
    """Returns PEFT's name of a tensor for a base that also has a vision tower."""
    return name.replace("base_model.model.model.", f"base_model.model.{_NESTED_ROOT}", 1)


def plain_peft(name: str) -> str:
    """Returns PEFT's name of a tensor for the text model alone, whatever the base has."""
    return name.replace(f"base_model.model.{_NESTED_ROOT}", "base_model.model.model.", 1)


def peft_norm(layer: int, norm: str) -> str:
    """Returns PEFT's name of a layer's norm that is trained together with an adapter."""
    return f"base_model.model.{layer_module(layer, norm)}.weight"


def stored_tensors(config: ModelConfig, layer: int) -> dict[str, list[str]]:
    """Returns by name of an array of the parameter tree the stored tensors whose rows it stacks.

    Layer -1 has the arrays outside of the layers.
    """
    if layer < 0:
        arrays = {"embed_tokens": [EMBED], "norm": [NORM]}
        return arrays if config.tie_embeddings else arrays | {"lm_head": [HEAD]}
    is_recurrent = layer in config.recurrent_layers
    head_norms = HEAD_NORMS if config.qk_norm and not is_recurrent else ()
    modules = {norm: (norm,) for norm in LAYER_NORMS + head_norms}
    arrays = {
        array: [f"{layer_module(layer, member)}.weight" for member in members]
        for array, members in (modules | fused_of(config, layer)).items()
    }
    if is_recurrent:
        arrays |= {
            array: [f"model.layers.{layer}.linear_attn.{tensor}"]
            for array, tensor in RECURRENT_TENSORS.items()
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
    of_projections = projection_shapes(config)
    for layer in range(config.num_layers):
        is_recurrent = layer in config.recurrent_layers
        for norm in LAYER_NORMS:
            shapes[f"{layer_module(layer, norm)}.weight"] = (config.embed_dim,)
        if config.qk_norm and not is_recurrent:
            for norm in HEAD_NORMS:
                shapes[f"{layer_module(layer, norm)}.weight"] = (config.head_dim,)
        if is_recurrent:
            shapes |= _recurrent_shapes(config, layer)
        for projection in (name for names in fused_of(config, layer).values() for name in names):
            outputs, inputs = of_projections[projection]
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


def _recurrent_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of a recurrent layer that are no projections, by name."""
    shapes = config.recurrent
    assert shapes is not None
    heads = (shapes.value_heads,)
    arrays: dict[str, tuple[int, ...]] = {
        "conv": (shapes.channels, 1, shapes.window),
        "a_log": heads,
        "dt_bias": heads,
        "gated_norm": (shapes.value_dim,),
    }
    root = f"model.layers.{layer}.linear_attn"
    return {f"{root}.{RECURRENT_TENSORS[array]}": shape for array, shape in arrays.items()}
