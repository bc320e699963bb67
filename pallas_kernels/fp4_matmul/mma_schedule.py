"""How the products of `mma` are divided among CTAs."""

import dataclasses

from pallas_kernels.fp4_matmul.tiling import TILE_COLUMNS, TILE_ROWS

MAX_ROWS = 64  # of x
SHARED_MEMORY = 99 << 10  # bytes of a CTA on consumer cards
_FEWEST_TILES = 4  # along the columns of a CTA
# Elements between rows of x in shared memory, so that reads of eight rows do not collide.
PITCH = 8


@dataclasses.dataclass(frozen=True)
class MmaConfig:
    """A schedule."""

    rows: int = 64  # rows of W of a CTA, 64 or a multiple
    columns: int = 256  # columns of a step, 128, 256 or 512
    stages: int = 3  # number of steps that shared memory holds
    split: int = 1  # number of CTAs that divide the columns of the same rows

    @property
    def row_tiles(self) -> int:
        """Tiles of a CTA along the rows."""
        return self.rows // TILE_ROWS

    @property
    def column_tiles(self) -> int:
        """Tiles of a step along the columns."""
        return self.columns // TILE_COLUMNS

    def pitch(self) -> int:
        """Elements from one row of x to the next in shared memory."""
        return self.columns + PITCH

    def shared_bytes(self, m: int) -> int:
        """Bytes of shared memory of a product of M rows."""
        weight = self.rows * self.columns * 9 // 16
        return self.stages * (padded_tokens(m) * 2 * self.pitch() + weight)

    def problem(self, m: int) -> str | None:
        """Why a product of M rows cannot have this schedule, or None."""
        if self.rows < TILE_ROWS or self.rows % TILE_ROWS:
            return f"rows is {self.rows}, expected a multiple of {TILE_ROWS}"
        if self.columns not in (128, 256, 512):
            return f"columns is {self.columns}, expected 128, 256 or 512"
        if self.stages < 2 or self.split < 1:
            return f"{self.stages} stages and split {self.split}, expected at least 2 and 1"
        if (size := self.shared_bytes(m)) > SHARED_MEMORY:
            return f"{size} bytes of shared memory for {m} rows, limit {SHARED_MEMORY}"
        return None


def padded_tokens(m: int) -> int:
    """M, or the next multiple of 8, the columns of a product."""
    return -(-m // 8) * 8


def choose(m: int, n: int, k: int, num_sms: int) -> MmaConfig:
    """The schedule of a product of x [M, K] and W [N, K], M at most MAX_ROWS."""
    # From 8 tokens on the fastest for 7B on an H200, within 2 % (mma_autotune); for one token a
    # decode step is 7 % faster with more columns of a step, and a sum over fewer CTAs.
    columns, stages, ctas = 256, 2, 4.5  # CTAs for each SM
    if m >= 8:
        columns, stages, ctas = 128, 3, 3.4 if m == 8 else 1.7
    rows = 128 if m >= 8 and n >= 2 * 128 * num_sms else 64  # Both halves read the same tokens.
    blocks, tiles, per_step = -(-n // rows), -(-k // TILE_COLUMNS), columns // TILE_COLUMNS
    wanted = max(1, round(ctas * num_sms / blocks))
    per_part = max(_FEWEST_TILES, -(-tiles // (wanted * per_step)) * per_step)
    return MmaConfig(rows, columns, stages, -(-tiles // per_part))
