"""Runs that take seconds: a random model of two layers, a few problems, and rewards that vary."""

import json
import pathlib
import time

import jax
import ml_dtypes
import numpy as np
import tiny_checkpoints

from experiments.configs.grpo_gsm8k import get_config
from qerl_jax.weights import names

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEMPLATE = (
    "{% for message in messages %}{{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}t1 t2{% endif %}"
)
MODULE = pathlib.Path(__file__).stem
STEPS = 4
SETTINGS = {
    "preset": "tiny",
    "steps": STEPS,
    "model.dtype": "float32",
    "lora.rank": 4,
    "lora.alpha": 8.0,
    "data.system_prompt": "",
    "data.question_suffix": "",
    "data.max_prompt_tokens": 16,
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 6,
    "rollout.chunk_steps": 3,
    "rewards.correctness.function": f"{MODULE}:even_end",
    "rewards.format.function": f"{MODULE}:low_share",
    "aqn.stages": 2,
    "aqn.kl_every": 2,
    "aqn.kl_rows": 2,
    "rl.updates_per_rollout": 1,
    "optimizer.learning_rate": 1e-2,
    "optimizer.max_grad_norm": 1.0,
    "train.micro_batch_rows": 4,
    "train.remat": False,
    "eval.every": 2,
    "eval.problems": 4,
    "eval.max_new_tokens": 4,
    "checkpoint.every": 1,
    "log.completions": 2,
    "log.tensorboard": False,
}


def write_model(folder, *, model_type="llama"):
    """A random checkpoint with a chat template; its text is made of the words t0, t1, ..."""
    config = tiny_checkpoints.model_config(model_type)
    rng = np.random.default_rng(0)
    tensors = {
        name: (
            np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) * shape[1] ** -0.5
        ).astype(ml_dtypes.bfloat16)
        for name, shape in names.expected_shapes(config).items()
    }
    tiny_checkpoints.write_folder(folder, config, tensors)
    tiny_checkpoints.write_tokenizer(folder, chat_template=TEMPLATE)
    return folder


def write_problems(path, *, count=24):
    """A JSONL file of problems with 2 to 4 words."""
    rng = np.random.default_rng(0)
    rows = [
        {"question": " ".join(f"t{i}" for i in rng.integers(40, size=2 + n % 3)), "answer": str(n)}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_config(model, problems, changes=None):
    """The default config made tiny; `changes` by flattened name."""
    config = get_config("qwen2.5-1.5b")
    settings = SETTINGS | {"model.source": str(model), "data.path": str(problems)}
    config.update_from_flattened_dict(settings | (changes or {}))
    return config


def numbers(completion):
    return [int(word[1:]) for word in completion.split()]


def even_end(prompt, completion, answer, num_tokens, finished):
    """1.0 when the last word's number is even."""
    return float(numbers(completion or "t1")[-1] % 2 == 0)


def low_share(prompt, completion, answer, num_tokens, finished):
    """The share of words in the lower half of the vocabulary."""
    return float(np.mean([number < 23 for number in numbers(completion)] or [0.0]))
