"""A tokenizer of single bytes with the special tokens of five families of chat templates."""

import pathlib

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

# Family -> bos token or '', end of a turn, and all special tokens.
FAMILIES = {
    "qwen2_5": ("", "<|im_end|>", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "qwen3": ("", "<|im_end|>", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "qwen3_5_think": ("", "<|im_end|>", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "qwen3_5_nothink": ("", "<|im_end|>", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "llama3_1": (
        "<|begin_of_text|>",
        "<|eot_id|>",
        [
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eot_id|>", "<|python_tag|>"),
        ],
    ),
    "mistral": (
        "<s>",
        "</s>",
        [
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
            *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ],
    ),
}


def make_backend(family: str) -> tokenizers.Tokenizer:
    """The tokenizer of a family."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(FAMILIES[family][2])
    return backend


def write(folder: pathlib.Path, family: str) -> None:
    """Writes tokenizer.json."""
    make_backend(family).save(str(folder / "tokenizer.json"))
