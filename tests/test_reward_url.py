"""Rewards that a server computes: answers, failures, retries, time limits and tokens."""

import contextlib
import datetime
import decimal
import fractions
import http.server
import json
import math
import threading
import time
import types
import uuid

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from refusal import refused

from qerl_jax.data.sources import Selection, read_problems
from qerl_jax.errors import UserError
from qerl_jax.rewards import calls
from qerl_jax.rewards import score as scoring
from qerl_jax.rewards.calls import Timed
from qerl_jax.rewards.references import needs_answer
from qerl_jax.rewards.url import UrlReward, is_key, json_value, without_keys

SECRET = "s3cr3t-t0ken"


@contextlib.contextmanager
def served(answer):
    """Serves `answer(handler, body)` on loopback; yields the URL and the list of requests."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, self.headers.get("Authorization"), body))
            with contextlib.suppress(OSError):
                answer(self, body)

        def do_GET(self):
            requests.append((self.path, "GET", None))

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def reply(handler, content, status=200, **headers):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def judged(reward, columns):
    """The scores of a reward for one completion a row of columns."""
    texts = ([f"{name}{i}" for i in range(len(columns))] for name in "pca")
    numbers = np.arange(len(columns))
    return scoring.score(
        {"judge": (reward, 1.0)},
        *texts,
        3 + numbers,
        numbers == 0,
        columns=columns,
        time_limit=60.0,
    )


def score(url, time_limit=5.0, **options):
    reward = calls.resolve(url, time_limit=time_limit, **options)
    return judged(reward, [{"tests": [1], "question": "q"}, {"tests": [2]}])


@pytest.mark.parametrize("answer", [[0.5, 2], {"rewards": [0.5, 2]}])
def test_one_post_with_lists(answer):
    with served(lambda handler, body: reply(handler, answer)) as (url, requests):
        scores = score(url)
    np.testing.assert_array_equal(scores.total, [0.5, 2.0])
    assert scores.errors == []
    body = {
        "prompts": ["p0", "p1"],
        "completions": ["c0", "c1"],
        "answers": ["a0", "a1"],
        "num_tokens": [3, 4],
        "finished": [True, False],
        "columns": {"tests": [[1], [2]], "question": ["q", None]},
    }
    assert requests == [("/score", None, body)]


@pytest.mark.parametrize(
    ("content", "status", "causes"),
    [
        ([1.0, None], 200, {"its answer is null": 1}),
        (b"[1.0, NaN]", 200, {"its answer is not a finite number": 1}),
        (b"[1.0, 1e999]", 200, {"its answer is not a finite number": 1}),
        (b"[1" + b"0" * 500 + b", 1.0]", 200, {"its answer is not a finite number": 1}),
        ([True, "1"], 200, {"is a bool, not a number": 1, "is a str, not a number": 1}),
        ([1.0], 200, {"its answer has 1 rewards for 2 completions": 2}),
        ({"scores": [1, 2]}, 200, {"neither a JSON list nor": 2}),
        (b"<html>", 200, {"its answer is not JSON": 2}),
        (b"\xff\xfe", 200, {"its answer is not JSON": 2}),
        ([1, 2], 201, {"status 201": 2}),
        ({"detail": "no\nfield \x1b[31m"}, 422, {'status 422: {"detail": ': 2}),
    ],
)
def test_wrong_answers_are_missing_and_counted_by_cause(content, status, causes):
    with served(lambda handler, body: reply(handler, content, status)) as (url, requests):
        scores = score(url)
    assert len(requests) == 1  # Another attempt would get the same answer.
    assert np.isnan(scores.total).sum() == sum(causes.values())
    assert len(scores.errors) == len(causes)
    for cause, count in causes.items():
        (line,) = [line for line in scores.errors if cause in line]
        assert line.startswith(f"reward 'judge' is missing for {count} of 2 completions: ")
        assert line.isprintable()


def test_a_busy_server_is_asked_again():
    def busy_once(handler, body):
        reply(handler, [1, 2], 503 if len(requests) == 1 else 200)

    with served(busy_once) as (url, requests):
        assert score(url).total.tolist() == [1.0, 2.0]
    assert len(requests) == 2
    with served(lambda handler, body: reply(handler, b"", 503)) as (url, requests):
        (line,) = score(url, retries=1).errors
    assert len(requests) == 2
    assert "status 503 (attempts: 2)" in line


def drip(handler, body):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        time.sleep(0.05)


def flood(handler, body):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b" " * (1 << 20))


@pytest.mark.parametrize("answer", [drip, lambda handler, body: time.sleep(3)])
def test_a_slow_server_costs_its_time_limit(answer):
    with served(answer) as (url, _):
        began = time.perf_counter()
        (line,) = score(url, time_limit=0.3).errors
        assert time.perf_counter() - began < 1.5
    assert "missing for 2 of 2 completions: exceeded the time limit of 0.3 s" in line


def test_an_endless_answer_is_cut_off():
    with served(flood) as (url, _):
        assert "its answer has more than 16 MB" in score(url).errors[0]


def test_the_time_limit_includes_the_retries():
    with served(lambda handler, body: reply(handler, b"", 503)) as (url, _):
        began = time.perf_counter()
        (line,) = score(url, time_limit=0.3, retries=50).errors
        assert time.perf_counter() - began < 1.5
    assert "status 503; then its time limit ended" in line


def test_a_server_that_is_not_there():
    with served(lambda handler, body: None) as (url, _):
        pass
    (line,) = score(url, retries=0).errors
    assert "cannot reach the server: " in line


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(status, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    with served(lambda handler, body: reply(handler, [1, 2])) as (other, requests):
        redirect = lambda handler, body: reply(handler, b"", status, Location=other)  # noqa: E731
        with served(redirect) as (url, _):
            (line,) = score(url, token_env="JUDGE_TOKEN").errors
    assert f"status {status}: redirects are not followed" in line
    assert requests == []


def test_the_token_is_sent_and_never_shown(monkeypatch):
    def echo(handler, body):
        reply(handler, f"no {handler.headers['Authorization']}".encode(), 403)

    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    with served(echo) as (url, requests):
        scores = score(url, token_env="JUDGE_TOKEN")
        assert SECRET not in repr(calls.resolve(url, token_env="JUDGE_TOKEN"))
    assert requests[0][1] == f"Bearer {SECRET}"
    assert scores.errors[0].endswith("status 403: no Bearer ***")


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("ftp://host/x", {}, "'ftp://host/x': not a URL"),
        ("http://", {}, "not a URL"),
        ("ftp://me:s3cr3t@host", {}, "a user name or a password"),
        ("http://host:port/", {}, "a URL that cannot be read"),
        ("http://host/?api_key=s3cr3t", {}, "'api_key' in its URL"),
        ("http://host/?a=1&API-Key=s3cr3t", {}, "pass a key by token_env=VARIABLE"),
        ("http://host/?a=1;accessToken=s3cr3t", {}, "'accessToken' in its URL"),
        ("http://host/?X-Amz-Signature=s3cr3t", {}, "'X-Amz-Signature' in its URL"),
        ("http://host/?%6bey=s3cr3t", {}, "'key' in its URL"),
        ("http://host/#s3cr3t", {}, "a fragment, '#...', in its URL"),
        ("http://me:s3cr3t-t0ken@host/", {}, "a user name or a password in its URL"),
        ("http://host/", {"token_env": "s3cr3t-t0ken"}, "not the token itself"),
        ("http://host/", {"token_env": "ABSENT_s3cr3t"}, "that its token_env names is not set"),
        ("http://host/", {"token_env": "BROKEN"}, "no token of visible ASCII characters"),
    ],
)
def test_bad_urls_and_tokens_are_errors_before_training(url, options, words, monkeypatch):
    monkeypatch.setenv("BROKEN", f"{SECRET} and\nmore")
    said = refused(words, calls.resolve, url, **options)
    assert "s3cr3t" not in said


@pytest.mark.parametrize(
    "name",
    [
        *("key", "api_key", "apikey", "API-KEY", "apiKey", "x-api-key", "token", "access_token"),
        *("secret", "client_secret", "sig", "signature", "X-Goog-Signature", "password", "pwd"),
        *("auth", "Authorization", "code", "subscription-key", "subscriptionkey", "sas_token"),
    ],
)
def test_names_of_keys(name):
    assert is_key(name)
    assert without_keys(f"a http://h/?x=1&{name}=S&y=2 b") == f"a http://h/?x=1&{name}=***&y=2 b"


@pytest.mark.parametrize("name", ["model", "keyboard", "tokens", "max_tokens", "author", "monkey"])
def test_names_of_other_parameters(name):
    url = f"http://host/?{name}=1"
    assert not is_key(name)
    assert without_keys(url) == url
    UrlReward(url)


def test_a_password_is_left_out_of_a_text():
    assert without_keys("https://me:s3cr3t@host/x and a@b") == "https://***@host/x and a@b"


def test_a_server_may_judge_without_a_reference_answer():
    assert not needs_answer(calls.resolve("http://127.0.0.1:1/", time_limit=3.0))


# --- Columns --------------------------------------------------------------------------------------

MOMENT = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (math.nan, None),
        (-math.inf, None),
        ([1.0, math.nan, {"a": math.inf}], [1.0, None, {"a": None}]),
        (MOMENT, "2026-01-02T03:04:05+00:00"),
        (MOMENT.date(), "2026-01-02"),
        (MOMENT.time(), "03:04:05"),
        (datetime.timedelta(minutes=1.5), 90.0),
        (b"\x00png", "AHBuZw=="),
        (decimal.Decimal("1.50"), "1.50"),
        (decimal.Decimal("NaN"), None),
        (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (np.float32("nan"), None),
        (np.int64(3), 3),
        (np.arange(3.0), [0.0, 1.0, 2.0]),
        ((1, "a", True, None), [1, "a", True, None]),
        ({1: {"b": (2,)}}, {"1": {"b": [2]}}),
        (types.SimpleNamespace(moves=[math.inf]), {"moves": [None]}),  # a column environments
    ],
    ids=str,
)
def test_columns_that_json_does_not_have_are_sent_in_another_form(value, sent):
    """No request was ever made for them, which a run found out after its first rollout."""
    rows = [{"question": "q", "x": value}] * 3 + [{"question": "q", "x": 1.0}]
    with served(lambda handler, body: reply(handler, [1.0] * len(body["completions"]))) as (
        url,
        requests,
    ):
        reward = UrlReward(url, retries=0)
        calls.check_columns("judge", reward, rows)
        found = judged(reward, rows)
    assert found.errors == []
    assert found.total.tolist() == [1.0] * 4
    ((*_, body),) = requests
    assert body["columns"] == {"question": ["q"] * 4, "x": [sent] * 3 + [1.0]}


@pytest.mark.parametrize(
    ("value", "kind"),
    [(fractions.Fraction(1, 2), "Fraction"), ([{"a": {3}}], "set"), ({(1, 2): 3}, "dict")],
)
def test_columns_without_a_form_in_json_are_refused_before_training(value, kind):
    reward, rows = UrlReward("http://127.0.0.1:9/x"), [{"x": 1}, {"x": value}]
    with pytest.raises(UserError, match=f"'judge' .* type {kind} in the column 'x' of problem 2: "):
        calls.check_columns("judge", Timed(reward, 3.0), rows)
    calls.check_columns("judge", lambda *_, **columns: 1.0, rows)  # which gets them as they are
    (line,) = judged(reward, rows[1:]).errors
    assert f"JSON has no form of the type {kind} in the column 'x'" in line


def test_the_columns_of_a_parquet_file_reach_a_server(tmp_path):
    columns = {"when": [MOMENT] * 2, "image": [b"\x00"] * 2, "score": [math.nan, 1.0]}
    columns |= {"price": [decimal.Decimal("1.50")] * 2}
    table = {"question": ["1+1?", "2+2?"], "answer": ["2", "4"]} | columns
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "p.parquet")
    rows = [problem.columns for problem in read_problems(str(tmp_path / "p.parquet"), Selection())]
    calls.check_columns("judge", UrlReward("http://127.0.0.1:9/x"), rows)
    assert json_value(dict(rows[0])) == {
        "question": "1+1?", "answer": "2", "when": "2026-01-02T03:04:05+00:00", "image": "AA==",
        "score": None, "price": "1.50",
    }  # fmt: skip
