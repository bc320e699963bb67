"""Which tokens of a packed buffer see each other, and which tiles the kernels visit for that.

The buffer holds groups: a prompt, and its completions after it. A query sees the keys before it of
its own completion and of its group's prompt. So a key is seen by one run of queries: from itself to
the end of its completion, or to the end of its group if it is in the prompt. The kernels test
nothing else: `key <= query < ends[key]`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

ALIGNMENT = 8  # the first key of a block is a multiple of it
BLOCK = 128  # queries of a tile of the forward pass, and keys of a tile of the backward pass
STEP = 64  # queries that a tile of keys visits at a time
PART_BITS = 12  # bits of an id for the part of a group
PADDING = -1  # id of a token of padding

Array = Any  # a jax.Array, a NumPy array, or a reference to it inside a kernel


class Segments(NamedTuple):
    """The groups of a packed buffer of T tokens, for `attend_packed`; made by `segments`.

    The shapes are functions of T alone, so one compiled program takes every layout.

    Attributes:
        ids: int32 [T], group << 12 | part. Part 0 is the group's prompt; -1 is padding.
        key_runs: int32 [T / 128, 9], a row for each tile of 128 queries, in the order in which CTAs
            start. It holds the tile's index and its two runs of blocks of 128 keys, the prompt's
            run and its own: first key, number of blocks, first full block and end of the full
            blocks. Every query of the tile sees every key of a full block.
        query_runs: int32 [T / 64, 8], a row for each part of a tile of 128 keys, in the order in
            which CTAs start. It holds the tile's index, its number of blocks of 64 queries, the
            part's index and the number of parts, the slot of the part's sums or -1 if the tile is
            not divided, and the end of the tile's full blocks. Rows without parts are empty.
        sums: int32 [T / 128, 2], the first slot of each divided tile of keys and its number of
            parts, or zeros.
        ends: int32 [T], the end of the run of queries that see each key.
        positions: int32 [T], the position of each token in its row, where attention has a window;
            None otherwise, and in what `segments` returns.
    """

    ids: Array
    key_runs: Array
    query_runs: Array
    sums: Array
    ends: Array
    positions: Array | None = None


def segments(ids: np.ndarray) -> Segments:
    """Returns the segments of a packed buffer, in NumPy.

    Args:
        ids: int32 [T], group << 12 | part, which never decreases; padding is -1 and comes last. A
            GPU needs a multiple of 128 tokens.

    Raises:
        ValueError: an id is smaller than the id before it, or follows padding.
    """
    ids = np.asarray(ids, np.int32)
    order = np.where(ids < 0, np.iinfo(np.int32).max, ids)
    wrong = np.flatnonzero(np.diff(order) < 0)
    if len(wrong):
        raise ValueError(
            f"token {wrong[0] + 1} has the id {ids[wrong[0] + 1]} after {ids[wrong[0]]}; "
            "ids must not decrease, and padding must come last"
        )
    length = len(ids)
    padded = np.pad(ids, (0, -length % BLOCK), constant_values=PADDING)
    own, own_ends = _runs(padded)
    group, group_ends = _runs(padded >> PART_BITS)
    index = np.arange(len(padded), dtype=np.int32)
    is_prompt = padded & (1 << PART_BITS) - 1 == 0
    # Padding sees padding of its own tile, so that a tile of padding costs one block.
    ends = np.where(is_prompt, group_ends, own_ends)
    ends = np.where(padded < 0, (index // BLOCK + 1) * BLOCK, ends)
    own = np.where(padded < 0, np.maximum(own, index // BLOCK * BLOCK), own)
    query_runs, sums = _query_runs(ends)
    return Segments(
        ids=ids,
        key_runs=_key_runs(own, ends, group, np.where(is_prompt[group], own_ends[group], group)),
        query_runs=query_runs,
        sums=sums,
        ends=ends[:length].astype(np.int32),
    )


def windowed(segments: Segments, window: int) -> Segments:
    """Returns the segments with the blocks that are visited where queries see the last keys alone.

    No block is full then. A query sees at most `window` keys up to its own, by their positions: in
    its own run those of the tiles before its own, and of the prompt the last ones. A key whose
    window ends in its own segment is seen by no other one, so only the tiles with the last
    `window` tokens of a prompt visit all queries of the group.
    """
    tile, prompt, prompt_blocks, _, _, own, blocks, _, _ = segments.key_runs.T
    stop = own + blocks * BLOCK
    first = (tile * BLOCK - (window - 1)) // BLOCK * BLOCK
    is_later = first > own
    # The prompt may end in the first block of the own run, which is left out then.
    may_go_on = is_later & (prompt + prompt_blocks * BLOCK >= own)
    missing = (own + BLOCK - prompt + (BLOCK - 1)) // BLOCK - prompt_blocks
    prompt_blocks = prompt_blocks + missing * may_go_on
    own = own + (first - own) * is_later
    # The last block of a prompt may have one key, and two blocks without any may follow.
    most = -(-(window - 1) // BLOCK) + 1 + 2 * may_go_on
    left_out = (prompt_blocks - most) * (prompt_blocks > most)
    none = 0 * tile
    runs = [tile, prompt + left_out * BLOCK, prompt_blocks - left_out, none, none, own]
    runs += [(stop - own) // BLOCK, none, none]
    numpy = np if isinstance(segments.ids, np.ndarray) else jnp
    index, ids = numpy.arange(len(segments.ids)), segments.ids
    is_own = ids == ids[numpy.minimum(index + window, len(ids) - 1)]
    ends = numpy.where(is_own, numpy.minimum(segments.ends, index + window), segments.ends)
    seen = -(-(ends.reshape(-1, BLOCK).max(axis=1) - index[::BLOCK]) // STEP)
    tile, visited, part, parts, slot, _, *rest = segments.query_runs.T
    visits = [tile, numpy.minimum(visited, seen[tile]), part, parts, slot, 0 * tile, *rest]
    return segments._replace(
        key_runs=numpy.stack(runs, axis=1).astype(np.int32),
        query_runs=numpy.stack(visits, axis=1).astype(np.int32),
    )


def _runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The start and the end of the run of equal values around each token, int32 [T]."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    ends = np.append(starts[1:], len(values))
    counts = ends - starts
    return np.repeat(starts, counts).astype(np.int32), np.repeat(ends, counts).astype(np.int32)


def _key_runs(
    own: np.ndarray, ends: np.ndarray, group: np.ndarray, prompt_ends: np.ndarray
) -> np.ndarray:
    """`Segments.key_runs`.

    Of each token, int [T]: the start of its segment, the end of the queries that see it, the start
    of its group and the end of its group's prompt.
    """
    tile = np.arange(len(own) // BLOCK)
    start = tile * BLOCK
    stop = start + BLOCK
    first = own[start] // BLOCK * BLOCK  # where the own run starts
    blocks = (stop - first) // BLOCK
    # All queries of a tile that ends in the first one's segment see what the first one sees, and
    # their own segment. Of the prompt this is already true where the tile ends in the group.
    full_from = -(-(own[start] - first) // BLOCK)
    full_to = np.where(ends[own[start]] >= stop, blocks - 1, 0)
    prompt = group[start] // ALIGNMENT * ALIGNMENT
    prompt_stop = np.minimum(prompt_ends[start], first)
    prompt_blocks = np.where(prompt_stop > group[start], -(-(prompt_stop - prompt) // BLOCK), 0)
    prompt_from = np.where(prompt < group[start], 1, 0)
    prompt_to = np.where(ends[group[start]] >= stop, (prompt_stop - prompt) // BLOCK, 0)
    rows = [tile, prompt, prompt_blocks, prompt_from, prompt_to, first, blocks, full_from, full_to]
    order = np.argsort(-(prompt_blocks + blocks), kind="stable")
    return np.stack(rows, axis=1)[order].astype(np.int32)


def _query_runs(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`Segments.query_runs` and `Segments.sums`, of `Segments.ends`.

    A prompt is seen by its whole group, so its tiles have far more to do than others. Tiles are
    divided into parts of about the mean length, as long as they fit the slots for their sums.
    """
    tiles = ends.reshape(-1, BLOCK)
    count = len(tiles)
    start = np.arange(count) * BLOCK
    blocks = -(-(tiles.max(axis=1) - start) // STEP)
    full_to = (tiles.min(axis=1) - start) // STEP
    size = max(1, -(-blocks.sum() // max(count, 1)))
    while True:
        parts = -(-blocks // size)
        slots = np.where(parts > 1, parts, 0)
        if slots.sum() <= count and parts.sum() <= 2 * count:
            break
        size += 1
    first_slot = np.cumsum(slots) - slots
    tile = np.repeat(np.arange(count), parts)
    part = np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)
    slot = np.where(slots[tile] > 0, first_slot[tile] + part, -1)
    rows = np.stack([tile, blocks[tile], part, parts[tile], slot, full_to[tile]], axis=1)
    order = np.argsort(-blocks[tile] / parts[tile], kind="stable")
    runs = np.zeros((2 * count, 8), np.int32)
    runs[: len(rows), :6] = rows[order]
    sums = np.stack([np.where(slots > 0, first_slot, 0), slots], axis=1)
    return runs, sums.astype(np.int32)
