"""What surrounds measurements: names, floors, rows, tables, the choice of candidates."""

import contextlib
import json
import os

import jax
import jax.numpy as jnp
import pytest

from benchmarks import result_tables
from pallas_kernels import timing
from pallas_kernels.fp4_matmul import autotune, benchmark, cases, mma_autotune, tiling, timeline
from pallas_kernels.fp4_matmul.tiling import TileConfig


def test_products_by_name():
    args = cases.parser("", m="1,8").parse_args(["--layers=1.5b.o,14b"])
    assert [product for product in cases.products(args) if product[1] == 1] == [
        ("1.5b.o", 1, 1536, 1536),
        ("14b.qkv", 1, 7168, 5120),
        ("14b.o", 1, 5120, 5120),
        ("14b.gate_up", 1, 27648, 5120),
        ("14b.down", 1, 5120, 13824),
    ]
    assert [m for _, m, _, _ in cases.products(args)] == [1, 8] * 5
    for name in ("8b", "7b.k"):
        with pytest.raises(ValueError, match=f"no layer '{name}'"):
            cases.shapes(name)
    ranks = [cases.rank_of(layer, 32) for layer in cases.shapes("1.5b")]
    assert ranks == [96, 32, 64, 32] == [cases.rank_of(layer, 32) for layer in cases.MODELS["7b"]]


def test_floors():
    # One token: the bytes of the weight. Many: the operations.
    weight = 37888 * 3584 * 9 / 16
    floor = benchmark.floor_seconds("nvfp4", 1, 37888, 3584, bandwidth=4.3e12)
    assert floor == pytest.approx((weight + 2 * (37888 + 3584)) / 4.3e12)
    floor = benchmark.floor_seconds("nvfp4", 2048, 37888, 3584, bandwidth=4.3e12)
    assert floor == pytest.approx(2 * 2048 * 37888 * 3584 / 790e12)


def row(layer, m, impl, time):
    return {"layer": layer, "m": m, "impl": impl, "device_us": time}


def test_a_run_replaces_its_own_rows(tmp_path):
    path = tmp_path / "results" / "kernel.json"
    benchmark.merge(path, "H", [row("7b.o", 1, "bf16", 1.0), row("7b.o", 16, "bf16", 2.0)])
    benchmark.merge(path, "H", [row("7b.o", 16, "bf16", 3.0), row("7b.o", 1, "nvfp4", 4.0)])
    result = json.loads(path.read_text())
    assert result["device"] == "H"
    assert [(r["m"], r["impl"], r["device_us"]) for r in result["rows"]] == [
        (1, "bf16", 1.0),
        (1, "nvfp4", 4.0),
        (16, "bf16", 3.0),
    ]
    with pytest.raises(ValueError, match="has rows of H, this is I"):
        benchmark.merge(path, "I", [])


@pytest.fixture
def few_weights(monkeypatch):
    """Weights are two, and a program has one kernel, which takes a second."""
    monkeypatch.setattr(cases, "ROTATED_BYTES", 1.0)
    monkeypatch.setattr(
        timing,
        "device_times",
        lambda f, *args: (jax.block_until_ready(f(*args)), [("k", 1.0)])[1],
    )


@pytest.mark.usefixtures("few_weights")
@pytest.mark.parametrize("impl", ["bf16", "dx_bf16", "xla"])
def test_times_of_the_implementations_that_a_cpu_has(impl):
    assert benchmark.time_product(impl, "7b.o", 4, 64, 128) == (0.5, {"k": 0.5})


@pytest.mark.usefixtures("few_weights")
def test_a_tuner_measures_what_compiles_without_spills_and_is_right(monkeypatch, capsys):
    @contextlib.contextmanager
    def compiler_reports():
        yield lambda lowered: 8 if "multiply" in lowered.as_text() else 0

    def product(x, weight, *, config):
        if config == "unknown":
            raise NotImplementedError(config)
        return {"right": x + weight, "wrong": x - weight, "spilling": x * weight}[config]

    monkeypatch.setattr(autotune, "compiler_reports", compiler_reports)
    configs = ["unknown", "right", "wrong", "spilling"]
    ((seconds, config, _),) = autotune.measured(
        configs, product, jnp.add, [[jnp.ones(3)] * 2, [jnp.full(3, 2.0)] * 2], threads=2
    )
    assert (seconds, config) == (0.5, "right")
    out = capsys.readouterr().out
    for line in ("unknown: unknown", "spilling: spills 8 bytes", "wrong: off by 1.3e+00"):
        assert f"    {line}\n" in out


