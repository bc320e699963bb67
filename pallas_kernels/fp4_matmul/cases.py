"""Shapes [N, K] of the fused projections of known models, for tests and benchmarks."""


def _layers(embed: int, mlp: int, heads: int, kv_heads: int) -> dict[str, tuple[int, int]]:
    """The four products of a layer; a head has 128 dimensions."""
    return {
        "qkv": (128 * (heads + 2 * kv_heads), embed),
        "o": (embed, 128 * heads),
        "gate_up": (2 * mlp, embed),
        "down": (embed, mlp),
    }


MODELS = {
    "1.5b": _layers(1536, 8960, 12, 2),  # Qwen2.5
    "3b": _layers(2048, 11008, 16, 2),
    "7b": _layers(3584, 18944, 28, 4),
    "14b": _layers(5120, 13824, 40, 8),
    "32b": _layers(5120, 27648, 40, 8),
    "72b": _layers(8192, 29568, 64, 8),
    "llama8b": _layers(4096, 14336, 32, 8),
    # What each of 2 or 4 devices has of a layer that is cut between them.
    "32b/2": _layers(5120, 13824, 20, 4),
    "72b/2": _layers(8192, 14784, 32, 4),
    "72b/4": _layers(8192, 7424, 16, 2),
}

# Numbers of tokens of a product: decode steps, their batches, prompts and training.
DECODE = (1, 8, 16, 32, 64)
MIDDLE = (128, 256)
LARGE = (512, 2048, 8192)


def rank_of(layer: str, rank: int) -> int:
    """The rank of the stacked adapters of a fused projection, as "qkv" or "7b.qkv"."""
    return rank * {"qkv": 3, "gate_up": 2}.get(layer.rpartition(".")[2], 1)
