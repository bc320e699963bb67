r"""Measures a GRPO step of TRL with vLLM in one process, with LoRA in bf16 or as QLoRA.

    python -m benchmarks.peers.step --model=qwen2.5-7b --folder=7b --ours=ours.json
    python -m benchmarks.peers.step --model=qwen2.5-7b --format=nf4 --rollout-format=bf16 ...

It needs trl 1.16.0, vllm 0.22.0 (TRL takes 0.22.0 to 0.31.0), torch 2.11.0, transformers 5.17.0,
peft 0.21.2, datasets 5.2.0, accelerate 1.15.0, and with nf4 bitsandbytes 0.50.2.

A step is one prompt with --rows completions of full length, random rewards and one update. With
--format=bf16 it is TRL's own: colocated vLLM gets the merged weights before a rollout. With
--format=nf4 the trainer's base is NF4 (QLoRA). TRL would merge the adapter into the NF4 weights, so
vLLM here keeps its own base, in bf16 or NF4 (--rollout-format), and loads the adapter before each
rollout, as it does when it serves one. The KL penalty and the correction of the importance
sampling, which cost further forward passes, are off.

    rollout_s   seconds in which weights or the adapter go to vLLM and it completes the prompts
    step_s      seconds from the start of a step to the end of the optimizer's
    update_s    step_s minus rollout_s

All are medians over --steps steps after a first one. --micro is the number of rows of a forward and
backward pass, and --no-checkpointing keeps the activations of the layers. `benchmarks.peers.update`
finds the fastest combination, but there vLLM takes no memory. Where a step does not fit, it is
tried again with the next smaller divisor of --micro, and after the smallest one with recomputation;
the row says which was taken. TRL's head never holds all logits. vLLM keeps its defaults (CUDA
graphs, prefix caching, asynchronous scheduling) and gets the memory that its weights and these rows
take, so that it need not sleep during an update. Our row is `benchmarks.step` in NVFP4 at the same
lengths.
"""

import argparse
import functools
import itertools
import os
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.peers import common, decode
from qerl_jax.commands import cli

_PACKAGES = decode.PACKAGES | {
    "trl": "1.16.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "accelerate": "1.15.0",
}


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = common.make_parser("benchmarks.peers.step", __doc__)
    add = parser.add_argument
    add("--format", choices=("bf16", "nf4"), default="bf16", help="trained base (default: bf16)")
    add(
        "--rollout-format",
        choices=("bf16", "nf4"),
        default="bf16",
        help="vLLM's base; nf4 needs --format=nf4 (default: bf16)",
    )
    add("--micro", type=int, default=0, help="rows of a pass (default: all of a step)")
    add(
        "--no-checkpointing",
        dest="checkpointing",
        action="store_false",
        help="keep the activations of the layers",
    )
    add("--attention", default="sdpa", help="attention of transformers (default: sdpa)")
    return parser


class Clock:
    """The seconds of the rollouts and steps of a trainer.

    Attributes:
        rollouts: seconds of each step's rollout.
        steps: seconds of each step.
    """

    def __init__(self):
        self.rollouts: list[float] = []
        self.steps: list[float] = []
        self._began = 0.0

    def begin(self) -> None:
        """A step begins."""
        common.synchronize()
        self.rollouts.append(0.0)
        self._began = time.perf_counter()

    def end(self) -> None:
        """A step ends."""
        common.synchronize()
        self.steps.append(time.perf_counter() - self._began)

    def rollout(self, function: Callable) -> Callable:
        """The function, whose seconds count as rollout."""

        def timed(*arguments: Any, **options: Any) -> Any:
            common.synchronize()
            began = time.perf_counter()
            result = function(*arguments, **options)
            common.synchronize()
            self.rollouts[-1] += time.perf_counter() - began
            return result

        return timed


