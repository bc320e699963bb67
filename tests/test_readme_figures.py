"""The figures of the README and of docs/evidence.md are those of benchmarks/results/."""

import json
import pathlib
import re

import numpy as np
import pytest
from scipy import stats

from benchmarks import calibration
from qerl_jax.run.statistics import paired_difference

ROOT = pathlib.Path(__file__).resolve().parents[1]
_NAMES = (
    r"`[^`]*`|arXiv\s+2510.11696|arxiv.org/\S*|GSM8K|bf16|Qwen2.5-Coder-1.5B|NVFP4|Q4_K_M|16-bit"
    r"|95 %|H\d00|AVX\d+"
)


def figures(begin, end, page="README.md"):
    """The figures in the prose of a part of a page, which begins and ends with these words."""
    (part,) = re.findall(
        f"{re.escape(begin)}(.*?){re.escape(end)}", (ROOT / page).read_text(), re.DOTALL
    )
    return re.findall(r"[+-]?\d+(?:[.,]\d+)*", re.sub(_NAMES, "", part)), part


def read(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def differences(arm, reference):
    """The difference of two arms in points after training, over problems and over seeds."""
    content = read("gsm8k.json")
    rows, others = (
        [row for row in content["rows"] if row["arm"] == name] for name in (arm, reference)
    )
    correct = [
        [list(content["runs"][f"{row['arm']}-s{row['seed']}"]["evaluations"]["end"]["correct"])
         for row in part]
        for part in (rows, others)
    ]  # fmt: skip
    means = (np.array(part, int).mean(axis=0) for part in correct)
    ends = [[row["pass1_end"] for row in part] for part in (rows, others)]
    seeds = stats.ttest_ind(*ends, equal_var=False).confidence_interval(0.95)
    over_problems = [100 * value for value in paired_difference(*means)]
    return rows, over_problems, [np.mean(ends[0]) - np.mean(ends[1]), *seeds]


def test_what_is_said_of_speed():
    found, _ = figures("A GRPO step on one H200, ", "memory.")
    rows = [row for row in read("peers.json")["rows"] if row["step_s"] is not None]
    (lengths,) = {(row["new_tokens"], row["prompt"], row["lora_rank"]) for row in rows}
    assert found == [f"{n:,}" for n in (max(row["batch"] for row in rows), *lengths)]


def test_what_is_said_of_the_newest_peers():
    found, text = figures("With their versions of ", "\n\n")
    decode = [row for row in read("vllm.json")["decode"] if row["lora_rank"]]
    ratios = [row["ms_per_step"] / row["our_ms_per_step"] for row in decode]
    rows = [row["batch"] for row in decode]
    updates = [
        row
        for row in read("peers.json")["rows"]
        if row["peer"] == "TRL" and row["step_s"] is None and row["model"] == "qwen2.5-7b"
    ]
    updates.sort(key=lambda row: row["batch"])
    times = [f"{row['update_s'] / row['our_update_s']:.1f}" for row in updates]
    (trl,) = {re.search(r"trl ([\d.]+)", row["packages"])[1] for row in updates}
    versions = read("vllm.json")["versions"]["vllm"], trl
    newest = [".".join(version.split(".")[:2]) for version in versions]
    fastest = [f"{min(ratios):.1f}", f"{max(ratios):.1f}"]
    (year,) = re.findall(r"20\d\d", text)
    assert found == [
        *(year, newest[0], *fastest, "7", str(min(rows)), str(max(rows))),
        *(newest[1], *times, *(str(row["batch"]) for row in updates)),
    ]


def calibrated(task, seeds):
    """The rows of commands on an H200 by choice."""
    return {
        row["choice"]: row
        for row in read("calibration.json")["rows"]
        if (row["device"], row["task"], row["seeds"]) == ("NVIDIA H200", task, seeds)
    }


def cost_of(row):
    cost, half = 100 * row["difference"], 100 * row["difference_interval"]
    return f"{cost:+.1f} [{cost - half:+.1f}, {cost + half:+.1f}]"


def sampled_cost():
    """What calibrated weights cost at temperature 1 before training, with its interval."""
    row = calibrated("gsm8k", "0")["gptq, mean of texts"]
    assert row["texts"] == 5
    cost, half = -100 * row["difference"], 100 * row["difference_interval"]
    return [f"{value:.1f}" for value in (cost, cost - half, cost + half)]


def test_what_calibration_leaves():
    """Every row of the first table has the figures of its row in calibration.json."""
    found, text = figures("## What calibration leaves", "- Calibrated,", "docs/evidence.md")
    rows = calibrated("gsm8k", "0")
    for choice, row in rows.items():
        if "difference" in row:  # from all samples of 16 bits
            exact = rows[calibration.EXACT]["accuracy"]
            assert abs(row["accuracy"] - exact - row["difference"]) < 1e-9, choice
        figure = row.get("kl", row.get("accuracy"))
        assert (f"{figure:.4f}" if "kl" in row else f"{100 * figure:.1f}") in found, choice
        if "difference" in row and choice != calibration.EXACT:
            accuracy = f"{100 * row['accuracy']:.1f}"
            lines = [line for line in text.splitlines() if line.endswith(f"{cost_of(row)} |")]
            assert any(f"| {accuracy}" in line for line in lines), choice


@pytest.mark.parametrize(
    ("task", "seeds", "kind"),
    [
        ("gsm8k", "1, 2", ", qkv_proj in 16 bits"),
        ("gsm8k", "1", ", qkv_proj in 16 bits"),
        ("gsm8k", "2", ", qkv_proj in 16 bits"),
        ("gsm8k", "1", ", qkv_proj in 8 bits"),
        ("math", "1", ""),
    ],
)
def test_what_other_bits_leave(task, seeds, kind):
    """The second table has the means of texts, each compared with 16 bits of its command."""
    page = (ROOT / "docs" / "evidence.md").read_text()
    mean = calibrated(task, seeds)[f"gptq{kind}, mean of texts"]
    own, differences = [], []
    for rows in (calibrated(task, seed) for seed in seeds.split(", ")):
        exact = rows[calibration.EXACT]["accuracy"]
        for text in ("", *(f", text {number}" for number in range(1, 5))):
            if row := rows.get(f"gptq{text}{kind}"):
                own.append(row)
                differences.append(row["accuracy"] - exact)
    assert len(own) == mean["texts"]
    assert abs(np.mean(differences) - mean["difference"]) < 1e-9
    kl = np.mean([row["kl"] for row in own])
    accuracies = (100 * mean["accuracy"], 100 * (mean["accuracy"] - mean["difference"]))
    cells = [f"{kl:.4f}", *(f"{value:.1f}" for value in accuracies), cost_of(mean)]
    cells.append(", ".join(f"{100 * value:+.1f}" for value in differences))
    assert f" | {' | '.join(cells)} |\n" in page


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("q, k and v in 8 bits, two texts", ", qkv_proj in 8 bits"),
        ("q, k and v in 16 bits, five texts", ", qkv_proj in 16 bits"),
        ("o in 16 bits, text 0", ", o_proj in 16 bits"),
        ("down in 16 bits, text 0", ", down_proj in 16 bits"),
        ("gate and up in 16 bits, text 0", ", gate_up_proj in 16 bits"),
    ],
)
def test_what_was_tried(label, kind):
    """The third table has the change of the KL, and what the samples of the first one say."""
    first = calibrated("gsm8k", "0")
    later = [calibrated("gsm8k", seed) for seed in ("1", "2")]
    texts = ("gptq", *(f"gptq, text {number}" for number in range(1, 5)))
    pairs = [
        (rows[text + kind], first[text])
        for text in texts
        for rows in (later if "qkv" in kind else [first])
        if text + kind in rows
    ]
    changed, base = (np.mean([row["kl"] for row in rows]) for rows in zip(*pairs, strict=True))
    (line,) = (
        line
        for line in (ROOT / "docs" / "evidence.md").read_text().splitlines()
        if line.startswith(f"| {label} |")
    )
    assert f"| {100 * (changed / base - 1):.0f} % |" in line
    if "by the 68 samples" in line:
        accuracy = np.mean([row["accuracy"] for row, _ in pairs])
        cost = 100 * (accuracy - first[calibration.EXACT]["accuracy"])
        assert line.endswith(f"by the 68 samples {cost:+.1f} |")


