"""Adapters in PEFT's format, which transformers, PEFT and vLLM read."""

import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from qerl_jax.errors import UserError
from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers.kinds import ALL_PROJECTIONS, STACKS, stack_shapes
from qerl_jax.policy.lora import Lora, LoraConfig, matrix_shapes
from qerl_jax.policy.trainable import Trainable
from qerl_jax.system import json_file
from qerl_jax.system.paths import user_path
from qerl_jax.system.staging import make_readable, staged_folder
from qerl_jax.weights import names, safetensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# Options of PEFT beyond those of `LoraConfig`, with the only value that is written and read here.
_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "layers_to_transform": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
# Options of PEFT 0.21's LoraConfig with no effect on a trained plain LoRA at any value. The stored
# tensors decide which modules an adapter holds. `layers_pattern`, `qalora_group_size` and
# `ensure_weight_tying` act only with options that are refused.
# fmt: off
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules",
    "inference_mode", "layers_pattern", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "runtime_config", "task_type",
    "modules_to_save", "revision",  # checked by `_check_config` and `read_peft_base`
}
# fmt: on
# Initializations that leave the base as it is. Each other one changes the base (PiSSA, OLoRA,
# CorDA, LoftQ) or is refused because its options are (EVA, MiCA).
_PLAIN_INITS = (True, False, None, "gaussian", "orthogonal")
# The projections of experts, by which target_modules name them where they are modules; and a
# pattern of their modules for readers that do not stack them.
_EXPERT_MEMBERS = tuple(name for stack in STACKS.values() for name in stack.members)
_EXPERT_MODULES = rf"experts\.\d+\.({'|'.join(_EXPERT_MEMBERS)})"


def save_peft_adapter(
    folder: pathlib.Path | str,
    trainable: Trainable,
    lora_config: LoraConfig,
    *,
    base_model: str,
    interleaved: bool = False,
) -> None:
    """Writes an adapter folder: adapter_config.json and adapter_model.safetensors (float32).

    The folder appears complete or not at all. An existing folder is replaced by two renames.

    Args:
        folder: target path; missing parents are created.
        trainable: the adapter and, where they are trained too, the norms (PEFT's modules_to_save).
        lora_config: the adapter's options.
        base_model: hub id or path of the base model, written as base_model_name_or_path.
        interleaved: whether the base has gate and up of experts in turn, see `names.interleaves`.

    Raises:
        UserError: the folder cannot be written, for example because the disk is full.
    """
    with staged_folder(folder, replace=True) as new_folder:
        options = {"base_model": base_model, "interleaved": interleaved}
        fill_peft_adapter(new_folder, trainable, lora_config, **options)


def fill_peft_adapter(
    folder: pathlib.Path,
    trainable: Trainable,
    lora_config: LoraConfig,
    *,
    base_model: str,
    nested: bool = False,
    stacked: bool = True,
    interleaved: bool = False,
) -> None:
    """Writes the files of an adapter into an empty folder.

    Args:
        folder: existing empty folder.
        trainable: the adapter and, where they are trained too, the norms.
        lora_config: the adapter's options.
        base_model: hub id or path of the base model, written as base_model_name_or_path.
        nested: whether the text model is a part of the base, as vLLM and PEFT name its layers where
            the base also has a vision tower.
        stacked: the layout of the adapters of routed experts, see `expert_tensors`.
        interleaved: as in `save_peft_adapter`.
    """
    assert trainable.lora is not None, "where every parameter is trained there is no adapter"
    layers = jax.device_get(trainable.lora.layers)
    tensors = {
        names.peft_tensor(layer, projection, matrix): value
        for layer, adapters in enumerate(layers)
        for projection, matrices in adapters.items()
        if projection not in STACKS
        for matrix, value in matrices.items()
    } | {
        names.peft_norm(layer, norm): value
        for layer, norms in enumerate(trainable.params.get("layers", []))
        for norm, value in norms.items()
    }
    for layer, adapters in enumerate(layers):
        tensors |= expert_tensors(adapters, layer, stacked=stacked, interleaved=interleaved)
    tensors = {n: np.asarray(jax.device_get(value), np.float32) for n, value in tensors.items()}
    if nested:
        tensors = {names.nested_peft(name): value for name, value in tensors.items()}
    options = _peft_config(lora_config, base_model, norms=bool(trainable.params), stacked=stacked)
    text = json.dumps(options, indent=2, sort_keys=True)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    make_readable(folder / WEIGHTS_FILE)


