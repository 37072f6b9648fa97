"""The linear program: two formulations, warm or cold, one optimum."""

from __future__ import annotations

import numpy as np
import pytest
from hypergraphs import instances
from hypothesis import given, settings

from moe_ref.balance import flow_compiled, lp
from moe_ref.balance.loads import LoadModel
from moe_ref.placement import Placement, symmetric


@settings(max_examples=60)
@given(instances(max_ranks=12, max_experts=30))
def test_formulations_and_starts_agree(instance) -> None:
    placement, load = instance
    expected = flow_compiled.solve(load, placement).max_load
    for formulation in lp.FORMULATIONS:
        for warm in (False, True):
            program = lp.LinearProgram(placement, formulation, warm=warm)
            for other in (load, load[::-1].copy(), np.zeros_like(load), load):
                answer = program.solve(other)
                assert (answer.rows_ED.sum(axis=1) == other).all()
            assert answer.max_load == expected


def test_the_eliminated_form_of_two_replicas_has_no_equality() -> None:
    placement = symmetric(8, 32, 2).placement
    program = lp.LinearProgram(placement, "eliminated")
    assert (program._highs.getNumCol(), program._highs.getNumRow()) == (33, 8)
    paper = lp.LinearProgram(placement, "paper")
    assert (paper._highs.getNumCol(), paper._highs.getNumRow()) == (65, 40)


def test_a_warm_start_saves_iterations() -> None:
    placement = symmetric(16, 64, 2).placement
    iterations = {}
    for warm in (False, True):
        program = lp.LinearProgram(placement, "paper", warm=warm)
        total = 0
        for counts in LoadModel(16, 64, 0.5, noise=0.02).batches(10):
            program.solve(counts.sum(axis=0))
            total += program._highs.getInfo().simplex_iteration_count
        iterations[warm] = total
    assert iterations[True] < iterations[False]


def test_single_replicas_leave_nothing_to_decide() -> None:
    placement = Placement.contiguous(6, 3)
    for formulation in lp.FORMULATIONS:
        assert lp.LinearProgram(placement, formulation).solve(np.arange(6)).max_load == 9


def test_rounding_that_disagrees_with_highs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    program = lp.LinearProgram(symmetric(4, 8, 2).placement)
    honest = program.fractions
    monkeypatch.setattr(program, "fractions", lambda load: (honest(load)[0], honest(load)[1] + 5))
    with pytest.raises(lp.SolverError, match=r"HiGHS says m = .*, but the smallest maximum in whole rows is 20"):
        program.solve(np.full(8, 10))
