"""A run that compiles each of its programs once.

It must begin without programs, and the modules in `conftest.RUNS` share those in memory.
"""

import tiny_run

import qerl_jax.training.step
from qerl_jax.compile.run_cache import set_cache_folder
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.training.loop import train


def test_rollouts_are_compiled_once_refilled_and_stopped(tiny, tmp_path, monkeypatch, capsys):
    compiled, collect = [], qerl_jax.training.step.collect

    def recording(*arguments, **options):
        compiled.append(options["options"].sampler.executables)
        return collect(*arguments, **options)

    monkeypatch.setattr(qerl_jax.training.step, "collect", recording)
    changes = {
        "seed": 3,
        "steps": 4,
        "eval.every": 0,
        "log.completions": 8,
        "rollout.max_rows": 3,
        "rollout.stop": ("t1",),
    }
    with set_cache_folder(tmp_path / "programs"):
        run = train(tiny.config(changes), workdir=tmp_path / "run")
    # Five programs of the rollout and four of the update.
    assert all(len(executables) == 9 for executables in compiled)
    assert "compiled 9 of 9 programs in " in capsys.readouterr().out
    assert all(0.2 < row["rollout_live_share"] < 1 for row in tiny_run.results(run))
    completions = [row["completion"].split() for row in read_jsonl(run / "completions.jsonl")]
    stopped = [words for words in completions if any(word.startswith("t1") for word in words)]
    assert len(stopped) > 10
    for words in stopped:
        assert not any(word.startswith("t1") for word in words[:-1])
