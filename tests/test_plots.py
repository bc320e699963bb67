"""The picture of a run's curves."""

import json

import pytest
from refusal import refused

from qerl_jax.run.plots import plot_run, plot_sweep


def write(folder, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)


FULL = [
    {
        "step": step,
        "reward": step / 9,
        "accuracy": step / 10,
        "entropy": 1 / step,
        "sigma": 0.0 if step < 3 else 10.0**-step,
        "noise_kl": 1e-3 if step % 5 == 0 else None,
        **({"eval_accuracy": 0.5} if step == 4 else {}),
    }
    for step in range(1, 9)
]


@pytest.mark.parametrize(
    "rows",
    [
        FULL,
        FULL[:1],
        [*FULL[:4], {"step": 4, "eval_accuracy": 0.5, "eval_seconds": 1.0}, *FULL[4:]],
        [{"step": 0, "eval_accuracy_before": 0.5, "eval_seconds": 1.0}, *FULL[:1]],
        [{"step": 1, "reward": 0.5}, {"step": 2, "entropy": 0.4}],
        [{"step": 1, "sigma": 0.0}, {"step": 2, "sigma": 0.0}],
        [{"step": 1, "reward": None, "accuracy": 0.1}],
    ],
)
def test_curves_are_a_png(tmp_path, rows):
    write(tmp_path, rows)
    path = plot_run(tmp_path)
    assert path == tmp_path / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def drawn(folder, monkeypatch, *, below=None, draw=plot_run):
    """The panels of a run's picture: their labels, and the values of each line.

    `below` is the text below the panels.
    """
    figures = []

    def keep(figure, path):
        figures.append(figure)
        path.touch()

    monkeypatch.setattr("qerl_jax.run.plots._save", keep)
    draw(folder)
    (figure,) = figures
    if below is not None:
        assert figure.axes[-1].get_xlabel() == below
    return [
        (axes.get_ylabel(), {line.get_label(): line.get_xydata().tolist() for line in axes.lines})
        for axes in figure.axes
    ]


NOISE = ["sigma of the noise", "KL(noisy, clean)"]


def test_each_of_several_rewards_has_a_panel(tmp_path, monkeypatch):
    rows = [
        row | {"reward/format": part / 9, "reward/correctness": part / 4, "reward/judge": judged}
        for part, row, judged in zip((1, 2, 3), FULL[:3], (None, 0.25, 0.75), strict=True)
    ]
    write(tmp_path, rows)
    panels = drawn(tmp_path, monkeypatch)
    assert [label for label, _ in panels] == [
        *("reward", "accuracy", "reward/correctness", "reward/format", "reward/judge"),
        *("entropy (nats)", "sigma of the noise"),
    ]
    assert panels[2][1] == {"reward/correctness": [[1, 0.25], [2, 0.5], [3, 0.75]]}
    assert panels[4][1] == {"reward/judge": [[2, 0.25], [3, 0.75]]}
    assert panels[0][1].keys() == {"sampled"}


def test_one_reward_has_no_panel_of_its_own(tmp_path, monkeypatch):
    write(tmp_path, [row | {"reward/correctness": 0.5} for row in FULL])
    assert [label for label, _ in drawn(tmp_path, monkeypatch)] == [
        *("reward", "accuracy", "entropy (nats)", *NOISE),
    ]


def test_only_a_run_that_learns_from_text_has_a_panel_of_its_loss(tmp_path, monkeypatch):
    """Of a teacher alone no step may have a reward; its loss is that of a policy gradient."""
    losses = [{"step": step, "loss": 1 / step} for step in (1, 2)]
    write(tmp_path, losses)
    assert [label for label, _ in drawn(tmp_path, monkeypatch)] == ["loss (nats per token)"]
    taught = {"reward": None, "reward/correctness": None}
    write(tmp_path, [
        row | taught | {"entropy": 1 / row["step"], "teacher/reverse_kl": 1 / row["step"]}
        for row in losses
    ])  # fmt: skip
    expected = ["entropy (nats)", "KL(policy, teacher)"]
    assert [label for label, _ in drawn(tmp_path, monkeypatch)] == expected


