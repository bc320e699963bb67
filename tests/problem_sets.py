"""The functions that load problems, with the fields of `ProblemConfig` as options."""

from qerl_jax.data import splits
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
