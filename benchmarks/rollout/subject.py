"""The policy that is measured, what the options allow, and the engine's arguments for it.

The options are the parsed arguments of `benchmarks.rollout`.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.rollout.random_policy import random_lora, random_params
from benchmarks.rollout.results import EXPERTS
from qerl_jax.compile.operation import Operation, commit
from qerl_jax.data.prompts import PromptConfig, encode_prompts
from qerl_jax.data.splits import ProblemConfig, load_split
from qerl_jax.errors import UserError, check_limits
from qerl_jax.evaluation.tasks import SYSTEM_PROMPT
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.sharding import (
    TENSOR,
    make_mesh,
    replicate_like,
    shard,
    shard_config,
    shard_params,
)
from qerl_jax.policy.tensor_parallel import shard_of
from qerl_jax.rollout import decode, shapes
from qerl_jax.rollout.config import EngineConfig, SamplingConfig
from qerl_jax.rollout.head import check_head_format, rollout_head
from qerl_jax.rollout.programs import operations
from qerl_jax.weights.layer_memory import compact_layers
from qerl_jax.weights.load import FORMATS, LoadedModel, load


@dataclasses.dataclass(frozen=True)
class RandomText:
    """A tokenizer of random token ids, of which the first `ends` end a row."""

    ends: int = 0
    pad_id: int = 0

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a row."""
        return tuple(range(self.ends)) or (-1,)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """No text: nothing here reads any."""
        del ids, skip_special
        return ""

    answer = decode

    def has_special(self, text: str) -> bool:
        """No text holds a special token."""
        del text
        return False


NO_TEXT = RandomText()


@dataclasses.dataclass(frozen=True)
class Subject:
    """A policy to measure: a rank of 0 has no adapter, random weights no `loaded` model."""

    model: str
    format: str
    model_config: ModelConfig
    params: dict
    lora_rank: int = 0
    lora: Lora | None = None
    loaded: LoadedModel | None = None
    mesh: Mesh | None = None
    expert_rank: int = 0

    @property
    def policy(self) -> Policy:
        """The arrays of the policy."""
        return Policy(self.params, self.lora)


def check(options: argparse.Namespace) -> None:
    """Validates the options, before any weight is made.

    Raises:
        UserError: a name that does not exist, or a number out of range.
    """
    check_names(() if options.source else options.model, options.format)
    limits = {
        "--batch": (min(options.batch), 1),
        "--prompt": (options.prompt, 1),
        "--new-tokens": (options.new_tokens, options.chunk_steps + 2),  # at least a second chunk
        "--lora-rank": (min(options.lora_rank), 0),
        "--expert-rank": (options.expert_rank, 0),
        "--tensor": (options.tensor, 1, len(jax.devices())),
        "--chunk-steps": (options.chunk_steps, 1),
        "--prompts": (options.prompts, 1),
        "--group": (options.group, 1),
        "--max-new-tokens": (options.max_new_tokens, 1),
        "--max-rows": (options.max_rows, 0),
    }
    check_limits(limits)
    check_head_format(options.head_format)
    policies = len(options.format) * len(options.lora_rank)
    policies *= 1 if options.source else len(options.model)
    one_policy = "pass one --model, --format, --lora-rank"
    startup, parts = options.startup, options.parts
    refused = {
        "--data: random weights solve nothing; pass real ones with --source=PATH": (
            options.data and not options.source
        ),
        f"--startup: a process begins once; {one_policy}": startup and policies > 1,
        "--parts measures the kernels of one device; pass --tensor=1": parts and options.tensor > 1,
        "--parts: the time of kernels is measured on an NVIDIA GPU only": (
            parts and jax.default_backend() != "gpu"
        ),
        f"--parts: CUDA graphs are slower after a profile; {one_policy}": parts and policies > 1,
    }
    for message, applies in refused.items():
        if applies:
            raise UserError(message)


def check_names(models: Sequence[str], formats: Sequence[str]) -> None:
    """Refuses the names of models and weight formats that do not exist.

    Raises:
        UserError: a name does not exist.
    """
    for kind, names, known in (("model", models, ARCHITECTURES), ("format", formats, FORMATS)):
        for name in names:
            if name not in known:
                raise UserError(f"unknown {kind} {name!r}: choose from {', '.join(known)}")


def first_problems(
    model: LoadedModel, path: str, count: int, new_tokens: int
) -> list[tuple[int, ...]]:
    """The token ids of the first problems of a JSONL file, as `experiments.evaluate` renders them.

    Raises:
        UserError: the file cannot be read, or holds fewer problems than --prompts, or one leaves no
            positions for the new tokens.
    """
    problems = load_split(ProblemConfig(path=path))
    if len(problems) < count:
        raise UserError(f"{path}: holds {len(problems)} problems; pass --prompts={len(problems)}")
    prompts = encode_prompts(
        problems[:count],
        model.tokenizer,
        PromptConfig(system_prompt=SYSTEM_PROMPT),
        max_prompt_tokens=model.config.max_position - new_tokens,
        remedy="pass fewer new tokens",
    )
    return [prompt.ids for prompt in prompts]


def model_name(source: str) -> str:
    """The name of real weights in the rows: the last part of their source."""
    return source.rstrip("/").rpartition("/")[2].removesuffix(".gguf")


def random_weights(model: str, format: str, *, mesh: Mesh | None = None) -> dict:
    """Random weights in the shapes of a model, as they are loaded, on one device or a mesh."""
    if mesh is not None:
        # Raises an error before the work.
        shard_of(ARCHITECTURES[model], mesh.shape[TENSOR], format=format)
    key = jax.random.key(0, impl="rbg")  # the fastest generator
    params = random_params(key, ARCHITECTURES[model], format=format, mesh=mesh)
    return params | {"layers": compact_layers(params["layers"])}


