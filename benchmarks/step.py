r"""Measures a GRPO step: seconds of rollout and update, and the memory that it takes.

    python -m benchmarks.step --model=qwen2.5-7b --format=nvfp4,bf16
    python -m benchmarks.step --model=qwen2.5-coder-1.5b --prompts=16 --new-tokens=512 --updates=4
    python -m benchmarks.step --model=qwen2.5-7b --mean-length=512
    python -m benchmarks.step --model=qwen2.5-7b --format=nvfp4 --mesh=data=1 --mesh=data=2
    python -m benchmarks.step --model=qwen2.5-72b --format=nvfp4 --mesh=data=1,tensor=2
    python -m benchmarks.step --model=qwen2.5-7b --format=nvfp4 --teacher=qwen2.5-32b \
        --out=teacher.json

The weights are random, made on the device in the shapes of the model, and the steps are those of a
run: `training.step.take_step` with every program compiled ahead. Random weights never end a
completion, so every row has --new-tokens. With --mean-length, one in that many token ids ends a
completion: lengths then are geometric with this mean, cut at --new-tokens. Rewards are drawn at
random, so no group has equal rewards and nothing is left out.

With --drawn the completions are drawn at random and nothing is sampled: of long rows the update is
measured alone. The row then has no rollout_s, step_s, samples_per_s and logprob_diff_mean, and
rows may be longer than the positions of the model.

With --teacher a random model in NVFP4 scores every token; its reverse KL is added to the rewards.

With --mesh=data=N,tensor=M the rows of a step are dealt out to N groups of M devices, and weights
are cut between the devices of a group; --prompts are those of one group. Several meshes are
measured one after the other, in the order given, so that they compare.

The groups may belong to several processes (docs/several_gpus.md), which this command does not start
by itself. On two GPUs:

    export JAX_COORDINATOR_ADDRESS=localhost:9876 JAX_NUM_PROCESSES=2
    COMMAND="python -m benchmarks.step --model=qwen2.5-7b --format=nvfp4 --mesh=data=2"
    CUDA_VISIBLE_DEVICES=1 JAX_PROCESS_ID=1 $COMMAND &
    CUDA_VISIBLE_DEVICES=0 JAX_PROCESS_ID=0 $COMMAND

Every mesh must then have all devices of all processes. Process 0 prints and writes.

Every measurement prints a line and at once writes its row to --out. A run replaces the rows of the
same model, format, lengths, mesh, processes and device. Times are medians over the steps after the
first; a step after the first that compiles anything ends the command. The columns are:

    rollout_s, update_s, step_s  seconds of sampling, of everything from scored completions to the
        new adapter, and from the start of a step to the next; with several processes rollout_s is
        that of the slowest one, and their exchange after it counts in step_s alone
    update_tokens_per_s   prompt and completion tokens of all rows, times updates, by update_s
    samples_per_s         completions of a step by step_s; a row on several devices also has
        samples_per_s_of_one, that of one device at the same commit, if --out holds it
    trained_tokens_per_s  positions that hold a token, times updates, by update_s
    logprob_diff_mean     mean difference of the log-probs of rollout and trainer, nats a token, in
        the steps without noise, as the first one: the trainer computes without it
    teacher_s             seconds of the teacher's pass over all rows, a part of update_s
    peak_gb, plan_gb      largest memory of process 0 on a device, which includes what was
        measured before, and what the plan of the update says
    pool_gb               memory of a device that JAX has, to which the plan fits a step
"""

import argparse
import dataclasses
import itertools
import math
import pathlib
import statistics
import time
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks import common
from qerl_jax.commands import cli

if TYPE_CHECKING:
    from qerl_jax.processes.group import Processes
    from qerl_jax.rollout.sampler import Sampler

_SETTINGS = ("prompt", "new_tokens", "mean_length", "group", "updates", "lora_rank")
KEYS = (
    *("model", "format", "batch", *_SETTINGS),
    *("recompute", "buffer_tokens", "mesh", "processes", "device"),
)


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = common.make_parser("benchmarks.step", __doc__, "benchmarks/results/step.json")
    add = parser.add_argument
    add("--model", default="qwen2.5-7b", help="comma-separated models (default: qwen2.5-7b)")
    add("--format", default="nvfp4,bf16", help="comma-separated weight formats")
    add("--teacher", default="", help="model that scores the tokens (default: none)")
    add("--prompts", type=int, default=1, help="prompts of a step on each group (default: 1)")
    add("--group", type=int, default=8, help="completions per prompt (default: 8)")
    add("--prompt", type=int, default=100, help="tokens per prompt (default: 100)")
    add("--new-tokens", type=int, default=2048, help="limit of a completion (default: 2048)")
    add("--mean-length", type=int, default=0, help="mean completion length (default: the limit)")
    add("--updates", type=int, default=1, help="updates per rollout (default: 1)")
    add("--lora-rank", type=int, default=32, help="rank of the adapter (default: 32)")
    add("--buffer-tokens", type=int, default=0, help="as train.buffer_tokens (default: the plan's)")
    add("--recompute", default="auto", help="as train.recompute (default: auto)")
    mesh = "devices, such as data=2 or data=1,tensor=2; may be repeated (default: data=1)"
    add("--mesh", action="append", type=read_mesh, help=mesh)
    add("--steps", type=int, default=3, help="measured steps, after a first one (default: 3)")
    add("--drawn", action="store_true", help="draw the completions, and measure the update alone")
    return parser