def test_what_8_bits_differ_by_from_16():
    rows = calibrated("gsm8k", "1").values()
    eight, sixteen = (
        np.mean(
            [
                np.array(row["solved"].split(), int) / row["samples"]
                for row in rows
                if row["choice"].endswith(f"qkv_proj in {bits} bits")
            ],
            axis=0,
        )
        for bits in (8, 16)
    )
    gain, low, high = (100 * value for value in paired_difference(eight, sixteen))
    _, text = figures("## What calibration leaves", "The command that", "docs/evidence.md")
    assert f"{gain:.1f} ± {(high - low) / 2:.1f} less than" in " ".join(text.split())


def test_what_four_bits_cost():
    bf16, *_ = differences("bf16-lora", "bf16-lora")
    costs = [differences(arm, "bf16-lora") for arm in ("nvfp4-lora", "nvfp4-rounded-lora")]
    arms = [bf16, *(rows for rows, *_ in costs)]
    before, after = (
        [f"{np.mean([row[name] for row in rows]):.1f}" for rows in arms]
        for name in ("pass1_start", "pass1_end")
    )
    expected = [f"{bf16[0]['n']:,}", *before, f"{bf16[0]['steps']}", *after]
    for _, problems, seeds in costs:
        cost, *ends = (-value for value in (problems[0], *problems[:0:-1], *seeds[:0:-1]))
        expected += [f"{value:.1f}" for value in (cost, *ends)]
    page = "docs/evidence.md"
    assert figures("## What four bits cost", "| arm", page)[0] == expected
    # One sentence of the README: what the mean of several calibrations costs before training, at
    # temperature 1; then steps, cost, seeds' interval, both arms after training, and problems.
    after = [expected[i] for i in (4, 8, 11, 12, 6, 5, 0)]
    before, *ends = sampled_cost()
    found, text = figures("**What four bits cost.** On ", "docs/evidence.md")
    assert found == ["1.5", before, *ends, "1", *after]
    assert "calibrated" in text


