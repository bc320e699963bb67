"""What a run takes of a card's memory, before anything is loaded or compiled."""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from qerl_jax.config import models
from qerl_jax.config.fields import learns_from_text
from qerl_jax.errors import UserError, check_limits
from qerl_jax.memory import report, run_plan
from qerl_jax.memory.cards import CARDS
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.config import ModelConfig
from qerl_jax.quantization import base
from qerl_jax.training.teacher import plan_teacher
from qerl_jax.training.validate import validate
from qerl_jax.weights.checkpoint import read_architecture


@dataclasses.dataclass(frozen=True)
class CardPlan:
    """The plan of a run on a card; `str` of it is what the command prints.

    Attributes:
        config: the resolved config.
        model: architecture of the policy.
        card: name of the card, or its memory.
        memory: bytes of the card.
        run: the plan of the run, in bytes.
        largest_rows: most rows that fit together at the run's number of new tokens; None if none.
        largest_new_tokens: most new tokens that fit with fewer rows, or tokens of a row of text.
    """

    config: ConfigDict
    model: ModelConfig
    card: str
    memory: int
    run: run_plan.RunPlan
    largest_rows: int | None
    largest_new_tokens: int

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return self.run.fits

    def check_fits(self) -> None:
        """Raises a UserError that says what to lower where the run does not fit."""
        report.check_fits(self.run, self.config, self.model)

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as plain data, in bytes."""
        fields = dataclasses.asdict(dataclasses.replace(self.run, teacher=None)) | {
            "card": self.card,
            "memory": self.memory,
            "usable": self.run.device.usable,
            "rollout_peak": self.run.rollout_peak,
            "update_peak": self.run.update_peak,
            "peak": self.run.peak,
            "fits": self.fits,
            "largest_rows": self.largest_rows,
            "largest_new_tokens": self.largest_new_tokens,
        }
        del fields["teacher"]
        if base.is_calibrated(self.config.model):
            seconds, size = base.calibration_cost(self.model)
            fields |= {"calibration_seconds_h100": seconds, "calibration_bytes": size}
        return fields

    def __str__(self) -> str:
        config = self.config
        devices = config.mesh.data * config.mesh.tensor
        where = f"{self.card}, {self.memory / 1e9:.1f} GB" if self.card in CARDS else self.card
        where = f"each of {devices} x {where}" if devices > 1 else where
        largest = (
            f"{self.largest_rows} rows together at {config.rollout.max_new_tokens} new tokens; "
            f"{self.largest_new_tokens} new tokens with fewer rows"
        )
        if learns_from_text(config):
            largest = f"rows of {self.largest_new_tokens} tokens"
        return (
            f"{config.preset} in {config.model.format} on {where}\n"
            f"{report.format_plan(self.run, config)}"
            f"{base.describe_cost(config, self.model, self.run.teacher)}"
            f"largest that fits: {largest}"
        )


def plan(
    config: ConfigDict, *, card: str = "h100-80gb", memory_gb: float | None = None
) -> CardPlan:
    """Plans the memory of a run. It needs no GPU, and loads and compiles nothing.

    Args:
        config: the resolved config.
        card: a key of `CARDS`.
        memory_gb: other memory than that of the card, in 10^9 bytes.

    Raises:
        UserError: the card is unknown, a value of the config is out of range, or its model cannot
            be looked up.
    """
    if card not in CARDS:
        raise UserError(f"--card={card}: choose from {', '.join(CARDS)}, or --memory-gb=GB")
    memory, capability = CARDS[card]
    if memory_gb is not None:
        check_limits({"--memory-gb": (memory_gb, 0.001, 1e6)})
        memory, card = int(1e9 * memory_gb), f"{memory_gb:g} GB"
    validate(config)
    model = _architecture(config.model.source)
    planned = run_plan.plan_run(
        config,
        model,
        run_plan.device_of(memory, capability, tensor=config.mesh.tensor),
        teacher=plan_teacher(config, model, _architecture),
    )
    return CardPlan(
        config=config,
        model=model,
        card=card,
        memory=memory,
        run=planned,
        largest_rows=report.largest_rows(planned, config, model),
        largest_new_tokens=report.largest_length(config, model, planned.device, planned.teacher),
    )


def _architecture(source: str) -> ModelConfig:
    """The architecture of a preset's source without reading it, or that of another source."""
    presets = {models.SOURCES[name]: name for name in models.MODELS}
    return ARCHITECTURES[presets[source]] if source in presets else read_architecture(source)
