"""The measurement of merges, on a tiny run."""

import json

import finished_run
import pytest

from benchmarks import merges


@pytest.mark.slow
def test_merges_are_compared_with_the_policy(tiny, tmp_path):
    run = finished_run.write_run(
        tmp_path / "run", tiny, own=True, size=0.3, **{"rollout.max_new_tokens": 8}
    )
    arguments = [str(run), "--samples=2", "--plain-samples=1", f"--out={tmp_path / 'o.json'}"]
    merges.run(merges.make_parser().parse_args(arguments))
    rows = {row["form"]: row for row in json.loads((tmp_path / "o.json").read_text())["rows"]}
    four_bits = {merges.CALIBRATED, merges.PLAIN, "plain onto bf16"}
    assert rows.keys() == {"base", "bf16", merges.TRAINED, *four_bits}
    assert 0 < rows["bf16"]["kl"] < rows[merges.CALIBRATED]["kl"] < rows["base"]["kl"]
    assert rows["bf16"]["kept"] == pytest.approx(1, abs=0.02)
    assert {name: row.get("samples") for name, row in rows.items()} == {
        "base": None, "bf16": None, merges.TRAINED: 2, merges.CALIBRATED: 2,
        merges.PLAIN: 1, "plain onto bf16": 2,
    }  # fmt: skip
    assert rows[merges.TRAINED]["difference"] == 0
