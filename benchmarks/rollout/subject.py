"""The options of the rollout benchmark, the policy, and the engine's arguments for it."""

import dataclasses
import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.rollout.random_policy import random_lora, random_params
from qerl_jax.data.prompts import Problem
from qerl_jax.data.splits import ProblemConfig, load_split
from qerl_jax.errors import UserError, check_limits
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.sharding import make_mesh, shard, shard_config, shard_params
from qerl_jax.policy.tensor_parallel import shard_of
from qerl_jax.rollout import shapes
from qerl_jax.rollout.config import EngineConfig, SamplingConfig
from qerl_jax.rollout.head import check_head_format, rollout_head
from qerl_jax.weights.layer_memory import compact_layers
from qerl_jax.weights.load import FORMATS, LoadedModel, load


class _NoText:
    """A tokenizer of random token ids, none of which ends a row."""

    eos_ids = (-1,)
    pad_id = 0

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        raise NotImplementedError("random token ids have no text")

    def has_special(self, text: str) -> bool:
        raise NotImplementedError("random token ids have no text")


NO_TEXT = _NoText()


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """The options of the benchmark.

    Attributes:
        models: names from `architectures.ARCHITECTURES`; unused with `source`.
        source: source of real weights, as in `load.load`; '' makes random weights.
        formats: weight formats, as in `load.load`.
        batches: batch sizes of the decode benchmark.
        prompt: tokens per prompt.
        new_tokens: new tokens per row.
        lora_ranks: ranks of the adapters on all seven projections; 0 is no adapter.
        tensor: number of devices that the weights are cut between.
        chunk_steps: decode steps per program call, as in `EngineConfig`.
        dequantize: 'once' or 'step', as in `EngineConfig`.
        implementation: kernel of packed weights, as in `fp4_matmul`; '' for the device's best.
        kv_cache_dtype: dtype of keys and values, as in `EngineConfig`.
        head_format: format of the head, as in `head.rollout_head`.
        parts: whether the parts of a step are measured too.
        startup: whether to measure the start of rollouts of `prompts` and `group` instead.
        began: `time.time()` when the command began.
        data: JSONL file of problems to complete with the weights of `source`, instead of the
            decode benchmark; '' measures decode steps.
        prompts: number of problems, or of random prompts in a startup.
        group: completions per prompt.
        max_new_tokens: limit of a completion in tokens.
        max_rows: largest decode batch in rows, as in `EngineConfig`.
        system_prompt: system message of the problems.
        seed: seed of weights, tokens and draws.
        bandwidth: bytes per second of the roofline; 0 takes the device's, where it is known.
        out: JSON file of the rows.
    """

    models: tuple[str, ...]
    source: str
    formats: tuple[str, ...]
    batches: tuple[int, ...]
    prompt: int
    new_tokens: int
    lora_ranks: tuple[int, ...]
    tensor: int
    chunk_steps: int
    dequantize: str
    implementation: str
    kv_cache_dtype: str
    head_format: str
    parts: bool
    startup: bool
    began: float
    data: str
    prompts: int
    group: int
    max_new_tokens: int
    max_rows: int
    system_prompt: str
    seed: int
    bandwidth: float
    out: str


@dataclasses.dataclass(frozen=True)
class Subject:
    """A policy to measure.

    Attributes:
        model: name of the policy in the rows.
        format: weight format of the projections.
        model_config: the architecture.
        params: the parameter tree.
        lora_rank: rank of the adapter; 0 is no adapter.
        lora: the adapter, or None where the rank is 0.
        loaded: the model that was loaded, or None for random weights.
        mesh: devices that the weights are cut between, or None for one device.
    """

    model: str
    format: str
    model_config: ModelConfig
    params: dict
    lora_rank: int
    lora: Lora | None
    loaded: LoadedModel | None = None
    mesh: Mesh | None = None

    @property
    def policy(self) -> Policy:
        """The arrays of the policy."""
        return Policy(self.params, self.lora)


