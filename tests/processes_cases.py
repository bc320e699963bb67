"""A process that connects and then does what its argument says, for `test_processes`."""

import os
import sys
import time

from tiny_checkpoints import model_config

from benchmarks import step
from experiments import cli
from experiments.configs.grpo_gsm8k import get_config
from qerl_jax.errors import UserError
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.processes.launch import connected
from qerl_jax.training.begin import check_starts

LONG = 100  # seconds; the test ends the processes before


def measure(*flags):
    """Measures steps of a tiny model under the name of another one."""
    ARCHITECTURES["qwen2.5-1.5b"] = model_config("qwen2", vocab_size=1000)
    command = ["--model=qwen2.5-1.5b", "--format=bf16", "--prompt=5", "--new-tokens=8"]
    sizes = ["--group=2", "--lora-rank=2", "--buffer-tokens=32", "--steps=1", "--mesh=data=2"]
    cli.run_command(step.make_parser(), step.run, [*command, *sizes, *flags])


def main(case, *flags):
    if case == "measures":
        measure(*flags)
        return
    with connected(devices=2) as processes:
        number = processes.index
        print(f"connected {number}", file=sys.stderr, flush=True)
        if case == "fails" and number == 1:
            raise UserError("the device is out of memory")
        if case == "differs":
            config = get_config()
            config.optimizer.learning_rate = 1e-5 * (1 + number)
            try:
                check_starts(config, {"a": (len, 1.0)}, processes)
            except UserError as error:
                print(error, file=sys.stderr, flush=True)
            processes.exchange({})
            if number == 0:
                os.abort()
        time.sleep(LONG)


if __name__ == "__main__":
    main(*sys.argv[1:])
