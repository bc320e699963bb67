"""The tiling of a product, and which CTA computes which part of it."""

import dataclasses
import itertools

import adapter_cases
import numpy as np
import pytest

from pallas_kernels.fp4_matmul import cases, tiling
from pallas_kernels.fp4_matmul.sm90.schedule import make_schedule
from pallas_kernels.fp4_matmul.tiling import TileConfig


@pytest.mark.parametrize(
    ("tiles", "split", "num_sms", "clusters"),
    [
        (66, 2, 132, 66),  # one tile for each cluster
        (198, 2, 132, 66),  # a whole tile for each CTA, and one to split
        (132, 2, 132, 0),
        (36, 3, 132, 36),
        (40, 3, 132, 0),  # the last would wait for a second wave
        (140, 4, 132, 28),
        (16, 8, 132, 0),
        (5, 4, 4, 1),
        (5, 1, 132, 0),
        (1, 8, 4, 0),
        (40, 4, 114, 0),  # a device for which the number of clusters is not known
    ],
)
def test_clusters(tiles, split, num_sms, clusters):
    assert tiling.clusters_of(tiles, split, num_sms) == clusters


@pytest.mark.parametrize(
    ("stages", "m", "row_tiles", "k", "shrinks"),
    [
        (4, 32, 432, 5120, True),
        (1, 32, 432, 5120, False),  # no stage beside the one with the tokens
        (4, 40, 432, 5120, False),  # two tiles of tokens
        (4, 32, 432, 5184, False),  # half of a partial
        (4, 32, 432, 384, False),  # fewer partials than warps that add them up
        (4, 32, 4, 5120, False),  # one CTA for 80 units, of which a stage holds two
    ],
)
def test_where_the_kernel_shrinks(stages, m, row_tiles, k, shrinks):
    config = TileConfig(32, warpgroups_n=4, block_k=256, stages=stages, in_flight=1)
    assert make_schedule(config, m, row_tiles, k, 132).supports_lora_shrink(64, k) == shrinks


def test_what_a_gpu_tests_of_adapters():
    """Each case is what it says, and every way to compute partials is among them."""
    made = []
    for *case, inside in adapter_cases.CASES:
        schedule, (_, _, _, k, rank) = adapter_cases.schedule_of(*case), case
        assert schedule.config.problem() is None, case
        assert schedule.supports_lora_shrink(rank, k) == inside, case
        if inside:
            made.append((schedule, schedule.shrink_turns(rank, k)))
    many = [schedule for schedule, turns in made if turns > schedule.config.warpgroups]
    assert any(one.split == 2 and one.resident_blocks < one.blocks for one in many)
    assert any(one.split_tiles for one in many)
    assert any(one.config.warpgroups > 1 for one in many)
    assert any(1 < turns <= one.config.warpgroups for one, turns in made)


def test_clusters_are_for_devices_that_are_known():
    splits = [{c.split for c in tiling.candidates(8, 3584, 3584, num_sms=n)} for n in (78, 132)]
    assert splits[0] == {1}
    assert splits[1] > {1, 2}


@pytest.mark.parametrize("m", [1, 16, 128, 2048])
def test_adapters_that_fit(m):
    """No tiling can be chosen for an adapter that does not fit."""
    found = []
    for (n, k), rank in itertools.product([(256, 256), (3584, 18944)], range(64, 640, 64)):
        found.append(tiling.fits_adapter(m, n, k, rank=rank))
        if found[-1]:
            assert tiling.choose(m, n, k, rank=rank).block_k >= rank
        else:
            with pytest.raises(ValueError, match=f"an adapter of rank {rank}"):
                tiling.choose(m, n, k, rank=rank)
    assert {True, False} == set(found)


@pytest.mark.parametrize(("rows", "row_tiles"), [(1, 2), (2, 8), (3, 14), (5, 36), (6, 10)])
def test_paired_row_tiles(rows, row_tiles):
    """Each is of one tile; a tile has the same half of as many row tiles of the weight."""
    config = TileConfig(8, warpgroups_n=rows)
    schedule = make_schedule(config, 8, row_tiles, 256, 132, paired=True)
    tiles = [
        [int(schedule.row_tile(n, row)) for row in range(rows)] for n in range(schedule.n_tiles)
    ]
    for tile in tiles:
        assert np.diff(tile).tolist() == [2] * (rows - 1)
    found = sorted(row_tile for tile in tiles for row_tile in tile)
    assert found == list(range(len(found)))
    assert row_tiles <= len(found) < row_tiles + 2 * rows


