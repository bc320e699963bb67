"""Overrides that a run would ignore are errors.

Some fields are read only in certain modes, for example `aqn.tis_cap` with `aqn.correction='tis'`.
Setting such a field in another mode would have no effect, and the run would not say so.
"""

from collections.abc import Callable, Iterable

from ml_collections import ConfigDict

from qerl_jax.config.resume import splits_the_loss
from qerl_jax.data.mixture import has_own_evaluation
from qerl_jax.errors import UserError
from qerl_jax.system.import_path import names_function

# The condition under which a field is read, in words and as a test.
_Need = tuple[str, Callable[[ConfigDict], bool]]


_NOISE: _Need = (
    "noise: aqn.schedule other than 'off', aqn.stages of at least 2",
    lambda c: names_function(c.aqn.schedule) or (c.aqn.schedule != "off" and c.aqn.stages > 1),
)
_KL_TARGET: _Need = (
    "a target for the KL: aqn.schedule='kl', aqn.stages of at least 2",
    lambda c: c.aqn.schedule == "kl" and c.aqn.stages > 1,
)
_SEVERAL_UPDATES: _Need = (
    "rl.updates_per_rollout of at least 2 (the ratio of the first update is 1)",
    lambda c: c.rl.updates_per_rollout > 1,
)
_CLIPS: _Need = (
    f"a loss that clips, rl.loss other than 'sapo' and a function; and {_SEVERAL_UPDATES[0]}",
    lambda c: c.rl.loss != "sapo" and not names_function(c.rl.loss) and _SEVERAL_UPDATES[1](c),
)
_SAPO: _Need = (
    f"rl.loss='sapo', and {_SEVERAL_UPDATES[0]}; at a ratio of 1 they scale the loss that is "
    "logged, not its gradient",
    lambda c: c.rl.loss == "sapo" and _SEVERAL_UPDATES[1](c),
)
_ADAPTER: _Need = (
    "an adapter: train.parameters other than 'full'",
    lambda c: c.train.parameters != "full",
)
_ONE_SOURCE: _Need = (
    "a run without data.mixture, whose sources have their own",
    lambda c: not c.data.mixture,
)
_TRACKER: _Need = ("log.wandb or log.trackio", lambda c: c.log.wandb or c.log.trackio)
_EVALUATION: _Need = ("evaluations: eval.every above 0", lambda c: c.eval.every > 0)

