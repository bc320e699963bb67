r"""Measures what four bits cost a policy: how each choice of the calibration moves it.

    uv run --extra cuda python -m benchmarks.calibration qwen2.5-coder-1.5b.gguf \
        --train=gsm8k_train.jsonl --test=gsm8k_test_first1000.jsonl --samples=16
    uv run --extra cuda python -m benchmarks.calibration --random=qwen2.5-72b --layers=10
    uv run python -m benchmarks.calibration --join=first.json,second.json

The first command calibrates a model once for each choice, on completions of training problems by
the rounded model, and compares the results with the weights in 16 bits. --runs adds the policies of
runs: base and last adapter. Its rows, kind "choice":

    kl, top1          KL(16 bits, choice) in nats a token, and the fraction of tokens at which both
                      find the same one the likeliest, on completions of test problems by the model
                      in 16 bits; `kl_interval` is half a 95 % interval over texts
    entropy           how much higher the entropy of the choice is at these tokens, in nats
    accuracy          mean of `samples` completions at temperature 1 of each test problem, and the
                      `difference` from 16 bits on the same problems, with their 95 % intervals over
                      problems; 16 bits have as many samples as all texts of a calibration together
    solved            by problem, how many of the samples are correct
    output_errors     by projection, the mean over layers of the mean squared error of the outputs
                      on the calibration text, relative to their mean square
    seconds           of quantizing, which of the first choice has the compilations

All choices sample and are compared as bfloat16 numbers that have the values of their four bits, and
runs with their adapter merged, so that one program serves all of them. They take turns at all
problems, until each has its samples or --seconds are over. --sampled says which ones do with 16
bits, as "rounded;gptq"; the others have a KL alone. A command with another --seed draws other
samples, and has rows of its own (`seeds`). --task=math asks with the prompt and the scorer of
the arms on competition mathematics.

The second command calibrates layers of random weights in the shapes of a model, which it writes to
a temporary folder in 16 bits. Its row, kind "random", has the seconds of the first layer (which
compiles), the mean of the others, and those of the whole model, which are computed from the two
where `layers` are not all (`computed`).

The third command copies the rows of commands that had different seeds to --out, and adds a row for
the mean of all texts that they sampled, each compared with 16 bits of its own command. Commit and
command of such a row are those of the first file.

Rows of the same model, choice, device and seeds are replaced in --out. On a copy of the project
without git, QERL_COMMIT names the commit.
"""

import argparse
import dataclasses
import functools
import pathlib
import resource
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common, merges
from benchmarks.random_checkpoint import write_random
from benchmarks.rollout.subject import check_names, model_name
from experiments.arms import evidence, evidence_math
from qerl_jax.commands import cli
from qerl_jax.data.prompts import encode_prompts, prompt_config
from qerl_jax.errors import UserError, check_limits
from qerl_jax.evaluation.load_policy import open_policy
from qerl_jax.evaluation.tasks import training_problems
from qerl_jax.export.merge import merged_layers
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.quant import QuantTensor, dequantize
from qerl_jax.quantization.calibration import (
    CalibrationOptions,
    calibrated_layers,
    calibrated_updates,
)
from qerl_jax.quantization.calibration_text import TextConfig, choose_prompts, cut_windows
from qerl_jax.weights.checkpoint import open_checkpoint
from qerl_jax.weights.load import load

KEYS = ("kind", "model", "task", "choice", "layers", "device", "seeds")


class Choice(NamedTuple):
    """What a choice changes of a calibration."""

    options: Mapping[str, Any] = {}  # of `CalibrationOptions`
    seed: int = 0  # of its text
    completions: int = 1  # of each prompt of the text
    by_16_bits: bool = False  # whether the model in 16 bits samples the text
    kept: str = ""  # the weight that is not calibrated, in all layers that have it
    bits: int = 16  # of this weight: as it is, or 8


