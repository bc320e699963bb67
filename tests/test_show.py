"""The command `experiments.show`: what it says of runs, and that text of a model stays text."""

import html.parser
import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from contrast import contrast
from odd_places import ODD_VALUES, dumps

import qerl_jax.show.runs
from qerl_jax.commands import show as command
from qerl_jax.errors import UserError, visible
from qerl_jax.show.columns import shorten, width, wrap
from qerl_jax.show.html import page, write_page
from qerl_jax.show.runs import read_steps_option
from qerl_jax.show.terminal import show
from qerl_jax.show.view import open_views, read_condition

SCRIPT = "<script>alert(1)</script></script><!--<b>"
CONTROL = "red \x1b[31m bell \x07 \x9b left \u202e half \ud800 end"


def sample(step, number, **changes):
    made = {
        "step": step,
        "prompt": f"question {step}.{number}",
        "completion": f"completion {step}.{number}",
        "answer": "7",
        "reward": float(number),
        "reward/correctness": float(number > 0),
        "reward/style": None,
        "advantage": 0.5 - number,
        "tokens": 3,
        "finished": True,
    }
    return made | changes


def write_run(folder, *, steps=3, samples=2, rows=None, **changes):
    """A run folder as `train` writes it, without a model."""
    folder.mkdir()
    config = {"steps": 3, "seed": 0, "preset": "tiny", "log": {"completions": samples}}
    config |= {"model": {"source": "model", "format": "nvfp4"}}
    config |= {"rollout": {"prompts_per_step": 4, "group_size": 8}}
    (folder / "config.json").write_text(json.dumps({"config": config, "schedule_steps": 3}))
    if rows is None:
        rows = [{"step": 0, "eval_accuracy_before": 0.25, "eval_seconds": 1.0}] + [
            {"step": n, "reward": n / 10, "reward/correctness": n / 20, "entropy": 1.5}
            for n in range(1, steps + 1)
        ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [sample(n, i, **changes) for n in range(1, steps + 1) for i in range(samples)]
    (folder / "completions.jsonl").write_text("".join(json.dumps(t) + "\n" for t in texts))
    return folder


def printed(*folders, step="", where=(), **options):
    views = open_views(map(str, folders))
    conditions = [read_condition(text, views) for text in where]
    lines = []
    show(views, lines.append, steps=read_steps_option(step), conditions=conditions, **options)
    return "\n".join(lines)


def test_the_last_step_and_the_curves(tmp_path):
    run = write_run(tmp_path / "run")
    text = printed(run)
    assert text.startswith("run: 3 of 3 steps, last row ")
    assert "reward                     0.1 -> 0.3            ▁▅█" in text
    assert "eval_accuracy              0.25 -> 0.25" in text
    assert (
        "--- step 3: reward 1 (correctness 1, style -), advantage -0.500, 3 tokens,\nfinished\n"
        in text
    )
    assert "  completion 3.0\n" in text
    assert "completion 2.0" not in text
    assert "(2 of 32 of a step); --config.log.completions=N logs more" in text
    other = write_run(tmp_path / "other", samples=40)
    assert "(2 of 32, 32 of 32 of a step); --config" in printed(run, other)
    assert "(32 of 32 of a step)" in printed(other).splitlines()[-1]
    assert "logs more" not in printed(other)
    assert "the run logged 32 of the 32 completions of a step." in page(open_views([str(other)]))
    (run / "summary.json").write_text('{"steps": 3}')
    assert printed(run).startswith("run: finished after step 3")
    # It is extended: summary.json and config.json are those of before.
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "reward": 0.4}) + "\n")
    with (run / "completions.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "reward": 0.4}) + "\n")
    assert "\nstep 4/4  reward  0.400" in printed(run)
    for summary in ('{"steps": 3}', '{"steps": null}', "{}", "[]", ""):
        (run / "summary.json").write_text(summary)
        assert printed(run).startswith("run: 4 steps, last row ")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_curves_begin_in_the_same_column_and_lines_fit(tmp_path, columns):
    long = "reward/" + "a_reward_with_a_long_name_" * 2
    rows = [
        {"step": n, "reward": n / 10, long: -n / 3e7, "kl": -n / 7e9, "loss": 1 / n}
        for n in range(1, 200)
    ]
    runs = [write_run(tmp_path / name, rows=rows) for name in "ab"]
    for folders in (runs[:1], runs):
        lines = [line for line in printed(*folders, columns=columns).splitlines() if " -> " in line]
        assert len(lines) == 4 * len(folders)
        first = {min(map(line.index, set(line) & set("▁▂▃▄▅▆▇█"))) for line in lines}
        assert len(first) == 1
        assert all(width(line) <= columns for line in lines)
        suffix = " (1)" if len(folders) == 2 else ""
        cut = next(line for line in lines if line.startswith("reward/a_"))
        assert f"...{suffix} -3.333e-08 -> -6.633e-06 " in cut.replace("  ", " ") or columns == 120


def test_steps_conditions_and_limits_choose_completions(tmp_path):
    run = write_run(tmp_path / "run")
    assert "completion 1.1" in printed(run, step="1:2")
    assert "completion 3.1" not in printed(run, step="1:2")
    assert "completion 1.1" not in printed(run, step="all", limit=1)
    text = printed(run, step="all", where=["  correctness <\t1 ", "reward>=0"])
    assert [f"completion {n}.0" in text for n in (1, 2, 3)] == [True] * 3
    assert "completion 1.1" not in text
    assert "no completion fulfills --where" in printed(run, where=["tokens>3"])
    assert "no completions in the steps 7 to 9" in printed(run, step="7:9")
    for condition in ("speed<1", "style<1"):  # A reward that is always missing has no number.
        with pytest.raises(UserError, match="they have step, reward, advantage, tokens, correct"):
            printed(run, where=[condition])
    for condition in ("correctness", "reward<x", "reward<nan", "<1"):
        with pytest.raises(UserError, match="write a name, a comparison and a number"):
            printed(run, where=[condition])
    for wrong in ("1:x", "3:1"):
        with pytest.raises(UserError, match=f"--step={wrong}: "):
            read_steps_option(wrong)


def test_two_runs_are_side_by_side(tmp_path):
    runs = write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=5, completion="other")
    lines = printed(*runs, step="2", columns=80).splitlines()
    assert any("completion 2.0" in line and line.endswith(" |   other") for line in lines)
    assert any(line.startswith("reward (2) ") and "0.1 -> 0.5" in line for line in lines)
    # The longer run alone has step 5; a third run goes below the others.
    assert any(line.endswith(" |   other") for line in printed(*runs, step="5").splitlines())
    assert any("completion 3.0" in line for line in printed(*runs).splitlines())
    third = write_run(tmp_path / "c", completion="third")
    text = printed(*runs, third, step="2")
    assert [text.index(f"=== {name}") for name in "abc"] == sorted(
        text.index(f"=== {name}") for name in "abc"
    )


