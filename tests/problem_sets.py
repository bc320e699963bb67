"""Problems as tests load and draw them."""

from qerl_jax.data import splits
from qerl_jax.data.order import draw_turns, take_turns
from qerl_jax.data.splits import ProblemConfig


def load_problems(source="", *, split="train", **options):
    """`splits.load_split`."""
    return splits.load_split(ProblemConfig(source, **options), split=split)


def load_splits(source="", *, train=True, **options):
    """`splits.load_splits`."""
    return splits.load_splits(ProblemConfig(source, **options), train=train)


def load_mixture(sources, **options):
    """`splits.load_mixture`."""
    return splits.load_mixture(sources, ProblemConfig(**options))


def draw(order, cursor, n, *, exclude=()):
    """Draws the next n problems."""
    turns, cursor = take_turns(order, cursor, n)
    return draw_turns(order, cursor, turns, exclude=exclude)
