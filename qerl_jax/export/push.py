"""Uploads an export to the Hugging Face hub; nothing there is overwritten."""

import re
from collections.abc import Sequence
from pathlib import Path

from qerl_jax import hub
from qerl_jax.errors import UserError, first_line

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_MADE_BY_THE_HUB = {".gitattributes"}


def check_push(names: Sequence[str]) -> None:
    """Refuses what could not be uploaded, before an export is made.

    Args:
        names: repositories to upload to, USER/NAME.

    Raises:
        UserError: a name has another form, there is no token, the hub does not answer, or a
            repository holds files already.
    """
    import huggingface_hub  # not needed by exports that stay here

    for name in names:
        if not _NAME.fullmatch(name):
            raise UserError(f"--push={name}: write it as USER/NAME")
    if not huggingface_hub.get_token():
        raise UserError(
            f"--push={names[0]}: there is no token for the Hugging Face hub; run hf auth login, or "
            "set HF_TOKEN to a token with write access"
        )
    api = huggingface_hub.HfApi()
    for name in names:
        try:
            with hub.asking(name):
                held = set(api.list_repo_files(name)) if api.repo_exists(name) else set()
        # The hub's classes have no common one; a message is what there is to tell.
        except Exception as error:
            raise _failed(name, error, "try again later, or leave out --push") from error
        if others := sorted(held - _MADE_BY_THE_HUB):
            raise UserError(
                f"--push={name}: the repository exists and holds {others[0]}; choose another name, "
                "or remove it on the hub"
            )


def push(folder: Path, name: str, *, public: bool) -> str:
    """Uploads a folder as a repository of the hub.

    Args:
        folder: the export.
        name: the repository, USER/NAME, which `check_push` accepted.
        public: whether everyone may see it.

    Returns:
        The address of the repository.

    Raises:
        UserError: the upload failed; the export itself is complete.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        url = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Add the export")
    except Exception as error:
        remedy = f"the export is complete, upload it with: hf upload {name} {folder}"
        raise _failed(name, error, remedy) from error
    return str(url)


def _failed(name: str, error: Exception, remedy: str) -> UserError:
    return UserError(f"--push={name}: {type(error).__name__}: {first_line(error)}; {remedy}")
