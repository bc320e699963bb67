r"""Measures a GRPO step of TRL with vLLM in one process, with LoRA in bf16 or as QLoRA.

    python -m benchmarks.peers.step --model=qwen2.5-7b --folder=7b --ours=ours.json
    python -m benchmarks.peers.step --model=qwen2.5-7b --format=nf4 --rollout-format=bf16 ...
    python -m benchmarks.peers.step --rows=128 --micro=8 --drawn --liger --folder=7b --ours=...

It needs trl 1.16.0, vllm 0.22.0 (TRL takes 0.22.0 to 0.31.0), torch 2.11.0, transformers 5.17.0,
peft 0.21.2, datasets 5.2.0, accelerate 1.15.0, with nf4 bitsandbytes 0.50.2, and with --liger
liger-kernel 0.8.5.

A step is one prompt with --rows completions of full length, random rewards and one update. With
--format=bf16 it is TRL's own: colocated vLLM gets the merged weights before a rollout. With
--format=nf4 the trainer's base is NF4 (QLoRA). TRL would merge the adapter into the NF4 weights, so
vLLM here keeps its own base, in bf16 or NF4 (--rollout-format), and loads the adapter before each
rollout, as it does when it serves one. The KL penalty and the correction of the importance
sampling, which cost further forward passes, are off.

    rollout_s   seconds in which weights or the adapter go to vLLM and it completes the prompts
    step_s      seconds from the start of a step to the end of the optimizer's
    update_s    step_s minus rollout_s

All are medians over --steps steps after a first one. With --drawn the completions are drawn, all
tokens alike, and there is no vLLM: the row has the update alone. A forward and backward pass has
--micro rows (default: all of a step), and recomputes the layers. TRL's head never holds all logits;
with --liger, liger-kernel fuses it with the loss. vLLM keeps its defaults (CUDA graphs, prefix
caching, asynchronous scheduling) and gets the memory that its weights and these rows take, so that
it need not sleep during an update. Our row is `benchmarks.step` in NVFP4 at the same lengths.
"""

import argparse
import itertools
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.peers import decode, rows, update
from qerl_jax.commands import cli

_TRL = "trl==1.16.0 peft==0.21.2 datasets==5.2.0 accelerate==1.15.0"


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = update.make_parser("benchmarks.peers.step", __doc__)
    base = "vLLM's base; nf4 needs --format=nf4 (default: bf16)"
    formats = ("bf16", "nf4")
    parser.add_argument("--rollout-format", choices=formats, default="bf16", help=base)
    drawn = "draw the completions, and measure the update alone"
    parser.add_argument("--drawn", action="store_true", help=drawn)
    micro = "rows of a forward and backward pass (default: all)"
    parser.add_argument("--micro", type=int, default=0, help=micro)
    liger = "train with the kernels of liger-kernel"
    parser.add_argument("--liger", action="store_true", help=liger)
    return parser


def now() -> float:
    """The time in seconds when the card has done all of its work."""
    import torch  # pyrefly: ignore[missing-import]

    torch.cuda.synchronize()
    return time.perf_counter()


class Clock:
    """The seconds of the rollouts and steps of a trainer."""

    def __init__(self):
        self.rollouts: list[float] = []
        self.steps: list[float] = []
        self._began = 0.0

    def begin(self) -> None:
        """A step begins."""
        self.rollouts.append(0.0)
        self._began = now()

    def end(self) -> None:
        """A step ends."""
        self.steps.append(now() - self._began)

    def rollout(self, function: Callable) -> Callable:
        """The function, whose seconds count as rollout."""

        def timed(*arguments: Any, **options: Any) -> Any:
            began = now()
            result = function(*arguments, **options)
            self.rollouts[-1] += now() - began
            return result

        return timed


def adapter_rollout(engine: Any, new_tokens: int, folder: pathlib.Path) -> Callable:
    """A rollout for TRL in which vLLM takes the trainer's adapter, written to the folder."""
    from vllm.lora.request import LoRARequest  # pyrefly: ignore[missing-import]

    numbers = itertools.count(1)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        number = next(numbers)
        trainer.model.save_pretrained(folder / str(number))
        adapter = LoRARequest(f"step-{number}", number, str(folder / str(number)))
        ids = trainer.processing_class(prompts)["input_ids"]
        completions = decode.generate(engine, ids, new_tokens, adapter)
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    return rollout