def expert_tensors(
    adapters: Mapping[str, Mapping[str, np.ndarray]],
    layer: int,
    *,
    stacked: bool,
    interleaved: bool = False,
) -> dict[str, np.ndarray]:
    """Returns PEFT's tensors of the adapters on the routed experts of a layer.

    PEFT 0.21 drops those of a family in the other layout than its own, and says nothing: of
    Qwen3.5-MoE and gpt-oss it reads the stacked one alone, of Qwen3-MoE both. vLLM 0.33 reads the
    stacked one for gpt-oss and a Qwen3.5-MoE with a vision tower, and a pair for each projection of
    each expert for a text model.

    Args:
        adapters: by name of a stack its matrices: 'a' [E, R, K], 'b' [E, N, R]. Projections that
            are stacked in N share A. Those of other names are left out.
        layer: number of the layer.
        stacked: whether all experts are in one pair, A [E R, K] and B [N, R E] in which the expert
            is the fastest axis. These are target_parameters in the options of PEFT.
        interleaved: whether N has the rows of gate and up in turn, as the base has them.
    """
    found = {}
    for stack in (stack for stack in STACKS if stack in adapters):
        a, b = (np.asarray(adapters[stack][matrix]) for matrix in "ab")
        modules = names.modules_of_stack(layer, stack, len(a))
        members = len(STACKS[stack].members)
        if stacked:
            if interleaved:
                b = names.interleaved(b.reshape(len(b), members, -1, b.shape[2]))
            found[names.peft_experts(layer, stack, "a")] = a.reshape(-1, a.shape[2])
            found[names.peft_experts(layer, stack, "b")] = np.moveaxis(b, 0, 2).reshape(
                b.shape[1], -1
            )
            continue
        own_a, own_b = np.repeat(a, members, axis=0), b.reshape(len(modules), -1, b.shape[2])
        for number, module in enumerate(modules):
            found[f"base_model.model.{module}.lora_A.weight"] = own_a[number]
            found[f"base_model.model.{module}.lora_B.weight"] = own_b[number]
    return found


def take_experts(
    folder: pathlib.Path,
    tensors: dict[str, np.ndarray],
    model_config: ModelConfig,
    layer: int,
    *,
    rank: int,
) -> dict[str, dict[str, jax.Array]]:
    """Removes the adapters on the experts of a layer from the tensors of a file, of either layout.

    Returns:
        What `expert_tensors` takes, in float32.

    Raises:
        UserError: a tensor is missing or unusable, or projections that share A have others.
    """
    found = {}
    for stack, (experts, outputs, inputs) in stack_shapes(model_config, layer).items():
        modules = names.modules_of_stack(layer, stack, experts)
        name_a, name_b = (names.peft_experts(layer, stack, matrix) for matrix in "ab")
        if name_a in tensors:
            a = _take(folder, tensors, name_a, (experts * rank, inputs))
            b = _take(folder, tensors, name_b, (outputs, rank * experts))
            b = np.moveaxis(b.reshape(outputs, rank, experts), 2, 0)
            if names.interleaves(model_config):
                members = len(STACKS[stack].members)
                parts = b.reshape(experts, -1, members, rank).swapaxes(1, 2)
                b = parts.reshape(experts, outputs, rank)
            found[stack] = {"a": a.reshape(experts, rank, inputs), "b": b}
            continue
        rows = outputs * experts // len(modules)
        pairs = {"A": [], "B": []}
        for module in modules:
            for matrix, shape in (("A", (rank, inputs)), ("B", (rows, rank))):
                name = f"base_model.model.{module}.lora_{matrix}.weight"
                pairs[matrix].append(_take(folder, tensors, name, shape))
        a = np.stack(pairs["A"]).reshape(experts, -1, rank, inputs)
        if not (a == a[:, :1]).all():
            members = " and ".join(STACKS[stack].members)
            raise UserError(
                f"{folder}: layer {layer}: {members} of an expert have different lora_A; they must "
                "be equal, as where PEFT trains target_parameters"
            )
        b = np.stack(pairs["B"]).reshape(experts, outputs, rank)
        found[stack] = {"a": a[:, 0], "b": b}
    return jax.tree.map(jnp.asarray, found)


