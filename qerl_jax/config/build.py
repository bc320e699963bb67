"""Every field of a config with its default and its comment, the models, and the recipes.

An experiment's config file is a table of differences; `build` makes the config from

    MODEL[,RECIPE]     as in --config=grpo_gsm8k:qwen2.5-7b,trl

MODEL selects the weights. RECIPE selects noise, loss, advantages and optimizer: 'paper' (the
default), 'reference_code', 'trl', 'verl', or the paper's recipe with another loss, 'dr_grpo',
'gspo', 'cispo'. The sizes (prompts, groups, lengths, rank, steps) stay the experiment's; so do the
learning rate and the first sigma of the stand-in. Only 'first_run' changes sizes: it is the paper's
recipe with 100 steps and 1,024 new tokens. `python -m experiments.plan` says what a run takes of a
card's memory.

Any field below can be set on the command line, for example --config.aqn.schedule=cosine or
--config.lora.targets="('q_proj', 'v_proj')".
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from qerl_jax.config.models import MODELS, SOURCES, STAND_IN, TEMPLATE_ARGS
from qerl_jax.config.recipes import RECIPES
from qerl_jax.errors import UserError


def build(
    experiment: str,
    preset: str,
    *,
    settings: Mapping[str, Any],
    rewards: Mapping[str, Mapping[str, Any]],
    stand_in: Mapping[str, Any],
) -> ConfigDict:
    """Returns the locked config of an experiment.

    Values are set in this order, and later ones win: the fields' defaults, `settings`, the recipe,
    and `stand_in` if the model is the stand-in.

    Args:
        experiment: name of the experiment, with which the names of its run folders begin.
        preset: 'MODEL[,RECIPE]', with names from `MODELS` and `RECIPES`.
        settings: the experiment's values by flattened name.
        rewards: name -> 'function' and 'weight', as in the field `rewards`.
        stand_in: values that a model of 135M parameters needs, by flattened name.

    Raises:
        UserError: the model or the recipe does not exist.
    """
    model, comma, recipe = preset.partition(",")
    recipe = recipe if comma else "paper"
    if model not in SOURCES or recipe not in RECIPES:
        raise UserError(
            f"unknown preset {preset!r}: write MODEL or MODEL,RECIPE with a model from "
            f"{', '.join(MODELS)} and a recipe from {', '.join(RECIPES)}"
        )
    c = _fields(model)
    c.experiment = experiment
    c.preset = f"{model}-{recipe}"
    c.rewards.update({name: dict(reward) for name, reward in rewards.items()})
    c.update_from_flattened_dict(dict(settings))
    c.update_from_flattened_dict(RECIPES[recipe])
    if model == STAND_IN:
        c.update_from_flattened_dict(dict(stand_in))
    return c.lock()


def _fields(model: str) -> ConfigDict:
    """Every field with its default: the paper's value for GSM8K, where the paper gives one."""
    c = ConfigDict()
    c.experiment = ""
    c.preset = ""
    c.seed = 0
    c.steps = 600  # More of them extend a run, unless its learning rate has decayed to 0.

    # Folder of a run that this run begins from: its adapter, optimizer and position in the data.
    # Other fields may change, but not model.format and what the adapter is. FOLDER takes its last
    # checkpoint, FOLDER:best its best adapter.
    c.init_from = ""

    c.model = ConfigDict()
    # 'package:NAME', a GGUF file, a Hugging Face folder, or a hub id.
    c.model.source = SOURCES[model]
    # 'nvfp4' quantizes the linear layers at load, as do the paper's baselines 'mxfp4' and 'nf4'
    # (QLoRA's). 'bf16' does not quantize; the paper halves the learning rate for it (5e-6).
    c.model.format = "nvfp4"
    c.model.dtype = "bfloat16"  # dtype of activations, embeddings, biases; or 'float32'

    c.lora = ConfigDict()
    c.lora.rank = 32
    c.lora.alpha = 32.0  # The adapter is scaled by alpha / rank.
    c.lora.rslora = False  # rsLoRA: the adapter is scaled by alpha / sqrt(rank).
    c.lora.targets = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    c.lora.init = ""  # folder of a PEFT adapter to start from

    c.data = ConfigDict()
    # A hub id, or 'reasoning_gym:TASK': generated problems, which need no hub. gsm_symbolic is the
    # stand-in for GSM8K, for models of 1B and more.
    c.data.source = ""
    # 'held_out': eval.problems of the training problems, which are not trained on, so that no test
    # split chooses the best adapter; a hub id: its test split; '': the source's own test split, or
    # held-out problems if it has none.
    c.data.eval_source = "held_out"
    # Local files or folders for training and evaluation, which replace the sources: .jsonl, .json
    # (an array) or .parquet. Rewards get the columns of a row that they have arguments for.
    c.data.path = ""
    c.data.eval_path = ""
    # Several sources in place of one, drawn in proportion to their weights: name -> path or source,
    # and optionally weight (1.0), split ('train'), levels, fields and options; see docs/rewards.md.
    #   --config.data.mixture.NAME.path=FILE --config.data.mixture.NAME.weight=2    adds one
    # The evaluation problems are those of eval_path or eval_source; 'held_out' and '' take them
    # from every source by its weight, as for one source.
    c.data.mixture = ConfigDict()
    # Names of the fields in files and hub datasets; a name with dots is nested, such as
    # reward_model.ground_truth. '': question, problem or prompt (a text, or a list of chat
    # messages); answer or solution; level.
    c.data.fields = ConfigDict()
    c.data.fields.question = ""
    c.data.fields.answer = ""
    c.data.fields.level = ""
    # Difficulties to train on, by the problems' field `level`, such as (3, 4, 5). (): all.
    c.data.levels = ()
    c.data.max_question_chars = 0  # Longer questions are not trained on. 0: no limit
    # Options of the reasoning_gym task. --config.data.options="{'difficulty': 1.0}" replaces all.
    c.data.options = ConfigDict()
    # 'learnability' (arXiv 2502.12272) draws problems that the policy solves in a part p of its
    # attempts, with a probability in proportion to p (1 - p); p is that of the reward
    # 'correctness' in the problem's last group. 'off': every problem once in an epoch.
    c.data.curriculum = "off"
    c.data.curriculum_share = 0.5  # part of the draws that are made so; the others follow the epoch
    c.data.system_prompt = ""
    c.data.question_suffix = ""  # appended to every question
    # Further variables of the chat template. That of Qwen3 has enable_thinking, which the presets
    # set: True trains the thinking mode, in which the model writes its <think> part itself.
    c.data.chat_template_args = ConfigDict(TEMPLATE_ARGS.get(model.partition("-")[0], {}))
    c.data.max_prompt_tokens = 320  # A longer prompt is an error.

    c.rollout = ConfigDict()
    c.rollout.prompts_per_step = 16  # With group_size 8 a step has 128 samples.
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 4096
    c.rollout.temperature = 1.0  # of the first step
    # 'constant', or a way to temperature_end in the last step: 'linear', 'cosine'.
    c.rollout.temperature_schedule = "constant"
    c.rollout.temperature_end = 1.0
    c.rollout.top_k = 0  # 0: off
    c.rollout.top_p = 1.0  # 1.0: off
    # Strings that end a completion, such as ('</answer>',), beside the end-of-sequence tokens.
    c.rollout.stop = ()
    # Largest decode batch in rows; other rows wait. 0: as many as the memory holds, see
    # `python -m experiments.plan`.
    c.rollout.max_rows = 0
    # Memory for keys and values. 0: what the plan of the run leaves for them.
    c.rollout.kv_cache_bytes = 0
    # '': model.dtype. 'float8' halves the memory of bfloat16, not the time; the sampling policy
    # then has rounded keys and values.
    c.rollout.kv_cache_dtype = ""
    # '': the policy's head. 'nvfp4' makes a copy in 4 bits for rollouts, a quarter of the bytes
    # that the head costs every decode step; the sampling policy then has a rounded head.
    c.rollout.head_format = ""
    c.rollout.chunk_steps = 32  # Decode steps between two checks of which rows have ended.

    # Used where no kernel reads the packed weights. 'once' dequantizes the weights once per
    # rollout, which needs memory for a dense copy while it lasts; 'step' does not, and is slower.
    # 'auto': 'once' where the copy takes at most a third of the memory.
    c.rollout.dequantize = "auto"

    # Name -> function and its weight in the sum, and optionally time_limit; for a URL also retries
    # and token_env. qerl_jax/rewards/calls.py lists the forms of a reward, docs/rewards.md
    # explains them. The reward named 'correctness' is the accuracy.
    #   --config.rewards.NAME.function=package.module:function    adds one
    c.rewards = ConfigDict()
    # Seconds for a call of a reward without a time_limit: of one completion, or of the step where
    # the reward takes lists or is a URL. After that the reward is missing. 0: no limit
    c.reward_time_limit = 5.0

    # Adaptive quantization noise: Gaussian noise on the norm scales while sampling.
    c.aqn = ConfigDict()
    # 'exponential' (the paper's Eq. 8), 'reference' (the released code's), 'linear', 'cosine',
    # 'logarithmic', 'constant', 'off', or 'package.module:function': a custom function
    # f(*, sigma_start, sigma_end, stages, total_steps) that returns a function of the step, which
    # is also called from total_steps on where a run is extended. 'kl': sigma follows the measured
    # KL, so that it comes to the targets below.
    c.aqn.schedule = "exponential"
    c.aqn.stages = 10  # Equal parts of the run; the first part has no noise.
    c.aqn.sigma_start = 1e-2
    c.aqn.sigma_end = 5e-4
    c.aqn.form = "additive"  # or 'relative'
    # With the schedule 'kl', the wanted KL(noisy, clean) of the first and of the last noisy stage,
    # in nats per token, and the largest sigma; sigma_start is the first one.
    c.aqn.kl_target_start = 1e-2
    c.aqn.kl_target_end = 1e-2
    c.aqn.sigma_max = 0.3
    c.aqn.final_norm = False
    # How training accounts for the noise in sampling: 'none' (the paper's), 'tis' (truncated
    # importance weights), or 'noisy_forward' (training under the same noise).
    c.aqn.correction = "none"
    c.aqn.tis_cap = 2.0
    c.aqn.kl_every = 1  # steps between measurements of KL(noisy, clean); 0: off
    c.aqn.kl_rows = 8  # completions on which the KL is measured

    c.rl = ConfigDict()
    # 'grpo': mean over each completion, then over rows; 'dapo': mean over all tokens; 'bnpo': over
    # those of each micro-batch; 'dr_grpo': sum over rows * max_new_tokens, with
    # advantage_scale='none'; 'gspo': one ratio for a completion, with clip ranges around 4e-4;
    # 'gspo_token': the same, with gradients of the tokens' own ratios; 'cispo': the ratio clipped
    # as a weight, where clip_low=1.0 sets no lower bound; 'sapo': a sigmoid of the ratio in place
    # of the clip; 'opsm': grpo with off_policy_delta=0.5; or 'package.module:function', a function
    # of JAX, f(ratio, advantages, logprobs, mask), that returns the loss of each token.
    c.rl.loss = "grpo"
    c.rl.sapo_temperature_pos = 1.0  # of the sigmoid, where the advantage is positive
    c.rl.sapo_temperature_neg = 1.05
    # A completion with a negative advantage is left out where the policy that sampled gives its
    # tokens a mean log-probability more than this above the trained policy's (the off-policy
    # sequence mask of DeepSeek-V3.2). 0: the loss's own
    c.rl.off_policy_delta = 0.0
    # '': the loss's own; or 'token', 'sequence', 'sequence_sum', 'constant', 'micro_batch', or
    # 'package.module:function': a custom function of (mask, advantages, logprobs) that returns the
    # weight of each token in the loss. It is tried on made-up arrays before training.
    c.rl.aggregation = ""
    c.rl.clip_low = 0.2
    c.rl.clip_high = 0.28
    c.rl.dual_clip = 0.0  # bound of the ratio, above 1, where the advantage is negative; 0: off
    c.rl.kl_coef = 0.0  # KL to the policy that training starts from, with the adapter of lora.init
    c.rl.kl_grad = "k3"  # or 'k3_clipped' (no gradient beyond a KL of 10), 'unbiased'
    c.rl.entropy_coef = 0.0  # factor of the entropy bonus, averaged as the loss is
    # 'grpo': of the weighted sum of the rewards; 'gdpo' (arXiv 2601.05242): each reward is
    # normalized within its group, then summed, then normalized over the batch.
    c.rl.advantage = "grpo"
    c.rl.advantage_scale = "group"  # divide by the deviation within the 'group', 'batch', or 'none'
    c.rl.advantage_eps = 1e-4  # added to the standard deviation
    c.rl.updates_per_rollout = 4  # optimizer updates on each rollout, each on all of its rows
    c.rl.dynamic_sampling = False  # replace groups in which the metric is the same everywhere
    # The metric: the name of a reward, 'overlong' (the length penalty) or 'total'. '': the reward
    # 'correctness', as in DAPO (0 < correct < G), or 'total' where no such reward has a weight.
    c.rl.dynamic_sampling_metric = ""
    c.rl.dynamic_sampling_rounds = 3  # most rollouts per step
    c.rl.mask_truncated = False  # leave unfinished completions out of the loss
    c.rl.overlong_buffer = 0  # tokens before the limit where the length penalty begins; 0: off
    c.rl.overlong_penalty = 1.0  # length penalty at the limit

    c.optimizer = ConfigDict()  # AdamW
    c.optimizer.learning_rate = 1e-5
    c.optimizer.schedule = "constant"  # or 'cosine', 'linear'
    # Fraction of the learning rate at the end of the decay, which is one update after the last one.
    c.optimizer.final_fraction = 0.1
    c.optimizer.warmup_steps = 0  # steps of a linear warm-up
    c.optimizer.b1 = 0.9
    c.optimizer.b2 = 0.99
    c.optimizer.eps = 1e-8
    c.optimizer.weight_decay = 0.1
    c.optimizer.max_grad_norm = 0.2

    c.train = ConfigDict()
    # 'lora', 'lora+norms' (the adapter and the norm scales of the layers), or 'full' (all weights
    # and no adapter, with a model.format that is not quantized).
    c.train.parameters = "lora"
    # Tokens of one forward and backward pass, into which completions are packed. It changes memory
    # and time, not the loss. 0: as many as the memory holds; on a CPU about one group.
    c.train.buffer_tokens = 0
    # Products of a layer that the backward pass computes again, which saves memory: 'none', 'all',
    # or names from qkv_proj, attention, o_proj and gate_up_proj, such as 'gate_up_proj,o_proj'.
    # 'auto': as few as the memory allows.
    c.train.recompute = "auto"
    # Rows whose tokens form one denominator. Only the aggregation 'micro_batch' reads it, which is
    # that of the loss 'bnpo'.
    c.train.micro_batch_rows = 8

    # Devices of the run, data x tensor of them, in all its processes. A run may go on with other
    # numbers. Processes connect by srun's variables, or by JAX_COORDINATOR_ADDRESS=HOST:PORT of
    # process 0, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which counts from 0.
    c.mesh = ConfigDict()
    # Groups of devices that the rows of a step are dealt out to; it divides
    # rollout.prompts_per_step. Every group has a copy of the weights.
    c.mesh.data = 1
    # Devices of a group, between which weights are cut: for a model that does not fit one device.
    # It divides the heads, kv heads, MLP and vocabulary of the model.
    c.mesh.tensor = 1

    c.eval = ConfigDict()  # greedy accuracy; the best adapter is kept
    c.eval.every = 100  # steps; 0: off
    # 0: 256, but at most a tenth of the training problems if they are held out of them.
    c.eval.problems = 0
    c.eval.max_new_tokens = c.rollout.get_oneway_ref("max_new_tokens")  # as in training

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 20  # steps
    c.checkpoint.keep = 2

    c.log = ConfigDict()
    c.log.completions = 4  # rows of a step written to completions.jsonl
    c.log.tensorboard = True
    c.log.wandb = False
    c.log.trackio = False
    c.log.project = "qerl-jax"  # project at wandb and trackio
    c.log.group = ""  # group of runs there, such as the name of a sweep; '': none

    c.profile = ConfigDict()  # a jax.profiler trace of the steps start..stop; 0, 0: off
    c.profile.start = 0
    c.profile.stop = 0
    return c
