"""The files of an export to llama.cpp: an adapter and its base, or one merged model.

llama.cpp multiplies by a weight in NVFP4 and then by its global scale. In attention it adds what an
adapter gives after that, and an adapter runs over the exact base. Two things do not work in the
llama.cpp that llama-cpp-python 0.3.36 has:

    - In an MLP it would add what an adapter gives before the scale, and stops the process instead
      (`build_ffn` of src/llama-graph.cpp).
    - In the MLP of a Qwen2 it leaves the scale out (src/models/qwen2.cpp), and answers nonsense.

So these weights of an MLP are written in Q8_0, or in BF16, and all others of the base stay exact.
`tests/test_gguf_export.py` tells when llama.cpp does either.
"""

import collections
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qerl_jax.evaluation.load_policy import LoadedPolicy
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers import mlp
from qerl_jax.policy.layers.kinds import MIXERS, PACKED, STACKS
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.weights import names
from qerl_jax.weights.save import checkpoint_tensors
from qerl_jax.weights.save_gguf import KINDS, Kind, fill_gguf, fill_gguf_adapter, types_of

DENSE = ("q8_0", "bf16")  # formats of weights that are in no other
ADAPTER = "adapter.gguf"
MODELFILE = "Modelfile"
_OF_MIXERS = {name for kind in MIXERS for weight in kind.WEIGHTS for name in weight.members}


class GgufFiles(NamedTuple):
    """What was written."""

    names: list[str]  # of the .gguf files, the model first
    notes: list[str]  # what a reader of the card must know of the number formats


def fill_pair(folder: Path, policy: LoadedPolicy, *, dense: str, name: str) -> GgufFiles:
    """Writes the adapter of a policy, and its base with the norms that were trained.

    Args:
        folder: existing empty folder.
        policy: the policy.
        dense: format of the weights that are in no other, of `DENSE`.
        name: name of the policy in the file.

    Raises:
        UserError: llama.cpp has no such architecture or tokenizer.
    """
    model, lora = policy.model, policy.lora
    assert lora is not None
    packed = model.format if model.format in ("nvfp4", "mxfp4") else dense
    widened, notes = _without_nvfp4(model.config, lora) if packed == "nvfp4" else (set(), [])
    # A checkpoint in NVFP4 may have weights in 16 bits.
    wide = {
        tensor.removesuffix(".weight")
        for number, layer in enumerate(model.params["layers"])
        for array, tensors in names.stored_tensors(model.config, number).items()
        if array in PACKED and not isinstance(layer[array], QuantTensor)
        for tensor in tensors
    }
    kinds = types_of(model.config, packed=KINDS[packed], dense=KINDS[dense], widened=widened | wide)
    base = f"base-{packed.upper()}.gguf"
    tensors = checkpoint_tensors(model.params, model.config, dtype="float32")
    fill_gguf(folder / base, tensors, model.config, model.tokenizer, kinds, name=f"{name} base")
    fill_gguf_adapter(folder / ADAPTER, lora, model.config, name=name)
    if packed in ("nvfp4", "mxfp4"):
        notes = [
            f"The weights in {packed.upper()} are exactly those that the adapter was trained on.",
            *notes,
        ]
    return GgufFiles([base, ADAPTER], [_describe(kinds), *notes])


def fill_merged(
    folder: Path,
    params: Mapping[str, Any],
    policy: LoadedPolicy,
    *,
    merge: str,
    dense: str,
    name: str,
) -> GgufFiles:
    """Writes a merged model, and a Modelfile for Ollama where that reads the format.

    Args:
        folder: existing empty folder.
        params: the parameter tree of the merged model; `layers` may be an iterator.
        policy: the policy, which has the architecture and the tokenizer.
        merge: format of the weights that a format of four bits packs.
        dense: format of the others, of `DENSE`.
        name: name of the policy in the file.

    Raises:
        UserError: llama.cpp has no such architecture or tokenizer.
    """
    model, file = policy.model, f"model-{merge.upper()}.gguf"
    dense = merge if merge in DENSE else dense
    widened, notes = _without_nvfp4(model.config, None) if merge == "nvfp4" else (set(), [])
    kinds = types_of(model.config, packed=KINDS[merge], dense=KINDS[dense], widened=widened)
    tensors = checkpoint_tensors(params, model.config, dtype="float32")
    fill_gguf(folder / file, tensors, model.config, model.tokenizer, kinds, name=name)
    if merge in DENSE:
        text, lacks = _modelfile(file, policy)
        (folder / MODELFILE).write_text(text, encoding="utf-8", newline="")
        notes += lacks
    return GgufFiles([file], [_describe(kinds), *notes])


