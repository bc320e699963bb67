r"""Compares the greedy accuracy of an exported policy elsewhere with the one measured here.

    python -m experiments.evaluate RUN --adapter=adapter --tasks=gsm8k --limit=200 --out=eval
    python -m experiments.export RUN --format=peft --with-base --out=served
    python -m benchmarks.peers.serve eval --task=gsm8k --base=served-base --adapter=served \
        --out=served.json
    python -m benchmarks.peers.serve eval --engine=transformers ...
    python -m benchmarks.peers.serve eval --engine=llama.cpp --base=gguf/base-NVFP4.gguf \
        --adapter=gguf/adapter.gguf --policy=RUN --out=llama_cpp.json

vLLM needs vllm 0.22.0; transformers needs peft 0.21.2, and for a base in NVFP4 compressed-tensors;
llama.cpp runs on the CPU in the environment whose Python QERL_LLAMA_CPP_PYTHON names, which has
llama-cpp-python 0.3.36, with QERL_LLAMA_CPP_THREADS threads (default: 1).
The first argument is a folder of `experiments.evaluate` with a greedy completion of each problem.
The engine loads the exported base with the adapter of the export, renders the questions with the
exported chat template, completes them greedily to the same limit, and the scorer of the evaluation
decides what is correct. The command prints both accuracies with their 95 % intervals and the
difference on the same problems. It fails where 0 lies outside the interval of the difference.
Greedy completions differ at near-ties, so equal texts are only counted, and completions that begin
with the same token. With --policy there is also `kl`, the mean KL(policy here, llama.cpp) in nats a
token on some of our completions with their prompts, and the fraction of tokens `top1` at which both
find the same one the likeliest. llama.cpp is slow: --answers=FILE.jsonl keeps its completions after
every 50 problems, and a later call with the same evaluation and export continues after them.
"""

import argparse
import functools
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks import common
from benchmarks.peers import decode, rows
from qerl_jax.commands import cli
from qerl_jax.system.paths import user_path

_PROMPT_TOKENS = 1024  # vLLM refuses a longer prompt
# Rows that decode together. vLLM captures CUDA graphs for up to twice as many, which takes long.
_ROWS = 64
_TRANSFORMERS_ROWS = 100  # A step of transformers takes as long for one row.
_SCORE_SECONDS = 5.0  # for a call of the scorer, as in `experiments.evaluate`
_LLAMA_CPP_ROWS = 50  # problems that llama.cpp completes in one process
_KL_TEXTS = 6
_LLAMA_CPP = pathlib.Path(__file__).with_name("llama_cpp_runner.py")
_TRANSFORMERS = "torch==2.11.0 transformers==5.17.0 peft==0.21.2"

type Served = list[tuple[str, int, bool]]  # text, number of tokens, whether it ended by itself
type Rows = Sequence[dict[str, Any]]  # of an evaluation, one greedy completion of each problem


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = common.make_parser("benchmarks.peers.serve", __doc__)
    add = parser.add_argument
    add("--engine", choices=tuple(ENGINES), default="vllm", help="what completes (default: vllm)")
    add("evaluation", type=user_path, help="folder with results.json and TASK.jsonl")
    add("--task", default="gsm8k", help="name of the task (default: gsm8k)")
    add("--judge", default="", help="reward that scores (default: the evaluation's, if built in)")
    add("--base", type=user_path, required=True, help="folder of the exported base")
    add("--adapter", type=user_path, help="folder of the exported adapter (default: none)")
    add("--policy", default="", help="run whose last adapter llama.cpp is compared with")
    add("--answers", type=user_path, help="file of llama.cpp's completions (default: none)")
    add("--limit", type=int, default=0, help="number of problems (default: all)")
    return parser


