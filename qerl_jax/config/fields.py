"""Every field of a config in one row: default, meaning, limits or choices, and when it is read.

`build` makes a config from the rows; `training.validate` compares values with the limits and the
choices; `overrides` refuses a field that is set and not read; `resume` says what may change while a
run lasts; `--explain` and docs/config.md print the rows. A new field is one row here and the code
that reads it.

Any field can be set on the command line, for example --config.aqn.schedule=cosine or
--config.lora.targets="('q_proj', 'v_proj')".
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ml_collections import ConfigDict

from qerl_jax.config.models import (
    SOURCES,
    TEMPLATE_ARGS,
    calibration_of,
    format_of,
    lora_targets,
)
from qerl_jax.system.import_path import names_function

REASONING_GYM, OWN_TASKS = "reasoning_gym:", "qerl_jax:"
GENERATED = (REASONING_GYM, OWN_TASKS)  # what the source of generated problems begins with
LONGEST_LIMIT = 1_000_000  # seconds of a time limit; timers of the system end at 24 days
HELD_OUT = "held_out"  # evaluation source: the training problems, some of which are held out


@dataclasses.dataclass(frozen=True)
class Condition:
    """A condition on a config, in words and as a test."""

    text: str
    holds: Callable[[ConfigDict], bool]


@dataclasses.dataclass(frozen=True)
class ModelDefault:
    """A default that depends on the model, in words and as a function of one of `models.MODELS`."""

    text: str
    value: Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class LinkedDefault:
    """A default that is the value of another field, also after that one is set."""

    field: str


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the config, to which the rows after it belong; '' where its fields say it all."""

    name: str
    help: str = ""


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of the config."""

    # Sections and name, such as 'rl.clip_high'. NAME stands for a name that the user chooses:
    # 'rewards.NAME.weight' is a key of each entry of the table 'rewards'.
    name: str
    default: Any  # the default, whose type is that of the field. A dict is a table with free keys.
    help: str  # meaning of the field
    # Lower limit, and upper limit if there is one. An upper limit of infinity allows infinity,
    # which is refused without it.
    limits: tuple[float, ...] = ()
    # The values that the field takes; of a tuple, those that its items take. They are written here
    # where another module implements them, and a test compares the two.
    choices: tuple[str, ...] = ()
    function: bool = False  # whether the field also takes the import path 'package.module:function'
    read_if: Condition | None = None  # when the field is read; None for always
    # What a resumed run may do with the field. 'fixed': it may not change. 'memory': it may change,
    # as it moves only memory or time: the distribution of the samples and the loss stay the same,
    # and only the rounding of sums changes. So a run that does not fit into the memory can be
    # saved. 'source': it may change, as it says where the weights or the problems are, and the
    # checkpoints hold fingerprints of both. 'free': it may change, as it does not change how a run
    # trains.
    resume: Literal["fixed", "memory", "source", "free"] = "fixed"
    fixed_if: Condition | None = None  # when the field may not change after all; None for never


def evaluates_separately(eval_source: str, eval_path: str) -> bool:
    """Whether the evaluation problems have a source of their own, and none is held out."""
    return bool(eval_path) or eval_source not in ("", HELD_OUT)


def has_own_evaluation(data: Mapping[str, Any]) -> bool:
    """Whether the evaluation problems of a config have a source of their own."""
    return evaluates_separately(data["eval_source"], data["eval_path"])


def learns_from_text(config: Mapping[str, Any] | ConfigDict) -> bool:
    """Whether a run learns from rows of text; otherwise its policy samples."""
    return bool((config.get("sft") or {}).get("rows_per_step"))  # Earlier versions lack it.


_TEXT = Condition("rows of text: sft.rows_per_step above 0", learns_from_text)
_SAVED = Condition(
    f"sft.completions_of, and {_TEXT.text}",
    lambda c: learns_from_text(c) and bool(c.sft.completions_of),
)
TEACHER = Condition(
    "a teacher: teacher.source or teacher.adapter",
    lambda c: bool(c.teacher.source or c.teacher.adapter),
)


def learns_from_rewards(config: ConfigDict) -> bool:
    """Whether the rewards of a run have advantages, and not a teacher alone."""
    return config.teacher.rewards or not TEACHER.holds(config)


_OTHER_TEACHER = Condition("teacher.source", lambda c: bool(c.teacher.source))
_REWARDS = Condition("rewards that are learned from, teacher.rewards=true", learns_from_rewards)
_NVFP4 = Condition(
    "model.format='nvfp4', or a teacher.source with teacher.format='nvfp4'",
    lambda c: (
        c.model.format == "nvfp4" or (_OTHER_TEACHER.holds(c) and c.teacher.format == "nvfp4")
    ),
)
_ADAPTER = Condition(
    "an adapter: train.parameters other than 'full'", lambda c: c.train.parameters != "full"
)
_ONE_SOURCE = Condition(
    "a run without data.mixture, whose sources have their own", lambda c: not c.data.mixture
)
_FILE = Condition(
    "a file or a hub dataset: generated problems have fixed fields; with data.mixture those of "
    "data.eval_path or data.eval_source, as each source has fields of its own",
    lambda c: (
        has_own_evaluation(c.data)
        if c.data.mixture
        else bool(c.data.path) or not c.data.source.startswith(GENERATED)
    ),
)
_NOISE = Condition(
    "noise: aqn.schedule other than 'off', aqn.stages of at least 2",
    lambda c: names_function(c.aqn.schedule) or (c.aqn.schedule != "off" and c.aqn.stages > 1),
)
_KL_TARGET = Condition(
    "a target for the KL: aqn.schedule='kl', aqn.stages of at least 2",
    lambda c: c.aqn.schedule == "kl" and c.aqn.stages > 1,
)
_SEVERAL_UPDATES = Condition(
    "rl.updates_per_rollout or rl.mini_batches of at least 2 (the ratio of the first update is 1)",
    lambda c: c.rl.updates_per_rollout > 1 or c.rl.mini_batches > 1,
)
_CLIPS = Condition(
    f"a loss that clips, rl.loss other than 'sapo' and a function; and {_SEVERAL_UPDATES.text}",
    lambda c: c.rl.loss != "sapo" and not names_function(c.rl.loss) and _SEVERAL_UPDATES.holds(c),
)
_SAPO = Condition(
    f"rl.loss='sapo', and {_SEVERAL_UPDATES.text}; at a ratio of 1 they scale the loss that is "
    "logged, not its gradient",
    lambda c: c.rl.loss == "sapo" and _SEVERAL_UPDATES.holds(c),
)
_DYNAMIC_SAMPLING = Condition("rl.dynamic_sampling=true", lambda c: c.rl.dynamic_sampling)
_EVALUATION = Condition("evaluations: eval.every above 0", lambda c: c.eval.every > 0)
_CONVERSATION = Condition(
    "an environment, environment.function, or agents",
    lambda c: bool(c.environment.function or c.environment.agent or c.environment.verifiers),
)
_ENVIRONMENT = Condition(
    "an environment: environment.function", lambda c: bool(c.environment.function)
)
_AGENTS = Condition(
    "agents: environment.agent or environment.verifiers",
    lambda c: bool(c.environment.agent or c.environment.verifiers),
)
_TASKSET = Condition("environment.verifiers", lambda c: bool(c.environment.verifiers))
_HARNESS = Condition(
    "environment.verifiers without environment.address",
    lambda c: bool(c.environment.verifiers) and not c.environment.address,
)
_TRACKER = Condition("log.wandb or log.trackio", lambda c: c.log.wandb or c.log.trackio)
_ADAMW = Condition("optimizer.name='adamw'", lambda c: c.optimizer.name == "adamw")

# Where `train.micro_batch_rows` sets the denominators of the loss.
SPLIT_LOSS = Condition(
    "rl.loss='bnpo' or rl.aggregation='micro_batch', whose denominators it sets; the memory of an "
    "update follows from train.buffer_tokens",
    lambda c: (c.rl.aggregation or c.rl.loss) in ("micro_batch", "bnpo"),
)

# The defaults are the paper's values for GSM8K, where the paper gives one.
FIELDS: tuple[Section | Field, ...] = (
    Field("experiment", "", "Name of the experiment, with which the name of a run folder begins."),
    Field("preset", "", "Name of the preset, the next part of that name."),
    Field("seed", 0, "Seed of everything that is drawn.", limits=(0, 2**32 - 1)),
    Field(
        "steps",
        600,
        "More of them extend a run, unless its learning rate has decayed to 0.",
        limits=(1,),
        read_if=Condition("sft.epochs=0", lambda c: not (learns_from_text(c) and c.sft.epochs)),
        resume="free",
    ),
    Field(
        "init_from",
        "",
        "Folder of a run that this run begins from: its adapter, optimizer and position in the "
        "data. Other fields may change, but not model.format and what the adapter is. FOLDER takes "
        "its last checkpoint, FOLDER:best its best adapter.",
    ),
    #
    Section("model"),
    Field(
        "model.source",
        ModelDefault("the hub id of the preset's model", lambda model: SOURCES[model]),
        "'package:NAME', a GGUF file, a Hugging Face folder, or a hub id.",
        resume="source",
    ),
    Field(
        "model.format",
        ModelDefault("'mxfp4' of gpt-oss, 'nvfp4' of others", format_of),
        "'nvfp4' quantizes the linear layers at load, as do the paper's baselines 'mxfp4' and "
        "'nf4' (QLoRA's). 'bf16' does not quantize; the paper halves the learning rate for it "
        "(5e-6).",
        choices=("nvfp4", "mxfp4", "nf4", "bf16"),
    ),
    Field(
        "model.calibration",
        ModelDefault("'none' of the stand-in and gpt-oss, 'gptq' of others", calibration_of),
        "How a model of 16 bits becomes one in nvfp4: 'gptq' calibrates it on completions of the "
        "run's training prompts before the first step, once for all runs; 'none' rounds it to the "
        "nearest numbers, as llm-compressor's NVFP4A16 does. A model in NVFP4 stays as it is.",
        choices=("gptq", "none"),
        read_if=_NVFP4,
    ),
    Field(
        "model.dtype",
        "bfloat16",
        "dtype of activations, embeddings, biases; or 'float32'",
        choices=("bfloat16", "float32"),
    ),
    #
    Section(
        "teacher",
        "On-policy distillation: the reverse KL of the policy's own samples to a teacher with the "
        "same tokens; see docs/learn_from_a_teacher.md.",
    ),
    Field(
        "teacher.source",
        "",
        "The teacher, as model.source: a folder, a GGUF file or a hub id. '': with teacher.adapter "
        "the policy's own base, whose weights are in memory once, else no teacher.",
        resume="source",
    ),
    Field(
        "teacher.adapter",
        "",
        "Adapter of the teacher: the folder of a run, of which it is the best adapter or else the "
        "last one, or of a PEFT adapter, such as RUN/adapter.",
        resume="source",
    ),
    Field(
        "teacher.format",
        "nvfp4",
        "As model.format, of teacher.source; model.calibration says how its weights of 16 bits "
        "become nvfp4.",
        choices=("nvfp4", "mxfp4", "nf4", "bf16"),
        read_if=_OTHER_TEACHER,
    ),
    Field(
        "teacher.coef",
        1.0,
        "Each sampled token has the advantage -coef (log pi_old - log teacher), the logits of both "
        "divided by the temperature.",
        limits=(1e-9,),
        read_if=TEACHER,
    ),
    Field(
        "teacher.rewards",
        True,
        "Whether the advantages of the rewards are added; false: rewards are logged alone.",
        read_if=TEACHER,
    ),
    #
    Section("lora"),
    Field("lora.rank", 32, "Rank of the adapter.", limits=(1, 2**16), read_if=_ADAPTER),
    Field(
        "lora.expert_rank",
        0,
        "Rank of the adapters of the routed experts of a mixture, 0 for none. They are scaled as "
        "the others; gate and up of an expert share A, as with target_parameters of PEFT.",
        limits=(0, 2**16),
        read_if=_ADAPTER,
    ),
    Field(
        "lora.alpha",
        32.0,
        "The adapter is scaled by alpha / rank.",
        limits=(1e-6,),
        read_if=_ADAPTER,
    ),
    Field(
        "lora.rslora",
        False,
        "rsLoRA: the adapter is scaled by alpha / sqrt(rank).",
        read_if=_ADAPTER,
    ),
    Field(
        "lora.targets",
        ModelDefault(
            "('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'), with "
            "'in_proj_qkv', 'in_proj_z', 'out_proj' after them of Qwen3.5 and Qwen3.6; a mixture "
            "of experts has those of its shared expert, if it has one, instead of those of the MLP",
            lora_targets,
        ),
        "Projections that have an adapter. Those from in_proj_qkv on are of recurrent layers; a "
        "mixture of experts has none of 'gate_proj', 'up_proj', 'down_proj', and lora.expert_rank "
        "adapts its routed experts.",
        choices=(
            *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
            *(f"shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
        ),
        read_if=_ADAPTER,
    ),
    Field("lora.init", "", "folder of a PEFT adapter to start from", read_if=_ADAPTER),
    #
    Section("data"),
    Field(
        "data.source",
        "",
        "A hub id; or generated problems, which need no hub: 'reasoning_gym:TASK', of which "
        "gsm_symbolic is the stand-in for GSM8K, for models of 1B and more, or 'qerl_jax:sums', "
        "sums of two numbers.",
        read_if=Condition(
            "an empty data.path and no data.mixture",
            lambda c: not c.data.path and not c.data.mixture,
        ),
        resume="source",
    ),
    Field(
        "data.eval_source",
        HELD_OUT,
        "'held_out': eval.problems of the training problems, which are not trained on, so that no "
        "test split chooses the best adapter; a hub id: its test split; '': the source's own test "
        "split, or held-out problems if it has none.",
        read_if=Condition(
            "evaluations: eval.every above 0; and an empty data.eval_path",
            lambda c: c.eval.every > 0 and not c.data.eval_path,
        ),
        resume="source",
    ),
    Field(
        "data.path",
        "",
        "Local files or folders for training and evaluation, which replace the sources: .jsonl, "
        ".json (an array) or .parquet. Rewards get the columns of a row that they have arguments "
        "for.",
        read_if=_ONE_SOURCE,
        resume="source",
    ),
    Field(
        "data.eval_path", "", "As data.path, for evaluation.", read_if=_EVALUATION, resume="source"
    ),
    Field(
        "data.mixture",
        {},
        "Several sources in place of one, drawn in proportion to their weights: name -> path or "
        "source, and optionally weight (1.0), split ('train'), levels, fields and options; see "
        "docs/data.md. --config.data.mixture.NAME.path=FILE --config.data.mixture.NAME.weight=2 "
        "adds one. The evaluation problems are those of eval_path or eval_source; 'held_out' and "
        "'' take them from every source by its weight, as for one source.",
    ),
    Field(
        "data.mixture.NAME.path", "", "File or folder of problems, as data.path.", resume="source"
    ),
    Field("data.mixture.NAME.source", "", "As data.source, in place of a path.", resume="source"),
    Field(
        "data.mixture.NAME.weight",
        1.0,
        "Part of the draws, relative to the weights of the other sources; above 0.",
    ),
    Field("data.mixture.NAME.split", "train", "Split of the dataset on the hub or of the folder."),
    Field("data.mixture.NAME.levels", (), "As data.levels."),
    Field("data.mixture.NAME.fields", {}, "As data.fields: question, answer and level."),
    Field("data.mixture.NAME.options", {}, "As data.options."),
    Section(
        "data.fields",
        "Names of the fields in files and hub datasets; a name with dots is nested, such as "
        "reward_model.ground_truth. '': question, problem or prompt (a text, or a list of chat "
        "messages); answer or solution; level.",
    ),
    Field("data.fields.question", "", "Field with the question.", read_if=_FILE),
    Field("data.fields.answer", "", "Field with the reference answer.", read_if=_FILE),
    Field("data.fields.level", "", "Field with the difficulty.", read_if=_FILE),
    Field(
        "data.levels",
        (),
        "Difficulties to train on, by the problems' field `level`, such as (3, 4, 5). (): all.",
        read_if=_ONE_SOURCE,
    ),
    Field(
        "data.max_question_chars",
        0,
        "Longer questions are not trained on. 0: no limit",
        limits=(0,),
    ),
    Field(
        "data.options",
        {},
        "Options of the reasoning_gym task, or of the sums, {'largest': 20}. "
        "--config.data.options=\"{'difficulty': 1.0}\" replaces all.",
        read_if=Condition(
            "generated problems: data.source='reasoning_gym:TASK' or 'qerl_jax:sums', an empty "
            "data.path, no data.mixture",
            lambda c: (
                not c.data.path and not c.data.mixture and c.data.source.startswith(GENERATED)
            ),
        ),
    ),
    Field(
        "data.curriculum",
        "off",
        "'learnability' (arXiv 2502.12272) draws problems that the policy solves in a part p of "
        "its attempts, with a probability in proportion to p (1 - p); p is that of the reward "
        "'correctness' in the problem's last group. 'off': every problem once in an epoch.",
        choices=("off", "learnability"),
    ),
    Field(
        "data.curriculum_share",
        0.5,
        "part of the draws that are made so; the others follow the epoch",
        limits=(1e-6, 1),
        read_if=Condition("data.curriculum other than 'off'", lambda c: c.data.curriculum != "off"),
    ),
    Field("data.system_prompt", "", "System message of every prompt; '': none."),
    Field("data.question_suffix", "", "appended to every question"),
    Field(
        "data.examples",
        (),
        "Solved examples, which come before every question as turns of the chat: a question, its "
        "answer, the next question and so on, such as ('What is 21 + 4?', '21 + 4 = 25'). An "
        "evaluation in a run prefills what all prompts begin with once.",
    ),
    Field(
        "data.chat_template_args",
        ModelDefault(
            "{'enable_thinking': True} of Qwen3, Qwen3.5 and Qwen3.6, {} of others",
            lambda model: TEMPLATE_ARGS.get(model.partition("-")[0], {}),
        ),
        "Further variables of the chat template. That of Qwen3 and later has enable_thinking, "
        "which the presets set: True trains the thinking mode, in which the model writes its "
        "<think> part itself.",
    ),
    Field("data.max_prompt_tokens", 320, "A longer prompt is an error."),
    #
    Section(
        "sft",
        "Supervised fine-tuning: the run learns from rows of text and samples nothing, see "
        "docs/learn_from_text.md. Of 'teacher', 'rollout', 'environment', 'rewards', 'aqn' and "
        "'rl' it reads no field.",
    ),
    Field("sft.rows_per_step", 0, "Rows of a step. 0: no supervised fine-tuning", limits=(0,)),
    Field(
        "sft.epochs",
        0.0,
        "Passes over the rows, which give the number of steps; the last step is filled with rows "
        "of the next pass. 0: steps",
        limits=(0, 1e6),
        read_if=_TEXT,
    ),
    Field(
        "sft.max_tokens",
        1024,
        "A longer row, prompt and completion together, is an error.",
        limits=(2,),
        read_if=_TEXT,
    ),
    Field(
        "sft.completions_of",
        "",
        "Folder of a run whose saved completions are the rows, in place of data.path (rejection "
        "sampling): those that ended by themselves and have at least sft.min_reward. Of each step "
        "that run saves log.completions.",
        read_if=_TEXT,
    ),
    Field(
        "sft.min_reward",
        1.0,
        "Smallest reward of a completion that is learned from.",
        limits=(-1e6, 1e6),
        read_if=_SAVED,
    ),
    #
    Section("rollout"),
    Field("rollout.prompts_per_step", 16, "With group_size 8 a step has 128 samples.", limits=(1,)),
    Field(
        "rollout.group_size",
        8,
        "Completions of a prompt, a group; at least 2 if rewards are learned from.",
        limits=(1,),
    ),
    Field("rollout.max_new_tokens", 4096, "Limit of a completion in tokens.", limits=(1,)),
    Field("rollout.temperature", 1.0, "of the first step", limits=(1e-6,)),
    Field(
        "rollout.temperature_schedule",
        "constant",
        "'constant', or a way to temperature_end in the last step: 'linear', 'cosine'.",
        choices=("constant", "linear", "cosine"),
    ),
    Field(
        "rollout.temperature_end",
        1.0,
        "Temperature of the last step.",
        limits=(1e-6,),
        read_if=Condition(
            "rollout.temperature_schedule other than 'constant'",
            lambda c: c.rollout.temperature_schedule != "constant",
        ),
    ),
    Field(
        "rollout.top_k", 0, "Number of likeliest tokens that are sampled from. 0: off", limits=(0,)
    ),
    Field(
        "rollout.top_p",
        1.0,
        "Probability of the likeliest tokens that are sampled from. 1.0: off",
        limits=(1e-6, 1),
    ),
    Field(
        "rollout.min_p",
        0.0,
        "Tokens with less than this part of the likeliest token's probability are not sampled, as "
        "in vLLM before top_k and top_p. 0.0: off. Log-probabilities are those of all tokens.",
        limits=(0, 1),
    ),
    Field(
        "rollout.stop",
        (),
        "Strings that end a completion, such as ('</answer>',), as the end-of-sequence tokens do.",
    ),
    Field(
        "rollout.max_rows",
        0,
        "Largest decode batch in rows; other rows wait. 0: as many as the memory holds, see "
        "`qerl-plan`.",
        limits=(0,),
        resume="memory",
    ),
    Field(
        "rollout.kv_cache_bytes",
        0,
        "Memory for keys and values. 0: what the plan of the run leaves for them.",
        limits=(0,),
        resume="memory",
    ),
    Field(
        "rollout.kv_cache_dtype",
        "",
        "'': model.dtype. 'float8' halves the memory of bfloat16, not the time; the sampling "
        "policy then has rounded keys and values.",
        choices=("", "bfloat16", "float8"),
    ),
    Field(
        "rollout.activations",
        "",
        "'float8' rounds the inputs of products in a rollout, and the weights in NVFP4 that they "
        "multiply, to E4M3: on a Hopper GPU, in layers with attention and a dense MLP, where at "
        "least 64 rows decode. The sampling policy is then a rounded one.",
        choices=("", "float8"),
    ),
    Field(
        "rollout.head_format",
        "",
        "'': the policy's head. 'nvfp4' makes a copy in 4 bits for rollouts, a quarter of the "
        "bytes that the head costs every decode step; the sampling policy then has a rounded head.",
        choices=("", "nvfp4"),
    ),
    Field(
        "rollout.chunk_steps",
        32,
        "Decode steps between two checks of which rows have ended.",
        limits=(1,),
        resume="memory",
    ),
    Field(
        "rollout.drafts",
        "auto",
        "Speculative decoding whose tokens are those without it: guesses of a row's next tokens, "
        "from what its group has written, are checked in one decode step. 'auto': on a GPU in "
        "bfloat16, for models whose layers all have attention and a dense MLP. Rows of agents have "
        "no drafts.",
        choices=("auto", "on", "off"),
        resume="memory",
    ),
    Field(
        "rollout.dequantize",
        "auto",
        "Used where no kernel reads the packed weights. 'once' dequantizes the weights once per "
        "rollout, which needs memory for a dense copy while it lasts; 'step' does not, and is "
        "slower. 'auto': 'once' where the copy takes at most a third of the memory.",
        choices=("auto", "once", "step"),
        read_if=Condition(
            "packed weights: model.format other than 'bf16'", lambda c: c.model.format != "bf16"
        ),
        resume="memory",
    ),
    #
    Section(
        "environment",
        "What the policy talks to: tools that it calls, or an environment of texts, see "
        "docs/environments.md. rollout.max_new_tokens limits the sampled tokens of a conversation.",
    ),
    Field(
        "environment.function",
        "",
        "'package.module:Class'; functions that are tools, 'package.module:f, package.module:g', "
        "or the name of a list of them; or several, 'NAME=package.module:Class, ...', among which "
        "the column `environment` of a problem chooses. '': none; a completion has one turn.",
    ),
    Field(
        "environment.agent",
        "",
        "'package.module:function', an agent that calls the policy through an endpoint of OpenAI's "
        "form, see docs/agents.md; or several, as environment.function. '': none",
    ),
    Field(
        "environment.verifiers",
        "",
        "A taskset of verifiers, whose agents call the policy, see docs/agents.md. '': none",
    ),
    Field(
        "environment.python",
        "",
        "The Python interpreter that has the agent's packages, or verifiers and the taskset, such "
        "as venv/bin/python. '': this one",
        read_if=_AGENTS,
        resume="free",
    ),
    Field(
        "environment.harness",
        "",
        "The program that talks to the policy, by its id in verifiers, such as 'null' (a chat) or "
        "'bash'. '': that of the taskset",
        read_if=_HARNESS,
    ),
    Field(
        "environment.address",
        "",
        "The address of an env server of verifiers that runs the episodes, on this host, such as "
        "tcp://127.0.0.1:5000. '': each is run in a process of its own",
        read_if=_TASKSET,
        resume="free",
    ),
    Field(
        "environment.options",
        {},
        "Further fields of the environment of verifiers. --config.environment.options="
        "\"{'taskset': {'game': 'Hangman-v0'}}\" replaces all.",
        read_if=_TASKSET,
    ),
    Field(
        "environment.tasks",
        1000,
        "Most tasks of the taskset, the first ones, where data.path does not name some.",
        limits=(1, 1_000_000),
        read_if=_TASKSET,
    ),
    Field(
        "environment.session_time_limit",
        600.0,
        "Seconds of an agent for an episode; after that its process is ended and the reward is "
        "missing. 0: no limit",
        limits=(0, LONGEST_LIMIT),
        read_if=_AGENTS,
        resume="memory",
    ),
    Field(
        "environment.max_turns",
        4,
        "Most turns of the policy; those of agents are not limited.",
        limits=(1, 1000),
        read_if=_CONVERSATION,
    ),
    Field(
        "environment.turn_tokens",
        0,
        "Most sampled tokens of a turn. 0: rollout.max_new_tokens",
        limits=(0,),
        read_if=_CONVERSATION,
    ),
    Field(
        "environment.reply_tokens",
        256,
        "Most tokens of what an environment writes after a turn, those of the chat template "
        "included; a longer text is cut. What agents send is not, but is prefilled in such parts.",
        limits=(1,),
        read_if=_CONVERSATION,
    ),
    Field(
        "environment.context_tokens",
        0,
        "Most tokens after the prompt, sampled ones and those of the environment; a conversation "
        "ends before it would have more. A conversation of an agent has as many and "
        "data.max_prompt_tokens in all. 0: what the other limits allow.",
        limits=(0,),
        read_if=_CONVERSATION,
    ),
    Field(
        "environment.host_cache_bytes",
        2**33,
        "Pinned memory of the host, for each group of devices, for keys and values of rows that "
        "wait for an environment while others have their slots. A row for which too little is left "
        "keeps its slot.",
        limits=(0,),
        read_if=_CONVERSATION,
        resume="memory",
    ),
    Field(
        "environment.time_limit",
        10.0,
        "Seconds of an environment for a reset, or for a turn with all calls of it; after that its "
        "process is ended and the reward of the row is missing. 0: no limit",
        limits=(0, LONGEST_LIMIT),
        read_if=_ENVIRONMENT,
        resume="memory",
    ),
    Field(
        "environment.processes",
        128,
        "Most environments, or episodes of agents, of a group of devices that are alive at the "
        "same time, each in a process: a run has at most mesh.data times as many.",
        limits=(1, 10_000),
        read_if=_CONVERSATION,
        resume="memory",
    ),
    #
    Field(
        "rewards",
        {},
        "Name -> function and its weight in the sum, and optionally time_limit; for a URL also "
        "retries and token_env. qerl_jax/rewards/calls.py lists the forms of a reward, "
        "docs/rewards.md explains them. The reward named 'correctness' is the accuracy. "
        "--config.rewards.NAME.function=package.module:function adds one.",
    ),
    Field("rewards.NAME.function", "", "'package.module:function', or the URL of a server."),
    Field(
        "rewards.NAME.weight",
        1.0,
        "Weight in the sum; 0.0 only logs the reward.",
        limits=(-1e6, 1e6),
    ),
    # A server that was too slow, or out of reach, must not end a run for good.
    Field(
        "rewards.NAME.time_limit",
        0.0,
        "Seconds of a whole call, retries included. 0: reward_time_limit",
        limits=(0, LONGEST_LIMIT),
        resume="memory",
    ),
    Field(
        "rewards.NAME.retries",
        2,
        "Further attempts where the server of a URL is busy or out of reach.",
        limits=(0, 100),
        resume="memory",
    ),
    Field(
        "rewards.NAME.token_env",
        "",
        "Environment variable with the token of a URL.",
        resume="memory",
    ),
    Field(
        "reward_time_limit",
        5.0,
        "Seconds for a call of a reward without a time_limit: of one completion, or of the step "
        "where the reward takes lists or is a URL. After that the reward is missing. 0: no limit",
        limits=(0, LONGEST_LIMIT),
    ),
    #
    Section(
        "aqn", "Adaptive quantization noise: Gaussian noise on the norm scales while sampling."
    ),
    Field(
        "aqn.schedule",
        "exponential",
        "'exponential' (the paper's Eq. 8), 'reference' (the released code's), 'linear', 'cosine', "
        "'logarithmic', 'constant', 'off', or 'package.module:function': a custom function f(*, "
        "sigma_start, sigma_end, stages, total_steps) that returns a function of the step, which "
        "is also called from total_steps on where a run is extended. 'kl': sigma follows the "
        "measured KL, so that it comes to the targets below.",
        choices=(
            *("exponential", "reference", "linear", "cosine", "logarithmic", "constant", "off"),
            "kl",
        ),
        function=True,
    ),
    Field(
        "aqn.stages",
        10,
        "Equal parts of the run; the first part has no noise.",
        limits=(1, 2**20),
        read_if=Condition(
            "noise: aqn.schedule other than 'off'", lambda c: c.aqn.schedule != "off"
        ),
    ),
    Field("aqn.sigma_start", 1e-2, "Sigma of the first noisy stage.", limits=(0,), read_if=_NOISE),
    Field(
        "aqn.sigma_end",
        5e-4,
        "Sigma that the schedule goes to.",
        limits=(0,),
        read_if=Condition(
            "noise that changes: aqn.schedule other than 'constant', 'off' and 'kl', aqn.stages of "
            "at least 3",
            lambda c: (
                names_function(c.aqn.schedule)
                or (c.aqn.schedule not in ("constant", "off", "kl") and c.aqn.stages > 2)
            ),
        ),
    ),
    Field(
        "aqn.form",
        "additive",
        "'additive' or 'relative': noise of the size sigma, or sigma times the scale",
        choices=("additive", "relative"),
        read_if=_NOISE,
    ),
    Field(
        "aqn.kl_target_start",
        1e-2,
        "With the schedule 'kl', the wanted KL(noisy, clean) of the first and of the last noisy "
        "stage, in nats per token, and the largest sigma; sigma_start is the first one. With a "
        "target of 0.03 one draw moved a policy of 1.5B by 0.24 nats (docs/evidence.md).",
        limits=(0,),
        read_if=_KL_TARGET,
    ),
    Field(
        "aqn.kl_target_end",
        1e-2,
        "The wanted KL of the last noisy stage, see aqn.kl_target_start.",
        limits=(0,),
        read_if=Condition(
            "a target that changes: aqn.schedule='kl', aqn.stages of at least 3",
            lambda c: c.aqn.schedule == "kl" and c.aqn.stages > 2,
        ),
    ),
    Field(
        "aqn.sigma_max",
        0.3,
        "The largest sigma, see aqn.kl_target_start.",
        limits=(0,),
        read_if=_KL_TARGET,
    ),
    Field("aqn.final_norm", False, "Whether the norm before the head has noise.", read_if=_NOISE),
    Field(
        "aqn.correction",
        "none",
        "How training accounts for the noise in sampling: 'none' (the paper's), 'tis' (truncated "
        "importance weights), or 'noisy_forward' (training under the same noise).",
        choices=("none", "tis", "noisy_forward"),
        read_if=Condition(
            "noise for 'noisy_forward': aqn.schedule other than 'off', aqn.stages of at least 2",
            lambda c: c.aqn.correction != "noisy_forward" or _NOISE.holds(c),
        ),
    ),
    Field(
        "aqn.tis_cap",
        2.0,
        "Largest importance weight.",
        limits=(1e-6,),
        read_if=Condition("aqn.correction='tis'", lambda c: c.aqn.correction == "tis"),
    ),
    Field("aqn.kl_every", 1, "steps between measurements of KL(noisy, clean); 0: off", limits=(0,)),
    Field(
        "aqn.kl_rows",
        8,
        "completions on which the KL is measured",
        limits=(1,),
        read_if=Condition(
            "noise, and aqn.kl_every above 0", lambda c: c.aqn.kl_every > 0 and _NOISE.holds(c)
        ),
    ),
    #
    Section("rl"),
    Field(
        "rl.loss",
        "grpo",
        "'grpo': mean over each completion, then over rows; 'dapo': mean over all tokens; 'bnpo': "
        "over those of each micro-batch; 'dr_grpo': sum over rows * max_new_tokens, with "
        "advantage_scale='none'; 'gspo': one ratio for a completion, with clip ranges around 4e-4; "
        "'gspo_token': the same, with gradients of the tokens' own ratios; 'cispo': the ratio "
        "clipped as a weight, where clip_low=1.0 sets no lower bound; 'sapo': a sigmoid of the "
        "ratio in place of the clip; 'opsm': grpo with off_policy_delta=0.5; or "
        "'package.module:function', a function of JAX, f(ratio, advantages, logprobs, mask), that "
        "returns the loss of each token; with an argument `rows` it also gets the row of each.",
        choices=(
            *("grpo", "dapo", "bnpo", "dr_grpo", "gspo", "gspo_token", "cispo", "sapo", "opsm"),
        ),
        function=True,
    ),
    Field(
        "rl.sapo_temperature_pos",
        1.0,
        "of the sigmoid, where the advantage is positive",
        limits=(1e-6,),
        read_if=_SAPO,
    ),
    Field(
        "rl.sapo_temperature_neg",
        1.05,
        "of the sigmoid, where the advantage is not positive",
        limits=(1e-6,),
        read_if=_SAPO,
    ),
    Field(
        "rl.off_policy_delta",
        0.0,
        "A completion with a negative advantage is left out where the policy that sampled gives "
        "its tokens a mean log-probability more than this above the trained policy's (the "
        "off-policy sequence mask of DeepSeek-V3.2). 0: the loss's own",
        limits=(0,),
    ),
    Field(
        "rl.aggregation",
        "",
        "'': the loss's own; or 'token', 'sequence', 'sequence_sum', 'constant', 'micro_batch', or "
        "'package.module:function': a custom function of (mask, advantages, logprobs) that returns "
        "the weight of each token in the loss. It is tried on made-up arrays before training.",
        choices=("", "token", "sequence", "sequence_sum", "constant", "micro_batch"),
        function=True,
    ),
    Field(
        "rl.clip_low",
        0.2,
        "The ratio is clipped from below at 1 - clip_low; at most 0.1 with gspo and gspo_token.",
        limits=(0, math.inf),
        read_if=_CLIPS,
    ),
    Field(
        "rl.clip_high",
        0.28,
        "The ratio is clipped from above at 1 + clip_high; at most 0.1 with gspo and gspo_token.",
        limits=(0, math.inf),
        read_if=_CLIPS,
    ),
    Field(
        "rl.dual_clip",
        0.0,
        "bound of the ratio, above 1, where the advantage is negative; 0: off",
        read_if=Condition(
            _SEVERAL_UPDATES.text, lambda c: c.rl.dual_clip == 0 or _SEVERAL_UPDATES.holds(c)
        ),
    ),
    Field(
        "rl.kl_coef",
        0.0,
        "KL to the policy that training starts from, with the adapter of lora.init",
        limits=(0,),
    ),
    Field(
        "rl.kl_grad",
        "k3",
        "Estimator of the KL: 'k3', or 'k3_clipped' (no gradient beyond a KL of 10), 'unbiased'",
        choices=("k3", "k3_clipped", "unbiased"),
        read_if=Condition("rl.kl_coef above 0", lambda c: c.rl.kl_coef > 0),
    ),
    Field(
        "rl.entropy_coef", 0.0, "factor of the entropy bonus, averaged as the loss is", limits=(0,)
    ),
    Field(
        "rl.advantage",
        "grpo",
        "'grpo': of the weighted sum of the rewards; 'gdpo' (arXiv 2601.05242): each reward is "
        "normalized within its group, then summed, then normalized over the batch; or "
        "'package.module:function', a custom function of (rewards, parts): the weighted sums "
        "[P, G], and each reward by name, NaN where missing. It is tried before training.",
        choices=("grpo", "gdpo"),
        function=True,
        read_if=_REWARDS,
    ),
    Field(
        "rl.advantage_scale",
        "group",
        "divide by the deviation within the 'group', 'batch', or 'none'",
        choices=("group", "batch", "none"),
        read_if=Condition(
            f"rl.advantage='grpo', and {_REWARDS.text}",
            lambda c: c.rl.advantage == "grpo" and learns_from_rewards(c),
        ),
    ),
    Field(
        "rl.advantage_eps",
        1e-4,
        "added to the standard deviation",
        limits=(0,),
        read_if=Condition(
            "rl.advantage='gdpo', or 'grpo' with rl.advantage_scale other than 'none'; and "
            f"{_REWARDS.text}",
            lambda c: (
                learns_from_rewards(c)
                and (
                    c.rl.advantage == "gdpo"
                    or (c.rl.advantage == "grpo" and c.rl.advantage_scale != "none")
                )
            ),
        ),
    ),
    Field(
        "rl.updates_per_rollout",
        4,
        "optimizer updates on each rollout, each on all of its rows; with rl.mini_batches as many "
        "on each of them",
        limits=(1,),
    ),
    Field(
        "rl.mini_batches",
        1,
        "Parts of equal size, of rows drawn at random, that a rollout is divided into; each has "
        "optimizer updates of its own (steps_per_generation / gradient_accumulation_steps of TRL).",
        limits=(1,),
    ),
    Field(
        "rl.dynamic_sampling", False, "replace groups in which the metric is the same everywhere"
    ),
    Field(
        "rl.dynamic_sampling_metric",
        "",
        "The metric: the name of a reward, 'overlong' (the length penalty) or 'total'. '': the "
        "reward 'correctness', as in DAPO (0 < correct < G), or 'total' where no such reward has a "
        "weight.",
        read_if=_DYNAMIC_SAMPLING,
    ),
    Field(
        "rl.dynamic_sampling_rounds",
        3,
        "most rollouts per step",
        limits=(1,),
        read_if=_DYNAMIC_SAMPLING,
    ),
    Field(
        "rl.dynamic_sampling_prompts",
        0,
        "Prompts of each of these rollouts, at least rollout.prompts_per_step, of which a step "
        "trains on as many informative ones; 0: rollout.prompts_per_step. Where few rows decode "
        "together, more of them cost little, and a further rollout would wait for its own longest "
        "completion (gen_batch_size of verl).",
        limits=(0,),
        read_if=_DYNAMIC_SAMPLING,
    ),
    Field(
        "rl.routing_replay",
        "rollout",
        "Of a mixture of experts: 'rollout' (R3, arXiv 2510.11370): updates take the experts that "
        "each token had in the rollout, with weights by the router's own logits; 'none': the "
        "routers choose again, and numbers that are rounded otherwise choose others.",
        choices=("rollout", "none"),
    ),
    Field(
        "rl.routing_check_every",
        0,
        "Steps between measurements of the log-prob difference to the rollout without replay, each "
        "a forward pass over one buffer; 0: off.",
        limits=(0,),
        resume="free",
    ),
    Field("rl.mask_truncated", False, "leave unfinished completions out of the loss"),
    Field(
        "rl.overlong_buffer",
        0,
        "tokens before the limit where the length penalty begins; 0: off",
        limits=(0,),
    ),
    Field(
        "rl.overlong_penalty",
        1.0,
        "length penalty at the limit",
        limits=(0,),
        read_if=Condition("rl.overlong_buffer above 0", lambda c: c.rl.overlong_buffer > 0),
    ),
    #
    Section("optimizer"),
    Field(
        "optimizer.name",
        "adamw",
        "'adamw', or 'package.module:function', a custom function that makes an optimizer of optax "
        "from a function of the update's number that is its learning rate. The memory plan counts "
        "two moments of each parameter.",
        choices=("adamw",),
        function=True,
    ),
    Field("optimizer.learning_rate", 1e-5, "Largest learning rate.", limits=(0, 100)),
    Field(
        "optimizer.schedule",
        "constant",
        "Learning rate after the warm-up: 'constant', or 'cosine', 'linear'",
        choices=("constant", "cosine", "linear"),
    ),
    Field(
        "optimizer.final_fraction",
        0.1,
        "Fraction of the learning rate at the end of the decay, which is one update after the last "
        "one.",
        limits=(0, 1),
        read_if=Condition(
            "optimizer.schedule other than 'constant'", lambda c: c.optimizer.schedule != "constant"
        ),
    ),
    Field("optimizer.warmup_steps", 0, "steps of a linear warm-up", limits=(0,)),
    Field(
        "optimizer.b1", 0.9, "Decay rate of the first moment.", limits=(0, 0.999999), read_if=_ADAMW
    ),
    Field(
        "optimizer.b2",
        0.99,
        "Decay rate of the second moment.",
        limits=(0, 0.999999),
        read_if=_ADAMW,
    ),
    # A's first gradient is 0, of which Adam would make 0 / 0 without it.
    Field(
        "optimizer.eps",
        1e-8,
        "Constant that is added to the root of the second moment.",
        limits=(1e-30,),
        read_if=_ADAMW,
    ),
    Field(
        "optimizer.weight_decay",
        0.1,
        "Decay of the weights, multiplied by the learning rate.",
        limits=(0,),
        read_if=_ADAMW,
    ),
    Field(
        "optimizer.max_grad_norm",
        0.2,
        "Larger gradients are scaled down to this norm.",
        limits=(1e-9,),
    ),
    #
    Section("train"),
    Field(
        "train.parameters",
        "lora",
        "'lora', 'lora+norms' (the adapter and the norm scales of the layers), or 'full' (all "
        "weights and no adapter, with a model.format that is not quantized).",
        choices=("lora", "lora+norms", "full"),
    ),
    Field(
        "train.buffer_tokens",
        0,
        "Tokens of one forward and backward pass, into which completions are packed. It changes "
        "memory and time, not the loss. 0: as many as the memory holds; on a CPU about one group.",
        limits=(0,),
        resume="memory",
    ),
    Field(
        "train.recompute",
        "auto",
        "Products of a layer that the backward pass computes again, which saves memory: 'none', "
        "'all', or names from qkv_proj, attention, o_proj and gate_up_proj, such as "
        "'gate_up_proj,o_proj'. 'auto': as few as the memory allows.",
        resume="memory",
    ),
    Field(
        "train.micro_batch_rows",
        8,
        "Rows whose tokens form one denominator. Only the aggregation 'micro_batch' reads it, "
        "which is that of the loss 'bnpo'.",
        limits=(1,),
        read_if=SPLIT_LOSS,
        resume="memory",
        fixed_if=SPLIT_LOSS,
    ),
    #
    Section(
        "mesh",
        "Devices of the run, data x tensor of them, in all its processes. A run may resume with "
        "other numbers. Processes connect by srun's variables, or by "
        "JAX_COORDINATOR_ADDRESS=HOST:PORT of process 0, JAX_NUM_PROCESSES and JAX_PROCESS_ID, "
        "which counts from 0.",
    ),
    Field(
        "mesh.data",
        1,
        "Groups of devices that the rows of a step are dealt out to; it divides "
        "rollout.prompts_per_step. Every group has a copy of the weights.",
        limits=(1, 2**20),
        resume="memory",
    ),
    Field(
        "mesh.tensor",
        1,
        "Devices of a group, between which weights are cut: for a model that does not fit one "
        "device. It divides the heads, kv heads, MLP and vocabulary of the model.",
        limits=(1, 2**20),
        resume="memory",
    ),
    #
    Section("eval", "greedy accuracy; the best adapter is kept"),
    Field("eval.every", 100, "steps; 0: off", limits=(0,)),
    Field(
        "eval.problems",
        0,
        "0: 256, but at most a tenth of the training problems if they are held out of them.",
        limits=(0,),
        read_if=_EVALUATION,
    ),
    Field(
        "eval.max_new_tokens",
        LinkedDefault("rollout.max_new_tokens"),
        "as in training",
        limits=(1,),
        read_if=_EVALUATION,
    ),
    #
    Section("checkpoint"),
    Field("checkpoint.every", 20, "steps", limits=(1,), resume="free"),
    Field("checkpoint.keep", 2, "Newest checkpoints that are kept.", limits=(1,), resume="free"),
    #
    Section("log"),
    Field(
        "log.completions",
        4,
        "rows of a step written to completions.jsonl",
        limits=(0,),
        resume="free",
    ),
    Field(
        "log.print_completions",
        0,
        "Rows of a step that are printed, each as two lines: the question, and the reward with the "
        "end of the completion.",
        limits=(0,),
        resume="free",
    ),
    Field("log.tensorboard", True, "Writes curves for TensorBoard.", resume="free"),
    Field("log.wandb", False, "Sends metrics to wandb.", resume="free"),
    Field("log.trackio", False, "Sends metrics to trackio.", resume="free"),
    Field(
        "log.project", "qerl-jax", "project at wandb and trackio", read_if=_TRACKER, resume="free"
    ),
    Field(
        "log.group",
        "",
        "group of runs there, such as the name of a sweep; '': none",
        read_if=_TRACKER,
        resume="free",
    ),
    #
    Section("profile", "a jax.profiler trace of the steps start..stop; 0, 0: off"),
    Field(
        "profile.start",
        0,
        "First step of the trace.",
        read_if=Condition("profile.start not after steps", lambda c: c.profile.start <= c.steps),
        resume="free",
    ),
    Field(
        "profile.stop",
        0,
        "Last step of the trace.",
        read_if=Condition(
            "profile.start from 1 to steps", lambda c: 1 <= c.profile.start <= c.steps
        ),
        resume="free",
    ),
)

# The fields without the sections, by name.
ROWS: dict[str, Field] = {row.name: row for row in FIELDS if isinstance(row, Field)}

_ENTRY_KEY = ".NAME."
# The tables whose entries have fields of their own, under names that the user chooses.
_TABLES = tuple(sorted({name.partition(_ENTRY_KEY)[0] for name in ROWS if _ENTRY_KEY in name}))
_ENTRY = re.compile(rf"({'|'.join(map(re.escape, _TABLES))})\.[^.]+")


def row_of(field: str) -> Field | None:
    """The row of a field; None for a section, and where there is no such field.

    A key of an entry, such as 'rewards.short.weight', has a row; 'data.options.max_terms' has that
    of its table.
    """
    parts = _ENTRY.sub(r"\1.NAME", field, count=1).split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((ROWS[name] for name in names if name in ROWS), None)


def keys_of(table: str) -> dict[str, Field]:
    """The rows of the keys of a table's entries, such as those of 'rewards', by key."""
    prefix = f"{table}{_ENTRY_KEY}"
    return {name.removeprefix(prefix): row for name, row in ROWS.items() if name.startswith(prefix)}