def test_a_run_under_way_and_damaged_values(tmp_path):
    run = write_run(tmp_path / "run")
    nan = '{"step": 4, "reward": NaN, "entropy": null, "reward/correctness": 0.5}\n'
    with (run / "metrics.jsonl").open("a") as file:
        file.write(nan + '{"step": 5, "rew')
    with (run / "completions.jsonl").open("a") as file:
        file.write('{"step": 4, "prompt": "x", "reward": NaN}\n"text"\n{"step": 5, "comp')
    text = printed(run)
    assert text.startswith("run: 4 steps, last row ")
    assert "--- step 4: reward - ()" in text
    assert "reward                     0.1 -> 0.3" in text
    before = {path: path.read_bytes() for path in run.iterdir()}
    data = read_data(page(open_views([str(run)])))
    assert data[0]["steps"]["4"] == [{"prompt": "x", "reward": None, "parts": {}}]
    assert {path: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "completions.jsonl"])
def test_a_run_without_a_file(tmp_path, name):
    run = write_run(tmp_path / "run")
    (run / name).unlink()
    expected = {"metrics.jsonl": "no step is logged", "completions.jsonl": "no completions are lo"}
    assert expected[name] in printed(run)
    assert "no step is logged yet" in page(open_views([str(run)])) or name != "metrics.jsonl"


def test_other_folders_are_refused(tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(UserError, match="is not a run folder"):
            open_views([str(path)])
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"no run wrote config\.json"):
        open_views([str(tmp_path)])


