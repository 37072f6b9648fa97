"""The geometry of a call: every routed row has one segment, one tile, one heap row; no two rows share one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ref.balance import schedule
from moe_ref.layout import FixedLayout
from moe_ref.placement import Placement
from moe_ref.runtime.callplan import count_experts, make_call
from moe_ref.runtime.tasks import Dispatch, TileShape
from moe_ref.runtime.workload import Workload


@st.composite
def _cases(draw):
    ranks, experts, top_k = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    ids = [rng.integers(-1, experts, size=(draw(st.integers(0, 20)), top_k)) for _ in range(ranks)]
    tile = draw(st.sampled_from([1, 3, 8]))
    shape = TileShape(8, 12, top_k, tile_rows=tile, tile_columns=5, token_rows=draw(st.sampled_from([1, 4])))
    return ids, Placement.contiguous(experts, ranks), shape, draw(st.booleans()), draw(st.integers(0, 3))


@settings(max_examples=150, deadline=None)
@given(_cases())
def test_every_row_has_one_place_and_comes_home(case):
    ids, placement, shape, fixed, epoch = case
    capacity = max([int(count_experts(i, placement.num_experts).max()) for i in ids] + [1]) if fixed else None
    call = make_call(ids, placement, shape, capacity=capacity, epoch=epoch)
    for rank, expert_SK in enumerate(ids):
        routes = np.concatenate([s.route_N for s in call.outgoing[rank]] or [np.zeros(0, dtype=int)])
        assert sorted(routes) == list(np.flatnonzero(expert_SK.ravel() >= 0))
        by_token = np.zeros(call.token_tiles(rank), dtype=int)
        for segment in call.outgoing[rank]:
            tile = call.tiles[segment.owner][segment.row_tile]
            assert segment in tile.segments
            assert set(expert_SK.ravel()[segment.route_N]) == {tile.expert}
            assert tile.first_row <= segment.first_row
            assert segment.first_row + segment.rows <= tile.first_row + shape.tile_rows
            np.add.at(by_token, segment.token_tiles, segment.token_rows)
        assert (by_token == call.choices[rank]).all()

        used = [
            r for t in call.tiles[rank].values() for s in t.segments for r in range(s.first_row, s.first_row + s.rows)
        ]
        assert len(used) == len(set(used)), "two rows share a heap row"
        assert sorted(used) == sorted(call.layout.receive_rows(rank).tolist()) or isinstance(call.layout, FixedLayout)
        assert all(row < call.layout.heap_rows(rank) for row in used)
        words = [task.word for task in call.tasks(rank)]
        assert len(words) == len(set(words))
        assert len(words) - len(call.dispatch_tasks(rank)) == call.total_tasks(rank)


def test_fixed_tiles_are_where_the_layout_says_and_hold_one_source():
    work = Workload(4, 50, 8, top_k=2, hidden=8, intermediate=8, tile_rows=4, layout="fixed")
    call = work.call(epoch=1)
    assert isinstance(call.layout, FixedLayout)
    assert call.layout.side == 1
    for rank in range(4):
        for tile in call.tiles[rank].values():
            (segment,) = tile.segments
            inside = segment.first_row - call.layout.first_row(segment.source, rank, tile.slot)
            assert 0 <= inside < call.layout.capacity
            assert inside % 4 == 0
        rows = [r for t in call.tiles[rank].values() for r in range(t.first_row, t.first_row + t.rows)]
        assert sorted(rows) == sorted(call.layout.receive_rows(rank).tolist())


def test_replicas_get_their_quota():
    placement = Placement.from_replicas([[0, 1], [1], [2, 0], [2]], 3)
    rng = np.random.default_rng(0)
    ids = [rng.choice(4, size=(40, 1), p=[0.7, 0.1, 0.1, 0.1]) for _ in range(3)]
    plan = schedule(np.stack([count_experts(i, 4) for i in ids]), placement)
    call = make_call(ids, placement, TileShape(8, 8, 1, tile_rows=4, tile_columns=8, token_rows=4), plan)
    loads = [sum(t.rows for t in call.tiles[r].values()) for r in range(3)]
    assert loads == plan.rank_loads.tolist()
    assert not call.early_dispatch


def test_dispatch_bytes_are_exactly_the_remote_rows():
    call = Workload(4, 100, 16, top_k=3, hidden=64, intermediate=32, tile_rows=16).call()
    wire = sum(t.cost(call.shape).wire_bytes for r in range(4) for t in call.tasks(r) if isinstance(t, Dispatch))
    home = sum(t.cost(call.shape).wire_bytes for r in range(4) for t in call.tasks(r)) - wire
    remote = sum(
        int((np.array([call.layout.quota_PGX[p, g].sum() for g in range(4) if g != p])).sum()) for p in range(4)
    )
    assert wire == home == remote * 64 * 2 == call.remote_rows() * 64 * 2


def test_nonsense_is_refused_by_name():
    placement, shape = Placement.contiguous(4, 2), TileShape(8, 8, 2)
    good = np.zeros((3, 2), dtype=np.int64)
    with pytest.raises(ValueError, match="routing of 1 ranks"):
        make_call([good], placement, shape)
    with pytest.raises(ValueError, match=r"routing of rank 1 has shape \[3, 1\]"):
        make_call([good, good[:, :1]], placement, shape)
    with pytest.raises(ValueError, match="rank 0 names an expert outside"):
        make_call([good + 4, good], placement, shape)
    with pytest.raises(ValueError, match="rows to slot 0 of rank 0"):
        make_call([good, good], placement, TileShape(8, 8, 2, tile_rows=2), capacity=4)


def test_capacity_keeps_the_first_routes_and_skew_skews():
    work = Workload(2, 1000, 8, top_k=2, capacity_factor=0.5)
    for ids in work.routing():
        counts = count_experts(ids, 8)
        assert counts.max() <= work.capacity() == 125
        assert (ids == -1).sum() == 2000 - counts.sum() > 0
    flat = Workload(1, 4000, 16).routing()[0]
    steep = Workload(1, 4000, 16, skew=1.5).routing()[0]
    assert count_experts(steep, 16).max() > 2 * count_experts(flat, 16).max()
    assert all(len(set(row)) == 2 for row in flat.tolist() + steep.tolist())
