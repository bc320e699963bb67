"""How the prompts of a rollout are divided, and rollouts that run at the same time.

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
import contextvars
import dataclasses
import queue
import threading
from collections.abc import Callable, Generator, Sequence

import jax
import numpy as np

from qerl_jax.rollout.completions import Rollout
from qerl_jax.rollout.progress import RolloutProgress


def largest_share(num_prompts: int, count: int) -> int:
    """Returns the number of prompts of the largest of several shares, as `deal` makes them."""
    return -(-num_prompts // count)


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


def rows_of(prompts: np.ndarray, group_size: int) -> np.ndarray:
    """Returns the rows of prompts: int [P G] from the indices [P] of prompts, G rows of each."""
    return (prompts[:, None] * group_size + np.arange(group_size)).reshape(-1)


def in_threads(
    parts: Sequence[Callable[[], Generator[RolloutProgress, None, Rollout]]],
) -> Generator[tuple[int, RolloutProgress]]:
    """Runs each part in a thread, and yields the number of a part with each of its progresses.

    Dispatching a chunk and waiting for one both release Python's GIL for the other threads.
    Arrays are copied, because their part writes to them while this thread reads. A part has the
    context variables of this thread, such as the date of chat templates. If a part raises, or if
    the generator is closed, the parts end after their current chunk.
    """
    events: queue.SimpleQueue[tuple[int, RolloutProgress] | concurrent.futures.Future] = (
        queue.SimpleQueue()
    )
    stop = threading.Event()

    def run(number: int) -> None:
        with contextlib.closing(parts[number]()) as steps:
            for step in steps:
                rollout = jax.tree.map(np.copy, step.rollout)
                events.put((number, dataclasses.replace(step, rollout=rollout)))
                if stop.is_set():
                    break

    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        for number in range(len(parts)):
            context = contextvars.copy_context()  # A thread cannot enter that of another one.
            pool.submit(context.run, run, number).add_done_callback(events.put)
        try:
            num_running = len(parts)
            while num_running:
                event = events.get()
                if isinstance(event, concurrent.futures.Future):
                    event.result()
                    num_running -= 1
                else:
                    yield event
        finally:
            stop.set()