def test_control_characters_do_not_reach_a_terminal(tmp_path):
    run = write_run(tmp_path / "run", completion=CONTROL, prompt="a\tb\nc\r")
    text = printed(run)
    assert r"red \x1b[31m bell \x07 \x9b left \u202e half \ud800 end" in text
    assert "  c\\r\n" in text
    assert all(character == "\n" or character.isprintable() for character in text)
    assert visible("ok \U0001f468‍\U0001f469 é") == "ok \U0001f468‍\U0001f469 é"


def test_a_folder_of_runs_is_a_line_for_each(tmp_path, capsys):
    runs = tmp_path / "runs"
    runs.mkdir()
    write_run(runs / "old")
    write_run(runs / "a\x1b[31m", steps=2, rows=[{"step": 2, "reward": 0.5}])
    os.utime(runs / "old" / "metrics.jsonl", (0, 0))
    (write_run(runs / "bad") / "config.json").write_text("{")
    (runs / "model").mkdir()
    (runs / "model" / "config.json").write_text("{}")
    (runs / "old" / "completions.jsonl").write_bytes(b"not read")
    command.run(command.make_parser().parse_args([str(runs)]))
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("a\\x1b[31m  2 of 3 steps, last row ")
    assert first.endswith("  reward 0.500")
    assert second.startswith("old        3 of 3 steps, last row ")
    assert second.endswith("  reward 0.200  greedy accuracy 0.250")
    assert third.startswith("bad  cannot be read: ")
    assert "config.json" in third
    with pytest.raises(UserError, match="is not a run folder"):
        command.run(command.make_parser().parse_args([str(tmp_path)]))


def test_lines_fit_their_column():
    text = "one two three\n日本語日本語 x\n" + "y" * 25 + "\n\n  indented words here"
    lines = wrap(text, 10)
    assert all(width(line) <= 10 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "").replace("\n", "")
    assert lines[:3] == ["one two", "three", "日本語日本"]
    assert [shorten(text, 6) for text in ("abcdef", "abcdefg", "日本語語")] == [
        *("abcdef", "abc...", "日..."),
    ]
    assert shorten("abcdefg", 2) == "..."


@pytest.mark.parametrize("columns", ["1", "2", "3"])
def test_a_terminal_of_few_columns_ends(columns, tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "run")
    (folder / "completions.jsonl").write_text(
        json.dumps({"step": 1, "reward": 1.0, "prompt": "日本語", "completion": "one two"}) + "\n"
    )
    monkeypatch.setenv("COLUMNS", columns)
    command.run(command.make_parser().parse_args([str(folder)]))
    assert "  one two\n" in capsys.readouterr().out


class Reader(html.parser.HTMLParser):
    """The elements of a page, and the text of its data."""

    def __init__(self):
        super().__init__()
        self.tags, self.links, self.data, self._inside = [], [], "", False

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        found = dict(attrs)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        self._inside = found.get("id") == "data"

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        self.data += data if self._inside else ""


def read(text):
    reader = Reader()
    reader.feed(text)
    return reader


def read_data(text):
    return json.loads(read(text).data)


def test_text_of_a_model_stays_text_in_a_page(tmp_path):
    plain = write_run(tmp_path / "plain")
    evil = {"completion": SCRIPT, "prompt": "&lt;" + SCRIPT, "answer": CONTROL, SCRIPT: 1}
    run = write_run(tmp_path / "<i>run", **evil, **{f"reward/{SCRIPT}": 0.5})
    rows = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(rows | {"step": 4, f"reward/{SCRIPT}": 0.5}) + "\n")
    text, expected = (page(open_views([str(folder)])) for folder in (run, plain))
    found = read(text)
    # An element more per point and label of the additional curve, and no other kind of element.
    assert set(found.tags) == set(read(expected).tags)
    assert found.tags.count("script") == 2
    assert found.links == []
    shown = json.loads(found.data)[0]["steps"]["3"][0]
    assert shown["completion"] == SCRIPT
    assert shown["prompt"] == "&lt;" + SCRIPT
    assert shown["parts"][SCRIPT] == 0.5
    assert "\x1b" not in text
    text.encode()  # no half of a surrogate pair


def test_a_page_asks_nothing_of_the_network(tmp_path):
    text = page(open_views([str(write_run(tmp_path / "run"))]))
    assert "default-src 'none'" in text
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert "the run logged 2 of the 32 completions of a step" in text
    assert "--config.log.completions=N logs more" in text


