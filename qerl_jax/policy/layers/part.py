"""What a kind of layer, or of MLP, is: the names that its module must have.

A layer of the transformer has two parts, a mixer that mixes tokens and an MLP. Each of them adds
something to the residual stream x. A kind of part is a module; `kinds.layer_of` decides which two a
layer has, and nothing else asks. pyrefly compares the modules with the protocols below.

Letters in shapes: B rows, T tokens, D width of the residual stream, S cache positions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.attention import Segments
from qerl_jax.policy.config import ModelConfig

Angles = tuple[jax.Array, jax.Array]
# What rows keep of their tokens in a layer: the dataclass `KEPT` of its mixer. The first axis of
# all arrays is that of the rows, and a mesh cuts the second one.
Kept = Any
Rows = Callable[[ModelConfig], tuple[int, ...]]


class Weight(NamedTuple):
    """A weight [N, K] that stacks the outputs of projections with the same inputs."""

    name: str  # its name in the parameters of a layer
    members: tuple[str, ...]  # Hugging Face names of the projections, in the order of the rows
    # The name, as in `linear.PRODUCTS`, under which the backward pass finds the result.
    product: str
    # Whether a mesh cuts the outputs, each member alone; else it cuts the inputs, and the results
    # are added up over the devices.
    by_rows: bool
    packed: bool = True  # whether a format of 4 bits packs it
    bias: str = ""  # name of its bias in the parameters, which a layer may lack
    # Members that are a stack themselves, each with the function that returns the rows of its
    # parts. A mesh cuts each part, so B of the member's LoRA is whole on all devices.
    stacked: tuple[tuple[str, Rows], ...] = ()


class Stack(NamedTuple):
    """A frozen weight [E N, K] that has the weights [N, K] of E experts, one after the other.

    A format of 4 bits packs it, and no mesh cuts it. An adapter has A [E, r, K] and B [E, N, r].
    """

    name: str  # its name in the parameters of a layer
    # Hugging Face names of the projections of an expert, in the order of its rows, which are as
    # many of each.
    members: tuple[str, ...]
    tensor: str  # name, in the module of its part, of a stored tensor [E, N, K] with all of it
    shape: Callable[[ModelConfig], tuple[int, int, int]]  # returns (E, N, K)
    product: str  # name of its result, as `Weight.product`
    # Name of the array that multiplies the same tokens; '' where an expert reads what it computed.
    reads: str = ""


class Array(NamedTuple):
    """An array of a layer that is no projection."""

    # Names of the stored tensors whose rows it stacks, in the module of its part.
    tensors: tuple[str, ...]
    others: tuple[str, ...] = ()  # their names in families that have others
    is_wide: bool = False  # whether it is in float32 whatever the dtype of the policy
    by_rows: bool = False  # whether a mesh cuts it by its rows; else it lies whole on every device
    # Whether checkpoints store it minus 1 if `ModelConfig.centered_norms`.
    may_be_centered: bool = False
    # Function that returns the rows of the parts that a mesh cuts one by one; None for one part.
    parts: Rows | None = None


class PlannedBuffer(NamedTuple):
    """How parts compute a buffer of an update, or tokens of a rollout, for the plan."""

    dtype: jnp.dtype  # of activations
    tokens: int = 1
    recompute: tuple[str, ...] = ()  # names of `PRODUCTS` that the backward pass computes again
    hopper: bool | None = None  # whether by kernels of Hopper GPUs; None asks the default device
    capability: float | None = None  # as `device.cuda_capability`; None asks the default device

    @property
    def itemsize(self) -> int:
        """Bytes of an activation."""
        return self.dtype.itemsize


class Memory(NamedTuple):
    """Bytes and numbers of a part, for the plan."""

    # Numbers of a token that the backward pass of an update reads, by names of `PRODUCTS`.
    kept: dict[str, int]
    backward: int = 0  # bytes of temporary arrays in the backward pass of a buffer
    # Where routed experts have adapters, those that it has in addition; of a mixer, those of the
    # backward pass that exist at the same time as those of the MLP.
    adapter: int = 0
    prefill: int = 0  # bytes of temporary arrays of a token in a prefill
    # Bytes of the scores in the backward pass of a buffer, on a device without a kernel for them.
    scores: int = 0
    # Bytes of temporary arrays of a layer whatever the number of its tokens.
    block: int = 0
    # What XLA needs, as a factor, for what a model with such layers keeps for the backward pass.
    spread: float = 1.0


class NewTokens(NamedTuple):
    """Where T new tokens of N rows go in a cache, and which of them is the last of its row."""

    # int32 [N, T], cache position of each token; S for padding, which is not written.
    positions: jax.Array
    last: jax.Array  # int32 [N], index of the last token of each row
    # int32 [N], cache row of each row, and B for a row that is not there; None where the rows are
    # all those of the cache, in order.
    rows: jax.Array | None = None


class Own(NamedTuple):
    """What a part of a layer computes with."""

    layer: dict  # the arrays of the layer
    adapters: dict  # the pairs of `lora.fuse` by the names of weights
    config: ModelConfig  # the architecture of one device, see `ModelConfig.of_layer`
    # Where `linear.project` keeps what the weights read, by their names; None for a layer that is
    # not calibrated. A stack reads rows by tiles [tiles, m, K]; 'owners', int32 [tiles, m], has the
    # experts of these rows in ascending order, and E for rows without a token, which are zeros.
    inputs: dict[str, jax.Array] | None = None


def rows_of(kept: Kept, new: NewTokens) -> Kept:
    """Returns what the rows with new tokens keep, of what all rows do."""
    if new.rows is None:
        return kept
    return jax.tree.map(lambda x: x.at[new.rows].get(mode="clip"), kept)


def with_rows(kept: Kept, mine: Kept, new: NewTokens) -> Kept:
    """Returns what all rows keep, with those that have new tokens replaced."""
    if new.rows is None:
        return mine
    return jax.tree.map(lambda x, rows: x.at[new.rows].set(rows, mode="drop"), kept, mine)


class Part(Protocol):
    """What mixers and MLPs have in common."""

    MODULE: str  # Hugging Face's name of its module in a layer
    WEIGHTS: tuple[Weight, ...]  # its projections
    ARRAYS: dict[str, Array]  # its other arrays by their name in the parameters
    STACKS: tuple[Stack, ...]  # its weights of experts

    def projection_shapes(self, config: ModelConfig) -> dict[str, tuple[int, int]]:
        """Returns the shape (outputs, inputs) of each projection."""
        ...

    def tensor_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the other stored tensors that it has with this architecture."""
        ...

    def shard(self, config: ModelConfig, shards: int) -> dict[str, Any]:
        """Returns the fields of the `ModelConfig` of one of several devices.

        Raises:
            UserError: the number divides not all that devices share (`collectives.divided`).
        """
        ...

    def memory(self, config: ModelConfig, buffer: PlannedBuffer) -> Memory:
        """Returns what it adds to an update on a buffer, and to a prefill."""
        ...


