"""A rollout on all devices that hold the policy.

A group of devices that hold the policy together, which is one device where weights are not cut,
takes a share of the prompts and runs a rollout of its own, with its own slots and its own
compaction, from a thread of its own. The groups meet only when all of them have ended: none waits
in a chunk for another one's batch or prefill, and their programs are those of a rollout on one
group, compiled once (`aot.compile_operations`). One program over all groups would wait for the
longest batch in every chunk, and all would prefill when one has free slots.

The samples of a row depend on the key and on the row, not on the devices.
"""

import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Collection, Generator, Sequence

import jax
import numpy as np

from qerl_jax.policy import sharding
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.rollout import engine as engine_lib
from qerl_jax.rollout.completions import Completions, Rollout
from qerl_jax.rollout.config import EngineConfig, SamplingConfig, Tokenizer
from qerl_jax.rollout.engine import RolloutProgress
from qerl_jax.rollout.programs import Executables
from qerl_jax.rollout.scheduler import Statistics


def generate_steps(
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
    prompt_ids: Sequence[int] | None = None,
    executables: Executables | None = None,
) -> Generator[RolloutProgress, None, Rollout]:
    """Samples as `engine.generate_steps` does, on all devices of the policy.

    It yields the progress of all groups after every chunk of one of them. Close it: until then the
    groups go on.

    Args:
        key: as in `engine.generate`.
        params: the policy, on one device or on a mesh.
        lora: its adapter, or None.
        prompts: P lists of token ids.
        config: as in `engine.generate`.
        sampling: as in `engine.generate`.
        tokenizer: as in `engine.generate`.
        engine: settings of the engine; its bounds of rows and memory are those of one device.
        group_size: G, number of completions of each prompt.
        prompt_ids: as in `engine.generate_steps`.
        executables: as in `engine.generate_steps`, with those of the other groups as `replicas`.

    Raises:
        UserError: as in `engine.generate`.
        RuntimeError: a program is missing from the executables.
    """
    groups = sharding.groups_of(params)
    shares = deal([len(prompt) for prompt in prompts], len(groups))
    largest = most_prompts(len(prompts), len(groups))
    engine = dataclasses.replace(engine, prompts=max(engine.prompts, largest))
    ids = np.arange(len(prompts)) if prompt_ids is None else np.asarray(prompt_ids)
    programs = [None] * len(groups) if executables is None else [executables]
    programs += [] if executables is None else executables.replicas

    def steps_on(number: int) -> Generator[RolloutProgress, None, Rollout]:
        own_key, own_params, own_lora = sharding.on_group((key, params, lora), groups[number])
        return engine_lib.generate_steps(
            own_key,
            own_params,
            own_lora,
            [prompts[i] for i in shares[number]],
            config=config,
            sampling=sampling,
            tokenizer=tokenizer,
            engine=engine,
            group_size=group_size,
            prompt_ids=ids[shares[number]].tolist(),
            executables=programs[number],
        )

    if len(groups) == 1:
        return (yield from steps_on(0))
    rows = [(i[:, None] * group_size + np.arange(group_size)).reshape(-1) for i in shares]
    rollout = Completions(len(prompts) * group_size, sampling, tokenizer).rollout
    used = [number for number, share in enumerate(shares) if len(share)] or [0]
    latest: dict[int, RolloutProgress] = {}
    steps = _in_threads([lambda number=number: steps_on(number) for number in used])
    with contextlib.closing(steps):
        for part, step in steps:
            latest[part] = step
            whole, new = jax.tree.leaves(rollout), jax.tree.leaves(step.rollout)
            for array, values in zip(whole, new, strict=True):
                array[rows[used[part]]] = values
            yield _together(latest.values(), rollout)
    return rollout


def _together(parts: Collection[RolloutProgress], rollout: Rollout) -> RolloutProgress:
    """Returns the progress of all groups."""
    work = [part.statistics for part in parts]
    return RolloutProgress(
        rows=len(rollout.lengths),
        ended_rows=sum(part.ended_rows for part in parts),
        tokens=sum(part.tokens for part in parts),
        statistics=Statistics(
            prefilled_prompts=sum(one.prefilled_prompts for one in work),
            decoded=sum(one.decoded for one in work),
            live=sum(one.live for one in work),
        ),
        rollout=rollout,
    )


def most_prompts(prompts: int, groups: int) -> int:
    """Returns the largest number of prompts that one of several groups takes."""
    return -(-prompts // groups)


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
    parts: Sequence[Callable[[], Generator[RolloutProgress, None, Rollout]]],
) -> Generator[tuple[int, RolloutProgress]]:
    """Runs each part in a thread, and yields the number of a part with each of its progresses.

    Dispatching a chunk and waiting for one both release Python's GIL for the other threads.
    Arrays are copied, because their part writes to them while this thread reads. If a part raises,
    or if the generator is closed, the parts end after their current chunk.
    """
    events: queue.SimpleQueue[tuple[int, RolloutProgress] | concurrent.futures.Future] = (
        queue.SimpleQueue()
    )
    stop = threading.Event()

    def run(number: int) -> None:
        with contextlib.closing(parts[number]()) as steps:
            for step in steps:
                events.put((number, _copied(step)))
                if stop.is_set():
                    break

    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        for number in range(len(parts)):
            pool.submit(run, number).add_done_callback(events.put)
        try:
            running = len(parts)
            while running:
                event = events.get()
                if isinstance(event, concurrent.futures.Future):
                    event.result()
                    running -= 1
                else:
                    yield event
        finally:
            stop.set()


def _copied(step: RolloutProgress) -> RolloutProgress:
    return dataclasses.replace(step, rollout=jax.tree.map(np.copy, step.rollout))
