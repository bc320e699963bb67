"""The machine code of a kernel: how many instructions its loops have."""

import importlib.util
import pathlib
import re
import subprocess
import tempfile


def loops(report):
    """The instructions of each loop, and whether they multiply matrices.

    Args:
        report: what Mosaic GPU dumps of a kernel, with its PTX.
    """
    found, labels, names = [], {}, []
    for line in _disassembled(_ptx(report)).splitlines():
        if label := re.match(r"(\.L_\w+):", line.strip()):
            labels[label[1]] = len(names)
        elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)(.*);", line):
            names.append(code[1])
            target = re.search(r"`\((\.L_\w+)\)", code[2])
            if code[1].startswith("BRA") and target and target[1] in labels:
                body = names[labels[target[1]] :]
                # The last instruction of a kernel branches to itself.
                found.append((len(body), any(name.startswith("HMMA") for name in body)))
    return found


def _ptx(report):
    text = report[report.index(".version") :]
    end = re.search(r"\nptxas ", text)
    text = text[: end.start()] if end else text
    return text[: text.rindex("}") + 1]


def _disassembled(ptx):
    (folder,) = importlib.util.find_spec("nvidia.cu13").submodule_search_locations
    tools = pathlib.Path(folder, "bin")
    target = re.search(r"\.target (sm_\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as work:
        source, cubin = pathlib.Path(work, "kernel.ptx"), pathlib.Path(work, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        command = [tools / "ptxas", f"-arch={target}", source, "-o", cubin]
        subprocess.run(command, check=True, capture_output=True)
        done = subprocess.run(
            [tools / "nvdisasm", "-c", cubin], check=True, capture_output=True, text=True
        )
    return done.stdout