EXACT, ROUNDED, DEFAULT = "16 bits", "rounded", "gptq"
_TEXTS = (DEFAULT, *(f"gptq, text {seed}" for seed in range(1, 5)))
# The rows that each text has: what their names end with, the weight that differs, and its bits.
_KINDS = {
    "": ("", 16),
    ", qkv_proj in 16 bits": ("qkv_proj", 16),
    ", qkv_proj in 8 bits": ("qkv_proj", 8),
}
# The rows that are the mean of all texts, each with the names of its rows.
_MEANS = {
    f"{DEFAULT}{kind}, mean of texts": tuple(text + kind for text in _TEXTS) for kind in _KINDS
}
CHOICES: dict[str, Choice] = {
    **{
        text + kind: Choice(seed=seed, kept=kept, bits=bits)
        for kind, (kept, bits) in _KINDS.items()
        for seed, text in enumerate(_TEXTS)
    },
    "gptq, four times the text": Choice(completions=4),
    "gptq, scales do not grow": Choice({"grow": False}),
    "gptq, columns as they stand": Choice({"orders": False}),
    "gptq, damping 0.001": Choice({"damping": 0.001}),
    "gptq, damping 0.1": Choice({"damping": 0.1}),
    "gptq, completions of the 16-bit model": Choice(by_16_bits=True),
    **{
        f"gptq, {weight} in 16 bits": Choice(kept=weight)
        for weight in ("o_proj", "gate_up_proj", "down_proj")
    },
}
_ARMS = {"gsm8k": evidence, "math": evidence_math}  # whose prompts, scorer and reward are used
_KL_TEXTS = 256  # problems on whose completions the KL is measured
_TURNS = 100_000  # more than the samples of a row in a command, so that seeds have other ones


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    out = "benchmarks/results/calibration.json"
    parser = common.make_parser("benchmarks.calibration", __doc__, out)
    add = parser.add_argument
    add("model", nargs="?", default="", help="folder, .gguf file or hub id of a model in 16 bits")
    add("--train", default="", help="FILE.jsonl of problems whose completions calibrate")
    add("--test", default="", help="FILE.jsonl of other problems, which all are measured on")
    add("--choices", default="", help="their names, separated by semicolons (default: all)")
    add("--runs", default="", help="run folders, separated by commas, whose policies are measured")
    add("--task", choices=list(_ARMS), default="gsm8k", help="the kind of problems (gsm8k)")
    add("--samples", type=int, default=0, help="completions per test problem (default: none)")
    add("--sampled", default="", help="names of the rows that sample (default: all)")
    add("--seed", type=int, default=0, help="seed of the samples (default: 0)")
    add("--seconds", type=float, default=0, help="time limit of the command (default: none)")
    add("--prompts", type=int, default=400, help="problems of a text (default: 400)")
    add("--new-tokens", type=int, default=512, help="limit of a completion (default: 512)")
    add("--windows", type=int, default=160, help="windows of a text (default: 160)")
    add("--width", type=int, default=512, help="tokens of a window (default: 512)")
    add("--random", default="", help="name of the shapes of random weights")
    add("--layers", type=int, default=0, help="layers of random weights (default: all)")
    add("--join", default="", help="files of rows, separated by commas, to bring together")
    return parser


