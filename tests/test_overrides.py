"""The table of the fields that a run reads matches the code, and unread fields cannot be set."""

import re
import shlex
import shutil

import datasets
import pytest
import tiny_run
from absl.flags import FlagValues
from ml_collections import ConfigDict, config_flags
from problem_sets import load_problems
from recorded_config import Recorded, fields

import qerl_jax.training.loop
from qerl_jax.commands import cli
from qerl_jax.config.experiments import grpo_gsm8k
from qerl_jax.config.fields import ROWS, SPLIT_LOSS
from qerl_jax.config.overrides import check_overrides, unmet_need
from qerl_jax.errors import UserError
from qerl_jax.rl.losses import LOSSES
from qerl_jax.training.loop import train

# Everything that can be off is off.
QUIET = {
    "steps": 3,
    "aqn.schedule": "off",
    "rl.advantage_scale": "none",
    "rl.dual_clip": 2.0,
    "model.format": "bf16",
    "eval.every": 0,
}
# Everything that can be on is on.
BUSY = {
    "seed": 1,  # Some groups have equal rewards.
    "steps": 3,
    "aqn.schedule": "linear",
    "aqn.stages": 3,
    "aqn.sigma_start": 0.3,
    "aqn.sigma_end": 0.1,
    "aqn.kl_every": 1,
    "aqn.correction": "tis",
    "aqn.tis_cap": 1.01,
    "rollout.temperature_schedule": "linear",
    "rollout.temperature_end": 0.9,
    "rl.loss": "bnpo",
    "rl.updates_per_rollout": 2,
    "rl.clip_low": 1e-4,
    "rl.clip_high": 1e-4,
    "rl.dual_clip": 1.0002,
    "rl.kl_coef": 0.5,
    "rl.dynamic_sampling": True,
    "rl.dynamic_sampling_rounds": 2,
    "rl.overlong_buffer": 4,
    "rewards.correctness.function": "tiny_run:rare",
    "rewards.format.weight": 0.0,
    "optimizer.schedule": "cosine",
    "optimizer.learning_rate": 0.01,
    "train.parameters": "lora+norms",  # The norms of the tiny model are 1 until they are trained.
    "eval.every": 1,
    "eval.problems": 12,
    "eval.max_new_tokens": 6,
    "profile.start": 2,
    "profile.stop": 2,
}
# The second noisy step would double its sigma.
KL = {
    "aqn.schedule": "kl",
    "aqn.kl_every": 1,
    "aqn.sigma_start": 0.2,
    "aqn.kl_target_start": 5.0,
    "aqn.kl_target_end": 5.0,
}
SAPO = {"rl.loss": "sapo", "rl.dual_clip": 0.0}
CURRICULUM = {"data.curriculum": "learnability"}
# Modes in which some fields are not read.
MODES = {
    "quiet": QUIET,
    "one stage": {"steps": 3, "aqn.stages": 1, "aqn.correction": "noisy_forward", "eval.every": 0},
    "two stages": {"steps": 3, "aqn.stages": 2, "aqn.kl_every": 0, "eval.every": 0},
    "constant": {"steps": 3, "aqn.stages": 3, "aqn.schedule": "constant", "eval.every": 0},
    "gdpo": QUIET | {"rl.advantage": "gdpo"},
    "sapo": QUIET | SAPO,
    "momentum": QUIET | {"optimizer.name": "tiny_run:momentum"},
    "full": QUIET | {"train.parameters": "full", "optimizer.learning_rate": 1e-3},
    "kl": KL | {"steps": 3, "aqn.stages": 3, "eval.every": 0},
    "late profile": QUIET | {"steps": 1, "profile.start": 2, "profile.stop": 2},
}
# Another value of each field that is not always read.
OTHERS = {
    "teacher.format": "bf16",
    "teacher.coef": 0.5,
    "teacher.rewards": False,
    "rl.advantage": "gdpo",
    "model.calibration": "gptq",
    "lora.rank": 2,
    "lora.expert_rank": 2,
    "lora.alpha": 3.0,
    "lora.rslora": True,
    "lora.targets": ("q_proj",),
    "lora.init": "absent",
    "data.source": "absent/absent",
    "data.path": "absent.jsonl",
    "data.levels": (1,),
    "data.curriculum_share": 0.9,
    "data.eval_source": "absent/absent",
    "data.options": {"absent": 1},
    "data.eval_path": "absent.jsonl",
    "data.fields.question": "absent",
    "data.fields.answer": "absent",
    "data.fields.level": "absent",
    "steps": 5,
    "sft.epochs": 2.0,
    "sft.max_tokens": 40,
    "sft.completions_of": "absent",
    "sft.min_reward": 0.5,
    "rollout.temperature_end": 0.5,
    "rollout.dequantize": "step",
    "environment.max_turns": 2,
    "environment.turn_tokens": 3,
    "environment.reply_tokens": 5,
    "environment.context_tokens": 9,
    "environment.host_cache_bytes": 1000,
    "environment.time_limit": 1.0,
    "environment.processes": 2,
    "environment.python": "/absent/python",
    "environment.harness": "bash",
    "environment.address": "tcp://127.0.0.1:9",
    "environment.options": {"max_concurrent_agents": 2},
    "environment.tasks": 3,
    "environment.session_time_limit": 5.0,
    "aqn.stages": 2,
    "aqn.sigma_start": 0.2,
    "aqn.sigma_end": 0.02,
    "aqn.kl_target_start": 0.5,
    "aqn.kl_target_end": 0.2,
    "aqn.sigma_max": 0.25,
    "aqn.form": "relative",
    "aqn.final_norm": True,
    "aqn.correction": "none",
    "aqn.tis_cap": 0.5,
    "aqn.kl_rows": 1,
    "rl.clip_low": 0.1,
    "rl.clip_high": 0.1,
    "rl.sapo_temperature_pos": 3.0,
    "rl.sapo_temperature_neg": 3.0,
    "rl.dual_clip": 3.0,
    "rl.kl_grad": "unbiased",
    "rl.advantage_scale": "batch",
    "rl.advantage_eps": 0.3,
    "rl.dynamic_sampling_rounds": 1,
    "rl.dynamic_sampling_prompts": 32,
    "rl.dynamic_sampling_metric": "total",
    "rl.overlong_penalty": 0.5,
    "train.micro_batch_rows": 3,
    "optimizer.final_fraction": 0.9,
    "optimizer.b1": 0.5,
    "optimizer.b2": 0.5,
    "optimizer.eps": 1e-3,
    "optimizer.weight_decay": 0.5,
    "eval.problems": 3,
    "eval.max_new_tokens": 1,
}
PROFILE = {"profile.start", "profile.stop"}  # These write files and change no result.
TRACKED = {"log.project", "log.group"}  # These name a run at a service.
# A tiny model reads no text, and its problems have the usual fields and no level.
SOURCES = {"data.source", "data.eval_source", "data.options", "data.fields"}
SOURCES |= {"data.path", "data.levels"}  # test_mixture.py has the runs that do not read these.
SOURCES |= {f"data.fields.{name}" for name in ("question", "answer", "level")}


