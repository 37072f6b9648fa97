"""Planning while the permutation runs: one worker thread, kept for good (FineMoE, section 5.4 and appendix A.2).

When the gate is done and the counts are gathered, `submit` hands them to the worker; the caller goes on with its
permutation and asks for the plan when dispatch needs it. The compiled flow releases the interpreter lock, so both run
at once. Where there is nothing to overlap with, `pipelined` plans micro-batch i + 1 while i computes.

One thread for good, because a new one costs milliseconds inside HiGHS; first in, first out. What goes wrong in the
worker (bad counts, solver failure) is raised where the plan is asked for, and so is a plan that doesn't come in time:
there is no way to get an old plan instead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import numpy as np

from moe_ref.balance.plan import Plan
from moe_ref.balance.schedule import METHODS, schedule
from moe_ref.replicas import Placement


class PlanTimeout(TimeoutError):
    """A plan didn't come in time."""


class PlanTicket:
    """A plan that was ordered. Made by `PlanWorker.submit`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._done = threading.Event()
        self._plan: Plan | None = None
        self._error: BaseException | None = None

    def _finish(self, plan: Plan | None, error: BaseException | None) -> None:
        self._plan, self._error = plan, error
        self._done.set()

    @property
    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._done.is_set()

    def result(self, timeout_s: float = 30.0) -> Plan:
        """The plan, waiting for it if need be.

        Raises:
            PlanTimeout: it isn't there after `timeout_s` seconds; it may be asked for again.
            ValueError, SolverError: whatever planning raised.
        """
        if not self._done.wait(timeout_s):
            raise PlanTimeout(f"plan {self.number} isn't ready after {timeout_s} s; the worker may be busy or stuck")
        if self._error is not None:
            raise self._error
        assert self._plan is not None
        return self._plan


class PlanWorker:
    """The worker thread. Use as a context manager, or call `close`.

    Args:
        method: as for `schedule`.
    """

    def __init__(self, method: str = "flow_compiled") -> None:
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}, expected one of {', '.join(METHODS)}")
        self._method = method
        self._orders: SimpleQueue[tuple[PlanTicket, np.ndarray, Placement] | None] = SimpleQueue()
        self._submitted = 0
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="moe-ref-plan", daemon=True)
        self._thread.start()

    def submit(self, counts_PE: Any, placement: Placement) -> PlanTicket:
        """Order a plan for gathered counts, integers [P, E]; returns at once. The counts are copied.

        Raises:
            RuntimeError: the worker was closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("this PlanWorker is closed; make a new one")
            ticket = PlanTicket(self._submitted)
            self._submitted += 1
            self._orders.put((ticket, np.array(counts_PE), placement))
        return ticket

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish what was ordered and end the thread.

        Raises:
            PlanTimeout: it doesn't end within `timeout_s`.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._orders.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise PlanTimeout(f"the planning thread doesn't end within {timeout_s} s")

    def __enter__(self) -> PlanWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            ticket, counts_PE, placement = order
            try:
                ticket._finish(schedule(counts_PE, placement, self._method), None)
            except BaseException as error:  # handed over to whoever asks for the plan; the thread must live on
                ticket._finish(None, error)


def pipelined(
    worker: PlanWorker, batches: Iterable[Any], placement: Placement, timeout_s: float = 30.0
) -> Iterator[Plan]:
    """Plans of consecutive micro-batches, each ordered one micro-batch ahead.

    While the caller works with plan i, plan i + 1 is being made; so the counts of i + 1 must be known by then (the
    gates of all micro-batches of a stage run first).
    """
    waiting: PlanTicket | None = None
    for counts_PE in batches:
        ordered = worker.submit(counts_PE, placement)
        if waiting is not None:
            yield waiting.result(timeout_s)
        waiting = ordered
    if waiting is not None:
        yield waiting.result(timeout_s)
