"""An operation: a jitted function for one set of shapes; and the programs of a table of operations.

Rollouts and updates each have a table from names to operations. There are two ways to make the
programs of a table: `aot.compile_operations` compiles its operations ahead of time, and without
its executables `Programs` lets jit compile an operation when it is first called.
"""

import functools
import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax


class Operation(NamedTuple):
    """A jitted function for one set of shapes."""

    function: Any  # the jitted function
    static: dict[str, Any]  # its static arguments
    # Returns its other arguments, abstract ones for device arrays. Like the key, it is only needed
    # to compile ahead of time.
    arguments: Callable[[], tuple[Any, ...]] = tuple
    key: Hashable = None  # identity of the program among all programs of a policy
    # Whether the key alone tells the shapes of the arguments, so that the same program serves
    # another policy, such as the base without the adapter.
    of_any_policy: bool = False

    @classmethod
    def of_shapes(
        cls, name: str, function: Any, static: dict[str, Any], *arguments: Any
    ) -> "Operation":
        """Returns an operation of any policy, whose key follows from the shapes of its arguments.

        The static arguments are apart from the others, which are shapes.
        """
        key = name, *static.values(), digest(arguments)
        return cls(function, static, lambda: arguments, key, of_any_policy=True)

    def lower(self) -> jax.stages.Lowered:
        """Traces and lowers the function for its arguments."""
        return self.function.lower(*self.arguments(), **self.static)

    def eval_shape(self) -> Any:
        """Returns the shapes of the results."""
        return self.function.eval_shape(*self.arguments(), **self.static)


class MissingProgramError(RuntimeError):
    """A program that should have been compiled ahead of time is missing."""


class Executables(dict[Hashable, Callable[..., Any]]):
    """Programs of one policy by the key of their operation, to be called without static arguments.

    Attributes:
        compiled: keys of the programs that were compiled and not loaded from a cache.
        replicas: the same programs on the other devices of a policy that several devices hold.
    """

    def __init__(self, programs: Any = (), compiled: Iterable[Hashable] = ()) -> None:
        super().__init__(programs)
        self.compiled = list(compiled)
        self.replicas: list[Executables] = []

    def __missing__(self, key: Hashable) -> Callable[..., Any]:
        raise MissingProgramError(
            f"no program is compiled for the operation {key}: compile the operations of these "
            "shapes and settings first"
        )


class Programs(Mapping[Hashable, Callable[..., Any]]):
    """The programs of a table of operations by their names, without static arguments.

    Access by name looks a program up, so a missing program raises an error only then.

    Args:
        table: operations by name.
        executables: the programs by the key of their operation. With None, jit compiles each
            operation when it is first called.

    Attributes:
        table: operations by name.
    """

    def __init__(
        self, table: Mapping[Any, Operation], executables: Executables | None = None
    ) -> None:
        self.table, self._executables = table, executables

    def __getitem__(self, name: Hashable) -> Callable[..., Any]:
        """Returns the program of an operation.

        Raises:
            MissingProgramError: there is no such operation, or it is not compiled.
        """
        if name not in self.table:
            raise MissingProgramError(f"no program is compiled for the operation {name!r}")
        operation = self.table[name]
        if self._executables is None:
            return functools.partial(operation.function, **operation.static)
        return self._executables[operation.key]

    def __contains__(self, name: object) -> bool:
        """Whether the table has an operation of this name."""
        return name in self.table

    def __iter__(self) -> Iterator[Hashable]:
        """Iterates over the names."""
        return iter(self.table)

    def __len__(self) -> int:
        """Returns the number of operations."""
        return len(self.table)


def tree_signature(tree: Any) -> str:
    """Returns the structure, the shapes and the dtypes of a tree as text."""
    leaves, treedef = jax.tree.flatten(tree)
    return f"{treedef} {[(leaf.shape, str(leaf.dtype)) for leaf in leaves]}"


def digest(tree: Any) -> str:
    """Returns a short identity of the structure, the shapes and the dtypes of a tree."""
    return hashlib.sha256(tree_signature(tree).encode()).hexdigest()[:8]


def abstract(tree: Any, sharding: jax.sharding.Sharding | None = None) -> Any:
    """Returns the shapes of a tree, with its own shardings or with one sharding for all arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), tree
    )


def commit(tree: Any) -> Any:
    """Returns a tree with its arrays committed to their devices.

    Committed and uncommitted arrays would compile to two programs.
    """
    leaves, treedef = jax.tree.flatten(tree)
    # For the hundreds of arrays of a policy device_put takes milliseconds, even if it does nothing.
    uncommitted = {i: x for i, x in enumerate(leaves) if not getattr(x, "committed", False)}
    shardings = [getattr(x, "sharding", None) for x in uncommitted.values()]
    for i, x in zip(
        uncommitted, jax.device_put(list(uncommitted.values()), shardings), strict=True
    ):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)