def test_what_never_changes_is_named_below_the_panels(tmp_path, monkeypatch):
    constant = {"sigma": 0.0, "noise_kl": 0.0, "reward/format": 1.0}
    rows = [row | constant | {"reward/correctness": row["accuracy"]} for row in FULL]
    write(tmp_path, rows)
    below = "step\nunchanged: reward/format 1, sigma of the noise 0, KL(noisy, clean) 0"
    panels = drawn(tmp_path, monkeypatch, below=below)
    assert [label for label, _ in panels] == ["reward", "accuracy", "entropy (nats)"]
    # Of one step all panels are drawn but those of noise that is 0.
    write(tmp_path, rows[:1])
    below = "step\nunchanged: sigma of the noise 0, KL(noisy, clean) 0"
    assert len(drawn(tmp_path, monkeypatch, below=below)) == 4
    write(tmp_path, [{"step": step, "reward": 0.5} for step in (1, 2)])
    assert [label for label, _ in drawn(tmp_path, monkeypatch)] == ["reward"]


@pytest.mark.parametrize("count", [1, 2])
def test_steps_are_whole_numbers_and_the_text_below_the_panels_fits(tmp_path, monkeypatch, count):
    figures = []
    monkeypatch.setattr("qerl_jax.run.plots._save", lambda figure, _: figures.append(figure))
    constant = {f"reward/part {number}": 1.0 for number in range(12)} if count > 1 else {}
    write(tmp_path, [row | constant for row in FULL[:count]])
    plot_run(tmp_path)
    (figure,) = figures
    figure.draw_without_rendering()
    axis, (low, high) = figure.axes[-1].xaxis, figure.axes[-1].get_xlim()
    assert [x for x in axis.get_ticklocs() if low <= x <= high] == [*range(1, count + 1)]
    extent = axis.label.get_window_extent()
    assert 0 <= extent.x0 < extent.x1 <= figure.bbox.width


def test_a_sweep_without_noise_has_no_panels_of_noise(tmp_path, monkeypatch):
    runs = {name: [tmp_path / name] for name in ("a", "b")}
    for number, (folder,) in enumerate(runs.values()):
        folder.mkdir()
        rows = [{"reward": 0.5, "entropy": number, "sigma": 0.0, "step": n} for n in (1, 2)]
        rows[0]["noise_kl"] = 0.0
        write(folder, rows)
    panels = drawn(tmp_path, monkeypatch, draw=lambda path: plot_sweep(runs, path / "c.png"))
    assert [label for label, _ in panels] == ["entropy (nats)"]


def test_no_curve_hides_another(tmp_path, monkeypatch):
    """Equal curves are drawn once, and curves of different quantities have panels of their own."""
    before = {"step": 0, "eval_accuracy_before": 0.25, "eval_seconds": 1.0}
    after = {"step": 8, "eval_accuracy": 0.75, "eval_seconds": 1.0}
    rows = [row | {"accuracy": row["reward"]} for row in FULL]
    for row in rows:
        row.pop("eval_accuracy", None)
    write(tmp_path, [before, *rows, after])
    panels = drawn(tmp_path, monkeypatch)
    assert [label for label, _ in panels] == ["reward = accuracy", "entropy (nats)", *NOISE]
    assert panels[0][1] == {
        "sampled": [[row["step"], row["reward"]] for row in rows],
        "greedy, held-out problems": [[0, 0.25], [8, 0.75]],
    }
    write(tmp_path, [before, *rows[:-1], FULL[-1], after])
    panels = drawn(tmp_path, monkeypatch)
    assert [label for label, _ in panels][:2] == ["reward", "accuracy"]
    assert [set(lines) for _, lines in panels] == [
        {"sampled"},
        {"sampled", "greedy, held-out problems"},
        *({"entropy"}, {"sigma"}, {"KL"}),
    ]


def test_the_legend_lies_above_the_curves(tmp_path):
    from qerl_jax.run import plots

    figure, (axes,) = plots._make_axes(1)
    axes.plot([1, 2], [0.0, 1.0], label="a")
    plots._legend_above(axes, 2)
    figure.draw_without_rendering()
    assert axes.get_legend().get_window_extent().y0 >= axes.get_window_extent().y1 - 1


@pytest.mark.parametrize("rows", [[], [{"step": 1}], [{"step": 1, "reward": None}]])
def test_nothing_to_draw(tmp_path, rows):
    write(tmp_path, rows)
    assert plot_run(tmp_path) is None
    assert not (tmp_path / "curves.png").exists()


def test_missing_metrics(tmp_path):
    refused(r"metrics\.jsonl", plot_run, tmp_path)
