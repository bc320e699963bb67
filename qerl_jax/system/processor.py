"""The features of the processor, which distinguish the programs that are compiled for it."""

import functools
import hashlib
import platform
from pathlib import Path

_FILE = Path("/proc/cpuinfo")
# What the compiler chooses instructions by, on x86 and on ARM.
_FIELDS = {
    *("vendor_id", "cpu family", "model", "flags"),
    *("CPU implementer", "CPU variant", "CPU part", "Features"),
}


@functools.cache
def processor_digest() -> str:
    """Returns 16 hex digits of the processor's kind and features; '' where they are unknown."""
    try:
        return digest_of(_FILE.read_text(encoding="utf-8", errors="replace"), platform.machine())
    except OSError:
        return ""


def digest_of(text: str, machine: str) -> str:
    """Returns the digest of a description as Linux writes it; '' without features in it.

    Args:
        text: content of /proc/cpuinfo.
        machine: kind of the machine, such as 'x86_64'.
    """
    lines = (line.partition(":") for line in text.splitlines())
    facts = {(name.strip(), value.strip()) for name, _, value in lines if name.strip() in _FIELDS}
    if not {"flags", "Features"} & {name for name, _ in facts}:
        return ""
    return hashlib.sha256(f"{machine} {sorted(facts)}".encode()).hexdigest()[:16]
