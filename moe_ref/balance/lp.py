"""The paper's linear program in HiGHS (FineMoE, section 4.1): the teaching form and the cross-check of `flow`.

Two formulations of the same problem:

* "paper": a variable x[e, j] >= 0 per replica and one for m; E rows  sum_j x[e, j] = load[e]  and P rows
  sum of x on rank g - m <= 0;  minimise m.
* "eliminated": the last replica of each expert is what the others leave, x[e, last] = load[e] - sum of the others. With
  two replicas that is one bounded variable per expert and no equality at all: 0 <= x[e, 0] <= load[e].

The constraint matrix is the placement, so the model is built once; per micro-batch only bounds change. HiGHS then
starts from the last basis ("warm"). But the optimum is not unique, and a warm start remembers: the same loads after
another history give another x with the same m. Each rank solves alone, so that would tear the plan apart
silently. `solve` and `plan` therefore forget (`clearSolver`) before every solve; `warm=True` is for measuring.

What HiGHS returns is believed only after checks: the status of every call, the sums, and m against the certificate of
the exact flow. Rounding: whole parts first, then the flow levels what is left over, to the same smallest maximum.

Letters: E experts, P ranks, D replicas of an expert (at most).
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import highspy
import numpy as np

from moe_ref.balance import flow_compiled
from moe_ref.balance.checks import SolverError
from moe_ref.balance.flow import ReplicaLoads
from moe_ref.balance.plan import Plan
from moe_ref.balance.routing import route
from moe_ref.replicas import Placement

FORMULATIONS = ("paper", "eliminated")

RELATIVE_TOLERANCE = 1e-6
"""How far the objective of HiGHS (feasibility tolerance 1e-7, in units of the mean load) may be from the exact one."""


def quiet_highs() -> Any:
    """A single-threaded simplex solver that prints nothing.

    HiGHS greets on the process' standard output while it is constructed, before any option can be set; a program that
    reads our stdout expects results only, so stdout is away for that moment.
    """
    sys.stdout.flush()
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        highs: Any = highspy.Highs()  # its type stubs lack changeRowsBounds
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)
    for option, value in (("output_flag", False), ("threads", 1), ("presolve", "off"), ("solver", "simplex")):
        if highs.setOptionValue(option, value) == highspy.HighsStatus.kError:
            raise SolverError(f"HiGHS refused its option {option}={value!r}; moe-ref needs highspy 1.13 or later")
    return highs


class LinearProgram:
    """One model of one placement, kept from micro-batch to micro-batch. Several threads take turns.

    Args:
        placement: replica sets.
        formulation: "paper" or "eliminated".
        warm: start from the basis of the last solve. Faster, and the answer then depends on history: never for plans
            that several ranks must agree on.
    """

    def __init__(self, placement: Placement, formulation: str = "paper", warm: bool = False) -> None:
        if formulation not in FORMULATIONS:
            raise ValueError(f"unknown formulation {formulation!r}, expected one of {', '.join(FORMULATIONS)}")
        self.placement, self.warm = placement, warm
        self.eliminated = formulation == "eliminated"
        self._turn = threading.Lock()
        counts_E, rank_ED = placement.replica_counts, placement.rank_ED
        # Variables: the replicas that are not eliminated, expert by expert; then m.
        kept_E = counts_E - 1 if self.eliminated else counts_E
        self._expert_N = np.repeat(np.arange(placement.num_experts), kept_E)
        self._replica_N = np.concatenate([np.arange(n) for n in kept_E]).astype(np.int64)
        self._last_rank_E = rank_ED[np.arange(placement.num_experts), counts_E - 1]
        # Rows of experts: all of them (sum = load), or those with two or more variables (sum <= load).
        self._summed = np.flatnonzero(kept_E >= 2) if self.eliminated else np.arange(placement.num_experts)
        self._highs = quiet_highs()
        self._must(self._highs.passModel(self._model(rank_ED)), "building the model")

    def _model(self, rank_ED: np.ndarray) -> highspy.HighsLp:
        experts, ranks, variables = rank_ED.shape[0], self.placement.num_ranks, len(self._expert_N)
        row_of_expert = np.full(experts, -1)
        row_of_expert[self._summed] = np.arange(len(self._summed))
        first_rank_row = len(self._summed)
        starts, rows, values = [0], [], []
        for expert, replica in zip(self._expert_N, self._replica_N, strict=True):
            entries = {first_rank_row + int(rank_ED[expert, replica]): 1.0}
            if self.eliminated:
                entries[first_rank_row + int(self._last_rank_E[expert])] = -1.0
            if row_of_expert[expert] >= 0:
                entries[int(row_of_expert[expert])] = 1.0
            for row in sorted(entries):
                rows.append(row)
                values.append(entries[row])
            starts.append(len(rows))
        rows += range(first_rank_row, first_rank_row + ranks)
        values += [-1.0] * ranks
        starts.append(len(rows))
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = variables + 1, first_rank_row + ranks
        lp.col_cost_ = np.array([0.0] * variables + [1.0])
        lp.col_lower_ = np.zeros(variables + 1)
        lp.col_upper_ = np.full(variables + 1, highspy.kHighsInf)
        lp.row_lower_ = np.full(lp.num_row_, -highspy.kHighsInf)
        lp.row_upper_ = np.zeros(lp.num_row_)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.array(starts)
        lp.a_matrix_.index_ = np.array(rows)
        lp.a_matrix_.value_ = np.array(values, dtype=np.float64)
        # An empty integrality array is read as garbage by passModel; zeros say "continuous".
        lp.integrality_ = [highspy.HighsVarType.kContinuous] * lp.num_col_
        return lp

    def _must(self, status: highspy.HighsStatus, what: str) -> None:
        if status == highspy.HighsStatus.kError:
            raise SolverError(f"HiGHS refused: {what}; no plan was made")

    def fractions(self, load_E: np.ndarray) -> tuple[np.ndarray, float]:
        """Solve for checked loads: rows per replica as HiGHS has them, float64 [E, D], and m, in rows.

        Raises:
            SolverError: a call failed, the status is not optimal, or the answer breaks a constraint.
        """
        with self._turn:
            return self._fractions(load_E)

    def _fractions(self, load_E: np.ndarray) -> tuple[np.ndarray, float]:
        placement, highs = self.placement, self._highs
        # In units of the mean load, so that HiGHS' absolute tolerances mean the same at 10^2 and at 10^12 rows.
        unit = max(float(load_E.sum()) / placement.num_ranks, 1.0)
        scaled_E = load_E / unit
        if not self.warm:
            self._must(highs.clearSolver(), "forgetting the last solve")
        experts, ranks = len(self._summed), placement.num_ranks
        lower = scaled_E[self._summed] if not self.eliminated else np.full(experts, -highspy.kHighsInf)
        if experts:
            self._must(
                highs.changeRowsBounds(experts, np.arange(experts, dtype=np.int32), lower, scaled_E[self._summed]),
                "changing the loads",
            )
        if self.eliminated:
            variables = len(self._expert_N)
            pinned_P = np.bincount(self._last_rank_E, weights=scaled_E, minlength=ranks)
            self._must(
                highs.changeRowsBounds(
                    ranks,
                    np.arange(experts, experts + ranks, dtype=np.int32),
                    np.full(ranks, -highspy.kHighsInf),
                    -pinned_P,
                ),
                "changing the pinned loads",
            )
            if variables:
                self._must(
                    highs.changeColsBounds(
                        variables, np.arange(variables, dtype=np.int32), np.zeros(variables), scaled_E[self._expert_N]
                    ),
                    "changing the variables' bounds",
                )
        self._must(highs.run(), "running the solver")
        status = highs.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise SolverError(
                f"HiGHS ended with {highs.modelStatusToString(status)}, expected Optimal; no plan was made"
            )
        values = np.asarray(highs.getSolution().col_value)
        rows_ED = np.zeros(placement.rank_ED.shape)
        rows_ED[self._expert_N, self._replica_N] = values[:-1]
        if self.eliminated:
            rows_ED[np.arange(len(load_E)), placement.replica_counts - 1] = scaled_E - rows_ED.sum(axis=1)
        worst = max(float(np.abs(rows_ED.sum(axis=1) - scaled_E).max()), -float(rows_ED.min()))
        if not worst <= 1e-6:
            raise SolverError(f"HiGHS' answer breaks a constraint by {worst:.2e} mean loads; no plan was made")
        return np.maximum(rows_ED, 0.0) * unit, float(values[-1]) * unit

    def solve(self, load_E: np.ndarray) -> ReplicaLoads:
        """Whole rows of every replica: the LP's answer, rounded and verified.

        Raises:
            SolverError: also if the objective is not the exact optimum (known from the certificate).
        """
        rows_ED, objective = self.fractions(load_E)
        # Whole parts, never more than there is; the flow pours the remainder and levels it.
        whole_ED = np.floor(rows_ED + 1e-6).astype(np.int64)
        filled_ED = np.minimum(np.cumsum(whole_ED, axis=1), load_E[:, None])
        loads = flow_compiled.solve(load_E, self.placement, np.diff(filled_ED, axis=1, prepend=0))
        slack = RELATIVE_TOLERANCE * max(float(load_E.sum()) / self.placement.num_ranks, 1.0)
        if not loads.max_load - 1 - slack <= objective <= loads.max_load + slack:
            raise SolverError(
                f"HiGHS says m = {objective}, but the smallest maximum in whole rows is {loads.max_load}, proven by "
                f"ranks {sorted(loads.certificate)}; no plan was made"
            )
        return loads


def _model_of(placement: Placement, formulation: str) -> LinearProgram:
    """The history-free model of a placement, built once and kept with it."""
    kept = placement.__dict__.setdefault("_linear_programs", {})
    if formulation not in kept:
        kept[formulation] = LinearProgram(placement, formulation)
    return kept[formulation]


def solve(load_E: np.ndarray, placement: Placement, formulation: str = "paper") -> ReplicaLoads:
    """The division of checked loads by the linear program, without memory of earlier calls."""
    return _model_of(placement, formulation).solve(load_E)


def plan(counts_PE: np.ndarray, placement: Placement) -> Plan:
    """The plan of checked counts: loads by the linear program, then locality-aware routing."""
    loads = solve(counts_PE.sum(axis=0), placement)
    return Plan(placement, route(counts_PE, loads.rows_ED, placement), loads.certificate)
