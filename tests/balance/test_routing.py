"""Quotas per source rank: exact, and as local as the division allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypergraphs import count_instances
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ref.balance import schedule
from moe_ref.balance.flow import solve
from moe_ref.balance.loads import LoadModel
from moe_ref.balance.routing import local_rows, route
from moe_ref.placement import Placement, symmetric


@settings(max_examples=300)
@given(count_instances(), st.sampled_from(["flow", "flow_compiled", "lp"]))
def test_quotas_are_exact(instance, method: str) -> None:
    placement, counts = instance
    plan = schedule(counts, placement, method)
    assert plan.quota_PED.min() >= 0
    assert (plan.counts_PE == counts).all()
    assert (plan.quota_PED[:, placement.rank_ED < 0] == 0).all()
    assert plan.rank_loads.sum() == counts.sum()
    assert plan.is_optimal
    assert plan.quota_by_slot().sum() == counts.sum()


@settings(max_examples=200)
@given(count_instances())
def test_compiled_plan_is_the_same_plan(instance) -> None:
    placement, counts = instance
    plain, compiled = schedule(counts, placement), schedule(counts, placement, "flow_compiled")
    assert plain.digest() == compiled.digest()
    assert plain.certificate == compiled.certificate


@settings(max_examples=200)
@given(count_instances(), st.sampled_from([None, 1, 2, 3]))
def test_local_first_then_node_and_quotas_always_win(instance, ranks_per_node: int | None) -> None:
    placement, counts = instance
    rows_ED = solve(counts.sum(axis=0), placement).rows_ED
    quota = route(counts, rows_ED, placement, ranks_per_node)
    assert (quota.sum(axis=0) == rows_ED).all()
    assert (quota.sum(axis=2) == counts).all()
    own = local_rows(counts, placement)
    for expert, ranks in enumerate(placement.ranks_of_expert):
        for j, rank in enumerate(ranks):
            # A rank's own rows take all the room of its replica that they can.
            assert quota[rank, expert, j] == min(own[expert, j], rows_ED[expert, j])
            if ranks_per_node is None:
                continue
            # A replica that takes rows from another node has no sender left on its own that went elsewhere.
            node = rank // ranks_per_node
            here = [p for p in range(len(counts)) if p // ranks_per_node == node]
            away = [i for i, other in enumerate(ranks) if other // ranks_per_node != node]
            from_away = quota[:, expert, j].sum() - quota[here, expert, j].sum()
            assert from_away == 0 or quota[np.ix_(here, [expert], away)].sum() == 0


def rows_at_home(quota_PED: np.ndarray, placement: Placement) -> int:
    """Rows that are computed on the rank where they start."""
    return sum(quota_PED[r, e, j] for e, ranks in enumerate(placement.ranks_of_expert) for j, r in enumerate(ranks))


def balance_first(counts: np.ndarray, placement: Placement) -> np.ndarray:
    """Quotas of the rival that divides the loads without knowing where rows start, and is local afterwards."""
    return route(counts, solve(counts.sum(axis=0), placement).rows_ED, placement)


def test_every_row_that_starts_beside_a_replica_stays() -> None:
    """8 ranks, 32 experts, two replicas, skew 0.5: the optimal maximum load costs no locality.

    No plan keeps more rows at home than start on a rank with a replica of their expert: of routes that don't depend on
    their rank two eighths, as many as an expert has replicas. Plans reach that in every batch. Balance first does in
    none: where it leaves a replica fewer rows than start beside it, an eighth of the expert's, the rest must travel.
    """
    placement, shares = symmetric(8, 32, 2).placement, []
    for counts in LoadModel(8, 32, 0.5).batches(40):
        plan, most = schedule(counts, placement), int(local_rows(counts, placement).sum())
        assert plan.max_load == solve(counts.sum(axis=0), placement).max_load
        assert plan.is_optimal
        assert rows_at_home(plan.quota_PED, placement) == most
        assert rows_at_home(balance_first(counts, placement), placement) < most
        shares.append(plan.local_share)
    assert np.mean(shares) == pytest.approx(2 / 8, abs=0.001)


def test_a_division_that_knows_where_rows_start_keeps_all_of_them() -> None:
    """Every rank holds every expert and sends to one alone: all rows can stay, and do, at a load of 100 on every rank.

    Loads are the same whichever expert a rank sends to, so balance first divides them the same in all 8 cases. An
    expert's 100 rows start on every rank once, and on rank r as many stay as its replica there was given: 100 in the 8
    cases together. That is an eighth, whatever the division.
    """
    ranks, rows, blind = 8, 100, 0
    placement = Placement.from_replicas([list(range(ranks))] * ranks, ranks)
    for shift in range(ranks):
        counts = rows * np.roll(np.eye(ranks, dtype=np.int64), shift, axis=1)
        plan = schedule(counts, placement)
        assert plan.max_load == rows
        assert rows_at_home(plan.quota_PED, placement) == ranks * rows
        blind += rows_at_home(balance_first(counts, placement), placement)
    assert blind == ranks * rows


@pytest.mark.parametrize("sender", [0, 3])
def test_only_one_rank_has_rows(sender: int) -> None:
    placement = symmetric(4, 8, 2).placement
    counts = np.zeros((4, 8), dtype=np.int64)
    counts[sender] = 100
    plan = schedule(counts, placement)
    assert plan.rank_loads.tolist() == [200] * 4
    assert plan.local_share == 0.25
