"""The placement manager: moves when it pays, and says why."""

from __future__ import annotations

import numpy as np
import pytest

from moe_ref.balance.loads import LoadModel
from moe_ref.placement import by_name, symmetric
from moe_ref.placement.adaptive import PlacementManager
from moe_ref.placement.asymmetric import mean_ratio
from moe_ref.placement.moves import MoveCost, plan_moves

COST = MoveCost(10**6)


def loads(skew: float, steps: int, seed: int = 0) -> np.ndarray:
    return np.stack([c.sum(axis=0) for c in LoadModel(8, 32, skew, seed=seed).batches(steps)])


def manager(**changes) -> PlacementManager:
    arguments = {"placement": symmetric(8, 32, 2).placement, "cost": COST, "step_s": 0.1, "interval": 10, **changes}
    return PlacementManager(**arguments)


def test_balanced_loads_move_nothing_and_checks_become_rarer() -> None:
    watched = manager(max_interval=40)
    steps = [i + 1 for i, load in enumerate(loads(0.3, 150)) if watched.observe(load)]
    assert steps == [10, 30, 70, 110, 150]
    assert watched.placement == symmetric(8, 32, 2).placement
    assert all(not d.moved and d.plan is None and "within 1.02" in d.reason for d in watched.log)


def test_skewed_loads_are_placed_anew_and_balanced_after() -> None:
    watched = manager()
    batches = loads(1.5, 40)
    old = watched.placement
    decisions = [d for load in batches[:10] if (d := watched.observe(load))]
    (decision,) = decisions
    assert decision.moved
    assert decision.ratio > 1.5
    assert decision.candidate_ratio < 1.01
    assert decision.gain_s > decision.cost_s > 0
    assert decision.plan == plan_moves(old, watched.placement, COST)
    assert mean_ratio(old, batches[10:]) > 1.5
    assert mean_ratio(watched.placement, batches[10:]) < 1.005
    assert watched.log == decisions


def test_a_move_that_costs_more_than_it_saves_is_not_made() -> None:
    watched = manager(cost=MoveCost(10**12))
    decision = next(d for load in loads(1.5, 10) if (d := watched.observe(load)))
    assert not decision.moved
    assert decision.plan is not None
    assert decision.cost_s > decision.gain_s > 0
    assert decision.reason.endswith("not worth it")
    assert watched.placement == symmetric(8, 32, 2).placement


def test_a_shift_of_popularity_is_noticed() -> None:
    watched = manager(window=10)
    for load in loads(1.5, 20, seed=1):
        watched.observe(load)
    settled = watched.placement
    shifted = loads(1.5, 20, seed=2)
    assert mean_ratio(settled, shifted) > 1.05
    decisions = [d for load in shifted if (d := watched.observe(load))]
    assert any(d.moved for d in decisions)
    assert mean_ratio(watched.placement, shifted) < 1.01


def test_managers_that_saw_the_same_propose_the_same() -> None:
    first, second = manager(), manager(placement=by_name("symmetric", 8, 32, 2).placement)
    for load in loads(1.3, 30):
        assert first.observe(load) == second.observe(load.tolist())
    assert first.placement == second.placement


def test_always_moves_at_every_check_to_measure_the_cost() -> None:
    watched = manager(always=True)
    decisions = [d for load in loads(0.3, 40) if (d := watched.observe(load))]
    assert [d.step for d in decisions] == [10, 20, 30, 40]
    assert all(d.moved and d.plan for d in decisions)
    assert sum(d.cost_s for d in decisions) > 0


def test_prediction_is_an_average_of_shares() -> None:
    watched = manager(window=2)
    assert (watched.prediction() == 1).all()
    for expert, rows in ((0, 10**9), (1, 5), (2, 500)):
        load = np.zeros(32, dtype=int)
        load[expert] = rows
        watched.observe(load)
    assert watched.prediction()[:4].tolist() == [0, 2**29, 2**29, 0]
    watched.observe(np.zeros(32, dtype=int))
    assert watched.prediction()[2] == 2**30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"interval": 0}, "interval is 0"),
        ({"threshold": 0.9}, "threshold is 0.9"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"step_s": 0.0}, "step_s is 0.0"),
        ({"placement": symmetric(8, 9, 2).placement}, "holds"),
    ],
)
def test_bad_arguments(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        manager(**change)


def test_bad_loads_are_refused() -> None:
    with pytest.raises(ValueError, match="got loads of 31 experts, expected 32"):
        manager().observe(np.ones(31, dtype=int))
    with pytest.raises(ValueError, match="load of expert 0 is -1"):
        manager().observe(np.full(32, -1))
