"""Drafts: guesses of a row's next tokens, which one forward pass checks together.

A step of few rows takes as long for several tokens of each, and the completions of a group repeat
each other. So a row's next tokens are guessed: as those that follow the longest match of its newest
tokens in what its group has written so far, prompt included. Tokens are sampled at all positions of
the draft with the keys that they have without drafts, and accepted as far as the draft equals them.
So the completions are the same, up to the rounding of other shapes. Speculative decoding by
rejection (https://arxiv.org/abs/2211.17192) only keeps their distribution.

The tokens of the rows are on the device (`empty_history`), which guesses and checks without the
host. The host decides how long drafts are (`DraftLength`).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

NOTHING = -1  # stands for no token: it ends the tokens of a row, and as a draft it equals no sample
_MATCH = 8  # tokens of the longest match
POSITIONS = (2, 4, 8)  # tokens of a row that a step may check: the newest one and a draft
# Positions of all rows together, from which on each costs about as much as a row.
_MOST_POSITIONS = 64
# Milliseconds of a decode step by the number of its positions, of which only the ratios matter: a
# 1.5B policy in NVFP4 with LoRA on an H200.
_STEP_MILLISECONDS = {1: 1.14, 8: 1.15, 32: 1.35, 64: 1.6, 128: 2.6}
_DRAFTING_MILLISECONDS = 0.03
# The share of first guesses that is expected to be right before any is known, how many guesses that
# outweighs, and what is left of the weight of others after each chunk.
_EXPECTED, _EXPECTED_WEIGHT, _DECAY = 0.45, 16.0, 0.8


def lengths_of(rows: int) -> tuple[int, ...]:
    """Returns the numbers of positions T that a step of some rows may check, but for 1.

    They are the two largest of `POSITIONS` that R T allows, so that there are few programs.
    """
    return tuple(count for count in POSITIONS if rows * count <= _MOST_POSITIONS)[-2:]


def empty_history(
    groups: int,
    group_size: int,
    positions: int,
    sharding: jax.sharding.Sharding | None = None,
) -> jax.Array:
    """Returns the tokens of rows that have none: int32 [N, G, 8 + S], of S positions each.

    The 8 entries before the first position are always empty, so that all matches are slices.
    """
    shape = groups, group_size, _MATCH + positions
    return jnp.full(shape, NOTHING, jnp.int32, device=sharding)


def begin(history: jax.Array, places: jax.Array | np.ndarray, tokens: jax.Array) -> jax.Array:
    """Returns a history in which some rows have these tokens and no others.

    Args:
        history: result of `empty_history`.
        places: int32 [R], index of each row among the N G of the history, and N G for no row.
        tokens: int32 [R, W], the tokens of each row from its first on, and then `NOTHING`.
    """
    widths = (0, 0), (_MATCH, history.shape[2] - _MATCH - tokens.shape[1])
    tokens = jnp.pad(tokens, widths, constant_values=NOTHING)
    return history.at[_index(history, places)].set(tokens, mode="drop")


def record(
    history: jax.Array,
    places: jax.Array | np.ndarray,
    starts: jax.Array,
    tokens: jax.Array,
    counts: jax.Array,
) -> jax.Array:
    """Returns a history in which rows have further tokens.

    Args:
        history: int32 [N, G, 8 + S].
        places: int32 [R], as in `begin`.
        starts: int32 [R], position of the first of the tokens of each row.
        tokens: int32 [R, T].
        counts: int32 [R], how many of them are written.
    """
    steps = jnp.arange(tokens.shape[1])
    entries = jnp.where(steps < counts[:, None], _MATCH + starts[:, None] + steps, history.shape[2])
    group, member = _index(history, places)
    return history.at[group[:, None], member[:, None], entries].set(tokens, mode="drop")


@jax.named_scope("draft")
def guess(
    history: jax.Array, places: jax.Array | np.ndarray, newest: jax.Array, count: int
) -> jax.Array:
    """Guesses the next tokens of R rows.

    They follow the longest match of a row's newest tokens, up to 8, in its own tokens and in those
    of its group; of several, one in its own tokens, and the one at the latest position. After its
    own tokens a row is guessed to repeat those since the match.

    Args:
        history: int32 [N, G, 8 + S].
        places: int32 [R], as in `begin`.
        newest: int32 [R], position of the newest token of each row.
        count: number of guesses for each row.

    Returns:
        int32 [R, count], `NOTHING` where there is no guess.
    """
    group, member = _index(history, places)
    _, size, width = history.shape
    positions = width - _MATCH
    back = _MATCH + newest[:, None] - jnp.arange(_MATCH)
    last = history.at[group[:, None], member[:, None], back].get(mode="clip")  # newest first
    mine = history.at[group].get(mode="clip")
    equal = jnp.ones((len(places), size, positions), bool)
    length = jnp.zeros(equal.shape, jnp.int32)
    for distance in range(_MATCH):
        first = _MATCH - 1 - distance
        equal &= mine[:, :, first : first + positions] == last[:, distance, None, None]
        length += equal
    # One maximum finds the best match and where it is.
    found, members = (length > 0) & (mine[:, :, _MATCH:] >= 0), jnp.arange(size)[:, None]
    rank = 2 * length + (members == member[:, None, None])
    rank = rank * (positions * size) + jnp.arange(positions) * size + members
    best = jnp.max(jnp.where(found, rank, NOTHING), axis=(1, 2))
    source, after = best % size, best // size % positions
    # A match in the row's own tokens is followed by those up to the newest one, again and again.
    period = jnp.where(source == member, jnp.maximum(newest + 1 - after, 1), count)
    entries = _MATCH + after[:, None] + jnp.arange(count) % period[:, None]
    guesses = history.at[group[:, None], source[:, None], entries].get(mode="clip")
    return jnp.where(best[:, None] >= 0, guesses, NOTHING)


def _index(history, places):
    """The group and the member of each of some rows, by their index among all."""
    return places // history.shape[1], places % history.shape[1]


class DraftLength:
    """Decides how many positions a step checks, by how many guesses were right so far.

    It knows the tokens alone and no time, so that a run that is resumed decides the same.
    """

    def __init__(self) -> None:
        guesses = POSITIONS[-1] - 1
        # Of the guesses at each distance that followed right ones: all, and those that were right.
        self._made, self._right = np.zeros(guesses), np.zeros(guesses)

    def observe(self, taken: np.ndarray, positions: int) -> None:
        """Notes how many tokens rows took of T positions in each step: int [R, steps]."""
        for guess in range(positions - 1):
            self._made[guess] += np.count_nonzero(taken > guess)
            self._right[guess] += np.count_nonzero(taken > guess + 1)

    def choose(self, rows: int, choices: Sequence[int]) -> int:
        """Returns how many positions a row has in the next chunk: one of the choices.

        What was noted loses weight with each chunk, so that drafts are tried again.
        """
        self._made *= _DECAY
        self._right *= _DECAY
        tokens, chance, share = [1.0], 1.0, _EXPECTED
        for made, right in zip(self._made, self._right, strict=True):
            share = (right + share * _EXPECTED_WEIGHT) / (made + _EXPECTED_WEIGHT)
            chance *= share
            tokens.append(tokens[-1] + chance)

        def cost(count: int) -> float:
            known = list(_STEP_MILLISECONDS)
            time = np.interp(rows * count, known, list(_STEP_MILLISECONDS.values()))
            return float(time + _DRAFTING_MILLISECONDS * (count > 1)) / tokens[count - 1]

        return min(choices, key=cost)
