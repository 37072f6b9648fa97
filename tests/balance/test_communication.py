"""Balance against communication: the two ends of the curve, and its shape."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypergraphs import count_instances
from hypothesis import given, settings

from moe_ref.balance import schedule
from moe_ref.balance.communication import communication_aware, received, trade_off_curve
from moe_ref.balance.loads import LoadModel
from moe_ref.placement import max_density, symmetric

ALPHAS = [0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 100.0]


@pytest.mark.parametrize(("ranks", "experts", "node"), [(8, 32, 4), (8, 32, 8), (8, 32, 1), (16, 64, 8)])
@pytest.mark.parametrize("skew", [0.3, 1.0])
def test_the_curve(ranks: int, experts: int, node: int, skew: float) -> None:
    placement = symmetric(ranks, experts, 2).placement
    counts = next(LoadModel(ranks, experts, skew, rows_per_rank=1024).batches(1))
    curve = trade_off_curve(counts, placement, ALPHAS, node)
    optimum = max_density(counts.sum(axis=0), placement).value
    unit = 1e-6 * counts.sum() / ranks

    # No weight on communication is the plain optimum.
    assert abs(curve[0].compute - optimum) <= unit
    assert curve[0].plan.max_load == math.ceil(optimum)
    for before, after in pairwise(curve):
        assert after.compute >= before.compute - unit
        assert after.communication <= before.communication + 9 * unit
    # The sum of both is what was minimised: no other point of the curve does better at its own alpha.
    for point in curve:
        cost = point.compute + point.alpha * point.communication
        for other in curve:
            assert cost <= other.compute + point.alpha * other.communication + unit * (1 + 9 * point.alpha)
    assert curve[-1].communication < curve[0].communication


@settings(max_examples=60)
@given(count_instances(max_ranks=6, max_experts=6))
def test_plans_keep_their_promise_in_whole_rows(instance) -> None:
    placement, counts = instance
    point = communication_aware(counts, placement, 0.5, 1)
    assert (point.plan.counts_PE == counts).all()
    slack = 1e-6 * counts.sum() + placement.num_experts + 1
    assert point.compute - slack <= point.plan.max_load <= point.compute + slack
    # Rounding moves less than one row per replica, each of weight 9.
    replicas = int(placement.replica_counts.sum())
    assert point.plan_communication <= point.communication + 9 * (3 * replicas + slack)


def test_fewer_rows_cross_nodes_than_without_asking() -> None:
    placement = symmetric(8, 32, 2).placement
    counts = next(LoadModel(8, 32, 0.5).batches(1))
    plain = received(schedule(counts, placement), 4)
    aware = communication_aware(counts, placement, 0.01, 4)
    assert aware.plan.max_load == schedule(counts, placement).max_load
    assert aware.plan_communication < 0.9 * plain.max()
    assert aware.plan_communication == received(aware.plan, 4).max()


def test_received_counts_by_hand() -> None:
    placement = symmetric(4, 4, 4).placement
    counts = np.zeros((4, 4), dtype=np.int64)
    counts[0, 0] = 8  # two rows for each rank: 0 keeps two, 1 is on its node, 2 and 3 are not
    assert received(schedule(counts, placement), 2).tolist() == [0.0, 2.0, 18.0, 18.0]