def _without_nvfp4(config: ModelConfig, lora: Lora | None) -> tuple[set[str], list[str]]:
    """Returns the modules that llama.cpp cannot run in NVFP4, and why, for the card."""
    changed = {
        names.layer_module(number, projection)
        for number, adapters in enumerate([] if lora is None else lora.layers)
        for projection in adapters
        if projection not in _OF_MIXERS and projection not in STACKS  # it runs those of experts
    }
    if config.model_type == "qwen2":
        members = [name for weight in mlp.WEIGHTS for name in weight.members]
        layers = range(config.num_layers)
        return {names.layer_module(n, member) for n in layers for member in members}, [
            "Those of the MLPs have more bits, because llama.cpp leaves out the global scales of "
            "an MLP of Qwen2 in NVFP4. --merge=mxfp4 is a smaller file."
        ]
    if not changed:
        return changed, []
    return changed, [
        "Those of the MLPs that the adapter changes have more bits, because llama.cpp runs no "
        "adapter over the weights of an MLP in NVFP4 (it stops). An adapter of attention alone has "
        "a base that is exact throughout."
    ]


def _describe(kinds: Mapping[str, Kind]) -> str:
    """Says which number formats the weights have: 'NVFP4 (168), Q8_0 (1), F32 (57)'."""
    counts = collections.Counter(kind.name for kind in kinds.values())
    return f"Tensors by number format: {', '.join(f'{k} ({n})' for k, n in counts.most_common())}."


def _modelfile(model: str, policy: LoadedPolicy) -> tuple[str, list[str]]:
    """Returns what `ollama create` reads, and what it lacks; Ollama has the model's chat template.

    A value is between three quotation marks, without escapes, and ends at a line that ends with
    them (parser/parser.go of Ollama).
    """
    tokenizer, prompt = policy.model.tokenizer, policy.prompt
    ends = [tokenizer.backend.id_to_token(i) for i in tokenizer.eos_ids]
    ends += [] if policy.run is None else policy.run["config"]["rollout"]["stop"]
    messages = [
        ("MESSAGE assistant", text)
        if number % 2
        else ("MESSAGE user", text + prompt.question_suffix)
        for number, text in enumerate(prompt.examples)
    ]
    groups = [
        *(("a stop string", [("PARAMETER stop", end)]) for end in ends if end),
        ("the system message", [("SYSTEM", prompt.system_prompt)] if prompt.system_prompt else []),
        ("the solved examples", messages),
    ]
    lines = [f"FROM ./{model}", "PARAMETER temperature 0", "PARAMETER repeat_penalty 1"]
    notes = []
    for what, values in groups:
        if any(_ends_early(value) for _, value in values):
            notes.append(
                f"The {MODELFILE} lacks {what} of the run, because it cannot hold a text in which "
                'a line ends with """.'
            )
        else:
            lines += [f'{name} """{value}"""' for name, value in values]
    return "\n".join(lines) + "\n", notes


def _ends_early(value: str) -> bool:
    """Whether Ollama takes the end of an earlier line of a value for that of the value."""
    ends = (at for at, character in enumerate(value) if character in "\r\n")
    lines = (f'"""{value[:end]}'.strip() for end in ends)
    return any(len(line) >= 6 and line.endswith('"""') for line in lines)