def read_peft_config(folder: pathlib.Path | str) -> tuple[LoraConfig, str]:
    """Reads the options of an adapter folder.

    Args:
        folder: folder that holds adapter_config.json.

    Returns:
        The options, and the hub id or path of the base model ('' where the file names none).

    Raises:
        UserError: adapter_config.json cannot be read, or an option is not supported.
    """
    folder = user_path(folder)
    options = _without_experts(folder, _read_config(folder))
    rank, alpha, targets = (options.get(key) for key in ("r", "lora_alpha", "target_modules"))
    rslora, base = options.get("use_rslora", False), options.get("base_model_name_or_path") or ""
    if (
        type(rank) is not int
        or not isinstance(alpha, int | float)
        or not abs(alpha) <= lora_lib.LARGEST_ALPHA
        or not isinstance(targets, list)
        or not all(_projection(target) for target in targets)
        or not isinstance(rslora, bool)
        or not isinstance(base, str)
    ):
        if isinstance(targets, list):
            targets = [target for target in targets if not _projection(target)] or targets
        raise UserError(
            f"{folder / CONFIG_FILE}: malformed or not supported: r is {rank!r:.50}, lora_alpha "
            f"{alpha!r:.50}, target_modules {targets!r:.200}, use_rslora {rslora!r:.50}, "
            f"base_model_name_or_path {base!r:.50}; the targets can be "
            f"{', '.join(ALL_PROJECTIONS)}"
        )
    projections = tuple(dict.fromkeys(filter(None, map(_projection, targets))))
    lora_config = LoraConfig(
        rank=rank,
        alpha=float(alpha),
        rslora=rslora,
        targets=projections,
        expert_rank=options["expert_rank"],
    )
    _check_config(folder, options, lora_config)
    return lora_config, base


def read_peft_base(folder: pathlib.Path | str) -> str:
    """Returns the hub id or path of the base model of an adapter folder.

    Raises:
        UserError: adapter_config.json cannot be read, names no base model, or names a revision of
            it, which `load` cannot choose.
    """
    folder = pathlib.Path(folder)
    base = read_peft_config(folder)[1].strip()
    revision = _read_config(folder).get("revision")
    if not base:
        raise UserError(f"{folder}: {CONFIG_FILE} names no base model; pass it as --base=MODEL")
    if revision not in (None, "", "main") and not user_path(base).exists():
        raise UserError(
            f"{folder}: the adapter belongs to the revision {revision!r:.50} of {base}; download "
            "that revision and pass its folder as --base=FOLDER"
        )
    return base


