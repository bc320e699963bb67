"""Rows of the rollout benchmark in their file and table."""

import json

import pytest
from refusal import refused

from benchmarks.common import check_out, describe, merge
from benchmarks.rollout.results import KEYS

POLICY = {
    "model": "m", "format": "bf16", "weights": "random", "lora_rank": 32, "tensor": 1,
    "head_format": "", "kv_cache_dtype": "bfloat16", "chunk_steps": 16, "dequantize": "once",
    "implementation": "",
}  # fmt: skip


def a_row(batch, time, **changes):
    row = {
        **POLICY, "kind": "decode", "batch": batch, "prompt": 256, "new_tokens": 144,
        "ms_per_step": time, "tokens_per_s": 1e3 * batch / time,
    }  # fmt: skip
    return row | changes


def test_a_run_replaces_its_own_rows(tmp_path):
    path = tmp_path / "results" / "rollout.json"
    rollouts = POLICY | {"kind": "gsm8k", "prompts": 64, "group": 16, "max_new_tokens": 1024}
    rollouts |= {"rows": 1024}
    quick = a_row(8, 2.5, head_format="nvfp4")
    rows = [a_row(8, 1.0), a_row(64, 2.0), rollouts]
    rows += [a_row(8, 3.0), a_row(8, 4.0, lora_rank=0), quick]
    for row in (*rows, a_row(8, 3.0, head_format=""), rollouts | {"tokens": 7}):
        merge(path, row, KEYS, "H")
    result = json.loads(path.read_text())
    assert result["device"] == "H"
    fields = ("lora_rank", "batch", "ms_per_step")
    assert [tuple(row.get(name) for name in fields) for row in result["rows"]] == [
        (0, 8, 4.0),
        (32, 8, 3.0),
        (32, 64, 2.0),
        (32, 8, 2.5),
        (32, None, None),
    ]
    assert result["rows"][-1]["tokens"] == 7
    refused("holds rows of H, this is I", check_out, path, KEYS, "I")
    for text in ("[]", '{"rows": []}', '{"device": "H", "rows": [{"kind": "decode"}]}'):
        path.write_text(text)
        refused("holds no rows", check_out, path, KEYS, "H")
    for wrong in (tmp_path, path / "x.json"):
        refused(r"pass a file as --out|Not a directory", check_out, wrong, KEYS, "H")


OTHERS = [
    {"weights": "real"}, {"chunk_steps": 8}, {"dequantize": "step"}, {"head_format": "nvfp4"},
    {"kv_cache_dtype": "float8_e4m3fn"}, {"prompt": 64}, {"new_tokens": 18}, {"kind": "parts"},
    {"tensor": 2},
]  # fmt: skip


@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_a_row_of_something_else_is_kept(tmp_path, changes):
    path = tmp_path / "rollout.json"
    for row in (a_row(8, 1.0), a_row(8, 2.0, **changes)):
        merge(path, row, KEYS, "H")
    times = [row["ms_per_step"] for row in json.loads(path.read_text())["rows"]]
    assert sorted(times) == [1.0, 2.0]


def test_a_row_as_text():
    row = a_row(8, 0.5, peak_gb=None, parts={"head": 0.25}, commit="abc", date="today")
    assert describe(row, KEYS["decode"]) == (
        "kind=decode model=m format=bf16 weights=random lora_rank=32 kv_cache_dtype=bfloat16 "
        "chunk_steps=16 dequantize=once tensor=1 batch=8 prompt=256 new_tokens=144: "
        "ms_per_step 0.5, tokens_per_s 16,000, parts (head 0.25)"
    )
