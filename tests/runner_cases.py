"""A server for tests of what starts the episodes of agents."""

import threading
import time

from qerl_jax.environments.gateway import ClosedError, Session


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
