"""Cards that a run can be planned for."""


def _usable(gib: int) -> int:
    """The bytes that CUDA reports, roughly: 1.5 percent less, as on an A100 of 40 GB."""
    return int(0.985 * gib * 2**30)


# Bytes of a card as CUDA reports them, and whether the Hopper kernel runs on it.
CARDS = {
    "rtx-3090": (_usable(24), False),
    "rtx-4090": (_usable(24), False),
    "rtx-5090": (_usable(32), False),
    "l4": (_usable(24), False),
    "l40s": (_usable(48), False),
    "a100-40gb": (42_331_013_120, False),
    "a100-80gb": (85_100_068_864, False),
    "dgx-spark": (_usable(119), False),  # of 128 GB, which the host shares
    "h100-80gb": (84_929_347_584, True),
    "h200-141gb": (150_754_820_096, True),
}
