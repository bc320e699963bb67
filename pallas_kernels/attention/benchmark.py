"""Times packed attention on a Hopper GPU, forward and backward.

    python -m pallas_kernels.attention.benchmark --tokens=8192,16384 --heads=12/2,28/4,40/8

Times are of the device, by CUPTI, the median of five calls. The backward pass is the sum of its
kernels: dq, dk and dv, the sums of divided tiles, and XLA's pass for the sums of attention times
its gradient. TFLOP/s count the pairs of tokens that see each other, with two products in the
forward pass and five in the backward pass, of which the kernels compute two again. "of visited" is
the visible part of the pairs in the tiles that the kernels visit: of queries, then of keys. Errors
are relative to the dense form in float32, the largest of out, dq, dk and dv.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import device, timing
from pallas_kernels.attention import backward_sm90, dense, forward_sm90
from pallas_kernels.attention.segments import BLOCK, STEP, Segments, segments

LAYOUTS = "100+8x280,100+8x2048,300+8x600"


def fill(tokens: int, prompt: int, count: int, completion: int) -> np.ndarray:
    """Ids of a buffer that is filled with groups; groups that do not fit are divided.

    `tokens`, `prompt` and `completion` are numbers of tokens: of the buffer, of a group's prompt,
    and of each of its completions, at most `count`.
    """
    ids = np.full(tokens, -1, np.int32)
    start, group = 0, 0
    while (fitting := (tokens - start - prompt) // completion) > 0:
        part = np.repeat(np.arange(min(fitting, count)) + 1, completion)
        part = np.concatenate([np.zeros(prompt, np.int32), part])
        ids[start : start + len(part)] = group << 12 | part
        start, group = start + len(part), group + 1
    return ids


def visible_pairs(packed: Segments) -> int:
    """The number of pairs of a query and a key that it sees, padding left out."""
    keys = np.flatnonzero(packed.ids >= 0)
    return int((packed.ends[keys] - keys).sum())


def visited_pairs(packed: Segments) -> tuple[int, int]:
    """The number of pairs in the tiles of queries, and in the tiles of keys, that are visited."""
    blocks = packed.key_runs[:, 2] + packed.key_runs[:, 6]
    first_parts = packed.query_runs[(packed.query_runs[:, 2] == 0) & (packed.query_runs[:, 3] > 0)]
    return int(blocks.sum()) * BLOCK**2, int(first_parts[:, 1].sum()) * BLOCK * STEP


def _label(name: str) -> str:
    """The name of a kernel in a line of results."""
    if name.startswith("packed_attention_sm90"):
        return "forward"
    return next((label for label in ("dq", "dkv", "sums") if f"_{label}_" in name), "other")


def dense_gradients(packed, d_out, *operands, **limits):
    """The attention and its gradients in float32, with sinks and a window if limits have them."""
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in operands]
        out, pullback = jax.vjp(lambda q, k, v: dense.attend(q, k, v, packed, **limits), *wide)
        return out, *pullback(d_out.astype(jnp.float32))


def measure(shape: tuple[int, int, int, int], layout: str, *, check: bool) -> None:
    """Prints a line of results of a shape T, N, K, H, and may compare them with the dense form.

    The layout "100+8x280" has groups of a prompt of 100 tokens and 8 completions of 280.
    """
    tokens, heads, kv_heads, head_dim = shape
    prompt, completions = layout.split("+")
    packed = segments(fill(tokens, int(prompt), *map(int, completions.split("x"))))
    arrays = jax.tree.map(jnp.asarray, packed)
    live = (arrays.ids >= 0)[:, None, None]
    q, k, v, d_out = (
        jax.random.normal(jax.random.key(i), (tokens, n, head_dim), jnp.bfloat16)
        for i, n in enumerate((heads, kv_heads, kv_heads, heads))
    )
    d_out = jnp.where(live, d_out, 0)
    forward, backward = jax.jit(forward_sm90.attend), jax.jit(backward_sm90.gradients)
    out, lse = forward(q, k, v, arrays)
    saved = q, k, v, arrays, out, lse, d_out
    gradients = backward(*saved)
    _, times = timing.median_times(forward, q, k, v, arrays, runs=5, label=_label)
    times |= timing.median_times(backward, *saved, runs=5, label=_label)[1]
    backward_time = sum(time for label, time in times.items() if label != "forward")
    pairs = visible_pairs(packed)
    flops = 2 * pairs * head_dim * heads * 1e-12
    parts = ", ".join(f"{label} {1e6 * time:.0f}" for label, time in sorted(times.items()))
    forward_rate, backward_rate = 2 * flops / times["forward"], 5 * flops / backward_time
    queries, keys = (pairs / visited for visited in visited_pairs(packed))
    line = (
        f"{tokens:6} tokens, {heads}/{kv_heads} heads of {head_dim}, {layout}: "
        f"forward {1e6 * times['forward']:.0f} us, {forward_rate:.0f} TFLOP/s; "
        f"backward {1e6 * backward_time:.0f} us, {backward_rate:.0f} TFLOP/s ({parts}); "
        f"visible {queries:.2f} and {keys:.2f} of visited"
    )
    if check:
        dense_out, *expected = jax.jit(dense_gradients)(arrays, d_out, q, k, v)
        out, dense_out = (jnp.where(live, x, 0) for x in (out, dense_out))
        errors = [
            float(jnp.linalg.norm(x.astype(jnp.float32) - y) / jnp.linalg.norm(y))
            for x, y in zip((out, *gradients), (dense_out, *expected), strict=True)
        ]
        line += f"; error {max(errors):.1e}"
    print(line, flush=True)


def main() -> None:
    """Prints a line for each number of tokens, head shape and layout."""
    parser = timing.parser(__doc__)
    parser.add_argument("--tokens", default="8192,16384", help="lengths of the buffer")
    parser.add_argument("--heads", default="12/2,28/4,40/8", help="query heads / key heads")
    parser.add_argument("--head-dim", type=int, default=128, help="64 or 128")
    parser.add_argument(
        "--layouts", default=LAYOUTS, help="prompt + completions of a group x their length"
    )
    parser.add_argument("--no-check", action="store_true", help="skip the comparison")
    args = parser.parse_args()
    device.exit_unless_hopper()
    for tokens in map(int, args.tokens.split(",")):
        for heads in args.heads.split(","):
            query_heads, kv_heads = map(int, heads.split("/"))
            for layout in args.layouts.split(","):
                shape = tokens, query_heads, kv_heads, args.head_dim
                measure(shape, layout, check=not args.no_check)


if __name__ == "__main__":
    main()
