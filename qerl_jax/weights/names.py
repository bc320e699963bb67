"""Hugging Face's tensor names for the parameter tree, used by loading, exports and adapters."""

import itertools
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from pallas_kernels.fp4_matmul import FORMATS
from qerl_jax.policy.aqn import LAYER_NORMS
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers import kinds

EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
_NORMS = (*LAYER_NORMS, "norm")
# The modules of projections, and of the norms of heads.
_MODULES = {
    name: part.MODULE
    for part in kinds.PARTS
    for name in (
        *itertools.chain(*(weight.members for weight in part.WEIGHTS)),
        *part.ARRAYS,
        *(stack.name for stack in part.STACKS),
    )
}
# Where the text model is in a checkpoint that also has a vision tower.
_NESTED_ROOT = "model.language_model."
_OF_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.(.+)")
_NOT_TEXT = ("model.visual.", "mtp.")


def layer_module(layer: int, module: str) -> str:
    """Returns the path of a layer's projection or norm, as 'model.layers.0.self_attn.q_proj'."""
    block = f"{_MODULES[module]}." if module in _MODULES else ""
    return f"model.layers.{layer}.{block}{module}"


def is_wide(array: str) -> bool:
    """Whether an array of the parameter tree is in float32 whatever the policy's dtype."""
    return kinds.ARRAYS[array].is_wide if array in kinds.ARRAYS else array in _NORMS


def may_be_centered(array: str) -> bool:
    """Whether an array of the parameter tree is a norm that some models store minus 1."""
    return kinds.ARRAYS[array].may_be_centered if array in kinds.ARRAYS else array in _NORMS


def centered_at(config: ModelConfig, array: str) -> float:
    """Returns what an array of the parameter tree is more than the stored tensor: 0 or 1."""
    return 1.0 if config.centered_norms and may_be_centered(array) else 0.0


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


