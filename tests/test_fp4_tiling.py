"""Which tiling serves a product, and which block of threads computes what of it."""

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
        (198, 2, 132, 66),  # a whole one for each block, and one to split
        (132, 2, 132, 0),
        (36, 3, 132, 36),
        (40, 3, 132, 0),  # the last would wait for a second wave
        (140, 4, 132, 28),
        (16, 8, 132, 0),
        (5, 4, 4, 1),
        (5, 1, 132, 0),
        (1, 8, 4, 0),
        (40, 4, 114, 0),  # a device of which it is not known
    ],
)
def test_clusters(tiles, split, num_sms, clusters):
    assert tiling.clusters_of(tiles, split, num_sms) == clusters


@pytest.mark.parametrize(
    ("stages", "m", "row_tiles", "k", "makes"),
    [
        (4, 32, 432, 5120, True),
        (1, 32, 432, 5120, False),  # no stage beside the one with the tokens
        (4, 40, 432, 5120, False),  # two tiles of tokens
        (4, 32, 432, 5184, False),  # half a share
        (4, 32, 432, 384, False),  # fewer than warps that add them up
        (4, 32, 4, 5120, False),  # one block, for 80 units of which a stage holds two
    ],
)
def test_who_makes_shares(stages, m, row_tiles, k, makes):
    config = TileConfig(32, warpgroups_n=4, block_k=256, stages=stages)
    assert make_schedule(config, m, row_tiles, k, 132).supports_lora_shrink(64, k) == makes


def test_what_a_gpu_tests_of_adapters():
    """Each case is what it says, and every way to make shares is among them."""
    made = []
    for *case, inside in adapter_cases.CASES:
        plan, (_, _, _, k, rank) = adapter_cases.schedule_of(*case), case
        assert plan.config.problem() is None, case
        assert plan.supports_lora_shrink(rank, k) == inside, case
        if inside:
            made.append((plan, plan.turns_of_shares(rank, k)))
    many = [plan for plan, turns in made if turns > plan.config.warpgroups]
    assert any(plan.split == 2 and plan.adders < plan.blocks for plan in many)
    assert any(plan.shared for plan in many)
    assert any(plan.config.warpgroups > 1 for plan in many)
    assert any(1 < turns <= plan.config.warpgroups for plan, turns in made)


def test_clusters_are_for_devices_that_are_known():
    splits = [{c.split for c in tiling.candidates(8, 3584, 3584, num_sms=n)} for n in (78, 132)]
    assert splits[0] == {1}
    assert splits[1] > {1, 2}


@pytest.mark.parametrize("m", [1, 16, 128, 2048])
def test_room_for_an_adapter(m):
    """Where there is none, nothing can be chosen."""
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
    plan = make_schedule(TileConfig(8, warpgroups_n=rows), 8, row_tiles, 256, 132, paired=True)
    tiles = [[int(plan.row_tile(n, row)) for row in range(rows)] for n in range(plan.n_tiles)]
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
@pytest.mark.parametrize("tile_m", [40, 64])
def test_every_step_has_one_block(tile_m, stream_k, split, blocks):
    """Who computes what, and who adds up what, for 3 or 5 tiles of tokens and 7 of rows."""
    config = TileConfig(tile_m, warpgroups_n=2, stream_k=stream_k, split=split)
    plan = make_schedule(config, 180, 13, 5 * 128, blocks)
    owners = np.full((plan.tiles, plan.steps), -1)
    for block in range(plan.blocks):
        pieces = int(plan.pieces(block))
        assert pieces > 0
        for index in range(pieces):
            tile, first, count = (int(i) for i in plan.piece(block, index))
            assert count > 0
            assert (owners[tile, first : first + count] == -1).all()
            owners[tile, first : first + count] = block
            if stream_k:  # what is shared comes first, and of that what begins a tile comes last
                shared = pieces - plan.tiles // plan.blocks
                assert (tile < plan.shared) == (index < shared)
                assert first > 0 or index >= shared - 1
        whole = [int(plan.piece(block, index)[2]) == plan.steps for index in range(pieces)]
        first_stored = int(plan.first_stored(block))
        assert first_stored == (whole.index(True) if any(whole) else pieces - 1)
        begins = [int(plan.piece(block, index)[1]) == 0 for index in range(pieces)]
        awaited_behind = int(plan.awaited_behind(block))
        assert awaited_behind == (begins.index(True) if any(begins) else pieces - 1)
    assert (owners >= 0).all()
    clusters = tiling.clusters_of(plan.tiles, split, blocks) if split <= plan.steps else 0
    assert plan.split == (split if clusters else 1)
    if clusters:
        assert plan.clusters == clusters
        members = np.arange(plan.blocks).reshape(clusters, split)
        pieces = np.array([int(plan.pieces(block)) for block in range(plan.blocks)])[members]
        assert (pieces == pieces[:, :1]).all()
        sharers = [tuple(sorted(set(owner))) for owner in owners if len(set(owner)) > 1]
        assert len(set(sharers)) == len(sharers)
        assert set(sharers) <= {tuple(cluster) for cluster in members.tolist()}
    assert plan.shared == (plan.tiles % plan.blocks if stream_k else 0)
    if not stream_k:
        return
    counts = np.bincount(owners.reshape(-1))
    assert counts.max() - counts.min() <= 1
    if not plan.shared:
        return
    slots, adders = [], np.full((plan.tiles, plan.units), -1)
    for block in range(plan.blocks):
        for index in (0, 1):
            tile, first, sharers, begin, end = (int(i) for i in plan.share(block, index))
            if not sharers:
                assert begin == end
                continue
            assert index < int(plan.shared_pieces(block))
            assert tile == int(plan.piece(block, index)[0])
            assert set(owners[tile]) == set(range(first, first + sharers))
            assert sharers <= plan.most_sharers
            slots.append(int(plan.slot(block, tile)))
            assert (adders[tile, begin:end] == -1).all()
            adders[tile, begin:end] = block
    # A block never overwrites a partial sum.
    assert len(set(slots)) == len(slots)
    assert set(slots) <= set(range(plan.slots))
    assert plan.units * plan.unit == tile_m
    for tile, blocks_of_tile in enumerate(owners):
        sharers, adding = set(blocks_of_tile), set(adders[tile])
        if len(sharers) == 1:
            assert adding == {-1}
        else:
            assert adding <= sharers
            # As many wait, and count themselves out, as `add_shared_tiles` says.
            assert len(adding) == min(len(sharers), plan.units)


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
    assert tiling._narrowed(config, 40).tile_m == 48  # both blocks add up 24 tokens
    config = dataclasses.replace(config, split=4)
    assert tiling._narrowed(config, 40) == config


def test_tilings_leave_registers_to_who_adds_up_shares():
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
    monkeypatch.setattr(tiling, "kernel_digest", lambda: "another kernel's")
    assert not tiling.verified("d", "1.2")
    for cached in (tiling.choose, tiling._tuned):
        cached.cache_clear()
