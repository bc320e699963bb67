"""Operations, and the programs of a table of operations by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.compile.aot import compile_operations
from qerl_jax.compile.operation import (
    Executables,
    MissingProgramError,
    Operation,
    Programs,
    digest,
)

ROW = jax.ShapeDtypeStruct((3,), np.float32)


@functools.partial(jax.jit, static_argnames="factor")
def scale(x, *, factor):
    return factor * x


@pytest.fixture
def table():
    return {
        "double": Operation.of_shapes("double", scale, {"factor": 2}, ROW),
        ("triple", 3): Operation(scale, {"factor": 3}, lambda: (ROW,), ("triple", 3)),
    }


def test_programs_are_called_by_name_and_without_static_arguments(table):
    executables = compile_operations(jnp.zeros(3), table.values())
    assert len(executables) == 2
    for programs in (Programs(table), Programs(table, executables)):
        assert list(programs) == ["double", ("triple", 3)]
        assert programs["double"](jnp.ones(3)).tolist() == [2, 2, 2]
        assert programs["triple", 3](jnp.ones(3)).tolist() == [3, 3, 3]


def test_a_compiled_program_takes_no_other_shape(table):
    programs = Programs(table, compile_operations(jnp.zeros(3), table.values()))
    with pytest.raises(TypeError):
        programs["double"](jnp.ones(4))


def test_a_missing_program_is_an_error_only_when_it_is_asked_for(table):
    programs = Programs(table, Executables({table["double"].key: len}))
    assert programs["double"]("four") == 4
    assert ("triple", 3) in programs
    with pytest.raises(MissingProgramError, match=r"operation \('triple', 3\): compile"):
        _ = programs["triple", 3]
    assert "half" not in programs
    with pytest.raises(MissingProgramError, match="operation 'half'"):
        _ = programs["half"]


def test_the_key_of_shapes_tells_static_arguments_and_shapes(table):
    def key(factor, *shapes):
        return Operation.of_shapes("double", scale, {"factor": factor}, *shapes).key

    assert key(2, ROW) == table["double"].key
    others = [key(3, ROW), key(2, jax.ShapeDtypeStruct((4,), np.float32)), key(2, ROW, ROW)]
    assert len({table["double"].key, *others}) == 4
    assert table["double"].of_any_policy
    assert digest((ROW, None)) != digest((None, ROW))


def test_shapes_of_results_without_compiling(table):
    assert table["double"].eval_shape().shape == (3,)
