"""Writes trl_step/: whole optimizer steps of TRL's GRPOTrainer with a PEFT adapter.

The model is a tiny random Qwen2 (config.json, model.safetensors in float32, a tokenizer) with LoRA
on its seven projections (adapter/, saved by PEFT, B not zero). The rollout is fixed (rollout.json:
prompts, completions, rewards; nothing is sampled). The third prompt has equal rewards, and two
completions are truncated. The KL term compares with the model without the adapter. Two variants
train more than the adapter: the norms of the layers, too (PEFT's modules_to_save), or the whole
model without an adapter. One takes two updates on each half of the rollout, whose rows TRL draws
(steps_per_generation). Each variant adds two files:

    NAME.json          the settings and, for every update, the loss, the gradient norm before
                       clipping, entropy, KL and clip fraction as TRL logs them, and
                       the rows of a mini-batch
    NAME.safetensors   advantages [B]; mask [B, C]; for every update u: logprobs.u [B, C], the
                       gradient grad.u.KEY before clipping and the parameters after.u.KEY, under
                       the keys of the adapter or, where the whole model is trained, of the model;
                       ref_logprobs [B, C] where the loss has a KL term. Rows are in the order of
                       rollout.json; values outside the mask and of rows that an update does not
                       have are undefined.

Needs Python 3.11, torch==2.13.0 (CPU), transformers==5.23.0, trl==1.16.0, peft==0.21.2,
accelerate, datasets==5.2.0, safetensors==0.8.0:

    python tests/golden/make_trl_step.py
"""

import dataclasses
import json
import os
import pathlib
import tempfile

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from tiny_tokenizer import write_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

FOLDER = pathlib.Path(__file__).parent / "trl_step"
VOCABULARY, PAD, EOS = 64, 0, 1
GROUP, MAX_TOKENS = 4, 6
PROMPTS = [[10, 11, 12, 13, 14], [20, 21, 22], [25, 26, 27, 28]]
COMPLETIONS = [
    [[30, 31, 32, 1], [33, 34, 1], [35, 36, 37, 38, 39, 40], [41, 1]],
    [[42, 43, 1], [1], [45, 46, 47, 48, 49, 1], [49, 50, 51, 52, 53, 54]],
    [[55, 1], [56, 57, 1], [58, 59, 60, 1], [61, 62, 63, 30, 1]],
]
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.5], [1.0, 1.0, 1.0, 1.0]]
SETTINGS = {
    "temperature": 0.9,
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "scale_rewards": "group",
    "mask_truncated_completions": True,
    "num_iterations": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.1,
    "max_grad_norm": 0.2,
}
VARIANTS = {
    "grpo": {
        "loss_type": "grpo",
        "epsilon_high": 0.2,
        "beta": 0.04,
        "use_bias_correction_kl": False,
    },
    "dapo": {"loss_type": "dapo", "beta": 0.0},
    "dapo_kl": {"loss_type": "dapo", "beta": 0.04, "use_bias_correction_kl": True},
    "dapo_two_updates": {
        "loss_type": "dapo",
        "beta": 0.0,
        "num_iterations": 2,
        "learning_rate": 3e-3,
    },
    "dapo_mini_batches": {
        "loss_type": "dapo",
        "beta": 0.0,
        "num_iterations": 2,
        "steps_per_generation": 2,
        "learning_rate": 3e-3,
    },
    "lora+norms": {"loss_type": "dapo", "beta": 0.0, "num_iterations": 3, "learning_rate": 1e-3},
    "full": {"loss_type": "dapo", "beta": 0.0, "num_iterations": 3, "learning_rate": 2e-4},
}
NORMS = ["input_layernorm", "post_attention_layernorm"]


LORA = LoraConfig(
    r=4,
    lora_alpha=8,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    task_type="CAUSAL_LM",
)


def make_inputs():
    """Writes the base model, the adapter and the rollout."""
    # With this seed no gradient is close enough to zero for Adam's first step to magnify rounding.
    generator = torch.Generator().manual_seed(2)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=2,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                values = 1 + 0.3 * values
            elif name.endswith("bias") or "embed_tokens" in name:
                values = 0.3 * values
            else:
                values = values / parameter.shape[1] ** 0.5
            parameter.copy_(values)
    model.save_pretrained(FOLDER)
    write_tokenizer(FOLDER, VOCABULARY)
    model = get_peft_model(model, LORA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                size = 0.05 if "lora_B" in name else parameter.shape[1] ** -0.5
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(FOLDER / "adapter")
    config_path = FOLDER / "adapter" / "adapter_config.json"
    config = json.loads(config_path.read_text())
    config["target_modules"].sort()  # PEFT writes a set in any order
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True))
    for path in (FOLDER / "generation_config.json", FOLDER / "adapter" / "README.md"):
        path.unlink(missing_ok=True)
    rollout = {"eos_id": EOS, "prompts": PROMPTS, "completions": COMPLETIONS, "rewards": REWARDS}
    (FOLDER / "rollout.json").write_text(json.dumps(rollout) + "\n")