def make_subject(options: argparse.Namespace, model: str, format: str) -> Subject:
    """A policy without an adapter, with loaded or random weights."""
    began = time.perf_counter()
    mesh = make_mesh(1, options.tensor, jax.devices()[: options.tensor])
    loaded, architecture = None, ARCHITECTURES.get(model)
    if options.source:
        put = functools.partial(shard_params, mesh=mesh)
        loaded = load(options.source, format=format, put=put)
        model, architecture, params = model_name(options.source), loaded.config, loaded.params
    else:
        params = random_weights(model, format, mesh=mesh)
    assert architecture is not None
    params = shard(params, mesh) if mesh else params
    put = functools.partial(shard_params, config=architecture, mesh=mesh)
    params = jax.block_until_ready(params | rollout_head(params, options.head_format, put))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    seconds = time.perf_counter() - began
    print(f"{model} in {format}: {size / 1e9:.2f} GB of weights in {seconds:.0f} s", flush=True)
    return Subject(model, format, architecture, params, loaded=loaded, mesh=mesh)


def with_adapter(subject: Subject, rank: int, expert_rank: int = 0) -> Subject:
    """The policy with a random adapter of this rank; rank 0 is no adapter."""
    config, expert_rank = subject.model_config, expert_rank if rank else 0
    lora = None
    if rank:
        key = jax.random.key(0, impl="rbg")
        lora = random_lora(key, config, rank=rank, expert_rank=expert_rank)
        lora = shard(lora, subject.mesh) if subject.mesh else lora
    lora = jax.block_until_ready(lora)
    return dataclasses.replace(subject, lora_rank=rank, expert_rank=expert_rank, lora=lora)


def row_settings(subject: Subject, kind: str, options: argparse.Namespace) -> dict:
    """The fields of a row that describe the policy and the options."""
    names = ("tensor", "chunk_steps", "dequantize", "implementation", "head_format")
    experts = {"expert_rank": subject.expert_rank} if subject.expert_rank else {}
    return {
        "kind": kind + EXPERTS if experts else kind,
        **experts,
        "model": subject.model,
        "format": subject.format,
        "lora_rank": subject.lora_rank,
        "weights": "real" if options.source else "random",
        "kv_cache_dtype": "bfloat16",
        "device": jax.devices()[0].device_kind,
        **{name: getattr(options, name) for name in names},
    }


def engine_of(options: argparse.Namespace, max_rows: int, prompt_width: int = 0) -> EngineConfig:
    """The settings of the engine."""
    return EngineConfig(
        chunk_steps=options.chunk_steps,
        max_rows=max_rows,
        dequantize=options.dequantize,
        prompt_width=prompt_width,
        records_routes=True,
        drafts="off",
    )


def plan_of(
    subject: Subject,
    lengths: Sequence[int],
    new_tokens: int,
    group: int,
    options: argparse.Namespace,
    *,
    max_rows: int,
) -> shapes.RolloutShapes:
    """The engine's shapes for prompts of these lengths."""
    return shapes.plan_shapes(
        subject.params,
        num_prompts=len(lengths),
        longest=max(lengths),
        group_size=group,
        model_config=shard_config(subject.model_config, subject.params),
        sampling=SamplingConfig(max_new_tokens=new_tokens),
        engine=engine_of(options, max_rows),
    )


def plan_of_steps(
    subject: Subject, batch: int, options: argparse.Namespace, new_tokens: int = 0
) -> shapes.RolloutShapes:
    """The engine's shapes for a batch of --prompt tokens, and --new-tokens unless given."""
    lengths = [options.prompt] * batch
    new_tokens = new_tokens or options.new_tokens
    return plan_of(subject, lengths, new_tokens, 1, options, max_rows=batch)


def operations_of_steps(
    subject: Subject, batch: int, options: argparse.Namespace, new_tokens: int = 0
) -> tuple[Any, dict[Any, Operation]]:
    """The key and the policy as committed arrays, and the engine's operations for a batch."""
    plan = plan_of_steps(subject, batch, options, new_tokens)
    # No row ends early and all prompts have one length, so fewer programs are enough.
    width = next(width for width in plan.prompt_widths if width >= options.prompt)
    plan = dataclasses.replace(
        plan, batch_sizes=plan.batch_sizes[:1], prompt_widths=(width, plan.prompt_widths[-1])
    )
    key = replicate_like(jax.random.key(0), subject.params)
    key, policy = commit((key, subject.policy))
    static = decode.decode_config(
        shard_config(subject.model_config, policy.params),
        SamplingConfig(max_new_tokens=new_tokens or options.new_tokens),
        engine_of(options, batch),
        NO_TEXT,
    )
    return (key, *policy), operations(key, policy, plan, static)


def random_prompts(
    model_config: ModelConfig, batch: int, options: argparse.Namespace
) -> list[list[int]]:
    """Random prompts of equal length."""
    rng = np.random.default_rng(0)
    return rng.integers(0, model_config.vocab_size, (batch, options.prompt)).tolist()


def check_fits(subject: Subject, options: argparse.Namespace) -> None:
    """Raises a UserError for a batch that does not fit, before smaller batches are measured."""
    batch = max(options.batch)
    lengths = [options.prompt] * batch
    plan = plan_of(subject, lengths, options.new_tokens, 1, options, max_rows=0)
    fitting = plan.batch_sizes[0]
    if fitting < shapes.round_down(batch):
        raise UserError(
            f"--batch={batch}: besides {subject.model} in {subject.format} the memory holds "
            f"{fitting} rows of {plan.cache_positions} tokens; take it out, or lower --new-tokens"
        )
