"""Cases of the FP4 product with an adapter, and whether its kernel computes x A^T itself."""

from pallas_kernels.fp4_matmul import sm90, tiling
from pallas_kernels.fp4_matmul.tiling import TileConfig

# Tiling (None: the one that `tiling.choose` picks), M, N, K, rank, and whether the kernel computes
# x A^T.
CASES = [
    (None, 1, 256, 1024, 32, True),  # fewer CTAs than partials
    (None, 1, 4608, 3584, 96, True),  # in clusters
    (None, 8, 37888, 3584, 64, True),
    (None, 8, 3584, 18944, 32, True),  # more partials than CTAs
    (None, 33, 5120, 27648, 32, True),  # with split tiles
    (None, 40, 2048, 8960, 128, False),  # more work units than the first stages hold
    (None, 64, 37888, 3584, 64, True),
    (None, 64, 1024, 512, 128, True),
    (None, 64, 3584, 3584, 48, True),  # partials have more columns than the rank
    (None, 100, 3584, 18944, 32, False),  # two tiles of tokens
    (None, 128, 1024, 3584, 48, False),  # two tiles of tokens
    (None, 250, 3584, 18944, 32, False),  # the last of several tiles is not full
    (None, 136, 3584, 18944, 32, False),  # no reducer
    (None, 19, 576, 576, 16, False),  # K is not a multiple of 128, the columns of x in a partial
    (None, 8, 4608, 3584, 192, True),  # x A^T in copies of 128 columns; the last has 64
    # A CTA has more work units than warpgroups: without clusters, in clusters of which some compute
    # no unit, and with split tiles.
    (TileConfig(16, warpgroups_n=1, block_k=512, stages=3, in_flight=1), 13, 4096, 8960, 96, True),
    (TileConfig(16, warpgroups_n=2, block_k=512, stages=3, in_flight=1), 13, 4096, 4096, 96, True),
    (
        TileConfig(16, warpgroups_n=1, block_k=512, stages=3, in_flight=1, split=2),
        13,
        4096,
        8960,
        96,
        True,
    ),
    (
        TileConfig(16, warpgroups_n=1, block_k=256, stages=4, in_flight=1, stream_k=True),
        13,
        4096,
        8960,
        96,
        True,
    ),
    # Several warpgroups compute one work unit each.
    (TileConfig(16, warpgroups_n=1, slices=4, block_k=512, stages=3), 13, 4096, 8960, 96, True),
    (
        TileConfig(16, warpgroups_n=1, slices=4, block_k=512, stages=3, stream_k=True),
        13,
        4096,
        8960,
        96,
        True,
    ),
]


def schedule_of(config, m, n, k, rank):
    """Returns the tile schedule of a case on an H100 or H200."""
    if config is None:
        config = tiling.choose(m, n, k, rank=tiling.padded_rank(rank))
    return sm90.make_schedule(config, m, -(-n // tiling.TILE_ROWS), k, tiling.NUM_SMS)
