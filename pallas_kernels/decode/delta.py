"""The gated delta rule of one new token per row: what a decode step does between its two products.

`step` does all of it in one kernel: the norm's factor, the convolution and its window, the gates,
the lengths of queries and keys, the rule, the gated norm of its outputs, and the LoRA shrink of the
next product. `qerl_jax.policy.layers.delta` has the equations.

A CTA has a key head of a row, with all value heads that share it: their channels are those that it
convolves, so no other CTA reads the part of the window that it moves. It reads the states of its
heads once, by slices of their columns, and writes each slice where it was. A thread has numbers of
a few columns, so that the sums over the keys are those of neighboring lanes; warps share nothing
but what they read. A slice is requested while the one before is computed. A whole head is in one
CTA, and with it the sum of its gated norm.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import warpgroup
from pallas_kernels.decode import HEAD_OF_STATE as HEAD
from pallas_kernels.decode.row import load_squares, norm_factor, rounded
from pallas_kernels.fp4_matmul.tiling import PARTIAL_COLUMNS as RANKS
from pallas_kernels.warpgroup import WARPS

_SLICE = 64  # columns of a state that a CTA has in registers at a time
_EPS = 1e-6  # under the root of the length of queries and keys
_LOG2_E = 1.4426950408889634

# One channel of a head for each thread.
_CHANNELS = plgpu.Layout.TILED(
    plgpu.Tiling(((HEAD,), (32,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
# A slice of a state [keys, columns]: a warp has 16 columns, a lane four of them at every 8th key.
_STATE = plgpu.Layout.TILED(
    plgpu.Tiling(((8, _SLICE), (8, _SLICE // WARPS), (4,))),
    warp_dims=(-4,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# Rows of A by the columns of a head: a warp has eight rows.
_SHRINK = plgpu.Layout.TILED(
    plgpu.Tiling(((RANKS, HEAD), (RANKS // WARPS, HEAD), (2, HEAD), (8,))),
    warp_dims=(-7,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)

Array = Any  # a jax.Array, its shape and dtype, or a reference to it inside a kernel


class DeltaInputs(NamedTuple):
    """What a step of the rule reads, for N value heads that are R for each of the key heads."""

    # float32 [M, channels + N Dv + 2 N], the product of in_proj without its norm's factor: inputs
    # of the convolution, output gates, rates and decays. With the factor they are rounded to
    # bfloat16.
    parts: Array
    square_partials: Array  # float32 [P, M] partial mean squares of the norm before the product
    lengths: Array  # int32 [M], number of tokens of each row; 0 for one that stays as it is
    conv: Array  # [channels, 1, W] weight of the convolution
    a_log: Array  # float32 [N]
    dt_bias: Array  # float32 [N]
    scale: Array  # float32 [Dv] scale of the gated norm
    state: Array  # float32 [M, N, Dk, Dv] states of the rule; donated
    window: Array  # float32 [M, channels, W - 1] last inputs of the convolution; donated


class _Shapes(NamedTuple):
    """The numbers that follow from the shapes of the inputs."""

    key_heads: int
    value_heads: int
    channels: int

    @property
    def ratio(self) -> int:
        """The number of value heads that share a key head."""
        return self.value_heads // self.key_heads


def _shapes_of(inputs: DeltaInputs) -> _Shapes:
    channels, value_heads = inputs.window.shape[1], inputs.state.shape[1]
    return _Shapes((channels // HEAD - value_heads) // 2, value_heads, channels)


def step(
    inputs: DeltaInputs, a: jax.Array | None, *, eps: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """Takes the states through one token of each row.

    Args:
        inputs: what the rule reads; Dk and Dv are `decode.HEAD_OF_STATE`.
        a: bfloat16 [R', N Dv], A of the next product's adapter, or None.
        eps: epsilon of both norms.
        interpret: whether to simulate the kernel on a CPU.

    Returns:
        The input of the next product, bfloat16 [M, N Dv], partials of its x A^T as in
        `norms.DeferredNorm` or None without A, and the new states and windows.
    """
    shapes, rows = _shapes_of(inputs), len(inputs.parts)
    results = {"out": jax.ShapeDtypeStruct((rows, shapes.value_heads * HEAD), jnp.bfloat16)}
    if a is not None:
        ranks = pl.cdiv(len(a), RANKS) * RANKS
        a = jnp.pad(a, ((0, ranks - len(a)), (0, 0)))
        partials = (shapes.key_heads, rows, ranks)
        results["xa_partials"] = jax.ShapeDtypeStruct(partials, jnp.float32)
    # Threads read eight gates: rows begin at a multiple. Those of whole models do.
    parts = jnp.pad(inputs.parts, ((0, 0), (0, -inputs.parts.shape[1] % 8)))
    operands = inputs._replace(parts=parts, state=None, window=None), a
    results, (state, window) = warpgroup.run(
        functools.partial(_step_block, shapes=shapes, eps=eps),
        "delta_step",
        (rows, shapes.key_heads),
        operands,
        results,
        updated=(inputs.state, inputs.window),
        scratch={
            "queries": ((HEAD,), jnp.float32),
            "keys": ((HEAD,), jnp.float32),
            "values": ((shapes.ratio, HEAD), jnp.float32),
            "outputs": ((shapes.ratio, HEAD), jnp.float32),
        },
        interpret=interpret,
    )
    return results["out"], results.get("xa_partials"), state, window


def _step_block(threads, operands, updated, results, *, shapes, eps, **shared):
    """What one CTA does: a key head of a row and the value heads that share it."""
    inputs, a = operands
    states, window = updated
    row, key_head = threads.cta
    heads = key_head * shapes.ratio
    states = states.at[row, pl.ds(heads, shapes.ratio)]
    per_head = HEAD // _SLICE
    count = per_head * shapes.ratio

    def slice_of(i):
        column = lax.rem(i, per_head) * _SLICE
        return states.at[lax.div(i, per_head), :, pl.ds(column, _SLICE)]

    def load_slice(i):
        return threads.load(slice_of(i), _STATE)

    # Everything is requested before anything is waited for, the first slice first.
    first = load_slice(jnp.int32(0))
    token = _Token(threads, inputs, window, row, key_head, shapes, eps)
    gates = [token.gates(heads + r) for r in range(shapes.ratio)]
    token.convolve(shared)
    threads.meet()
    queries, keys = (threads.load(shared[name], _STATE.reduce(1)) for name in ("queries", "keys"))
    queries, keys = (x * lax.rsqrt(jnp.sum(x * x) + _EPS) for x in (queries, keys))
    queries *= HEAD**-0.5
    own = jnp.sum(queries * keys)

    def advance(i, old):
        """Takes a slice through the token."""
        head, place = lax.div(i, per_head), pl.ds(lax.rem(i, per_head) * _SLICE, _SLICE)
        decay, rate = (_chosen(numbers, head) for numbers in zip(*gates, strict=True))
        value = threads.load(shared["values"].at[head, place], _STATE.reduce(0))
        key, query = (lax.broadcast_in_dim(x, old.shape, (0,)) for x in (keys, queries))
        written = rate * (value - decay * jnp.sum(old * key, axis=0))
        out = decay * jnp.sum(old * query, axis=0) + own * written
        new = decay * old + key * lax.broadcast_in_dim(written, old.shape, (1,))
        threads.store(slice_of(i), new)
        threads.store(shared["outputs"].at[head, place], rounded(out))

    def add(i, old):
        following = load_slice(i + 1)
        advance(i, old)
        return following

    last = lax.fori_loop(0, count - 1, add, first)
    # What the end reads is requested before the last slice is computed.
    end = _End(threads, inputs, a, row, heads, shapes, token.factor)
    advance(jnp.int32(count - 1), last)
    threads.meet()
    end.store(shared["outputs"], results, key_head, eps)


def _chosen(numbers: tuple[Any, ...], index: Any) -> Any:
    """One of a few numbers."""
    chosen = numbers[0]
    for i, number in enumerate(numbers[1:], start=1):
        chosen = jnp.where(index == i, number, chosen)
    return chosen


class _Token:
    """What a CTA makes of the product of in_proj, of which it has requested everything."""

    def __init__(self, threads, inputs, window, row, key_head, shapes, eps):
        self.threads, self.inputs, self.window, self.row = threads, inputs, window, row
        self.shapes = shapes
        squares = load_squares(threads, inputs.square_partials, row)
        self.is_live = inputs.lengths[row] > 0
        taps, kept = inputs.conv.shape[2], window.shape[2]
        firsts = [key_head, shapes.key_heads + key_head]
        firsts += [2 * shapes.key_heads + key_head * shapes.ratio + r for r in range(shapes.ratio)]
        self.places = [pl.ds(first * HEAD, HEAD) for first in firsts]
        load = functools.partial(threads.load, layout=_CHANNELS)
        self.new = [load(inputs.parts.at[row, place]) for place in self.places]
        self.old = [[load(window.at[row, place, i]) for i in range(kept)] for place in self.places]
        self.taps = [
            [load(inputs.conv.at[place, 0, i]) for i in range(taps)] for place in self.places
        ]
        self.factor = norm_factor(*squares, eps)

    def gates(self, head):
        """The factor of a head's state, and the part of the new value that is written."""
        inputs, (_, count, channels) = self.inputs, self.shapes
        begin = channels + count * HEAD + head
        b, a = (
            rounded(self.factor * inputs.parts[self.row, begin + i].astype(jnp.float32))
            for i in (0, count)
        )
        decay = -_exp(inputs.a_log[head]) * _softplus(a + inputs.dt_bias[head])
        return tuple(
            jnp.where(self.is_live, x, idle)
            for x, idle in ((_exp(decay), 1.0), (1.0 / (1.0 + _exp(-b)), 0.0))
        )

    def convolve(self, shared):
        """Writes queries, keys and values to shared memory, and moves the window."""
        values = shared["values"]
        targets = [shared["queries"], shared["keys"]]
        targets += [values.at[r] for r in range(values.shape[0])]
        moved = []
        for target, new, old, taps in zip(targets, self.new, self.old, self.taps, strict=True):
            inputs = [*old, rounded(self.factor * new.astype(jnp.float32))]
            products = [x * tap.astype(jnp.float32) for x, tap in zip(inputs, taps, strict=True)]
            self.threads.store(target, rounded(_silu(sum(products[1:], start=products[0]))))
            live = jnp.broadcast_to(self.is_live, new.shape)
            moved.append([jnp.where(live, x, y) for x, y in zip(inputs[1:], old, strict=True)])
        for place, columns in zip(self.places, moved, strict=True):
            for i, column in enumerate(columns):
                self.threads.store(self.window.at[self.row, place, i], column)


class _End:
    """The gated norm of a CTA's heads and their product with A, of which it requests everything."""

    def __init__(self, threads, inputs, a, row, heads, shapes, factor):
        self.threads, self.row, self.factor = threads, row, factor
        self.a = a
        layout = _SHRINK.reduce(0)
        self.scale = threads.load(inputs.scale, layout)
        self.places = [pl.ds((heads + r) * HEAD, HEAD) for r in range(shapes.ratio)]
        gates = [pl.ds(shapes.channels + place.start, HEAD) for place in self.places]
        self.gates = [threads.load(inputs.parts.at[row, place], layout) for place in gates]
        # More rows of A would take registers that the last slice needs.
        self.first = None if a is None else self.factors(0)

    def factors(self, start):
        """Requests rows of A, for the columns of each head."""
        ranks = pl.ds(start, RANKS)
        return [self.threads.load(self.a.at[ranks, place], _SHRINK) for place in self.places]

    def store(self, outputs, results, key_head, eps):
        """Writes the heads' part of what the next product reads, and of its x A^T."""
        threads, normed = self.threads, []
        for r, (place, gate) in enumerate(zip(self.places, self.gates, strict=True)):
            x = threads.load(outputs.at[r], _SHRINK.reduce(0))
            x = rounded(x * lax.rsqrt(jnp.sum(x * x) / HEAD + eps) * self.scale)
            gate = rounded(self.factor * gate.astype(jnp.float32))
            x = (x * _silu(gate)).astype(results["out"].dtype)
            threads.store(results["out"].at[self.row, place], x)
            normed.append(x.astype(jnp.float32))
        if self.first is None:
            return
        for start in range(0, self.a.shape[0], RANKS):
            products = [
                factors.astype(jnp.float32) * lax.broadcast_in_dim(x, factors.shape, (1,))
                for factors, x in zip(
                    self.factors(start) if start else self.first, normed, strict=True
                )
            ]
            total = jnp.sum(sum(products[1:], start=products[0]), axis=1)
            threads.store(results["xa_partials"].at[key_head, self.row, pl.ds(start, RANKS)], total)


def _exp(x):
    return jnp.exp2(_LOG2_E * x)


def _silu(x):
    return x / (1.0 + _exp(-x))


def _softplus(x):
    """Returns log(1 + e^x), of numbers by operations that kernels have.

    The logarithm of 1 + y, for y of at most 1, is twice the area tangent of y / (2 + y), a third at
    most: six terms of its series are exact to float32.
    """
    y = _exp(-jnp.maximum(x, -x))
    z = y / (2.0 + y)
    series = 0.0
    for power in (11, 9, 7, 5, 3, 1):
        series = series * (z * z) + 1.0 / power
    return jnp.maximum(x, 0.0) + 2.0 * z * series