def figures(text):
    """The curves of a page by name: their texts with x, and what the page's script reads."""
    found = {}
    for match in re.finditer(
        r'<svg [^>]*aria-label="([^"]*)" data-values="([^"]*)">(.*?)</svg>', text
    ):
        texts = re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="(\w+)">([^<]*)<', match[3])
        found[match[1]] = texts, json.loads(html.unescape(match[2]))
    return found


def test_the_minus_of_an_axis_is_a_minus_and_has_space(tmp_path):
    rows = [
        {"step": n, "reward": -n, "kl": -n / 8.1e5, "loss": -n * 1.11e300, "entropy": n / 10}
        for n in range(1, 4)
    ]
    drawn = figures(page(open_views([str(write_run(tmp_path / "run", rows=rows))])))
    labels = {name: [text for _, _, text in texts] for name, (texts, _) in drawn.items()}
    assert labels["reward"][:2] == ["\u22121", "\u22123"]
    assert labels["kl"][:2] == ["\u22121.23e\u221206", "\u22123.7e\u221206"]
    for texts, _ in drawn.values():
        for x, anchor, text in texts:
            # Digits of a font of 11 units are at most 7 wide; the label begins inside the picture.
            assert anchor == "start" or float(x) >= 7 * len(text), text


def test_a_page_holds_the_values_of_its_curves(tmp_path):
    runs = write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=500)
    drawn = figures(page(open_views([str(run) for run in runs])))
    _, data = drawn["reward"]
    assert (data["first"], data["last"]) == (1, 499.5)  # the mean of two steps
    short, long = data["curves"]
    assert short == [[1, 0.1], [2, 0.2], [3, 0.3]]
    assert len(long) == 250  # each is the mean of two steps
    assert long[0] == [1.5, 0.15]
    assert drawn["eval_accuracy"][1]["curves"] == [[[0, 0.25]], [[0, 0.25]]]


def test_what_never_changes_has_no_curve(tmp_path):
    """But a line with its value; where runs differ, or after the first step, it has a curve."""
    run, other = tmp_path / "a", tmp_path / "b"
    for folder, entropy in ((run, 1.5), (other, 0.5)):
        rows = [{"step": n, "reward": n / 10, "entropy": entropy, "sigma": 0.0} for n in (1, 2)]
        write_run(folder, rows=rows)
    text = page(open_views([str(run)]))
    assert figures(text).keys() == {"reward"}
    assert "<p class=note>unchanged: entropy 1.5, sigma 0</p>" in text
    assert "unchanged: entropy 1.5, sigma 0\n" in printed(run)
    assert "sigma                " not in printed(run)
    assert figures(page(open_views([str(run), str(other)]))).keys() == {"reward", "entropy"}
    write_run(tmp_path / "c", rows=[{"step": 1, "reward": 0.1, "sigma": 0.0}])
    assert figures(page(open_views([str(tmp_path / "c")]))).keys() == {"reward", "sigma"}


# What page.js needs of a browser: elements with attributes, children and listeners.
BROWSER = """
class Element {
  constructor() {
    Object.assign(this, {children: [], style: {}, attributes: {}, listeners: {}, textContent: ""});
  }
  setAttribute(name, value) { this.attributes[name] = value; }
  append(child) { this.children.push(child); }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  replaceChildren() { this.children = []; }
}
const output = new Element(), svg = new Element();
svg.dataset = {values: VALUES};
svg.viewBox = {baseVal: {width: 360}};
svg.getBoundingClientRect = () => ({left: 100, width: 720});
svg.parentElement = {querySelector: () => output};
globalThis.document = {
  getElementById: () => Object.assign(new Element(), {textContent: RUNS}),
  createElement: () => new Element(), createElementNS: () => new Element(),
  querySelectorAll: () => [svg],
};
SCRIPT;
const seen = [];
for (const clientX of [0, 500, 900]) {
  svg.listeners.pointermove({clientX});
  seen.push(output.children.map((child) => [child.textContent, child.style.borderColor ?? ""]));
}
svg.listeners.pointerleave();
console.log(JSON.stringify([seen, output.children.length]));
"""


