"""Environments for tests; this file is imported by their processes."""

import asyncio
import multiprocessing
import os
import random
import subprocess
import sys
import time

# A chat template whose turns end, and a config of runs that talk to an environment.
TEMPLATE = (
    "{% for message in messages %}{{ message.content }} "
    "{% if message.role == 'assistant' %}<|im_end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}t1 t2{% endif %}"
)
CHANGES = {
    "environment.function": "environment_cases:Echo",
    "environment.max_turns": 3,
    "environment.turn_tokens": 4,
    "environment.reply_tokens": 6,
    "rollout.max_new_tokens": 10,
    "rollout.max_rows": 5,
    "data.max_prompt_tokens": 12,
    "rewards.correctness.function": "qerl_jax.rewards.functions:environment_reward",
    "rewards.format.weight": 0.0,
    "rewards.format.function": "test_environment_train:turns_of",
    "eval.max_new_tokens": 8,
    "checkpoint.every": 2,
    "log.completions": 8,
}


class Echo:
    """An environment of texts: rewards a turn by its number of words, and ends on request."""

    def reset(self, question, seed):
        self.question, self.seed, self.turns = question, seed, []
        return f" t{seed % 40}"

    def step(self, text):
        self.turns.append(text)
        words = text.split()
        done = bool(words) and int(words[-1][1:]) % 5 == 0
        return (
            " ".join(f"t{(len(word) + len(self.turns)) % 40}" for word in words[:3]),
            len(words),
            done,
        )


class Calculator:
    """A tool, as TRL's environments have them."""

    def reset(self, answer=None, **kwargs):
        self.answer, self.results = answer, []

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: the first number.
            b: the second number.

        Returns:
            The sum.
        """
        self.results.append(a + b)
        return a + b

    async def later(self, text: str) -> str:
        """Returns a text later.

        Args:
            text: the text.
        """
        return text.upper()

    def get_reward(self) -> float:
        return float(len(self.results))


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a + b


async def later(text: str = "") -> str:
    """Returns a text later.

    Args:
        text: the text.
    """
    return text.upper()


TOOLS = [add, later]


class BrokenTool:
    """A tool whose argument names a failure."""

    def reset(self):
        pass

    def do(self, what: str) -> object:
        """Does something.

        Args:
            what: what it does.
        """
        if what == "digits":
            return 10**5000  # Python refuses to write it.
        if what == "cancel":
            raise asyncio.CancelledError("stopped")
        if what == "hang":
            time.sleep(1000)
        if what == "sleep":
            time.sleep(0.1)
        return "\ud800"


class Dice:
    """Draws with Python's `random` when it is made and in each reset."""

    def __init__(self):
        self.rolls = [random.random()]

    def reset(self, question):
        self.rolls = [random.random() for _ in range(3)]

    def step(self, text):
        return "", 1.0, True


class NeedsColumn:
    """An environment of texts that reads a column, which is its reward."""

    def reset(self, number):
        self.number = number

    def step(self, text):
        return "", self.number, True


class Faults:
    """Does what a question says, in the step whose number the text has."""

    def reset(self, question, **columns):
        self.what = question
        if question == "reset":
            raise ValueError("no reset")

    def step(self, text):
        what = self.what
        if what == "raise":
            raise RuntimeError("broken")
        if what == "exit":
            sys.exit(3)
        if what == "nothing":
            return None, 1.0, False
        if what == "number":
            return 7, 1.0, False
        if what == "megabyte":
            return "t1 " * 350_000, 1.0, False
        if what == "hang":
            time.sleep(1000)
        if what == "kill":
            os.kill(os.getpid(), 9)
        if what == "print":
            print("noise" * 10_000, flush=True)
            print("noise", file=sys.stderr)
            os.write(1, b"\0\0\0\1x")
        if what == "fork":
            os.fork()
        if what == "cancel":
            raise asyncio.CancelledError("stopped")
        if what == "surrogate":
            return "t1 \ud800", 1.0, False
        if what == "terminate":
            started = subprocess.Popen(["sleep", "1000"])
            started.terminate()
            started.wait()
            forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
            forked.start()
            forked.terminate()
            forked.join()
        if what == "start":
            subprocess.Popen(["sleep", "1000"])
            time.sleep(1000)
        if what == "detach":
            return f"t{detached()}", 1.0, False
        if what == "detach and hang":
            detached()
            time.sleep(1000)
        if what == "detach and die":
            detached()
            os.kill(os.getpid(), 9)
        if what == "read":
            return input() or "t1", 1.0, False
        if what == "stdin":
            return f"t{len(sys.stdin.read())}", 1.0, False
        if what == "infinite":
            return "t1", float("inf"), False
        return "t1", 1.0, False


def detached():
    """Starts a process as servers are started: in its own session, without its parent."""
    reads, writes = os.pipe()
    if not (pid := os.fork()):
        os.setsid()
        if os.fork():
            os._exit(0)
        os.setsid()
        os.write(writes, str(os.getpid()).encode())
        os.execvp("sleep", ["sleep", "1001"])
    os.waitpid(pid, 0)
    return int(os.read(reads, 20))


class NoTools:
    def reset(self):
        pass


class NoDocstring:
    def reset(self):
        pass

    def add(self, a, b):
        return a + b


class ByName:
    """An environment of texts that says which arguments its reset got."""

    def reset(self, seed, level=0):
        return f"{seed} {level}"

    def step(self, text):
        return "", 1.0, True


class AllColumns(ByName):
    def reset(self, **columns):
        return " ".join(f"{name}={columns[name]}" for name in sorted(columns))


class ByPosition(ByName):
    def reset(self, question, level=1, /, *arguments, **columns):
        return f"{question} {level} {arguments} {sorted(columns)}"


class NamedAsItsOwn(ByName):
    def reset(this, self, *, level):  # noqa: N805
        return f"{self} {level}"


class PositionalSelf(ByName):
    def reset(self, /, **columns):
        return f"self={columns.get('self')}"


class Static(ByName):
    @staticmethod
    def reset(self, seed):
        return f"{self} {seed}"


class ManyArguments(ByName):
    def reset(self, *level):
        return str(level)


class KindsOfMethods:
    """Tools as TRL 1.16 takes them: functions of the class."""

    def reset(self):
        pass

    def method(self, a: int) -> str:
        return "1"

    @classmethod
    def of_class(cls, a: int) -> str:
        return "2"

    @staticmethod
    def static(a: int) -> str:
        return "3"

    @property
    def value(self):
        raise AssertionError("a property is not evaluated")

    def get_reward(self):
        return 0.0

    def _private(self):
        return "4"


class SlowEcho(Echo):
    def step(self, text):
        time.sleep(0.1 if self.seed % 2 else 0.02)
        return super().step(text)


class Talkative(Echo):
    """Says more at its reset than a prompt may have."""

    def reset(self, question, seed):
        return 100 * super().reset(question, seed)


class SaysALength(Echo):
    """Says as many words at its reset as the last digit of the first word of the question."""

    def reset(self, question, seed):
        super().reset(question, seed)
        return " t1" * (int(question.split()[0][1:]) % 10)


class Broken:
    def reset(self):
        pass

    def step(self, text):
        raise RuntimeError("broken")
