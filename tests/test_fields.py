"""The rows of the config's fields: each explains a field, and modules implement its choices."""

import itertools
import math
import re

import pytest

from qerl_jax.config import describe, resume
from qerl_jax.config.experiments import dapo_math, grpo_gsm8k
from qerl_jax.config.fields import (
    FIELDS,
    ROWS,
    LinkedDefault,
    ModelDefault,
    Section,
    keys_of,
    row_of,
)
from qerl_jax.config.models import MODELS, lora_targets
from qerl_jax.data import mixture
from qerl_jax.errors import UserError, check_limits
from qerl_jax.policy import aqn, kl_control
from qerl_jax.policy.layers.kinds import ALL_PROJECTIONS, PROJECTIONS
from qerl_jax.policy.trainable import PARAMETERS
from qerl_jax.rewards import from_config
from qerl_jax.rl.advantages import ADVANTAGES, SCALES
from qerl_jax.rl.losses import AGGREGATIONS, KL_GRADS, LOSSES
from qerl_jax.rl.train_step import OptimizerConfig, make_optimizer
from qerl_jax.rollout.config import ACTIVATIONS
from qerl_jax.rollout.head import HEAD_FORMATS
from qerl_jax.rollout.shapes import _CACHE_DTYPES
from qerl_jax.run.folder import config_dict, flatten
from qerl_jax.training.setup import CURVES
from qerl_jax.training.validate import validate
from qerl_jax.weights.load import DTYPES, FORMATS


def choices_in_error(call):
    """The choices that the error of an unknown name lists."""
    with pytest.raises(UserError) as caught:
        call()
    return tuple(str(caught.value).partition(": choose from ")[2].split(", "))


def optimizer(schedule):
    return make_optimizer(
        OptimizerConfig(
            learning_rate=1e-3,
            schedule=schedule,
            final_fraction=0.1,
            warmup_updates=0,
            total_updates=4,
            b1=0.9,
            b2=0.9,
            eps=1e-8,
            weight_decay=0.0,
            max_grad_norm=1.0,
        )
    )


# What modules implement for the choices of a field.
IMPLEMENTED = {
    "model.format": FORMATS,
    "teacher.format": FORMATS,
    "model.dtype": tuple(DTYPES),
    "lora.targets": ALL_PROJECTIONS,
    "rollout.temperature_schedule": tuple(CURVES),
    "rollout.kv_cache_dtype": ("", *_CACHE_DTYPES),
    "rollout.activations": ACTIVATIONS,
    "rollout.head_format": HEAD_FORMATS,
    "aqn.schedule": (*aqn.SCHEDULES, kl_control.SCHEDULE),
    "aqn.form": aqn.FORMS,
    "rl.loss": tuple(LOSSES),
    "rl.aggregation": ("", *AGGREGATIONS),
    "rl.kl_grad": KL_GRADS,
    "rl.advantage": ADVANTAGES,
    "rl.advantage_scale": SCALES,
    "optimizer.name": ("adamw",),
    "optimizer.schedule": choices_in_error(lambda: optimizer("x")),
    "train.parameters": PARAMETERS,
}
# Names that no module has in a table.
COMPARED_IN_PLACE = {
    *(
        "data.curriculum",
        "rollout.dequantize",
        "rollout.drafts",
        "aqn.correction",
        "rl.routing_replay",
    ),
    "model.calibration",
}

RESUMED = {
    "memory": {
        "environment.host_cache_bytes",
        *("rollout.max_rows", "rollout.kv_cache_bytes", "rollout.chunk_steps"),
        *("rollout.dequantize", "rollout.drafts", "train.buffer_tokens", "train.recompute"),
        *("train.micro_batch_rows", "mesh.data", "mesh.tensor"),
        *("rewards.NAME.time_limit", "rewards.NAME.retries", "rewards.NAME.token_env"),
        *("environment.time_limit", "environment.processes", "environment.session_time_limit"),
    },
    "source": {
        *("model.source", "data.source", "data.path", "data.eval_source", "data.eval_path"),
        *("data.mixture.NAME.source", "data.mixture.NAME.path"),
        *("teacher.source", "teacher.adapter"),
    },
    "free": {
        *("steps", "checkpoint.every", "checkpoint.keep", "profile.start", "profile.stop"),
        *("log.completions", "log.tensorboard", "log.wandb", "log.trackio", "log.project"),
        *("log.group", "log.print_completions", "rl.routing_check_every"),
        *("environment.address", "environment.python"),
    },
}


