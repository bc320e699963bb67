"""A dry run says what a run would do, refuses what a start would refuse, and leaves nothing."""

import functools
import json
import pathlib

import pytest
import tiny_run
from refusal import refused

from qerl_jax.errors import visible
from qerl_jax.run.folder import open_run
from qerl_jax.training import dry_run
from qerl_jax.weights import model_source

CALLS = []


def misspelled(prompt, completion, answer, num_tokens, finished, **columns):
    return float(columns["no such column"])


async def misspelled_later(prompt, completion, answer, num_tokens, finished):
    return undefined  # noqa: F821


@functools.cache
def keeps(completions):
    """Lists cannot be kept."""
    return [0.0] * len(completions)


def one_of_all(completions, answers):
    return [1.0]


def text(prompt, completion, answer, num_tokens, finished):
    return "1.0"


def of_questions(prompt, completion, answer, num_tokens, finished, question):
    """Fails for a completion that is not the question."""
    return 1.0 / (completion == question)


def of_no_completion(prompt, completion, answer, num_tokens, finished):
    return None


def counted(prompts, completions, num_tokens, finished, question):
    """A reward that takes the lists of whole groups."""
    CALLS.append((prompts, completions, num_tokens, finished, question))
    return [0.25] * len(completions)


@pytest.fixture(autouse=True)
def no_model_is_loaded(monkeypatch):
    def load(*_, **__):
        raise AssertionError("a dry run loads no weights")

    monkeypatch.setattr("qerl_jax.training.first_policy.load", load)


def told(config, **options):
    parts = []
    dry_run.dry_run(config, write=parts.append, **options)
    return "\n".join(parts)


def test_config_counts_and_a_prompt(tiny, tmp_path):
    text = told(tiny.config(), workdir=tmp_path / "run")
    assert "\nrollout.group_size = 4\n" in text
    assert f"run folder: {tmp_path / 'run'}, which would be new" in text
    assert "20 training problems; prompts have 4 to 6 tokens, 5 in the median" in text
    assert "4 held-out problems; prompts have 4 to 6 tokens" in text
    first = json.loads(pathlib.Path(tiny.problems).read_text().splitlines()[0])
    assert f"the first training prompt:\n{first['question']} t1 t2\n" in text
    assert f"its answer: {first['answer']}\n" in text
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_steps(tiny, tmp_path):
    with open_run(tmp_path / "run", tiny.config()) as run:
        run.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    before = tiny_run.contents(tmp_path / "run")
    text = told(tiny.config(), workdir=tmp_path / "run")
    assert f"run folder: {tmp_path / 'run'}, which holds 2 of 4 steps" in text
    assert tiny_run.contents(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout.group_size": 1}, "rollout.group_size=1"),
        ({"data.max_prompt_tokens": 5}, "prompts are over 5 tokens"),
        ({"rollout.max_new_tokens": 10**6}, "data.max_prompt_tokens . rollout.max_new_tokens ="),
        ({"model.source": "/absent"}, "/absent"),
        ({"model.format": "fp4"}, "unknown model.format 'fp4'"),
        ({"lora.init": "/absent"}, "/absent has no adapter_config.json"),
        ({"rl.kl_coef": float("nan")}, "rl.kl_coef=nan"),
        ({"data.path": "/absent.jsonl"}, "/absent.jsonl"),
        ({"rl.dynamic_sampling_metric": "acuracy"}, "'acuracy'"),
        ({"rl.aggregation": "json:dumps"}, "loss weight 'json:dumps' failed"),
        ({"rewards.format.function": "absent:reward"}, "absent"),
    ],
)
def test_what_a_start_refuses(tiny, tmp_path, monkeypatch, changes, words):
    monkeypatch.chdir(tmp_path)
    refused(words, told, tiny.config(changes))
    assert list(tmp_path.iterdir()) == []


def test_a_hub_is_not_asked_for_weights(tiny, monkeypatch):
    asked = []

    def snapshot_download(hub_id, *, allow_patterns):
        asked.append((hub_id, allow_patterns))
        return str(tiny.model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    config, tokenizer = dry_run.read_description("owner/model")
    assert config == tiny_run.architecture(tiny.model)
    assert tokenizer.eos_ids
    ((hub_id, patterns),) = asked
    assert hub_id == "owner/model"
    assert "config.json" in patterns
    assert not any("safetensors" in pattern for pattern in patterns)
    model_source.locate("owner/model")
    assert any("safetensors" in pattern for pattern in asked[1][1])


def test_the_text_of_a_problem_cannot_write_to_the_terminal(tiny, tmp_path):
    problems = tmp_path / "problems.jsonl"
    rows = [{"question": f"t{n} \x1b[2Jt1", "answer": "1\x9b1m"} for n in range(8)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = told(tiny.config({"data.path": str(problems)}), workdir=tmp_path / "run")
    shown = text[text.index("the first training prompt") :]
    assert r"\x1b[2Jt1" in shown
    assert r"its answer: 1\x9b1m" in shown
    assert visible(shown) == shown


@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        ("test_dry_run:misspelled", r"4 of 4 completions: KeyError: .* \(test_dry_run.py:"),
        ("test_dry_run:misspelled_later", "NameError: name 'undefined' is not defined"),
        ("test_dry_run:keeps", "TypeError: unhashable type: 'list'"),
        ("test_dry_run:one_of_all", "it returned 1 rewards for 4 completions"),
        ("test_dry_run:text", "it returned the text '1.0'"),
        ("http://127.0.0.1:1/score", "cannot reach the server"),
    ],
)
def test_a_reward_that_fails_is_found_before_a_rollout(tiny, tmp_path, monkeypatch, reward, cause):
    monkeypatch.setattr("qerl_jax.rewards.url._FIRST_PAUSE", 0.0)
    changes = {"rewards.format.function": reward, "rewards.format.weight": 0.0}
    words = f"reward 'format' is missing for .*{cause}.*: correct the reward"
    refused(words, told, tiny.config(changes), workdir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_reward_may_fail_for_some_completions_and_not_apply_to_others(tiny, tmp_path):
    rewards = {"correctness": "of_questions", "format": "of_no_completion"}
    changes = {f"rewards.{n}.function": f"test_dry_run:{f}" for n, f in rewards.items()}
    shown = told(tiny.config(changes), workdir=tmp_path / "run")
    assert "the answer or the question of a problem: correctness 1, format none\n" in shown
    assert "reward 'correctness' is missing for 2 of 4 completions: ZeroDivisionError" in shown


def test_a_group_of_one_with_a_teacher_alone_has_one_completion(tiny, tmp_path):
    changes = {"teacher.source": str(tiny.model), "teacher.rewards": False}
    changes |= {"rollout.group_size": 1}
    shown = told(tiny.config(changes), workdir=tmp_path / "run")
    assert "\nrewards of 1 made-up completion, each the answer or" in shown


def test_each_reward_gets_a_whole_group(tiny, tmp_path):
    CALLS.clear()
    changes = {"rewards.format.function": "test_dry_run:counted"}
    assert "format 0.25\n" in told(tiny.config(changes), workdir=tmp_path / "run")
    ((prompts, completions, num_tokens, finished, questions),) = CALLS
    first = json.loads(pathlib.Path(tiny.problems).read_text().splitlines()[0])["question"]
    assert prompts == 4 * [f"{first} t1 t2"]
    assert questions == 4 * [first]
    assert completions[1] == completions[3] == first != completions[0] == completions[2]
    assert num_tokens == [1, 2, 1, 2]
    assert finished == 4 * [True]