# The fields that not every run reads; the name of a section stands for all its fields.
NEEDS: dict[str, _Need] = {
    "lora": _ADAPTER,
    "data.source": (
        "an empty data.path and no data.mixture",
        lambda c: not c.data.path and not c.data.mixture,
    ),
    "data.path": _ONE_SOURCE,
    "data.levels": _ONE_SOURCE,
    "data.curriculum_share": (
        "data.curriculum other than 'off'",
        lambda c: c.data.curriculum != "off",
    ),
    "data.options": (
        "generated problems: data.source='reasoning_gym:TASK', an empty data.path, no data.mixture",
        lambda c: (
            not c.data.path and not c.data.mixture and c.data.source.startswith("reasoning_gym:")
        ),
    ),
    "data.fields": (
        "a file or a hub dataset: generated problems have fixed fields; with data.mixture those "
        "of data.eval_path or data.eval_source, as each source has fields of its own",
        lambda c: (
            has_own_evaluation(c.data)
            if c.data.mixture
            else bool(c.data.path) or not c.data.source.startswith("reasoning_gym:")
        ),
    ),
    "data.eval_source": (
        "evaluations: eval.every above 0; and an empty data.eval_path",
        lambda c: c.eval.every > 0 and not c.data.eval_path,
    ),
    "data.eval_path": _EVALUATION,
    "rollout.temperature_end": (
        "rollout.temperature_schedule other than 'constant'",
        lambda c: c.rollout.temperature_schedule != "constant",
    ),
    "rollout.dequantize": (
        "packed weights: model.format other than 'bf16'",
        lambda c: c.model.format != "bf16",
    ),
    "aqn.stages": ("noise: aqn.schedule other than 'off'", lambda c: c.aqn.schedule != "off"),
    "aqn.sigma_start": _NOISE,
    "aqn.sigma_end": (
        "noise that changes: aqn.schedule other than 'constant', 'off' and 'kl', aqn.stages of at "
        "least 3",
        lambda c: (
            names_function(c.aqn.schedule)
            or (c.aqn.schedule not in ("constant", "off", "kl") and c.aqn.stages > 2)
        ),
    ),
    "aqn.kl_target_start": _KL_TARGET,
    "aqn.kl_target_end": (
        "a target that changes: aqn.schedule='kl', aqn.stages of at least 3",
        lambda c: c.aqn.schedule == "kl" and c.aqn.stages > 2,
    ),
    "aqn.sigma_max": _KL_TARGET,
    "aqn.form": _NOISE,
    "aqn.final_norm": _NOISE,
    "aqn.correction": (
        "noise for 'noisy_forward': aqn.schedule other than 'off', aqn.stages of at least 2",
        lambda c: c.aqn.correction != "noisy_forward" or _NOISE[1](c),
    ),
    "aqn.tis_cap": ("aqn.correction='tis'", lambda c: c.aqn.correction == "tis"),
    "aqn.kl_rows": (
        "noise, and aqn.kl_every above 0",
        lambda c: c.aqn.kl_every > 0 and _NOISE[1](c),
    ),
    "rl.clip_low": _CLIPS,
    "rl.clip_high": _CLIPS,
    "rl.sapo_temperature_pos": _SAPO,
    "rl.sapo_temperature_neg": _SAPO,
    "rl.dual_clip": (
        _SEVERAL_UPDATES[0],
        lambda c: c.rl.dual_clip == 0 or _SEVERAL_UPDATES[1](c),
    ),
    "rl.kl_grad": ("rl.kl_coef above 0", lambda c: c.rl.kl_coef > 0),
    "rl.advantage_scale": ("rl.advantage='grpo'", lambda c: c.rl.advantage == "grpo"),
    "rl.advantage_eps": (
        "rl.advantage_scale other than 'none', or rl.advantage='gdpo'",
        lambda c: c.rl.advantage_scale != "none" or c.rl.advantage == "gdpo",
    ),
    "rl.dynamic_sampling_rounds": ("rl.dynamic_sampling=true", lambda c: c.rl.dynamic_sampling),
    "rl.dynamic_sampling_metric": ("rl.dynamic_sampling=true", lambda c: c.rl.dynamic_sampling),
    "rl.overlong_penalty": ("rl.overlong_buffer above 0", lambda c: c.rl.overlong_buffer > 0),
    "train.micro_batch_rows": (
        "rl.loss='bnpo' or rl.aggregation='micro_batch', whose denominators it sets; the memory of "
        "an update follows from train.buffer_tokens",
        splits_the_loss,
    ),
    "optimizer.final_fraction": (
        "optimizer.schedule other than 'constant'",
        lambda c: c.optimizer.schedule != "constant",
    ),
    "eval.problems": _EVALUATION,
    "eval.max_new_tokens": _EVALUATION,
    "log.project": _TRACKER,
    "log.group": _TRACKER,
    "profile.start": ("profile.start not after steps", lambda c: c.profile.start <= c.steps),
    "profile.stop": ("profile.start from 1 to steps", lambda c: 1 <= c.profile.start <= c.steps),
}


def need(field: str) -> _Need | None:
    """The entry of `NEEDS` for a field or for a section that contains the field, or None."""
    parts = field.split(".")
    names = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return next((NEEDS[name] for name in names if name in NEEDS), None)


def check_overrides(config: ConfigDict, fields: Iterable[str]) -> None:
    """Refuses fields that were set but that a run of this config does not read.

    A field that was set to its default is refused too: setting it shows that it is expected to
    matter.

    Args:
        config: the resolved config.
        fields: names of the fields that were set, such as 'aqn.tis_cap'.

    Raises:
        UserError: some fields are not read; the message names them and what they need.
    """
    unread = [
        f"{field} (needs {found[0]})"
        for field in fields
        if (found := need(field)) and not found[1](config)
    ]
    if unread:
        raise UserError(
            f"set and not read: {', '.join(unread)}; leave the field out, or change what it needs"
        )
