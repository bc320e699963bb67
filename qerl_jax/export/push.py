"""Uploads an export to the Hugging Face hub; nothing there is overwritten."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from qerl_jax.errors import UserError, first_line
from qerl_jax.system import hub
from qerl_jax.system.paths import home_folder

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_HUB_FILES = {".gitattributes"}
_TEXT = {".json", ".md", ".jinja", ".txt", ".yaml", ".yml", ""}  # '' is that of a Modelfile


def check_name(option: str, name: str) -> None:
    """Raises a UserError for a name, passed by an option, that is not USER/NAME."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{option}={name}: write it as USER/NAME")


def check_push(names: Sequence[str], *, public: bool = False) -> None:
    """Refuses repositories that an upload could not go to, before an export is made.

    Raises:
        UserError: a name has another form, there is no token, the hub does not answer, or a
            repository holds files already, or is public without `public`.
    """
    import huggingface_hub  # not needed by exports that stay here

    for name in names:
        check_name("--push", name)
    if not huggingface_hub.get_token():
        raise UserError(
            f"--push={names[0]}: there is no token for the Hugging Face hub; run hf auth login, or "
            "set HF_TOKEN to a token with write access"
        )
    api = huggingface_hub.HfApi()
    for name in names:
        try:
            with hub.asking(name):
                exists = api.repo_exists(name)
                files = set(api.list_repo_files(name)) if exists else set()
                private = not exists or api.repo_info(name).private is True
        # The hub's classes have no common one; a message is what there is to tell.
        except Exception as error:
            raise _push_error(name, error, "try again later, or leave out --push") from error
        if others := sorted(files - _HUB_FILES):
            raise UserError(
                f"--push={name}: the repository exists and holds {others[0]}; choose another name, "
                "or remove it on the hub"
            )
        if not private and not public:
            raise _public_error(name, "make it private on the hub")


def push(folder: Path, name: str, *, public: bool) -> str:
    """Uploads an export to a repository that `check_push` accepted, and returns its address.

    Raises:
        UserError: the upload failed; the export itself is complete.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    upload = f"the export is complete, upload it with: hf upload {name} {folder}"
    try:
        url = api.create_repo(name, private=not public, exist_ok=True)
        # An existing repository, or one of an organization, may have another visibility.
        if not public and api.repo_info(name).private is not True:
            raise _public_error(name, "make it private on the hub; " + upload)
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Add the export")
    except UserError:
        raise
    except Exception as error:
        raise _push_error(name, error, upload) from error
    return str(url)


def check_names_no_folder(folder: Path, name: str, folders: Iterable[Path]) -> None:
    """Raises a UserError if a file of text in an export names one of `folders` of this machine.

    The home folder and the working directory are among them without being named.
    """
    given = {path for path in (home_folder(), Path.cwd(), *folders) if path is not None}
    local_paths = given | {path.absolute() for path in given} | {path.resolve() for path in given}
    patterns = {
        path: _names(path) for path in sorted(local_paths) if path.is_absolute() and path.name
    }
    for file in sorted(path for path in folder.rglob("*") if path.suffix in _TEXT):
        text = file.read_text(encoding="utf-8", errors="replace")
        for path, pattern in patterns.items():
            if pattern.search(text):
                raise UserError(
                    f"--push={name}: {file} names {path}, a folder of this machine; the export is "
                    f"complete, change that line and upload it with: hf upload {name} {folder}"
                )


def _names(path: Path) -> re.Pattern[str]:
    """A pattern of texts that name a folder or something in it.

    A vocabulary has tokens such as '/root', so that a folder of one part counts only within a path.
    """
    spellings = {str(path), json.dumps(str(path))[1:-1]}
    end = r"(?![\w.-])" if len(path.parts) > 2 else r"/\w"
    return re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, sorted(spellings)))}){end}")


def _public_error(name: str, remedy: str) -> UserError:
    return UserError(
        f"--push={name}: everyone can see this repository; pass --public if that is wanted, or "
        f"{remedy}"
    )


def _push_error(name: str, error: Exception, remedy: str) -> UserError:
    return UserError(f"--push={name}: {type(error).__name__}: {first_line(error)}; {remedy}")