def with_changes(config, changes):
    """The config with some fields changed; `data.options` is replaced as a whole."""
    for field, value in changes.items():
        if field == "data.options":
            config.data.options = ConfigDict(value)
        else:
            config.update_from_flattened_dict({field: value})
    return config


def outcome(tiny, folder, changes):
    """The metrics, evaluations and completions of a run, without the times."""
    shutil.rmtree(folder, ignore_errors=True)
    train(with_changes(tiny.config(), changes), workdir=folder)
    rows = tiny_run.results(folder)
    for row in rows:
        # rl.dual_clip that clips nothing only adds its metric.
        if row.get("clip_fraction_dual") == 0.0:
            del row["clip_fraction_dual"]
        # At a ratio of 1 the temperatures of SAPO scale the logged loss, but not its gradient.
        if changes.get("rl.loss") == "sapo":
            del row["loss"]
    numbers = {
        f"{name} {row['step']}": value
        for row in rows
        for name, value in row.items()
        if value is not None  # no value, such as the success rate before a problem was measured
    }
    numbers |= {f"evaluation {step}": v for step, v in tiny_run.evaluations(folder).items()}
    return numbers, (folder / "completions.jsonl").read_text()


def same(old, new):
    """Whether two outcomes are equal up to rounding: another constant makes another program."""
    return old[0] == pytest.approx(new[0], rel=1e-4, abs=1e-6) and old[1] == new[1]


def unread(config):
    return {field for field in OTHERS if unmet_need(field, config)}


def test_every_field_that_is_not_always_read_has_another_value_here():
    assert {row.name for row in ROWS.values() if row.read_if} == {*OTHERS, *PROFILE, *TRACKED}


