"""One optimum, four ways to it: brute force over sets, the density formula, the flow, the linear program."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypergraphs import brute_force_density, instances, rank_loads
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ref.balance import flow, flow_compiled, lp, replica_loads, schedule
from moe_ref.balance.flow import fill_evenly
from moe_ref.placement import Placement, max_density, symmetric
from moe_ref.placement.density import trapped_load


@settings(max_examples=1000)
@given(instances())
def test_lp_equals_density_equals_flow_on_a_thousand_hypergraphs(instance) -> None:
    placement, load = instance
    exact = brute_force_density(load, placement)

    density = max_density(load, placement)
    assert density.value == exact
    assert Fraction(trapped_load(load, placement, density.witness), len(density.witness)) == exact

    unit = max(float(load.sum()) / placement.num_ranks, 1.0)
    for formulation in lp.FORMULATIONS:
        program = lp.LinearProgram(placement, formulation)
        assert abs(program.fractions(load)[1] - exact) <= 1e-6 * unit
        assert program.solve(load).max_load == math.ceil(exact)

    for solve in (flow.solve, flow_compiled.solve):
        answer = solve(load, placement)
        assert answer.max_load == math.ceil(exact) == rank_loads(answer.rows_ED, placement).max()
        assert (answer.rows_ED.sum(axis=1) == load).all()
        assert answer.rows_ED.min() >= 0
        assert (answer.rows_ED[placement.rank_ED < 0] == 0).all()
        # The certificate alone proves the maximum, whoever found it.
        assert math.ceil(Fraction(trapped_load(load, placement, answer.certificate), len(answer.certificate))) == (
            answer.max_load
        )


@settings(max_examples=100)
@given(instances(max_ranks=24, max_experts=60))
def test_compiled_flow_takes_the_same_steps(instance) -> None:
    placement, load = instance
    plain, compiled = flow.solve(load, placement), flow_compiled.solve(load, placement)
    assert (plain.rows_ED == compiled.rows_ED).all()
    assert (plain.max_load, plain.certificate) == (compiled.max_load, compiled.certificate)


@pytest.mark.parametrize("expert", [0, 17, 31])
def test_one_expert_with_everything(expert: int) -> None:
    placement = symmetric(8, 32, 2).placement
    load = np.zeros(32, dtype=np.int64)
    load[expert] = 10**12 + 1
    for method in ("flow", "flow_compiled", "lp"):
        answer = replica_loads(load, placement, method)
        assert answer.max_load == (10**12 + 2) // 2
        assert answer.certificate == frozenset(placement.ranks_of_expert[expert])


@pytest.mark.parametrize("method", ["flow", "flow_compiled", "lp"])
def test_no_load_at_all(method: str) -> None:
    placement = symmetric(4, 8, 3).placement
    plan = schedule(np.zeros((4, 8), dtype=np.int64), placement, method)
    assert plan.max_load == 0
    assert plan.is_optimal
    assert plan.local_share == 1.0


def test_a_placement_without_freedom() -> None:
    placement = Placement.from_replicas([[0], [0], [2]], 3)
    for method in ("flow", "flow_compiled", "lp"):
        answer = replica_loads([5, 6, 1], placement, method)
        assert answer.rows_ED[:, 0].tolist() == [5, 6, 1]
        assert (answer.max_load, answer.certificate) == (11, frozenset({0}))


@given(st.integers(0, 60), st.lists(st.integers(0, 30), min_size=1, max_size=7))
def test_filling_evenly_is_water_filling(amount: int, load: list[int]) -> None:
    ranks = list(range(len(load)))
    after = list(load)
    parts = fill_evenly(amount, ranks, after)
    assert sum(parts) == amount
    assert min(parts) >= 0
    assert after == [a + b for a, b in zip(load, parts, strict=True)]
    # Whoever got something is at most one row above everybody else.
    assert all(after[i] <= min(after) + 1 for i in ranks if parts[i])


def test_the_certificate_is_a_proof_and_not_the_answer_repeated() -> None:
    placement = Placement.from_replicas([[0, 1], [0, 1], [1, 2], [2, 3]], 4)
    answer = replica_loads([10, 11, 1, 2], placement)
    assert answer.max_load == 11  # 21 rows trapped on ranks 0 and 1
    assert answer.certificate == frozenset({0, 1})


@given(instances())
def test_a_round_of_pouring_shares_no_rank(instance) -> None:
    """Every expert with several replicas is in one round, the first that has its ranks free."""
    placement, _ = instance
    ranks_of = placement.ranks_of_expert
    assert sorted(e for experts in placement.rounds for e in experts) == [
        e for e, ranks in enumerate(ranks_of) if len(ranks) > 1
    ]
    for number, experts in enumerate(placement.rounds):
        used = [rank for e in experts for rank in ranks_of[e]]
        assert len(used) == len(set(used))
        for e in experts:
            for earlier in placement.rounds[:number]:
                assert any(set(ranks_of[other]) & set(ranks_of[e]) for other in earlier if other < e)


def test_one_expert_alone_can_be_the_certificate() -> None:
    placement = Placement.from_replicas([[0], [1, 2], [2, 3], [3, 0], [0, 1]], 4)
    load = np.array([4, 30, 1, 2, 3])
    for solve in (flow.solve, flow_compiled.solve):
        answer = solve(load, placement)
        assert (answer.max_load, answer.certificate) == (15, frozenset({1, 2}))
        assert rank_loads(answer.rows_ED, placement).max() == 15
    content = flow.solve(load, placement, target=20)
    assert (content.max_load, content.certificate) == (20, frozenset(range(4)))


def test_a_path_that_is_used_up_leads_nowhere_in_the_same_search() -> None:
    """Rank 0 can give 2 rows away by expert 0, through ranks 1 and 2; rank 3's path is its own."""
    placement = Placement.from_replicas([[0, 1], [1, 2], [1, 4], [3, 5]], 6)
    rows, load = [[2, 0], [5, 0], [5, 0], [4, 0]], [14, 10, 8, 12, 9, 9]
    moved, _ = flow.search(rows, load, placement, 10)
    # rank 1 gives the two rows to rank 2; then nothing more comes to rank 1, and rank 4 stays where it is
    assert (moved, load) == (3, [12, 10, 10, 11, 9, 10])
    assert rows == [[0, 2], [3, 2], [5, 0], [3, 1]]
