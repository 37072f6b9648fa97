"""What the command `balance` measures: loads before and after, and the parts that can be added to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moe_ref.balance.communication import trade_off_curve
from moe_ref.balance.loads import RealLoads, split_evenly
from moe_ref.balance.real import across_domains, adaptive_run, batch_ratios, summary
from moe_ref.balance.rivals import plain
from moe_ref.balance.schedule import schedule
from moe_ref.balance.sweep import max_over_mean
from moe_ref.layout import ceil_div
from moe_ref.placement.moves import MoveCost
from moe_ref.replicas import Placement


@dataclass(frozen=True)
class TrainingModel:
    """Sizes for the cost of re-placement: by default DeepSeek-V2-Lite's experts, 131,072 tokens per rank and step.

    Attributes:
        hidden, intermediate: H, D of a gated expert: 3 H D parameters.
        rows_per_step: rows that a rank computes per layer and optimiser step (131,072 tokens x 6 experts).
        flops_per_s: what a rank sustains in expert products.
        bytes_per_parameter: weight 2, fp32 master 4, two moments 8.
    """

    hidden: int = 2048
    intermediate: int = 1408
    rows_per_step: int = 131_072 * 6
    flops_per_s: float = 400e12
    bytes_per_parameter: int = 14

    @property
    def bytes_per_replica(self) -> int:
        """3 H D * bytes_per_parameter"""
        return 3 * self.hidden * self.intermediate * self.bytes_per_parameter

    @property
    def step_s(self) -> float:
        """Seconds of a layer's experts per step at perfect balance, forward and backward: rows * 18 H D / flops"""
        return self.rows_per_step * 18 * self.hidden * self.intermediate / self.flops_per_s

    def values(self) -> dict[str, Any]:
        """Fields and derived values."""
        return {**asdict(self), "bytes_per_replica": self.bytes_per_replica, "step_s": self.step_s}


def before_and_after(batches: Iterable[np.ndarray], placement: Placement, replicas: int) -> dict[str, Any]:
    """Balance the batches one by one.

    Args:
        batches: counts, int64 [P, E].
        placement: replica sets.
        replicas: expert-parallel groups of the plain layer that is compared with.

    Returns:
        `before` (plain expert parallelism) and `after`: `mean`, `p99` and `worst` maximum over mean load,
        `rank_loads` (mean rows of each rank), `ratio_per_step`; `perfect_share`: batches in which no rank has more than
        the mean, rounded up; `exact_share`: batches whose certificate proves the maximum load optimal; `local_share`.
    """
    before_TP, after_TP, local, perfect, exact = [], [], [], 0, 0
    planned = np.zeros(placement.num_experts, dtype=np.int64)
    for counts in batches:
        before_TP.append(plain(counts[None], planned, replicas)[0])
        plan = schedule(counts, placement, "flow_compiled")
        after_TP.append(plan.rank_loads)
        local.append(plan.local_share)
        perfect += plan.max_load == ceil_div(int(counts.sum()), placement.num_ranks)
        exact += plan.is_optimal
    result: dict[str, Any] = {}
    for name, rows in (("before", before_TP), ("after", after_TP)):
        rows_TP = np.array(rows, dtype=np.float64)
        ratio_T = max_over_mean(rows_TP, rows_TP.mean(axis=1))
        result[name] = {
            **summary(ratio_T),
            "rank_loads": rows_TP.mean(axis=0).round(2).tolist(),
            "ratio_per_step": ratio_T.round(6).tolist(),
        }
    steps = len(after_TP)
    result |= {
        "perfect_share": perfect / steps,
        "exact_share": exact / steps,
        "local_share": float(np.mean(local)),
    }
    return result


ALPHAS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def trade_off(counts_PE: np.ndarray, placement: Placement, ranks_per_node: int) -> list[dict[str, float]]:
    """The curve of balance against communication for one batch, one entry per alpha of `ALPHAS`.

    `compute` and `communication` are in units of the mean load, as the linear program has them; `max_load` and
    `plan_communication` are those of the plan in whole rows.
    """
    mean = max(float(counts_PE.sum()) / placement.num_ranks, 1.0)
    return [
        {
            "alpha": point.alpha,
            "compute": point.compute / mean,
            "communication": point.communication / mean,
            "max_load": point.plan.max_load / mean,
            "plan_communication": point.plan_communication / mean,
            "local_share": point.plan.local_share,
        }
        for point in trade_off_curve(counts_PE, placement, ALPHAS, ranks_per_node)
    ]


def real_study(
    loads: RealLoads,
    placement: Placement,
    replicas: int,
    interval: int,
    progress: Callable[[str], Any] = lambda stage: None,
) -> dict[str, Any]:
    """Everything that is measured on real loads.

    Returns:
        What `before_and_after` does, over all series and steps; `across_domains` where there is more than one domain
        and the slots of all ranks are equal; `adaptive`, and `every_interval` (a re-placement at every check, to see
        what that costs), under `cost_model`.
    """
    load_NE = loads.load_NTE.reshape(-1, loads.num_experts)
    num_ranks = placement.num_ranks
    result = before_and_after((split_evenly(load_E, num_ranks) for load_E in load_NE), placement, replicas)
    # Thousands of batches: one number per batch of a report is enough for a plot, and too much for a reader.
    per_step = {name: np.array(result[name].pop("ratio_per_step")) for name in ("before", "after")}
    steps = loads.load_NTE.shape[1]
    for name, ratio_N in per_step.items():
        result[name]["ratio_per_step"] = ratio_N.reshape(-1, steps).mean(axis=0).round(6).tolist()
    ratio_N, perfect, exact = batch_ratios(load_NE, placement)
    result |= {"batches": len(load_NE), "perfect_batches": perfect, "exact_batches": exact}
    progress("balance")
    total = sum(len(ranks) for ranks in placement.ranks_of_expert)
    if total % num_ranks:
        return result
    slots = total // num_ranks
    if len(loads.domain_names) > 1:
        result["across_domains"] = across_domains(loads, num_ranks, slots)
        progress("across domains")
    model = TrainingModel()
    cost = MoveCost(model.bytes_per_replica)
    result["cost_model"] = {**model.values(), **asdict(cost)}
    result["adaptive"] = adaptive_run(loads, placement, cost, model.step_s, interval=interval)
    progress("adaptive manager")
    result["every_interval"] = adaptive_run(loads, placement, cost, model.step_s, interval=interval, always=True)
    progress("re-placement at every interval")
    return result
