"""The planning worker: order, errors and time-outs surface where the plan is asked for."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from moe_ref.balance import schedule
from moe_ref.balance import schedule as schedule_function
from moe_ref.balance.loads import LoadModel
from moe_ref.balance.overlap import PlanTimeout, PlanWorker, pipelined
from moe_ref.placement import symmetric

PLACEMENT = symmetric(8, 32, 2).placement
BATCHES = list(LoadModel(8, 32, 0.7).batches(8))


@pytest.mark.parametrize("method", ["flow", "flow_compiled", "lp"])
def test_plans_are_the_same_as_without_a_thread(method: str) -> None:
    with PlanWorker(method) as worker:
        tickets = [worker.submit(counts, PLACEMENT) for counts in BATCHES]
        for counts, ticket in reversed(list(zip(BATCHES, tickets, strict=True))):
            assert ticket.result().digest() == schedule(counts, PLACEMENT, method).digest()
            assert ticket.result().digest() == ticket.result().digest()


def test_one_thread_for_good() -> None:
    before = threading.active_count()
    with PlanWorker() as worker:
        for counts in BATCHES:
            worker.submit(counts, PLACEMENT).result()
            assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_counts_may_be_reused_at_once() -> None:
    counts = BATCHES[0].copy()
    with PlanWorker("flow") as worker:
        ticket = worker.submit(counts, PLACEMENT)
        counts[:] = 0
        assert ticket.result().digest() == schedule(BATCHES[0], PLACEMENT).digest()


def test_errors_surface_at_the_point_of_use_and_the_worker_lives_on() -> None:
    with PlanWorker() as worker:
        bad = worker.submit(-BATCHES[0], PLACEMENT)
        good = worker.submit(BATCHES[1], PLACEMENT)
        with pytest.raises(ValueError, match="load of rank 0, expert 0 is -"):
            bad.result()
        with pytest.raises(ValueError, match="load of rank 0, expert 0 is -"):
            bad.result()
        assert good.result().digest() == schedule(BATCHES[1], PLACEMENT).digest()
        with pytest.raises(ValueError, match="expected 2 dimensions"):
            worker.submit(None, PLACEMENT).result()


def test_a_late_plan_is_an_error_and_never_an_old_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow(*arguments):
        release.wait(10)
        return schedule_function(*arguments)

    with PlanWorker("flow") as worker:
        worker.submit(BATCHES[0], PLACEMENT).result()
        monkeypatch.setattr("moe_ref.balance.overlap.schedule", slow)
        ticket = worker.submit(BATCHES[1], PLACEMENT)
        start = time.perf_counter()
        with pytest.raises(PlanTimeout, match=r"plan 1 isn't ready after 0.05 s"):
            ticket.result(timeout_s=0.05)
        assert time.perf_counter() - start < 5
        with pytest.raises(PlanTimeout, match="doesn't end"):
            worker.close(timeout_s=0.05)
        assert not ticket.done
        release.set()
        assert ticket.result().digest() == schedule(BATCHES[1], PLACEMENT).digest()


def test_a_closed_worker_refuses_orders_but_keeps_its_promises() -> None:
    worker = PlanWorker()
    ticket = worker.submit(BATCHES[0], PLACEMENT)
    worker.close()
    worker.close()
    assert ticket.result().max_load > 0
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(BATCHES[0], PLACEMENT)


@pytest.mark.parametrize("count", [0, 1, 2, 8])
def test_pipelined_plans_come_in_order_one_ahead(count: int) -> None:
    asked: list[int] = []

    def gates():
        for i in range(count):
            asked.append(i)
            yield BATCHES[i]

    with PlanWorker() as worker:
        for i, plan in enumerate(pipelined(worker, gates(), PLACEMENT)):
            assert plan.digest() == schedule(BATCHES[i], PLACEMENT).digest()
            assert asked == list(range(min(i + 2, count)))
    assert len(asked) == count


def test_an_error_in_the_pipeline_belongs_to_its_micro_batch() -> None:
    batches = [BATCHES[0], np.full((8, 32), -1), BATCHES[2]]
    with PlanWorker() as worker:
        plans = pipelined(worker, batches, PLACEMENT)
        assert next(plans).digest() == schedule(BATCHES[0], PLACEMENT).digest()
        with pytest.raises(ValueError, match="is -1"):
            next(plans)
