"""Writes export_logits/: logits of transformers and PEFT for exports of tiny NVFP4 models.

The bases are the checkpoints nvfp4_*/ (make_nvfp4.py), each with an adapter of random numbers in
adapter_NAME/. logits.safetensors holds, for each base, `ids` [T] and float32 logits [T, V] of three
exports: NAME.peft, the adapter over the NVFP4 base, whose weights are as compressed-tensors
decompresses them (rounded to bfloat16 after the scales), NAME.merged and NAME.nvfp4. exports.json
holds the sha256 of every exported tensor file from which these logits were computed.

The script has two stages, because the project does not depend on torch. The first needs the
project's environment, the second Python 3.11, torch==2.13.0 (CPU), transformers==5.20.0,
peft==0.21.2, compressed-tensors==0.17.0, safetensors==0.8.0; DIR is any folder:

    uv run python tests/golden/make_export_logits.py export DIR
    python tests/golden/make_export_logits.py logits DIR
"""

import hashlib
import json
import pathlib
import sys

from shared import read_decompressed, save_random_adapter

HERE = pathlib.Path(__file__).parent
FOLDER = HERE / "export_logits"
NAMES = ("qwen2", "qwen3", "llama")
FORMATS = ("peft", "merged", "nvfp4")


def export_all(folder: pathlib.Path) -> dict[str, str]:
    """Exports every model in every format to folder/NAME.FORMAT; returns the files' sha256."""
    from qerl_jax.export.write import ExportConfig, export

    digests = {}
    for name in NAMES:
        for form in FORMATS:
            out = export(
                ExportConfig(
                    source=str(FOLDER / f"adapter_{name}"),
                    base=str(HERE / f"nvfp4_{name}"),
                    format=form,
                    out=str(folder / f"{name}.{form}"),
                    score_problems=0,
                )
            )
            (file,) = out.glob("*.safetensors")
            digests[f"{name}.{form}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests


def write_exports(folder: pathlib.Path) -> None:
    """Stage 1: writes the adapters and the exports."""
    import numpy as np

    from qerl_jax.weights.load import load

    rng = np.random.default_rng(0)
    for name in NAMES:
        base = f"nvfp4_{name}"
        config = load(str(HERE / base)).config
        save_random_adapter(FOLDER / f"adapter_{name}", rng, config, size=0.02, base_model=base)
    digests = export_all(folder)
    (FOLDER / "exports.json").write_text(json.dumps(digests, indent=2) + "\n")


def write_logits(folder: pathlib.Path) -> None:
    """Stage 2: writes the logits."""
    import torch
    from peft import PeftModel
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(64, (13,), generator=generator)
    tensors = {"ids": ids.to(torch.int32)}

    with torch.no_grad():
        for name in NAMES:
            base = read_decompressed(HERE / f"nvfp4_{name}")
            without = base(ids[None]).logits[0]
            models = {
                "peft": PeftModel.from_pretrained(base, folder / f"{name}.peft").eval(),
                "merged": read_decompressed(folder / f"{name}.merged"),
                "nvfp4": read_decompressed(folder / f"{name}.nvfp4"),
            }
            for form, model in models.items():
                logits = model(ids[None]).logits[0].contiguous()
                tensors[f"{name}.{form}"] = logits
                print(name, form, "moves logits by", (logits - without).abs().max().item())
    save_file(tensors, FOLDER / "logits.safetensors")


if __name__ == "__main__":
    {"export": write_exports, "logits": write_logits}[sys.argv[1]](pathlib.Path(sys.argv[2]))
