"""What another person may leave in a folder: odd types and hostile values; a folder to watch."""

import contextlib
import copy
import functools
import hashlib
import json
import math
import operator
import os
import pathlib
import re
import shutil
import socket
import stat

SECRET = "secret-of-the-user-17"
# Values of JSON that no reader expects. '@deep 900@' becomes a list of that depth, see `dumps`.
ODD_VALUES = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**53 + 1, 2**63, 2**64, 10**40, -(10**40)),
    *(10**400, 0.5, -0.5, -0.0, 1e308, 1e-320, math.nan, math.inf, -math.inf),
    *("", "x", ".", "..", "~", "~/x", "/", "F32", "BF16", "U8", "true", "nan", "1e999", "-1", "{}"),
    *("9" * 30, "../../etc/passwd", "/etc/passwd", "/dev/zero", "/proc/self/mem", "a/../../.."),
    *("a\0b", "a\rb", "a\nb\x7f", "\x1b]0;owned\x07\x1b[2J", "\u202e\u2066x", "\ud800"),
    *("long" * 1200, "$\\frac{$", "<script>x</script>", "%s%n", "owner/name:x", "package:../x"),
    *([], [0], [-1, 5], [2**62] * 2, [[[]]], ["a", 1], [None]),
    *({}, {"a": 1}, {"": {}}, {"content": 3}, {"weight": "x"}),
    *("@deep 60@", "@deep 450@", "@deep 900@", "@deep 4000@", "@deep 100000@"),
]


def places_of(folder):
    """The places of a `RunFolder` that its attributes and methods name."""
    values = [getattr(folder, name) for name in dir(folder) if not name.startswith("_")]
    found = {value for value in values if isinstance(value, pathlib.Path)} - {folder.path}
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


def write_watched(folder):
    """A folder of the user, which must stay as it is."""
    (folder / "documents").mkdir(parents=True)
    (folder / "documents" / "thesis.tex").write_text(f"years of work {SECRET}")
    (folder / "keys").write_text(f"ssh-ed25519 {SECRET}\n")
    (folder / "keys").chmod(0o600)
    row = json.dumps({"question": f"t1 {SECRET}", "answer": SECRET})
    (folder / "secret.json").write_text(row)
    (folder / "secret.jsonl").write_text(f"{row}\n" * 4)
    (folder / "empty").mkdir()
    return folder


def digest(folder):
    """Names, contents, times and modes of all that is in a folder."""
    found = []
    for path in sorted((folder, *folder.rglob("*"))):
        about = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(about.st_mode) else b""
        found.append((str(path), about.st_mode, about.st_mtime_ns, content))
    return hashlib.sha256(repr(found).encode()).hexdigest()


def dumps(value):
    """JSON as another person may write it: '@deep 900@' is a list of that depth."""
    deep = re.compile(r'"@deep (\d+)@"')
    return deep.sub(lambda m: "[" * int(m[1]) + "]" * int(m[1]), json.dumps(value)).encode()


def _paths(value, path=()):
    """The paths of everything inside a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(children):
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from _paths(child, (*path, key))


def changed(value, rng, values=ODD_VALUES):
    """A copy of a JSON value in which a few fields are replaced, removed, renamed or copied."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        found = list(_paths(value)) if isinstance(value, dict | list) else []
        if not found:
            break
        *path, key = rng.choice(found)
        parent = functools.reduce(operator.getitem, path, value)
        alike = [new for new in values if type(new) is type(parent[key])]
        match rng.randrange(8):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[f"{key}{rng.choice(('_2', '.weight', ''))}"] = parent.pop(key)
            case 2 if isinstance(parent, dict):
                new = rng.choice(("token_env", "retries", "python_rewards", "own", "x"))
                parent[new] = copy.deepcopy(rng.choice(values))
            case 3:
                other = functools.reduce(operator.getitem, rng.choice(found), value)
                parent[key] = copy.deepcopy(other)
            case _:
                parent[key] = copy.deepcopy(
                    rng.choice(alike if alike and rng.random() < 0.5 else values)
                )
    return value