def test_a_section_that_is_set_as_a_whole_stands_for_its_fields(tiny):
    config = tiny.config({"train.parameters": "full"})
    assert unmet_need("lora", config).startswith("an adapter: ")
    assert unmet_need("aqn", config) == ""  # aqn.schedule is always read
    assert unmet_need("data.options.max_terms", config) == unmet_need("data.options", config) != ""


def test_each_need_is_met_in_one_mode_and_not_in_another(tiny):
    talks = BUSY | {"environment.function": "my_env:Game"}
    tasks = BUSY | {"environment.verifiers": "tasks"}
    texts = QUIET | {"sft.rows_per_step": 2, "sft.epochs": 1.0, "sft.completions_of": "absent"}
    taught = BUSY | {"teacher.source": "teacher", "teacher.rewards": False}
    modes = (BUSY, BUSY | CURRICULUM, BUSY | SAPO, talks, tasks, texts, taught, *MODES.values())
    configs = [with_changes(tiny.config(), changes) for changes in modes]
    for row in ROWS.values():
        if row.read_if and row.name not in SOURCES | TRACKED:
            assert {row.read_if.holds(config) for config in configs} == {False, True}, row.name


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_a_project_needs_a_service(tiny, service):
    with pytest.raises(UserError, match=r"log\.project .needs log\.wandb or log\.trackio"):
        check_overrides(tiny.config(), ["log.project"])
    check_overrides(tiny.config({f"log.{service}": True}), sorted(TRACKED))


@pytest.mark.slow  # Each mode has programs of its own.
@pytest.mark.parametrize("mode", MODES)
def test_unread_fields_change_nothing(tiny, tmp_path, mode):
    changes = MODES[mode]
    ignored = unread(with_changes(tiny.config(), changes))
    assert ignored
    others = {field: OTHERS[field] for field in ignored}
    if mode == "late profile":
        others |= dict.fromkeys(PROFILE, 5)
    before = outcome(tiny, tmp_path / "run", changes)
    after = outcome(tiny, tmp_path / "run", changes | others)
    assert same(before, after)
    assert not (tmp_path / "run" / "profile").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["busy", *MODES])
def test_read_fields_are_read(tiny, tmp_path, monkeypatch, mode):
    config = with_changes(tiny.config(), BUSY if mode == "busy" else MODES[mode])
    recorded = Recorded(config, set())
    # Comparing a value with its limits does not count as reading it.
    validate = qerl_jax.training.loop.validate
    monkeypatch.setattr(qerl_jax.training.loop, "validate", lambda c: validate(c.config))
    train(recorded, workdir=tmp_path / "run")
    read = {field for field in fields(config) if not unmet_need(field, config)}
    # These fields name the run folder when no --workdir is given.
    assert read - recorded.reads <= {"experiment", "preset"}


@pytest.mark.slow
def test_read_fields_change_something(tiny, tmp_path):
    tiny_run.write_problems(tmp_path / "eval.jsonl", count=30)
    others = OTHERS | {
        "aqn.correction": "noisy_forward",
        "data.eval_path": str(tmp_path / "eval.jsonl"),
        "lora.init": str(tmp_path / "busy" / "adapter"),
    }
    checked = set()
    taught = BUSY | {"teacher.source": str(tiny.model), "rl.dynamic_sampling": False}
    for mode in (BUSY, BUSY | KL, BUSY | CURRICULUM, BUSY | SAPO, taught):
        before = outcome(tiny, tmp_path / "busy", mode)
        ignored = unread(with_changes(tiny.config(), mode)) | checked | SOURCES
        for field in sorted(set(OTHERS) - ignored):
            changed = outcome(tiny, tmp_path / "run", mode | {field: others[field]})
            # rollout.dequantize changes only time and memory.
            assert same(before, changed) == (field == "rollout.dequantize"), field
            checked.add(field)
    # Those of texts are in test_sft.py.
    others = {name for name in OTHERS if name.startswith(("environment.", "sft."))}
    assert checked == set(OTHERS) - SOURCES - others


