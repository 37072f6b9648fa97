"""How long planning takes: per solver, and what dispatch sees of it when it overlaps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moe_ref.balance import flow, flow_compiled
from moe_ref.balance.checks import check_loads
from moe_ref.balance.flow import ReplicaLoads
from moe_ref.balance.lp import LinearProgram
from moe_ref.balance.overlap import PlanWorker, pipelined
from moe_ref.balance.plan import Plan
from moe_ref.balance.routing import route
from moe_ref.balance.schedule import schedule
from moe_ref.layout import ceil_div
from moe_ref.placement.density import trapped_load
from moe_ref.replicas import Placement

SOLVERS = ("flow", "flow_compiled", "lp_warm", "lp_cold")

WARM_UP = 5
"""Steps that are solved before the clock counts: compilation, caches, the first basis."""


COMPUTE_S = 1e-3
"""How long a micro-batch computes in the pipelined form: the processor waits for the accelerator so long."""


def _microseconds(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call(*arguments)
    return (time.perf_counter() - start) * 1e6, result


def _summary(times_us: list[float], prefix: str = "") -> dict[str, float]:
    return {
        f"{prefix}median_us": float(np.median(times_us)),
        f"{prefix}p95_us": float(np.percentile(times_us, 95)),
    }


def is_exact(loads: ReplicaLoads, load_E: np.ndarray, placement: Placement) -> bool:
    """Whether the maximum load is what the certificate proves to be the least possible."""
    bound = ceil_div(trapped_load(load_E, placement, loads.certificate), len(loads.certificate))
    return loads.max_load == bound


def _solver_calls(
    name: str, placement: Placement, formulation: str
) -> tuple[Callable[[np.ndarray], ReplicaLoads], Callable[[np.ndarray], Plan]]:
    """(loads -> division, counts -> plan) of a solver; both check their input as the public functions do."""
    if name in ("flow", "flow_compiled"):
        solve = flow.solve if name == "flow" else flow_compiled.solve
        return lambda load: solve(check_loads(load, placement), placement), lambda c: schedule(c, placement, name)
    program = LinearProgram(placement, formulation, warm=name == "lp_warm")

    def plan(counts_PE: np.ndarray) -> Plan:
        loads = program.solve(check_loads(counts_PE.sum(axis=0), placement))
        return Plan(placement, route(counts_PE, loads.rows_ED, placement), loads.certificate)

    return lambda load: program.solve(check_loads(load, placement)), plan


def time_solvers(
    batches: Sequence[np.ndarray],
    placement: Placement,
    solvers: Sequence[str],
    formulation: str = "eliminated",
    progress: Callable[[str], Any] = lambda name: None,
) -> dict[str, dict[str, Any]]:
    """Time each solver over the same batches, one solver after the other.

    Args:
        batches: counts of each step, int64 [P, E].
        placement: replica sets.
        solvers: of `SOLVERS`.
        formulation: of the linear program.
        progress: called with the name of each solver when it is done.

    Returns:
        Per solver: `median_us`, `p95_us` for the loads per replica; `quota_median_us`, `quota_p95_us` for the whole
        plan with quotas per source rank; `max_over_mean` (mean over the steps); `exact`, whether every maximum load was
        equal to the bound that its certificate proves.
    """
    loads_TE = [counts.sum(axis=0) for counts in batches]
    results = {}
    for name in solvers:
        solve, plan = _solver_calls(name, placement, formulation)
        for step in range(min(WARM_UP, len(batches))):
            solve(loads_TE[step])
            plan(batches[step])
        times, ratios, exact = [], [], True
        for load in loads_TE:
            elapsed, answer = _microseconds(solve, load)
            times.append(elapsed)
            mean = load.sum() / placement.num_ranks
            ratios.append(answer.max_load / mean if mean else 1.0)
            exact = exact and is_exact(answer, load, placement)
        quota_times = []
        for counts in batches:
            elapsed, made = _microseconds(plan, counts)
            quota_times.append(elapsed)
            exact = exact and made.is_optimal
        results[name] = {
            **_summary(times),
            **_summary(quota_times, "quota_"),
            "max_over_mean": float(np.mean(ratios)),
            "exact": bool(exact),
        }
        progress(name)
    return results


def time_overlap(
    batches: Sequence[np.ndarray], placement: Placement, seed: int = 0
) -> dict[str, dict[str, float] | float]:
    """What dispatch waits for the plan beyond its own permutation.

    The permutation of rank 0 is real: a stable sort of the expert ids of its rows, as many as the batch says, and the
    inverse of the sorting order. Rows themselves aren't moved, so there is less to hide behind than on a real system.

    Returns:
        `permutation_us`: the permutation alone. `serial`, `overlapped`: `visible_us`, the median time from "gate done"
        to "plan and permutation done" less the permutation alone, and `p95_us`. `pipelined`: the same of the wait for a
        plan that was ordered one micro-batch of `COMPUTE_S` ago. `visible_us` on top is the overlapped one.
    """
    rng = np.random.default_rng(seed)
    ids = []
    for counts in batches:
        of_rank = np.repeat(np.arange(placement.num_experts), counts[0])
        ids.append(rng.permutation(of_rank).astype(np.int16))

    def permute(step: int) -> np.ndarray:
        order = np.argsort(ids[step], kind="stable")
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return back

    flow_compiled.warm_up()
    alone, serial, overlapped, ahead = [], [], [], []
    with PlanWorker("flow_compiled") as worker:

        def in_turn(counts: np.ndarray, step: int) -> None:
            schedule(counts, placement, "flow_compiled")
            permute(step)

        def at_once(counts: np.ndarray, step: int) -> None:
            ticket = worker.submit(counts, placement)
            permute(step)
            ticket.result()

        for step, counts in enumerate(batches):
            alone.append(_microseconds(permute, step)[0])
            serial.append(_microseconds(in_turn, counts, step)[0])
            overlapped.append(_microseconds(at_once, counts, step)[0])
        plans = pipelined(worker, batches, placement)
        for _ in batches:
            waited_us, _ = _microseconds(next, plans)
            ahead.append(waited_us)
            time.sleep(COMPUTE_S)
    base = float(np.median(alone))

    def visible(times: list[float], less: float) -> dict[str, float]:
        return {
            "visible_us": max(float(np.median(times)) - less, 0.0),
            "p95_us": max(float(np.percentile(times, 95)) - less, 0.0),
        }

    result: dict[str, dict[str, float] | float] = {
        "permutation_us": base,
        "serial": visible(serial, base),
        "overlapped": visible(overlapped, base),
        # The first plan of a pipeline has nothing to hide behind.
        "pipelined": visible(ahead[1:] or ahead, 0.0),
    }
    result["visible_us"] = visible(overlapped, base)["visible_us"]
    return result