def load_peft_adapter(
    folder: pathlib.Path | str, model_config: ModelConfig, lora_config: LoraConfig
) -> Trainable:
    """Reads an adapter folder: the adapter and, if the folder holds them, the norms of the layers.

    Args:
        folder: folder with adapter_config.json and adapter_model.safetensors.
        model_config: the architecture of the base model.
        lora_config: the options that the adapter must have.

    Returns:
        The trained part of a policy, in float32.

    Raises:
        UserError: the folder cannot be read, or the adapter does not have the requested options;
            the message lists the differing fields.
    """
    folder = user_path(folder)
    options = _without_experts(folder, _read_config(folder))
    _check_config(folder, options, lora_config)
    stored = safetensors.read_file(folder / WEIGHTS_FILE)
    tensors = {names.plain_peft(name): tensor for name, tensor in stored.items()}
    layers = []
    for layer in range(model_config.num_layers):
        adapters = {
            projection: {
                matrix: _take(folder, tensors, names.peft_tensor(layer, projection, matrix), shape)
                for matrix, shape in shapes.items()
            }
            for projection, shapes in matrix_shapes(model_config, layer, lora_config).items()
            if projection not in STACKS
        }
        if rank := lora_config.expert_rank:
            adapters |= take_experts(folder, tensors, model_config, layer, rank=rank)
        layers.append(jax.tree.map(jnp.asarray, adapters))
    params = {}
    if options.get("modules_to_save"):
        if model_config.centered_norms:
            raise UserError(
                f"{folder}: the adapter also holds norms (modules_to_save), which a "
                f"{model_config.model_type} stores minus 1: they cannot be read; merge the adapter "
                "with PEFT"
            )
        shape = (model_config.embed_dim,)
        params["layers"] = [
            {n: _take(folder, tensors, names.peft_norm(i, n), shape) for n in names.LAYER_NORMS}
            for i in range(model_config.num_layers)
        ]
    if tensors:
        raise UserError(f"{folder}: {WEIGHTS_FILE} holds unknown tensors: '{min(tensors)}'")
    params = jax.tree.map(jnp.asarray, params)
    return Trainable(lora=Lora(layers=layers, scale=lora_config.scale), params=params)


def _peft_config(
    lora_config: LoraConfig, base_model: str, *, norms: bool, stacked: bool = True
) -> dict[str, Any]:
    alpha = lora_config.alpha
    targets, experts = list(lora_config.targets), {}
    if lora_config.expert_rank:
        experts = _expert_patterns(lora_config, stacked=stacked)
        experts |= {"target_parameters": list(_expert_parameters().values())} if stacked else {}
        targets += [] if stacked else _EXPERT_MEMBERS
    return _PLAIN | {
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "init_lora_weights": True,
        # PEFT and vLLM declare lora_alpha as an integer.
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": list(names.LAYER_NORMS) if norms else None,
        "r": lora_config.rank,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_rslora": lora_config.rslora,
        **experts,
    }


def _expert_parameters() -> dict[str, str]:
    """Returns PEFT's names of the parameters with all experts, by the names of the stacks."""
    return {stack: names.stacked_tensor(0, stack).partition(".0.")[2] for stack in STACKS}


def _expert_patterns(lora_config: LoraConfig, *, stacked: bool) -> dict[str, Any]:
    """Returns the options that give the adapters of experts their rank, and the common scale.

    PEFT makes a stack of gate and up from a pair of matrices for each, of twice the rank.
    """
    ranks = {}
    for stack, parameter in _expert_parameters().items():
        ranks[parameter] = lora_config.expert_rank * (1 if stacked else len(STACKS[stack].members))
    if not stacked:
        ranks[_EXPERT_MODULES] = lora_config.expert_rank
    ranks = {name: rank for name, rank in ranks.items() if rank != lora_config.rank}
    alphas = {
        name: lora_config.scale * (math.sqrt(rank) if lora_config.rslora else rank)
        for name, rank in ranks.items()
    }
    return {"rank_pattern": ranks, "alpha_pattern": alphas}


