"""Sums of two numbers: problems that a small model can learn within minutes on a CPU."""

import random

from qerl_jax.errors import UserError

_LARGEST = 99


def sums(*, seed: int, largest: int = 20) -> list[dict[str, str]]:
    """Returns every sum of two numbers once, in an order that follows from the seed.

    Returns:
        (largest + 1)^2 rows with the question `What is 3 + 4?` and the answer `3 + 4 = 7`.

    Raises:
        UserError: `largest` is not a whole number from 1 to 99.
    """
    if type(largest) is not int or not 1 <= largest <= _LARGEST:
        raise UserError(
            f"data.options: largest={largest!r}: pass a whole number from 1 to {_LARGEST}"
        )
    rows = [
        {"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}"}
        for a in range(largest + 1)
        for b in range(largest + 1)
    ]
    random.Random(seed).shuffle(rows)
    return rows
