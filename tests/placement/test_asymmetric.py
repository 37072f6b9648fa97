"""Placements for known loads."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ref.balance.loads import LoadModel, as_prediction
from moe_ref.placement import Placement, asymmetric, symmetric
from moe_ref.placement.asymmetric import greedy_replica_counts, mean_ratio, noisy_draws, random_arrangement


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20), st.integers(1, 12), st.data())
def test_greedy_counts_minimise_the_largest_load_per_replica(load, ranks, data) -> None:
    slots = data.draw(st.integers(len(load), len(load) * ranks))
    counts = greedy_replica_counts(load, slots, ranks)
    assert sum(counts) == slots
    assert all(1 <= c <= ranks for c in counts)
    # The smallest level at which every expert's replicas fit into the slots, found by trying all candidates.
    levels = sorted({load[e] / c for e in range(len(load)) for c in range(1, ranks + 1)})

    def needed(level: float) -> float:
        if level == 0:
            return math.inf if any(load) else len(load)
        counts_at = [max(1, math.ceil(x / level - 1e-12)) for x in load]
        return math.inf if max(counts_at) > ranks else sum(counts_at)

    best = min(level for level in levels if needed(level) <= slots)
    assert max(x / c for x, c in zip(load, counts, strict=True)) <= best * (1 + 1e-9)


@settings(max_examples=60)
@given(st.integers(1, 10), st.integers(1, 6), st.integers(0, 1000), st.data())
def test_arrangements_fill_every_slot(ranks: int, slots: int, seed: int, data) -> None:
    experts = data.draw(st.integers(slots, ranks * slots))
    rng = np.random.default_rng(seed)
    load = rng.integers(0, 100, experts) ** 3
    counts = greedy_replica_counts(load, ranks * slots, ranks)
    placement = random_arrangement(counts, load, ranks, slots, rng)
    placement.check_slots(slots)
    assert placement.replica_counts.tolist() == counts


def test_the_same_arguments_give_the_same_placement() -> None:
    load = as_prediction(LoadModel(16, 64, 1.0).popularity())
    assert asymmetric(load, 16, 8) == asymmetric(load * 3, 16, 8) == asymmetric(load.tolist(), 16, 8)
    assert asymmetric(load, 16, 8) != asymmetric(load, 16, 8, seed=1)


def test_a_degenerate_placement_looks_perfect_on_the_prediction_and_is_found_out_by_noise() -> None:
    """Disjoint pairs of ranks, each exactly at the mean: no slack, so any other batch breaks them."""
    pairs = Placement.from_replicas([[2 * (e % 4), 2 * (e % 4) + 1] for e in range(32)], 8)
    flat = np.full(32, 1000)
    draws = noisy_draws(flat, 30, 0.2, np.random.default_rng(0))
    assert (draws[0] == flat).all()
    assert mean_ratio(pairs, draws[:1]) == 1.0
    assert mean_ratio(pairs, draws) > 1.04
    good = symmetric(8, 32, 2).placement
    assert mean_ratio(good, draws) == pytest.approx(1.0, abs=1e-3)
    assert mean_ratio(asymmetric(flat, 8, 8), draws) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("skew", [0.5, 1.0, 1.5])
def test_balance_beyond_the_symmetric_limit(skew: float) -> None:
    model = LoadModel(16, 64, skew)
    placement = asymmetric(as_prediction(model.popularity()), 16, 8)
    batches = np.stack([counts.sum(axis=0) for counts in model.batches(20)])
    assert mean_ratio(placement, batches) <= 1.005


def test_cold_experts_get_a_second_replica_if_the_prediction_is_not_trusted() -> None:
    load = np.array([1000] * 8 + [1] * 8)
    trusted = asymmetric(load, 8, 4, uniform=0.0).replica_counts
    careful = asymmetric(load, 8, 4, uniform=1.0).replica_counts
    assert trusted[8:].tolist() == [1] * 8
    assert careful.tolist() == [2] * 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones(8, dtype=int), 4, 1), "4 slots for 8 experts on 4 ranks; expected 8 .* to 32"),
        ((np.ones(2, dtype=int), 4, 3), "12 slots for 2 experts on 4 ranks; expected 2 .* to 8"),
        (([1, -1], 2, 1), "load of expert 1 is -1"),
        (([1.0, np.nan], 2, 1), "load of expert 1 is NaN"),
    ],
)
def test_bad_arguments(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asymmetric(*arguments)
    with pytest.raises(ValueError, match="uniform is 2, expected a share"):
        asymmetric([1, 1], 2, 1, uniform=2)


def test_no_load_at_all_is_like_equal_loads() -> None:
    assert asymmetric(np.zeros(8, dtype=int), 4, 4) == asymmetric(np.full(8, 7), 4, 4)


def test_of_many_arrangements_the_best_is_kept() -> None:
    """Few slots, so that arrangements differ: more candidates never score worse, and here better than chance."""
    load = as_prediction(LoadModel(8, 10, 0.8).popularity())
    trials = noisy_draws(load, 40, 0.4, np.random.default_rng(9))
    few, many = ([mean_ratio(asymmetric(load, 8, 2, candidates=n, seed=s), trials) for s in range(8)] for n in (1, 40))
    assert np.mean(many) < np.mean(few) - 0.01
