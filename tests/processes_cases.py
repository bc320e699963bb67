"""A process that connects and then does what its argument says, for `test_processes`."""

import os
import pathlib
import sys
import time

import numpy as np
from tiny_checkpoints import model_config

from benchmarks import step
from qerl_jax.commands import cli
from qerl_jax.config.experiments.grpo_gsm8k import get_config
from qerl_jax.errors import UserError
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.sharding import make_mesh, shard
from qerl_jax.processes.launch import connect
from qerl_jax.run import checkpoints
from qerl_jax.run.checkpoints import Checkpoints
from qerl_jax.training.begin import check_same_start

LONG = 100  # seconds; the test ends the processes before


def measure(*flags):
    """Measures steps of a tiny model under the name of another one."""
    ARCHITECTURES["qwen2.5-1.5b"] = model_config("qwen2", vocab_size=1000, num_layers=1)
    command = ["--model=qwen2.5-1.5b", "--format=bf16", "--prompt=5", "--new-tokens=8"]
    sizes = ["--group=2", "--lora-rank=2", "--buffer-tokens=32", "--steps=1", "--mesh=data=2"]
    cli.run_command(step.make_parser(), step.run, [*command, *sizes, *flags])


def restore(processes, folder):
    """Restores a state whose newest checkpoint process 1 alone reads with other bytes."""
    mesh = make_mesh(2, 1)
    states = {step: shard({"a": np.full(8, step, np.float32)}, mesh) for step in (1, 2)}
    with Checkpoints(folder, keep=3, exchange=processes.exchange_json) as kept:
        for step, state in states.items():
            kept.save(step, state, {})
        kept.wait()
        if processes.index:
            crc32 = checkpoints._crc32
            checkpoints._crc32 = lambda state: crc32(state) + int(np.asarray(state["a"])[0] == 2)
        step, state, _ = kept.restore_latest(states[1])
        kept.save(2, states[2], {})
    values = np.asarray(state["a"]).tolist()
    print(f"step {step}: {values}", file=sys.stderr, flush=True)


def main(case, *flags):
    if case == "measures":
        measure(*flags)
        return
    with connect(devices=2) as processes:
        number = processes.index
        if case == "damaged":
            restore(processes, pathlib.Path(flags[0]))
            return
        print(f"connected {number}", file=sys.stderr, flush=True)
        if case == "fails" and number == 1:
            raise UserError("the device is out of memory")
        if case == "aborts" and number == 1:
            os.abort()
        if case == "differs":
            config = get_config()
            config.optimizer.learning_rate = 1e-5 * (1 + number)
            try:
                check_same_start(config, {"a": (len, 1.0)}, processes)
            except UserError as error:
                print(error, file=sys.stderr, flush=True)
            processes.exchange({})
            if number == 0:
                os.abort()
        time.sleep(LONG)


if __name__ == "__main__":
    main(*sys.argv[1:])
