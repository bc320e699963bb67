"""Problems, prompts and scorers of tasks."""

import json

import datasets
import numpy as np
import pytest
from finished_run import META
from problem_sets import load_problems
from refusal import refused

from qerl_jax.config.experiments import sft
from qerl_jax.config.experiments.grpo_gsm8k import get_config
from qerl_jax.data.prompts import Problem
from qerl_jax.data.splits import digest_of_problems
from qerl_jax.errors import UserError
from qerl_jax.evaluation.tasks import (
    BENCHMARKS,
    SYSTEM_PROMPT,
    TaskOverrides,
    extracted_answer,
    make_tasks,
)
from qerl_jax.rewards import functions
from qerl_jax.rewards.calls import resolve
from qerl_jax.rewards.url import UrlReward
from qerl_jax.run.checkpoints import Checkpoints
from qerl_jax.run.folder import config_dict

REWARDS = "qerl_jax.rewards.functions:"
ROWS = {
    "openai/gsm8k": {"question": "How many?", "answer": "9 + 9\n#### 1,018"},
    "HuggingFaceH4/MATH-500": {"problem": "Half?", "solution": "no", "answer": r"\frac{1}{2}"},
    "math-ai/aime24": {"problem": "Find m+n.", "solution": r"\boxed{204}", "url": "x"},
    "math-ai/aime25": {"problem": "Find b.", "answer": "70", "id": "0"},
    "math-ai/amc23": {"id": 0, "question": "What time?", "answer": 27.0, "url": "x"},
}


@pytest.fixture
def hub(monkeypatch):
    """Replaces the hub, as far as these tasks need it; returns the list of requests."""
    asked = []

    def load_dataset(name, configuration=None):
        asked.append((name, configuration))
        return {"test": [ROWS[name]]}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


