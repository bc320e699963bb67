"""The tokenizers of recorded conversations with tools, and these conversations."""

import json
import pathlib
import sys

from qerl_jax.weights.tokenizer import Tokenizer

GOLDEN = pathlib.Path(__file__).parent / "golden"
RECORDED = json.loads((GOLDEN / "environment_trl.json").read_text())
FORMATS = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_think": "xml",
    "qwen3_5_nothink": "xml",
    "llama3_1": "llama",
    "mistral": "mistral",
}


def tokenizer_of(family):
    sys.path.insert(0, str(GOLDEN))
    try:
        from environment_tokenizer import FAMILIES, make_backend
    finally:
        sys.path.remove(str(GOLDEN))
    bos, eos, _ = FAMILIES[family]
    backend = make_backend(family)
    end = backend.token_to_id(eos)
    special = {"eos_token": eos} | ({"bos_token": bos} if bos else {})
    template = RECORDED["families"][family]["template"]
    return Tokenizer(backend, template, special, (end,), end)
