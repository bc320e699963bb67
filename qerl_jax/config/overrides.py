"""Overrides that a run would ignore are errors.

Some fields are read only in certain modes, for example `aqn.tis_cap` with `aqn.correction='tis'`.
Setting such a field in another mode would have no effect, and the run would not say so.
"""

from collections.abc import Iterable

from ml_collections import ConfigDict

from qerl_jax.config.fields import ROWS, learns_from_text, row_of
from qerl_jax.errors import UserError

# What only a run reads whose policy samples.
_OF_SAMPLES = (
    *("rollout", "environment", "rewards", "reward_time_limit", "aqn", "rl", "teacher"),
    *("data.max_prompt_tokens", "data.curriculum", "data.curriculum_share"),
    *("eval.max_new_tokens", "log.completions", "log.print_completions"),
)


def check_overrides(config: ConfigDict, fields: Iterable[str]) -> None:
    """Refuses fields that were set but that a run of this config does not read.

    A field that was set to its default is refused too: setting it shows that it is expected to
    matter.

    Args:
        config: the resolved config.
        fields: names of the fields that were set, such as 'aqn.tis_cap'; a section that was set as
            a whole stands for its fields.

    Raises:
        UserError: some fields are not read; the message names them and what they need.
    """
    unread = [f"{field} (needs {need})" for field in fields if (need := unmet_need(field, config))]
    if unread:
        raise UserError(
            f"set and not read: {', '.join(unread)}; leave the field out, or change what it needs"
        )


def unmet_need(field: str, config: ConfigDict) -> str:
    """What a run of this config lacks to read a field, in words; '' where it reads the field."""
    if learns_from_text(config) and f"{field}.".startswith(tuple(f"{n}." for n in _OF_SAMPLES)):
        return "a policy that samples: sft.rows_per_step=0"
    row = row_of(field)
    rows = [row] if row else [r for name, r in ROWS.items() if name.startswith(f"{field}.")]
    needs = [row.read_if for row in rows]
    unmet = [need.text for need in needs if need is not None and not need.holds(config)]
    return unmet[0] if unmet and len(unmet) == len(needs) else ""