class RecordingTrainer(GRPOTrainer):
    """Records the inputs of each update, with rows in the rollout's order (TRL shuffles them)."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tensors, self.updates = {}, []

    def record(self, name, values, completion_ids):
        order = {}
        for row, ids in enumerate(completion_ids.tolist()):
            while len(ids) > 1 and ids[-1] == PAD:
                ids = ids[:-1]
            order[tuple(ids)] = row
        all_rows = [tuple(ids) for group in COMPLETIONS for ids in group]
        rows = [row for row, ids in enumerate(all_rows) if ids in order]
        values = values.detach()
        found = values.new_zeros((len(all_rows), *values.shape[1:]))
        found[rows] = values[[order[all_rows[row]] for row in rows]]
        self.tensors[name] = found.to(torch.float32 if found.is_floating_point() else torch.int32)
        return rows

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        for ours, theirs in {
            "advantages": "advantages",
            "mask": "completion_mask",
            "ref_logprobs": "ref_per_token_logps",
        }.items():
            if theirs in output:
                self.record(ours, output[theirs], output["completion_ids"])
        return output

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.last_logprobs = output[0]
        return output

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        update = len(self.updates)
        ids = inputs["completion_ids"]
        rows = self.record(f"logprobs.{update}", self.last_logprobs, ids)
        self.updates.append({"loss": loss.item()})
        if len(rows) < len(PROMPTS) * GROUP:
            self.updates[-1]["rows"] = rows
        return loss

    def log(self, logs, *args, **kwargs):
        if "grad_norm" in logs:
            metrics = self._metrics["train"]
            update = self.updates[-1]
            update["grad_norm"] = float(logs["grad_norm"])
            update["entropy"] = metrics["entropy"][-1]
            update["clip_fraction"] = metrics["clip_ratio/region_mean"][-1]
            if "kl" in metrics:
                update["kl"] = metrics["kl"][-1]
            if isinstance(self.model, PeftModel):
                trained = get_peft_model_state_dict(self.model)
            else:
                trained = dict(self.model.named_parameters())
            for name, value in trained.items():
                self.tensors[f"after.{len(self.updates) - 1}.{name}"] = value.detach().clone()
        super().log(logs, *args, **kwargs)


def run(settings, parameters):
    """Runs one rollout and its updates; returns tensors and a list of numbers per update."""
    mini_batches = settings.get("steps_per_generation", 1)
    text = [" ".join(f"t{i}" for i in ids) for ids in PROMPTS]
    seen = dict.fromkeys(text, 0)

    def rollout(prompts, trainer):
        output = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "fixed_reward": []}
        for prompt in prompts:
            index, member = text.index(prompt), seen[prompt] % GROUP
            seen[prompt] += 1
            completion = COMPLETIONS[index][member]
            output["prompt_ids"].append(PROMPTS[index])
            output["completion_ids"].append(completion)
            output["logprobs"].append([0.0] * len(completion))
            output["fixed_reward"].append(REWARDS[index][member])
        return output

    def reward(completions, fixed_reward, **_):
        return fixed_reward

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    peft_config = {
        "lora": LORA,  # the KL term then refers to the model without the adapter
        "lora+norms": dataclasses.replace(LORA, modules_to_save=NORMS),
        "full": None,
    }[parameters]
    with tempfile.TemporaryDirectory() as scratch:
        trainer = RecordingTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=scratch,
                per_device_train_batch_size=len(PROMPTS) * GROUP // mini_batches,
                gradient_accumulation_steps=1,
                num_generations=GROUP,
                max_completion_length=MAX_TOKENS,
                max_steps=settings["num_iterations"] * mini_batches,
                optim="adamw_torch",
                bf16=False,
                fp16=False,
                gradient_checkpointing=False,
                use_cpu=True,
                seed=0,
                shuffle_dataset=False,
                report_to=[],
                logging_steps=1,
                save_strategy="no",
                disable_tqdm=True,
                **settings,
            ),
            train_dataset=Dataset.from_dict({"prompt": text * GROUP}),
            processing_class=tokenizer,
            rollout_func=rollout,
            peft_config=peft_config,
        )
        if peft_config:
            adapter = load_file(FOLDER / "adapter" / "adapter_model.safetensors")
            norms = get_peft_model_state_dict(trainer.model)
            set_peft_model_state_dict(trainer.model, norms | adapter)
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad and "lora_" in name:

                def keep(parameter, name=name):
                    name = name.replace(".default.", ".")  # as in the adapter's file
                    update = len(trainer.updates) - 1
                    trainer.tensors[f"grad.{update}.{name}"] = parameter.grad.detach().clone()

                parameter.register_post_accumulate_grad_hook(keep)
        trainer.train()
    return trainer.tensors, trainer.updates


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make_inputs()
    for name, changes in VARIANTS.items():
        settings = SETTINGS | changes
        parameters = name if name in ("lora+norms", "full") else "lora"
        tensors, updates = run(settings, parameters)
        save_file({k: v.contiguous() for k, v in tensors.items()}, FOLDER / f"{name}.safetensors")
        record = {"settings": settings, "updates": updates}
        (FOLDER / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
        print(name, updates, tensors["advantages"].tolist())


if __name__ == "__main__":
    main()
