"""Counts between ranks: `tell` and `hear` of the planner on memory of their own, words coming late and in any order."""

from __future__ import annotations

import random
import types
from typing import Any

import pytest
from kernel_source import kernel_function

from moe_ref.layout import SIDES
from moe_ref.runtime.encoding import counts_signal

HEAP, COUNTS, STRIDE, EXPERTS, RANKS = 1 << 40, 4096, 32, 5, 3
SCRATCH, ROLE, WAIT = 0, "planner", "counts"


class Exchange:
    """The heaps of RANKS ranks, and the kernel's functions on them; `late`: words that haven't come yet."""

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}
        self.late: list[tuple[int, int]] = []
        self.shared: dict[int, int] = {SCRATCH + 8: 1}
        self.failed: list[tuple] = []
        self.polls, self.time, self.abort_at = 0, 0, None
        k = types.SimpleNamespace(ranks=RANKS, counts_stride=STRIDE, experts=EXPERTS, put=False)
        self.k = k
        names: dict[str, Any] = {
            "SIDES": SIDES, "counts_signal": counts_signal, "read": self.read, "write": self.write, "fail": self.fail,
            "Int32": self.int32, "Int64": int, "Boolean": bool, "aborted": lambda a: self.aborted(),
            "Role": types.SimpleNamespace(PLANNER=ROLE), "Wait": types.SimpleNamespace(COUNTS=WAIT),
            "cute": types.SimpleNamespace(
                make_rmem_tensor=lambda size, kind: [0] * size,
                arch=types.SimpleNamespace(globaltimer=self.clock, store=self.shared.__setitem__),
            ),
        }  # fmt: skip
        names["told_at"] = kernel_function("exchange", "told_at", **names)
        self.tell_word = kernel_function("exchange", "tell", **names)
        self.hear_column = kernel_function("exchange", "hear", **names)

    @staticmethod
    def int32(value: int) -> int:
        value &= 0xFFFFFFFF
        return value - (1 << 32) if value >> 31 else value

    def clock(self) -> int:
        self.time += 10
        return self.time

    def aborted(self) -> bool:
        return self.abort_at is not None and self.polls >= self.abort_at

    def fail(self, a: Any, *what: Any) -> None:
        self.failed.append(what)

    def read(self, address: int, index: int, kind: Any, sem: str, scope: str) -> int:
        assert (sem, scope) == ("relaxed", "sys")
        self.polls += 1
        # now and then one more word is there, whichever
        if self.late and self.polls % 3 == 0:
            at, value = self.late.pop(random.Random(self.polls).randrange(len(self.late)))
            self.memory[at] = value
        return self.memory.get(address + index * 8, 0)

    def write(self, address: int, index: int, value: int, kind: Any = None, **order: str) -> None:
        if kind is None:
            self.memory[address + index * 4] = value
        else:
            # one store of 8 bytes to wherever it goes
            assert order == {"sem": "relaxed", "scope": "sys"}
            self.late.append((address + index * 8, value))

    def rank(self, p: int, deadline: int = 1 << 30) -> Any:
        return types.SimpleNamespace(heap=HEAP * (p + 1), counts_at=COUNTS, rank=p, deadline=deadline)

    def tell(self, p: int, side: int, epoch: int, values: list[int]) -> None:
        for target in range(RANKS):
            for column, value in enumerate(values):
                row = (side * RANKS + p) * STRIDE + column
                self.tell_word(self.k, self.rank(p), HEAP * (target + 1), row, value, epoch, True)

    def heard(self, p: int, side: int, columns: int) -> list[list[int]]:
        at = HEAP * (p + 1) + COUNTS
        return [[self.memory[at + ((side * RANKS + q) * STRIDE + c) * 4] for c in range(columns)] for q in range(RANKS)]


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_hears_what_every_rank_told_in_this_call(seed):
    """Words of earlier calls of the same side are there before, with other counts; each comes when it likes."""
    exchange, choose = Exchange(), random.Random(seed)
    for call in range(6):
        side, epoch = call % SIDES, 40 + call
        # counts of 0 and 2**26, a status word, S; negative numbers stay negative
        rows = [[choose.choice((0, 1, 7, 1 << 26, -3)) for _ in range(EXPERTS + 2)] for _ in range(RANKS)]
        for p in choose.sample(range(RANKS), RANKS):
            exchange.tell(p, side, epoch, rows[p])
        for p in choose.sample(range(RANKS), RANKS):
            for column in choose.sample(range(EXPERTS + 2), EXPERTS + 2):
                exchange.hear_column(exchange.k, exchange.rank(p), side, column, epoch, SCRATCH)
            assert exchange.heard(p, side, EXPERTS + 2) == rows
    assert (exchange.failed, exchange.shared[SCRATCH + 8]) == ([], 1)


def test_a_word_of_the_call_before_the_last_is_not_taken_for_this_ones():
    exchange = Exchange()
    for p in range(RANKS):
        exchange.tell(p, 0, 8, [p] * 3)
    exchange.hear_column(exchange.k, exchange.rank(0), 0, 0, 8, SCRATCH)
    for p in (0, 2):
        exchange.tell(p, 0, 10, [p] * 3)
    late = exchange.rank(0, deadline=5_000)
    exchange.hear_column(exchange.k, late, 0, 0, 10, SCRATCH)
    assert exchange.failed == [(ROLE, WAIT, 1, counts_signal(8), counts_signal(10))], "rank 1 hasn't told"
    assert exchange.shared[SCRATCH + 8] == 0


def test_who_hears_that_another_role_gave_up_stops():
    exchange = Exchange()
    exchange.abort_at = 50
    exchange.hear_column(exchange.k, exchange.rank(2), 1, 4, 0, SCRATCH)
    assert (exchange.failed, exchange.shared[SCRATCH + 8]) == ([], 0)


def test_a_single_rank_tells_itself_counts_as_they_are():
    exchange = Exchange()
    exchange.tell_word(exchange.k, exchange.rank(0), HEAP, 3, 77, 5, False)
    assert exchange.memory == {HEAP + COUNTS + 12: 77}
    assert not exchange.late