@pytest.fixture
def file(tmp_path):
    def write(*answers, name="my.jsonl"):
        rows = [{"question": f"q{i}", "answer": answer} for i, answer in enumerate(answers)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return write


@pytest.fixture
def run():
    """The config of a run of the default command."""
    return config_dict(get_config())


def make(*names, run=None, folder=None, trusted=True, **overrides):
    given = {name: tuple(values) for name, values in overrides.items()}
    overrides = TaskOverrides(**given)
    return make_tasks(names, run=run, folder=folder, overrides=overrides, trusted=trusted)


def test_benchmarks_come_from_the_hub(hub):
    tasks = make(*BENCHMARKS)
    assert [task.name for task in tasks] == ["gsm8k", "math500", "aime24", "aime25", "amc23"]
    answers = [task.problems[0].answer for task in tasks]
    assert answers == ["1018", r"\frac{1}{2}", "204", "70", "27"]
    assert [task.problems[0].question for task in tasks] == [
        row[BENCHMARKS[name].fields[0]] for name, row in zip(BENCHMARKS, ROWS.values(), strict=True)
    ]
    assert hub == [("openai/gsm8k", "main"), *((name, None) for name in list(ROWS)[1:])]
    assert tasks[0].scorer == REWARDS + "numeric_answer"
    assert {task.scorer for task in tasks[1:]} == {REWARDS + "math_answer"}
    for task in tasks:
        assert (task.prompt.system_prompt, task.prompt.question_suffix) == (SYSTEM_PROMPT, "")
        assert task.format_scorer == REWARDS + "boxed_format"
        assert task.max_new_tokens == BENCHMARKS[task.name].max_new_tokens


def test_a_model_is_asked_gsm8k(hub):
    assert [task.name for task in make()] == ["gsm8k"]


def test_without_the_hub_the_message_says_what_to_pass(monkeypatch, file):
    def load_dataset(name, configuration=None):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    error = refused(r"math-ai/aime24.*no route.*problem and solution", make, "aime24")
    assert "--data=aime24=FILE.jsonl" in error
    path = file("1", "2")
    (task,) = make("aime24", data=[f"aime24={path}"])
    assert task.source == path
    assert [problem.answer for problem in task.problems] == ["1", "2"]
    assert task.scorer == REWARDS + "math_answer"


@pytest.mark.parametrize(
    ("answers", "scorer"), [(("1", "-2.5"), "numeric_answer"), (("1", r"\pi"), "math_answer")]
)
def test_a_file_is_a_task(file, answers, scorer):
    (task,) = make(file(*answers))
    assert (task.name, task.scorer) == ("my", REWARDS + scorer)
    assert task.problems == [Problem(f"q{i}", answer) for i, answer in enumerate(answers)]
    assert task.max_new_tokens == 1024


@pytest.mark.slow
def test_a_run_is_asked_what_it_held_out(run, file):
    (task,) = make(run=run)
    assert task.name == "run"
    data = run["data"]
    train = load_problems(data["source"], options=data["options"], eval_size=256, size=1000)
    assert len(task.problems) == 256
    assert not set(task.problems) & set(train)
    assert task.prompt.system_prompt == "Be brief."
    assert task.prompt.question_suffix == ""
    assert tuple(task.prompt.examples) == ("What is 21 + 4?", "21 + 4 = 25")
    assert task.scorer == REWARDS + "whole_answer"
    assert task.format_scorer == REWARDS + "equation_format"
    assert task.max_new_tokens == 12
    # A file has the same prompt and scorers.
    run["rewards"]["correctness"]["function"] = REWARDS + "tagged_answer"
    (task,) = make(file("1"), run=run)
    assert task.scorer == REWARDS + "tagged_answer"
    assert task.prompt.system_prompt == "Be brief."


def test_a_generated_task_with_several_answers_has_no_other_judge(run):
    """Such a run has its own reward; one that compares may not take its place."""
    own = f"{__name__}:by_the_scorer_of_the_task"
    run["data"] |= {"source": "reasoning_gym:number_sorting", "options": {}}
    run["rewards"] = {"correctness": {"function": own, "weight": 1.0}}
    for judge in ("math_answer", "exact_answer"):
        with pytest.raises(UserError, match=f"accepts several answers, of which {judge} knows one"):
            make("run", run=run, scorer=[REWARDS + judge])


def by_the_scorer_of_the_task(prompt, completion, answer, num_tokens, finished, metadata):
    raise NotImplementedError


def test_a_benchmark_keeps_its_scorer_and_its_limit_for_a_run(run, hub, file):
    run["rollout"] |= {"stop": ["</answer>"], "kv_cache_dtype": "float8"}
    given = [f"gsm8k={file('1')}"]
    benchmarks = make("math500", "gsm8k", run=run, data=given)
    assert [task.scorer for task in benchmarks] == [
        REWARDS + "math_answer",
        REWARDS + "numeric_answer",
    ]
    assert [task.max_new_tokens for task in benchmarks] == [4096, 1024]
    # The problems and files of the run have its limit; all have its prompt and its stop strings.
    tasks = benchmarks + make("run", file("1", name="other.jsonl"), run=run)
    assert [task.max_new_tokens for task in tasks[2:]] == [12, 12]
    for task in tasks:
        assert task.prompt.system_prompt == "Be brief."
        assert (task.stop, task.kv_cache_dtype) == (("</answer>",), "float8")
    assert [task.stop for task in make("math500", "gsm8k", data=given)] == [(), ()]
    (task,) = make("math500", run=run, max_new_tokens=["99"])
    assert task.max_new_tokens == 99


def test_answers_that_the_scorer_cannot_read_are_left_out(file, capsys):
    path = file("18", r"\boxed{}", "I see. There is none.", "", r"\pi")
    (task,) = make(path)
    assert task.scorer == REWARDS + "math_answer"
    assert [problem.answer for problem in task.problems] == ["18", r"\pi"]
    (task,) = make(path, scorer=[REWARDS + "numeric_answer"])
    assert [problem.answer for problem in task.problems] == ["18"]
    assert capsys.readouterr().out.count("left out") == 4
    # A judge that uses no answer needs none.
    assert len(make(path, scorer=["tiny_run:even_end"])[0].problems) == 5
    # One bad row does not choose another scorer for a whole file.
    numbers = file("18", "19", "I see. There is none.")
    assert make(numbers)[0].scorer == REWARDS + "numeric_answer"


def test_the_problems_that_a_run_held_out_are_the_same(run, file, tmp_path):
    run["data"] |= {"source": "", "path": file(*map(str, range(20)))}
    run["eval"]["problems"] = 0
    (task,) = make(run=run)
    assert [problem.answer for problem in task.problems] == ["18", "19"]
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        meta = META | {"problems": {"train": "x", "eval": digest_of_problems(task.problems)}}
        checkpoints.save(1, {"x": np.zeros(1)}, meta)
        checkpoints.wait()
        assert make(run=run, folder=tmp_path)[0].problems == task.problems
    file(*map(str, range(21)))
    refused(r"held out have changed since.*--data=run=FILE\.jsonl", make, run=run, folder=tmp_path)
    assert len(make("run", run=run, folder=tmp_path, data=[f"run={file('1')}"])[0].problems) == 1


def test_overrides_are_for_all_tasks_or_one(hub, file):
    first, second = make(
        "gsm8k",
        file("1"),
        system_prompt=["my=a=b", "x = y"],
        max_new_tokens=["77"],
        scorer=["my=m:f"],
        format_scorer=["gsm8k="],
    )
    assert (first.prompt.system_prompt, second.prompt.system_prompt) == ("x = y", "a=b")
    assert (first.max_new_tokens, second.max_new_tokens) == (77, 77)
    assert (first.scorer, second.scorer) == (REWARDS + "numeric_answer", "m:f")
    assert (first.format_scorer, second.format_scorer) == ("", REWARDS + "boxed_format")


def test_the_fingerprint_is_of_the_problems(file):
    (one,), (same,) = make(file("1", "2")), make(file("1", "2", name="other.jsonl"))
    (other,) = make(file("1", "3"))
    assert one.problems_digest == same.problems_digest != other.problems_digest


@pytest.mark.parametrize(
    ("names", "overrides", "words"),
    [
        (["gsm8"], {}, ["gsm8", "gsm8k, math500", "FILE.jsonl"]),
        (["a/my.jsonl", "my.jsonl"], {}, ["my", "occurs twice"]),
        (["absent.jsonl"], {}, ["absent.jsonl", "cannot read"]),
        (["run"], {}, ["not a run folder"]),
        (["gsm8k"], {"data": ["x.jsonl"]}, ["--data=x.jsonl", "TASK=FILE.jsonl"]),
        (["gsm8k"], {"data": ["math500=x.jsonl"]}, ["math500=x.jsonl", "gsm8k"]),
        (["gsm8k"], {"max_new_tokens": ["0"]}, ["--max-new-tokens=0", "at least 1"]),
        (["gsm8k"], {"max_new_tokens": ["many"]}, ["--max-new-tokens=many"]),
        (["gsm8k"], {"scorer": [""]}, ["gsm8k", "--judge=MODULE:FUNCTION"]),
    ],
)
def test_what_cannot_be_asked(hub, names, overrides, words):
    error = refused(".", make, *names, **overrides)
    assert all(word in error for word in words), error


def test_a_run_that_learned_from_text_is_asked_a_file(file):
    run = config_dict(sft.get_config())
    refused(r"held-out rows have no scorer; .*--tasks=FILE\.jsonl", make, run=run)
    (task,) = make(file("1", "2"), run=run)
    assert (task.scorer, task.format_scorer) == (REWARDS + "numeric_answer", "")
    assert task.prompt.system_prompt == run["data"]["system_prompt"]


def test_a_run_may_have_nothing_to_ask(run, file):
    run["eval"]["every"] = 0
    for source in ("", "held_out"):
        run["data"]["eval_source"] = source
        refused("held out no problems", make, run=run)
    run["data"]["eval_path"] = file("1")
    assert len(make(run=run)[0].problems) == 1
    run["data"]["eval_path"] = "gone.jsonl"
    refused(r"gone\.jsonl.*--data=run=FILE\.jsonl", make, run=run)
    assert len(make("run", run=run, data=[f"run={file('1', '2')}"])[0].problems) == 2
    run["data"]["eval_path"] = file("1")
    run["rewards"].pop("correctness")
    refused("--judge", make, run=run)


@pytest.mark.parametrize(
    ("scorer", "completion", "expected"),
    [
        ("numeric_answer", r"3 * 6 = \boxed{1,018.0} dollars", "1018"),
        ("numeric_answer", "It is 5.\n#### $18\nor 19", "18"),
        ("numeric_answer", "so 17, no, 18 eggs", "18"),
        ("numeric_answer", r"18 \boxed{none}", None),
        ("numeric_answer", r"\boxed{12 500}", "12500"),
        ("numeric_answer", r"\boxed{3} and \boxed{5}", None),
        ("numeric_answer", "1" * 40 + ".50", "1" * 40 + ".5"),
        ("numeric_answer", "3.10e-9", "0.0000000031"),
        ("numeric_answer", "1.5e3", "1500"),
        ("boxed_answer", "18", None),
        ("boxed_answer", r"\fbox{1,00,000}", "100000"),
        ("tagged_answer", r"\boxed{3} <answer>x = 4</answer>", "4"),
        ("exact_answer", " yes ", "yes"),
        ("whole_answer", r" 3 + 4 = \boxed{7} ", r"3 + 4 = \boxed{7}"),
        ("math_answer", r"\boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        ("math_answer", r"<answer>$x + 1$.</answer>", "x+1"),
        ("math_answer", r"\boxed{0.50}", "0.5"),
        ("math_answer", r"\boxed{1} and \boxed{-2}", "1,-2"),
        ("math_answer", "It is $0.5$.", None),
        ("math_answer", r"\boxed{}", None),
        ("other", r"\boxed{a}", "a"),
        ("other", "first\nthe last.\n", "thelast"),
    ],
)
def test_extracted_answer(scorer, completion, expected):
    assert extracted_answer(completion, REWARDS + scorer) == expected


@pytest.mark.parametrize(
    "scorer", ["numeric_answer", "boxed_answer", "tagged_answer", "exact_answer"]
)
def test_the_extracted_answer_is_the_one_that_is_scored(scorer):
    texts = [r"\boxed{7} 8", "#### 7\n8", "7 8", "<answer>7</answer> 8", "8 7", "7", "no"]
    for text in texts:
        found = extracted_answer(text, REWARDS + scorer)
        correct = getattr(functions, scorer)("", text, "7", 1, True)
        assert correct == float(found == "7"), text


def test_a_run_is_judged_by_its_own_rewards(run, file):
    """With their time limits and tokens, and with the arguments of its chat template."""
    url = "http://127.0.0.1:1/score"
    judge = {"function": url, "weight": 1.0, "time_limit": 60.0, "token_env": "JUDGE", "retries": 5}
    run["rewards"]["correctness"] = judge
    run["data"]["chat_template_args"] = {"enable_thinking": False}
    path = file("a long story", name="mine.jsonl")
    refused(r"'JUDGE', which is sent only if .* by --token-env", make, path, run=run)
    (task,) = make(path, run=run, token_env=["JUDGE"])
    assert task.scorer == url
    assert task.options["scorer"] == {"time_limit": 60.0, "token_env": "JUDGE", "retries": 5}
    assert task.options["format_scorer"] == {}
    assert task.prompt.chat_template_args == {"enable_thinking": False}
    # A benchmark has its own scorer, which is no URL.
    (benchmark,) = make("gsm8k", run=run, data=[f"gsm8k={file('7')}"])
    assert benchmark.options["scorer"] == {}
    resolve(benchmark.scorer, **benchmark.options["scorer"])
    # The command line decides over the run.
    arguments = {"scorer": ["http://127.0.0.1:2/"], "token_env": ["OTHER"]}
    (task,) = make(path, run=run, chat_template_args=["{}"], **arguments)
    assert task.options["scorer"] == {"token_env": "OTHER"}
    assert task.prompt.chat_template_args == {}
    refused(r"--token-env=OTHER: no scorer is a URL", make, path, token_env=["OTHER"])
    with pytest.raises(UserError, match=r"--chat-template-args=\[1\]: a JSON object is needed"):
        make(path, chat_template_args=["[1]"])
    assert isinstance(resolve(task.scorer, retries=1), UrlReward)


@pytest.mark.parametrize(
    ("flags", "judge", "format_judge"),
    [
        (["A", "B"], "A", "B"),
        (["B,A"], "A", "B"),
        (["mine=A", "mine=B"], "A", "B"),
        (["C", "B"], "C", "B"),  # instead of what the run names
        (["A"], "the reward '.*/b' .* 'B'", ""),
        (["A,B,C,D"], "--token-env=A,B,C,D: no reward names 'C'", ""),
    ],
)
def test_each_reward_gets_the_token_that_it_names(run, file, flags, judge, format_judge):
    for name, token in (("correctness", "A"), ("format", "B")):
        url = f"http://127.0.0.1:1/{token.lower()}"
        run["rewards"][name] = {"function": url, "weight": 1.0, "token_env": token}
    path = file("7", name="mine.jsonl")
    if not format_judge:
        refused(judge, make, path, run=run, token_env=flags)
        return
    (task,) = make(path, run=run, token_env=flags)
    found = {field: options["token_env"] for field, options in task.options.items()}
    assert found == {"scorer": judge, "format_scorer": format_judge}


@pytest.mark.parametrize(
    "function",
    [
        "http://127.0.0.1:1/score",
        "timeit:repeat",
        "qerl_jax.rewards.functions:overlong_penalty",
        "qerl_jax.evaluation.evaluate:evaluate",
    ],
)
@pytest.mark.parametrize(("reward", "flag"), [("correctness", "judge"), ("format", "format-judge")])
def test_a_run_of_another_person_names_no_functions(run, file, function, reward, flag):
    run["rewards"][reward] = {"function": function, "weight": 1.0}
    path = file("7", name="mine.jsonl")
    refused(f"'{function}' is named by .* --{flag} .*--trust", make, path, run=run, trusted=False)
    field = {"judge": "scorer", "format-judge": "format_scorer"}[flag]
    (task,) = make(path, run=run, trusted=False, **{field: [function]})
    assert getattr(task, field) == function
    # A built-in scorer of a benchmark takes the place of the run's.
    if reward == "correctness":
        make("gsm8k", run=run, trusted=False, data=[f"gsm8k={path}"])


def test_no_other_reward_of_such_a_run_is_imported(run, file, tmp_path, monkeypatch):
    """Training reads the columns of all rewards, and held-out problems are found by them."""
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    run["rewards"]["third"] = {"function": "theirs:f", "weight": 1.0}
    run["data"]["eval_path"] = file("7")
    for trusted in (False, True):
        make(run=run, trusted=trusted)
        assert (tmp_path / "imported").exists() == trusted
