"""Says what a run takes of a card's memory before it starts, and what would fit.

    qerl-plan --config=grpo_gsm8k:qwen2.5-32b
    qerl-plan --config=... --card=h200-141gb --json
    qerl-plan --config=... --memory-gb=48 --config.mesh.tensor=2

    --config, --config.FIELD=VALUE    the run, as in the experiment that trains it
    --card=NAME                       h100-80gb (the default), rtx-3090, rtx-4090, rtx-5090, l4,
                                      l40s, a100-40gb, a100-80gb, dgx-spark, h200-141gb
    --memory-gb=GB                    other memory than that of --card, in 10^9 bytes
    --json                            the plan as JSON

It needs no GPU and compiles and loads nothing. Only a model that is not a preset's is looked up:
its architecture is read from its folder or file, or its config.json from the hub. The exit code is
2 where the run does not fit.
"""

import json
import sys

from absl import flags
from ml_collections import ConfigDict, config_flags

from qerl_jax.commands import cli
from qerl_jax.config.experiments import installed_file
from qerl_jax.errors import UserError
from qerl_jax.memory.cards import CARDS

_CARD = flags.DEFINE_string("card", "h100-80gb", f"card: {', '.join(CARDS)}")
_MEMORY = flags.DEFINE_float("memory-gb", None, "memory in 10^9 bytes, in place of the card's")
_JSON = flags.DEFINE_bool("json", False, "print the plan as JSON")


def run(config: ConfigDict, workdir: str | None) -> None:
    """Prints the plan of a run; refuses one that does not fit."""
    if workdir is not None:
        raise UserError("--workdir: a plan has no run folder, leave out the flag")
    from qerl_jax.config.overrides import check_overrides
    from qerl_jax.training.card_plan import plan

    check_overrides(config, config_flags.get_override_values(flags.FLAGS["config"]))
    result = plan(config, card=_CARD.value, memory_gb=_MEMORY.value)
    print(json.dumps(result.as_dict(), indent=1) if _JSON.value else result)
    sys.stdout.flush()
    result.check_fits()


def main() -> None:
    """Parses the flags and prints the plan."""
    cli.main(run, installed_file("grpo_gsm8k"), trains=False, description=__doc__)


if __name__ == "__main__":
    main()
