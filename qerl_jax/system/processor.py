"""The features of the processor, which programs are compiled for and run as fast as."""

import functools
import hashlib
import os
import platform
import re
from pathlib import Path

_FILE = Path("/proc/cpuinfo")
# What the compiler chooses instructions by, on x86 and on ARM.
_FIELDS = {
    *("vendor_id", "cpu family", "model", "flags"),
    *("CPU implementer", "CPU variant", "CPU part", "Features"),
}


# Vector instructions of x86 by the flag of Linux, widest first, and as XLA names them.
_VECTORS = {"amx_tile": "AMX", "avx512f": "AVX512", "avx2": "AVX2", "avx": "AVX"}
_LIMIT = re.compile(r"--xla_cpu_max_isa=([A-Z0-9_]+)")


@functools.cache
def processor_digest() -> str:
    """Returns 16 hex digits of the processor's kind and features; '' where they are unknown."""
    return digest_of(_description(), platform.machine())


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_processor() -> dict[str, str | int]:
    """The processor, as results name it.

    Returns:
        `processor`, its name, such as 'AMD EPYC'; `cores`, how many this process may use; and
        `vectors`, the widest vector instructions of programs, such as 'AVX512'. Texts are '' where
        unknown.
    """
    text = _description()
    return {
        "processor": _field(text, "model name"),
        "cores": available_cores(),
        "vectors": vectors_of(text, os.environ.get("XLA_FLAGS", "")),
    }


def vectors_of(text: str, xla_flags: str) -> str:
    """Returns the widest vector instructions of a processor by the text of /proc/cpuinfo.

    A flag of XLA, `--xla_cpu_max_isa`, limits them.
    """
    flags = set(_field(text, "flags").split())
    vectors, limits = list(_VECTORS.items()), _LIMIT.findall(xla_flags)
    if limits:  # An unknown limit limits nothing.
        kept = [i for i, (_, name) in enumerate(vectors) if limits[-1].startswith(name)]
        vectors = vectors[min(kept, default=0) :]
    return next((name for flag, name in vectors if flag in flags), "")


def digest_of(text: str, machine: str) -> str:
    """Returns the digest of the text of /proc/cpuinfo; '' without features in it."""
    lines = (line.partition(":") for line in text.splitlines())
    facts = {(name.strip(), value.strip()) for name, _, value in lines if name.strip() in _FIELDS}
    if not {"flags", "Features"} & {name for name, _ in facts}:
        return ""
    return hashlib.sha256(f"{machine} {sorted(facts)}".encode()).hexdigest()[:16]


def _description() -> str:
    """The content of /proc/cpuinfo; '' on a system without this file."""
    try:
        return _FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    """What /proc/cpuinfo says of the first core under a name; '' without it."""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for field, _, value in lines if field.strip() == name), "")
