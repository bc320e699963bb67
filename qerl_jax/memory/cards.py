"""Cards that a run can be planned for."""


def _usable(gib: int) -> int:
    """The bytes that CUDA reports, roughly: 1.5 percent less, as on an A100 of 40 GB."""
    return int(0.985 * gib * 2**30)


# Bytes of a card as CUDA reports them, and its compute capability.
CARDS = {
    "rtx-3090": (_usable(24), 8.6),
    "rtx-4090": (_usable(24), 8.9),
    "rtx-5090": (_usable(32), 12.0),
    "l4": (_usable(24), 8.9),
    "l40s": (_usable(48), 8.9),
    "a100-40gb": (42_331_013_120, 8.0),
    "a100-80gb": (85_100_068_864, 8.0),
    "dgx-spark": (_usable(119), 12.1),  # of 128 GB, which the host shares
    "h100-80gb": (84_929_347_584, 9.0),
    "h200-141gb": (150_754_820_096, 9.0),
}