def passes(micro: int, checkpointing: bool) -> Iterator[tuple[int, bool]]:
    """Yields rows per pass, and whether layers are recomputed, from the most memory to the least.

    Args:
        micro: largest number of rows; its divisors follow.
        checkpointing: whether layers are recomputed from the start on.
    """
    divisors = [count for count in range(micro, 0, -1) if micro % count == 0]
    for recompute in (True,) if checkpointing else (False, True):
        yield from ((count, recompute) for count in divisors)


def share_engine() -> None:
    """Makes TRL's trainers of this process share the first one's vLLM, which starts slowly.

    TRL sets the variables of a process of torchrun for vLLM. They are removed when it runs, or the
    next trainer would train in DistributedDataParallel.
    """
    from trl.generation import vllm_generation  # pyrefly: ignore[missing-import]

    make, engines = vllm_generation.LLM, []

    def shared(**options: Any) -> Any:
        if not engines:
            engines.append(make(**options))
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        return engines[0]

    vllm_generation.LLM = shared


def adapter_rollout(engine: Any, new_tokens: int, folder: pathlib.Path) -> Callable:
    """A rollout for TRL in which vLLM takes the trainer's adapter.

    Args:
        engine: from `decode.make_engine`.
        new_tokens: length of a completion.
        folder: where the adapter is written for vLLM.
    """
    from vllm.lora.request import LoRARequest  # pyrefly: ignore[missing-import]

    numbers = itertools.count(1)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        number = next(numbers)
        trainer.model.save_pretrained(folder / str(number))
        adapter = LoRARequest(f"step-{number}", number, str(folder / str(number)))
        ids = trainer.processing_class(prompts)["input_ids"]
        outputs = decode.generate(engine, ids, new_tokens, adapter)
        completions = [list(output.outputs[0].token_ids) for output in outputs]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    return rollout