class Mlp(Part, Protocol):
    """A kind of MLP: `mlp`."""

    def fused_shapes(self, config: ModelConfig) -> tuple[int, int, int, bool, float] | None:
        """Returns the fields of `decode.layer.Experts`, or None for a kind without experts."""
        ...

    def mlp(
        self, own: Own, x: jax.Array, routes: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns what the MLP adds to x [B, T, D], and the experts that its router chooses.

        These are int32 [B, T, k], from the largest logit to the smallest, or None if it has no
        experts. It computes those of `routes`, if these are given.
        """
        ...


class Mixer(Part, Protocol):
    """A kind of layer, by what mixes its tokens: `attention`, `recurrent`."""

    KEPT: type  # dataclass of what rows keep
    # Whether a row may go back to any of its positions and be extended from there: what it keeps is
    # by position.
    REWINDS: bool

    def layout_of(self, segments: Segments, positions: jax.Array, config: ModelConfig) -> Any:
        """Returns what `mix` reads of the segments of a packed buffer, the same in every layer.

        `positions` are those of the tokens in their rows, int32 [N].
        """
        ...

    def mix(self, own: Own, x: jax.Array, visible: Any, angles: Angles) -> tuple[jax.Array, Kept]:
        """Mixes whole rows or a packed buffer.

        `visible` are the lengths int32 [B] of rows, or a `layout_of`. Returns what is added to
        x [B, T, D], and what rows keep, for `in_cache`; that of a buffer has no meaning.
        """
        ...

    def mix_step(
        self, own: Own, x: jax.Array, kept: Kept, lengths: jax.Array, angles: Angles
    ) -> tuple[jax.Array, Kept]:
        """Mixes one new token of each row, x [B, 1, D], at the position `lengths` int32 [B].

        A row of length 0 has ended, or waits: it must be possible to extend it later.
        """
        ...

    def mix_extend(
        self,
        own: Own,
        x: jax.Array,
        kept: Kept,
        new: NewTokens,
        angles: Angles,
    ) -> tuple[jax.Array, Kept]:
        """Mixes several new tokens of each row, as `transformer.extend` describes them."""
        ...

    def seen_bytes(
        self,
        config: ModelConfig,
        buffer: PlannedBuffer,
        sizes: tuple[int, int, int],
        cache: tuple[int, jnp.dtype] | None,
    ) -> int:
        """Returns the bytes of temporary arrays that depend on what tokens see.

        `sizes` are N rows, T tokens of each, and S positions that they see. `cache` is the number
        of rows and the dtype of the cache whose rows are extended, None in a prefill.
        """
        ...

    def fuses(self, config: ModelConfig, dtype: jnp.dtype, kept: Kept) -> str:
        """Returns which of `decode.layer.MIXERS` computes it on this device, or '' for none."""
        ...

    def in_cache(self, kept: Kept, positions: int) -> Kept:
        """Returns what `mix` gave, as a cache of S positions has it."""
        ...

    def row_shapes(self, config: ModelConfig, positions: int, dtype: Any) -> Kept:
        """Returns the shapes, on one device, of what a row keeps in a cache of a dtype."""
        ...
