r"""Measures how many routes of a mixture of experts the noise on the norm scales flips.

    uv run python -m benchmarks.router_noise tests/golden/trained_moe \
        --text=tests/golden/trained_moe/held_out.npy

The noise on post_attention_layernorm goes straight into the router, so that a sigma which moves a
dense model little may send tokens to other experts. Each row compares the noisy policy with the
clean one on a text of token ids, int [B, T], over several draws of the noise:

    routers        share of all routers of all tokens that choose another set of experts
    tokens         share of tokens with such a router in any layer
    kl             KL(noisy, clean) in nats a token
    kl_same_routes the same, if the noisy policy keeps the routes of the clean one

Rows of the same model, format, form and sigma are replaced in --out. On a copy of the project
without git, QERL_COMMIT names the commit.
"""

import argparse
from typing import Any

from benchmarks import common
from qerl_jax.commands import cli

KEYS = ("model", "format", "form", "sigma")
SIGMAS = 0.0005, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1
_TOKENS = 1024  # of a buffer


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    out = "benchmarks/results/router_noise.json"
    parser = common.make_parser("benchmarks.router_noise", __doc__, out)
    add = parser.add_argument
    add("model", help="folder, .gguf file or hub id of a mixture of experts")
    add("--text", required=True, help="FILE.npy with token ids [B, T]")
    add("--format", default="bf16", help="format of the weights (default: bf16)")
    add("--draws", type=int, default=8, help="draws of the noise (default: 8)")
    return parser


def measure(model: Any, tokens: Any, *, form: str, sigma: float, draws: int) -> dict[str, float]:
    """The figures of a row, for a loaded model and token ids int32 [B, T]."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.attention import PART_BITS, segments
    from qerl_jax.policy import aqn, transformer

    rows = max(1, _TOKENS // tokens.shape[1])
    width = tokens.shape[1]

    @jax.jit
    def run(params, tokens, own, routes=None):
        positions = jnp.tile(jnp.arange(width), tokens.size // width)
        hidden, chosen = transformer.packed_hidden_states(
            params, None, tokens, positions, own, config=model.config, routes=routes
        )
        return jax.nn.log_softmax(transformer.logits(params, hidden)), chosen

    def kl(noisy, clean):
        return float((jnp.exp(noisy) * (noisy - clean)).sum(axis=-1).mean())

    found = []
    for start in range(0, len(tokens), rows):
        batch = tokens[start : start + rows]
        own = segments(np.repeat(np.arange(len(batch), dtype=np.int32) << PART_BITS, width))
        clean, routes = run(model.params, batch.reshape(-1), own)
        for draw in range(draws):
            noise = aqn.Noise(key=jax.random.key(draw), sigma=sigma, form=form, final_norm=False)
            params = aqn.add_noise(model.params, noise)
            noisy, chosen = run(params, batch.reshape(-1), own)
            same, _ = run(params, batch.reshape(-1), own, routes)
            is_flipped = jnp.any(jnp.sort(chosen) != jnp.sort(routes), axis=-1)
            figures = is_flipped.mean(), is_flipped.any(axis=0).mean()
            found.append([batch.size, *map(float, figures), kl(noisy, clean), kl(same, clean)])
    weights, *columns = np.array(found).T
    names = "routers", "tokens", "kl", "kl_same_routes"
    return {n: float(np.average(c, weights=weights)) for n, c in zip(names, columns, strict=True)}


def run(arguments: argparse.Namespace) -> None:
    """Runs the benchmark with the parsed arguments."""
    import jax
    import numpy as np

    from benchmarks.rollout.subject import model_name
    from qerl_jax.errors import UserError, check_limits
    from qerl_jax.policy import aqn
    from qerl_jax.policy.layers import kinds
    from qerl_jax.quantization.calibration_text import check_tokens
    from qerl_jax.weights.load import load

    check_limits({"--draws": (arguments.draws, 1)})
    common.check_out(arguments.out, KEYS)
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    model = load(arguments.model, format=arguments.format, dtype=dtype)
    if not kinds.stack_shapes(model.config, 0):
        raise UserError(f"{arguments.model}: it is no mixture of experts, and has no routes")
    tokens = check_tokens(
        np.load(arguments.text).astype(np.int32), model.config.vocab_size, arguments.text
    )
    for form in aqn.FORMS:
        for sigma in SIGMAS:
            figures = measure(model, tokens, form=form, sigma=sigma, draws=arguments.draws)
            row = {
                "model": model_name(arguments.model),
                "format": model.format,
                "form": form,
                "sigma": sigma,
                **figures,
                "measured_tokens": int(tokens.size),
                "draws": arguments.draws,
                "device": jax.devices()[0].device_kind,
                **common.origin("benchmarks.router_noise"),
            }
            common.merge(arguments.out, row, KEYS)


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