@pytest.mark.parametrize(
    ("stream_k", "split", "blocks"),
    [
        *itertools.product([False, True], [1], [1, 2, 5, 12, 16, 23, 132]),
        *itertools.product([False], [2, 3, 8], [1, 3, 16, 48, 132]),
    ],
)
@pytest.mark.parametrize("tile_m", [40, pytest.param(64, marks=pytest.mark.slow)])
def test_every_step_has_one_block(tile_m, stream_k, split, blocks):
    """The work tiles and fix-ups of all CTAs, for 3 or 5 tiles of tokens and 7 of outputs."""
    config = TileConfig(tile_m, warpgroups_n=2, stream_k=stream_k, split=split)
    schedule = make_schedule(config, 180, 13, 5 * 128, blocks)
    owners = np.full((schedule.tiles, schedule.steps), -1)
    for block in range(schedule.blocks):
        count = int(schedule.num_work_tiles(block))
        assert count > 0
        work = [[int(i) for i in schedule.work_tile(block, index)] for index in range(count)]
        for index, (tile, first, steps) in enumerate(work):
            assert steps > 0
            assert (owners[tile, first : first + steps] == -1).all()
            owners[tile, first : first + steps] = block
            if stream_k:  # split tiles come first, and of them the one that begins a tile last
                runs = count - schedule.tiles // schedule.blocks
                assert (tile < schedule.split_tiles) == (index < runs)
                assert first > 0 or index >= runs - 1
        whole = [steps == schedule.steps for _, _, steps in work]
        first_stored = int(schedule.first_stored(block))
        assert first_stored == (whole.index(True) if any(whole) else count - 1)
        begins = [first == 0 for _, first, _ in work]
        awaited = int(schedule.xa_awaited_after(block))
        assert awaited == (begins.index(True) if any(begins) else count - 1)
    assert (owners >= 0).all()
    clusters = tiling.clusters_of(schedule.tiles, split, blocks) if split <= schedule.steps else 0
    assert schedule.split == (split if clusters else 1)
    if clusters:
        check_clusters(schedule, clusters, owners)
    assert schedule.split_tiles == (schedule.tiles % schedule.blocks if stream_k else 0)
    if not stream_k:
        return
    counts = np.bincount(owners.reshape(-1))
    assert counts.max() - counts.min() <= 1
    if schedule.split_tiles:
        check_fixups(schedule, owners)


def check_clusters(schedule, clusters, owners):
    """The CTAs of a cluster have the same number of work tiles, and split one tile at most."""
    assert schedule.clusters == clusters
    members = np.arange(schedule.blocks).reshape(clusters, schedule.split)
    counts = [int(schedule.num_work_tiles(block)) for block in range(schedule.blocks)]
    counts = np.array(counts)[members]
    assert (counts == counts[:, :1]).all()
    peers = [tuple(sorted(set(owner))) for owner in owners if len(set(owner)) > 1]
    assert len(set(peers)) == len(peers)
    assert set(peers) <= {tuple(cluster) for cluster in members.tolist()}


def check_fixups(schedule, owners):
    """The peers of a split tile add up all its units, and no CTA overwrites a partial sum."""
    slots, adding = [], np.full((schedule.tiles, schedule.units), -1)
    for block in range(schedule.blocks):
        for index in (0, 1):
            tile, first, peers, begin, end = (int(i) for i in schedule.fixup(block, index))
            if not peers:
                assert begin == end
                continue
            assert index < int(schedule.num_split_work_tiles(block))
            assert tile == int(schedule.work_tile(block, index).tile)
            assert set(owners[tile]) == set(range(first, first + peers))
            assert peers <= schedule.max_peers
            slots.append(int(schedule.partial_slot(block, tile)))
            assert (adding[tile, begin:end] == -1).all()
            adding[tile, begin:end] = block
    assert len(set(slots)) == len(slots)
    assert set(slots) <= set(range(schedule.partial_slots))
    assert schedule.units * schedule.unit == schedule.config.tile_m
    for blocks_of_tile, units in zip(owners, adding, strict=True):
        peers, waiting = set(blocks_of_tile), set(units)
        if len(peers) == 1:
            assert waiting == {-1}
        else:
            assert waiting <= peers
            # `add_split_tiles` says that this many CTAs wait, and reset the lock.
            assert len(waiting) == min(len(peers), schedule.units)


