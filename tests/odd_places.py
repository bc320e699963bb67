"""The places of a run folder, and the odd things that another person may leave at one."""

import contextlib
import inspect
import os
import shutil
import socket

from qerl_jax.run.folder import RunFolder


def places_of(folder):
    """The places of a `RunFolder` that its properties and methods name."""
    found = {getattr(folder, n) for n, v in inspect.getmembers(RunFolder) if type(v) is property}
    both = (False, True)
    return found | {make(best=best) for make in (folder.adapter, folder.model) for best in both}


def put(path, kind, watched):
    """Puts something odd at a place, where there may be a file or a folder already.

    Args:
        path: the place.
        kind: what to put there: a "pipe", a "socket", a "folder", a "file", a "dangling" link to
            a file that `watched` lacks, a "link" to `watched`, or the name of a file or folder in
            it, which gets a link.
        watched: a folder of the user.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
                made.bind(path.name[:80])
        case "folder":
            (path / "inside").mkdir(parents=True)
        case "file":
            path.write_text("{}")
        case _:  # A relative link: its author knows no path of this machine.
            target = watched / {"link": "", "dangling": "new"}.get(kind, kind)
            path.symlink_to(os.path.relpath(target, path.parent.resolve()))
