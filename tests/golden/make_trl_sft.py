"""Writes trl_sft.json and trl_sft.safetensors: what TRL's SFTTrainer learns of rows of text.

The model is that of trl_step/ with its adapter. ROWS are token ids and which of them are learned;
two of them have the same prompt, and one has two turns. The trainer takes one optimizer step on all
rows, in micro-batches of two rows and packed into rows of 24 tokens:

    loss.VARIANT        the loss that it logs, VARIANT is 'rows' or 'packed'
    grad.VARIANT.KEY    the gradient of the adapter, under PEFT's keys

The conversations, with a call of a tool, are those of `assistant_only_loss`: TRL's training
template of a family, the ids, and the mask of what is learned:

    {"rows": [[ids, learned]], "conversations": {family: [{messages, tools, ids, learned}]}}

Needs Python 3.12, torch==2.13.0 (CPU), transformers==5.23.0, trl==1.16.0, peft==0.21.2,
accelerate, datasets==5.2.0, safetensors==0.8.0:

    python tests/golden/make_trl_sft.py
"""

import json
import os
import pathlib
import tempfile

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import trl.chat_template_utils as templates
from datasets import Dataset
from environment_tokenizer import FAMILIES, write
from peft import PeftModel
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import SFTConfig, SFTTrainer

FOLDER = pathlib.Path(__file__).parent
STEP = FOLDER / "trl_step"
ROWS = [
    ([10, 11, 12, 13, 14, 30, 31, 32, 1], [0] * 5 + [1] * 4),
    ([10, 11, 12, 13, 14, 33, 34, 1], [0] * 5 + [1] * 3),
    ([20, 21, 22, 40, 1, 5, 23, 24, 41, 42, 1], [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]),
    ([25, 26, 1], [0, 0, 1]),
    ([27, *range(30, 50), 1], [0] + [1] * 21),
]
VARIANTS = {"rows": {}, "packed": {"packing": True, "packing_strategy": "bfd"}}
TEMPLATES = ("qwen2_5", "qwen3", "qwen3_5_nothink")  # whose training templates TRL has
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 17, "y": 25}}}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}
CONVERSATIONS = [
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is 2 + 2?"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "And 3?"},
            {"role": "assistant", "content": "It is 7."},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "What is 17 + 25?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "add", "content": "42"},
            {"role": "assistant", "content": "42."},
        ],
        "tools": [TOOL],
    },
]


class Keep(TrainerCallback):
    """Keeps the gradient of the step."""

    def __init__(self):
        self.gradient = {}

    def on_pre_optimizer_step(self, args, state, control, *, model, **_):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                key = name.replace(".default", "")
                self.gradient[key] = parameter.grad.detach().clone()


def train(variant):
    """The loss and the gradient of one step on all rows."""
    model = AutoModelForCausalLM.from_pretrained(STEP, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, STEP / "adapter", is_trainable=True)
    packed, kept = bool(VARIANTS[variant]), Keep()
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder,
            max_steps=1,
            per_device_train_batch_size=1 if packed else 2,
            gradient_accumulation_steps=3,
            max_length=24,
            completion_only_loss=True,
            max_grad_norm=1e9,  # no clip
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            **VARIANTS[variant],
        )
        names = ("input_ids", "completion_mask")
        trainer = SFTTrainer(
            model=model,
            args=args,
            train_dataset=Dataset.from_list([dict(zip(names, row, strict=True)) for row in ROWS]),
            processing_class=AutoTokenizer.from_pretrained(STEP),
            callbacks=[kept],
        )
        print(variant, len(trainer.train_dataset), "rows")
        trainer.train()
        (loss,) = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return loss, kept.gradient


def conversations(family):
    """The ids and the mask of conversations in the training template of a family."""
    bos, end, special = FAMILIES[family]
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder), family)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=f"{folder}/tokenizer.json",
            eos_token=end,
            additional_special_tokens=special,
            **({"bos_token": bos} if bos else {}),
        )
    directory = pathlib.Path(templates.__file__).parent / "chat_templates"
    tokenizer.chat_template = (directory / f"{family}.jinja").read_text()
    training = templates.get_training_chat_template(tokenizer)
    rows = []
    for conversation in CONVERSATIONS:
        made = tokenizer.apply_chat_template(
            conversation["messages"],
            tools=conversation.get("tools"),
            chat_template=training,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        learned = made["assistant_masks"]
        rows.append(conversation | {"ids": made["input_ids"], "learned": learned})
    return rows


def main():
    tensors = {}
    for variant in VARIANTS:
        loss, gradient = train(variant)
        tensors[f"loss.{variant}"] = torch.tensor(loss, dtype=torch.float64)
        tensors |= {f"grad.{variant}.{name}": value for name, value in gradient.items()}
        print(variant, loss, len(gradient))
    save_file(tensors, FOLDER / "trl_sft.safetensors")
    text = {"rows": ROWS, "conversations": {family: conversations(family) for family in TEMPLATES}}
    (FOLDER / "trl_sft.json").write_text(json.dumps(text) + "\n")


if __name__ == "__main__":
    main()
