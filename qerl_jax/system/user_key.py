"""The key of the user, by which the project recognizes what it wrote itself.

Owner and path of a file prove nothing: an unpacked download belongs to the user, too. So what may
run code later, such as a compiled program or the rewards that a run names, carries a signature that
is made with a secret of the user.
"""

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from qerl_jax.errors import UserError

_BYTES = 32
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def key_path() -> Path | None:
    """Returns the file of the key, `$XDG_CONFIG_HOME/qerl-jax/key`; None without a home folder."""
    config = os.environ.get("XDG_CONFIG_HOME", "")
    with contextlib.suppress(RuntimeError):  # The home folder is unknown.
        folder = Path(config) if os.path.isabs(config) else Path.home() / ".config"
        return folder / "qerl-jax" / "key"
    return None


def sign(content: bytes, purpose: str) -> str:
    """Returns the signature of a content: HMAC-SHA256 with the user's key, in 64 hex digits.

    The key is made when the first content is signed. A signature is valid for its purpose alone,
    which is what the content is, such as 'run'.

    Returns:
        The signature; '' where the user's configuration folder cannot be written.

    Raises:
        UserError: others can read or replace the key, or it is not a key.
    """
    path = key_path()
    if path is None:
        return ""
    key = _read(path)
    if key is None and _make(path) is None:
        key = _read(path)
    return "" if key is None else _mac(key, content, purpose)


def is_signed(content: bytes, purpose: str, signature: str) -> bool:
    """Returns whether a text is the signature that `sign` made with the key of this user.

    Raises:
        UserError: as in `sign`.
    """
    path = key_path()
    key = None if path is None else _read(path)
    if key is None:
        return False
    return hmac.compare_digest(_mac(key, content, purpose).encode(), signature.encode())


def why_no_key() -> str:
    """Returns why nothing is signed, such as the error of the key's folder; '' with a key.

    Raises:
        UserError: as in `sign`.
    """
    path = key_path()
    if path is None:
        return "HOME is not set, and the user has no home folder"
    if _read(path) is not None:
        return ""
    if (error := _make(path)) is not None:
        return f"{path} cannot be made: {error.strerror or error}"
    return "" if _read(path) is not None else f"{path} cannot be read"


def _mac(key: bytes, content: bytes, purpose: str) -> str:
    mac = hmac.new(key, purpose.encode() + b"\0", hashlib.sha256)
    mac.update(content)
    return mac.hexdigest()


def _read(path: Path) -> bytes | None:
    """Returns the key; None without a file."""
    # A pipe instead of the key would let a plain open wait forever.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(
                f"{path} is a link, and a key is not read through one: remove the link, and the "
                "next command makes a key"
            ) from error
        return None
    try:
        about, folder = os.fstat(file), path.parent.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            raise UserError(
                f"{path} is not a file of this user (number {os.geteuid()}): remove it, and the "
                "next command makes a key, or set XDG_CONFIG_HOME to another folder"
            )
        if about.st_mode & _OTHERS or folder.st_mode & _OTHERS_WRITE:
            raise UserError(
                f"{path} can be read or replaced by other users, so what it signs proves nothing: "
                f"remove it and run chmod 700 {path.parent}, and the next command makes a key; or "
                "set XDG_CONFIG_HOME to a folder that has permissions"
            )
        key = os.read(file, _BYTES + 1)
    finally:
        os.close(file)
    if len(key) != _BYTES:
        raise UserError(
            f"{path} is not a key, which has {_BYTES} bytes: remove it, and the next command makes "
            "one"
        )
    return key


def _make(path: Path) -> OSError | None:
    """Makes the key; returns the error where it cannot be made.

    Of processes that do so at once, one makes the key and all others read it.
    """
    temporary = path.with_name(f"key.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with os.fdopen(os.open(temporary, flags, mode=0o600), "wb") as file:
            file.write(secrets.token_bytes(_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # Another process was faster.
            os.link(temporary, path)  # The key appears whole, or not at all.
    except OSError as error:
        return error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return None
