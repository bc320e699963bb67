"""The grouped FP4 product of a decode step: each tile of eight rows by the weight of its expert.

    hidden[R, F] = silu(x W_gate^T) * (x W_up^T) * w      `gated_matmul`
    y[R, N] = x W^T                                       `matmul`
    rows[R, N] = hidden W_down^T                          `mlp`, both in one kernel, with adapters

Products may have biases, and SwiGLU a limit, see `experts.activated`.

A CTA multiplies the rows of an expert by some of its outputs. It is made of the parts of
`fp4_matmul.mma`: it reads the table for the expert and for the rows of x, which cp.async takes from
wherever they are. Its rows are a unit: a tile, or some tiles of an expert. CTAs of units that the
routes do not use end at once. Gate and up of the same outputs are in one CTA, and no sum leaves its
CTA.

Where tiles are few, so are CTAs of 64 outputs: there a CTA has 16, and its four warps divide the
columns. Where a unit has several tiles, a Hopper GPU multiplies by wgmma, which has twice the speed
of mma.sync and the same sums, bit for bit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import device, warp_mma, warpgroup
from pallas_kernels.experts import adapter
from pallas_kernels.experts.table import Table, tiles_at_a_time, unit_bound, with_units
from pallas_kernels.fp4_matmul import layout
from pallas_kernels.fp4_matmul.layout import Fp4Tiles
from pallas_kernels.fp4_matmul.mma import copies
from pallas_kernels.fp4_matmul.mma.epilogue import ACC
from pallas_kernels.fp4_matmul.mma.kernel import multiply_stage
from pallas_kernels.fp4_matmul.mma_schedule import SHARED_MEMORY, MmaConfig
from pallas_kernels.fp4_matmul.sm90 import synchronize
from pallas_kernels.fp4_matmul.sm90.synchronize import opaque
from pallas_kernels.fp4_matmul.tiling import TILE_COLUMNS, TILE_ROWS
from pallas_kernels.warpgroup import WARPS, Warpgroup

TILE = 8  # rows of a tile of the table
STRIP = TILE_ROWS // WARPS  # outputs of a warp
_FEW_TILES = 16  # of the table, with which few CTAs have 64 outputs
_WHOLE_TILES = 3  # tiles of an expert up to which a CTA dequantizes whole tiles of the weight
_SHORT = 2048  # columns of weights with which the other schedules were measured
_LOG2_E = 1.4426950408889634
_SWIGLU_ALPHA = 1.702  # as in `experts.activated`


@dataclasses.dataclass(frozen=True)
class GroupedConfig:
    """A schedule."""

    rows: int = 64  # outputs of a CTA, of gate and of up each: 64 or a multiple, or 16
    columns: int = 256  # columns of a step: 128, 256 or 512, the last one with 16 outputs
    stages: int = 3  # number of steps that shared memory holds
    tiles: int = 1  # tiles of an expert that a CTA multiplies
    wgmma: bool = False  # whether a warpgroup multiplies at once, on a Hopper GPU

    @property
    def apart(self) -> bool:
        """Whether the warps of a CTA divide the columns instead of the outputs."""
        return self.rows == STRIP

    @property
    def tokens(self) -> int:
        """Rows of x of a CTA."""
        return TILE * self.tiles

    def row_tiles(self, parts: int) -> int:
        """Rows of tiles of the weight that a CTA reads, with gate and up as two parts."""
        return parts * max(1, self.rows // TILE_ROWS)

    def shared(
        self, parts: int, *, factors: bool = False, words: int = layout.SCALE_WORDS["nvfp4"]
    ) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of what is in shared memory, with factors of tokens or without.

        `words` are those of the scales of a tile.
        """
        tiles = self.columns // TILE_COLUMNS // (WARPS if self.apart else 1)
        weight = self.stages, self.row_tiles(parts), tiles
        pitch = self.columns if self.wgmma else MmaConfig(columns=self.columns).pitch()
        types: dict[str, tuple[tuple[int, ...], Any]] = {
            "x": ((self.stages, self.tokens, pitch), jnp.bfloat16),
            "codes": ((*weight, WARPS, layout.CODE_WORDS // WARPS), jnp.uint32),
            "scales": ((*weight, words), jnp.uint32),
            "chosen": ((self.tokens,), jnp.int32),
        }
        if parts == 2 or factors:
            types["factors"] = (self.tokens,), jnp.float32
        if self.apart:
            types["sums"] = (self.row_tiles(parts), TILE_ROWS, self.tokens), jnp.float32
        return types

    def problem(self, outputs: int, parts: int) -> str | None:
        """Why experts with this number of outputs, gate and up together, cannot have it."""
        if self.rows % TILE_ROWS and not self.apart:
            return f"rows is {self.rows}, expected 16 or a multiple of 64"
        if outputs % (TILE_ROWS * parts):
            return f"{outputs} outputs, expected a multiple of {TILE_ROWS * parts}"
        if self.columns not in ((512,) if self.apart else (128, 256, 512)):
            return f"columns is {self.columns}, expected 128, 256 or 512, with 16 rows 512"
        if self.wgmma and self.columns != TILE_COLUMNS:
            return f"columns is {self.columns}, expected {TILE_COLUMNS} with wgmma"
        if self.stages < 2 or self.tiles < 1:
            return f"{self.stages} stages and {self.tiles} tiles, expected at least 2 and 1"
        types = self.shared(parts).values()
        size = sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in types)
        if size > SHARED_MEMORY:
            return f"{size} bytes of shared memory, limit {SHARED_MEMORY}"
        return None


def choose(table: Table, outputs: int, weight: Fp4Tiles, *, parts: int) -> GroupedConfig:
    """The schedule for experts with this number of outputs, gate and up together.

    It is made from times of Qwen3-30B-A3B, Qwen3.6-35B-A3B and gpt-oss-20b on an H200.
    """
    pairs, experts = len(table.place), weight.shape[0] // outputs
    if (tiles := tiles_at_a_time(len(table.place), experts)) > 1:
        wide = parts == 1 and outputs % (2 * TILE_ROWS) == 0
        return GroupedConfig(2 * TILE_ROWS if wide else TILE_ROWS, TILE_COLUMNS, 3, tiles)
    if parts == 2 and len(table.owner) <= _FEW_TILES:
        return GroupedConfig(STRIP, 512, 2)
    if parts == 1 and len(table.owner) <= _FEW_TILES // 2 and weight.shape[1] > _SHORT:
        return GroupedConfig(STRIP, 512, 2)
    touched = experts * (1 - (1 - 1 / experts) ** pairs)
    ctas = touched * outputs // parts // TILE_ROWS
    if parts == 2:  # An SM has five CTAs at a time, or with four stages four.
        return GroupedConfig(TILE_ROWS, TILE_COLUMNS, 3 if ctas <= 5 * device.num_sms() else 4)
    if ctas <= 16 * device.num_sms():
        return GroupedConfig(TILE_ROWS, 2 * TILE_COLUMNS, 3)
    return GroupedConfig(TILE_ROWS, TILE_COLUMNS, 4)


def mlp_is_faster(table: Table, ranks: Sequence[int]) -> bool:
    """Whether `mlp` takes less time than its products do; `ranks` are those of adapters."""
    return bool(ranks) or len(table.owner) > _FEW_TILES


def choose_mlp(table: Table, experts: int, inputs: int) -> GroupedConfig:
    """The schedule of `mlp`, from times of the same models."""
    if (tiles := tiles_at_a_time(len(table.place), experts)) > 1:
        hopper = device.cuda_capability() == 9.0
        stages = 3 if hopper and tiles == 2 else 2
        return GroupedConfig(TILE_ROWS, TILE_COLUMNS, stages, tiles, wgmma=hopper)
    return GroupedConfig(TILE_ROWS, TILE_COLUMNS, 3 if inputs <= _SHORT else 4)


def gated_matmul(
    x: jax.Array,
    weight: Fp4Tiles,
    table: Table,
    row_weights: jax.Array,
    *,
    width: int,
    config: GroupedConfig,
    bias: jax.Array | None = None,
    limit: float = 0.0,
    interpret: bool = False,
) -> jax.Array:
    """As `experts.gated_matmul`, for bfloat16 x and tiles of eight rows."""
    top_k = len(row_weights) // len(x)
    kernel = _Kernel(config, 2 * width, 2, len(row_weights), top_k, limit)
    return _run(kernel, x, (weight, bias), table, {"row_weights": row_weights}, interpret)


def matmul(
    x: jax.Array,
    weight: Fp4Tiles,
    table: Table,
    *,
    outputs: int,
    config: GroupedConfig,
    bias: tuple[jax.Array, jax.Array] | None = None,
    interpret: bool = False,
) -> jax.Array:
    """As `experts.grouped_matmul`, for bfloat16 x and tiles of eight rows.

    A bias has E N numbers, and float32 [P], the factor of the bias in the rows of each pair.
    """
    kernel = _Kernel(config, outputs, 1, len(table.place), None)
    if bias is None:
        return _run(kernel, x, (weight, None), table, {}, interpret)
    added, factors = bias
    return _run(kernel, x, (weight, added), table, {"row_weights": factors}, interpret)


Adapter = tuple[jax.Array, jax.Array]


class Mixture(NamedTuple):
    """Experts, and the tokens that they have."""

    gate_up: Fp4Tiles  # [E 2F, D]
    down: Fp4Tiles  # [E N, F]
    table: Table
    row_weights: jax.Array  # float32 [P]
    # Of gate and up, and of down: A [E, r, K] and B [E, N, r''], of a multiple of eight ranks.
    adapters: tuple[Adapter | None, Adapter | None] = (None, None)
    biases: tuple[jax.Array | None, jax.Array | None] = None, None  # [E, 2, F] and [E, N]


def mlp(
    x: jax.Array,
    mixtures: Sequence[Mixture],
    *,
    width: int,
    config: GroupedConfig,
    limit: float = 0.0,
    interpret: bool = False,
) -> list[jax.Array]:
    """As `experts.mlp`, for bfloat16 x and tiles of eight rows, by one kernel.

    The CTAs of down come after those of gate and up, request their weights, and wait for the rows
    of their unit. CTAs begin in their order, and none waits for a later one. A CTA of down has
    twice the outputs of one of gate.

    The first CTAs of all multiply x by A of gate and up, if these have an adapter; a CTA of gate
    and up also multiplies its outputs by A of down. Returns the rows of each mixture.
    """
    assert config.rows == TILE_ROWS
    plans, operands, results = [], [], []
    for mixture in mixtures:
        plan, given, made = _planned(x, mixture, width, config, limit)
        plans.append(plan)
        operands.append(given)
        results.append(made)
    scratch = config.shared(2, words=mixtures[0].gate_up.scales.shape[-1])
    if any(own is not None for mixture in mixtures for own in mixture.adapters):
        scratch["xa"] = (TILE_ROWS, config.tokens), jnp.float32
    made = warpgroup.run(
        functools.partial(_mlp_body, plans),
        "experts_mlp",
        (sum(plan.units * sum(plan.blocks) for plan in plans),),
        {"x": x, "mixtures": operands},
        results,
        scratch=scratch,
        interpret=interpret,
    )
    return [own["rows"] for own in made]


class _Plan(NamedTuple):
    """What is known of a mixture when a kernel is compiled."""

    kernels: tuple["_Kernel", "_Kernel"]  # of gate and up, and of down
    units: int
    blocks: tuple[int, int, int]  # of a unit: CTAs of x A^T, of gate and up, and of down


def _planned(x, mixture: Mixture, width: int, config: GroupedConfig, limit: float):
    """The plan of a mixture, its operands, and what the kernel makes."""
    gate_up, down, table, row_weights, adapters, (bias, added) = mixture
    outputs = down.shape[0] * 2 * width // gate_up.shape[0]
    pairs, top_k, size = len(row_weights), len(row_weights) // len(x), len(table.source)
    wide = dataclasses.replace(config, rows=2 * config.rows)
    gated = _Kernel(config, 2 * width, 2, pairs, top_k, limit)
    kernels = gated, _Kernel(wide, outputs, 1, pairs, None)
    for kernel in kernels:
        assert not (problem := kernel.problem()), problem
    parts = -(-x.shape[1] // adapter.COLUMNS), kernels[0].blocks  # of sums of x A^T
    blocks = 0 if adapters[0] is None else parts[0], kernels[0].blocks, kernels[1].blocks
    experts = gate_up.shape[0] // (2 * width)
    plan = _Plan(kernels, _units(kernels[0], table, experts), blocks)
    operands = {
        "table": _operands(table, config, experts),
        "weights": (_weight(gate_up, bias), _weight(down, added)),
        "row_weights": row_weights,
        # Zero before and after every call: all calls of a program use the same array.
        "locks": jnp.zeros((2, plan.units), jnp.int32),
        "a": [None if own is None else own[0] for own in adapters],
        "b": [None if own is None else own[1].reshape(-1, own[1].shape[2]) for own in adapters],
    }
    results = {
        "hidden": jax.ShapeDtypeStruct((size, width), x.dtype),
        "rows": jax.ShapeDtypeStruct((size, outputs), x.dtype),
        "xa": [
            None if own is None else jax.ShapeDtypeStruct((n, size, own[0].shape[1]), jnp.float32)
            for n, own in zip(parts, adapters, strict=True)
        ],
    }
    return plan, operands, results


def _mlp_body(plans, threads: Warpgroup, operands, _, results, **shared) -> None:
    """What a CTA does: it is one of x A^T, after these of gate and up, and after these of down."""
    (index,), first = threads.cta, 0
    for phase, compute in enumerate((_compute_xa, _compute_hidden, _compute_rows)):
        for plan, given, made in zip(plans, operands["mixtures"], results, strict=True):
            count = plan.units * plan.blocks[phase]
            if count == 0:
                continue
            place = _Place(threads, first, plan.blocks[phase])
            part = dataclasses.replace(threads, cta=place)
            own = functools.partial(compute, plan, part, operands["x"], given, made, shared)
            pl.when(jnp.logical_and(index >= first, index < first + count))(own)
            first += count


def _lock(plan: _Plan, threads: Warpgroup, given, number: int) -> "_Lock":
    """Where the CTAs of a phase wait for those of the phase before, which has a number."""
    own = given["locks"].at[number, pl.ds(threads.cta[1], 1)]
    return _Lock(threads, own, *plan.blocks[number : number + 2])


def _compute_xa(plan: _Plan, threads: Warpgroup, x, given, made, shared) -> None:
    operands = given["table"] | {"x": x, "a": given["a"][0]}
    links = _Links(done=_lock(plan, threads, given, 0).arrive)
    kernel, partials = plan.kernels[0], made["xa"][0]
    _body(kernel, threads, operands, None, partials, links=links, multiply=_shrink, **shared)


def _compute_hidden(plan: _Plan, threads: Warpgroup, x, given, made, shared) -> None:
    operands = given["table"] | given["weights"][0]
    operands |= {"x": x, "row_weights": given["row_weights"]}
    (b, _), (xa, xa_down), (_, a_down) = given["b"], made["xa"], given["a"]
    links = _Links(
        done=_lock(plan, threads, given, 1).arrive,
        expand=None if b is None else (_lock(plan, threads, given, 0).wait, xa, b),
        shrink=None if a_down is None else (a_down, xa_down),
    )
    _body(plan.kernels[0], threads, operands, None, made["hidden"], links=links, **shared)


def _compute_rows(plan: _Plan, threads: Warpgroup, _, given, made, shared) -> None:
    operands = given["table"] | given["weights"][1] | {"x": made["hidden"]}
    operands |= {"row_weights": given["row_weights"]}
    (_, b), (_, xa) = given["b"], made["xa"]
    links = _Links(
        ready=_lock(plan, threads, given, 1).wait, expand=None if b is None else (None, xa, b)
    )
    _body(plan.kernels[1], threads, operands, None, made["rows"], links=links, **shared)


@dataclasses.dataclass(frozen=True)
class _Place(Sequence):
    """The block and the unit of a CTA among those of some blocks.

    They are computed from its index again wherever they are used, so that they hold no registers:
    an SM has four CTAs with three tiles at a time instead of three.
    """

    threads: Warpgroup
    first: int  # index of the first of these CTAs
    blocks: int

    def __len__(self) -> int:
        return 2

    def __getitem__(self, axis: Any) -> Any:
        (index,) = self.threads.cta
        compute = lax.div if axis else lax.rem
        return compute(_opaque(self.threads, index) - self.first, self.blocks)


class _Links(NamedTuple):
    """What CTAs have to do with others of the same kernel."""

    ready: Callable[[], None] | None = None  # called before x is read
    done: Callable[[], None] | None = None  # called after the results are stored
    # Partial sums of x A^T, B, and what is called before the former are read.
    expand: tuple[Callable[[], None] | None, Any, Any] | None = None
    shrink: tuple[Any, Any] | None = None  # A of what reads the results, and its partial sums


@dataclasses.dataclass(frozen=True)
class _Lock:
    """Where CTAs wait for those of the same unit that arrive."""

    threads: Warpgroup
    lock: Any  # int32 [1]
    arrivals: int  # CTAs
    waiters: int

    def arrive(self) -> None:
        """Says that this CTA has stored its part."""
        if not self.threads.simulated:
            synchronize.arrive([self.lock], [jnp.int32(self.arrivals)])

    def wait(self) -> None:
        """Waits until all parts are there."""
        if not self.threads.simulated:
            counts = [jnp.int32(self.arrivals)], [jnp.int32(self.waiters)]
            synchronize.wait([self.lock], *counts)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What is known when a kernel is compiled."""

    config: GroupedConfig
    outputs: int  # of an expert, those of gate and up together
    parts: int  # 2 for gate and up, or 1
    pairs: int
    top_k: int | None  # pairs of a row of x, in their order; None if x has the rows of the table
    limit: float = 0.0  # of gate and up, see `experts.activated`; 0 for none

    @property
    def blocks(self) -> int:
        """CTAs of a unit."""
        return -(-self.outputs // self.parts // self.config.rows)

    def tile(self, block: Any, i: int) -> Any:
        """The tile, of those of a part, that is tile i of a block.

        The last block repeats the last tile instead of those that do not exist.
        """
        count, tiles = self.config.row_tiles(1), self.outputs // self.parts // TILE_ROWS
        if count == 1:
            return block
        tile = block * count + i
        return jnp.minimum(tile, tiles - 1) if tiles % count else tile

    def problem(self) -> str | None:
        """As `GroupedConfig.problem`."""
        return self.config.problem(self.outputs, self.parts)


def _operands(table: Table, config: GroupedConfig, experts: int) -> dict[str, jax.Array]:
    assert len(table.source) == TILE * len(table.owner)
    arrays = {"source": table.source, "owner": table.owner, "used": table.used.reshape(1)}
    if config.tiles > 1:
        units, size = table.units, unit_bound(len(table.place), experts, config.tiles)
        if units is None or len(units) != size:
            units = with_units(table, config.tiles, experts=experts).units
        assert units is not None
        arrays["units"] = units
    return arrays


def _weight(weight: Fp4Tiles, bias: jax.Array | None = None) -> dict[str, jax.Array]:
    row_tiles, column_tiles, _ = weight.codes.shape
    assert weight.shape[1] % layout.BLOCK == 0
    codes = weight.codes.reshape(row_tiles, column_tiles, 4, 256)
    added = {} if bias is None else {"bias": bias.reshape(-1)}
    return {"codes": codes, "scales": weight.scales, "divisor": weight.divisor} | added


def _units(kernel: _Kernel, table: Table, experts: int) -> int:
    """The most units that any routes have, each one a tile or some tiles of an expert."""
    if kernel.config.tiles == 1:
        return len(table.owner)
    return unit_bound(len(table.place), experts, kernel.config.tiles)


def _run(kernel, x, weight, table, extra, interpret):
    assert not (problem := kernel.problem()), problem
    experts = weight[0].shape[0] // kernel.outputs
    own = _operands(table, kernel.config, experts)
    return warpgroup.run(
        functools.partial(_body, kernel),
        "experts_gated_matmul" if kernel.parts == 2 else "experts_matmul",
        (kernel.blocks, _units(kernel, table, experts)),
        extra | own | _weight(*weight) | {"x": x},
        jax.ShapeDtypeStruct((len(table.source), kernel.outputs // kernel.parts), x.dtype),
        scratch=kernel.config.shared(
            kernel.parts, factors="row_weights" in extra, words=weight[0].scales.shape[-1]
        ),
        interpret=interpret,
    )


def _body(
    kernel: _Kernel, threads: Warpgroup, operands, _, y, *, links=None, multiply=None, **shared
) -> None:
    """What a CTA does: it multiplies the tiles of its unit."""
    links, multiply, chosen = links or _Links(), multiply or _multiply, shared["chosen"]

    def multiply_unit(place):
        multiply(kernel, threads, operands, place, y, shared, links)
        if links.done is not None:
            links.done()

    unit = threads.cta[1]
    if kernel.config.tiles == 1:
        used, owner = _choose_rows(kernel, threads, operands, unit, chosen)
        pl.when(unit < used)(lambda: multiply_unit((unit, owner)))
        return
    tile = _first_tile(threads, operands["units"], unit)

    @pl.when(tile >= 0)
    def multiply_tiles():
        _, owner = _choose_rows(kernel, threads, operands, tile, chosen)
        multiply_unit((tile, owner))


def _shrink(kernel: _Kernel, threads: Warpgroup, operands, place, partials, shared, links) -> None:
    """Multiplies the chosen rows of x by A of their expert."""
    chosen, (tile, owner), part = shared["chosen"], place, threads.cta[0]
    threads.meet()  # All threads see which rows are chosen.
    numbers = chosen, kernel.top_k or 1

    def rows(first):
        x, a = operands["x"], operands["a"]
        return adapter.shrink(threads, x, a, numbers, first, (owner, part))

    adapter.store_partial(threads, partials, rows, shared["xa"], (part, tile * TILE, chosen))


def _multiply(kernel: _Kernel, threads: Warpgroup, operands, place, y, shared, links) -> None:
    """Multiplies the chosen rows, those of a tile and after it, and stores the results.

    `place` are the tile and its owner. The first weights are requested before x is ready.
    """
    config, chosen, (tile, owner) = kernel.config, shared["chosen"], place
    stages = copies.Stages(**{name: shared[name] for name in copies.Stages._fields})
    column_tiles, per_step = operands["codes"].shape[1], config.columns // TILE_COLUMNS
    steps = -(-column_tiles // per_step)
    block, x, parts = threads.cta[0], operands["x"], kernel.parts
    rows = _row_tiles(kernel, owner, block)

    def start(step):
        return _opaque(threads, step) if config.tiles > 1 else step

    def start_x(step):
        start, end = step * per_step * TILE_COLUMNS, column_tiles * TILE_COLUMNS
        stage = stages.at(step).x
        copies.start_x(threads, x, stage, start, end, found, swizzled=config.wgmma)

    def start_weights(step):
        column, stage = step * per_step, stages.at(step)
        for i, row in enumerate(rows):
            source = operands["codes"].at[row], operands["scales"].at[row]
            target = stage.codes.at[i], stage.scales.at[i]
            if config.apart:
                strip = lax.rem(block, WARPS)
                copies.start_strips(threads, source, target, strip, column, column_tiles)
            else:
                copies.start_tiles(threads, source, target, column, column_tiles)

    threads.meet()  # All threads see which rows are chosen.
    found = copies.chosen_rows(threads, chosen, kernel.top_k or 1, config.columns)
    ahead = min(steps, config.stages - (steps > config.stages))
    if links.ready is not None:
        for step in range(ahead):
            start_weights(start(jnp.int32(step)))
        links.ready()
    for step in range(ahead):
        step = start(jnp.int32(step))
        start_x(step)
        if links.ready is None:
            start_weights(step)
        copies.close_group(threads)
    if parts == 2 or "bias" in operands:
        source = operands["source"] if parts == 1 else None
        _load_factors(threads, operands["row_weights"], chosen, shared["factors"], source)

    def multiply_step(step, sums):
        copies.wait(threads, ahead - 1)
        if config.wgmma:
            copies.show_to_wgmma(threads)
        threads.meet()  # All copies are there, and the stage of the step before is free.

        @pl.when(step + ahead < steps)
        def start_next():
            later = start(step + ahead)
            start_x(later)
            start_weights(later)

        copies.close_group(threads)
        how = {"apart": config.apart, "halves": config.tiles > _WHOLE_TILES, "wgmma": config.wgmma}
        return multiply_stage(threads, stages.at(step), sums, **how)

    zeros = threads.cast(jnp.zeros((TILE_ROWS, config.tokens), jnp.float32), ACC)
    sums = lax.fori_loop(0, steps, multiply_step, [zeros] * len(rows))
    sums = _whole_sums(kernel, threads, sums, shared)
    inside = lax.rem(block, WARPS) * STRIP if config.apart else 0
    height, count = STRIP if config.apart else TILE_ROWS, config.row_tiles(1)
    results = [
        _divided(threads, operands["divisor"], total, row * TILE_ROWS + inside)
        for row, total in zip(rows, sums, strict=True)
    ]
    if "bias" in operands:
        factors = shared["factors"] if parts == 1 else None
        results = [
            _with_bias(threads, operands["bias"], result, row * TILE_ROWS + inside, factors)
            for row, result in zip(rows, results, strict=True)
        ]
    if links.expand is not None:
        wait, partials, b = links.expand
        if wait is not None:
            wait()
        results = adapter.expand(threads, partials, b, tile * TILE, results, rows)
    if parts == 2:
        gated = zip(results[:count], results[count:], strict=True)
        results = [_gated(threads, kernel, *both, shared["factors"]) for both in gated]
    for i, result in enumerate(results):
        value, column = result.astype(y.dtype), kernel.tile(threads.cta[0], i) * height
        _store(threads, y, value, chosen, tile * TILE, column)
        if links.shrink is not None:
            a, partials = links.shrink
            place = block, tile * TILE, chosen
            shrink = functools.partial(adapter.shrink_outputs, threads, value, a)
            ranks = functools.partial(shrink, place=(owner, column))
            adapter.store_partial(threads, partials, ranks, shared["xa"], place)


def _opaque(threads: Warpgroup, number):
    return number if threads.simulated else opaque(number)


def _row_tiles(kernel: _Kernel, owner, block) -> list:
    """Row tiles of the weight of a block, those of gate before those of up."""
    first = owner * (kernel.outputs // TILE_ROWS)
    per_part, count = kernel.outputs // kernel.parts // TILE_ROWS, kernel.config.row_tiles(1)
    if kernel.config.apart:
        own = [first + block // WARPS]
    elif per_part % count:
        own = [first + kernel.tile(block, i) for i in range(count)]
    else:
        own = [first + block * count + i for i in range(count)]
    return [row + part * per_part for part in range(kernel.parts) for row in own]


def _whole_sums(kernel: _Kernel, threads: Warpgroup, sums, shared):
    """The sums over all columns: where the warps divide them, of 16 outputs, in all warps."""
    if not kernel.config.apart:
        return sums
    for target, value in zip(range(len(sums)), sums, strict=True):
        threads.store(shared["sums"].at[target], value)
    threads.meet()

    def whole(i):
        parts = (shared["sums"].at[i, pl.ds(STRIP * warp, STRIP)] for warp in range(WARPS))
        first, *others = (threads.load(part, adapter.STRIP_SUMS) for part in parts)
        return functools.reduce(jnp.add, others, first)

    return [whole(i) for i in range(len(sums))]


def _layout_of(sums):
    return ACC if len(sums) == TILE_ROWS else adapter.STRIP_SUMS


def _divided(threads: Warpgroup, divisor: Any, sums: jax.Array, row: Any) -> jax.Array:
    """The product [outputs, tokens] of the sums of some rows of the weight."""
    rows = divisor.at[pl.ds(row, len(sums))]
    factor = layout.UNIT / threads.load(rows, _layout_of(sums).reduce(1))
    return sums * lax.broadcast_in_dim(factor, sums.shape, (0,))


def _with_bias(
    threads: Warpgroup, bias: Any, product: jax.Array, row: Any, factors: Any | None
) -> jax.Array:
    """A product [outputs, tokens] of some rows of the weight with their bias, times factors."""
    own = threads.load(bias.at[pl.ds(row, len(product))], _layout_of(product).reduce(1))
    added = lax.broadcast_in_dim(own.astype(jnp.float32), product.shape, (0,))
    if factors is not None:
        factor = threads.load(factors, _layout_of(product).reduce(0))
        added *= lax.broadcast_in_dim(factor, product.shape, (1,))
    return product + added


def _gated(
    threads: Warpgroup, kernel: _Kernel, gate: jax.Array, up: jax.Array, factors: Any
) -> jax.Array:
    """SwiGLU, times the factor of each token. Gate and up are rounded as products are."""
    gate, up = (half.astype(jnp.bfloat16).astype(jnp.float32) for half in (gate, up))
    factor, slope = threads.load(factors, _layout_of(gate).reduce(0)), _LOG2_E
    if limit := kernel.limit:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit) + 1.0
        slope *= _SWIGLU_ALPHA
    active = gate / (1.0 + jnp.exp2(-slope * gate))
    return active * up * lax.broadcast_in_dim(factor, gate.shape, (1,))


def _first_tile(threads: Warpgroup, units: Any, unit) -> Any:
    """The first tile of a unit, or -1 where there are fewer units."""
    if threads.simulated:
        return units[unit]
    splat = plgpu.Layout.WG_SPLAT
    number = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=splat)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat), return_type=number)
    def load(_, units, unit):
        i32 = ir.IntegerType.get_signless(32)
        offset = arith.muli(unit.registers.item(), mgpu.utils.c(4, i32))
        start = copies.advanced(copies.pointer(units), offset)
        found = mgpu.utils.inline_ptx(
            "ld.global.u32 $0, [$1];", start, result_types=i32, has_side_effects=True
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return load(units, unit)


def _choose_rows(kernel: _Kernel, threads: Warpgroup, operands, tile, chosen) -> tuple[Any, Any]:
    """Finds the rows of a CTA's tiles that have a pair of the expert of the first one.

    `chosen` gets the pair of each, or the row itself where x has the rows of the table; of others
    it gets -1. Returns the number of used tiles and the expert.
    """
    names = "used", "owner", "source"
    tokens, pairs, rows = kernel.config.tokens, kernel.pairs, operands["source"].shape[0]
    if threads.simulated:
        used, owners, source = (operands[name][...] for name in names)
        row = tile * TILE + jnp.arange(tokens)
        inside = jnp.minimum(row, rows - 1)
        of_tile, pair = inside // TILE, source[inside]
        there = (row < rows) & (of_tile < used) & (owners[of_tile] == owners[tile]) & (pair < pairs)
        chosen[...] = jnp.where(there, row if kernel.top_k is None else pair, -1)
        return used[0], owners[tile]
    splat = plgpu.Layout.WG_SPLAT
    number = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=splat)
    kept = "row" if kernel.top_k is None else "pair"

    @plgpu.inline_mgpu(
        arg_types=([plgpu.RefType()] * 3, plgpu.RefType(), splat), return_type=[number] * 2
    )
    def choose(_, arrays, chosen, tile):
        i32 = ir.IntegerType.get_signless(32)
        # All reads are started before the first one is waited for.
        numbers = mgpu.utils.inline_ptx(
            "{ .reg .pred mine, there; .reg .b32 row, pair, tile, other; .reg .b64 at; "
            "mad.lo.u32 row, $6, 8, $7; "
            f"min.u32 pair, row, {rows - 1}; shr.u32 tile, pair, 3; "
            "mad.wide.u32 at, pair, 4, $4; ld.global.u32 pair, [at]; "
            "mad.wide.u32 at, tile, 4, $3; ld.global.u32 other, [at]; "
            "mad.wide.u32 at, $6, 4, $3; ld.global.u32 $1, [at]; ld.global.u32 $0, [$2]; "
            f"setp.lt.u32 there, row, {rows}; setp.lt.and.u32 there, tile, $0, there; "
            f"setp.eq.and.u32 there, other, $1, there; setp.lt.and.u32 there, pair, {pairs}, there;"
            f" selp.b32 pair, {kept}, -1, there; setp.lt.u32 mine, $7, {tokens}; "
            "@mine st.shared.u32 [$5], pair; }",
            *(copies.pointer(array) for array in arrays),
            arith.addi(
                copies.address(chosen), arith.muli(mgpu.utils.thread_idx(), mgpu.utils.c(4, i32))
            ),
            tile.registers.item(),
            mgpu.utils.thread_idx(),
            result_types=[i32] * 2,
            has_side_effects=True,
        )
        return [mgpu.FragmentedArray.splat(x, (), is_signed=True) for x in numbers]

    return choose([operands[name] for name in names], chosen, tile)


def _load_factors(
    threads: Warpgroup, row_weights: Any, chosen: Any, factors: Any, source: Any | None
) -> None:
    """Loads the weights of the chosen pairs, and zeros for others.

    With `source`, the pair of each row of the table, rows are chosen.
    """
    if threads.simulated:
        pair = chosen[...]
        if source is not None:
            pair = jnp.where(pair < 0, -1, source[...][jnp.maximum(pair, 0)])
        factors[...] = jnp.where(pair < 0, 0, row_weights[...][jnp.maximum(pair, 0)])
        return

    arrays = [row_weights] if source is None else [row_weights, source]

    @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * len(arrays), *[plgpu.RefType()] * 2))
    def load(_, arrays, chosen, factors):
        i32 = ir.IntegerType.get_signless(32)
        pair_of_row = ""
        if source is not None:
            pair_of_row = "mad.wide.u32 at, pair, 4, $4; @there ld.global.u32 pair, [at]; "
        own = arith.muli(mgpu.utils.thread_idx(), mgpu.utils.c(4, i32))
        (tokens,) = ir.MemRefType(chosen.type).shape
        mgpu.utils.inline_ptx(
            "{ .reg .pred mine, there; .reg .b32 pair, weight; .reg .b64 at; "
            f"setp.lt.u32 mine, $3, {tokens}; mov.b32 pair, 0; @mine ld.shared.u32 pair, [$0]; "
            "setp.ge.and.s32 there, pair, 0, mine; max.s32 pair, pair, 0; "
            f"{pair_of_row}mad.wide.u32 at, pair, 4, $2; mov.b32 weight, 0; "
            "@there ld.global.u32 weight, [at]; @mine st.shared.u32 [$1], weight; }",
            arith.addi(copies.address(chosen), own),
            arith.addi(copies.address(factors), own),
            copies.pointer(arrays[0]),
            mgpu.utils.thread_idx(),
            *map(copies.pointer, arrays[1:]),
            has_side_effects=True,
        )

    load(arrays, chosen, factors)


def _store(threads: Warpgroup, y: Any, value: jax.Array, chosen: Any, row: Any, column: Any):
    """Stores outputs bfloat16 [outputs, tokens] to y, from a row and a column on.

    Rows that are not chosen keep what they have.
    """
    (height, tokens), columns = value.shape, y.shape[1]
    if threads.simulated:
        rows = jnp.where(chosen[...] < 0, y.shape[0], row + jnp.arange(tokens))
        index = rows[:, None] * columns + column + jnp.arange(height)
        y[...] = y[...].reshape(-1).at[index].set(value.T, mode="drop").reshape(y.shape)
        return
    splat = plgpu.Layout.WG_SPLAT
    references = plgpu.RefType(), plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(*references, _layout_of(value), splat, splat))
    def store(_, y, chosen, value, row, column):
        i32 = ir.IntegerType.get_signless(32)
        c = functools.partial(mgpu.utils.c, ty=i32)
        thread = mgpu.utils.thread_idx()
        warp, lane = arith.shrui(thread, c(5)), arith.andi(thread, c(31))
        # After the transposition a thread has two outputs of a token.
        token = arith.shrui(lane, c(2))
        output = arith.addi(column.registers.item(), arith.shli(arith.andi(lane, c(3)), c(1)))
        if height == TILE_ROWS:
            output = arith.addi(output, arith.muli(warp, c(STRIP)))
        start = arith.muli(arith.addi(row.registers.item(), token), c(columns))
        start = copies.advanced(copies.pointer(y), arith.muli(arith.addi(start, output), c(2)))
        numbers = arith.addi(copies.address(chosen), arith.muli(token, c(4)))
        for group, halves in enumerate(value.registers.reshape(-1, 2)):
            there = arith.cmpi(
                arith.CmpIPredicate.sge, copies.read_shared(numbers, 4 * 8 * group), c(0)
            )
            if height == STRIP:  # All warps have the same.
                there = arith.andi(there, arith.cmpi(arith.CmpIPredicate.eq, warp, c(0)))
            for half, register in enumerate(halves):
                (pair,) = warp_mma.words(register)
                pair = adapter.transposed(pair)
                mgpu.utils.inline_ptx(
                    f"st.global.u32 [$0+{2 * 8 * (group * columns + half)}], $1;",
                    start,
                    pair,
                    predicate=there,
                    has_side_effects=True,
                )

    store(y, chosen, value, row, column)
