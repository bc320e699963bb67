"""Measures conversations with environments: waiting for them, agreement, and learning with a tool.

    uv run --extra cuda python -m benchmarks.environments rollout --model=qwen2.5-1.5b
    uv run --extra cuda python -m benchmarks.environments step --mesh=data=1 --mesh=data=2
    uv run python -m benchmarks.environments learning calculator \
        runs/calculator-* --control runs/no_calculator-*
    uv run python -m benchmarks.environments learning guessing_game \
        runs/guessing_game-* --control runs/constant_game-*

    uv run --extra cuda python -m benchmarks.environments agents --model=qwen2.5-1.5b
    uv run --extra cuda python -m benchmarks.environments idle --model=qwen2.5-7b

All write a part of benchmarks/results/environments.json. `rollout` decodes 64 episodes on 32
slots, three turns of 512 tokens each, with replies that come at once and after 0.5 s: the time of
the one relative to the other, the share of slots that waited, and how their tokens and log-probs
agree, and how those of two rollouts with instant replies do. The weights are random. `agents`
does the same with agents that ask for the turns through the server, and `idle` compares decode
steps while the server waits for requests with those before it was started.
`step` takes GRPO steps as `benchmarks.step` does, of conversations with environments in processes
of their own that answer at once, with as many rows for each group of devices. Several processes are
started as those of `benchmarks.step` are.
`learning` compares the last fifth of the steps of runs with the first (examples/calculator.py and
examples/guessing_game.py have the commands): reward, the share of rows with a call that succeeded,
and the accuracy of each run on held-out problems before and after.
"""

import argparse
import dataclasses
import http.client
import json
import math
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import common, step
from benchmarks.rollout.__main__ import make_parser as rollout_parser
from benchmarks.rollout.benchmark import compile_steps, measure_decoding
from benchmarks.rollout.subject import (
    NO_TEXT,
    RandomText,
    make_subject,
    random_weights,
    with_adapter,
)
from benchmarks.run_summary import describe_run
from pallas_kernels.gpu_lock import sole_use
from qerl_jax.commands import cli
from qerl_jax.environments.agent_server import AgentServer
from qerl_jax.environments.chat import ChatWriter
from qerl_jax.environments.gateway import Gateway, Job, SessionLimits
from qerl_jax.environments.roles import DONE, OPEN, SAMPLED, Reply, Turn
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.policy import Policy
from qerl_jax.processes.group import Processes
from qerl_jax.processes.launch import connect
from qerl_jax.rollout.completions import Rollout
from qerl_jax.rollout.config import EngineConfig, SamplingConfig, TurnConfig
from qerl_jax.rollout.progress import RolloutProgress
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.rollout.shapes import dequantize_mode
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.metrics import read_evaluations, read_steps
from qerl_jax.system.atomic import write_json
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.system.paths import user_path

_EPISODES, _SLOTS, _TURNS = 64, 32, 3
_PROMPT, _TURN, _REPLY = 128, 512, 32  # tokens of a prompt, of a turn, and of a reply
_SECONDS = 0.5  # until a slow reply comes
_ROUNDS = 5  # of decode steps without and with a server
_REPLY_WORDS = 30


class Talk:
    """An environment of texts that answers every turn at once."""

    def reset(self) -> None:
        """Begins an episode, and says nothing."""

    def step(self, text: str) -> tuple[str, float, bool]:
        """Answers a turn."""
        del text
        return " ".join(["1"] * _REPLY_WORDS), 1.0, False


