"""Several scheduling groups in one world."""

from __future__ import annotations

import numpy as np
import pytest

from moe_ref.balance import schedule
from moe_ref.balance.groups import balance_cost, repeat_placement, split_placement
from moe_ref.balance.loads import LoadModel
from moe_ref.placement import symmetric


@pytest.mark.parametrize("method", ["flow", "flow_compiled", "lp"])
def test_groups_keep_their_tokens_and_are_balanced_alone(method: str) -> None:
    group = symmetric(4, 16, 2).placement
    world = repeat_placement(group, 3)
    counts = next(LoadModel(12, 16, 0.4, seed=3).batches(1))
    plan = schedule(counts, world, method, group_size=4)
    assert (plan.counts_PE == counts).all()
    by_slot = plan.quota_by_slot().sum(axis=2)
    for g in range(3):
        ranks = slice(4 * g, 4 * g + 4)
        alone = schedule(counts[ranks], group, method)
        assert plan.rank_loads[ranks].tolist() == alone.rank_loads.tolist()
        outside = by_slot[ranks].sum() - by_slot[ranks, ranks].sum()
        assert outside == 0
    assert plan.certificate <= set(range(12))


def test_one_group_is_the_whole_world() -> None:
    placement = symmetric(4, 16, 2).placement
    counts = next(LoadModel(4, 16, 0.4).batches(1))
    assert schedule(counts, placement, group_size=4).digest() == schedule(counts, placement).digest()
    assert balance_cost(counts, placement, 4) == 1.0


def test_groups_cost_balance_where_ranks_differ() -> None:
    """A group whose ranks bring twice the tokens stays twice as busy; one group over all ranks evens it out."""
    world = repeat_placement(symmetric(8, 32, 2).placement, 4)
    counts = next(LoadModel(32, 32, 0.5).batches(1))
    counts[:8] *= 2
    whole, grouped = schedule(counts, world), schedule(counts, world, group_size=8)
    assert grouped.max_load / whole.max_load == pytest.approx(8 / 5, rel=0.01)
    assert balance_cost(counts, world, 8) == grouped.max_load / whole.max_load
    assert whole.is_optimal


@pytest.mark.parametrize("first", [0, 4])
def test_the_certificate_is_that_of_the_busiest_group(first: int) -> None:
    world = repeat_placement(symmetric(4, 16, 2).placement, 2)
    counts = np.ones((8, 16), dtype=np.int64)
    counts[first : first + 4, 3] = 1000
    plan = schedule(counts, world, group_size=4)
    assert plan.certificate == {first + rank for rank in symmetric(4, 16, 2).placement.ranks_of_expert[3]}


def test_replica_numbers_of_the_world() -> None:
    world = repeat_placement(symmetric(4, 8, 2).placement, 2)
    for g, (part, number_ED) in enumerate(split_placement(world, 4)):
        for expert, ranks in enumerate(part.ranks_of_expert):
            for j, rank in enumerate(ranks):
                assert world.ranks_of_expert[expert][number_ED[expert, j]] == 4 * g + rank
