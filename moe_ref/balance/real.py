"""Real loads: how well a placement balances them, what a stale plan costs, and what an adaptive manager would do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moe_ref.balance import flow_compiled
from moe_ref.balance.loads import RealLoads
from moe_ref.balance.timing import is_exact
from moe_ref.layout import ceil_div
from moe_ref.placement.adaptive import PlacementManager
from moe_ref.placement.asymmetric import asymmetric
from moe_ref.placement.moves import MoveCost
from moe_ref.replicas import Placement


def batch_ratios(load_NE: np.ndarray, placement: Placement) -> tuple[np.ndarray, int, int]:
    """(maximum over mean load of each batch, perfect batches, exact batches).

    Perfect: no rank has more than the mean, rounded up. Exact: the maximum is what the certificate proves.
    """
    ratio_N, perfect, exact = np.ones(len(load_NE)), 0, 0
    for i, load_E in enumerate(load_NE):
        answer = flow_compiled.solve(load_E, placement)
        total = int(load_E.sum())
        perfect += answer.max_load == ceil_div(total, placement.num_ranks)
        exact += is_exact(answer, load_E, placement)
        if total:
            ratio_N[i] = answer.max_load * placement.num_ranks / total
    return ratio_N, perfect, exact


def summary(ratio_N: np.ndarray) -> dict[str, float]:
    """Mean, worst and 99th percentile of ratios."""
    return {
        "mean": float(ratio_N.mean()),
        "p99": float(np.percentile(ratio_N, 99)),
        "worst": float(ratio_N.max()),
    }


def across_domains(
    loads: RealLoads, num_ranks: int, slots: int, progress: Callable[[], Any] = lambda: None
) -> dict[str, Any]:
    """Plan on one kind of text, run on another: asymmetric placements and token scheduling with a stale plan.

    For every layer and every ordered pair of domains. Returns the ratios of all batches and of each pair.
    """
    domains, layers = np.array(loads.domain_N), np.array(loads.layer_N)
    everything, pairs = [], []
    placements = {}
    for n in range(len(loads.load_NTE)):
        placements[n] = asymmetric(loads.load_NTE[n].sum(axis=0), num_ranks, slots)
        progress()
    for planned, name in enumerate(loads.domain_names):
        for run, other in enumerate(loads.domain_names):
            if planned == run:
                continue
            ratios = []
            for layer in np.unique(layers):
                here = int(np.flatnonzero((domains == planned) & (layers == layer))[0])
                there = int(np.flatnonzero((domains == run) & (layers == layer))[0])
                ratios.append(batch_ratios(loads.load_NTE[there], placements[here])[0])
            joined = np.concatenate(ratios)
            pairs.append({"planned_on": name, "run_on": other, **summary(joined)})
            everything.append(joined)
    joined = np.concatenate(everything)
    return {**summary(joined), "perfect_share": float((joined <= 1.0 + 1e-12).mean()), "pairs": pairs}


def adaptive_run(
    loads: RealLoads,
    placement: Placement,
    cost: MoveCost,
    step_s: float,
    *,
    interval: int,
    threshold: float = 1.02,
    always: bool = False,
) -> dict[str, Any]:
    """Replay the loads of every layer, domain after domain, under a placement manager of its own per layer.

    Args:
        loads: real loads.
        placement: where every layer starts.
        cost: of moving a replica of one layer.
        step_s: seconds of expert computation of one layer in one step, at perfect balance.
        interval, threshold, always: see `PlacementManager`.

    Returns:
        `ratio_per_step`: maximum over mean, averaged over the layers; `moves`, `bytes`, `cost_s` of all layers;
        `share_of_step_time`: cost_s divided by the time of the experts over all steps; `decisions`: the log.
    """
    layers = np.array(loads.layer_N)
    per_step, decisions = [], []
    moves = num_bytes = 0
    cost_s = compute_s = 0.0
    for layer in np.unique(layers):
        manager = PlacementManager(placement, cost, step_s, interval=interval, threshold=threshold, always=always)
        steps_TE = np.concatenate([loads.load_NTE[n] for n in np.flatnonzero(layers == layer)])
        ratios = []
        for load_E in steps_TE:
            ratio = float(batch_ratios(load_E[None], manager.placement)[0][0])
            ratios.append(ratio)
            compute_s += ratio * step_s
            decision = manager.observe(load_E)
            if decision is None:
                continue
            made = len(decision.plan.moves) if decision.plan else 0
            if decision.moved and decision.plan:
                moves += made
                num_bytes += decision.plan.num_bytes
                cost_s += decision.cost_s
            decisions.append(
                {
                    "layer": int(layer),
                    "step": decision.step,
                    "ratio": decision.ratio,
                    "candidate_ratio": decision.candidate_ratio,
                    "moves": made,
                    "gain_s": decision.gain_s,
                    "cost_s": decision.cost_s,
                    "moved": decision.moved,
                    "reason": decision.reason,
                }
            )
        per_step.append(ratios)
    return {
        "interval": interval,
        "threshold": threshold,
        "ratio_per_step": np.mean(per_step, axis=0).round(6).tolist(),
        "moves": moves,
        "bytes": num_bytes,
        "cost_s": cost_s,
        "share_of_step_time": cost_s / compute_s,
        "decisions": decisions,
    }
