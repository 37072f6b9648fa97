"""The plan is a pure function of counts and placement: whatever happened before, wherever it is computed."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest

from moe_ref.balance import SolverError, flow_compiled, replica_loads, schedule
from moe_ref.balance.agreement import PlanMismatch, check_same_plan
from moe_ref.balance.loads import LoadModel
from moe_ref.balance.lp import LinearProgram
from moe_ref.balance.overlap import PlanWorker
from moe_ref.placement import Placement, symmetric

METHODS = ("flow", "flow_compiled", "lp")


def fresh(placement: Placement) -> Placement:
    """An equal placement without anything that was kept with the other one."""
    return Placement.from_replicas(placement.ranks_of_expert, placement.num_ranks)


@pytest.mark.parametrize("method", METHODS)
def test_a_hundred_histories_one_plan(method: str) -> None:
    placement = symmetric(8, 32, 2).placement
    asked = next(LoadModel(8, 32, 0.9, seed=99).batches(1))
    expected = schedule(asked, placement, method).digest()
    rng = np.random.default_rng(0)
    for history in range(100):
        # A restart, an elastic join, a skipped step: another past, sometimes with an error in it.
        here = fresh(placement) if history % 3 == 0 else placement
        for counts in LoadModel(8, 32, float(rng.uniform(0, 2)), seed=history).batches(int(rng.integers(0, 4))):
            schedule(counts, here, method)
        if history % 5 == 0:
            with pytest.raises(ValueError, match="load of rank 0, expert 0 is -1"):
                schedule(np.full((8, 32), -1), here, method)
        assert schedule(asked, here, method).digest() == expected


def test_a_warm_started_program_remembers() -> None:
    """Why `lp` forgets before every solve: same loads, same m, another x. Don't optimise this back."""
    placement = symmetric(8, 32, 2).placement
    asked = next(LoadModel(8, 32, 0.9, seed=99).batches(1)).sum(axis=0)
    answers, optima = set(), set()
    for history in range(10):
        program = LinearProgram(placement, "paper", warm=True)
        for counts in LoadModel(8, 32, 1.0, seed=history).batches(history):
            program.fractions(counts.sum(axis=0))
        rows_ED, m = program.fractions(asked)
        answers.add(np.round(rows_ED, 3).tobytes())
        optima.add(round(m, 3))
    assert len(optima) == 1
    assert len(answers) > 1, "a warm start gave the same answer after ten histories; then it could be allowed"


@pytest.mark.parametrize("method", METHODS)
def test_threads_and_their_timing_change_nothing(method: str) -> None:
    placement = symmetric(8, 64, 2).placement
    batches = list(LoadModel(8, 64, 0.8, seed=5).batches(6))
    expected = [schedule(counts, fresh(placement), method).digest() for counts in batches]
    got: list[list[str]] = [[] for _ in range(4)]

    def work(thread: int) -> None:
        with PlanWorker(method) as worker:
            mine = fresh(placement)
            for i in range(len(batches)):
                ticket = worker.submit(batches[(i + thread) % len(batches)], mine)
                if thread % 2:
                    schedule(batches[0], mine, "flow")
                got[thread].append(ticket.result().digest())

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread, digests in enumerate(got):
        assert digests == [expected[(i + thread) % len(batches)] for i in range(len(batches))]


_CHILD = """
import json
from moe_ref.balance import schedule
from moe_ref.balance.loads import LoadModel
from moe_ref.placement import asymmetric, symmetric
counts = list(LoadModel(8, 32, 1.2, seed=3).batches(2))
placements = [symmetric(8, 32, 3).placement, asymmetric(counts[0].sum(axis=0), 8, 9)]
print(json.dumps([schedule(c, p, m).digest() for c in counts for p in placements for m in %r]))
"""


def test_other_processes_make_the_same_plan() -> None:
    """Hash seeds and thread counts differ between ranks of a job; plans and placements must not."""
    outputs = []
    for seed in ("1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": seed[0], "NUMBA_NUM_THREADS": seed[0]}
        code = _CHILD % (METHODS,)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        assert done.stdout.count("\n") == 1, "HiGHS greets on stdout, where programs expect results only"
        outputs.append(json.loads(done.stdout))
    assert outputs[0] == outputs[1]
    for plain, compiled in zip(outputs[0][0::3], outputs[0][1::3], strict=True):
        assert plain == compiled


@pytest.mark.parametrize("method", ["flow", "flow_compiled"])
def test_ties_are_broken_by_id(method: str) -> None:
    """Equal loads everywhere: the lower replica takes the odd row, in every build."""
    placement = Placement.from_replicas([[0, 1], [1, 0], [0, 1]], 2)
    assert replica_loads([3, 3, 3], placement, method).rows_ED.tolist() == [[2, 1], [2, 1], [2, 1]]


