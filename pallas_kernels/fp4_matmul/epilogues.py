"""What the Hopper kernel can do with a product before it writes it."""

import dataclasses
from typing import Any

import jax

Array = Any  # jax.Array, or its shape and dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Swiglu:
    """SwiGLU, [M, N / 2], of a product whose first N / 2 outputs are the gate's.

    The normalization of x is deferred: its rows are multiplied by the norm's scale already, and
    their factor 1 / sqrt(mean square + eps) is applied to the product. Gate, up, the activation and
    the result are rounded to bfloat16.

    Attributes:
        square_partials: float32 [S, M], whose sum over S is the mean square of a row. For
            `supports`, None stands for those of `AddRmsNorm`.
        eps: epsilon of the norm.
    """

    square_partials: Array
    eps: float = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AddRmsNorm:
    """The sum of a product and a residual, and partial mean squares for the RMSNorm of the sum.

    The normalization is deferred: the kernel that reads the result applies the factor 1 /
    sqrt(mean square + eps). The product and the sum are rounded to bfloat16. The results are the
    sum [M, N], the sum times the scale [M, N], and float32 partials [S, M], whose sum over S is the
    mean square of a row of the sum.

    Attributes:
        residual: bfloat16 [M, N].
        scale: float32 [N], scale of the norm.
    """

    residual: Array
    scale: Array


Epilogue = Swiglu | AddRmsNorm