def read_mesh(text: str) -> tuple[int, int]:
    """The numbers N and M that 'data=N,tensor=M' names; one that is not named is 1."""
    sizes = {"data": 1, "tensor": 1}
    for part in text.split(","):
        axis, _, number = part.partition("=")
        if axis not in sizes or not number.isdecimal() or not int(number):
            raise argparse.ArgumentTypeError(f"{text!r}: write data=N,tensor=M with whole numbers")
        sizes[axis] = int(number)
    return sizes["data"], sizes["tensor"]


def _setup(
    arguments: argparse.Namespace,
    model: str,
    format: str,
    shape: tuple[int, int],
    processes: "Processes",
    changes: Mapping[str, Any],
    tokenizer: Any,
) -> Any:
    """The parts of a run with random weights, prompts and rewards; as in `measure`."""
    import jax
    import numpy as np

    from benchmarks.rollout.subject import RandomText, random_weights
    from qerl_jax.config.experiments.grpo_gsm8k import get_config
    from qerl_jax.data.prompts import Problem, Prompt
    from qerl_jax.memory.run_plan import PlannedTeacher
    from qerl_jax.policy.architectures import ARCHITECTURES
    from qerl_jax.policy.policy import Policy
    from qerl_jax.policy.sharding import make_mesh, shard
    from qerl_jax.training.setup import assemble, make_method
    from qerl_jax.training.teacher import Teacher
    from qerl_jax.weights.load import LoadedModel

    data, tensor = shape
    mesh = make_mesh(data, tensor, jax.devices()[: data * tensor])
    config, prompts = get_config(model), arguments.prompts * data
    config.update_from_flattened_dict(
        {
            "steps": arguments.steps + 1,
            "model.format": format,
            "lora.rank": arguments.lora_rank,
            "mesh.data": data,
            "mesh.tensor": tensor,
            "rollout.prompts_per_step": prompts,
            "rollout.group_size": arguments.group,
            "rollout.max_new_tokens": arguments.new_tokens,
            "rl.updates_per_rollout": arguments.updates,
            "aqn.kl_every": 0,
            "eval.every": 0,
            "train.buffer_tokens": arguments.buffer_tokens,
            "train.recompute": arguments.recompute,
            "teacher.source": arguments.teacher,
        }
        | dict(changes)
    )
    rng = np.random.default_rng(0)
    architecture = ARCHITECTURES[model]
    if arguments.drawn:
        positions = max(architecture.max_position, arguments.prompt + arguments.new_tokens)
        architecture = dataclasses.replace(architecture, max_position=positions)
    ends = architecture.vocab_size // arguments.mean_length if arguments.mean_length else 0
    teacher = None
    if arguments.teacher:
        planned = PlannedTeacher(ARCHITECTURES[arguments.teacher], format="nvfp4")
        weights = random_weights(arguments.teacher, planned.format, mesh=mesh)
        teacher = Teacher(Policy(jax.block_until_ready(weights), None), "", planned)
    params = random_weights(model, format, mesh=mesh)
    ids = rng.integers(0, architecture.vocab_size, (prompts, arguments.prompt)).tolist()
    setup = assemble(
        config,
        {"random": (lambda *_: float(rng.standard_normal()), 1.0)},
        LoadedModel(
            config=architecture,
            params=jax.block_until_ready(params),
            # pyrefly: ignore[bad-argument-type]
            tokenizer=RandomText(ends) if tokenizer is None else tokenizer,
            source=model,
            path=pathlib.Path(model),
            format=format,
            packed=False,
            fingerprint="",
        ),
        {"train": [Prompt(Problem(question="", answer=""), "", tuple(row)) for row in ids]},
        method=make_method(config, arguments.steps + 1),
        mesh=mesh,
        teacher=teacher,
    )
    processes.check_same(
        {"buffer_tokens": setup.memory.buffer_tokens, "recompute": list(setup.update.recompute)},
        "give all of them the same GPU memory",
    )
    if arguments.drawn:
        collect = dataclasses.replace(setup.collect, sampler=_drawing(setup.collect.sampler))
        setup = dataclasses.replace(setup, collect=collect)
    key = shard(setup.key, mesh) if processes.count > 1 else setup.key
    return dataclasses.replace(setup, processes=processes, key=key)