def test_schedules_to_measure():
    n, k = cases.MODELS["7b"]["down"]
    found = list(mma_autotune.candidates(8, n, k, 132))
    assert {config.rows for config in found} == {64, 128}
    assert all(198 <= -(-n // config.rows) * config.split <= 1320 for config in found)


@pytest.mark.parametrize("m", [1, 64, 256, 2048])
def test_the_shortlist_has_every_kind(m, monkeypatch):
    n, k = cases.MODELS["7b"]["qkv"]
    incumbent = tiling.TileConfig(8, stages=2)
    monkeypatch.setattr(tiling, "choose", lambda *_, **__: incumbent)
    found = autotune.shortlist(m, n, k, rank=64, num_sms=132)
    assert 10 <= len(found) <= 60
    assert found[-1] == incumbent
    if m <= 64:
        assert {(config.in_flight, config.ahead) for config in found} >= {(1, False), (1, True)}
    assert len(set(found)) == len(found)
    assert all(config.problem() is None for config in found)
    assert any(config.stream_k or config.split > 1 for config in found) == (m <= 256)
    costs = [tiling.cost(config, m, n, k, 132) for config in found]
    assert costs[0] == min(costs)
    if m <= 64:
        assert {config.slices for config in found} >= {1, 2}
        assert {config.split for config in found} >= {1, 3}


def test_the_tuner_reads_what_the_compiler_reports(monkeypatch, capfd):
    monkeypatch.setenv(autotune._REPORT, "0")

    class Lowered:
        def __init__(self, *reports):
            self.reports = reports

        def compile(self):
            assert os.environ[autotune._REPORT] == "1"
            for report in self.reports:
                os.write(1, report)

    with autotune.compiler_reports() as spilled_bytes:
        spills = b"8 bytes stack frame, 16 bytes spill stores, 4 bytes spill loads\n"
        assert spilled_bytes(Lowered(spills, spills)) == 32
        assert spilled_bytes(Lowered(spills.replace(b"16", b"0"))) == 0
        with pytest.raises(RuntimeError, match="did not report"):
            spilled_bytes(Lowered())
        os.write(1, b"of another thread")
        print("a line")
    assert os.environ[autotune._REPORT] == "0"
    os.write(1, b"behind\n")
    assert capfd.readouterr().out == "a line\nbehind\n"


def test_a_table_keeps_other_shapes(tmp_path, monkeypatch):
    class Device:
        device_kind, core_count = "NVIDIA H", 7

    monkeypatch.setattr(autotune.jax, "devices", lambda: [Device])
    path = tmp_path / "tuned" / "nvidia_h.json"
    autotune.merge(path, [{"n": 1, "k": 2, "m": 3, "config": {}, "us": 1.0}])
    autotune.merge(path, [{"n": 1, "k": 2, "m": 1, "config": {}, "us": 1.0}])
    autotune.merge(path, [{"n": 1, "k": 2, "m": 3, "config": {}, "us": 2.0}])
    table = json.loads(path.read_text())
    assert (table["device"], table["multiprocessors"]) == ("NVIDIA H", 7)
    assert table["kernel"] == tiling.kernel_digest()
    assert [(entry["m"], entry["us"]) for entry in table["entries"]] == [(1, 1.0), (3, 2.0)]
    assert "also_verified" not in table

    # Devices that passed the self-test stay listed, until the kernel is another one.
    path.write_text(json.dumps(table | {"also_verified": ["NVIDIA I"]}))
    autotune.merge(path, [])
    assert json.loads(path.read_text())["also_verified"] == ["NVIDIA I"]
    monkeypatch.setattr(tiling, "kernel_digest", lambda: "another")
    autotune.merge(path, [])
    assert "also_verified" not in json.loads(path.read_text())


def test_the_table_sets_rows_side_by_side():
    dense = {"floor_us": 6.0, "commit": "0123456789"}
    rows = [
        row("7b.o", 16, "nvfp4", 4.0) | {"floor_us": 1.8, "commit": "0123456789"},
        row("7b.o", 16, "nvfp4_lora32", 5.5) | {"commit": "0123456789"},
        row("7b.o", 16, "bf16", 8.0) | dense,
        row("7b.o", 8192, "nvfp4", 9.0) | {"floor_us": 8.9, "commit": "ab"},
        row("7b.o", 8192, "bf16", 9.0) | dense,  # of another commit: side by side, not compared
        row("14b.o", 16, "nvfp4", 8.0) | {"floor_us": 6.0, "commit": "ab"},
        row("32b.o", 16, "nvfp4", 8.0) | {"floor_us": 6.0, "commit": "ab"},  # of equal shape
    ]
    assert result_tables.kernel_table({"rows": rows}).splitlines() == [
        "| layer |  | 16 | 8192 |",
        "| --- | --- | --- | --- |",
        "| 7b.o | NVFP4 | 4.0 (45 %) | 9.0 (99 %) |",
        "|  | NVFP4 + LoRA | 5.5 |  |",
        "|  | bf16 | 8.0 (2.00x) | 9.0 |",
        "| 14b.o = 32b.o | NVFP4 | 8.0 (75 %) |  |",
    ]


def test_each_device_has_its_part():
    versions = {"bandwidth": 3e12, "versions": {"jax": "0.11.2"}, "floor_us": 2.0}
    rows = [row("7b.o", 16, "nvfp4", 4.0) | versions | {"commit": commit} for commit in "ab"]
    heading, table = result_tables.kernel_part({"device": "NVIDIA H100", "rows": rows}).split(
        "\n\n"
    )
    assert heading == "On one NVIDIA H100, which copies 3.00 TB/s (commits a, b, jax 0.11.2):"
    assert "| 7b.o | NVFP4 | 4.0 (50 %) |" in table
    rows += [rows[0] | {"m": 40}, rows[0] | {"m": 64, "device_us": 5.0}]
    text = result_tables.kernel_part({"device": "NVIDIA H100", "rows": rows})
    assert text.endswith("next column: 40 tokens take at most 0.80x of 64.")


@pytest.mark.parametrize("out", [["--out=/a/b/k.json"], ["--out", "/a/b/k.json"]])
def test_a_row_has_no_path_of_a_machine(out, monkeypatch):
    monkeypatch.setattr(benchmark.sys, "argv", ["benchmark.py", "--layers=7b.o", *out])
    monkeypatch.setenv("QERL_COMMIT", "abc")
    origin = benchmark.provenance()
    assert origin["commit"] == "abc"
    command = origin["command"]
    assert command.endswith("benchmark --layers=7b.o " + " ".join(out).replace("/a/b/", ""))


def test_the_home_folder_is_expanded(monkeypatch, capsys):
    monkeypatch.setenv("HOME", "/home/me")
    parser = timing.parser("")
    parser.add_argument("--out", type=timing.user_path)
    assert str(parser.parse_args(["--out=~/k.json"]).out) == "/home/me/k.json"
    with pytest.raises(SystemExit):
        parser.parse_args(["--out=~nobody-of-this-name/k.json"])
    assert "nobody-of-this-name" in capsys.readouterr().err


def test_timeline():
    """Two consumers and a producer; times are in 1000 cycles."""

    def events(tid, *notes):
        return [
            {"tid": tid, "name": name, "ph": phase, "ts": cycles / 1000}
            for cycles, phase, name in notes
        ]

    trace = events(1, (0, "B", "Init"), (50, "E", "Init"), (60, "B", "await free stage"))
    trace += events(1, (900, "E", "await free stage"))
    for tid, wait, end in ((2, 100, 1000), (3, 300, 1200)):
        trace += events(tid, (0, "B", "Init"), (50, "E", "Init"), (60, "B", "multiply"))
        trace += events(tid, (70, "B", "await stage"), (500, "E", "await stage"))
        trace += events(tid, (600, "B", "await stage"), (600 + wait, "E", "await stage"))
        trace += events(tid, (960, "E", "multiply"), (970, "B", "store"), (end, "E", "store"))
    found = timeline.summary({"traceEvents": trace})
    assert found == pytest.approx(
        {
            "Init": 50,
            "first stage": 430,
            "await stage": 200,
            "multiply": 900 - 430 - 200,
            "store": 130,
            "span": 1100,
        }
    )


def test_the_first_data_of_a_shrink():
    notes = [(0, "B", "shrink"), (100, "B", "await stage"), (400, "E", "await stage")]
    notes += [(500, "E", "shrink"), (510, "B", "multiply"), (520, "B", "await stage")]
    notes += [(540, "E", "await stage"), (600, "E", "multiply")]
    events = [{"tid": 1, "ts": at / 1000, "ph": phase, "name": name} for at, phase, name in notes]
    assert timeline.summary({"traceEvents": events}) == pytest.approx(
        {"first stage": 300, "shrink": 200, "await stage": 20, "multiply": 70, "span": 600}
    )


def test_events_of_a_block():
    notes = [(3, 0, "B", "Init"), (3, 50, "E", "Init"), (4, 10, "B", "multiply")]
    notes += [(4, 20, "B", "await stage"), (4, 35, "E", "await stage"), (4, 90, "E", "multiply")]
    trace = [
        {"tid": tid, "ts": 7 + cycle / 1000, "ph": phase, "name": name}
        for tid, cycle, phase, name in [(1, -500, "B", "Init"), *notes, (5, 1, "B", "Init")]
    ]
    assert timeline.events_of_block({"traceEvents": trace}, 1, 2) == [
        "warpgroup 0: Init 0+50",
        "warpgroup 1: multiply 10+80; await stage 20+15",
    ]


def test_events_take_shared_memory():
    shorter = timeline.traceable(TileConfig(16, warpgroups_n=5, block_k=256, stages=4))
    assert shorter == TileConfig(16, warpgroups_n=5, block_k=256, stages=3)
    assert timeline.traceable(shorter) == shorter