def check(options: BenchmarkConfig) -> None:
    """Validates the options, before any weight is made.

    Raises:
        UserError: a name that does not exist, or a number out of range.
    """
    check_names(() if options.source else options.models, options.formats)
    limits = {
        "--batch": (min(options.batches, default=0), 1),
        "--prompt": (options.prompt, 1),
        "--new-tokens": (options.new_tokens, options.chunk_steps + 2),  # at least a second chunk
        "--lora-rank": (min(options.lora_ranks, default=-1), 0),
        "--tensor": (options.tensor, 1, len(jax.devices())),
        "--chunk-steps": (options.chunk_steps, 1),
        "--prompts": (options.prompts, 1),
        "--group": (options.group, 1),
        "--max-new-tokens": (options.max_new_tokens, 1),
        "--max-rows": (options.max_rows, 0),
        "--seed": (options.seed, 0),
        "--bandwidth": (options.bandwidth, 0),
    }
    check_limits(limits)
    check_head_format(options.head_format)
    if options.data and not options.source:
        raise UserError("--data: random weights solve nothing; pass real ones with --source=PATH")
    policies = len(options.formats) * len(options.lora_ranks)
    policies *= 1 if options.source else len(options.models)
    if options.startup and policies > 1:
        raise UserError("--startup: a process begins once; pass one --model, --format, --lora-rank")
    if options.startup and (options.data or options.parts):
        raise UserError("--startup measures nothing else; drop --data and --parts")
    if options.data and options.parts:
        raise UserError("--parts measures decode steps on random prompts; drop --data")
    if options.parts and options.tensor > 1:
        raise UserError("--parts measures the kernels of one device; pass --tensor=1")
    if options.parts and jax.default_backend() != "gpu":
        raise UserError("--parts: the time of kernels is measured on an NVIDIA GPU only")
    if options.parts and policies > 1:
        raise UserError(
            "--parts: CUDA graphs are slower after a profile; pass one --model, --format, "
            "--lora-rank"
        )


def check_names(models: Sequence[str], formats: Sequence[str]) -> None:
    """Refuses the names of models and weight formats that do not exist.

    Raises:
        UserError: a name does not exist.
    """
    for model in models:
        if model not in ARCHITECTURES:
            raise UserError(f"unknown model {model!r}: choose from {', '.join(ARCHITECTURES)}")
    for format in formats:
        if format not in FORMATS:
            raise UserError(f"unknown format {format!r}: choose from {', '.join(FORMATS)}")


def first_problems(path: str, count: int) -> list[Problem]:
    """The first problems of a JSONL file.

    Raises:
        UserError: the file cannot be read, or holds fewer problems than --prompts.
    """
    problems = load_split(ProblemConfig(path=path))
    if len(problems) < count:
        raise UserError(f"{path}: holds {len(problems)} problems; pass --prompts={len(problems)}")
    return problems[:count]


def model_name(source: str) -> str:
    """The name of real weights in the rows: the last part of their source."""
    return source.rstrip("/").rpartition("/")[2].removesuffix(".gguf")


def make_subject(options: BenchmarkConfig, model: str, format: str) -> Subject:
    """A policy without an adapter, with loaded or random weights."""
    began = time.perf_counter()
    key = jax.random.key(options.seed, impl="rbg")  # the fastest generator
    mesh = make_mesh(1, options.tensor, jax.devices()[: options.tensor])
    if options.source:
        place = functools.partial(shard_params, mesh=mesh)
        loaded = load(options.source, format=format, place=place)
        name = model_name(options.source)
        architecture, params = loaded.config, loaded.params
    else:
        loaded, name, architecture = None, model, ARCHITECTURES[model]
        shard_of(architecture, options.tensor, format=format)  # Raises an error before the work.
        params = random_params(key, architecture, format=format, mesh=mesh)
        params |= {"layers": compact_layers(params["layers"])}
    params = shard(params, mesh) if mesh else params
    place = functools.partial(shard_params, config=architecture, mesh=mesh)
    params = params | rollout_head(params, options.head_format, place)
    jax.block_until_ready(params)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    seconds = time.perf_counter() - began
    print(f"{name} in {format}: {size / 1e9:.2f} GB of weights in {seconds:.0f} s", flush=True)
    return Subject(
        model=name,
        format=format,
        model_config=architecture,
        params=params,
        lora_rank=0,
        lora=None,
        loaded=loaded,
        mesh=mesh,
    )