def drawn_rollout(new_tokens: int) -> Callable:
    """A rollout for TRL whose completions have full length and are drawn, all tokens alike."""
    draw = random.Random(0)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids, vocab = trainer.processing_class(prompts)["input_ids"], trainer.model.config.vocab_size
        completions = [[draw.randrange(1, vocab) for _ in range(new_tokens)] for _ in prompts]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    return rollout


def make_trainer(
    arguments: argparse.Namespace,
    model: Any,
    clock: Clock,
    rollout: Callable | None,
    work: pathlib.Path,
) -> Any:
    """TRL's trainer of one prompt a step, with random rewards; it writes to the folder `work`.

    `rollout` is that of `adapter_rollout` or `drawn_rollout`; with None it is TRL's own, by
    colocated vLLM.
    """
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyrefly: ignore[missing-import]

    from benchmarks.random_checkpoint import word

    class Timed(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.end()

    draw, count, micro = random.Random(0), arguments.rows, arguments.micro or arguments.rows
    vocab = model.config.vocab_size
    prompts = [
        " ".join(word(draw.randrange(1, vocab)) for _ in range(arguments.prompt))
        for _ in range(arguments.steps + 1)
    ]
    trainer = GRPOTrainer(
        model=model,
        processing_class=PreTrainedTokenizerFast.from_pretrained(arguments.folder),
        reward_funcs=lambda completions, **_: [draw.gauss(0.0, 1.0) for _ in completions],
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[Timed()],
        rollout_func=rollout and clock.rollout(rollout),
        args=GRPOConfig(
            output_dir=str(work),
            max_steps=arguments.steps + 1,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=count // micro,
            num_generations=count,
            max_completion_length=arguments.new_tokens,
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-5,
            bf16=True,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            use_liger_kernel=arguments.liger,
            vllm_importance_sampling_correction=False,
            use_vllm=rollout is None,
            vllm_mode="colocate",
            vllm_max_model_length=arguments.prompt + arguments.new_tokens,
            vllm_gpu_memory_utilization=decode.engine_fraction(arguments, "bf16"),
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


def measure(arguments: argparse.Namespace, work: pathlib.Path) -> dict[str, Any]:
    """The seconds of the steps of a trainer; `work` is a folder for files."""
    import torch  # pyrefly: ignore[missing-import]

    model, clock, rollout = update.load_policy(arguments), Clock(), None
    if arguments.drawn:
        rollout = drawn_rollout(arguments.new_tokens)
    elif arguments.format == "nf4":
        engine = decode.make_engine(arguments, arguments.folder, arguments.rollout_format)
        rollout = adapter_rollout(engine, arguments.new_tokens, work / "adapters")
    update.reset_peak()
    make_trainer(arguments, model, clock, rollout, work).train()
    step, rollout_s = statistics.median(clock.steps[1:]), statistics.median(clock.rollouts[1:])
    return {
        "rollout_s": None if arguments.drawn else rollout_s,
        "update_s": step - rollout_s,
        "step_s": None if arguments.drawn else step,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "micro": arguments.micro or arguments.rows,
        "checkpointing": True,
    }


def run(arguments: argparse.Namespace) -> None:
    """Runs the benchmark with the parsed arguments."""
    from qerl_jax.errors import UserError

    is_nf4 = arguments.format == "nf4"
    if arguments.rollout_format == "nf4" and not is_nf4:
        raise UserError("--rollout-format=nf4 needs --format=nf4: TRL gives vLLM its own weights")
    if arguments.micro and (arguments.micro < 1 or arguments.rows % arguments.micro):
        raise UserError(f"--micro={arguments.micro}: pass a divisor of --rows={arguments.rows}")
    needed = decode.REQUIREMENTS.split() + _TRL.split() + (decode.NF4.split() if is_nf4 else [])
    needed += ["liger-kernel==0.8.5"] if arguments.liger else []
    if arguments.drawn:
        needed.pop(0)  # vLLM
    row = rows.begin(arguments, " ".join(needed))
    peer = ("TRL (QLoRA)" if is_nf4 else "TRL") + ("" if arguments.drawn else " + vLLM")
    row |= {"peer": peer, "attention": "sdpa", "format": arguments.format}
    row |= {"rollout_format": "" if arguments.drawn else arguments.rollout_format}
    decode.set_environment()
    with tempfile.TemporaryDirectory() as scratch:
        row |= measure(arguments, pathlib.Path(scratch))
    rows.save(arguments, "benchmarks.peers.step", row)


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
