"""The tilings of the Hopper kernel: `TileConfig`, which ones fit, and which one a shape gets."""

import dataclasses
import functools
import hashlib
import json
import math
import pathlib
from collections.abc import Iterator

from pallas_kernels.device import NUM_SMS

TILE_ROWS = 64
TILE_COLUMNS = 128
PARTIAL_COLUMNS = 32  # columns of x A^T that are added up together
MIN_PARTIALS = 4  # one for each warp that adds up x A^T
# Rows up to which the kernel adds up partials itself: few parts of them for each CTA.
MAX_ROWS_OF_PARTIALS = 256
# Tokens of a tile: gate and up take longer with 192, and with 256 ptxas wants 158 registers, where
# the threads of four warpgroups start with 128.
_MOST_TOKENS_WITH_REDUCER = 128
# Rows up to which a product adds to the residual and begins an RMSNorm; not measured with more.
MAX_ROWS_OF_NORM = 64
SMEM_LIMIT = 232448 - 1536  # bytes of a CTA on Hopper, less some for barriers and the like

# `in_flight` and `ahead` to try, by the number of products of a stage.
_DEPTHS = {4: ((0, False), (1, False), (1, True), (2, True)), 8: ((1, False), (1, True))}
_LARGE = 2048  # tokens from which on the tiling does not depend on their number
TUNED = pathlib.Path(__file__).with_name("tuned")
# Clusters that run at a time on an H200, by the number of their CTAs, as 270 timed tilings show. 40
# clusters of 3, 32 of 4, 24 of 5, 16 of 7 and 16 of 8 CTAs ran in two waves, and took 1.6 to 1.95
# times as long.
_CLUSTERS = {3: 36, 4: 28, 5: 20, 6: 14, 7: 14, 8: 14}
# The names of fields of `TileConfig` in files, where they differ.
_JSON_NAMES = {"warpgroups_n": "rows", "stream_k": "stream"}
# Registers for the threads at the same position of all warpgroups.
_REGISTERS = 512
_HELPER_REGISTERS, _MOST_HELPER_REGISTERS = 32, 40


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """The static choices of one compiled kernel.

    A CTA has warpgroups_n * slices consumer warpgroups, a producer warpgroup, and with partials of
    x A^T a reducer warpgroup, which adds them up, and a norm's mean squares.

    Attributes:
        tile_m: number of tokens of a tile, a multiple of 8 up to 256.
        warpgroups_n: number of consumer warpgroups along the outputs, with 64 outputs each.
        slices: number of consumer warpgroups that divide the columns of a stage; they add up their
            sums at the end of a tile.
        block_k: number of columns of a stage, a multiple of 128 * slices.
        stages: depth of the pipeline.
        stream_k: whether every CTA gets the same number of steps: whole tiles, and an equal run of
            the steps of the tiles left over, whose partial sums are added up at the end. Otherwise
            CTAs compute whole tiles only.
        in_flight: number of products of 64 columns of a stage that may run while the next columns
            are dequantized; few need few registers. 0 for all of them.
        split: number of CTAs of a cluster, which divide its tiles among them. A tile left over is
            split along K, and added up through shared memory. Not with stream_k.
        ahead: whether the first columns of the next stage are dequantized while the products of
            this one run.
    """

    tile_m: int
    warpgroups_n: int = 4
    slices: int = 1
    block_k: int = 128
    stages: int = 4
    stream_k: bool = False
    in_flight: int = 0
    split: int = 1
    ahead: bool = False

    @classmethod
    def from_json(cls, choices: dict) -> "TileConfig":
        """The tiling of an entry of a table, with the names of `to_json` or of this class."""
        fields = {name: field for field, name in _JSON_NAMES.items()}
        return cls(**{fields.get(name, name): value for name, value in choices.items()})

    def to_json(self) -> dict:
        """The choices by the names that tables and results of benchmarks use."""
        choices = dataclasses.asdict(self)
        return {_JSON_NAMES.get(field, field): value for field, value in choices.items()}

    @property
    def warpgroups(self) -> int:
        """Number of consumer warpgroups."""
        return self.warpgroups_n * self.slices

    @property
    def products(self) -> int:
        """Number of products of 64 columns that a warpgroup computes of a stage."""
        return 2 * self.block_k // (TILE_COLUMNS * self.slices)

    def stage_bytes(self) -> int:
        """Bytes of shared memory of a stage: codes, scales and tokens."""
        tiles = self.warpgroups_n * self.block_k // TILE_COLUMNS
        return tiles * (TILE_ROWS * TILE_COLUMNS // 2 + 512) + self.tile_m * self.block_k * 2

    @property
    def receivers(self) -> int:
        """Number of CTAs of a cluster that add up a tile, each for the same number of tokens."""
        return math.gcd(self.split, self.tile_m // 8)

    def smem_bytes(self) -> int:
        """Bytes of shared memory of the operands, the sums of slices and CTAs, and the output."""
        sums = (self.slices - 1) * self.warpgroups_n * TILE_ROWS * self.tile_m * 4
        if self.split > 1:
            sums += (
                (self.split - 1) * self.warpgroups_n * TILE_ROWS * self.tile_m // self.receivers * 4
            )
        y = self.warpgroups_n * TILE_ROWS * self.tile_m * 2
        return self.stages * self.stage_bytes() + sums + y

    def registers(self) -> int:
        """Estimate of the registers of a consumer thread: accumulator, operands and the rest."""
        operands = self.in_flight + 1 + self.ahead if self.in_flight else self.products
        # Parts for the cluster take some, as ptxas was seen to need.
        kept = max(0, self.tile_m - 64) * 3 // 4 if self.split > 1 else 0
        return self.tile_m // 2 + 16 * operands + kept + 39 + self.slices

    def problem(self) -> str | None:
        """Why the kernel cannot be built like this, or None."""
        if self.tile_m % 8 or not 8 <= self.tile_m <= 256:
            return f"tile_m is {self.tile_m}, expected a multiple of 8 up to 256"
        if min(self.warpgroups_n, self.slices, self.stages, self.split) < 1:
            return f"warpgroups_n, slices, stages and split are at least 1, got {self}"
        if self.split > 1 and (self.stream_k or self.split > 8):
            return f"split is at most 8, and 1 with stream_k, got {self}"
        if self.block_k < 1 or self.block_k % (TILE_COLUMNS * self.slices):
            columns = TILE_COLUMNS * self.slices
            return f"block_k is {self.block_k}, expected a multiple of {columns}"
        if not 0 <= self.in_flight < self.products:
            return f"in_flight is {self.in_flight}, expected 0 to {self.products - 1}"
        if self.ahead and (self.products < 4 or self.in_flight < 1 or self.stages < 2):
            return f"ahead needs 2 stages of 4 products, of which not all are in flight, got {self}"
        if self.warpgroups > 7:
            return f"{self.warpgroups} consumer warpgroups, expected at most 7, with xa_partials 6"
        if self.smem_bytes() > SMEM_LIMIT:
            return f"{self} needs {self.smem_bytes()} bytes of shared memory, limit {SMEM_LIMIT}"
        return None


def helper_warpgroups(xa_partials: bool) -> int:
    """Number of warpgroups that are no consumers: the producer, and with partials the reducer."""
    return 2 if xa_partials else 1


def compute_registers(warpgroups: int, helpers: int = 1) -> int:
    """Number of registers of a consumer thread in a CTA that also has helper warpgroups."""
    left = _started_registers(warpgroups + helpers) - helpers * _HELPER_REGISTERS
    return min(232, left // warpgroups // 8 * 8)


def helper_registers(warpgroups: int, helpers: int = 1) -> int:
    """Number of registers that consumers leave to a thread of the other warpgroups, or its use."""
    left = _started_registers(warpgroups + helpers)
    left -= warpgroups * compute_registers(warpgroups, helpers)
    return min(_MOST_HELPER_REGISTERS, left // helpers // 8 * 8)


def supports_xa_partials(config: TileConfig) -> bool:
    """Whether a CTA can have the reducer warpgroup, which adds up partials of x A^T."""
    helpers = helper_warpgroups(True)
    if config.tile_m > _MOST_TOKENS_WITH_REDUCER or config.warpgroups + helpers > 8:
        return False
    return config.registers() <= compute_registers(config.warpgroups, helpers)


def _started_registers(warpgroups: int) -> int:
    """Number of registers with which the threads at one position of all warpgroups start.

    All threads start with the same multiple of 8. What that rounding leaves out is not available: a
    CTA that asks for it waits forever.
    """
    return _REGISTERS // warpgroups // 8 * 8 * warpgroups


def padded_rank(rank: int) -> int:
    """The number of columns of B that the kernel reads for an adapter of this rank."""
    return -(-rank // 64) * 64


@functools.cache
def choose(m: int, n: int, k: int, *, rank: int = 0, num_sms: int = NUM_SMS) -> TileConfig:
    """The tiling of a product [M, K] x [N, K]^T with an adapter.

    For a shape in a table it is the measured tiling of the next larger M of the table, or beyond
    the largest that of a large M; its tiles are as narrow as their number allows. Otherwise it is
    the best of `candidates` by `cost`.

    Args:
        m: number of tokens.
        n: number of outputs.
        k: number of inputs.
        rank: number of columns of the adapter's B, 0 without an adapter.
        num_sms: number of SMs of the device.

    Raises:
        ValueError: no tiling takes the adapter, see `fits_adapter`.
    """
    for entry in _tuned(num_sms):
        config = TileConfig.from_json(entry["config"])
        fits = (entry["n"], entry["k"]) == (n, k) and config.block_k >= rank
        if fits and (entry["m"] >= m or entry["m"] >= _LARGE):
            return _narrowed(config, m)
    found = list(candidates(m, n, k, rank=rank, num_sms=num_sms))
    if not found:
        raise ValueError(f"no tiling for M {m}, N {n}, K {k} takes an adapter of rank {rank}")
    return min(found, key=lambda config: cost(config, m, n, k, num_sms))


@functools.cache
def fits_adapter(m: int, n: int, k: int, *, rank: int, num_sms: int = NUM_SMS) -> bool:
    """Whether any tiling of the product has a stage that holds x A^T of an adapter of this rank."""
    found = candidates(m, n, k, rank=rank, num_sms=num_sms)
    return next(found, None) is not None


def _narrowed(config: TileConfig, m: int) -> TileConfig:
    """The tiling with the same number of tiles for M tokens, and as few tokens in them as possible.

    As many CTAs as before add up a split tile: in a cluster its receivers, and with stream-K each
    CTA a part that divides the tile, so that such tiles are multiples of a quarter of the measured
    one.
    """
    needed = -(-m // -(-m // config.tile_m))
    step = max(8, config.tile_m // 32 * 8) if config.stream_k else 8
    for tile_m in range(-(-needed // step) * step, config.tile_m, step):
        narrow = dataclasses.replace(config, tile_m=tile_m)
        if narrow.problem() is None and narrow.receivers >= config.receivers:
            return narrow
    return config


def verified(device: str, jax_version: str) -> bool:
    """Whether a table was tuned, and its results verified, with this device, jax and kernel.

    `also_verified` of a table lists devices on which the same kernel has passed its self-test.
    """
    return any(
        device in (table["device"], *table.get("also_verified", ()))
        and (table["jax"], table.get("kernel")) == (jax_version, kernel_digest())
        for table in _tables().values()
    )


@functools.cache
def kernel_digest() -> str:
    """The first 16 digits of the SHA-256 of the kernel's sources."""
    folder = pathlib.Path(__file__).parent
    sources = [folder / "layout.py", *sorted((folder / "sm90").glob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


@functools.cache
def _tuned(num_sms: int) -> list[dict]:
    """The measured entries {m, n, k, config} for Hopper GPUs of this size, sorted by m."""
    entries = [
        entry
        for table in _tables().values()
        if table["multiprocessors"] == num_sms
        for entry in table["entries"]
    ]
    return sorted(entries, key=lambda entry: entry["m"])


@functools.cache
def _tables() -> dict[str, dict]:
    """The tuned tables by file name: device, number of SMs, jax, kernel digest and entries."""
    return {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(TUNED.glob("*.json"))
    }


def candidates(
    m: int, n: int, k: int, *, rank: int = 0, num_sms: int = NUM_SMS
) -> Iterator[TileConfig]:
    """The tilings that fit into shared memory and, by estimate, into registers."""
    row_tiles, steps = -(-n // TILE_ROWS), -(-k // TILE_COLUMNS)
    for tile_m in _token_tiles(m):
        m_tiles = -(-m // tile_m)
        few = m <= MAX_ROWS_OF_PARTIALS and tile_m <= _MOST_TOKENS_WITH_REDUCER
        helpers = helper_warpgroups(rank > 0 and few)
        for warpgroups in range(1, 7):
            for slices in (s for s in (1, 2, 4) if warpgroups % s == 0):
                warpgroups_n = warpgroups // slices
                if warpgroups_n > row_tiles:
                    continue
                tiles = m_tiles * -(-row_tiles // warpgroups_n)
                cuts = [(False, 1)]
                if tiles % num_sms and m <= 512:
                    cuts += [
                        (True, 1),
                        *((False, split) for split in _splits(tiles, num_sms)),
                    ]
                for block_k in (128, 256, 512, 1024):
                    if block_k % (128 * slices) or block_k < rank or block_k > 128 * steps:
                        continue
                    products = 2 * block_k // (TILE_COLUMNS * slices)
                    for in_flight, ahead in _DEPTHS.get(products, ((0, False),)):
                        for stream_k, split in cuts:
                            # With clusters and the longest stages the producer would spill.
                            if split * block_k > TILE_COLUMNS * steps or (
                                split > 1 and block_k > 512
                            ):
                                continue
                            base = TileConfig(
                                tile_m=tile_m,
                                warpgroups_n=warpgroups_n,
                                slices=slices,
                                block_k=block_k,
                                stages=1,
                                stream_k=stream_k,
                                in_flight=in_flight,
                                split=split,
                                ahead=ahead,
                            )
                            deepest = dataclasses.replace(base, stages=_stages(base))
                            if (
                                deepest.stages >= 2
                                and deepest.problem() is None
                                and deepest.registers() <= compute_registers(warpgroups, helpers)
                            ):
                                yield deepest


def _splits(tiles: int, num_sms: int) -> list[int]:
    """Numbers of CTAs of a cluster that leave few SMs idle.

    How many clusters run at a time is known for the large devices only.
    """
    if num_sms < NUM_SMS:
        return []
    found = []
    for split in range(2, 9):
        clusters = clusters_of(tiles, split, num_sms)
        if clusters and clusters * split >= 0.6 * num_sms:
            longest = -(-tiles // clusters) / split  # in tiles
            if longest < -(-tiles // num_sms):
                found.append(split)
    return found


def clusters_of(tiles: int, split: int, num_sms: int) -> int:
    """The number of clusters of `split` CTAs for the tiles of a product; 0 if they would not help.

    All clusters run at a time: a pair of SMs can be a cluster of two, a larger cluster lies within
    a group of 16 or 18 SMs. A cluster splits one tile at most.
    """
    if split == 1:
        return 0
    if split == 2 or num_sms < 16:
        at_a_time = num_sms // split
    else:
        at_a_time = _CLUSTERS[split] if num_sms >= NUM_SMS else 0
    clusters = min(tiles, at_a_time)
    return clusters if clusters and -(-tiles // clusters) % split == 1 else 0


def _token_tiles(m: int) -> list[int]:
    """Values of tile_m that make few tiles, hardly larger than needed."""
    whole = -(-m // 8) * 8
    if m <= 64:
        return [whole]
    tiles = {-(-whole // parts // 8) * 8 for parts in range(-(-whole // 256), 5)}
    return sorted(tile for tile in tiles if 48 <= tile <= 256) if m <= 512 else [128, 192, 256]


def _stages(config: TileConfig) -> int:
    """The number of stages that fit, at most 8."""
    fixed = dataclasses.replace(config, stages=0).smem_bytes()
    return min(8, (SMEM_LIMIT - fixed) // (config.smem_bytes() - fixed))


def cost(config: TileConfig, m: int, n: int, k: int, num_sms: int) -> float:
    """A model of the clock cycles on an H200, to rank tilings: it is 6 % off in the mean.

    The largest of the times that a CTA issues, multiplies, receives and waits, and of the memory
    traffic of all CTAs, plus start, end and the sums across CTAs. Its numbers are fitted to 295
    measured tilings of the products of a 7B model.
    """
    m_tiles, row_tiles = -(-m // config.tile_m), -(-n // TILE_ROWS)
    n_tiles, steps = -(-row_tiles // config.warpgroups_n), -(-k // config.block_k)
    tiles = m_tiles * n_tiles
    blocks = min(tiles * (steps if config.stream_k else config.split), num_sms)
    rounds = -(-tiles // blocks)
    split = tiles % blocks if config.stream_k else 0
    longest = rounds * steps
    if clusters := clusters_of(tiles, config.split, num_sms):
        longest = -(-tiles // clusters) * steps / config.split
    if split:
        longest = tiles // blocks * steps + -(-split * steps // blocks)
    per_warpgroup = config.block_k / (TILE_COLUMNS * config.slices)  # tiles [64, 128] of a stage
    narrow = max(config.tile_m, 16)
    issue = config.warpgroups * ((260 + 2.5 * narrow) * per_warpgroup + 53)
    multiply = config.warpgroups * 4.2 * narrow * per_warpgroup
    receive = (config.warpgroups_n * 36 + 2 * config.tile_m) * config.block_k / 27
    wait = (260 + 2.3 * narrow) * per_warpgroup + 340
    traffic = 0.5625 * n * k * (m_tiles if m > 4096 else 1) + 2 * m * (n + k)
    memory = traffic / (11.7 * num_sms)
    end = (3.5 + 8 * (config.slices - 1)) * config.tile_m * rounds
    sums = 0.0
    if split:
        # Every CTA writes its parts of tiles, and reads as many parts of others.
        partial = (1 + split / blocks) * config.tile_m * config.warpgroups_n * TILE_ROWS
        sums = 2500 + 2 * partial / 11.7
    elif config.split > 1:
        sums = 1000 + 2 * config.tile_m * config.warpgroups_n * TILE_ROWS / 11.7
    return max(longest * max(issue, multiply, receive, wait), memory) + 3300 + end + sums