def test_each_rank_planning_from_its_own_view_is_found_out() -> None:
    """Rank 1 plans from its own counts instead of the gathered ones: accuracy would fall silently."""
    placement = symmetric(4, 8, 2).placement
    gathered = next(LoadModel(4, 8, 1.0).batches(1))
    own_view = np.where(np.arange(4)[:, None] == 1, gathered, 0)
    plans = [schedule(own_view if rank == 1 else gathered, placement) for rank in range(4)]
    digests = [plan.digest() for plan in plans]
    for plan in plans:
        with pytest.raises(PlanMismatch, match=r"ranks \[1\] hold another plan than the other 3 of 4"):
            check_same_plan(plan, lambda mine: digests)
    check_same_plan(plans[0], lambda mine: [mine] * 4)


class _Broken:
    """HiGHS as it behaves when something goes wrong."""

    def __init__(self, highs, **answers) -> None:
        self._highs, self._answers = highs, answers

    def __getattr__(self, name):
        if name in self._answers:
            return lambda *arguments: self._answers[name]
        return getattr(self._highs, name)


def test_a_failing_solver_never_yields_an_old_plan() -> None:
    import highspy

    placement = symmetric(4, 8, 2).placement
    load = np.arange(1, 9) * 10
    for answers, message in (
        ({"run": highspy.HighsStatus.kError}, "running the solver"),
        ({"changeRowsBounds": highspy.HighsStatus.kError}, "changing the loads"),
        ({"getModelStatus": highspy.HighsModelStatus.kInfeasible}, "Infeasible"),
        ({"getModelStatus": highspy.HighsModelStatus.kTimeLimit}, "Time limit"),
        # Says optimal but didn't solve: what it holds is the previous answer.
        ({"run": highspy.HighsStatus.kOk}, "breaks a constraint"),
    ):
        program = LinearProgram(placement, "paper", warm=True)
        program.solve(load)
        program._highs = _Broken(program._highs, **{"getModelStatus": highspy.HighsModelStatus.kOptimal, **answers})
        with pytest.raises(SolverError, match=message):
            program.solve(load[::-1].copy())


def test_highs_refuses_a_nan_and_we_listen() -> None:
    """Even past our own checks, a bad load is an error and not the plan of the step before."""
    program = LinearProgram(symmetric(4, 8, 2).placement)
    load = np.full(8, 10.0)
    program.fractions(load)
    load[3] = np.nan
    with pytest.raises(SolverError, match="HiGHS refused"):
        program.fractions(load)


def test_scheduling_changes_no_input() -> None:
    placement = symmetric(4, 8, 2).placement
    counts = next(LoadModel(4, 8, 1.0).batches(1))
    before = counts.copy()
    for method in METHODS:
        schedule(counts, placement, method)
    flow_compiled.solve(before.sum(axis=0), placement)
    assert (counts == before).all()


def test_a_placement_that_was_used_can_be_copied_and_sent() -> None:
    """What solvers keep with a placement stays behind; layers are deep-copied, placements sent to other processes."""
    placement = symmetric(4, 8, 2).placement
    counts = next(LoadModel(4, 8, 1.0).batches(1))
    for method in METHODS:
        schedule(counts, placement, method)
    for copied in (copy.deepcopy(placement), copy.copy(placement), pickle.loads(pickle.dumps(placement))):
        assert copied == placement
        assert set(copied.__dict__) == {"ranks_of_expert", "num_ranks"}
        for method in METHODS:
            assert schedule(counts, copied, method).digest() == schedule(counts, placement, method).digest()


def test_threads_may_share_a_linear_program() -> None:
    placement = symmetric(8, 32, 2).placement
    batches = list(LoadModel(8, 32, 1.0).batches(4))
    expected = [schedule(counts, fresh(placement), "lp").digest() for counts in batches]
    wrong: list[int] = []

    def work() -> None:
        for _ in range(20):
            for i, counts in enumerate(batches):
                if schedule(counts, placement, "lp").digest() != expected[i]:
                    wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_place_to_keep_compiled_code_is_not_needed() -> None:
    """In a read-only container neither the package nor the home can be written."""
    code = (
        "from numba.core import caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "from moe_ref.balance import schedule\n"
        "from moe_ref.placement import symmetric\n"
        "print(schedule([[3] * 8] * 4, symmetric(4, 8, 2).placement, 'flow_compiled').max_load)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "24\n"