@pytest.mark.skipif(not shutil.which("node"), reason="needs node to run the page's script")
def test_the_values_at_the_pointer(tmp_path):
    rows = [{"step": n, "reward": -n / 4} for n in range(1, 12)]
    runs = [write_run(tmp_path / "a", rows=rows, samples=0)]
    runs.append(write_run(tmp_path / "b", rows=rows[:3], samples=0))
    text = page(open_views([str(run) for run in runs]))
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    values = json.dumps(figures(text)["reward"][1])
    code = BROWSER.replace("VALUES", json.dumps(values)).replace(
        "RUNS", json.dumps(read(text).data)
    )
    done = subprocess.run(
        ["node", "-e", code.replace("SCRIPT", script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    seen, left = json.loads(done.stdout)
    one, two = (run["color"] for run in read_data(text))
    assert seen == [
        [["step 1", ""], ["\u22120.25", one], ["\u22120.25", two]],
        [["step 6", ""], ["\u22121.5", one], ["\u22120.75", two]],
        [["step 11", ""], ["\u22122.75", one], ["\u22120.75", two]],
    ]
    assert left == 0


def test_the_colors_of_a_page_are_seen_on_light_and_dark(tmp_path):
    text = page(open_views([str(write_run(tmp_path / str(n))) for n in range(8)]))
    colors = {run["color"] for run in read_data(text)}
    assert len(colors) == 8
    assert all(contrast(color, paper) >= 3 for color in colors for paper in ("#ffffff", "#121212"))


@pytest.mark.parametrize("size", [30, 40_000])
def test_a_page_has_a_limit_and_says_what_is_left_out(tmp_path, size):
    run = write_run(tmp_path / "run", steps=60, completion="<é日" * (size // 3))
    whole = page(open_views([str(run)]))
    limit = 300_000 if size == 30 else 2_000_000
    if size == 30:
        limit = len(whole.encode()) - 5_000
        assert "left out" not in whole
    text = page(open_views([str(run)]), limit_bytes=limit)
    assert len(text.encode()) <= limit
    steps = sorted(map(int, read_data(text)[0]["steps"]))
    assert steps[-1] == 60
    assert 0 < len(steps) < 60
    assert f"Completions of {60 - len(steps)} of 60 steps are left out" in text
    assert ("120 completions or prompts are cut after 20,000 characters" in text) == (size > 30)


def test_a_page_replaces_only_a_page(tmp_path):
    views = open_views([str(write_run(tmp_path / "run"))])
    path = write_page(str(tmp_path / "page.html"), views)
    write_page(str(path), views)
    path.write_text("<!doctype html> mine")
    with pytest.raises(UserError, match="is not such a page"):
        write_page(str(path), views)
    assert path.read_text() == "<!doctype html> mine"
    with pytest.raises(UserError, match="cannot be written: No such file"):
        write_page(str(tmp_path / "missing" / "page.html"), views)


def test_the_command(tmp_path):
    run = write_run(tmp_path / "run", steps=400, completion="日\x1b " * 20)
    arguments = [sys.executable, "-m", "experiments.show", str(run), "--step=all"]
    options = {
        "capture_output": True,
        "cwd": qerl_jax.show.runs.__file__.rpartition("/qerl_jax/")[0],
    }
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(arguments, env=ascii_only, **options)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?\\x1b" in done.stdout
    assert b"0.1 -> 40" in done.stdout
    piped = f"set -o pipefail; {' '.join(arguments)} | head -1"
    done = subprocess.run(["bash", "-c", piped], **options)
    assert (done.returncode, done.stderr) == (141, b"")
    done = subprocess.run([*arguments[:-1], "--where=x<1"], **options)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: --where=x<1: completions have no number 'x'")


@pytest.mark.parametrize(
    ("encoding", "errors", "kept"),
    [
        ("iso8859-1", "strict", "é?? .:"),
        ("ISO-8859-15", "strict", "é?? .:"),
        ("koi8-r", "surrogateescape", "?≥? .:"),
        ("cp1252", "strict", "é?? .:"),
        ("ascii", "strict", "??? .:"),
        ("ascii", "absent", "??? .:"),
        ("ascii", "xmlcharrefreplace", "&#233;&#8805;&#26085; .:"),
        ("cp437", "backslashreplace", "é≥\\u65e5 .:"),
        ("utf-16", "strict", "é≥日 ▁▂"),
        ("utf-8", "surrogateescape", "é≥日 ▁▂"),
        ("", "", None),
    ],
)
def test_any_encoding_of_the_output(encoding, errors, kept, tmp_path, monkeypatch):
    rows = [{"step": n, "reward": n / 8} for n in range(1, 9)]
    run = write_run(tmp_path / "run", steps=1, rows=rows, completion="é≥日")
    stdout = None
    if encoding:
        stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        stdout.reconfigure(errors=errors)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "argv", ["show", str(run)])
    command.main()
    if stdout is None:
        assert sys.stdout.name != 1  # the null device
        return
    text = stdout.buffer.getvalue().decode(encoding)
    completion, curve = kept.split()
    assert f"  {completion}\n" in text
    assert f" {curve}" in text


ODD = [value for value in ODD_VALUES if not isinstance(value, str)]
ODD += ["x", CONTROL, "9" * 3000, "@deep 400@", [1, "a"]]
CONFIG_FIELDS = [
    *("steps", "seed", "preset", "log", "log.completions", "model", "model.source", "model.format"),
    *("rollout", "rollout.prompts_per_step", "rollout.group_size"),
]
ROW_FIELDS = [
    *("step", "reward", "accuracy", "format", "reward/format", "length", "entropy", "sigma"),
    *("grad_norm", "rollout_tokens_per_second", "train_tokens_per_second", "remaining_seconds"),
    *("update_skipped", "reward/a", "source/a", "eval_seconds", "eval_accuracy"),
    *("eval_accuracy_before", "eval_truncated"),
]
SAMPLE_FIELDS = ["step", *sample(1, 0), "reward/x", "unknown"]


def shown_or_refused(run):
    """Shows a run in all ways; no exception but a UserError may escape."""
    for where in ((), ("reward>=0",)):
        try:
            text = printed(run, step="all", where=where, columns=80)
            views = open_views([str(run)])
            whole = page(views, conditions=[read_condition(one, views) for one in where])
        except UserError:
            continue
        assert all(character == "\n" or character.isprintable() for character in text)
        assert "\x1b" not in whole


def with_field(where, field, value):
    """The name of a file of a run, and its content with an odd value in a field."""
    if where == "rows":
        rows = [{"step": 1, "reward": 0.5} | {field: value}, {"step": 1, "reward": 0.5}]
        rows.append({"step": 2, "reward": 0.25, field: 1})
        return "metrics.jsonl", b"\n".join(map(dumps, rows)) + b"\n"
    if where == "samples":
        rows = [sample(1, 0) | {field: value}, {"step": 1, field: value}, sample(1, 1)]
        return "completions.jsonl", b"\n".join(map(dumps, rows)) + b"\n"
    config = {"steps": 3, "seed": 0, "preset": "tiny", "log": {"completions": 1}}
    config |= {"model": {"source": "model", "format": "nvfp4"}}
    config |= {"rollout": {"prompts_per_step": 4, "group_size": 8}}
    section, _, last = field.rpartition(".")
    (config[section] if section else config)[last] = value
    return "config.json", dumps({"config": config, "schedule_steps": 3})


@pytest.mark.parametrize(
    ("where", "field"),
    [
        *(("config", field) for field in CONFIG_FIELDS),
        *(("rows", field) for field in ROW_FIELDS),
        *(("samples", field) for field in SAMPLE_FIELDS),
    ],
)
def test_any_value_is_shown_or_refused(where, field, tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    for value in ODD:
        name, content = with_field(where, field, value)
        (run / name).write_bytes(content)
        shown_or_refused(run)


@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "completions.jsonl", "summary.json"]
)
def test_any_content_of_a_file_is_shown_or_refused(name, tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    for text in [*map(dumps, ODD), b"[" * 100_000, b"\x00", b"\xff", b'{"steps": 1']:
        for form in (b"%b", b'%b\n{"step": 1, "reward": 1}\n', b'{"config": %b}'):
            (run / name).write_bytes(form % text)
            shown_or_refused(run)


def test_numbers_that_are_far_apart_are_drawn(tmp_path):
    rows = [{"step": n, "reward": (-1) ** n * 1e300} for n in range(1, 1000)]
    text = printed(write_run(tmp_path / "run", rows=rows), columns=80)
    assert "1e+300 -> " in text.replace("-1e+300 -> ", "1e+300 -> ")


def test_a_circle_of_links_is_one_line(tmp_path):
    (tmp_path / "run").symlink_to("run")
    with pytest.raises(UserError, match=r"run cannot be read|is not a run folder"):
        open_views([str(tmp_path / "run")])
