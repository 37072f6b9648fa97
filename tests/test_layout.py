"""Layouts: every row has one home, no two writers meet, and the shared arithmetic is what the layouts use."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ref.layout import (
    ROUNDS,
    SIDES,
    CompactLayout,
    FixedLayout,
    align_up,
    ceil_div,
    compact_row,
    fixed_row,
    return_row,
)


@st.composite
def quotas(draw) -> np.ndarray:
    ranks, slots = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    values = draw(st.lists(st.integers(0, 9), min_size=ranks * ranks * slots, max_size=ranks * ranks * slots))
    return np.array(values, dtype=np.int64).reshape(ranks, ranks, slots)


@given(quotas(), st.sampled_from([1, 2, 4, 16]))
def test_compact_is_a_bijection_onto_its_segments(quota_PGX: np.ndarray, tile_rows: int) -> None:
    layout = CompactLayout(tile_rows, quota_PGX)
    ranks, _, slots = quota_PGX.shape
    for rank in range(ranks):
        rows = layout.receive_rows(rank)
        covered = [first + i for _, first, count in layout.segments(rank) for i in range(count)]
        assert len(set(rows.tolist())) == len(rows) == int(quota_PGX[:, rank].sum())
        assert sorted(rows.tolist()) == sorted(covered)
        assert all(first % tile_rows == 0 for _, first, _ in layout.segments(rank))
        assert rows.max(initial=-1) < layout.heap_rows(rank)
        assert layout.heap_rows(rank) < int(quota_PGX[:, rank].sum()) + slots * tile_rows
        # expert-major, then source rank, then token: the exact order, spelled out
        position = iter(rows.tolist())
        for source, slot in itertools.product(range(ranks), range(slots)):
            for index in range(int(quota_PGX[source, rank, slot])):
                tile_start = sum(ceil_div(int(quota_PGX[:, rank, x].sum()), tile_rows) for x in range(slot))
                before = int(quota_PGX[:source, rank, slot].sum())
                assert next(position) == compact_row(tile_start, before, index, tile_rows)
                assert layout.first_row(source, rank, slot) + index == compact_row(tile_start, before, index, tile_rows)


@given(quotas(), st.sampled_from([0, 1]))
def test_fixed_has_no_write_conflicts(quota_PGX: np.ndarray, side: int) -> None:
    capacity = int(quota_PGX.max()) + 1
    layout = FixedLayout(capacity, quota_PGX, side)
    for rank in range(layout.num_ranks):
        arriving, coming_home = layout.receive_rows(rank).tolist(), layout.home_rows(rank).tolist()
        assert len(set(arriving)) == len(arriving)
        assert len(set(coming_home)) == len(coming_home)
        assert not set(arriving) & set(coming_home), "round 1 must not touch what round 0 wrote"
        assert max([*arriving, *coming_home], default=-1) < layout.heap_rows(rank)
        covered = [first + i for _, first, count in layout.segments(rank) for i in range(count)]
        assert sorted(covered) == sorted(arriving)


@pytest.mark.parametrize(("ranks", "slots", "capacity"), [(1, 1, 1), (2, 3, 4), (4, 2, 3)])
def test_fixed_coordinates_are_a_bijection(ranks: int, slots: int, capacity: int) -> None:
    """Enumeration: every coordinate (source, round, side, slot, index) has a row of its own, and none is left over."""
    everything = itertools.product(range(ranks), range(ROUNDS), range(SIDES), range(slots), range(capacity))
    rows = [fixed_row(p, r, b, x, c, slots, capacity) for p, r, b, x, c in everything]
    assert sorted(rows) == list(range(ranks * ROUNDS * SIDES * slots * capacity))


def test_return_rows_are_a_bijection() -> None:
    assert sorted(return_row(s, k, 3) for s in range(5) for k in range(3)) == list(range(15))


def test_offsets_beyond_32_bits() -> None:
    """Row numbers times H pass 2^31 elements and more; nothing wraps (kind 7 of the reported troubles)."""
    quota_PGX = np.full((2, 2, 2), 3_000_000_000, dtype=np.int64)
    layout = CompactLayout(128, quota_PGX)
    assert layout.first_row(1, 0, 1) == align_up(6_000_000_000, 128) + 3_000_000_000
    assert layout.heap_rows(0) == 2 * align_up(6_000_000_000, 128)
    assert FixedLayout(3_000_000_000, quota_PGX).heap_rows(0) == 2 * ROUNDS * SIDES * 2 * 3_000_000_000


def test_overflow_of_the_fixed_layout_is_named() -> None:
    quota_PGX = np.zeros((2, 2, 3), dtype=np.int64)
    quota_PGX[1, 0, 2] = 7
    with pytest.raises(ValueError, match=r"rank 1 sends 7 rows to slot 2 of rank 0.*has 4 per source"):
        FixedLayout(4, quota_PGX)
