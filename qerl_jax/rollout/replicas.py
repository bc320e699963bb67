"""A rollout on all devices that hold the policy.

Each device takes a share of the prompts and runs a rollout of its own, with its own slots and its
own compaction, from a thread of its own. The devices meet only when all of them have ended: no
device waits in a chunk for another one's batch or prefill, and their programs are those of a
rollout on one device, compiled once (`aot.compile_operations`). One program over all devices would
wait for the longest batch in every chunk, and all devices would prefill when one has free slots.

The samples of a row depend on the key and on the row, not on the device.
"""

import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np

from qerl_jax import sharding
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.rollout.completions import Rollout
from qerl_jax.rollout.config import EngineConfig, SamplingConfig, Tokenizer
from qerl_jax.rollout.engine import Progress, generate_steps
from qerl_jax.rollout.programs import Executables
from qerl_jax.rollout.scheduler import Statistics


def sample(
    key: jax.Array,
    params: dict,
    lora: Lora | None,
    prompts: Sequence[Sequence[int]],
    *,
    config: ModelConfig,
    sampling: SamplingConfig,
    tokenizer: Tokenizer,
    engine: EngineConfig,
    group_size: int = 1,
    executables: Executables | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Rollout, list[Statistics]]:
    """Samples `group_size` completions of every prompt on all devices of the policy.

    Args:
        key: as in `engine.generate`.
        params: the policy, on one device or replicated.
        lora: its adapter, or None.
        prompts: P lists of token ids.
        config: as in `engine.generate`.
        sampling: as in `engine.generate`.
        tokenizer: as in `engine.generate`.
        engine: settings of the engine; its bounds of rows and memory are those of one device.
        group_size: G, number of completions of each prompt.
        executables: as in `engine.generate_steps`, with those of the other devices as `replicas`.
        on_progress: called with the number of completions that have ended and the number of
            sampled tokens, after every chunk but the last. What it raises ends the rollout.

    Returns:
        The completions in the order of the prompts, and the work of each device.

    Raises:
        UserError: as in `engine.generate`.
    """
    devices = sharding.devices_of(params)
    shares = deal([len(prompt) for prompt in prompts], len(devices))
    engine = dataclasses.replace(engine, prompts=max(engine.prompts, most(prompts, devices)))
    programs = [None] * len(devices) if executables is None else [executables]
    programs += [] if executables is None else executables.replicas

    def steps_on(number: int) -> Generator[Progress, None, Rollout]:
        own_key, own_params, own_lora = sharding.on_device((key, params, lora), devices[number])
        return generate_steps(
            own_key,
            own_params,
            own_lora,
            [prompts[i] for i in shares[number]],
            config=config,
            sampling=sampling,
            tokenizer=tokenizer,
            engine=engine,
            group_size=group_size,
            prompt_ids=shares[number].tolist(),
            executables=programs[number],
        )

    total = len(prompts) * group_size

    def report(latest: Sequence[Progress | None]) -> None:
        found = [step for step in latest if step is not None]
        ended = sum(step.ended_rows for step in found)
        if on_progress is not None and ended < total:
            on_progress(ended, sum(step.tokens for step in found))

    if len(devices) == 1:
        for step in steps_on(0):
            report([step])
        return step.rollout, [step.statistics]
    used = [number for number, share in enumerate(shares) if len(share)] or [0]
    last = _in_threads([lambda number=number: steps_on(number) for number in used], report)
    rows = [shares[number][:, None] * group_size + np.arange(group_size) for number in used]
    order = np.argsort(np.concatenate([part.reshape(-1) for part in rows]))
    rollout = jax.tree.map(
        lambda *parts: np.concatenate(parts)[order], *(step.rollout for step in last)
    )
    return rollout, [step.statistics for step in last]


def most(prompts: Sequence[Any], devices: Sequence[Any]) -> int:
    """Returns the largest number of prompts that a device takes."""
    return -(-len(prompts) // len(devices))


def deal(lengths: Sequence[int], count: int) -> list[np.ndarray]:
    """Deals prompts out by their expected work.

    Before it is sampled, only the length of its prompt is known of a completion, and a longer
    question tends to have a longer answer. The prompts are dealt out from the longest to the
    shortest, in turns that alternate in direction.

    Args:
        lengths: number of tokens of each prompt.
        count: number of shares.

    Returns:
        The indices of the prompts of each share, ascending. Their numbers differ by one at most.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    shares: list[list[int]] = [[] for _ in range(count)]
    for start in range(0, len(order), count):
        turn = order[start : start + count]
        numbers = range(count) if start // count % 2 == 0 else range(count - 1, -1, -1)
        for number, prompt in zip(numbers, turn, strict=False):
            shares[number].append(int(prompt))
    return [np.sort(np.array(share, int)) for share in shares]


def _in_threads(
    parts: Sequence[Callable[[], Generator[Progress, None, Rollout]]],
    report: Callable[[Sequence[Progress | None]], None],
) -> list[Progress]:
    """Runs each part in a thread, reports in this one, and returns the last progress of each.

    Dispatching a chunk and waiting for one both leave Python's interpreter to the other threads. If
    a part or the report raises, the other parts end after their current chunk.
    """
    latest: list[Progress | None] = [None] * len(parts)
    events: queue.SimpleQueue[concurrent.futures.Future | None] = queue.SimpleQueue()
    stop = threading.Event()

    def run(number: int) -> Progress:
        with contextlib.closing(parts[number]()) as steps:
            for step in steps:
                latest[number] = step
                events.put(None)
                if stop.is_set():
                    break
        return step

    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        futures = [pool.submit(run, number) for number in range(len(parts))]
        for future in futures:
            future.add_done_callback(events.put)
        try:
            running = len(parts)
            while running:
                event = events.get()
                if event is None:
                    report(latest)
                else:
                    event.result()
                    running -= 1
        finally:
            stop.set()
    return [future.result() for future in futures]
