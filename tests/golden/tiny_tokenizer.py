"""A tokenizer for the tiny models: the words t0 (padding), t1 (end), t2 ... are ids 0, 1, 2 ..."""

import json
import pathlib

import tokenizers
from tokenizers import models, pre_tokenizers


def write_tokenizer(folder: pathlib.Path, vocab_size: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t2")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["t0", "t1"])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {"eos_token": "t1", "pad_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