def test_a_profile_is_written_where_it_is_read(tiny, tmp_path):
    changes = {"steps": 1, "eval.every": 0, "profile.start": 1, "profile.stop": 1}
    outcome(tiny, tmp_path / "run", changes)
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_sources_are_read_where_no_file_replaces_them(tiny, monkeypatch):
    def dataset(name, *_):
        rows = [{"question": f"{name} {i}", "answer": str(i)} for i in range(4)]
        return {"train": rows, "test": rows}

    monkeypatch.setattr(datasets, "load_dataset", dataset)
    before = {"source": "reasoning_gym:chain_sum", "options": {}, "eval_source": "a/b"}
    others = {
        "source": "reasoning_gym:basic_arithmetic",
        "options": {"min_terms": 3, "max_terms": 5},
        "eval_source": "c/d",
    }
    path = str(tiny.problems)
    for files in ({}, {"path": path}, {"eval_path": path}, {"path": path, "eval_path": path}):
        for name in before:
            config = grpo_gsm8k.get_config()
            config.update_from_flattened_dict({f"data.{key}": file for key, file in files.items()})
            found = [
                load_problems(**settings, **files, split=split, eval_size=2, size=5)
                for settings in (
                    before | {"options": {}},
                    before | {"options": {}, name: others[name]},
                )
                for split in ("train", "eval")
            ]
            is_read = not unmet_need(f"data.{name}", config)
            assert (found[:2] != found[2:]) == is_read, (files, name)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({}, "aqn.tis_cap", "aqn.correction='tis'"),
        ({"aqn.schedule": "off"}, "aqn.sigma_start", "aqn.schedule other than 'off'"),
        ({}, "rl.overlong_penalty", "rl.overlong_buffer"),
        ({}, "rl.kl_grad", "rl.kl_coef"),
        ({}, "rl.dynamic_sampling_rounds", "rl.dynamic_sampling=true"),
        ({"data.path": "x", "data.eval_path": "y"}, "data.source", "data.path"),
        ({"eval.every": 0}, "eval.problems", "eval.every"),
        ({"train.parameters": "full"}, "lora.rank", "train.parameters"),
        ({"steps": 3}, "profile.stop", "profile.start"),
        ({"data.path": "x"}, "data.options.max_terms", "data.path"),
        ({"rl.updates_per_rollout": 1}, "rl.clip_high", "rl.updates_per_rollout"),
        ({"rl.updates_per_rollout": 2}, "rl.sapo_temperature_pos", "rl.loss='sapo'"),
        ({"rl.loss": "sapo"}, "rl.sapo_temperature_neg", "rl.updates_per_rollout"),
    ],
)
def test_an_unread_override_is_named_with_what_it_needs(changes, field, words):
    config = grpo_gsm8k.get_config()
    config.update_from_flattened_dict(changes)
    with pytest.raises(UserError) as error:
        check_overrides(config, ["seed", "aqn.schedule", field])
    assert field in str(error.value)
    assert words in str(error.value)
    assert "seed" not in str(error.value)


def test_a_custom_schedule_may_read_every_field():
    config = grpo_gsm8k.get_config()
    config.aqn.schedule = "my_schedules:triangle"
    config.aqn.stages = 1
    check_overrides(config, ["aqn.sigma_start", "aqn.sigma_end", "aqn.stages", "aqn.form"])


def documented_commands():
    """Experiment and arguments of the command lines in Markdown files and docstrings."""
    paths = [*tiny_run.ROOT.glob("*.md"), *tiny_run.ROOT.glob("experiments/**/*.py")]
    for path in paths:
        for line in path.read_text().replace("\\\n", " ").splitlines():
            command = (
                r"    .*(?:experiments\.(grpo_gsm8k|dapo_math)|\.\.\.) (.*--config\b.*?)(\s#.*)?"
            )
            if found := re.fullmatch(command, line):
                yield found[1] or "grpo_gsm8k", shlex.split(found[2].replace("SEED", "0"))


def parsed(experiment, arguments):
    """The config of a command line, and the fields that the command line sets."""
    given = [argument for argument in arguments if argument.startswith("--config")]
    argv, values = ["", *cli.with_files(given)], FlagValues()
    default = f"experiments/{experiment}.py"
    config_flags.DEFINE_config_file("config", default, flag_values=values, sys_argv=argv)
    values(argv)
    return values.config, config_flags.get_override_values(values["config"])


def test_documented_commands_set_only_what_is_read(monkeypatch):
    monkeypatch.chdir(tiny_run.ROOT)
    commands = [
        command for command in documented_commands() if "--config=my_config.py" not in command[1]
    ]
    for experiment, arguments in commands:
        check_overrides(*parsed(experiment, arguments))
    assert len(commands) > 5


@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_split_the_losses_whose_aggregation_says_so(loss):
    config = grpo_gsm8k.get_config()
    config.rl.loss = loss
    assert SPLIT_LOSS.holds(config) == (LOSSES[loss]["aggregation"] == "micro_batch")
    config.rl.aggregation = "micro_batch"
    assert SPLIT_LOSS.holds(config)
    config.rl.aggregation = "token"
    assert not SPLIT_LOSS.holds(config)
