"""Reads packed projections: NVFP4 of llm-compressor and of NVIDIA's ModelOpt, MXFP4 of gpt-oss.

A projection [N, K] in NVFP4 is stored as three tensors:

    llm-compressor (compressed-tensors)    ModelOpt         meaning
    weight_packed        uint8 [N, K/2]    weight           two codes a byte, the even column low
    weight_scale       f8e4m3 [N, K/16]    weight_scale     one scale for 16 inputs
    weight_global_scale      f32 [1]       weight_scale_2   one scale for the tensor: a divisor, but
                                                            a multiplier in ModelOpt (f32, no axes)

gpt-oss has its experts in MXFP4, as *_blocks and *_scales of all experts of a layer, which
`names.expert_tensors` cuts into weight_packed [N, K/2] and weight_scale uint8 [N, K/32], powers of
two, of each projection.

ModelOpt's tensors are renamed when a checkpoint is opened, and the multiplier becomes the divisor
float32(1 / x). A weight then differs from ModelOpt's own dequantization by at most 2e-7 of its
value; after rounding to bfloat16, hardly one tensor in 10,000 holds a weight that differs.

The policy ignores scales of activations and of a quantized KV cache: it quantizes weights alone.
"""

import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.policy.quant import BLOCK
from qerl_jax.system import json_file

COMPRESSED_TENSORS = "compressed-tensors"
MODELOPT = "modelopt"
MXFP4 = "mxfp4"
# Scales of activations and of the KV cache in both layouts; the policy does not use them.
UNUSED = (".input_global_scale", ".input_scale", ".k_scale", ".v_scale")

_PARAMETERS = ("weight_packed", "weight_scale", "weight_global_scale")
_LARGEST_EXPONENT_BYTE = 0xFE  # 2^127; the larger one is NaN
_MODELOPT_FILE = "hf_quant_config.json"
_MODELOPT_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
_LARGEST_SCALE_BYTE = 0x7E  # 448; larger bytes are NaN and the negative numbers
_LARGEST_PRODUCT = np.float32(448 * 6)


def layout(folder: pathlib.Path, hf: Mapping[str, Any], *, mxfp4: bool) -> str | None:
    """Tells how the projections of a model folder are stored, by `hf`, its config.json.

    An older ModelOpt writes hf_quant_config.json into the folder. `mxfp4` says whether the family
    may be in MXFP4, as gpt-oss is.

    Returns:
        COMPRESSED_TENSORS, MODELOPT, MXFP4, or None where the weights are dense.

    Raises:
        UserError: the weights are quantized in a way that is not supported; the message names it.
    """
    quantization = hf.get("quantization_config")
    if quantization is None and (folder / _MODELOPT_FILE).exists():
        quantization = json_file.read_object(folder / _MODELOPT_FILE) | {"quant_method": MODELOPT}
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        raise UserError(f"{folder}: quantization_config is {quantization!r:.50}, must be an object")
    method = quantization.get("quant_method")
    if method == MXFP4 and mxfp4:
        return MXFP4
    if method == MODELOPT:
        details = quantization.get("quantization", quantization)
        scheme = details.get("quant_algo") if isinstance(details, dict) else None
        supported = scheme in _MODELOPT_ALGORITHMS
        size = details.get("group_size") if supported else None
        unusual = [] if size in (None, BLOCK) else [f"group_size {size!r:.50}"]
    else:
        scheme = quantization.get("format")
        supported = (method, scheme) == (COMPRESSED_TENSORS, "nvfp4-pack-quantized")
        unusual = [
            key for key in ("sparsity_config", "transform_config") if _is_set(quantization, key)
        ]
    if not supported:
        form = "" if scheme is None else f" as {scheme!r:.50}"
        raise UserError(
            f"{folder}: weights quantized by {method!r:.50}{form} are not supported; "
            "supported: 'compressed-tensors' as 'nvfp4-pack-quantized', 'modelopt' as "
            f"{' or '.join(map(repr, _MODELOPT_ALGORITHMS))}, 'mxfp4' of gpt-oss, or unquantized "
            "weights"
        )
    unusual += _unusual_groups(quantization.get("config_groups"))
    if unusual:
        raise UserError(f"{folder}: not supported in quantization_config: {', '.join(unusual)}")
    return method


def _is_set(quantization: Mapping[str, Any], key: str) -> bool:
    value = quantization.get(key)
    return bool(value) and value != {"format": "dense"}