def test_the_choices_of_a_row_are_those_of_its_module():
    assert {name: ROWS[name].choices for name in IMPLEMENTED} == IMPLEMENTED
    assert {row.name for row in ROWS.values() if row.choices} == {*IMPLEMENTED, *COMPARED_IN_PLACE}


def test_the_keys_of_entries_are_those_of_their_modules():
    rewards = {key: row.default for key, row in keys_of("rewards").items()}
    assert rewards == {"function": "", "weight": 1.0} | from_config.OPTIONS
    source = mixture.MixtureSource()
    assert {key: getattr(source, key) for key in mixture._KEYS} == mixture._KEYS
    assert set(mixture._FIELDS) == {name[12:] for name in ROWS if name.startswith("data.fields.")}


def test_a_row_has_a_meaning_and_its_default_is_allowed():
    names = [row.name for row in FIELDS]
    assert len(set(names)) == len(names)
    for row in ROWS.values():
        assert row.help, row.name
        value = row.default
        if row.limits:
            value = math.inf if isinstance(value, LinkedDefault) else value
            assert row.limits[0] <= value, row.name
        if row.choices:
            if isinstance(value, ModelDefault):
                value = tuple(map(value.value, MODELS))
                if isinstance(value[0], tuple):
                    value = tuple(itertools.chain(*value))
            items = value if isinstance(value, tuple) else (value,)
            assert set(items) <= set(row.choices), row.name


def test_every_field_of_a_config_has_a_row_and_every_row_a_field():
    rows = [row_of(name) for name in flatten(config_dict(grpo_gsm8k.get_config("qwen3-8b")))]
    assert None not in rows
    assert {name for name in ROWS if ".NAME." not in name} - {"rewards"} <= {r.name for r in rows}


def test_the_row_of_a_field():
    assert row_of("rl.clip_high").default == 0.28
    assert row_of("data.options.max_terms").name == "data.options"
    assert row_of("rewards.short.retries").limits == (0, 100)
    assert row_of("data.mixture.math.fields.level").name == "data.mixture.NAME.fields"
    for name in ("rl", "rl.clip", "lora", "surprise"):
        assert row_of(name) is None


def test_what_may_change_when_a_run_goes_on():
    names = {kind: {n for n, row in ROWS.items() if row.resume == kind} for kind in RESUMED}
    assert names == RESUMED
    config = grpo_gsm8k.get_config()
    for field in (*RESUMED["memory"], "rewards.judge.retries"):
        assert resume.moves_only_memory(field, config), field
    config.rl.loss = "bnpo"
    assert not resume.moves_only_memory("train.micro_batch_rows", config)
    assert resume.is_source("data.mixture.math.path")
    assert not resume.is_source("data.mixture.math.weight")
    assert resume.is_free("log.group")
    assert not resume.is_free("log")


@pytest.mark.parametrize("experiment", [grpo_gsm8k, dapo_math])
def test_defaults_that_depend_on_the_model_or_on_a_field(experiment):
    special = {
        row.name for row in ROWS.values() if isinstance(row.default, ModelDefault | LinkedDefault)
    }
    assert special == {
        *("model.source", "model.format", "model.calibration", "lora.targets"),
        *("data.chat_template_args", "eval.max_new_tokens"),
    }
    assert {ROWS["model.source"].default.value(model) for model in MODELS}
    config = experiment.get_config("qwen3-8b")
    assert config.model.source == "Qwen/Qwen3-8B"
    assert config.data.chat_template_args.to_dict() == {"enable_thinking": True}
    assert config.lora.targets == PROJECTIONS
    hybrid = experiment.get_config("qwen3.5-4b")
    assert hybrid.lora.targets == (*PROJECTIONS, "in_proj_qkv", "in_proj_z", "out_proj")
    shared = tuple(f"shared_expert.{name}" for name in PROJECTIONS[4:])
    recurrence = "in_proj_qkv", "in_proj_z", "out_proj"
    assert lora_targets("qwen3.6-35b-a3b") == (*PROJECTIONS[:4], *recurrence, *shared)
    assert lora_targets("qwen3-30b-a3b") == lora_targets("gpt-oss-20b") == PROJECTIONS[:4]
    assert hybrid.data.chat_template_args.to_dict() == {"enable_thinking": True}
    config.rollout.max_new_tokens = 7
    assert config.eval.max_new_tokens == 7