def _drawing(sampler: "Sampler") -> "Sampler":
    """The sampler with completions of full length that are drawn, all tokens alike."""
    import jax
    import numpy as np

    from qerl_jax.rollout.completions import Rollout
    from qerl_jax.rollout.progress import RolloutProgress, Statistics
    from qerl_jax.rollout.sampler import Sampler

    class Drawing(Sampler):
        def operations(self, key: Any, policy: Any, *, num_prompts: int) -> list:
            del key, policy, num_prompts
            return []

        def steps(
            self, key: Any, policy: Any, prompts: Any, *, ids: Any = None, dialog: Any = None
        ) -> Any:
            del policy, ids, dialog
            vocab_size = self.model_config.vocab_size
            shape = len(prompts) * self.group_size, self.sampling.max_new_tokens
            entropies = np.full(shape, math.log(vocab_size), np.float32)
            rollout = Rollout(
                tokens=np.asarray(jax.random.randint(key, shape, 0, vocab_size)),
                lengths=np.full(shape[0], shape[1], np.int32),
                finished=np.zeros(shape[0], bool),
                logprobs=-entropies,
                entropies=entropies,
            )
            done, work = np.ones(shape[0], bool), Statistics(len(prompts), 1, 1)
            yield RolloutProgress(done, shape[0] * shape[1], work, rollout)
            return rollout

    fields = dataclasses.fields(sampler)
    return Drawing(**{field.name: getattr(sampler, field.name) for field in fields})