class Measure:
    """A model in 16 bits, and what is sampled from its layers in four bits and compared with it."""

    def __init__(self, source: str, train: str, test: str, text: TextConfig, task: str):
        """Loads the model, compiles a sampler, and samples the texts of the KL.

        Raises:
            UserError: the model or the problems cannot be loaded.
        """
        self.text, self.source = text, source
        self.exact = load(source, format="bf16", dtype=_dtype())
        config = _ARMS[task].get_config()
        # Nothing is held out where other problems evaluate.
        config.data.path, config.data.eval_path = train, test
        run, limit = config.to_dict(), str(text.max_new_tokens)
        self.train = encode_prompts(
            training_problems(run, trusted=True),
            self.exact.tokenizer,
            prompt_config(run["data"]),
            max_prompt_tokens=run["data"]["max_prompt_tokens"],
        )
        problems = merges.read_prompts(self.exact, run, test, limit)
        self.policy = Policy(self.exact.params, None)
        self.held = merges.Held(
            self.exact,
            self.policy,
            problems,
            chunk_steps=config.rollout.chunk_steps,
            others=sorted(self.train, key=lambda prompt: len(prompt.ids))[-text.prompts :],
        )
        self.texts = self.held.texts(self.policy, _KL_TEXTS)
        self._sampled: dict[tuple[int, bool], tuple[list[tuple[int, ...]], list[list[int]]]] = {}
        self._calibrated: dict[str, tuple[list[dict], dict[str, Any]]] = {}

    def dense(self, layers: Iterable[dict]) -> Policy:
        """The policy with other layers, whose packed weights become dense, on the device."""
        pairs = zip(layers, self.exact.params["layers"], strict=True)
        dense = [
            {name: _dense(array, like=exact[name]) for name, array in own.items()}
            for own, exact in pairs
        ]
        return Policy(self.exact.params | {"layers": dense}, None)

    def rounded(self) -> list[dict]:
        """The layers rounded to the nearest NVFP4 numbers."""
        return load(self.source, format="nvfp4", dtype=_dtype()).params["layers"]

    def windows(self, choice: Choice, rounded: Policy) -> np.ndarray:
        """The text of a choice, int32 [B, T], as `rounded` or the model in 16 bits completes it."""
        key = choice.seed, choice.by_16_bits
        if key not in self._sampled:
            text = dataclasses.replace(self.text, seed=choice.seed)
            prompts = [prompt.ids for prompt in choose_prompts(self.train, text)]
            policy = self.policy if choice.by_16_bits else rounded
            self._sampled[key] = prompts, self.held.complete(policy, prompts, choice.seed)
        prompts, completions = self._sampled[key]
        ids: list[int] = []
        for number in range(choice.completions):
            for prompt, own in zip(prompts, completions[number :: merges.GROUP], strict=True):
                ids += [*prompt, *own]
        count = choice.completions * self.text.windows
        return cut_windows(ids, width=self.text.width, count=count)

    def calibrate(self, choice: Choice, rounded: Policy) -> tuple[list[dict], dict[str, Any]]:
        """The layers that a choice makes, on the host, with its seconds and errors."""
        own = choice._replace(kept="", bits=16)
        if repr(own) not in self._calibrated:
            self._calibrated[repr(own)] = self._calibrate(own, rounded)
        layers, found = self._calibrated[repr(own)]
        if not choice.kept:
            return layers, dict(found)
        pairs = zip(layers, self.exact.params["layers"], strict=True)
        kept, changed = {choice.kept}, in_8_bits if choice.bits == 8 else lambda weight: weight
        return [
            own | {name: changed(exact[name]) for name in kept & own.keys()} for own, exact in pairs
        ], {}

    def _calibrate(self, choice: Choice, rounded: Policy) -> tuple[list[dict], dict[str, Any]]:
        tokens = self.windows(choice, rounded)
        began = time.perf_counter()
        options = CalibrationOptions(reports_errors=True, **choice.options)
        layers = ((layer, {}) for layer in self.exact.params["layers"])
        packed = list(calibrated_updates(self.exact, layers, tokens, options))
        return [layer.arrays for layer in packed], {
            "seconds": time.perf_counter() - began,
            "text_tokens": int(tokens.size),
            "output_errors": _mean_squares([layer.errors for layer in packed]),
            "rounded_errors": _mean_squares([layer.rounded_errors for layer in packed]),
        }

    def of_run(self, folder: str) -> list[dict]:
        """The layers of the policy of a run in 16 bits, its adapter merged, on the host.

        Raises:
            UserError: it is no run, or that of another model.
        """
        policy = open_policy(folder, adapter="adapter")
        if policy.model.config != self.exact.config:
            raise UserError(f"--runs={folder}: it is a policy of another model than {self.source}")
        return list(merged_layers(policy.model, policy.lora, format="bf16", retention={}))

    def divergence(self, policy: Policy) -> dict[str, float]:
        """The figures of a policy about the texts of the model in 16 bits."""
        config = self.exact.config
        return merges.divergence(self.policy, policy.params, *self.texts, config=config)


def _dense(array: Any, *, like: jax.Array) -> jax.Array:
    if isinstance(array, QuantTensor):
        return _dequantized(array, dtype=like.dtype)
    return jnp.asarray(array, like.dtype)


@jax.jit
def in_8_bits(weight: jax.Array) -> jax.Array:
    """A weight [N, K] rounded to integers of 8 bits, with one scale for each of its rows."""
    wide = jnp.float32(weight)
    scale = jnp.maximum(jnp.abs(wide).max(axis=-1, keepdims=True), 1e-30) / 127
    return (jnp.round(wide / scale) * scale).astype(weight.dtype)


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantized(weight: QuantTensor, *, dtype: jnp.dtype) -> jax.Array:
    return dequantize(weight, dtype)


def _runs(folders: str) -> dict[str, str]:
    """The run folders that --runs names, by the names of their rows.

    Raises:
        UserError: two have the same name.
    """
    named: dict[str, str] = {}
    for folder in filter(None, folders.split(",")):
        name = f"run {pathlib.Path(folder).name}"
        if name in named:
            raise UserError(
                f"--runs: {named[name]} and {folder} would have the same row, {name!r}; "
                "rename a folder"
            )
        named[name] = folder
    return named


