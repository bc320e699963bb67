"""Trains a policy in 4 bits with the config of an experiment.

    qerl-train
    qerl-train --config=grpo_gsm8k:qwen2.5-7b
    qerl-train --config=FILE.py

The first command needs no GPU and no hub: a small stand-in that shows the whole method within
minutes. `--explain=all` lists every field of a config, docs/config.md has the same as a page.
"""

from ml_collections import ConfigDict

from qerl_jax.commands import cli
from qerl_jax.config.experiments import installed_file
from qerl_jax.config.models import STAND_IN
from qerl_jax.system.device_memory import take_memory

# Experiment -> how to train a larger model than the stand-in.
_LARGER = {
    "grpo_gsm8k": "train on GSM8K: --config=grpo_gsm8k:qwen2.5-1.5b",
    "sft_sums": "learn from GSM8K's solutions: --config=sft:qwen2.5-1.5b",
    "dapo_math": "train on BigMath: --config=dapo_math:qwen2.5-7b",
}


def run(config: ConfigDict, workdir: str | None, *, trust: bool = False) -> None:
    """Trains with a config."""
    if config.preset.startswith(STAND_IN):
        larger = _LARGER.get(config.experiment, _LARGER["grpo_gsm8k"])
        print(
            "This is a small stand-in that runs anywhere: a 135M-parameter model learns sums. "
            f"To {larger}",
            flush=True,
        )
    with cli.importing():
        from qerl_jax.processes.spawn import one_for_each_group
        from qerl_jax.training.loop import train
        from qerl_jax.training.validate import validate

    validate(config)
    with one_for_each_group(data=config.mesh.data, tensor=config.mesh.tensor):
        take_memory(config.mesh.tensor)
        train(config, workdir=workdir, trust=trust)


def main(experiment: str = "grpo_gsm8k", *, description: str | None = None) -> None:
    """Parses the flags and trains.

    `experiment` is the installed config that is used without --config.
    """
    cli.main(run, installed_file(experiment), description=description or __doc__)


if __name__ == "__main__":
    main()