def _unusual_groups(groups: Any) -> list[str]:
    """Lists the groups of a quantization_config that are not 4-bit weights in blocks of 16."""
    if groups is None:
        return []
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        return [f"config_groups {groups!r:.50}"]
    expected = {"num_bits": 4, "type": "float", "group_size": BLOCK}
    return [
        f"weights {group.get('weights')!r:.200}"
        for group in groups.values()
        if not isinstance(group.get("weights"), dict)
        or not expected.items() <= group["weights"].items()
    ]


def from_modelopt(folder: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors of a ModelOpt checkpoint under the names of compressed-tensors.

    Raises:
        UserError: a weight_scale_2 is not a single float32.
    """
    suffix = ".weight_scale_2"
    modules = {name.removesuffix(suffix) for name in tensors if name.endswith(suffix)}
    compressed = {}
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        if module in modules and parameter == "weight":
            compressed[f"{module}.weight_packed"] = tensor
        elif name.endswith(suffix):
            if tensor.dtype != np.float32 or tensor.size != 1:
                raise UserError(
                    f"{folder}: '{name}' is {tensor.dtype} {tensor.shape}, must be one float32"
                )
            with np.errstate(divide="ignore", over="ignore"):
                divisor = np.float32(1.0) / np.array(tensor, np.float32).reshape(1)
            compressed[f"{module}.weight_global_scale"] = divisor
        else:
            compressed[name] = tensor
    return compressed


def packed_modules(tensors: Collection[str]) -> frozenset[str]:
    """Returns the modules whose weights are packed, by names of compressed-tensors."""
    return frozenset(
        module
        for module, _, parameter in (name.rpartition(".") for name in tensors)
        if parameter in _PARAMETERS
    )


def tensors_of(module: str, form: str) -> list[str]:
    """Returns the names of the tensors of a projection in 'nvfp4' or 'mxfp4'."""
    return [f"{module}.{name}" for name in (_PARAMETERS[:2] if form == MXFP4 else _PARAMETERS)]


def check_blocks(folder: pathlib.Path, tensors: Mapping[str, np.ndarray], module: str) -> None:
    """Checks a projection in MXFP4, whose shapes were checked.

    Raises:
        UserError: a dtype is wrong.
    """
    for name in tensors_of(module, MXFP4):
        if tensors[name].dtype not in (np.uint8, ml_dtypes.float8_e8m0fnu):
            raise UserError(f"{folder}: '{name}' is {tensors[name].dtype}, must be uint8")


def divisor(folder: pathlib.Path, tensors: Mapping[str, np.ndarray], module: str) -> np.float32:
    """Returns the global scale of a packed projection, after checking its tensors.

    They have the names of compressed-tensors, and shapes that were checked.

    Raises:
        UserError: a dtype is wrong, the inputs do not fill whole blocks, or the scale is not
            positive and finite.
    """
    parameters = [tensors[f"{module}.{name}"] for name in _PARAMETERS]
    dtypes = (np.uint8, ml_dtypes.float8_e4m3fn, np.float32)
    for name, tensor, dtype in zip(_PARAMETERS, parameters, dtypes, strict=True):
        if tensor.dtype != dtype:
            raise UserError(
                f"{folder}: '{module}.{name}' is {tensor.dtype}, must be {np.dtype(dtype)}"
            )
    packed, _, scale = parameters
    if 2 * packed.shape[1] % BLOCK:
        raise UserError(
            f"{folder}: '{module}' has {2 * packed.shape[1]} inputs; NVFP4 needs a multiple of "
            f"{BLOCK}"
        )
    with np.errstate(all="ignore"):
        usable = scale[0] > 0 and np.isfinite(scale[0]) and np.isfinite(_LARGEST_PRODUCT / scale[0])
    if not usable:
        raise UserError(
            f"{folder}: the global scale of '{module}' is {scale[0]:g} as a divisor; it must be "
            "positive and finite"
        )
    return scale[0]


def checked_scales(
    folder: pathlib.Path, module: str, scales: np.ndarray, form: str = "nvfp4"
) -> np.ndarray:
    """Returns scales of blocks, uint8 [..., K/16] with the bytes of E4M3, or of E8M0 in 'mxfp4'.

    Raises:
        UserError: a scale is negative or NaN.
    """
    largest = _LARGEST_EXPONENT_BYTE if form == MXFP4 else _LARGEST_SCALE_BYTE
    if scales.max(initial=0) > largest:
        raise UserError(f"{folder}: '{module}.weight_scale' holds NaN or negative scales")
    return scales