def _mean_squares(errors: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] ** 2 for row in errors) / len(errors) for name in errors[0]}


def _dtype() -> str:
    """The dtype of what is not packed: bfloat16 is slow on a CPU."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def measure_choices(arguments: argparse.Namespace, choices: Mapping[str, Choice]) -> None:
    """Measures the choices and the runs, and writes their rows as they come."""
    end = arguments.seconds and time.perf_counter() + arguments.seconds
    names = ("prompts", "windows", "width")
    text = {name: getattr(arguments, name) for name in names}
    text = TextConfig(max_new_tokens=arguments.new_tokens, **text)
    measure = Measure(arguments.model, arguments.train, arguments.test, text, arguments.task)
    shared = {"kind": "choice", "model": model_name(arguments.model), "task": arguments.task}
    shared |= {"layers": measure.exact.config.num_layers, "device": jax.devices()[0].device_kind}
    shared |= {"seeds": str(arguments.seed)}
    figures: dict[str, dict[str, Any]] = {}
    weights = set().union(*measure.exact.params["layers"])
    absent = [name for name, choice in choices.items() if not {choice.kept} <= weights | {""}]
    if absent and arguments.choices:
        raise UserError(f"--choices={absent[0]}: no layer of {arguments.model} has this weight")
    choices = {name: choice for name, choice in choices.items() if name not in absent}

    def add(choice: str, found: dict[str, Any]) -> None:
        row = figures.setdefault(choice, shared | {"choice": choice})
        row |= found | common.origin("benchmarks.calibration")
        common.merge(arguments.out, row, KEYS)

    candidates: dict[str, list[dict]] = {EXACT: measure.exact.params["layers"]}

    def compare(name: str, layers: list[dict], found: dict[str, Any]) -> Policy:
        candidates[name], policy = layers, measure.dense(layers)
        add(name, measure.divergence(policy) | found)
        return policy

    rounded = compare(ROUNDED, measure.rounded(), {})
    for name, choice in choices.items():
        layers, found = measure.calibrate(choice, rounded)
        of_rounding = {"output_errors": found.pop("rounded_errors", None)}
        if name == next(iter(choices)):
            add(ROUNDED, of_rounding)
        compare(name, layers, found)
    for name, folder in _runs(arguments.runs).items():
        compare(name, measure.of_run(folder), {})
    if not arguments.samples:
        return
    make = {name: functools.partial(measure.dense, layers) for name, layers in candidates.items()}
    sampled = arguments.sampled.split(";") if arguments.sampled else list(make)
    samples = {name: arguments.samples * (name in sampled) for name in make}
    # The mean of the texts is known best if 16 bits have as many as all of them together.
    texts = (len(set(members) & set(sampled)) for members in _MEANS.values())
    samples[EXACT] = arguments.samples * max(1, *texts)
    first = 1 + arguments.seed * _TURNS
    for name, passes in merges.take_turns(measure.held, make, samples, end, first):
        for own, found in merges.changed(name, passes, EXACT).items():
            counts = np.sum(passes[own], axis=0, dtype=int)
            add(own, found | {"solved": " ".join(map(str, counts))})
        for mean in means_of_texts(list(figures.values())):
            if name == EXACT or name in _MEANS[mean["choice"]]:
                add(mean["choice"], mean)


def means_of_texts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each mean of two or more sampled rows, which differ in their text or their seeds.

    It has the `samples` of the row with the fewest, and the origin of the first one.
    """
    exact = {row["seeds"]: row for row in rows if row["choice"] == EXACT and "solved" in row}
    means = []
    for mean, members in _MEANS.items():
        own = [row for row in rows if row["choice"] in members and "solved" in row]
        if len(own) < 2:
            continue
        correct = np.mean([_shares(row) for row in own], axis=0)
        of_exact = np.mean([_shares(exact[row["seeds"]]) for row in own], axis=0)
        found = merges.accuracies([correct], [of_exact])
        found |= {"samples": min(row["samples"] for row in own)}
        found |= {"texts": len({row["choice"] for row in own}), "choice": mean}
        found |= {"seeds": ", ".join(sorted({row["seeds"] for row in own}))}
        means.append({name: own[0][name] for name in (*KEYS, *common.ORIGIN)} | found)
    return means