def test_what_noise_gains():
    calibrated, rounded = "nvfp4-lora", "nvfp4-rounded-lora"
    expected, unclear, gains = [], [], []
    for arm in (calibrated, rounded):
        for noise in ("paper", "kl0.01"):
            rows, problems, seeds = differences(f"{arm}-aqn-{noise}", arm)
            few = len(rows) < 3  # such an arm has its interval over problems
            gain = problems if few else seeds
            expected += [f"{value:+.1f}" for value in gain] + [str(len(rows))] * few
            expected += [noise[2:]] * noise.startswith("kl")
            unclear += [gain[1] <= 0 <= gain[2]] * (arm == calibrated)
            gains += [(gain[1] > 0, len(rows))] * (arm == rounded)
    found, text = figures("## What noise gains", "## Claims", "docs/evidence.md")
    assert "no gain differs clearly from 0" in " ".join(text.split())
    assert all(unclear)
    found.remove("0")
    assert found == expected
    # The README has no figure of it, and says what these intervals say.
    found, text = figures("**What noise gains.**", "**What was found")
    assert not found
    text = " ".join(text.split())
    assert "no clear gain in calibrated NVFP4" in text
    assert "one with the paper's schedule, over problems and from two seeds, and no clear" in text
    (is_gain, seeds), (is_other_gain, _) = gains
    assert is_gain
    assert seeds == 2
    assert not is_other_gain


def test_what_the_first_run_learns():
    found, _ = figures("Of the ", "\n\n")
    learning = read("learning_sums.json")["learning"]
    accuracy, truncated = learning["eval_accuracy"], learning["eval_truncated"]
    after = accuracy["by_seed"]["after"]
    percents = [f"{100 * value:.0f}" for value in (accuracy["before"], min(after), max(after))]
    expected = [str(learning["config"]["eval"]["problems"]), *percents]
    expected += [str(learning["steps"]), str(len(after))]
    expected += [f"{100 * truncated[when]:.0f}" for when in ("before", "after")]
    runs = [read(f"first_run_{vectors}.json") for vectors in ("avx2", "avx512")]
    minutes = [f"{run['total_seconds'] / 60:.1f}" for run in runs]
    assert found == [*expected, str(max(run["device"]["cores"] for run in runs)), *minutes]
