"""Packed self-attention with a shared prompt: tiles, the dense form, and the simulated kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_cases import (
    draw_operands,
    errors,
    oracle,
    packed_ids,
    random_ids,
    row_positions,
    visibility,
)
from simulated_kernel import simulation

from pallas_kernels.attention import (
    attend_packed,
    backward_sm90,
    benchmark,
    dense,
    forward_sm90,
    segments,
)
from pallas_kernels.attention.segments import BLOCK, STEP, windowed

ROUNDING = 4e-3  # relative error of results in bfloat16, of weights that are rounded, too


def visited(packed):
    """How often the kernels visit each pair of query and key; and in a full block, bool [T, T].

    The tiles of queries come first, then the tiles of keys.
    """
    length = len(packed.ids)
    counts, full = np.zeros((2, length, length), int), np.zeros((2, length, length), bool)
    for tile, prompt, prompt_blocks, *prompt_full, own, blocks, start, stop in packed.key_runs:
        rows = slice(tile * BLOCK, (tile + 1) * BLOCK)
        assert prompt % 8 == own % BLOCK == 0
        for first, number, (full_from, full_to), end in (
            (prompt, prompt_blocks, prompt_full, own),
            (own, blocks, (start, stop), length),
        ):
            for i in range(number):
                keys = slice(first + i * BLOCK, first + (i + 1) * BLOCK)
                assert keys.stop <= length
                full[0, rows, keys] |= full_from <= i < full_to
                # Keys of the own run are left out of the prompt's run.
                assert not full_from <= i < full_to or keys.stop <= end
                counts[0, rows, keys.start : min(keys.stop, end)] += 1
    for tile, blocks, part, parts, _, full_to, *_ in packed.query_runs:
        for i in range(blocks):
            if part == 0 and parts:
                keys = slice(tile * BLOCK, (tile + 1) * BLOCK)
                rows = slice(tile * BLOCK + i * STEP, tile * BLOCK + (i + 1) * STEP)
                counts[1, rows, keys] += 1
                full[1, rows, keys] |= BLOCK // STEP <= i < full_to
    return counts, full


@pytest.mark.parametrize("seed", range(12))
def test_every_visible_pair_is_visited_once(seed):
    rng = np.random.default_rng(seed)
    packed = segments(random_ids(rng, 128 * rng.integers(1, 12)))
    index, ends = np.arange(len(packed.ids)), packed.ends
    visible = visibility(packed.ids)
    masked = (index <= index[:, None]) & (index[:, None] < ends)
    live = packed.ids >= 0
    np.testing.assert_array_equal(masked[live], visible[live])
    assert masked.diagonal().all()  # no row is without a key
    for counts, full in zip(*visited(packed), strict=True):
        assert (counts[masked] == 1).all()
        assert counts.max() == 1
        assert masked[full].all()


def test_a_full_block_is_not_masked():
    """A long completion and a long prompt have full blocks in every direction."""
    packed = segments(packed_ids((300, 300, 400), total=1024))
    counts, full = visited(packed)
    assert counts.sum(axis=(1, 2)).tolist() == [33 * BLOCK**2, 66 * STEP * BLOCK]
    # Of queries 128 to 255, and of the tiles after 640, which end in a completion.
    assert full[0, 128:256].sum() == BLOCK**2
    assert [full[0, i : i + BLOCK].sum() // BLOCK**2 for i in (640, 768)] == [2, 3]
    # Of keys of the prompt alone, and of the second completion alone.
    assert [full[1, :, i : i + BLOCK].sum() // BLOCK // STEP for i in (0, 128, 640)] == [13, 11, 3]


@pytest.mark.parametrize("groups", [[], [(40,)], [(100, *[280] * 8)], [(100, 2048, 2048)]])
def test_tiles_are_divided_into_parts_in_order(groups):
    """Every part has a CTA, and the slots of a divided tile follow one another."""
    packed = segments(packed_ids(*groups, total=4352))
    count = len(packed.ids) // BLOCK
    rows = packed.query_runs[packed.query_runs[:, 3] > 0]
    work = rows[:, 1] / rows[:, 3]
    assert (np.diff(work) <= 0).all()
    assert sorted(set(rows[:, 0])) == list(range(count))
    for tile in range(count):
        parts = rows[rows[:, 0] == tile]
        parts = parts[np.argsort(parts[:, 2])]
        number = len(parts)
        assert parts[:, 2].tolist() == list(range(number))
        assert set(parts[:, 3]) == {number}
        first, divided = packed.sums[tile]
        assert divided == (number if number > 1 else 0)
        slots = [first + i for i in range(number)] if number > 1 else [-1]
        assert parts[:, 4].tolist() == slots
    slots = rows[rows[:, 4] >= 0, 4]
    assert len(set(slots)) == len(slots) <= count


def test_a_long_prompt_tile_does_not_outlast_the_others():
    packed = segments(packed_ids((100, *[2048] * 7), total=16384))
    rows = packed.query_runs[packed.query_runs[:, 3] > 0]
    total = (rows[:, 1] / rows[:, 3]).sum()
    assert rows[0, 1] == 226  # blocks of the prompt's tile
    assert rows[0, 1] / rows[0, 3] < 2 * total / 128


def test_shapes_depend_on_the_length_alone():
    layouts = [(), ((7,),), ((100, 280, 0, 280),), ((1, 600), (300, 30))]
    shapes = {
        tuple(x.shape for x in segments(packed_ids(*groups, total=1000))[:5]) for groups in layouts
    }
    assert shapes == {((1000,), (8, 9), (16, 8), (8, 2), (1000,))}


@pytest.mark.parametrize(("ids", "token"), [([0, 1, 0], 2), ([0, -1, 1], 2), ([4096, 3], 1)])
def test_ids_out_of_order_are_refused(ids, token):
    with pytest.raises(ValueError, match=f"token {token} has the id {ids[token]} after"):
        segments(np.array(ids))


def test_the_benchmark_fills_a_buffer():
    """Groups that do not fit are divided, and the prompt is repeated."""
    ids = benchmark.fill(1000, 50, 2, 200)
    np.testing.assert_array_equal(
        ids, packed_ids((50, 200, 200), (50, 200, 200), total=1000)[: len(ids)]
    )
    packed = segments(ids)
    assert benchmark.visible_pairs(packed) == visibility(ids)[ids >= 0].sum()


HEADS = [(12, 2, 16), (28, 4, 16), (9, 3, 16)]
RAGGED = packed_ids((5, 9, 0, 1), (1, 30), (40, 3, 7), (8,), total=130)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", ["one block", "blocks"])
def test_the_dense_form(heads, rows, monkeypatch):
    """In float32, with the gradients of autodiff."""
    ids = np.append(RAGGED, [-1, -1]).astype(np.int32)
    if rows == "blocks":  # of 66 queries
        monkeypatch.setattr(dense, "MAX_SCORES", 2**13)
    *operands, d_out = draw_operands(len(ids), *heads, ids, jnp.float32)
    packed = segments(ids)
    out, pullback = jax.vjp(jax.jit(lambda *x: attend_packed(*x, packed)), *operands)
    expected = oracle(*operands, d_out, ids)
    assert max(errors((out, *pullback(d_out)), expected, ids)) < 3e-6


def test_the_dense_form_of_padding_alone_is_finite():
    ids = np.full(20, -1, np.int32)
    *operands, _ = draw_operands(20, 2, 1, 8, ids)
    assert np.isfinite(np.asarray(attend_packed(*operands, segments(ids)), np.float32)).all()


def simulate(heads, ids, sinks=None, window=0):
    """The results of the simulated kernels, and their errors."""
    *operands, d_out = draw_operands(len(ids), *heads, ids)
    packed = segments(ids)._replace(positions=row_positions(ids) if window else None)
    with simulation() as parameters:
        run = functools.partial(forward_sm90.attend, interpret=parameters, window=window)
        out, lse = jax.jit(run)(*operands, packed, sinks=sinks)
    with simulation() as parameters:
        run = functools.partial(backward_sm90.gradients, interpret=parameters, window=window)
        gradients = jax.jit(run)(*operands, packed, out, lse, d_out)
    results = out, *gradients
    return results, errors(results, oracle(*operands, d_out, ids, sinks, window), ids)


@pytest.mark.parametrize(
    ("heads", "total", "groups"),
    [
        ((2, 1, 64), 256, [(30, 70, 60), (90, 5)]),  # a prompt before the own run, full blocks
        *(
            pytest.param(heads, 512, groups, marks=pytest.mark.slow)
            for heads, groups in (
                ((2, 1, 128), [(200, 100, 150)]),
                ((2, 1, 256), [(30, 150, 60), (90, 5)]),
                ((3, 1, 64), [(9, 500)]),
                ((4, 2, 64), [(30, 40), (77, 90), (3, *[20] * 9)]),
                ((1, 1, 128), []),
            )
        ),
    ],
)
def test_the_kernels(heads, total, groups):
    """Full blocks of both kinds, divided tiles, many groups in a tile, padding alone."""
    ids = packed_ids(*groups, total=total)
    if groups:
        assert max(simulate(heads, ids)[1]) < ROUNDING
        return
    with np.errstate(invalid="ignore"):  # There is nothing to be off from.
        (_, *gradients), _ = simulate(heads, ids)
    assert all(not np.asarray(x, np.float32).any() for x in gradients)


LIMITED = packed_ids((5, 9, 0, 1), (1, 30), (40, 3, 7), (8,), total=130)


@pytest.mark.parametrize(
    ("window", "has_sinks"),
    [
        (6, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((0, True), (2, True), (200, True), (2, False), (6, False), (200, False))
        ),
    ],
)
def test_sinks_and_windows_of_the_dense_form(window, has_sinks, monkeypatch):
    """Also in blocks; windows are by the positions of rows, so a completion sees its prompt."""
    if window == 6:
        monkeypatch.setattr(dense, "MAX_SCORES", 2**13)
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32) if has_sinks else None
    *operands, d_out = draw_operands(len(LIMITED), 4, 2, 16, LIMITED, jnp.float32)
    packed = segments(LIMITED)._replace(positions=row_positions(LIMITED))
    limits = {"sinks": None if sinks is None else jnp.asarray(sinks), "window": window}
    out, pullback = jax.vjp(lambda *x: attend_packed(*x, packed, **limits), *operands)
    expected = oracle(*operands, d_out, LIMITED, sinks, window)
    assert max(errors((out, *pullback(d_out)), expected, LIMITED)) < 3e-6


@pytest.mark.slow  # 5 s each
@pytest.mark.parametrize(
    ("heads", "total", "groups", "window"),
    [
        ((2, 1, 64), 384, [(150, 40, 90), (60, 30)], 50),
        ((2, 1, 64), 640, [(300, 200, 100)], 128),
        ((2, 1, 64), 640, [(300, 200, 100)], 129),
        ((2, 1, 64), 512, [(129, 200, 100)], 128),
        ((2, 1, 128), 512, [(200, 100, 150)], 2),
        ((2, 1, 256), 512, [(30, 150, 60), (90, 5)], 100),
        ((4, 2, 64), 512, [(30, 40), (77, 90), (3, *[20] * 9)], 17),
        ((2, 1, 64), 256, [(30, 70, 60), (90, 5)], 0),
        ((1, 1, 64), 1024, [(300, *[20] * 30)], 1),  # a tile with more parts than blocks
    ],
)
def test_sinks_and_windows_of_the_kernels(heads, total, groups, window):
    """Windows that end in a prompt, at the border of tiles, and within a tile."""
    ids = packed_ids(*groups, total=total)
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)[: heads[0]]
    assert max(simulate(heads, ids, sinks, window)[1]) < ROUNDING


@pytest.mark.slow  # 20 s
def test_what_is_before_a_window_is_not_read():
    """Of a completion whose later tiles visit no key in the second one."""
    ids, window = packed_ids((10, 600), total=640), 50
    *operands, d_out = draw_operands(len(ids), 2, 1, 64, ids)
    packed = segments(ids)._replace(positions=row_positions(ids))
    sinks, before = jnp.asarray([0.5, -1.0]), slice(BLOCK, 2 * BLOCK)
    after = slice(3 * BLOCK, None)

    def run(q, k, v):
        with simulation() as parameters:
            options = {"window": window, "interpret": parameters}
            out, lse = jax.jit(functools.partial(forward_sm90.attend, **options))(
                q, k, v, packed, sinks=sinks
            )
        with simulation() as parameters:
            options = {"window": window, "interpret": parameters}
            gradients = jax.jit(functools.partial(backward_sm90.gradients, **options))
            return out[after], lse[:, after], gradients(q, k, v, packed, out, lse, d_out)[0][after]

    q, k, v = operands
    hidden = (x.at[before].set(jnp.nan) for x in (k, v))
    for actual, expected in zip(run(q, *hidden), run(*operands), strict=True):
        np.testing.assert_array_equal(actual, expected)
        assert np.isfinite(np.asarray(actual, np.float32)).all()


def test_a_window_leaves_blocks_out():
    """Whatever the groups, the blocks that are visited hold all keys that a query sees."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        ids, window = random_ids(rng, 1024), int(rng.choice([1, 2, 5, 64, 128, 129, 130, 300]))
        if seed < 4:
            ids = packed_ids((700 + seed, 100, 200), total=1024)
        positions = row_positions(ids)
        packed = segments(ids)._replace(positions=positions)
        runs, whole = windowed(packed, window).key_runs, packed.key_runs
        seen = visibility(ids) & (positions[:, None] - positions < window)
        for row, before in zip(runs, whole, strict=True):
            tile, prompt, prompt_blocks, *_, own, blocks, _, _ = (int(x) for x in row)
            visited = np.zeros(1024 + 128, int)
            last = min(prompt + 128 * prompt_blocks, own)
            visited[prompt:last] += 1
            visited[own : own + 128 * blocks] += 1
            queries = slice(128 * tile, 128 * tile + 128)
            live = ids[queries] >= 0
            keys = seen[queries][live].any(axis=0)
            assert (visited[:1024][keys] == 1).all()
            # The blocks that a window may reach into, and of a prompt up to two without such keys.
            reached = -(-(window - 1) // BLOCK) + 1
            assert blocks <= min(before[6], reached)
            assert prompt_blocks <= min(before[2] + 1, reached + 2)
            assert row[[3, 4, 7, 8]].tolist() == [0] * 4
        ends_a_prompt = (ids % 4096 == 0) & (np.roll(ids, -window) != ids)
        ends = np.where(ends_a_prompt, 1024, np.arange(1024) + window)
        for row, before in zip(windowed(packed, window).query_runs, packed.query_runs, strict=True):
            assert np.flatnonzero(row != before).tolist() in ([], [1], [5], [1, 5])
            keys = slice(BLOCK * row[0], BLOCK * row[0] + BLOCK)
            stop = keys.start + STEP * row[1]
            assert not before[3] or not seen[stop:, keys][ids[stop:] >= 0].any()
            assert row[1] <= before[1]
            assert stop < ends[keys].max() + STEP
            assert row[5] == 0
