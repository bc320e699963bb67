"""The programs of rollouts, for every shape that one needs."""

import contextlib
import functools
import gc
import itertools
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from qerl_jax.policy import transformer
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.rollout import decode
from qerl_jax.rollout.budget import Plan

# Compiled programs of one policy, by the `Program.name` of each.
Programs = Mapping[Hashable, jax.stages.Compiled]
# Traces and lowers a program.
Lowering = Callable[[], jax.stages.Lowered]
# A key like those of rollouts, the policy and its adapter or None: bound arrays, or their shapes.
Policy = tuple[Any, dict, Lora | None]


class Program(NamedTuple):
    """A jitted function for some shapes.

    Attributes:
        function: what is jitted.
        static: its static arguments.
        name: identifies it among the programs of a policy.
    """

    function: Any
    static: dict[str, Any]
    name: Hashable

    def run(self, programs: Programs, *arguments: Any) -> Any:
        """Calls it as it was compiled ahead of time, or lets jit compile it."""
        if self.name in programs:
            return programs[self.name](*arguments)
        return self.function(*arguments, **self.static)


def dequantized(params: dict, rules: decode.Rules, programs: Programs) -> dict:
    """The policy as a rollout reads it: what the rules let be dequantised once is dense."""
    if not _packed(params, rules):
        return params
    return transformer.dequantize_params(
        params, functools.partial(dequantize(params).run, programs)
    )


def _packed(params: dict, rules: decode.Rules) -> list[QuantTensor]:
    return [] if rules.dequantize == "step" else transformer.packed_weights(params)


def dequantize(params: dict) -> Program:
    """`decode.dequantize` for a policy."""
    return _program(decode.dequantize, {"dtype": params["embed_tokens"].dtype})


def read_prompts(plan: Plan, rules: decode.Rules, width: int) -> Program:
    """`decode.read_prompts` of prompts [P, T] padded to a width."""
    static = {"config": rules.config, "dtype": plan.dtype}
    return _program(decode.read_prompts, static, plan.prompts, width, rules.dequantize)


def seat_rows(plan: Plan, rules: decode.Rules, width: int, count: int) -> Program:
    """`decode.seat_rows` for so many rows, whose prompts were read in a width."""
    shapes = plan.batches[0], plan.slots, plan.dtype, plan.prompts, width, count
    return _program(decode.seat_rows, {"rules": rules}, *shapes)


def fuse_adapter(rules: decode.Rules, params: dict) -> Program:
    """`decode.fuse_adapter` for a policy."""
    static = {"config": rules.config, "dtype": params["embed_tokens"].dtype}
    return _program(decode.fuse_adapter, static)


def decode_chunk(plan: Plan, rules: decode.Rules, rows: int) -> Program:
    """`decode.decode_chunk` of a batch of so many rows."""
    static = {"rules": rules, "steps": plan.steps}
    return _program(decode.decode_chunk, static, rows, plan.slots, plan.dtype)


def take_rows(x: jax.Array | jax.ShapeDtypeStruct, count: int) -> Program:
    """`decode.take_rows` of so many rows of an array."""
    return _program(decode.take_rows, {}, x.shape, x.dtype, count)


def _program(function, static, *shapes) -> Program:
    return Program(function, static, (function.__name__, *shapes, *static.values()))


def lowerings(
    policy: Policy, shapes: Iterable[tuple[Plan, decode.Rules]]
) -> dict[Hashable, Lowering]:
    """What lowers each program of some rollouts, by its name.

    Args:
        policy: that of all of them.
        shapes: of each, and the rest that its programs depend on.
    """
    return {
        program.name: functools.partial(_lower, program, *how)
        for plan, rules in shapes
        for program, *how in _needed(policy, plan, rules)
    }


def _needed(policy: Policy, plan: Plan, rules: decode.Rules) -> list[tuple[Any, ...]]:
    """The programs of a rollout, and what the arguments of each are made by and from."""
    _, params, _ = policy
    arguments = _Arguments(*policy, plan, rules)
    needed: list[tuple[Any, ...]] = []
    if arguments.packed:
        needed.append((dequantize(params), arguments.dequantize))
    for width in plan.widths:
        needed.append((read_prompts(plan, rules, width), arguments.read_prompts, width))
        for count in plan.seatings:
            seat = seat_rows(plan, rules, width, count)
            needed.append((seat, arguments.seat_rows, width, count))
    if plan.steps:
        needed.append((fuse_adapter(rules, params), arguments.fuse_adapter))
        for rows in plan.batches:
            needed.append((decode_chunk(plan, rules, rows), arguments.decode_chunk, rows))
    for rows, smaller in itertools.pairwise(plan.batches):
        for x in jax.tree.leaves(arguments.batch(rows)):
            needed.append((take_rows(x, smaller), arguments.take_rows, x, smaller))
    return needed


def _lower(program: Program, arguments: Callable, *shapes: Any) -> jax.stages.Lowered:
    return program.function.lower(*arguments(*shapes), **program.static)


class _Arguments:
    """What the programs are lowered for, bound like what they are called with."""

    def __init__(self, key, params, lora, plan, rules):
        self._key, self._params, self._lora = key, params, lora
        self._plan, self._rules = plan, rules
        self.packed = _packed(params, rules)
        if self.packed:
            self._params = transformer.dequantize_params(
                params, lambda _: self._result(dequantize(params), self.dequantize())
            )

    def _bound(self, tree):
        sharding = self._params["embed_tokens"].sharding
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    def _result(self, program, arguments):
        return self._bound(program.function.eval_shape(*arguments, **program.static))

    def batch(self, rows):
        how = {"config": self._rules.config, "dtype": self._plan.dtype}
        return self._bound(
            jax.eval_shape(lambda: decode.empty_batch(rows, self._plan.slots, **how))
        )

    def dequantize(self):
        return (self.packed,)

    def read_prompts(self, width):
        prompts = self._plan.prompts
        return self._params, self._lora, *_integers((prompts, width), prompts)

    def seat_rows(self, width, count):
        read = self._result(read_prompts(self._plan, self._rules, width), self.read_prompts(width))
        batch = self.batch(self._plan.batches[0])
        return self._key, batch, read, *_integers(count, count, count)

    def fuse_adapter(self):
        return (self._lora,)

    def decode_chunk(self, rows):
        fused = self._result(fuse_adapter(self._rules, self._params), self.fuse_adapter())
        return self._key, self._params, fused, self.batch(rows), np.zeros(rows, bool)

    def take_rows(self, x, count):
        return x, *_integers(count)


def bound(tree: Any) -> Any:
    """The arrays bound to where they are: unbound ones would compile to programs of their own."""
    leaves, treedef = jax.tree.flatten(tree)
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    return jax.tree.unflatten(treedef, jax.device_put(leaves, shardings))


def _integers(*shapes: int | tuple[int, ...]) -> list[np.ndarray]:
    return [np.zeros(shape, np.int32) for shape in shapes]


@contextlib.contextmanager
def uncollected() -> Generator[None]:
    """Python's garbage collector off, which takes a tenth of the time that lowering does."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
