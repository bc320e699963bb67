"""Widths of compiled arrays: few, to compile little, and close together, to pad little."""

_NARROWEST = 64  # tokens; a narrower row takes as much time


def bucket(length: int, *, limit: int | None = None) -> int:
    """Returns the smallest of 8, 16, 24, 32, 48, 64, 96, 128, ... that is at least `length`.

    Args:
        length: number of tokens that must fit.
        limit: longest possible length; the result is at most this, rounded up to a multiple of 8.
    """
    step = max(8, 1 << max(length - 1, 1).bit_length() >> 2)
    width = max(1, -(-length // step)) * step
    return width if limit is None else min(width, -(-limit // 8) * 8)


def narrower(width: int) -> tuple[int, ...]:
    """Returns a width and the buckets of its half and quarter, ascending, for shorter rows."""
    smaller = {bucket(part) for part in (width // 2, width // 4) if part >= _NARROWEST}
    return tuple(sorted({width} | smaller))
