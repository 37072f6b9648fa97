"""What is measured on files of real loads, on a small file made here."""

from __future__ import annotations

import numpy as np
import pytest

from moe_ref.balance.loads import LoadModel, RealLoads
from moe_ref.balance.real import across_domains, adaptive_run, batch_ratios
from moe_ref.balance.study import TrainingModel, before_and_after, real_study
from moe_ref.placement import by_name
from moe_ref.placement.moves import MoveCost


@pytest.fixture(scope="module")
def loads() -> RealLoads:
    """Two domains, two layers, 12 steps of 16 experts; popularity differs by domain and layer."""
    series = [
        np.stack([c.sum(axis=0) for c in LoadModel(4, 16, 1.2, rows_per_rank=256, seed=n).batches(12)])
        for n in range(4)
    ]
    return RealLoads(np.stack(series), (0, 0, 1, 1), (0, 1, 0, 1), ("law", "code"))


def test_ratios_perfect_and_exact(loads: RealLoads) -> None:
    placement = by_name("symmetric", 4, 16, 2).placement
    batches = np.concatenate([loads.load_NTE[0], np.zeros((1, 16), dtype=np.int64)])
    ratios, perfect, exact = batch_ratios(batches, placement)
    assert exact == 13
    assert perfect == sum(r <= np.ceil(256) / 256 for r in ratios)
    assert ratios[-1] == 1.0
    assert ratios.min() >= 1.0


def test_every_domain_against_every_other(loads: RealLoads) -> None:
    result = across_domains(loads, 4, 8)
    assert [(p["planned_on"], p["run_on"]) for p in result["pairs"]] == [("law", "code"), ("code", "law")]
    assert result["worst"] == max(p["worst"] for p in result["pairs"])
    assert 1.0 <= result["mean"] <= result["p99"] <= result["worst"]


def test_adaptive_run_adds_up(loads: RealLoads) -> None:
    placement = by_name("merged", 4, 16, 2).placement
    cost = MoveCost(10**6)
    run = adaptive_run(loads, placement, cost, 0.1, interval=6)
    assert len(run["ratio_per_step"]) == 24  # both domains, one after the other
    moved = [d for d in run["decisions"] if d["moved"]]
    assert moved
    assert run["moves"] == sum(d["moves"] for d in moved)
    assert run["bytes"] == run["moves"] * 10**6
    assert run["cost_s"] == pytest.approx(sum(d["cost_s"] for d in moved))
    assert 0 < run["share_of_step_time"] < 0.01
    static, _, _ = batch_ratios(loads.load_NTE.reshape(-1, 16), placement)
    assert np.mean(run["ratio_per_step"]) < static.mean() - 0.1
    forced = adaptive_run(loads, placement, cost, 0.1, interval=6, always=True)
    assert len(forced["decisions"]) == 2 * 24 // 6
    assert all(d["moved"] for d in forced["decisions"])
    assert forced["cost_s"] >= run["cost_s"]


def test_the_whole_study(loads: RealLoads) -> None:
    stages: list[str] = []
    placement = by_name("symmetric", 4, 16, 2).placement
    result = real_study(loads, placement, 2, 6, stages.append)
    assert result["batches"] == result["exact_batches"] == 48
    assert result["exact_share"] == 1.0
    assert result["perfect_share"] == result["perfect_batches"] / 48
    assert len(result["after"]["ratio_per_step"]) == 12
    assert result["after"]["mean"] < result["before"]["mean"]
    assert len(stages) == 4
    assert result["cost_model"]["bytes_per_replica"] == TrainingModel().bytes_per_replica == 3 * 2048 * 1408 * 14


def test_before_and_after_on_a_batch_by_hand() -> None:
    placement = by_name("symmetric", 4, 8, 4).placement
    counts = np.zeros((4, 8), dtype=np.int64)
    counts[:, 0] = 10
    result = before_and_after([counts, counts * 0], placement, 1)
    assert result["before"]["ratio_per_step"] == [4.0, 1.0]
    assert result["after"]["ratio_per_step"] == [1.0, 1.0]
    assert result["before"]["rank_loads"] == [20.0, 0.0, 0.0, 0.0]
    assert result["after"]["rank_loads"] == [5.0] * 4
    assert (result["perfect_share"], result["exact_share"], result["local_share"]) == (1.0, 1.0, 1.0)