def with_adapter(subject: Subject, rank: int, seed: int) -> Subject:
    """The policy with a random adapter of this rank; rank 0 is no adapter."""
    lora = None
    if rank:
        lora = random_lora(jax.random.key(seed, impl="rbg"), subject.model_config, rank=rank)
        lora = shard(lora, subject.mesh) if subject.mesh else lora
    return dataclasses.replace(subject, lora_rank=rank, lora=jax.block_until_ready(lora))


def row_settings(subject: Subject, kind: str, options: BenchmarkConfig) -> dict:
    """The fields of a row that describe the policy and the options."""
    return {
        "kind": kind,
        "model": subject.model,
        "format": subject.format,
        "lora_rank": subject.lora_rank,
        "tensor": options.tensor,
        "weights": "real" if options.source else "random",
        "chunk_steps": options.chunk_steps,
        "dequantize": options.dequantize,
        "implementation": options.implementation,
        "kv_cache_dtype": str(shapes.cache_dtype(options.kv_cache_dtype, jnp.dtype("bfloat16"))),
        "head_format": options.head_format,
        "device": jax.devices()[0].device_kind,
    }


def sampling_of(new_tokens: int) -> SamplingConfig:
    """Returns completions of a length at temperature 1."""
    return SamplingConfig(max_new_tokens=new_tokens)


def engine_of(options: BenchmarkConfig, max_rows: int, prompt_width: int = 0) -> EngineConfig:
    """Returns the settings of the engine."""
    return EngineConfig(
        chunk_steps=options.chunk_steps,
        max_rows=max_rows,
        kv_cache_dtype=options.kv_cache_dtype,
        dequantize=options.dequantize,
        prompt_width=prompt_width,
    )


def plan_of(
    subject: Subject,
    lengths: Sequence[int],
    new_tokens: int,
    group: int,
    options: BenchmarkConfig,
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
        sampling=sampling_of(new_tokens),
        engine=engine_of(options, max_rows),
    )


def random_prompts(
    model_config: ModelConfig, batch: int, options: BenchmarkConfig
) -> list[list[int]]:
    """Random prompts of equal length."""
    rng = np.random.default_rng(options.seed)
    return rng.integers(0, model_config.vocab_size, (batch, options.prompt)).tolist()


def check_fits(subject: Subject, options: BenchmarkConfig) -> None:
    """Raises a UserError for a batch that does not fit, before smaller batches are measured."""
    batch = max(options.batches)
    plan = plan_of(
        subject, [options.prompt] * batch, options.new_tokens, 1, options, max_rows=batch
    )
    local_config = shard_config(subject.model_config, subject.params)
    prefill = shapes.prefill_bytes(
        local_config,
        num_prompts=plan.prefill_batch,
        width=plan.prompt_widths[-1],
        dtype=plan.dtype,
        compute=subject.params["embed_tokens"].dtype,
    )
    fitting = shapes.rows_left(
        subject.params,
        positions=plan.cache_positions,
        model_config=local_config,
        engine=engine_of(options, batch),
        reserve=prefill,
    )
    if fitting is not None and fitting < batch:
        raise UserError(
            f"--batch={batch}: beside {subject.model} in {subject.format} the memory holds "
            f"{fitting} rows of {plan.cache_positions} tokens; take it out, or lower --new-tokens"
        )
