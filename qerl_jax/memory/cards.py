"""Cards that a run can be planned for."""

# Bytes of a card as CUDA reports them, and whether the Hopper kernel runs on it.
CARDS = {
    "a100-40gb": (42_331_013_120, False),
    "a100-80gb": (85_100_068_864, False),
    "h100-80gb": (84_929_347_584, True),
    "h200-141gb": (150_754_820_096, True),
}
