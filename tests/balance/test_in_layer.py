"""Replicas in the layer: the same bits as without, on simulated and on real ranks, before and after a re-placement."""

from __future__ import annotations

import math

import balance_jobs
import numpy as np
import pytest
import torch
from ranks import run_ranks

from moe_ref import MoEConfig, MoELayer, Placement
from moe_ref.placement import asymmetric, by_name, max_density
from moe_ref.placement.adaptive import PlacementManager
from moe_ref.placement.moves import MoveCost

CONFIG = MoEConfig(hidden=32, intermediate=48, experts=12, top_k=3)

PLACEMENTS = {
    "symmetric": by_name("symmetric", 4, 12, 2).placement,
    "merged": by_name("merged", 4, 12, 2).placement,
    "asymmetric": asymmetric([90, 80, 5, 5, 5, 40, 1, 0, 0, 3, 3, 3], 4, 6),
    "everywhere": by_name("symmetric", 4, 12, 4).placement,
    "uneven": Placement.from_replicas([[e % 3] if e % 2 else [3, e % 3, (e + 1) % 3] for e in range(12)], 4),
    "reversed": Placement.from_replicas([[(3 - e) % 4, (1 - e) % 4] for e in range(12)], 4),
}

SIZES = [7, 0, 45, 1]


def run(placement: Placement | None, config: MoEConfig, kind: str | None, method: str = "flow", seed: int = 3):
    """Outputs of all ranks and the plan, with weights and tokens that depend on the seed alone."""
    layer = MoELayer(config, world=4, placement=placement, seed=seed)
    layer.schedule_method = method
    pairs = [balance_jobs.inputs(config, SIZES, rank, kind, seed) for rank in range(4)]
    routing = None if kind is None else [r for _, r in pairs]
    with torch.no_grad():
        ys, stats = layer([x for x, _ in pairs], routing=routing, return_stats=True)
    return ys, stats


@pytest.mark.parametrize("kind", [None, "zipf", "one_expert", "duplicates", "masked"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_outputs_have_the_same_bits_as_without_replicas(name: str, kind: str | None, one_thread, same_rows) -> None:
    plain, before = run(None, CONFIG, kind)
    for method in ("flow", "flow_compiled", "lp"):
        ys, stats = run(PLACEMENTS[name], CONFIG, kind, method)
        for rank in range(4):
            assert same_rows(ys[rank], plain[rank])
        plan = stats.record.plan
        assert plan.is_optimal
        assert stats.rank_load.tolist() == plan.rank_loads.tolist()
        assert stats.expert_load.tolist() == before.expert_load.tolist() == plan.counts_PE.sum(axis=0).tolist()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("layout", ["compact", "fixed"])
def test_other_dtypes_and_layouts(dtype: str, layout: str, one_thread, same_rows) -> None:
    config = CONFIG.replace(dtype=dtype, layout=layout, top_k=1, renormalize=False)
    plain, _ = run(None, config, None)
    for name in ("symmetric", "uneven"):
        ys, _ = run(PLACEMENTS[name], config, None)
        for rank in range(4):
            assert same_rows(ys[rank], plain[rank])


def test_a_hot_expert_no_longer_decides(one_thread) -> None:
    """All rows to one expert: one rank computes them all, or two, or every rank its share."""
    loads = {}
    for name, placement in (("plain", None), *PLACEMENTS.items()):
        _, stats = run(placement, CONFIG.replace(top_k=1, renormalize=False), "one_expert")
        loads[name] = int(stats.rank_load.max())
    rows = sum(SIZES)
    assert loads["plain"] == rows
    assert loads["symmetric"] == math.ceil(rows / 2)
    assert loads["everywhere"] == math.ceil(rows / 4)


def test_gradients_do_not_depend_on_who_computes(one_thread) -> None:
    """Sums over replicas are grouped otherwise, so they agree to rounding and not to the bit."""
    gradients = {}
    for name, placement in (("plain", None), ("symmetric", PLACEMENTS["symmetric"])):
        layer = MoELayer(CONFIG.replace(dtype="float64"), world=4, placement=placement, seed=5)
        pairs = [balance_jobs.inputs(layer.config, SIZES, rank, None, 5) for rank in range(4)]
        sum(y.square().sum() for y in layer([x for x, _ in pairs])).backward()
        gradients[name] = {key: value.grad for key, value in layer.named_parameters()}
    for key, expected in gradients["plain"].items():
        got = gradients["symmetric"][key]
        assert torch.linalg.norm(got - expected) <= 1e-12 * torch.linalg.norm(expected)


def test_re_placement_keeps_every_bit(one_thread, same_rows) -> None:
    """A manager proposes, the weights move, the outputs stay."""
    skewed = np.rint(1000 * np.arange(1, 13) ** -1.5).astype(int)
    manager = PlacementManager(by_name("merged", 4, 12, 2).placement, MoveCost(1000), step_s=1.0, interval=2)
    before = MoELayer(CONFIG, world=4, placement=manager.placement, seed=7)
    xs = [balance_jobs.inputs(CONFIG, SIZES, rank, "zipf", 7) for rank in range(4)]
    with torch.no_grad():
        expected = before([x for x, _ in xs], routing=[r for _, r in xs])
    manager.observe(skewed)
    decision = manager.observe(skewed)
    assert decision is not None
    assert decision.moved
    after = MoELayer(CONFIG, world=4, placement=manager.placement, seed=8)
    assert after.placement != before.placement
    after.load_logical_state_dict(before.state_dict())
    with torch.no_grad():
        got = after([x for x, _ in xs], routing=[r for _, r in xs])
    for rank in range(4):
        assert same_rows(got[rank], expected[rank])


def test_the_layer_reaches_the_density(one_thread) -> None:
    for name, placement in PLACEMENTS.items():
        _, stats = run(placement, CONFIG, "zipf")
        optimum = math.ceil(max_density(stats.expert_load, placement).value)
        assert int(stats.rank_load.max()) == optimum, name
        assert stats.rank_load.sum() == 3 * sum(SIZES)


REAL = ("symmetric", "asymmetric", "uneven")


@pytest.fixture(scope="module")
def real() -> list[tuple[list[dict], str]]:
    """Per rank of four processes: forwards with three placements and three methods, and what debug mode said."""
    replicas = [[list(ranks) for ranks in PLACEMENTS[name].ranks_of_expert] for name in REAL]
    return run_ranks(balance_jobs.both, 4, CONFIG, SIZES, None, replicas, 3)


def test_real_ranks_with_replicas_equal_simulated_ones_without(real, one_thread, same_rows) -> None:
    layer = MoELayer(CONFIG, world=4, seed=3)
    with torch.no_grad():
        plain = layer([balance_jobs.inputs(CONFIG, SIZES, rank, None, 3)[0] for rank in range(4)])
    for job in range(9):
        jobs = [real[rank][0][job] for rank in range(4)]
        assert len({got["digest"] for got in jobs}) == 1
        for rank, got in enumerate(jobs):
            assert same_rows(torch.from_numpy(got["y"]), plain[rank].double())
            assert got["optimal"]
            assert got["total"] == 3 * sum(SIZES)
    for first, second in ((0, 1), (3, 4), (6, 7)):
        assert real[0][0][first]["digest"] == real[0][0][second]["digest"]  # flow and its compiled twin


def test_debug_mode_names_the_rank_that_plans_alone(real) -> None:
    assert all("ranks [2] hold another plan than the other 3 of 4 ranks" in message for _, message in real)