def test_published_weights_have_one_format():
    """A plan refuses what loading would; a checkpoint of 16 bits may have any."""
    config = grpo_gsm8k.get_config("gpt-oss-20b")
    validate(config)
    config.model.format = "nvfp4"
    with pytest.raises(UserError, match=r"openai/gpt-oss-20b holds MXFP4 .* model.format=mxfp4"):
        validate(config)
    config.model.source = "folder"
    validate(config)


def refused(field, value):
    """What the error of a value says."""
    config = grpo_gsm8k.get_config("qwen2.5-7b")
    with config.unlocked(), config.rewards.format.unlocked():
        config.update_from_flattened_dict({field: value})
    with pytest.raises(UserError) as caught:
        validate(config)
    return str(caught.value)


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.limits], ids=lambda r: r.name)
def test_a_value_outside_of_the_limits_of_a_row(row):
    name = row.name.replace("NAME", "format")
    lower, *upper = row.limits
    default = row.default.value if isinstance(row.default, ModelDefault) else row.default
    values = [lower - 1, *(one + 1 for one in upper if one < math.inf)]
    if isinstance(default, float):
        values = [*map(float, values), math.nan, *([] if math.inf in upper else [math.inf])]
    for value in values:
        assert f"{name}={value}" in refused(name, value)


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.choices], ids=lambda r: r.name)
def test_a_value_that_is_no_choice_of_a_row(row):
    value = ("q_proj", "absent") if row.name == "lora.targets" else "absent"
    choices = ", ".join(choice or "''" for choice in row.choices)
    text = refused(row.name, value)
    assert f"unknown {row.name} 'absent': choose from {choices}" in text
    assert ("or 'package.module:function'" in text) == row.function
    if not row.function and row.name != "lora.targets":
        assert f"unknown {row.name} 'module:f'" in refused(row.name, "module:f")


def test_a_function_and_an_open_end_are_allowed():
    config = grpo_gsm8k.get_config()
    config.rl.loss, config.rl.aggregation = "my_losses:plain", "my_losses:mean"
    config.rl.clip_high = math.inf
    validate(config)
    check_limits({"open": (math.inf, 0, math.inf)})
    with pytest.raises(UserError, match=r"x=inf: it must be finite and at least 0"):
        check_limits({"x": (math.inf, 0)})


def test_a_field_is_explained():
    config = grpo_gsm8k.get_config()
    text = describe.explain("rl.clip_high", config)
    assert text.startswith("rl.clip_high = 0.28\n    The ratio is clipped from above")
    assert "At least 0." in text
    assert "Needs a loss that clips, rl.loss other than 'sapo'" in text
    assert "may have another value" not in text
    text = describe.explain("train.micro_batch_rows", config)
    assert "may have another value" not in text  # It is fixed wherever it is read.
    text = describe.explain("train.buffer_tokens", config)
    assert "it moves only memory or time." in " ".join(text.split())
    assert describe.explain("rewards.short.weight", config).startswith("rewards.NAME.weight\n")
    text = describe.explain("all", config)
    titles = re.findall(r"^(\S+?)(?: = .*|:)?$", text, re.MULTILINE)
    assert titles == [row.name for row in FIELDS]
    assert max(map(len, text.splitlines())) <= 100 + len("data.system_prompt")
    sections = [row.name for row in FIELDS if isinstance(row, Section)]
    assert describe.explain("aqn", config).startswith("aqn:\n    Adaptive quantization noise")
    assert "data.fields" in sections
    with pytest.raises(UserError, match=r"--explain=rl.clip_hihg: .* did you mean rl.clip_high"):
        describe.explain("rl.clip_hihg", config)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("beta", "rl.kl_coef"),
        ("num_generations", "rollout.group_size"),
        ("max_completion_length", "rollout.max_new_tokens"),
        ("rl.epsilon", "rl.clip_low"),
        ("learning_rate", "optimizer.learning_rate"),
    ],
)
def test_a_name_of_trl_leads_to_the_field(name, field):
    assert describe.similar_fields(name) == [field]


def test_the_fields_of_other_names_exist():
    assert set(describe._OTHER_NAMES.values()) <= ROWS.keys()
