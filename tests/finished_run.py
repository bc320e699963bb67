"""Run folders that look finished without training: a random adapter of a tiny model."""

import pathlib
import shutil

import numpy as np

from qerl_jax.policy.layers.kinds import projection_shapes
from qerl_jax.policy.lora import Lora, LoraConfig
from qerl_jax.policy.trainable import Trainable
from qerl_jax.run.folder import config_dict
from qerl_jax.run.ownership import write_config
from qerl_jax.weights.load import load
from qerl_jax.weights.peft import save_peft_adapter

LORA = LoraConfig(rank=4, alpha=8.0)
# What a run saves beside the arrays of a checkpoint.
META = {
    "cursor": {"epoch": 0, "index": 3},
    "fingerprint": "0a",
    "noise": {"sigma": None, "kl": None, "not_finite": 0},
    "problems": {"train": "1b", "eval": "2c"},
    "prompts": "3d",
    "reference": None,
}


def random_adapter(config, *, norms=False, size=0.1):
    rng = np.random.default_rng(0)
    layers = [
        {
            name: {
                "a": rng.standard_normal((LORA.rank, k), np.float32) / np.float32(k**0.5),
                "b": rng.standard_normal((n, LORA.rank), np.float32) * np.float32(size),
            }
            for name, (n, k) in projection_shapes(config).items()
        }
        for _ in range(config.num_layers)
    ]
    trained = {
        name: np.float32(1.0) + np.arange(config.embed_dim, dtype=np.float32) / np.float32(64)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    params = {"layers": [dict(trained) for _ in range(config.num_layers)]} if norms else {}
    return Trainable(lora=Lora(layers=layers, scale=LORA.scale), params=params)


def write_run(
    folder, tiny, *, own=False, model=None, summary=True, norms=False, size=0.1, **changes
):
    """A run folder that looks finished, with a random adapter; `changes` as in `Tiny.config`.

    It is that of another person, unless `own`.
    """
    model = tiny.model if model is None else model
    config = tiny.config({"model.source": str(model)} | changes)
    (folder / "checkpoints").mkdir(parents=True)
    described = {
        "config": config_dict(config),
        "schedule_steps": 4,
        "versions": {"python": "3.12", "jax": "0.11"},
        "git": {"commit": "0123abcd", "dirty": False},
        "device": {"platform": "cpu", "kind": "cpu", "count": 1},
        "command": "python -m experiments.grpo_gsm8k --config.steps=4",
        "created": "2026-01-02T03:04:05+0000",
    }
    write_config(folder / "config.json", described, signs=own)
    if summary:
        (folder / "summary.json").write_text('{"steps": 4}')
    base = load(str(model), format="stored")
    trained = random_adapter(base.config, norms=norms, size=size)
    save_peft_adapter(folder / "adapter", trained, LORA, base_model=base.source)
    return folder


def write_golden_run(folder, tiny, golden):
    """A run folder, `folder`/run, on a model of tests/golden in NVFP4, with a chat template."""
    model = shutil.copytree(pathlib.Path(__file__).parent / "golden" / golden, folder / "model")
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return write_run(folder / "run", tiny, own=True, model=model)
