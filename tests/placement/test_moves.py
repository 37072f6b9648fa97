"""Transfers between placements: every replica arrives, none is lost on the way, links are not shared."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ref.placement import Placement, symmetric
from moe_ref.placement.asymmetric import greedy_replica_counts, random_arrangement
from moe_ref.placement.moves import MoveCost, plan_moves, relabelled

COST = MoveCost(bytes_per_replica=1000, ranks_per_node=2)


def replay(old: Placement, new: Placement) -> list[set[int]]:
    """Carry a plan out and check it round by round; the experts that each rank holds in the end."""
    plan = plan_moves(old, new, COST)
    held = [set(experts) for experts in old.experts_of_rank]
    spare = max(old.slots, new.slots) + 1
    for number, moves in groupby(plan.moves, key=lambda move: move.round):
        moves = list(moves)
        assert len({m.source for m in moves}) == len({m.target for m in moves}) == len(moves)
        assert number < plan.rounds
        for move in moves:
            assert move.expert in held[move.source], "sent by a rank that doesn't hold it"
            assert move.expert not in held[move.target]
            if move.drops is not None:
                assert move.drops not in new.experts_of_rank[move.target]
                held[move.target].remove(move.drops)
                assert any(move.drops in h for h in held), f"last copy of expert {move.drops} dropped"
        for move in moves:
            held[move.target].add(move.expert)
            assert new.experts_of_rank[move.target][move.slot] == move.expert
        assert all(len(h) <= spare for h in held)
    missing = sum(len(set(new.experts_of_rank[r]) - set(old.experts_of_rank[r])) for r in range(new.num_ranks))
    assert len(plan.moves) == missing
    assert plan.num_bytes == 1000 * missing
    return held


def arrives(old: Placement, new: Placement) -> bool:
    """Whether every rank holds its new experts in the end."""
    return all(set(wanted) <= held for wanted, held in zip(new.experts_of_rank, replay(old, new), strict=True))


@settings(max_examples=200)
@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 10**6), st.data())
def test_random_placements(ranks: int, slots: int, seed: int, data) -> None:
    experts = data.draw(st.integers(slots, ranks * slots))
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(2):
        load = rng.integers(1, 1000, experts)
        counts = greedy_replica_counts(load, ranks * slots, ranks)
        made.append(random_arrangement(counts, load, ranks, slots, rng))
    for old, new in ((made[0], made[1]), (made[0], made[0]), (made[0], relabelled(made[1], made[0]))):
        assert arrives(old, new)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_cycle_of_single_replicas_needs_the_spare_slot(ranks: int) -> None:
    old = Placement.contiguous(2 * ranks, ranks)
    new = Placement.from_replicas([[(r[0] + 1) % ranks] for r in old.ranks_of_expert], ranks)
    assert arrives(old, new)
    assert all(move.source == (move.target - 1) % ranks for move in plan_moves(old, new, COST).moves)


def test_near_sources_first_and_time_by_the_slowest_of_a_round() -> None:
    old = Placement.from_replicas([[0, 2], [1], [3]], 4)
    new = Placement.from_replicas([[0, 3], [1], [2]], 4)
    plan = plan_moves(old, new, COST)
    assert [(m.expert, m.source, m.target) for m in plan.moves] == [(0, 2, 3), (2, 3, 2)]
    cost = MoveCost(1000, intra_bytes_per_s=100.0, inter_bytes_per_s=10.0, ranks_per_node=2, round_latency_s=1.0)
    assert cost.seconds(plan) == pytest.approx(plan.rounds * (10.0 + 1.0))
    far = plan_moves(Placement.from_replicas([[0], [3]], 4), Placement.from_replicas([[0, 2], [3]], 4), COST)
    assert cost.seconds(far) == pytest.approx(100.0 + 1.0)


def test_relabelling_keeps_the_graph_and_saves_moves() -> None:
    placement = symmetric(8, 32, 2).placement
    renamed = Placement.from_replicas([[(r + 3) % 8 for r in ranks] for ranks in placement.ranks_of_expert], 8)
    assert plan_moves(placement, renamed, COST).moves
    back = relabelled(renamed, placement)
    assert plan_moves(placement, back, COST).moves == ()
    assert back == placement


def test_what_can_not_be_planned() -> None:
    with pytest.raises(ValueError, match="32 experts on 8 ranks and of 64 on 8"):
        plan_moves(symmetric(8, 32, 2).placement, symmetric(8, 64, 2).placement, COST)
    for bad in ({"bytes_per_replica": 0}, {"ranks_per_node": 0}, {"inter_bytes_per_s": 0.0}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} is 0"):
            MoveCost(**{"bytes_per_replica": 1, **bad})
