"""Rollouts of a tiny policy whose rows agents ask for, for the tests of sessions."""

import collections
import concurrent.futures
import dataclasses
import functools
import json
import threading
import urllib.error
import urllib.request

import tiny_rollout
from environment_cases import Echo
from tiny_model import random_lora, random_tokens, tiny_policy
from tiny_rollout import KEY, TURNS

from qerl_jax.environments.agent_server import AgentServer
from qerl_jax.environments.gateway import ClosedError, Gateway, Job, SessionLimits, TokenPrompt
from qerl_jax.environments.roles import Reply, Turn
from qerl_jax.policy.policy import Policy

EOS = tuple(range(20, 30))  # a third of the vocabulary: turns end soon
SESSIONS = dataclasses.replace(TURNS, sessions=True)
LONGEST = 9  # tokens of the longest prompt that is prefilled as a whole


@functools.cache
def policy(model="qwen3"):
    """An architecture and a policy: one layer of attention, after a recurrent one in Qwen3.5."""
    layers = {"num_layers": 2, "recurrent_layers": (0,)} if model == "qwen3_5" else {}
    config, params = tiny_policy(model, **({"num_layers": 1} | layers))
    return config, Policy(params, random_lora(config))


def limits(**changes):
    values = {"context": LONGEST + SESSIONS.context_tokens, "max_new_tokens": 14, "turn_tokens": 6}
    return SessionLimits(**(values | {"vocab_size": 64} | changes))


def jobs_of(count, group_size=1):
    return [Job(number, number // group_size, {}, 7) for number in range(count)]


def sampler(model="qwen3", *, host=2**33, **options):
    """A sampler of sessions."""
    turns = dataclasses.replace(SESSIONS, host_cache_bytes=host)
    options = {"max_new_tokens": 14, "eos_ids": EOS, "prompt_width": LONGEST} | options
    made = tiny_rollout.sampler(**options)
    return dataclasses.replace(made, turns=turns, model_config=policy(model)[0])


def sample(gateway, sessions, model="qwen3", **options):
    """The last progress of a rollout of the sessions of a gateway that has begun."""
    prompts = [[1]] * (sessions // options.get("group_size", 1))
    steps = sampler(model, **options).steps(KEY, policy(model)[1], prompts, dialog=gateway)
    *_, last = steps
    return last


LOCK = threading.Lock()  # The server asks from one thread.


def ask(gateway, record, ids, *, max_tokens=None, retry=False):
    """Asks for a turn as the server does, and returns it once it is answered."""
    with LOCK:
        turn = gateway.ask(record, TokenPrompt(ids), max_tokens=max_tokens, retry=retry)
    turn.future.result(timeout=60)
    turn.delivered = True
    return turn


def rollout(episode, sessions=6, model="qwen3", gateway=None, limit=None, sample=sample, **options):
    """Runs an episode in each session, `episode(gateway, record)`, and samples them.

    Returns the gateway and the last progress.
    """
    gateway = gateway or Gateway()
    jobs = jobs_of(sessions, options.get("group_size", 1))
    gateway.begin(jobs, limit or limits())

    def run(job):
        record = gateway.open(job)
        try:
            gateway.close(record.id, reward=episode(gateway, record))
        except BaseException as error:
            gateway.close(record.id, error=repr(error))

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    last = sample(gateway, sessions, model, **options)
    for thread in threads:
        thread.join()
    return gateway, last


def errors_of(gateway):
    """How often sessions have failed for what reason."""
    return collections.Counter(record.error for record in gateway.records() if record.error)


def tokens(count, seed):
    return random_tokens(count, seed=seed).tolist()


class Threads:
    """A runner of functions `solve(session, job)` in threads."""

    def __init__(self, solve):
        self.solve, self.episodes = solve, []
        self.pool = concurrent.futures.ThreadPoolExecutor(1)

    def start(self, server, jobs):
        def run(job):
            try:
                session = server.open(job)
            except ClosedError:
                return
            try:
                server.close(session.id, reward=self.solve(session, job), info={"words": 2})
            except Exception as error:
                server.close(session.id, error=repr(error))

        # Fewer at a time than there are, so that some sessions open once others have ended.
        self.pool = concurrent.futures.ThreadPoolExecutor(3)
        self.episodes = [self.pool.submit(run, job) for job in jobs]

    def is_alive(self):
        return not all(episode.done() for episode in self.episodes)

    def stop(self):
        self.pool.shutdown(cancel_futures=True)

    def close(self):
        self.stop()


def post(url, body, key="", headers=()):
    """The status and the JSON of an answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", **dict(headers)}
    request = urllib.request.Request(url, data, headers | {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
            return answer.status, text if text.startswith("data:") else json.loads(text)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def converse(session, job):
    """A conversation of up to three turns, like that with `environment_cases.Echo`."""
    echo, words = Echo(), 0.0
    text = job.columns["question"] + echo.reset(job.columns["question"], job.seed)
    messages = [{"role": "user", "content": text}]
    for _ in range(3):
        body = {"model": "policy", "messages": messages, "max_tokens": 4}
        status, answer = post(f"{session.base_url}/chat/completions", body, session.key)
        if status == 400 and answer["error"]["code"] == "context_length_exceeded":
            break
        assert status == 200, answer
        messages.append(answer["choices"][0]["message"])
        reply, reward, done = echo.step(messages[-1]["content"])
        words += reward
        if done:
            break
        messages.append({"role": "user", "content": reply})
    return words


class Engine:
    """Answers the requests of a server from a function of all ids of the row, in a thread."""

    def __init__(self, tokenizer, writer, jobs=1, *, answer=None, seconds=None, **limits):
        self.tokenizer, self.end = tokenizer, tokenizer.eos_ids[-1]
        self.gateway, self.rows, self.ended = Gateway(), {}, []
        self.server = AgentServer(self.gateway, writer)
        self.answer = answer or (lambda ids: self.ids("fine"))
        self.jobs = [Job(number, 0, {}, 7) for number in range(jobs)]
        values = {"context": 4000, "max_new_tokens": 2000, "turn_tokens": 0, "vocab_size": 300}
        self.gateway.begin(self.jobs, SessionLimits(**(values | limits), seconds=seconds))
        self.part = self.gateway.part(range(jobs))
        self.asked = []  # what the engine got
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def ids(self, text):
        return [*self.tokenizer.encode(text), self.end]

    def run(self):
        while self.part.is_open:
            for request in self.part.requests(0.05):
                if isinstance(request, Reply):
                    self.ended.append(request)
                    continue
                if request.session is not None:
                    self.part.began(request.row, len(request.ids))
                self.asked.append(request)
                row = self.rows.setdefault(request.row, [])
                row += request.ids
                ids = self.answer(list(row))
                if ids is None:
                    continue  # It is never answered.
                complete = len(ids) <= request.limit
                ids = ids[: request.limit]
                row += ids
                logprobs = [-0.5 - i for i in range(len(ids))]
                turn = Turn(request.row, ids, complete, 0, logprobs=logprobs)
                self.part.submit(turn)

    def open(self, number=0):
        return self.server.open(self.jobs[number])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.gateway.fail_all("the test has ended")
        self.thread.join(timeout=10)
        self.server.stop()
        assert not self.thread.is_alive()
        assert not self.server._thread.is_alive()
