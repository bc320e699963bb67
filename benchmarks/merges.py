r"""Measures what merges of an adapter into four bits keep of the policy that was trained.

    uv run --extra cuda python -m benchmarks.merges RUN \
        --problems=gsm8k_test_first1000.jsonl

The rows are the policy of the run, base and last adapter (`trained`), and what could be exported of
it, as `experiments.export` makes it:

    base                  the base alone, as if nothing were kept
    bf16                  --format=merged
    plain onto nvfp4      --format=nvfp4 --onto=trained
    plain onto bf16       --format=nvfp4, its default where there are weights in 16 bits
    calibrated            --format=nvfp4 --calibration=gptq

    kl, top1      KL(trained, row) in nats a token, and the fraction of tokens at which both find
                  the same one the likeliest, on completions of the problems by the policy;
                  `kl_interval` is half a 95 % interval over texts
    entropy       how much higher the entropy of the row is than that of the policy at these tokens,
                  in nats
    kept, error   share of the update that is in the weights, and what is wrong with it, relative to
                  the update
    accuracy      mean of `samples` completions at temperature 1 of each problem, and the
                  `difference` from the policy on the same problems, with their 95 % intervals over
                  problems; of merges in 4 bits and the policy alone

The policies take turns at all problems, until each has its samples or --seconds are over. Merged
models sample with an adapter of zeros, so that all share their programs. Rows of the same model,
seed and form are replaced in --out. On a copy without git, QERL_COMMIT names the commit.
"""

import argparse
import collections
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from benchmarks.rollout.subject import model_name
from qerl_jax.commands import cli
from qerl_jax.data.prompt_rollout import PromptRollout
from qerl_jax.data.prompts import Prompt, encode_prompts
from qerl_jax.errors import UserError, check_limits
from qerl_jax.evaluation.greedy import is_correct, score_completions
from qerl_jax.evaluation.load_policy import LoadedPolicy, open_policy
from qerl_jax.evaluation.tasks import Task, TaskOverrides, make_tasks
from qerl_jax.export.merge import (
    UpdateRetention,
    calibrated_merge,
    calibration_windows,
    merged_layers,
)
from qerl_jax.policy import transformer
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.quant import in_machine_order
from qerl_jax.rewards.calls import resolve
from qerl_jax.rollout.config import EngineConfig, SamplingConfig
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.run import statistics
from qerl_jax.weights.load import LoadedModel

KEYS = ("model", "seed", "form")
TRAINED, CALIBRATED, PLAIN = "trained", "calibrated", "plain onto nvfp4"
_TEXTS = 128  # problems on whose completions the KL is measured
_ROWS = 640  # that decode together at most
_POSITIONS = 1_000_000  # of all these rows together; 29 GB of keys and values of a model of 1.5B
GROUP = 4  # completions of a problem in a pass: rows that wait take the slots of those that ended
_KL_POSITIONS = 3072  # of the rows that are compared together, with logits in float32

type Kept = dict[str, UpdateRetention]


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    out = "benchmarks/results/merges.json"
    parser = common.make_parser("benchmarks.merges", __doc__, out)
    add = parser.add_argument
    add("run", help="run folder with an adapter on a base in NVFP4")
    add("--problems", default="", help="FILE.jsonl (default: the problems that the run held out)")
    add("--max-new-tokens", default="", help="limit of a completion (default: the run's)")
    add("--samples", type=int, default=16, help="completions per problem (default: 16)")
    add(
        "--plain-samples",
        type=int,
        default=4,
        help=f"completions per problem of the merge '{PLAIN}' (default: 4)",
    )
    add("--seconds", type=float, default=0, help="time limit of the command (default: none)")
    return parser


def merges(policy: LoadedPolicy) -> Iterator[tuple[str, dict, Kept]]:
    """Yields the name, the parameters and the measures of the update of each merge of a policy."""
    assert policy.lora is not None
    assert policy.adapter is not None

    def on_device(layers: Iterator[dict]) -> dict:
        ready = [in_machine_order(jax.tree.map(jnp.asarray, layer)) for layer in layers]
        return policy.model.params | {"layers": ready}

    kept: Kept = {}
    tokens = calibration_windows(policy, trusted=True)
    layers = calibrated_merge(policy.model, policy.lora, tokens, retention=kept)
    yield CALIBRATED, on_device(layers), kept
    sources = {PLAIN: ("nvfp4", policy.model), "bf16": ("bf16", policy.model)}
    if not policy.base.packed:
        run, adapter = policy.adapter.parent, policy.adapter.name
        wide = open_policy(str(run), adapter=adapter, format="bf16")
        sources["plain onto bf16"] = "nvfp4", wide.model
    for name, (form, model) in sources.items():
        kept = {}
        yield name, on_device(merged_layers(model, policy.lora, format=form, retention=kept)), kept