@pytest.mark.parametrize("m", [1, 8, 40, 64, 96, 200, 512, 8192])
@pytest.mark.parametrize("model", cases.MODELS)
def test_there_is_a_tiling_for_every_shape(model, m):
    for layer, (n, k) in cases.MODELS[model].items():
        config = tiling.choose(m, n, k, rank=-(-cases.rank_of(layer, 32) // 64) * 64)
        assert config.problem() is None
        assert config.registers() <= tiling.compute_registers(config.warpgroups)


@pytest.mark.parametrize("m", [12, 40, 80, 104, 160])
def test_narrower_tiles_are_as_many(m):
    narrower = 0
    for entry in tiling._tuned(tiling.NUM_SMS):
        config = TileConfig.from_json(entry["config"])
        narrow = tiling._narrowed(config, m)
        assert -(-m // narrow.tile_m) == -(-m // config.tile_m)
        assert narrow.problem() is None
        assert narrow.registers() <= config.registers()
        assert narrow.receivers >= config.receivers
        narrower += narrow.tile_m < config.tile_m
    assert narrower


def test_a_cluster_keeps_its_receivers():
    config = TileConfig(64, warpgroups_n=2, block_k=256, stages=3, in_flight=1, split=2, ahead=True)
    assert tiling._narrowed(config, 40).tile_m == 48  # both CTAs add up 24 tokens
    config = dataclasses.replace(config, split=4)
    assert tiling._narrowed(config, 40) == config


def test_tiles_without_a_reducer_may_have_its_registers():
    few = list(tiling.candidates(160, 28672, 4096, rank=64))
    assert all(map(tiling.supports_xa_partials, (c for c in few if c.tile_m <= 128)))
    most = tiling.compute_registers(3, tiling.helper_warpgroups(True))
    assert any(c.warpgroups == 3 and c.registers() > most for c in few)


def test_tilings_leave_registers_to_the_reducer():
    for config in tiling.candidates(96, 17920, 1536, rank=64):
        assert config.registers() <= tiling.compute_registers(config.warpgroups, 2)


def test_a_measured_tiling_wins(monkeypatch):
    config = TileConfig(32, warpgroups_n=3)
    other, large = TileConfig(64, warpgroups_n=2), TileConfig(256, warpgroups_n=2, stages=2)
    entries = [
        {"m": m, "n": 512, "k": 1024, "config": c.to_json()}
        for m, c in ((2048, large), (64, other), (32, config))
    ]
    table = {"device": "d", "multiprocessors": 7, "jax": "1.2", "entries": entries}
    table["kernel"] = tiling.kernel_digest()
    monkeypatch.setattr(tiling, "_tables", lambda: {"d.json": table})
    for cached in (tiling.choose, tiling._tuned):
        cached.cache_clear()
    assert tiling.choose(32, 512, 1024, num_sms=7) == config
    assert tiling.choose(64, 512, 1024, num_sms=7) == other
    assert tiling.choose(9999, 512, 1024, num_sms=7) == large
    # As wide as it must be for as many tiles of tokens.
    for m, measured, tile_m in ((20, config, 24), (33, other, 40), (600, large, 200)):
        narrowed = dataclasses.replace(measured, tile_m=tile_m)
        assert tiling.choose(m, 512, 1024, num_sms=7) == narrowed
    # A stage must hold the adapter.
    assert tiling.choose(20, 512, 1024, rank=192, num_sms=7).block_k >= 192
    assert tiling.choose(20, 512, 1024, num_sms=8).tile_m == 24
    assert tiling.verified("d", "1.2")
    assert not tiling.verified("d", "1.3")
    assert not tiling.verified("e", "1.2")
    table["also_verified"] = ["e"]
    assert tiling.verified("e", "1.2")
    monkeypatch.setattr(tiling, "kernel_digest", lambda: "another kernel's")
    assert not tiling.verified("d", "1.2")
    for cached in (tiling.choose, tiling._tuned):
        cached.cache_clear()
