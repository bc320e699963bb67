"""Writes trained_moe/: a tiny Qwen3-MoE that was trained until its experts differ, and texts.

Random experts differ in everything and say nothing about a text. These have learned six languages:
each is a table with the likely successors of a token, and a text changes from one to another now
and then, so that a token has experts by its language and by itself. The auxiliary loss of the
training keeps all experts in use. The folder is a checkpoint in bfloat16, and has two texts that it
was not trained on, uint8 [B, T]: calibration.npy and held_out.npy.

Needs the project's own environment; takes two minutes on a CPU:

    python tests/golden/make_trained_moe.py
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from safetensors.numpy import save_file
from tiny_tokenizer import write_tokenizer

from qerl_jax.policy.config import ExpertsConfig, ModelConfig, to_hf_config
from qerl_jax.policy.layers import attention, kinds
from qerl_jax.policy.layers.linear import rms_norm
from qerl_jax.policy.layers.part import Own
from qerl_jax.weights import names

FOLDER = pathlib.Path(__file__).parent / "trained_moe"
VOCAB, LANGUAGES, WIDTH = 64, 6, 64
SUCCESSORS = np.array([0.6, 0.3, 0.1])
CHANGE = 0.02  # probability that the language changes
STEPS, ROWS, RATE, AUXILIARY = 1500, 32, 3e-3, 0.01
EXPERTS = ExpertsConfig(count=8, top_k=2, width=32, shared_width=0, normalized=True)
CONFIG = ModelConfig(
    model_type="qwen3_moe",
    vocab_size=VOCAB,
    embed_dim=64,
    mlp_dim=EXPERTS.active_width,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=10000.0,
    rope_scaling=None,
    norm_eps=1e-6,
    tie_embeddings=False,
    attention_bias=False,
    qk_norm=True,
    max_position=256,
    experts=EXPERTS,
)


class Text:
    """Draws rows of text."""

    def __init__(self, seed):
        tables = np.random.default_rng(0)
        order = [[tables.permutation(VOCAB)[:3] for _ in range(VOCAB)] for _ in range(LANGUAGES)]
        self.tables = np.array(order)
        self.random = np.random.default_rng(seed)

    def rows(self, count):
        """Returns int32 [count, T]."""
        token = self.random.integers(VOCAB, size=count)
        language = self.random.integers(LANGUAGES, size=count)
        found = [token]
        for _ in range(WIDTH - 1):
            changes = self.random.random(count) < CHANGE
            language = np.where(changes, self.random.integers(LANGUAGES, size=count), language)
            choice = self.random.choice(len(SUCCESSORS), size=count, p=SUCCESSORS)
            found.append(self.tables[language, found[-1], choice])
        return np.stack(found, axis=1).astype(np.int32)


def initial_params():
    """Returns random weights: stacked as the policy has them, but experts as [E, N, K]."""
    random = np.random.default_rng(1)

    def values(*shape):
        return jnp.asarray(random.standard_normal(shape, np.float32) / shape[-1] ** 0.5)

    shapes = kinds.projection_shapes(CONFIG)
    layers = []
    for number in range(CONFIG.num_layers):
        layer = {norm: jnp.ones(CONFIG.embed_dim) for norm in names.LAYER_NORMS}
        for fused, members in kinds.fused_of(CONFIG, number).items():
            layer[fused] = jnp.concatenate([values(*shapes[member]) for member in members])
        layer |= {name: values(*shape) for name, shape in kinds.stack_shapes(CONFIG, 0).items()}
        for name, shape in kinds.array_shapes(CONFIG, number).items():
            layer[name] = jnp.ones(shape) if name.endswith("norm") else values(*shape)
        layers.append(layer)
    table = VOCAB, CONFIG.embed_dim
    params = {"embed_tokens": values(*table), "lm_head": values(*table), "layers": layers}
    return params | {"norm": jnp.ones(CONFIG.embed_dim)}


def mixture(layer, h):
    """All experts of all tokens, each times its weight, and the auxiliary loss."""
    logits = h @ layer["router"].T
    best, ids = jax.lax.top_k(logits, EXPERTS.top_k)
    weights = (jax.nn.one_hot(ids, EXPERTS.count) * jax.nn.softmax(best)[..., None]).sum(axis=-2)
    gate, up = jnp.split(jnp.einsum("btd,end->bten", h, layer["experts_gate_up"]), 2, axis=-1)
    hidden = jax.nn.silu(gate) * up * weights[..., None]
    load = (weights > 0).mean(axis=(0, 1)), jax.nn.softmax(logits).mean(axis=(0, 1))
    auxiliary = EXPERTS.count * (load[0] * load[1]).sum()
    return jnp.einsum("btef,edf->btd", hidden, layer["experts_down"]), auxiliary


def loss(params, tokens):
    """Nats a token, and what the auxiliary loss adds."""
    x, auxiliary = params["embed_tokens"][tokens], 0.0
    positions = jnp.broadcast_to(jnp.arange(WIDTH), tokens.shape)
    angles = attention.rotary_angles(positions, CONFIG)
    lengths = jnp.full(len(tokens), WIDTH)
    for layer in params["layers"]:
        x = x + attention.mix(Own(layer, {}, CONFIG), x, lengths, angles)[0]
        h = rms_norm(x, layer["post_attention_layernorm"], CONFIG.norm_eps)
        added, balance = mixture(layer, h)
        x, auxiliary = x + added, auxiliary + AUXILIARY * balance
    logits = rms_norm(x, params["norm"], CONFIG.norm_eps)[:, :-1] @ params["lm_head"].T
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return nats + auxiliary, nats


def trained():
    """Returns the weights after the training."""
    params, text = initial_params(), Text(seed=2)
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, STEPS))

    @jax.jit
    def step(params, state, tokens):
        (_, nats), gradient = jax.value_and_grad(loss, has_aux=True)(params, tokens)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, nats

    state = optimizer.init(params)
    for number in range(STEPS):
        params, state, nats = step(params, state, text.rows(ROWS))
        if number % 100 == 0 or number == STEPS - 1:
            print(number, float(nats), flush=True)
    return params


def main():
    params = jax.device_get(trained())
    tensors = {}
    shapes = names.expected_shapes(CONFIG)
    for number, arrays in enumerate([*params["layers"], params]):
        number = number if number < CONFIG.num_layers else -1
        for array, parts in names.stored_tensors(CONFIG, number).items():
            value = arrays[array].reshape(-1, *shapes[parts[0]][1:])
            rows = np.cumsum([shapes[part][0] for part in parts])[:-1]
            tensors |= dict(
                zip(parts, np.split(value.astype(ml_dtypes.bfloat16), rows), strict=True)
            )
    FOLDER.mkdir(exist_ok=True)
    save_file(tensors, FOLDER / "model.safetensors", metadata={"format": "pt"})
    hf = json.dumps(to_hf_config(CONFIG), indent=2)
    (FOLDER / "config.json").write_text(hf + "\n")
    write_tokenizer(FOLDER, VOCAB)
    text = Text(seed=3)
    for name in ("calibration", "held_out"):
        np.save(FOLDER / f"{name}.npy", text.rows(48).astype(np.uint8))


if __name__ == "__main__":
    main()