def _shares(row: Mapping[str, Any]) -> np.ndarray:
    """The share of the samples of a row that is correct, by problem: float [P]."""
    return np.array(row["solved"].split(), int) / row["samples"]


def joined(files: Sequence[pathlib.Path]) -> list[dict[str, Any]]:
    """The rows of several files, and those of the means of all their texts.

    Raises:
        UserError: a file is absent, the rows are of several models, tasks or devices, or two have
            the same samples.
    """
    if absent := [path for path in files if not path.exists()]:
        raise UserError(f"--join: there is no {absent[0]}")
    rows = [row for path in files for row in common.read_rows(path, KEYS)]
    if len({tuple(row[key] for key in KEYS if key not in ("choice", "seeds")) for row in rows}) > 1:
        raise UserError("--join: the rows are of several models, tasks or devices")
    if len({(row["choice"], row["seeds"]) for row in rows}) < len(rows):
        raise UserError("--join: two files have rows of the same --seed")
    return rows + means_of_texts(rows)


def measure_random(model: str, layers: int, windows: int, width: int) -> dict[str, Any]:
    """The row of a calibration of layers of random weights; 0 is all layers."""
    whole = ARCHITECTURES[model]
    count = min(layers or whole.num_layers, whole.num_layers)
    tokens = np.random.default_rng(0).integers(0, whole.vocab_size, (windows, width), np.int32)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "model"
        write_random(folder, dataclasses.replace(whole, num_layers=count), packed=False)
        times = [time.perf_counter()]
        for number, _ in enumerate(calibrated_layers(open_checkpoint(str(folder)), tokens)):
            times.append(time.perf_counter())
            print(f"layer {number}: {times[-1] - times[-2]:.2f} s", flush=True)
    seconds = np.diff(times)
    later = float(seconds[1:].mean()) if count > 1 else None
    return {
        "kind": "random",
        "model": model,
        "task": "",
        "choice": DEFAULT,
        "seeds": "",
        "layers": count,
        "layers_of_model": whole.num_layers,
        "tokens": int(tokens.size),
        "first_layer_s": float(seconds[0]),
        "layer_s": later,
        "seconds": float(seconds.sum()),
        "whole_s": float(seconds.sum() + (whole.num_layers - count) * (later or seconds[0])),
        "computed": count < whole.num_layers,
        "peak_gb": common.peak_gb(),
        "host_peak_gb": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9,
        "device": jax.devices()[0].device_kind,
        **common.origin("benchmarks.calibration"),
    }


def run(arguments: argparse.Namespace) -> None:
    """Runs the benchmark with the parsed arguments."""
    limits = ("layers", 0), ("prompts", 1), ("new_tokens", 1), ("windows", 1), ("width", 8)
    limits += ("samples", 0), ("seconds", 0), ("seed", 0)
    check_limits(
        {f"--{name.replace('_', '-')}": (getattr(arguments, name), low) for name, low in limits}
    )
    common.check_out(arguments.out, KEYS)
    if arguments.join:
        for row in joined([pathlib.Path(path) for path in arguments.join.split(",")]):
            common.merge(arguments.out, row, KEYS)
        return
    if arguments.random:
        check_names([arguments.random], [])
        shape = arguments.layers, arguments.windows, arguments.width
        row = common.in_process(measure_random, arguments.random, *shape)
        common.merge(arguments.out, row, KEYS)
        return
    if not (arguments.model and arguments.train and arguments.test):
        raise UserError(
            "pass MODEL, --train=FILE.jsonl and --test=FILE.jsonl, --random=NAME or --join=FILES"
        )
    runs = _runs(arguments.runs)
    names = arguments.choices.split(";") if arguments.choices else list(CHOICES)
    if unknown := [name for name in names if name not in CHOICES]:
        raise UserError(f"--choices={unknown[0]}: choose from {'; '.join(CHOICES)}")
    rows = (EXACT, ROUNDED, *names, *runs)
    if unknown := [name for name in arguments.sampled.split(";") if name not in ("", *rows)]:
        raise UserError(f"--sampled={unknown[0]}: choose from {'; '.join(rows)}")
    if arguments.sampled and not arguments.samples:
        raise UserError("--sampled: nothing is sampled; pass --samples=NUMBER, too")
    measure_choices(arguments, {name: CHOICES[name] for name in names})


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
