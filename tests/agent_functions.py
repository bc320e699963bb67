"""Agents for tests; this file is imported by their processes."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request


def _chat(base_url, api_key, *texts):
    """Returns the policy's answer to a conversation."""
    messages = [
        {"role": "assistant" if number % 2 else "user", "content": text}
        for number, text in enumerate(texts)
    ]
    body = {"model": "policy", "messages": messages}
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


async def solve(base_url, api_key, question, seed):
    """Asks the policy once; its reward is the length of the answer."""
    answer = await asyncio.to_thread(_chat, base_url, api_key, question)
    return {"reward": len(answer), "answer": answer, "seed": seed}


def twice(base_url, api_key, question, number) -> dict:
    """Asks twice; the problem with the number 1 breaks after that."""
    texts = [_chat(base_url, api_key, f"{question} t{turn}") for turn in range(2)]
    if number == 1:
        raise RuntimeError("broken")
    return {"reward": len(texts[0]), "asked": 2, "text": texts[0], "odd": float("nan")}


def talks(base_url, api_key, question, seed) -> float:
    """A conversation of two turns; by the seed it fails, or another one follows."""
    if seed % 3 == 0:
        raise RuntimeError("broken")
    words = 0
    for root in range(1 + seed % 2):
        first = _chat(base_url, api_key, f"{question} t{root}")
        words += len(_chat(base_url, api_key, f"{question} t{root}", first, "t3 t4").split())
    return float(words)


def rated(base_url, api_key, question) -> None:
    """Leaves the reward to the run."""
    _chat(base_url, api_key, question)


def faults(question, base_url, api_key):
    """Does what a question says."""
    if question == "raise":
        raise RuntimeError("broken")
    if question == "exit":
        sys.exit(3)
    if question == "die":
        os._exit(3)
    if question == "hang":
        time.sleep(1000)
    if question == "child":  # It leaves the process group, and its parent ends.
        code = "import time; time.sleep(1000)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        return 1.0, {"pid": child.pid}
    if question == "variables":
        names = ("OPENAI_BASE_URL", "OPENAI_API_KEY")
        return None, {"right": [os.environ[name] for name in names] == [base_url, api_key]}
    return {
        "text": "good",
        "digits": "1.0",
        "nan": float("nan"),
        "list": [1.0],
        "pair": (1.0, 2.0),
        "object": object(),
        "none": None,
        "number": 2,
        "true": True,
        "facts": {"reward": 0.5, "tries": 3, "_own": 1, "open": object(), 7: 1},
        "facts alone": {"tries": 3},
    }[question]


def modules(question):
    """Returns whether a module is imported."""
    return question in sys.modules


def generator(base_url):
    """An agent must return."""
    yield 1.0


async def from_command(base_url, api_key, question):
    """Lets a command of its own talk to the policy, whose address it has from its variables."""
    code = (
        "import os; from tests.agent_functions import _chat; "
        f"print(_chat(os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'], {question!r}))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return float(len(output.decode().strip()))


NO_AGENT = 7
