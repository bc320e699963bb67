"""Runs that take seconds: a random model of two layers, a few problems, and rewards that vary."""

import dataclasses
import itertools
import json
import os
import pathlib
import time
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import optax
import tiny_checkpoints

from qerl_jax.config.experiments.grpo_gsm8k import get_config
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.run.metrics import read_evaluations, read_steps
from qerl_jax.weights import names
from qerl_jax.weights.checkpoint import open_checkpoint
from qerl_jax.weights.peft import load_peft_adapter

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
    "model.calibration": "none",
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
    "rewards.format.function": f"{MODULE}:low_fraction",
    "aqn.stages": 2,
    "aqn.kl_every": 2,
    "aqn.kl_rows": 2,
    "rl.updates_per_rollout": 1,
    "optimizer.learning_rate": 1e-2,
    "optimizer.max_grad_norm": 1.0,
    "eval.every": 2,
    "eval.problems": 4,
    "eval.max_new_tokens": 4,
    "checkpoint.every": STEPS,
    "log.completions": 2,
    "log.tensorboard": False,
}


def write_model(folder, *, model_type="llama", **changes):
    """A random checkpoint with a chat template; its text is made of the words t0, t1, ..."""
    config = tiny_checkpoints.model_config(model_type, **changes)
    rng = np.random.default_rng(0)
    tensors = {
        name: (
            np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) * shape[1] ** -0.5
        ).astype(ml_dtypes.bfloat16)
        for name, shape in names.expected_shapes(config).items()
    }
    if model_type == "gpt_oss":
        tensors = tiny_checkpoints.published_gpt_oss(config, tensors)
    tiny_checkpoints.write_folder(folder, config, tensors)
    tiny_checkpoints.write_tokenizer(folder, chat_template=TEMPLATE)
    return folder


def momentum(learning_rate):
    """An optimizer for optimizer.name."""
    return optax.sgd(learning_rate, momentum=0.9)


def write_problems(path, *, count=24):
    """A JSONL file of problems with 2 to 4 words."""
    rng = np.random.default_rng(0)
    rows = [
        {"question": " ".join(f"t{i}" for i in rng.integers(40, size=2 + n % 3)), "answer": str(n)}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@dataclasses.dataclass(frozen=True)
class Tiny:
    """The inputs of runs: a model folder, a JSONL file, and a cache of compiled programs."""

    model: pathlib.Path
    problems: pathlib.Path
    compile_cache: pathlib.Path

    def config(self, changes=None, config=None):
        """A config (the default one) made tiny, with `changes` by flattened name."""
        config = config or get_config("qwen2.5-1.5b")
        config.update_from_flattened_dict(
            SETTINGS
            | {"model.source": str(self.model), "data.path": str(self.problems)}
            | (changes or {})
        )
        return config

    def config_file(self, path, changes=None, *, sketches=False):
        """Writes a config file for the command line; see `environment`, and `sketch`."""
        arguments = [repr(str(p)) for p in (self.model, self.problems, self.compile_cache)]
        sketch = "from qerl_jax.run import plots\nplots._make_axes = tiny_run.sketch\n"
        path.write_text(
            f"import pathlib, tiny_run\n{sketch if sketches else ''}"
            f"paths = map(pathlib.Path, ({', '.join(arguments)}))\n"
            f"def get_config():\n    return tiny_run.Tiny(*paths).config({changes!r})\n"
        )
        return path

    def environment(self):
        """The environment of a command, which finds this module and uses the compile cache."""
        path = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "JAX_COMPILATION_CACHE_DIR": str(self.compile_cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": str(
                jax.config.read("jax_disable_most_optimizations")
            ),
        }


def write_tiny(folder, compile_cache, **changes):
    """Writes the inputs of runs; `changes` are those of `write_model`."""
    return Tiny(
        model=write_model(folder / "model", **changes),
        problems=write_problems(folder / "problems.jsonl"),
        compile_cache=compile_cache,
    )


def results(run):
    """The rows of the steps in a run folder, without times and compilations."""
    times = "_seconds", "_per_second", "compiled_programs"
    return [
        {k: v for k, v in row.items() if not k.endswith(times)}
        for row in read_steps(run / "metrics.jsonl")
    ]


def evaluations(run):
    """The greedy accuracy by step in a run folder; step 0 is before training."""
    return read_evaluations(run / "metrics.jsonl")


def adapter(run, name="adapter"):
    """An adapter of a run folder, with the targets, rank and alpha of the run's config."""
    config = json.loads((run / "config.json").read_text())["config"]
    saved = config["lora"]
    lora_config = LoraConfig(
        rank=saved["rank"],
        alpha=saved["alpha"],
        rslora=saved["rslora"],
        targets=tuple(saved["targets"]),
        expert_rank=saved["expert_rank"],
    )
    return load_peft_adapter(run / name, architecture(config["model"]["source"]), lora_config).lora


def architecture(model):
    """The architecture of a model folder."""
    return open_checkpoint(str(model)).config


def contents(run):
    """The bytes of every file of a run folder except the lock."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def damage(path):
    """Flips a bit of a file, or of the largest file of a folder."""
    files = (file for file in path.rglob("*") if file.is_file())
    path = max(files, key=lambda file: file.stat().st_size, default=path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


class KilledError(BaseException):
    """Ends a run as abruptly as this process can survive."""


def sketch(count):
    """A figure without panels, and axes that draw nothing, in place of `plots._make_axes`."""
    from matplotlib.figure import Figure  # which only a process that draws has time for

    all_axes = [mock.MagicMock() for _ in range(count)]
    for axes in all_axes:
        axes.plot.return_value = [mock.MagicMock()]  # the line
    return Figure(figsize=(0.1, 0.1)), all_axes


def numbers(completion):
    return [int(word[1:]) for word in completion.split()]


def even_end(prompt, completion, answer, num_tokens, finished):
    """1.0 when the last word's number is even."""
    return float(bool(completion) and numbers(completion)[-1] % 2 == 0)


def low_fraction(prompt, completion, answer, num_tokens, finished):
    """The fraction of words in the lower half of the vocabulary."""
    return sum(number < 23 for number in numbers(completion)) / max(1, num_tokens)


def rare(prompt, completion, answer, num_tokens, finished):
    """1.0 when one of the first two words of the vocabulary occurs.

    With TINY_RUN_PAUSE=NUMBER:PATH in the environment, the call with this number creates the file
    and waits until the file is removed.
    """
    number, _, path = os.environ.get("TINY_RUN_PAUSE", "0:").partition(":")
    if next(_calls) == int(number):
        pathlib.Path(path).touch()
        while os.path.exists(path):
            time.sleep(0.01)
    return float(min(numbers(completion), default=46) < 2)


def loud(**_):
    """A noise schedule that is never zero."""
    return lambda step: np.float32(0.1)


_calls = itertools.count(1)