class Numbers(RandomText):
    """A tokenizer whose words are the numbers of tokens; token 0 ends a turn."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids that are the words of a text, and 1 for another word."""
        return [int(word) if word.isdecimal() else 1 for word in text.split()]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Returns the ids as words."""
        del skip_special
        return " ".join(map(str, ids))

    answer = decode

    def reasoning(self, ids: Sequence[int]) -> list[tuple[str, str]]:
        """Nothing: texts have no channels."""
        del ids
        return []

    def for_tools(self) -> "Numbers":
        """Returns the tokenizer: nothing here has tools."""
        return self

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **_: Any) -> str:
        """Returns a conversation as text, in which token 0 follows a turn."""
        ends = {"assistant": " 0"}
        return " ".join(one["content"] + ends.get(one["role"], "") for one in messages)


def measure_step(
    model: str, shape: tuple[int, int], options: argparse.Namespace, processes: Processes
) -> dict[str, Any]:
    """The row of steps with environments on a mesh (data, tensor)."""
    tokens = _TURNS * options.turn_tokens
    arguments = step.make_parser().parse_args(
        [
            f"--prompts={options.prompts}",
            f"--prompt={_PROMPT}",
            f"--new-tokens={tokens}",
            f"--steps={options.steps}",
        ]
    )
    step.check(arguments)
    changes = {
        "environment.function": f"{__spec__.name}:{Talk.__name__}",
        "environment.max_turns": _TURNS,
        "environment.turn_tokens": options.turn_tokens,
        "environment.reply_tokens": _REPLY,
        "data.max_prompt_tokens": _PROMPT,
        "data.system_prompt": "",
    }
    row = step.measure(arguments, model, "nvfp4", shape, processes, changes, Numbers(ends=1))
    names = ("model", "device", "devices", "mesh", "processes", "batch", "step_s", "rollout_s")
    names += ("update_s", "samples_per_s", "logprob_diff_mean")
    settings = {"prompt": _PROMPT, "turns": _TURNS, "turn_tokens": options.turn_tokens}
    row = {name: row[name] for name in names} | settings
    return row | common.origin("benchmarks.environments")


@dataclasses.dataclass
class Timer:
    """A dialog whose replies come a fixed time after their turns."""

    seconds: float
    turns: int  # of a row
    ids: Sequence[int]  # token ids of a reply
    _counts: dict[int, int] = dataclasses.field(default_factory=dict)
    _due: list[tuple[float, Reply]] = dataclasses.field(default_factory=list)

    def submit(self, turn: Turn) -> None:
        """Takes a turn; the last one of a row is answered at once."""
        count = self._counts[turn.row] = self._counts.get(turn.row, 0) + 1
        over = count >= self.turns
        reply = Reply(turn.row, (), DONE) if over else Reply(turn.row, self.ids, OPEN)
        self._due.append((time.monotonic() + (0.0 if over else self.seconds), reply))

    def replies(self, seconds: float) -> list[Reply]:
        """Returns the replies that are due, or waits for one."""
        ends = time.monotonic() + (seconds if self._due else 0.0)
        while not any(due <= time.monotonic() for due, _ in self._due):
            if time.monotonic() >= ends:
                return []
            time.sleep(0.001)
        now = time.monotonic()
        ready = [reply for due, reply in self._due if due <= now]
        self._due = [(due, reply) for due, reply in self._due if due > now]
        return ready

    def part(self, rows: Sequence[int]) -> "Timer":
        """Returns a dialog of some of the rows, which are all alike."""
        del rows
        return Timer(self.seconds, self.turns, self.ids)


def measure_rollout(model: str) -> dict[str, Any]:
    """Seconds of rollouts with instant and with slow replies, and how they agree."""
    sampler, key, policy = _subject(model)
    sampler = sampler.compiled(key, policy, num_prompts=_EPISODES)
    prompts, ids = _texts(model)
    rows, rollouts = {}, []
    # Each is run twice, and the second one counts: the first rows that give up their slots wait
    # until memory of the host is pinned, about 50 ms for each.
    with sole_use():
        for seconds in (0.0, 0.0, _SECONDS, _SECONDS):
            began = time.perf_counter()
            steps = sampler.steps(key, policy, prompts, dialog=Timer(seconds, _TURNS, ids))
            *_, last = steps
            rollouts.append(last.rollout)
            rows[f"{seconds:g}"] = _work(began, last)
    return _result(model, rows, rollouts)


def _subject(model: str) -> tuple[Sampler, jax.Array, Policy]:
    """A sampler of conversations, a key and a random policy."""
    config, params = ARCHITECTURES[model], random_weights(model, "nvfp4")
    tokens, replies = _TURNS * _TURN, (_TURNS - 1) * (_REPLY + 1)
    sampler = Sampler(
        config,
        NO_TEXT,  # No token ends a turn, so that all turns are of equal length.
        SamplingConfig(max_new_tokens=tokens),
        EngineConfig(
            chunk_steps=32,
            max_rows=_SLOTS,
            prompt_width=_PROMPT,
            dequantize=dequantize_mode(params),
        ),
        turns=TurnConfig(_TURNS, _TURN, _REPLY, tokens + replies),
    )
    return sampler, jax.random.key(0, impl="threefry2x32"), Policy(params, None)


def _texts(model: str) -> tuple[list[list[int]], list[int]]:
    """The prompts, and the reply to every turn, as token ids."""
    rng, vocabulary = np.random.default_rng(0), min(1000, ARCHITECTURES[model].vocab_size)
    prompts = rng.integers(vocabulary, size=(_EPISODES, _PROMPT)).tolist()
    return prompts, rng.integers(vocabulary, size=_REPLY).tolist()


def _work(began: float, last: RolloutProgress) -> dict[str, float]:
    """Seconds of a rollout that has just ended, and what slots waited."""
    return {
        "seconds": time.perf_counter() - began,
        "idle_share": last.statistics.idle / max(1, last.statistics.decoded),
        "waiting_seconds": last.statistics.waiting_seconds,
    }


def _result(
    model: str, rows: dict[str, dict[str, float]], rollouts: Sequence[Rollout]
) -> dict[str, Any]:
    """What two rollouts with instant replies and two with slow ones have come to."""
    first, instant, _, slow = rollouts
    return {
        "model": model,
        "device": jax.devices()[0].device_kind,
        "episodes": _EPISODES,
        "slots": _SLOTS,
        "turns": _TURNS,
        "turn_tokens": _TURN,
        "by_reply_seconds": rows,
        "slowdown": rows[f"{_SECONDS:g}"]["seconds"] / rows["0"]["seconds"],
        "agreement": agreement(instant, slow),
        "agreement_of_instant": agreement(first, instant),
    } | common.origin("benchmarks.environments")


def measure_agents(model: str) -> dict[str, Any]:
    """Seconds of rollouts of agents that answer at once and late, and how they agree."""
    sampler, key, policy = _subject(model)
    assert sampler.turns is not None
    prompts, ids = _texts(model)
    context = _PROMPT + sampler.turns.context_tokens
    limits = SessionLimits(context, _TURNS * _TURN, _TURN, ARCHITECTURES[model].vocab_size)
    turns = dataclasses.replace(sampler.turns, sessions=True)
    sampler = dataclasses.replace(sampler, turns=turns)
    sampler = sampler.compiled(key, policy, num_prompts=_EPISODES)
    server = _server()
    rows, rollouts = {}, []
    with sole_use():
        for number, seconds in enumerate((0.0, 0.0, _SECONDS, _SECONDS)):
            jobs = [Job(i, i, {}, number) for i in range(_EPISODES)]
            server.gateway.begin(jobs, limits)
            arguments = [(server, job, prompts[job.number], ids, seconds) for job in jobs]
            threads = [threading.Thread(target=_episode, args=each) for each in arguments]
            began = time.perf_counter()
            for thread in threads:
                thread.start()
            *_, last = sampler.steps(key, policy, prompts, dialog=server.gateway)
            rows[f"{seconds:g}"] = _work(began, last)
            order = [record.rows[0].number for record in server.gateway.records()]
            rollouts.append(jax.tree.map(lambda x, order=order: x[order], last.rollout))
            print(json.dumps({"reply_seconds": seconds} | rows[f"{seconds:g}"]), flush=True)
    server.stop()
    return _result(model, rows, rollouts)


def _server() -> AgentServer:
    """A server of agents that send token ids."""
    tokenizer: Any = NO_TEXT
    return AgentServer(Gateway(), ChatWriter(tokenizer, tokenizer, {}, ""))


def measure_idle_server(model: str) -> dict[str, Any]:
    """Milliseconds of decode steps, in turns without a server and with one that waits."""
    options = rollout_parser().parse_args([f"--model={model}", "--format=nvfp4", "--batch=8,64"])
    with sole_use():
        subject = make_subject(options, model, "nvfp4")
        subject = with_adapter(subject, options.lora_rank[0])
    programs = compile_steps(subject, options)
    times: dict[int, dict[str, list[float]]] = {}
    with sole_use():
        for batch in options.batch:
            rows = times[batch] = {"without": [], "with": []}
            for _ in range(_ROUNDS):
                for name, serves in (("without", False), ("with", True)):
                    server = _server() if serves else None
                    row = measure_decoding(subject, batch, options, programs)
                    rows[name].append(row["ms_per_step"])
                    if server is not None:
                        server.stop()
    return {
        "model": model,
        "device": jax.devices()[0].device_kind,
        "ms_per_step": {
            f"rows_{batch}": {name: statistics.median(values) for name, values in rows.items()}
            for batch, rows in times.items()
        },
        "all_ms_per_step": times,
    } | common.origin("benchmarks.environments")


def _episode(
    server: AgentServer, job: Job, prompt: list[int], reply: list[int], seconds: float
) -> None:
    """Asks for the turns of a session."""
    session, row = server.open(job), list(prompt)
    connection = http.client.HTTPConnection(session.root_url.removeprefix("http://"))
    headers = {"Authorization": f"Bearer {session.key}"}
    for turn in range(_TURNS):
        if turn:
            time.sleep(seconds)
            row += reply
        body = json.dumps({"token_ids": row, "sampling_params": {"max_tokens": _TURN}})
        connection.request("POST", "/inference/v1/generate", body, headers)
        row += json.loads(connection.getresponse().read())["choices"][0]["token_ids"]
    connection.close()
    server.close(session.id, 0.0)


def agreement(one: Rollout, other: Rollout) -> dict[str, float]:
    """How two rollouts of the same prompts agree, up to the first token of a row that differs."""
    equal = np.cumprod(one.tokens == other.tokens, axis=1).astype(bool)
    differences = np.abs(one.logprobs - other.logprobs)[equal & (one.roles == SAMPLED)]
    return {
        "equal_rows": float(equal[:, -1].mean()),
        "equal_tokens": float(equal.mean()),
        "logprob_diff_mean": float(differences.mean()),
        "logprob_diff_max": float(differences.max()),
    }


def summarize_learning(folders: Sequence[str]) -> dict[str, Any]:
    """Means over the first and the last fifth of the steps of runs, one run for each seed.

    Also the accuracy of each run before and after, and the seconds of each run: those of its steps
    and evaluations and of the programs compiled before.
    """
    metrics = [RunFolder(user_path(folder)).metrics for folder in folders]
    runs = [read_steps(path) for path in metrics]
    fifth = max(1, min(map(len, runs)) // 5)
    # A text environment has no tool calls; the reward `calls` of its example counts such rows.
    calls = ("environment/rows_with_right_call", "environment/calls", "reward/calls")
    names = ("reward", "accuracy", *calls, "agent/called", "agent/right")

    def mean(name: str, part: slice) -> float | None:
        values = [row.get(name) for rows in runs for row in rows[part]]
        values = [value for value in values if value is not None]  # A step may have no update.
        return statistics.fmean(values) if values else None

    return {
        "steps": min(map(len, runs)),
        "first": {name: mean(name, slice(0, fifth)) for name in names},
        "last": {name: mean(name, slice(-fifth, None)) for name in names},
        "logprob_diff_mean": mean("logprob_diff_mean", slice(None)),
        "eval_accuracy": [
            {"before": accuracies[0], "after": accuracies[max(accuracies)]}
            for accuracies in map(read_evaluations, metrics)
            if accuracies
        ],
        "seconds": [sum(map(_seconds, read_jsonl(path))) for path in metrics],
        "reward_by_step": [[row["reward"] for row in rows] for rows in runs],
        "calls_by_step": [
            [row["reward/calls"] for row in rows] for rows in runs if "reward/calls" in rows[0]
        ],
        "run": describe_run(user_path(folders[0])),
    }


def _seconds(row: dict[str, Any]) -> float:
    compiled = 0.0 if row["step"] else row.get("compile_seconds", 0.0)
    return compiled + row.get("step_seconds", 0.0) + row.get("eval_seconds", 0.0)


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    out = "benchmarks/results/environments.json"
    parser = common.make_parser("benchmarks.environments", __doc__, out)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, model in (("rollout", "1.5b"), ("agents", "1.5b"), ("idle", "7b")):
        rollout = commands.add_parser(name)
        rollout.add_argument("--model", choices=ARCHITECTURES, default=f"qwen2.5-{model}")
    steps = commands.add_parser("step")
    steps.add_argument("--model", choices=ARCHITECTURES, default="qwen2.5-7b")
    mesh = "devices, such as data=2; may be repeated (default: data=1)"
    steps.add_argument("--mesh", action="append", type=step.read_mesh, help=mesh)
    steps.add_argument("--prompts", type=int, default=2, help="prompts for each group (default: 2)")
    tokens = "sampled tokens of a turn (default: 512)"
    steps.add_argument("--turn-tokens", type=int, default=_TURN, help=tokens)
    steps.add_argument("--steps", type=int, default=2, help="measured steps (default: 2)")
    learning = commands.add_parser("learning")
    learning.add_argument("name", help="name of the comparison in the file")
    learning.add_argument("runs", nargs="+", help="run folders with the environment")
    learning.add_argument("--control", nargs="+", required=True, help="run folders without it")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Measures, and writes a part of the file."""
    content = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    measures = {"rollout": measure_rollout, "agents": measure_agents, "idle": measure_idle_server}
    if measure := measures.get(arguments.command):
        result = content[arguments.command] = measure(arguments.model)
    elif arguments.command == "step":
        meshes = arguments.mesh or [(1, 1)]
        with connect(devices=max(map(math.prod, meshes))) as processes:
            measured = [measure_step(arguments.model, m, arguments, processes) for m in meshes]
        if not processes.writes:
            return
        rows = {(row["mesh"], row["processes"]): row for row in content.get("step", [])}
        rows |= {(row["mesh"], row["processes"]): row for row in measured}
        result = content["step"] = [rows[key] for key in sorted(rows)]
    else:
        parts = {"runs": arguments.runs, "control": arguments.control}
        result = {name: summarize_learning(folders) for name, folders in parts.items()}
        content.setdefault("learning", {})[arguments.name] = result
    print(json.dumps(result, indent=2))
    write_json(arguments.out, content)


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
