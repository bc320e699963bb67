"""Array widths that are compiled: few enough to wait for, close enough to waste little."""


def bucket(length: int, *, limit: int | None = None) -> int:
    """The smallest of 8, 16, 24, 32, 48, 64, 96, 128, ... that is at least `length`.

    Args:
        length: what must fit.
        limit: the longest length there is: no more than it, rounded up to a multiple of 8.
    """
    step = max(8, 1 << max(length - 1, 1).bit_length() >> 2)
    width = max(1, -(-length // step)) * step
    return width if limit is None else min(width, -(-limit // 8) * 8)
