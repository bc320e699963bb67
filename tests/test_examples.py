"""examples/: the rewards are what their texts say, and each main function trains."""

import http.server
import importlib.util
import pathlib
import threading

import pytest
import tiny_run

import qerl_jax
from qerl_jax.rewards.calls import resolve

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_word_is_the_best_answer():
    reward = example("own_reward").one_word
    texts, finished = ["Fox.", "A fox.", "1", "Fox."], [True, True, True, False]
    scores = qerl_jax.score(reward, ["q"] * 4, texts, [""] * 4, [3] * 4, finished)
    assert scores.total.tolist() == [1.0, 0.5, 0.0, 0.0]


def test_the_judge_answers_a_reward_by_url():
    judge = example("judge_by_url").Judge
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), judge) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        texts = ["3 + 4 = 7", "8", "seven"]
        url = f"http://127.0.0.1:{server.server_port}/score"
        rewards = {"judge": (resolve(url), 1.0)}
        scores = qerl_jax.score(rewards, ["q"] * 3, texts, ["7"] * 3, [3] * 3, [True] * 3)
        server.shutdown()
        thread.join()
    assert scores.errors == []
    assert scores.total.tolist() == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("expression", ["1 / 0", "2 +", "x", "9" * 5000, "-" * 5000 + "1"])
def test_the_calculator_answers_what_has_no_value(expression):
    calculator = example("calculator").TextCalculator()
    calculator.reset()
    text, reward, done = calculator.step(f"<calculate>{expression}</calculate>")
    assert text.startswith("error: ")
    assert (reward, done, calculator.results) == (0.0, False, [])


@pytest.mark.slow  # each is a run of a tiny model
@pytest.mark.parametrize("name", ["own_reward", "judge_by_url"])
def test_an_example_trains(name, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(qerl_jax, "get_config", lambda _: tiny.config(), raising=False)
    module = example(name)
    monkeypatch.setattr(module, "ADDRESS", ("127.0.0.1", 18765), raising=False)
    run = module.main()
    rows = tiny_run.results(run)
    assert len(rows) >= 10
    assert all(row["rewards_missing"] == 0 for row in rows)
