"""Which fields of a config may change when a run goes on."""

import json
import re
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

# Sections of the config that do not change how a run trains, and its length.
_FREE = ("steps", "log", "checkpoint", "profile")


def splits_the_loss(config: ConfigDict) -> bool:
    """Whether `train.micro_batch_rows` sets the denominators of the loss."""
    return (config.rl.aggregation or config.rl.loss) in ("micro_batch", "bnpo")


# Fields that move only memory or time: the distribution of the samples and the loss stay the same,
# and only the rounding of sums changes. Such a field may change when a run goes on, so that a run
# that does not fit into the memory can be saved. The value is None, or a function of the config
# that returns whether the field changes the loss after all, and so stays as it was.
MEMORY_AND_TIME: dict[str, Callable[[ConfigDict], bool] | None] = {
    "rollout.max_rows": None,
    "rollout.kv_cache_bytes": None,
    "rollout.chunk_steps": None,
    "rollout.dequantize": None,
    "train.buffer_tokens": None,
    "train.recompute": None,
    "train.micro_batch_rows": splits_the_loss,
    "mesh.data": None,
    "mesh.tensor": None,
    "train.remat": None,  # of earlier versions, which saved it
}

# A server that was too slow, or out of reach, must not end a run for good.
_HOW_A_REWARD_IS_ASKED = re.compile(r"rewards\.[^.]+\.(time_limit|retries|token_env)")

# Fields of earlier versions, and the fields that took their place. `train.micro_batch_rows` is
# still there, but sets only the denominators of a loss.
RENAMED = {"train.remat": "train.recompute", "train.micro_batch_rows": "train.buffer_tokens"}


# Fields that say where the weights and the problems lie. They may change in a run that goes on: its
# checkpoints hold fingerprints of both, so that others are refused.
_PLACES = re.compile(
    r"model\.source|data\.(source|path|eval_source|eval_path)|data\.mixture\.[^.]+\.(source|path)"
)


def is_place(field: str) -> bool:
    """Whether a field, such as 'data.path', says where the weights or the problems lie."""
    return _PLACES.fullmatch(field) is not None


def is_free(field: str) -> bool:
    """Whether a field, such as 'log.wandb', does not change how a run trains."""
    return field.partition(".")[0] in _FREE


def moves_only_memory(field: str, config: ConfigDict) -> bool:
    """Whether a field of this config moves only memory or time."""
    if _HOW_A_REWARD_IS_ASKED.fullmatch(field):
        return True
    if field not in MEMORY_AND_TIME:
        return False
    changes_loss = MEMORY_AND_TIME[field]
    return changes_loss is None or not changes_loss(config)


def differences(
    old: dict[str, Any], new: dict[str, Any], config: ConfigDict
) -> tuple[dict[str, str], dict[str, str]]:
    """Compares two configs by flattened name.

    Args:
        old: fields of the saved config.
        new: fields of the new config.
        config: the new config.

    Returns:
        The fields that move only memory or time, and all other fields that may not change, each
        with a text such as '8 -> 4'.
    """
    allowed, refused = {}, {}
    for field in sorted(old.keys() | new.keys()):
        same = field in old and field in new and old[field] == new[field]
        if not same and not is_free(field):
            found = allowed if moves_only_memory(field, config) else refused
            found[field] = f"{_show(old, field)} -> {_show(new, field)}"
    return allowed, refused


def renamed(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Says which fields of a saved config have other names now; '' where none has.

    Args:
        old: fields of the saved config by flattened name.
        new: fields of the new config.
    """
    found = [
        f"{field} of its version is {now} now"
        for field, now in RENAMED.items()
        if field in old and now in new and now not in old
    ]
    return "; ".join(found)


def _show(fields: dict[str, Any], key: str) -> str:
    return json.dumps(fields[key], ensure_ascii=False) if key in fields else "(absent)"
