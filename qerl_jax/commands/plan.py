"""Says what a run takes of a card's memory before it starts, and what would fit.

    qerl-plan --config=grpo_gsm8k:qwen2.5-32b
    qerl-plan --config=... --card=h200-141gb --json
    qerl-plan --config=... --memory-gb=48 --config.mesh.tensor=2

    --config, --config.FIELD=VALUE    the run, as in the experiment that trains it
    --card=NAME                       a100-40gb, a100-80gb, h100-80gb (the default), h200-141gb
    --memory-gb=GB                    other memory than that of --card, in 10^9 bytes
    --json                            the plan as JSON

It needs no GPU and compiles and loads nothing. Only a model that is not a preset's is looked up:
its architecture is read from its folder or file, or its config.json from the hub. The exit code is
2 where the run does not fit.
"""

import dataclasses
import json
import sys
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from qerl_jax.commands import cli
from qerl_jax.config import models
from qerl_jax.config.experiments import installed_file
from qerl_jax.errors import UserError, check_limits

# Bytes of a card as CUDA reports them, and whether the Hopper kernel runs on it.
CARDS = {
    "a100-40gb": (42_331_013_120, False),
    "a100-80gb": (85_100_068_864, False),
    "h100-80gb": (84_929_347_584, True),
    "h200-141gb": (150_754_820_096, True),
}

_CARD = flags.DEFINE_string("card", "h100-80gb", f"card: {', '.join(CARDS)}")
_MEMORY = flags.DEFINE_float("memory-gb", None, "memory in 10^9 bytes, in place of the card's")
_JSON = flags.DEFINE_bool("json", False, "print the plan as JSON")


def run(config: ConfigDict, workdir: str | None) -> None:
    """Prints the plan of a run; refuses one that does not fit."""
    if workdir is not None:
        raise UserError("--workdir: a plan has no run folder, leave out the flag")
    if _CARD.value not in CARDS:
        raise UserError(f"--card={_CARD.value}: choose from {', '.join(CARDS)}, or --memory-gb=GB")
    memory, hopper = CARDS[_CARD.value]
    name = _CARD.value
    if _MEMORY.value is not None:
        check_limits({"--memory-gb": (_MEMORY.value, 0.001, 1e6)})
        memory = int(1e9 * _MEMORY.value)
        name = f"{_MEMORY.value:g} GB"
    from qerl_jax.config.overrides import check_overrides
    from qerl_jax.memory import report, run_plan
    from qerl_jax.quantization import base
    from qerl_jax.system.device_memory import pool_of
    from qerl_jax.training.validate import validate

    check_overrides(config, config_flags.get_override_values(flags.FLAGS["config"]))
    validate(config)
    model = _architecture(config.model.source)
    pool = int(pool_of(config.mesh.tensor) * memory)
    plan = run_plan.plan_run(config, model, run_plan.Device(pool, hopper))
    rows = report.largest_rows(plan, config, model)
    length = report.largest_length(config, model, plan.device)
    if _JSON.value:
        fields = dataclasses.asdict(plan) | {
            "card": name,
            "memory": memory,
            "usable": plan.device.usable,
            "rollout_peak": plan.rollout_peak,
            "update_peak": plan.update_peak,
            "peak": plan.peak,
            "fits": plan.fits,
            "largest_rows": rows,
            "largest_new_tokens": length,
        }
        if base.is_calibrated(config.model):
            seconds, size = base.calibration_cost(model)
            fields |= {"calibration_seconds_h100": seconds, "calibration_bytes": size}
        print(json.dumps(fields, indent=1))
    else:
        devices = config.mesh.data * config.mesh.tensor
        card = name if _MEMORY.value is not None else f"{name}, {memory / 1e9:.1f} GB"
        where = f"each of {devices} x {card}" if devices > 1 else card
        print(f"{config.preset} in {config.model.format} on {where}")
        print(report.format_plan(plan, config) + base.describe_cost(config, model), end="")
        print(
            f"largest that fits: {rows} rows together at {config.rollout.max_new_tokens} new "
            f"tokens; {length} new tokens with fewer rows"
        )
    sys.stdout.flush()
    report.check_fits(plan, config, model)


def _architecture(source: str) -> Any:
    """The architecture of a preset's source without reading it, or that of another source."""
    from qerl_jax.policy.architectures import ARCHITECTURES
    from qerl_jax.weights.checkpoint import read_architecture

    presets = {models.SOURCES[name]: name for name in models.MODELS}
    return ARCHITECTURES[presets[source]] if source in presets else read_architecture(source)


def main() -> None:
    """Parses the flags and prints the plan."""
    cli.main(run, installed_file("grpo_gsm8k"), trains=False, description=__doc__)


if __name__ == "__main__":
    main()
