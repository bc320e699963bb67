"""Array widths that are compiled: few enough to wait for, close enough to waste little."""


def bucket(length: int) -> int:
    """The smallest width of at least `length`: four per power of two, multiples of 8."""
    step = max(8, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step