def timed_steps(step: Callable[[], dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Takes steps to their end and returns their metrics with their `step_seconds`.

    Raises:
        UserError: a step after the first compiled something, so its time is no measurement.
    """
    from qerl_jax.compile.count import count_compilations
    from qerl_jax.errors import UserError

    steps = []
    with count_compilations() as compilations:
        for index in range(number):
            began = time.perf_counter()
            metrics = step()
            steps.append(metrics | {"step_seconds": time.perf_counter() - began})
            late = compilations.take()
            if index and late["compiled_programs"]:
                raise UserError(
                    f"step {index + 1} compiled {late['compiled_programs']} programs in "
                    f"{late['compile_seconds']:.1f} s, so its time is no measurement; nothing may "
                    "be compiled after the first step: please report it with this command"
                )
    return steps


def measure(
    arguments: argparse.Namespace,
    model: str,
    format: str,
    shape: tuple[int, int],
    processes: "Processes",
    changes: Mapping[str, Any] = types.MappingProxyType({}),
    tokenizer: Any = None,
) -> dict[str, Any]:
    """Takes the steps of one model on a mesh (data, tensor) and returns their row.

    `changes` are those of the config, by flattened name; `tokenizer` replaces the one without text.
    """
    import jax

    from qerl_jax.data.order import Cursor
    from qerl_jax.policy.sharding import groups_of, shard
    from qerl_jax.rl.train_step import init_state
    from qerl_jax.training.compile import compile_programs
    from qerl_jax.training.first_policy import first_trainable
    from qerl_jax.training.step import Progress, take_step

    data, tensor = shape
    setup = _setup(arguments, model, format, shape, processes, changes, tokenizer)
    trainable = first_trainable(setup.config, setup.model, setup.method.lora_config, setup.key)
    state = shard(init_state(trainable, setup.method.optimizer), setup.mesh)
    began = time.perf_counter()
    setup, programs = compile_programs(setup, state, trains=True, evaluates=False)
    compiled = time.perf_counter() - began
    progress = Progress(step=0, state=state, cursor=Cursor())

    def step() -> dict[str, Any]:
        nonlocal progress
        result = take_step(
            setup,
            progress,
            programs=programs,
            on_rollout=lambda *_: None,
            on_update=lambda: None,
        )
        progress = result.progress
        jax.block_until_ready(progress.state)
        return result.metrics

    steps = timed_steps(step, arguments.steps + 1)

    def median(name: str) -> float:
        return statistics.median(metrics[name] for metrics in steps[1:])

    groups = groups_of(setup.model.params)
    memory = [device.memory_stats() or {} for device in itertools.chain(*groups)]
    peak = max((stats["peak_bytes_in_use"] for stats in memory if stats), default=None)
    update, updates = median("train_seconds"), arguments.updates
    batch, seconds = arguments.prompts * data * arguments.group, median("step_seconds")
    # The trainer computes without the noise of a rollout, so only steps without noise count.
    differences = [row["logprob_diff_mean"] for row in steps if not row["sigma"]]
    sampled = {
        "rollout_s": median("rollout_seconds"),
        "step_s": seconds,
        "samples_per_s": batch / seconds,
        "logprob_diff_mean": statistics.median(differences),
    }
    taught = {"teacher_s": median("teacher_seconds")} if arguments.teacher else {}
    return {
        "model": f"{model} and {arguments.teacher}" if taught else model,
        "format": format,
        "batch": batch,
        **{name: getattr(arguments, name) for name in _SETTINGS},
        **(dict.fromkeys(sampled) if arguments.drawn else sampled),
        "update_s": update,
        **taught,
        "update_tokens_per_s": batch * (arguments.prompt + median("length")) * updates / update,
        "trained_tokens_per_s": median("packed_tokens") * updates / update,
        "update_buffers": median("update_buffers"),
        "buffer_tokens": setup.memory.buffer_tokens,
        "recompute": ",".join(setup.update.recompute) or "none",
        "compile_s": compiled,
        "peak_gb": None if peak is None else peak / 1e9,
        "plan_gb": setup.memory.peak / 1e9,
        "pool_gb": None if (pool := setup.memory.device.pool) is None else pool / 1e9,
        "devices": data * tensor,
        "mesh": f"data={data},tensor={tensor}",
        "processes": processes.count,
        "device": jax.devices()[0].device_kind,
        **common.origin("benchmarks.step"),
    }


def merge(path: pathlib.Path, row: dict[str, Any]) -> None:
    """Prints a row and writes it to a JSON file, in place of the row with the same keys.

    A row on several devices takes the samples per second of one device from the row of the same
    commit that has the same settings and as many samples for each device, if there is one.
    """
    if row["devices"] > 1:
        speeds = (
            other["samples_per_s"]
            for other in common.read_rows(path, KEYS)
            if other["devices"] == 1
            and other["commit"] == row["commit"]
            and _per_device(other) == _per_device(row)
        )
        row = row | {"samples_per_s_of_one": next(speeds, None)}
    common.merge(path, row, KEYS)


def _per_device(row: dict[str, Any]) -> tuple:
    """What a row has in common with that on another number of devices."""
    fixed = [row[key] for key in KEYS if key not in ("batch", "mesh", "processes")]
    return *fixed, row["batch"] // row["devices"]


def check(arguments: argparse.Namespace) -> None:
    """Validates the numbers, before any weight is made.

    Raises:
        UserError: a number is out of range.
    """
    from qerl_jax.errors import check_limits

    check_limits(
        {
            "--prompts": (arguments.prompts, 1),
            "--group": (arguments.group, 2),
            "--prompt": (arguments.prompt, 1),
            "--new-tokens": (arguments.new_tokens, 1),
            "--mean-length": (arguments.mean_length, 0),
            "--updates": (arguments.updates, 1),
            "--steps": (arguments.steps, 1),
        }
    )


def run(arguments: argparse.Namespace) -> None:
    """Runs the benchmark with the parsed arguments."""
    from benchmarks.rollout.subject import check_names
    from qerl_jax.processes.launch import connect

    models, formats = arguments.model.split(","), arguments.format.split(",")
    check_names([*models, *filter(None, [arguments.teacher])], formats)
    check(arguments)
    meshes = arguments.mesh or [(1, 1)]
    with connect(devices=max(map(math.prod, meshes))) as processes:
        settings = {name: str(value) for name, value in vars(arguments).items()}
        processes.check_same(settings, "start all of them with the same command")
        for data, tensor in meshes:
            _check_devices(data, tensor, processes)
        if processes.writes:
            common.check_out(arguments.out, KEYS)
        for model, format, mesh in itertools.product(models, formats, meshes):
            row = measure(arguments, model, format, mesh, processes)
            if processes.writes:
                merge(arguments.out, row)


def _check_devices(data: int, tensor: int, processes: "Processes") -> None:
    """Refuses a mesh that needs more devices than there are, or leaves a process without one."""
    import jax

    from qerl_jax.errors import UserError

    needed, available = data * tensor, len(jax.devices())
    if processes.count > 1 and needed != available:
        raise UserError(
            f"--mesh=data={data},tensor={tensor} has {needed} devices, the {processes.count} "
            f"processes have {available}: every mesh of several processes has all of their devices"
        )
    if needed > available:
        raise UserError(
            f"--mesh=data={data},tensor={tensor} needs {needed} devices, this process has "
            f"{available}"
        )


if __name__ == "__main__":
    cli.run_command(
        make_parser(), run, tensor_of=lambda own: max(size for _, size in own.mesh or [(1, 1)])
    )
