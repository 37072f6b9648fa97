"""Balance against communication: the extended linear program (FineMoE, appendix A.1).

The plain program makes all ranks equally busy and doesn't ask how far rows travel. This one minimises

    max over ranks of rows computed  +  alpha * max over ranks of weighted rows received

where a row counts nothing if it stays on its rank, `intra` if it comes from the same node and `inter` if it comes from
another. alpha says how many rows could be computed in the time that one weighted row takes to arrive. alpha = 0 is the
plain optimum; as alpha grows, the maximum load never falls and the communication never rises (any two optima, exchanged
between their alphas, would show a contradiction otherwise).

Variables per replica: rows from its own rank (at most what starts there), from its node, and from elsewhere. Which
source rank serves which replica inside a node needs no variable: routing finds a way for any such split. The model is
built anew for every call; it is for studies and for steps that are worth milliseconds.

Letters: P ranks, E experts, D replicas of an expert (at most).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from moe_ref.balance import flow
from moe_ref.balance.checks import SolverError, check_counts
from moe_ref.balance.lp import quiet_highs
from moe_ref.balance.plan import Plan
from moe_ref.balance.routing import local_rows, route
from moe_ref.replicas import Placement


@dataclass(frozen=True)
class TradeOff:
    """One point of the curve.

    Attributes:
        alpha: weight of communication.
        compute: rows of the busiest rank, as the linear program has it.
        communication: weighted rows that the busiest receiver gets, as the linear program has it.
        plan: whole rows that keep `compute`, rounded up.
        plan_communication: weighted rows that the busiest receiver gets under `plan`.
    """

    alpha: float
    compute: float
    communication: float
    plan: Plan
    plan_communication: float


def received(plan: Plan, ranks_per_node: int, intra: float = 1.0, inter: float = 9.0) -> np.ndarray:
    """Weighted rows that each rank receives under a plan, float64 [P]."""
    rows_PG = plan.quota_by_slot().sum(axis=2)
    rank = np.arange(len(rows_PG))
    same_node = rank[:, None] // ranks_per_node == rank // ranks_per_node
    weight_PG = np.where(same_node, intra, inter)
    np.fill_diagonal(weight_PG, 0.0)
    return (rows_PG * weight_PG).sum(axis=0)


def communication_aware(
    counts_PE: Any,
    placement: Placement,
    alpha: float,
    ranks_per_node: int,
    *,
    intra: float = 1.0,
    inter: float = 9.0,
) -> TradeOff:
    """The plan that weighs balance against communication; a pure function of its arguments.

    Args:
        counts_PE: gathered rows of each source rank for each logical expert, integers [P, E].
        placement: replica sets.
        alpha: rows that could be computed while one weighted row arrives; at least 0.
        ranks_per_node: consecutive ranks that share a node; a divisor of the number of ranks.
        intra, inter: weight of a row from the same node and from another (the default: 450 against 50 GB/s).

    Raises:
        ValueError: bad counts or weights.
        SolverError: HiGHS gave no optimal answer.
    """
    counts = check_counts(counts_PE, placement)
    for name, value in (("alpha", alpha), ("intra", intra), ("inter", inter)):
        if not (np.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}, expected a number of at least 0")
    if ranks_per_node < 1 or placement.num_ranks % ranks_per_node:
        raise ValueError(f"ranks_per_node is {ranks_per_node}, expected a divisor of {placement.num_ranks} ranks")
    load_E = counts.sum(axis=0)
    mean = load_E.sum() / placement.num_ranks
    unit = max(float(mean), 1.0)
    rows_N3, compute, communication = _solve(counts / unit, placement, alpha, ranks_per_node, intra, inter)
    expert_N, replica_N = np.nonzero(placement.rank_ED >= 0)
    # Whole parts of the three kinds, then what rounding left over, levelled by the flow to the load that the program
    # chose to allow (raised where rounding needs a row more).
    whole_3ED = np.zeros((3, *placement.rank_ED.shape), dtype=np.int64)
    whole_3ED[:, expert_N, replica_N] = np.floor(rows_N3.T * unit + 1e-6)
    filled_ED = np.minimum(np.cumsum(whole_3ED.sum(axis=0), axis=1), load_E[:, None])
    target = int(np.ceil((compute - 1e-6) * unit))
    loads = flow.solve(load_E, placement, np.diff(filled_ED, axis=1, prepend=0), target)
    quota_PED = route(counts, loads.rows_ED, placement, ranks_per_node, own_ED=whole_3ED[0], near_ED=whole_3ED[1])
    plan = Plan(placement, quota_PED, loads.certificate)
    return TradeOff(
        alpha,
        compute * unit,
        communication * unit,
        plan,
        float(received(plan, ranks_per_node, intra, inter).max()),
    )


def trade_off_curve(
    counts_PE: Any, placement: Placement, alphas: Sequence[float], ranks_per_node: int, **weights: float
) -> list[TradeOff]:
    """`communication_aware` for each alpha, in the order given."""
    return [communication_aware(counts_PE, placement, alpha, ranks_per_node, **weights) for alpha in alphas]


def _solve(
    counts_PE: np.ndarray, placement: Placement, alpha: float, ranks_per_node: int, intra: float, inter: float
) -> tuple[np.ndarray, float, float]:
    """Rows [N, 3] from own rank, own node, elsewhere for each replica; maximum load; maximum weighted rows received."""
    expert_N, replica_N = np.nonzero(placement.rank_ED >= 0)
    rank_N = placement.rank_ED[expert_N, replica_N]
    n, experts, ranks = len(expert_N), placement.num_experts, placement.num_ranks
    nodes = ranks // ranks_per_node
    on_node = counts_PE.reshape(nodes, ranks_per_node, experts).sum(axis=1)
    node_N = rank_N // ranks_per_node
    # Rows of the matrix: loads of experts, computed rows of ranks, received rows of ranks, rows that start on a node.
    first_rank, first_received = experts, experts + ranks
    first_node = experts + 2 * ranks
    supply_row_N = first_node + expert_N * nodes + node_N
    columns: list[list[tuple[int, float]]] = []
    for i in range(n):
        always = [(int(expert_N[i]), 1.0), (first_rank + int(rank_N[i]), 1.0)]
        arrives, starts = first_received + int(rank_N[i]), (int(supply_row_N[i]), 1.0)
        columns.append([*always, starts])
        columns.append([*always, (arrives, intra), starts])
        columns.append([*always, (arrives, inter)])
    columns.append([(first_rank + g, -1.0) for g in range(ranks)])
    columns.append([(first_received + g, -1.0) for g in range(ranks)])
    num_row = first_node + experts * nodes
    inf = highspy.kHighsInf
    load_E = counts_PE.sum(axis=0)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(columns), num_row
    lp.col_cost_ = np.array([0.0] * (3 * n) + [1.0, alpha])
    lp.col_lower_ = np.zeros(len(columns))
    upper = np.full(len(columns), inf)
    upper[0 : 3 * n : 3] = local_rows(counts_PE, placement)[expert_N, replica_N]
    lp.col_upper_ = upper
    lp.row_lower_ = np.concatenate([load_E, np.full(num_row - experts, -inf)])
    lp.row_upper_ = np.concatenate([load_E, np.zeros(2 * ranks), on_node.T.ravel()])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum([len(column) for column in columns])])
    lp.a_matrix_.index_ = np.array([row for column in columns for row, _ in column])
    lp.a_matrix_.value_ = np.array([value for column in columns for _, value in column])
    lp.integrality_ = [highspy.HighsVarType.kContinuous] * len(columns)
    highs = quiet_highs()
    for what, status in (("building the model", highs.passModel(lp)), ("running the solver", highs.run())):
        if status == highspy.HighsStatus.kError:
            raise SolverError(f"HiGHS refused: {what}; no plan was made")
    status = highs.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        raise SolverError(f"HiGHS ended with {highs.modelStatusToString(status)}, expected Optimal; no plan was made")
    values = np.asarray(highs.getSolution().col_value)
    rows_N3 = np.maximum(values[: 3 * n].reshape(n, 3), 0.0)
    received_P = np.bincount(rank_N, weights=rows_N3 @ np.array([0.0, intra, inter]), minlength=ranks)
    # At alpha = 0 the variable for received rows is free to be anything above them.
    return rows_N3, float(values[-2]), float(received_P.max())
