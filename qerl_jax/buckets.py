"""Array widths that are compiled: few enough to wait for, close enough to waste little."""

_NARROWEST = 64  # tokens; below, a row costs no less


def bucket(length: int, *, limit: int | None = None) -> int:
    """The smallest of 8, 16, 24, 32, 48, 64, 96, 128, ... that is at least `length`.

    Args:
        length: what must fit.
        limit: the longest length there is: no more than it, rounded up to a multiple of 8.
    """
    step = max(8, 1 << max(length - 1, 1).bit_length() >> 2)
    width = max(1, -(-length // step)) * step
    return width if limit is None else min(width, -(-limit // 8) * 8)


def narrower(width: int) -> tuple[int, ...]:
    """A width and buckets of a half and a quarter of it, ascending, for rows that need less."""
    smaller = {bucket(part) for part in (width // 2, width // 4) if part >= _NARROWEST}
    return tuple(sorted({width} | smaller))