def make_trainer(
    arguments: argparse.Namespace,
    model: Any,
    folder: pathlib.Path,
    rows: int,
    *,
    micro: int,
    checkpointing: bool,
    clock: Clock,
    rollout: Callable | None,
    work: pathlib.Path,
) -> Any:
    """TRL's trainer of one prompt a step, with random rewards.

    Args:
        arguments: parsed arguments of the command.
        model: a PEFT model.
        folder: its checkpoint, with the tokenizer.
        rows: completions of a step.
        micro: rows of a pass.
        checkpointing: whether the layers are recomputed.
        clock: measures its steps, and its rollouts.
        rollout: from `adapter_rollout`; None takes TRL's own colocated vLLM.
        work: folder for what the trainer writes.
    """
    import torch  # pyrefly: ignore[missing-import]
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyrefly: ignore[missing-import]

    class Timed(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.end()

    draw = random.Random(0)
    tokens, vocab = arguments.prompt + arguments.new_tokens, model.config.vocab_size
    prompts = [
        " ".join(common.word(draw.randrange(1, vocab)) for _ in range(arguments.prompt))
        for _ in range(arguments.steps + 1)
    ]
    trainer = GRPOTrainer(
        model=model,
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        reward_funcs=lambda completions, **_: [draw.gauss(0.0, 1.0) for _ in completions],
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[Timed()],
        rollout_func=rollout and clock.rollout(rollout),
        args=GRPOConfig(
            output_dir=str(work),
            max_steps=arguments.steps + 1,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=rows // micro,
            num_generations=rows,
            max_completion_length=arguments.new_tokens,
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-5,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            vllm_importance_sampling_correction=False,
            use_vllm=rollout is None,
            vllm_mode="colocate",
            vllm_max_model_length=tokens,
            vllm_gpu_memory_utilization=decode.engine_fraction(
                arguments.model, "bf16", rows=max(common.check(arguments)), tokens=tokens
            ),
            generation_kwargs={"ignore_eos": True, "detokenize": False} if not rollout else None,
            optim="adamw_torch_fused",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    if rollout is None:
        engine = trainer.vllm_generation
        engine.sync_weights = clock.rollout(engine.sync_weights)
        engine.generate = clock.rollout(engine.generate)
    return trainer


def measure_rows(
    arguments: argparse.Namespace, make: Callable, rows: int, micro: int, checkpointing: bool
) -> dict[str, Any] | None:
    """Times the steps of a trainer; None where they do not fit into the memory.

    Args:
        arguments: parsed arguments of the command.
        make: `make_trainer` with the arguments that all trainers share.
        rows: completions of a step.
        micro: rows of a pass.
        checkpointing: whether the layers are recomputed.
    """
    import torch  # pyrefly: ignore[missing-import]

    common.reset_peak()
    clock = Clock()
    try:
        make(rows, micro=micro, checkpointing=checkpointing, clock=clock).train()
    except torch.OutOfMemoryError:
        return None
    step, rollout = statistics.median(clock.steps[1:]), statistics.median(clock.rollouts[1:])
    return {
        "rollout_s": rollout,
        "update_s": step - rollout,
        "step_s": step,
        "peak_gb": common.peak_gb(),
        "micro": micro,
        "checkpointing": checkpointing,
    }


def measure(
    arguments: argparse.Namespace, counts: list[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields each number of rows, the largest first, with what `measure_rows` returns for it.

    Args:
        arguments: parsed arguments of the command.
        counts: numbers of rows of a step, in falling order.

    Raises:
        UserError: a step does not fit into the memory.
    """
    from qerl_jax.errors import UserError

    folder = common.model_folder(arguments)
    model = common.load_policy(
        folder, format=arguments.format, attention=arguments.attention, rank=arguments.lora_rank
    )
    choices = list(passes(arguments.micro or counts[0], arguments.checkpointing))
    with tempfile.TemporaryDirectory() as scratch:
        work, rollout = pathlib.Path(scratch), None
        if arguments.format == "nf4":
            engine = decode.make_engine(arguments, folder, arguments.rollout_format, counts[0])
            rollout = adapter_rollout(engine, arguments.new_tokens, work / "adapters")
        else:
            share_engine()
        make = functools.partial(make_trainer, arguments, model, folder, rollout=rollout, work=work)
        for rows in counts:
            choices = [choice for choice in choices if rows % choice[0] == 0]
            while choices:
                micro, checkpointing = choices[0]
                result = measure_rows(arguments, make, rows, micro, checkpointing)
                print(f"{rows} rows, {micro} per pass: {result or 'too large'}", flush=True)
                if result:
                    yield rows, result
                    break
                choices = choices[1:]  # Steps of fewer rows begin with the choice that fits here.
            else:
                raise UserError(f"{rows} rows: not even one row per pass fits into the memory")


def run(arguments: argparse.Namespace) -> None:
    """Runs the benchmark with the parsed arguments."""
    from qerl_jax.errors import UserError, check_limits

    counts = common.check(arguments)
    check_limits({"--micro": (arguments.micro, 0)})
    if arguments.micro and any(rows % min(arguments.micro, rows) for rows in counts):
        raise UserError(f"--micro={arguments.micro} does not divide the --rows={arguments.rows}")
    if arguments.rollout_format == "nf4" and arguments.format == "bf16":
        raise UserError("--rollout-format=nf4 needs --format=nf4: TRL gives vLLM its own weights")
    quantized = {"bitsandbytes": "0.50.2"} if arguments.format == "nf4" else {}
    packages = common.installed(_PACKAGES | quantized)
    our_rows = common.our_rows(arguments, counts)
    decode.set_environment()
    for rows, result in measure(arguments, counts):
        row = {
            "peer": "TRL + vLLM" if arguments.format == "bf16" else "TRL (QLoRA) + vLLM",
            "packages": packages,
            "format": arguments.format,
            "rollout_format": arguments.rollout_format,
            "batch": rows,
            "attention": arguments.attention,
            **result,
        }
        common.save_row(arguments, "benchmarks.peers.step", row, our_rows[rows])


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