def _without_experts(folder: pathlib.Path, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of the adapters of projections, and 'expert_rank' of routed experts.

    Experts are target_parameters, or modules that have the names of projections of an MLP: the
    stored tensors then say which of both were meant.

    Raises:
        UserError: only a part of the experts has an adapter, or another rank or scale.
    """
    parameters, targets = options.get("target_parameters"), options.get("target_modules")
    found = options | {"expert_rank": 0}
    adapted = stacked = False
    if isinstance(parameters, list) and parameters:
        adapted = stacked = True
        of_experts = _expert_parameters().values()
        whole = {name for name in of_experts if any(_ends(name, given) for given in parameters)}
        if len(parameters) > len(whole) or len(whole) < len(of_experts):
            raise UserError(
                f"{folder}: {CONFIG_FILE}: target_parameters is {parameters!r:.200}: this is no "
                f"plain LoRA of routed experts, whose parameters are {', '.join(of_experts)}"
            )
        found |= {"target_parameters": None, "target_modules": targets or []}
    if isinstance(targets, list) and not {str(t) for t in targets}.isdisjoint(_EXPERT_MEMBERS):
        modules = _stored_modules(folder)
        if any(re.search(r"\.(experts|shared_expert)\.", module) for module in modules):
            ends = {p: names.layer_module(0, p).partition(".0.")[2] for p in ALL_PROJECTIONS}
            found["target_modules"] = [
                p for p, end in ends.items() if any(_ends(module, end) for module in modules)
            ]
            adapted = any(".experts." in module for module in modules)
    return found | _expert_rank(folder, options, stacked=stacked) if adapted else found


def _expert_rank(folder: pathlib.Path, options: dict[str, Any], *, stacked: bool) -> dict[str, Any]:
    """Returns 'expert_rank', and the patterns of ranks and scales without those of experts.

    Raises:
        UserError: the experts have several ranks, or another scale than the projections.
    """
    keys = "rank_pattern", "alpha_pattern"
    defaults = options.get("r"), options.get("lora_alpha")
    patterns = [options.get(key) or {} for key in keys]
    if not all(isinstance(pattern, dict) for pattern in patterns):
        return {}  # What reads the options refuses them.
    wanted = list(_expert_parameters().values()) if stacked else [_EXPERT_MODULES]
    own, rest = [], {}
    for key, default, pattern in zip(keys, defaults, patterns, strict=True):
        named = {name: _named_experts(name, stacked=stacked) for name in pattern}
        rest[key] = {name: value for name, value in pattern.items() if not named[name]}
        given = {expert: pattern[name] for name in pattern for expert in named[name]}
        own.append([given.get(expert, default) for expert in wanted])
    (rank, *_), root = own[0], math.sqrt if options.get("use_rslora") else float
    try:
        pairs: list[Any] = [defaults, *zip(*own, strict=True)]
        scale, *scales = (float(of_alpha) / root(of_rank) for of_rank, of_alpha in pairs)
        fits = all(math.isclose(other, scale, rel_tol=1e-6) for other in scales)
    except (TypeError, ValueError, ArithmeticError):  # also of integers that no float can hold
        fits = False
    if not fits or type(rank) is not int or any(other != rank for other in own[0]):
        raise UserError(
            f"{folder}: {CONFIG_FILE}: rank_pattern is {patterns[0]!r:.200}, alpha_pattern "
            f"{patterns[1]!r:.200}, r {defaults[0]!r:.50}, lora_alpha {defaults[1]!r:.50}: all "
            "routed experts must have one rank, and lora_alpha / r of the projections"
        )
    return rest | {"expert_rank": rank}


def _named_experts(pattern: str, *, stacked: bool) -> list[str]:
    r"""Returns the parameters of experts that a pattern of ranks names, or their modules.

    PEFT writes '.*\.gate_up_proj' where target_modules were projections of a mixture. A pattern
    'down_proj' also names other modules, whose rank is that of the others or their shapes differ.
    """
    if pattern == _EXPERT_MODULES:
        return [_EXPERT_MODULES]
    end = pattern.replace("\\", "").removeprefix(".*.")
    own = stacked or "experts." in end
    return [p for p in _expert_parameters().values() if own and _ends(p, end)]


def _stored_modules(folder: pathlib.Path) -> set[str]:
    """Returns the modules of the tensors of an adapter folder; none where the file is missing."""
    path = folder / WEIGHTS_FILE
    tensors = safetensors.read_file(path) if path.exists() else {}
    return {name.partition(".lora_")[0] for name in tensors}


def _ends(path: str, end: str) -> bool:
    """Whether a path of modules ends with another one."""
    return f".{path}".endswith(f".{end}")


def _read_config(folder: pathlib.Path) -> dict[str, Any]:
    return json_file.read_object(
        folder / CONFIG_FILE,
        remedy="pass a folder that PEFT saved, or adapter or best_adapter of a run folder",
    )


def _check_config(folder: pathlib.Path, options: dict[str, Any], lora_config: LoraConfig) -> None:
    saved_modules = options.get("modules_to_save") or []
    for key, items in (
        ("target_modules", options.get("target_modules")),
        ("modules_to_save", saved_modules),
    ):
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise UserError(f"{folder}: {CONFIG_FILE}: {key} is {items!r:.100}, must be a list")
    expected = _PLAIN | {
        "r": lora_config.rank,
        "lora_alpha": lora_config.alpha,
        "use_rslora": lora_config.rslora,
        "target_modules": sorted(lora_config.targets),
        "expert_rank": lora_config.expert_rank,
    }
    actual = _PLAIN | {"use_rslora": False} | options
    # A target without a projection keeps its name and so differs.
    targets = {_projection(target) or target for target in options["target_modules"]}
    actual["target_modules"] = sorted(targets)
    if sorted(saved_modules) not in ([], sorted(names.LAYER_NORMS)):
        raise UserError(
            f"{folder}: the adapter also holds {', '.join(saved_modules):.200} (modules_to_save); "
            f"only {' and '.join(names.LAYER_NORMS)} can be read"
        )
    differences = [
        f"{key} is {actual.get(key)!r:.100}, the config asks for {value!r}"
        for key, value in expected.items()
        # An empty pattern or list is stored as {}, [] or null.
        if (actual.get(key) or None) != (value or None)
    ]
    if differences:
        raise UserError(f"{folder}: the adapter does not fit: {'; '.join(differences)}")
    # 1 and 0 equal True and False, so a number is an initialization only by mistake.
    init = options.get("init_lora_weights", True)
    special = {} if init in _PLAIN_INITS else {"init_lora_weights": init}
    special |= {
        key: value
        for key, value in sorted(options.items())
        if value and key not in expected and key not in _WITHOUT_EFFECT | {"init_lora_weights"}
    }
    if special:
        text = ", ".join(f"{key} is {value!r:.100}" for key, value in special.items())
        raise UserError(
            f"{folder}: {CONFIG_FILE}: {text}: this is no plain LoRA; merge the adapter with "
            "PEFT, or convert it to a plain LoRA and set these options to null"
        )


def _projection(target: Any) -> str | None:
    """Returns the projection that a target of PEFT names, or None for any other target.

    A target is the end of a module's path. PEFT writes the whole paths for 'all-linear' where there
    are fewer than 20; the stored tensors then show whether every layer has an adapter.
    """
    path = re.sub(r"(^|\.)\d+\.", r"\g<1>0.", str(target), flags=re.ASCII)
    for projection in ALL_PROJECTIONS:
        if f".{names.layer_module(0, projection)}".endswith(f".{path}"):
            return projection
    return None


def _take(
    folder: pathlib.Path, tensors: dict[str, np.ndarray], name: str, shape: tuple[int, ...]
) -> np.ndarray:
    """Removes one tensor from `tensors` and returns it in float32."""
    if name not in tensors:
        raise UserError(f"{folder}: {WEIGHTS_FILE} lacks '{name}'")
    tensor = tensors.pop(name)
    if tensor.shape != shape:
        raise UserError(
            f"{folder}: '{name}' has the shape {tensor.shape}, the model asks for {shape}"
        )
    if tensor.dtype not in (ml_dtypes.bfloat16, np.float16, np.float32):
        raise UserError(f"{folder}: '{name}' is {tensor.dtype}, must be f32, bf16 or f16")
    values = np.array(tensor, np.float32)
    if not np.isfinite(values).all():
        raise UserError(f"{folder}: '{name}' holds values that are not finite")
    return values