def expert_tensors(config: ModelConfig, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors of a checkpoint with those of each projection of each expert.

    Tensors that stack all experts of a layer are cut into views: [E, N, K] of the weights, and in
    the NVFP4 of compressed-tensors the stacked weight_packed, weight_scale and weight_global_scale;
    of gpt-oss what `interleaved` describes.
    """
    found = dict(tensors)
    if interleaves(config):
        return _interleaved_expert_tensors(config, found)
    stacks = {
        f"{_MODULES[stack.name]}.{stack.tensor}{suffix}": (stack, suffix)
        for stack in kinds.STACKS.values()
        for suffix in ("", "_packed", "_scale", "_global_scale")
    }
    for path, tensor in tensors.items():
        match = _OF_LAYER.fullmatch(path)
        if match is None or match[2] not in stacks or int(match[1]) >= config.num_layers:
            continue
        stack, suffix = stacks[match[2]]
        layer, members = int(match[1]), len(stack.members)
        experts, rows, columns = kinds.stack_shapes(config, layer).get(stack.name, (0, 0, 0))
        columns //= {"_packed": 2, "_scale": 16}.get(suffix, 1)
        shape, of_part = (experts, rows, columns), (rows // members, columns)
        if suffix == "_global_scale":
            shape, of_part = (experts, members), (1,)
        if not experts or tensor.shape != shape:
            continue  # The checks of the checkpoint name what is missing then.
        parts = found.pop(path).reshape(experts * members, *of_part)
        modules = expert_modules(config, layer)[stack.name]
        found |= {f"{m}.weight{suffix}": part for m, part in zip(modules, parts, strict=True)}
    return found


def interleaves(config: ModelConfig) -> bool:
    """Whether checkpoints store experts with rows of gate and up in turn, and dense ones [K, N]."""
    return config.model_type == "gpt_oss"


def interleaved(parts: np.ndarray) -> np.ndarray:
    """Returns rows [E, members, n, ...] of experts as gpt-oss stores them, [E, N, ...].

    Rows i of all members are next to each other: gate in even rows, up in odd ones. That holds for
    `experts.gate_up_proj_bias` [E, 2F] and for the MXFP4 of `experts.gate_up_proj_blocks`
    [E, 2F, D/32, 16] and `_scales` [E, 2F, D/32], whose bytes are those of `QuantTensor`. A dense
    `experts.gate_up_proj` is [E, D, 2F].
    """
    rows = parts.swapaxes(1, 2)
    return rows.reshape(len(rows), -1, *rows.shape[3:])


def _interleaved_expert_tensors(config: ModelConfig, found: dict[str, Any]) -> dict[str, Any]:
    """`expert_tensors` of gpt-oss, whose packed experts get the names of compressed-tensors."""
    suffixes = {"": "", "_blocks": "_packed", "_scales": "_scale", "_bias": ""}
    for layer, (name, stack) in itertools.product(range(config.num_layers), kinds.STACKS.items()):
        experts, rows, columns = kinds.stack_shapes(config, layer)[name]
        members, modules = len(stack.members), expert_modules(config, layer)[name]
        for suffix, shape in {
            "": (experts, columns, rows),
            "_blocks": (experts, rows, columns // 32, 16),
            "_scales": (experts, rows, columns // 32),
            "_bias": (experts, rows),
        }.items():
            path = f"{stacked_tensor(layer, name)}{suffix}"
            if path not in found or found[path].shape != shape:
                continue  # The checks of the checkpoint name what is missing then.
            whole = found[path] if suffix else found[path].swapaxes(1, 2)
            if suffix == "_blocks":
                whole = whole.reshape(experts, rows, -1)
            parts = whole.reshape(experts, -1, members, *whole.shape[2:]).swapaxes(1, 2)
            if suffix == "_bias":
                found[path] = parts if members > 1 else whole
                continue
            del found[path]
            own = (part for expert in parts for part in expert)
            found |= {
                f"{module}.weight{suffixes[suffix]}": part
                for module, part in zip(modules, own, strict=True)
            }
    return found


def stacked_tensor(layer: int, stack: str) -> str:
    """Returns the name of the tensor with the weights of all experts, of a stack of a layer."""
    return f"model.layers.{layer}.{_MODULES[stack]}.{kinds.STACKS[stack].tensor}"


def expert_modules(config: ModelConfig, layer: int) -> dict[str, list[str]]:
    """Returns by name of a stack the modules of its experts' projections, in the order of rows."""
    found = {}
    for name, (count, _, _) in kinds.stack_shapes(config, layer).items():
        found[name] = modules_of_stack(layer, name, count)
    return found


def modules_of_stack(layer: int, stack: str, experts: int) -> list[str]:
    """Returns the modules of the projections of a number of experts, in the order of rows."""
    path = stacked_tensor(layer, stack).rpartition(".")[0]
    members = kinds.STACKS[stack].members
    return [f"{path}.{e}.{member}" for e in range(experts) for member in members]


def stacks_experts(config: ModelConfig) -> bool:
    """Whether checkpoints of the family have the dense weights of all experts of a layer in one.

    Qwen3-MoE is published with a tensor for each projection of each expert, which transformers 5
    writes, too. vLLM reads both.
    """
    return config.model_type in ("qwen3_5_moe", "gpt_oss")


def dense_modules(config: ModelConfig) -> list[str]:
    """Returns the linear modules of a model that no format packs: projections, and routers."""
    found = []
    for layer in range(config.num_layers):
        for fused, members in kinds.fused_of(config, layer).items():
            if not kinds.WEIGHTS[fused].packed:
                found += [layer_module(layer, member) for member in members]
        for tensors in other_tensors(config, layer).values():
            matrices = [name for name in tensors if name.endswith(".weight")]
            matrices = [name for name in matrices if len(tensors[name]) == 2]
            found += [name.removesuffix(".weight") for name in matrices]
    return found


def peft_tensor(layer: int, projection: str, matrix: str) -> str:
    """Returns PEFT's name of an adapter matrix; `matrix` is 'a' ([R, K]) or 'b' ([N, R])."""
    return f"base_model.model.{layer_module(layer, projection)}.lora_{matrix.upper()}.weight"


def peft_experts(layer: int, stack: str, matrix: str) -> str:
    """Returns PEFT's name of the matrices of all experts of a stack, see `peft.expert_tensors`.

    PEFT wraps the module of the experts once for each stack, the first one innermost.
    """
    stacks = list(kinds.STACKS)
    wrappers = "base_layer." * (len(stacks) - 1 - stacks.index(stack))
    path = stacked_tensor(layer, stack).rpartition(".")[0]
    return f"base_model.model.{path}.{wrappers}lora_{matrix.upper()}.weight"


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
    """Returns by name of an array the stored tensors whose rows it stacks.

    The layer -1 has the arrays outside of the layers.
    """
    if layer < 0:
        arrays = {"embed_tokens": [EMBED], "norm": [NORM]}
        return arrays if config.tie_embeddings else arrays | {"lm_head": [HEAD]}
    arrays = {norm: [f"{layer_module(layer, norm)}.weight"] for norm in LAYER_NORMS}
    for fused, members in kinds.fused_of(config, layer).items():
        arrays[fused] = [f"{layer_module(layer, member)}.weight" for member in members]
    for stack, modules in expert_modules(config, layer).items():
        arrays[stack] = [f"{module}.weight" for module in modules]
    return arrays | {
        array: list(tensors) for array, tensors in other_tensors(config, layer).items()
    }


def other_tensors(config: ModelConfig, layer: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the tensors of `kinds.other_tensors`, and their shapes, by their whole names."""
    return {
        array: {f"model.layers.{layer}.{name}": shape for name, shape in tensors.items()}
        for array, tensors in kinds.other_tensors(config, layer).items()
    }


def expected_shapes(
    config: ModelConfig, *, packed: Collection[str] = (), form: str = "nvfp4"
) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of a checkpoint by its name.

    Args:
        config: the architecture.
        packed: names of the modules that are stored in the NVFP4 of compressed-tensors, as
            weight_packed [N, K/2], weight_scale [N, K/16] and weight_global_scale [1] instead of
            weight [N, K].
        form: 'nvfp4', or 'mxfp4' with weight_packed [N, K/2] and weight_scale [N, K/32].
    """
    shapes: dict[str, tuple[int, ...]] = {
        EMBED: (config.vocab_size, config.embed_dim),
        NORM: (config.embed_dim,),
    }
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, config.embed_dim)
    of_projections = kinds.projection_shapes(config)
    for layer in range(config.num_layers):
        for norm in LAYER_NORMS:
            shapes[f"{layer_module(layer, norm)}.weight"] = (config.embed_dim,)
        others: dict[str, tuple[int, ...]] = {}
        for tensors in other_tensors(config, layer).values():
            others |= tensors
        shapes |= {name: shape for name, shape in others.items() if not name.endswith(".bias")}
        modules = {
            layer_module(layer, projection): of_projections[projection]
            for projection in itertools.chain(*kinds.fused_of(config, layer).values())
        }
        for stack, (_, rows, columns) in kinds.stack_shapes(config, layer).items():
            shape = rows // len(kinds.STACKS[stack].members), columns
            modules |= dict.fromkeys(expert_modules(config, layer)[stack], shape)
        for module, (outputs, inputs) in modules.items():
            if module in packed:
                shapes[f"{module}.weight_packed"] = (outputs, inputs // 2)
                shapes[f"{module}.weight_scale"] = (outputs, inputs // FORMATS[form].block)
                if form == "nvfp4":
                    shapes[f"{module}.weight_global_scale"] = (1,)
            else:
                shapes[f"{module}.weight"] = (outputs, inputs)
            if (bias := f"{module}.bias") in others:
                shapes[bias] = others[bias]
        shapes |= {name: shape for name, shape in others.items() if name not in shapes}
    return shapes