def read_prompts(
    model: LoadedModel, run: Mapping[str, Any], problems: str, limit: str = ""
) -> tuple[Task, list[Prompt]]:
    """Loads the problems of a file, or those that a run held out, and renders them as the run does.

    `run` is its config, and `limit` replaces the one on the tokens of a completion, unless it is
    ''.

    Raises:
        UserError: they cannot be loaded.
    """
    names = [problems] if problems else []
    overrides = TaskOverrides(max_new_tokens=(limit,) if limit else ())
    (task,) = make_tasks(names, run=run, overrides=overrides, trusted=True)
    most = run["data"]["max_prompt_tokens"]
    return task, encode_prompts(task.problems, model.tokenizer, task.prompt, max_prompt_tokens=most)


class Held:
    """Problems that policies have not seen, and their completions."""

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        problems: tuple[Task, list[Prompt]],
        *,
        chunk_steps: int,
        others: Sequence[Prompt] = (),
    ):
        """Compiles a sampler for policies of the shapes of `policy`, whose model is `model`.

        `problems` is what `read_prompts` returns; `others` may be completed as well.
        """
        task, self.prompts = problems
        self.correctness = resolve(task.scorer, **task.options.get("scorer", {}))
        width = max(len(prompt.ids) for prompt in (*self.prompts, *others))
        count, new = max(len(self.prompts), len(others)), task.max_new_tokens
        self.width = width + new
        engine = EngineConfig(
            max_rows=min(_ROWS, _POSITIONS // self.width),
            chunk_steps=chunk_steps,
            drafts="off",  # They take programs, and pay for few rows alone.
            compact="once",
            prompt_width=width,
            num_prompts=count,
        )
        sampling = SamplingConfig(max_new_tokens=new, temperature=1.0)
        sampler = Sampler(model.config, model.tokenizer, sampling, engine, group_size=GROUP)
        if jax.default_backend() == "gpu":  # Several programs compile at a time.
            sampler = sampler.compiled(_key(0), policy, num_prompts=count)
        self.sampler = sampler

    def correct(self, policy: Policy, number: int) -> list[np.ndarray]:
        """Whether `GROUP` completions of each problem are correct, each float [P]."""
        with PromptRollout(self.sampler, _key(number), policy, self.prompts) as rollout:
            (progress,) = collections.deque(rollout, maxlen=1)
        ended = rollout.take(progress).values()
        scorers = {"correct": self.correctness}
        scores = score_completions(scorers, [one.to_score() for one in ended], time_limit=10.0)
        correct = np.nan_to_num(is_correct(scores.parts["correct"]))
        return list(correct.reshape(-1, GROUP).T)

    def texts(self, policy: Policy, count: int = _TEXTS) -> tuple[np.ndarray, np.ndarray]:
        """Prompts with completions by a policy, [B, T], and which tokens a sampled one follows."""
        prompts = [prompt.ids for prompt in self.prompts[:count]]
        tokens = np.zeros((len(prompts), self.width), np.int32)
        before = np.zeros(tokens.shape, bool)
        firsts = self.complete(policy, prompts, 0)[::GROUP]
        for row, (prompt, own) in enumerate(zip(prompts, firsts, strict=True)):
            end = len(prompt) + len(own)
            tokens[row, :end] = [*prompt, *own]
            before[row, len(prompt) - 1 : end - 1] = True
        return tokens, before

    def complete(
        self, policy: Policy, prompts: Sequence[Sequence[int]], number: int
    ) -> list[list[int]]:
        """`GROUP` completions of each prompt, one prompt after the other."""
        rollout = self.sampler.rollout(_key(number), policy, prompts)
        pairs = zip(rollout.tokens, rollout.lengths, strict=True)
        return [own[:length].tolist() for own, length in pairs]


def _key(number: int) -> jax.Array:
    return jax.random.key(number, impl="threefry2x32")


@functools.partial(jax.jit, static_argnames="config")
def _compare(params, lora, other, tokens, *, config):
    """KL of a policy to a model, how much higher that one's entropy is, and whether both agree."""
    lengths = jnp.full(len(tokens), tokens.shape[1])
    p, q = (
        jax.nn.log_softmax(jnp.float32(transformer.forward(*own, tokens, lengths, config=config)))
        for own in ((params, lora), (other, None))
    )
    kl = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    entropy = jnp.sum(jnp.exp(p) * p - jnp.exp(q) * q, axis=-1)
    return kl, entropy, p.argmax(axis=-1) == q.argmax(axis=-1)


def divergence(
    policy: Policy, params: dict, tokens: np.ndarray, before: np.ndarray, *, config: ModelConfig
) -> dict[str, float]:
    """The figures of a model about the texts of a policy, as `Held.texts` returns them."""
    rows = max(1, _KL_POSITIONS // tokens.shape[1])
    found = (
        jax.device_get(_compare(*policy, params, tokens[start : start + rows], config=config))
        for start in range(0, len(tokens), rows)
    )
    kl, entropy, same = (np.concatenate(part) for part in zip(*found, strict=True))
    by_text = np.array([row[own].mean() for row, own in zip(kl, before, strict=True)])
    return {
        "kl": float(kl[before].mean()),
        "kl_interval": statistics.Z95 * statistics.standard_error(by_text),
        "entropy": float(entropy[before].mean()),
        "top1": float(same[before].mean()),
        "tokens": int(before.sum()),
    }


def take_turns(
    held: Held,
    policies: Mapping[str, Callable[[], Policy]],
    samples: Mapping[str, int],
    end: float,
    first: int = 1,
) -> Iterator[tuple[str, dict[str, list[np.ndarray]]]]:
    """Lets policies complete all problems in turns, until each has its number of samples.

    The turns of a policy are spread evenly, so that all have the same share of theirs at any time.
    Yields the name of the policy whose turn it was, and what `Held.correct` has returned of each.
    At `end`, a time of `time.perf_counter`, there is no further turn; 0 for no end. `first` is the
    number of the first turn of each, on which its samples depend.
    """
    passes: dict[str, list[np.ndarray]] = {name: [] for name in policies}
    turns = [
        ((number + GROUP / 2) / samples[name], name)
        for name in policies
        for number in range(0, samples[name], GROUP)
    ]
    for _, name in sorted(turns, key=lambda turn: turn[0]):
        began, own = time.perf_counter(), passes[name]
        own += held.correct(policies[name](), first + len(own))[: samples[name] - len(own)]
        yield name, passes
        now = time.perf_counter()
        if end and now + (now - began) > end:
            print(f"stopped, as a turn takes {now - began:.0f} s", flush=True)
            return


def accuracies(correct: list[np.ndarray], trained: list[np.ndarray]) -> dict[str, Any]:
    """The figures of passes of a policy, [P] each, compared with those of the trained one."""
    values = np.mean(correct, axis=0)
    difference, low, high = statistics.paired_difference(values, np.mean(trained, axis=0))
    return {
        "accuracy": float(values.mean()),
        "accuracy_interval": statistics.Z95 * statistics.standard_error(values),
        "difference": difference,
        "difference_interval": (high - low) / 2,
        "samples": len(correct),
        "problems": len(values),
    }


def changed(
    name: str, passes: Mapping[str, list[np.ndarray]], trained: str
) -> dict[str, dict[str, Any]]:
    """The figures that a turn changes: those of its policy, or of all after one of the trained one.

    So all are compared with every sample that the trained one has.
    """
    names = [own for own in (passes if name == trained else [name]) if passes[own]]
    return {own: accuracies(passes[own], passes[trained]) for own in names if passes[trained]}


def run(arguments: argparse.Namespace) -> None:
    """Runs the benchmark with the parsed arguments."""
    start = time.perf_counter()
    check_limits(
        {
            "--samples": (arguments.samples, 0),
            "--plain-samples": (arguments.plain_samples, 0),
            "--seconds": (arguments.seconds, 0),
        }
    )
    common.check_out(arguments.out, KEYS)
    policy = open_policy(arguments.run, adapter="adapter")
    if policy.run is None or policy.lora is None or policy.base.format != "nvfp4":
        raise UserError(f"{arguments.run}: it is no run with an adapter on a base in NVFP4")
    config = policy.run["config"]
    origin = {"model": model_name(config["model"]["source"]), "seed": config["seed"]}
    figures: dict[str, dict[str, Any]] = {}

    def add(form: str, found: dict[str, Any]) -> None:
        own = figures.setdefault(form, {})
        own |= found
        row = origin | {"form": form} | own | {"steps": config["steps"]}
        row |= {"device": jax.devices()[0].device_kind, **common.origin("benchmarks.merges")}
        common.merge(arguments.out, row, KEYS)

    problems = read_prompts(policy.model, config, arguments.problems, arguments.max_new_tokens)
    steps = config["rollout"]["chunk_steps"]
    held = Held(policy.model, policy.policy, problems, chunk_steps=steps)
    texts = held.texts(policy.policy)
    compare = functools.partial(divergence, policy.policy, config=policy.model.config)
    add("base", compare(policy.base.params, *texts))
    nothing = jax.tree.map(jnp.zeros_like, policy.lora)
    policies = {TRAINED: policy.policy}
    for name, params, kept in merges(policy):
        whole = UpdateRetention()
        for part in kept.values():
            whole.add((part.overlap, part.update, part.error))
        found = compare(params, *texts)
        if whole.update:
            found |= {"kept": whole.kept_fraction, "error": whole.relative_error}
        add(name, found)
        if name != "bf16":
            policies[name] = Policy(params, nothing)
    samples = dict.fromkeys(policies, arguments.samples) | {PLAIN: arguments.plain_samples}
    make = {name: lambda own=own: own for name, own in policies.items()}
    end = arguments.seconds and start + arguments.seconds
    for name, passes in take_turns(held, make, samples, end):
        for own, found in changed(name, passes, TRAINED).items():
            add(own, found)


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