def read_evaluation(
    folder: pathlib.Path, task: str, judge: str = ""
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings of a task, with the reward `judge` unless that is '', and its rows.

    Raises:
        UserError: the folder holds no such task, its completions are not greedy, or its reward is
            not built in.
    """
    from qerl_jax.errors import UserError
    from qerl_jax.rewards.calls import is_built_in
    from qerl_jax.system import json_file
    from qerl_jax.system.jsonl import read_jsonl

    path = folder / "results.json"
    results = json_file.read_object(path, remedy="name the folder of an evaluation")
    if task not in results["tasks"]:
        raise UserError(f"{path}: has no task {task}, only {', '.join(results['tasks'])}")
    settings = results["settings"]
    if settings["samples"] != 1 or settings["temperature"]:
        raise UserError(f"{path}: the completions are not greedy; evaluate without --samples")
    settings = results["tasks"][task]
    if judge:
        settings["judge"] = judge
    elif not is_built_in(settings["judge"]):
        raise UserError(
            f"{path} names the reward {settings['judge']!r}, and a file names no code to execute: "
            f"pass --judge={settings['judge']} to call it"
        )
    return settings, list(read_jsonl(folder / f"{task}.jsonl"))


def messages_of(settings: dict[str, Any], question: str) -> list[dict[str, str]]:
    """The chat messages of a question, as the evaluation has them."""
    from qerl_jax.data.prompts import example_turns

    system, suffix = settings["system_prompt"], settings["question_suffix"]
    turns = [("system", system)] if system else []
    turns += [*example_turns(settings.get("examples", ()), suffix), ("user", question + suffix)]
    return [{"role": role, "content": content} for role, content in turns]


def scored(settings: dict[str, Any], problems: Rows, served: Served) -> list[bool]:
    """Whether each served completion is correct."""
    from qerl_jax.rewards.calls import resolve
    from qerl_jax.rewards.score import score

    texts, tokens, finished = zip(*served, strict=True)
    scores = score(
        {"correct": (resolve(settings["judge"]), 1.0)},
        [row["question"] for row in problems],
        texts,
        [row["gold"] for row in problems],
        tokens,
        finished,
        time_limit=_SCORE_SECONDS,
    )
    return (scores.parts["correct"] > 0.5).tolist()  # A missing score, NaN, is not correct.


def compare(
    problems: Rows, served: Sequence[str], correct: Sequence[bool], *, engine: str
) -> dict[str, Any]:
    """Both accuracies, their intervals, and the interval of their difference.

    `served` are the completions of the engine, and `correct` says which of them are correct.
    """
    import numpy as np

    from qerl_jax.run import statistics

    ours = np.array([row["correct"] is True for row in problems], np.float64)
    theirs = np.array(correct, np.float64)
    same_text = [row["completion"] == text for row, text in zip(problems, served, strict=True)]
    difference, low, high = statistics.paired_difference(theirs, ours)
    result = {
        name: {"value": float(values.mean()), "interval": statistics.interval(values, samples=1)}
        for name, values in (("here", ours), (engine, theirs))
    }
    return result | {
        "problems": len(problems),
        "difference": {"value": difference, "interval": [low, high]},
        "same_outcome": float((ours == theirs).mean()),
        "same_text": float(np.mean(same_text)),
        "agrees": bool(low <= 0.0 <= high),
    }


def complete_with_vllm(
    arguments: argparse.Namespace, settings: dict[str, Any], problems: Rows
) -> Served:
    """The greedy completions of vLLM."""
    decode.set_environment()
    from vllm import LLM, SamplingParams  # pyrefly: ignore[missing-import]
    from vllm.lora.request import LoRARequest  # pyrefly: ignore[missing-import]

    from qerl_jax.export.model_card import vllm_rank

    adapter, options = None, {}
    if arguments.adapter is not None:
        adapter_config = json.loads((arguments.adapter / "adapter_config.json").read_text())
        adapter = LoRARequest("adapter", 1, str(arguments.adapter))
        options = {"enable_lora": True, "max_lora_rank": vllm_rank(adapter_config["r"])}
    limit = settings["max_new_tokens"]
    engine = LLM(
        model=str(arguments.base),
        dtype="bfloat16",
        max_model_len=_PROMPT_TOKENS + limit,
        max_num_seqs=_ROWS,
        gpu_memory_utilization=0.6,
        **options,
    )
    outputs = engine.chat(
        [messages_of(settings, row["question"]) for row in problems],
        SamplingParams(
            temperature=0.0,
            max_tokens=limit,
            stop=settings["stop"] or None,
            include_stop_str_in_output=True,  # as here
        ),
        lora_request=adapter,
        chat_template_kwargs=settings["chat_template_args"] or None,
        use_tqdm=False,
    )
    completions = [output.outputs[0] for output in outputs]
    return [
        (completion.text, len(completion.token_ids), completion.finish_reason == "stop")
        for completion in completions
    ]


def complete_with_transformers(
    arguments: argparse.Namespace, settings: dict[str, Any], problems: Rows
) -> Served:
    """The greedy completions of transformers and PEFT.

    Raises:
        UserError: the evaluation has stop strings.
    """
    import torch  # pyrefly: ignore[missing-import]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from qerl_jax.errors import UserError

    if settings["stop"]:
        raise UserError("the evaluation has stop strings, which --engine=vllm alone knows")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.base, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(arguments.base, dtype=torch.bfloat16).to(device)
    if arguments.adapter is not None:
        from peft import PeftModel  # pyrefly: ignore[missing-import]

        # A first pass decompresses NVFP4, without which PEFT finds no weights.
        with torch.no_grad():
            model(torch.ones((1, 1), dtype=torch.long, device=device))
        model = PeftModel.from_pretrained(model, arguments.adapter)
    ends = model.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [ends], device=device)
    completions = []
    for start in range(0, len(problems), _TRANSFORMERS_ROWS):
        part = problems[start : start + _TRANSFORMERS_ROWS]
        prompts = tokenizer.apply_chat_template(
            [messages_of(settings, row["question"]) for row in part],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
            **settings["chat_template_args"],
        ).to(device)
        with torch.inference_mode():
            tokens = model.generate(
                **prompts,
                do_sample=False,
                max_new_tokens=settings["max_new_tokens"],
            )[:, prompts["input_ids"].shape[1] :]
        for row in tokens:
            at = torch.isin(row, ends).nonzero().flatten().tolist()
            number = at[0] + 1 if at else len(row)
            text = tokenizer.decode(row[:number], skip_special_tokens=True)
            completions.append((text, number, bool(at)))
        print(f"{len(completions)} of {len(problems)} problems", flush=True)
    return completions


def complete_with_llama_cpp(
    arguments: argparse.Namespace, settings: dict[str, Any], problems: Rows
) -> Served:
    """The greedy completions of llama.cpp.

    Raises:
        UserError: the evaluation has stop strings, or llama.cpp fails.
    """
    from qerl_jax.errors import UserError

    if settings["stop"]:
        raise UserError("the evaluation has stop strings, which --engine=vllm alone knows")
    tokenizer, limit = _tokenizer_of(arguments.base), settings["max_new_tokens"]
    served = _kept_answers(arguments.answers, problems)
    while len(served) < len(problems):
        part = problems[len(served) :][:_LLAMA_CPP_ROWS]
        found = _llama_cpp(arguments, _prompts(tokenizer, settings, part), new=limit, scored=0)
        answers = [found[f"new{number}"].tolist() for number in range(len(part))]
        new = [
            (
                tokenizer.decode(tokens),
                len(tokens),
                len(tokens) < limit or tokens[-1] in tokenizer.eos_ids,
            )
            for tokens in answers
        ]
        served += new
        if arguments.answers:
            with arguments.answers.open("a") as file:
                for row, answer in zip(part, new, strict=True):
                    file.write(json.dumps([row["question"], *answer]) + "\n")
    return served


def _kept_answers(file: pathlib.Path | None, problems: Rows) -> Served:
    """The completions of the first problems that a file of --answers holds; [] without one."""
    from qerl_jax.errors import UserError

    if file is None or not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text().splitlines()][: len(problems)]
    asked = [row["question"] for row in problems[: len(rows)]]
    if [question for question, *_ in rows] != asked:
        raise UserError(f"{file}: holds answers to other problems; pass another --answers")
    return [(text, number, ended) for _, text, number, ended in rows]


def compare_with_llama_cpp(
    arguments: argparse.Namespace, settings: dict[str, Any], problems: Rows, served: Sequence[str]
) -> dict[str, Any]:
    """The figures that are about tokens: first ones that are equal, and with --policy the KL."""
    import jax
    import numpy as np

    from qerl_jax.evaluation.load_policy import open_policy
    from qerl_jax.export.card_scores import host_logprobs, probe_kl

    tokenizer = _tokenizer_of(arguments.base)
    pairs = zip((row["completion"] for row in problems), served, strict=True)
    first = [tokenizer.encode(ours)[:1] == tokenizer.encode(theirs)[:1] for ours, theirs in pairs]
    result: dict[str, Any] = {"first_token": float(np.mean(first)), "device": "cpu"}
    result |= {"base": arguments.base.name, "adapter": bool(arguments.adapter)}
    if arguments.policy:
        policy = open_policy(arguments.policy, adapter="adapter")
        problems = problems[:_KL_TEXTS]
        prompts = _prompts(tokenizer, settings, problems)
        texts = [p + row["completion"] for p, row in zip(prompts, problems, strict=True)]
        found = _llama_cpp(arguments, texts, new=0)
        ids = [found[f"ids{number}"].tolist() for number in range(len(texts))]
        begins, rests = [text[:1] for text in ids], [text[1:] for text in ids]
        ours = host_logprobs(policy.model, policy.lora, begins, rests)
        theirs = [jax.nn.log_softmax(found[f"text{n}"][:-1]) for n in range(len(texts))]
        kl, top1 = probe_kl(ours, [np.asarray(rows) for rows in theirs])
        result |= {"kl": kl, "top1": top1, "kl_tokens": sum(map(len, rests))}
        result["packages"] = f"llama-cpp-python {found['version']}"
    return result


@functools.cache
def _tokenizer_of(file: pathlib.Path) -> Any:
    from qerl_jax.weights.load import describe

    return describe(str(file), format="stored", dtype="bfloat16").tokenizer


def _prompts(tokenizer: Any, settings: dict[str, Any], problems: Rows) -> list[str]:
    return [
        tokenizer.apply_chat_template(
            messages_of(settings, row["question"]), **settings["chat_template_args"]
        )
        for row in problems
    ]


def _llama_cpp(arguments: argparse.Namespace, texts: list[str], **job: int) -> Any:
    """What `llama_cpp_runner` finds for texts."""
    import numpy as np

    from qerl_jax.errors import UserError

    python, threads = os.environ.get("QERL_LLAMA_CPP_PYTHON"), "QERL_LLAMA_CPP_THREADS"
    if not python:
        raise UserError("set QERL_LLAMA_CPP_PYTHON to a Python with llama-cpp-python")
    with tempfile.TemporaryDirectory() as folder:
        job_file, out = pathlib.Path(folder, "job.json"), pathlib.Path(folder, "out.npz")
        adapter = arguments.adapter and str(arguments.adapter)
        files = {"model": str(arguments.base), "lora": adapter, "texts": texts}
        job_file.write_text(
            json.dumps(files | {"threads": int(os.environ.get(threads, "1"))} | job)
        )
        done = subprocess.run([python, _LLAMA_CPP, job_file, out])
        if done.returncode:
            raise UserError(f"{arguments.base}: llama.cpp stopped with code {done.returncode}")
        with np.load(out) as found:
            return dict(found)


ENGINES = {
    "llama.cpp": (complete_with_llama_cpp, ""),
    "vllm": (complete_with_vllm, decode.REQUIREMENTS),
    "transformers": (complete_with_transformers, _TRANSFORMERS),
}


def run(arguments: argparse.Namespace) -> None:
    """Runs the comparison with the parsed arguments."""
    from qerl_jax.errors import UserError
    from qerl_jax.system.atomic import write_json

    common.check_out(arguments.out)
    settings, problems = read_evaluation(arguments.evaluation, arguments.task, arguments.judge)
    problems = problems[: arguments.limit or None]
    complete, requirements = ENGINES[arguments.engine]
    packages = rows.installed(requirements)
    served = complete(arguments, settings, problems)
    correct = scored(settings, problems, served)
    result = compare(problems, [text for text, *_ in served], correct, engine=arguments.engine)
    result |= {"task": arguments.task}
    if arguments.engine == "llama.cpp":
        texts = [text for text, *_ in served]
        result |= compare_with_llama_cpp(arguments, settings, problems, texts)
    else:
        result |= {"packages": packages, "device": rows.device_name()}
    write_json(arguments.out, result | common.origin("benchmarks.peers.serve"))
    print(json.dumps(result), flush=True)
    if not result["agrees"]:
        raise UserError(
            f"{arguments.out}: the accuracy of {arguments.engine} differs from ours by more than "
            f"chance: {result['difference']}"
        )


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
