"""Messages between actors, the rules they follow, and the two things that actors leave to others: transport and data.

A put with signal is two deliveries, the payload and then its `Signal`; everything else is a message inside a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from moe_ref.errors import CheckFailed
from moe_ref.layout import SIDES
from moe_ref.runtime.callplan import Segment


class Launch(NamedTuple):
    """The host (or the stream) to a rank: begin call `epoch`."""

    epoch: int


class CountsPut(NamedTuple):
    """A rank's row of E counts, to every rank, itself included."""

    epoch: int
    source: int
    dest: int
    data: Any = None


class RowsPut(NamedTuple):
    """Rows of one segment, to their owner."""

    epoch: int
    segment: Segment
    data: Any = None


class ResultsPut(NamedTuple):
    """One column tile of the results of one segment, home."""

    epoch: int
    segment: Segment
    column: int
    data: Any = None


Put = CountsPut | RowsPut | ResultsPut


class Signal(NamedTuple):
    """The signal of a put, delivered after its payload."""

    put: Put


class Ready(NamedTuple):
    """Subscriber or Processor to Scheduler: tasks of `columns` column tiles; `word` is the one of column 0."""

    word: int
    columns: int


class Mail(NamedTuple):
    """Scheduler to Processor: the next task word, or STOP."""

    processor: int
    word: int


class Finish(NamedTuple):
    """A Processor to itself: the task that it started is done."""

    processor: int


class Idle(NamedTuple):
    """Processor to Scheduler: room for one more mail."""

    processor: int


class Stopped(NamedTuple):
    """Processor to Scheduler: read STOP, has ended."""

    processor: int


Message = Launch | Put | Signal | Ready | Mail | Finish | Idle | Stopped


def destination(put: Put) -> int:
    """Rank whose memory a put goes to."""
    if isinstance(put, CountsPut):
        return put.dest
    return put.segment.owner if isinstance(put, RowsPut) else put.segment.source


class Transport(Protocol):
    """Who delivers messages, and when."""

    def post(self, rank: int, message: Message) -> None:
        """Take a message sent by rank; a local message comes back to the same rank, a put goes to its destination."""
        ...

    def call_ended(self, rank: int, epoch: int) -> None:
        """A rank has run all its tasks of a call."""
        ...


class Data:
    """What puts carry and tasks compute; this one moves nothing (timing only)."""

    def counts_payload(self, epoch: int, source: int) -> Any:
        """What a CountsPut carries."""

    def rows_payload(self, epoch: int, segment: Segment) -> Any:
        """What a RowsPut carries."""

    def land(self, put: Put) -> None:
        """The payload of a put is written at its destination."""

    def read_counts(self, rank: int, epoch: int) -> None:
        """The gate reads the counts of all ranks."""

    def gemm0(self, rank: int, epoch: int, row_tile: int, column: int) -> None:
        """Run a GEMM0 task."""

    def gemm1(self, rank: int, epoch: int, row_tile: int, column: int) -> list[Any]:
        """Run a GEMM1 task; what goes home, one payload per segment of the tile."""
        return []

    def combine(self, rank: int, epoch: int, token_tile: int) -> None:
        """Run a Combine task."""


@dataclass(frozen=True)
class Rules:
    """The protocol's rules. The defaults are right; every other value is a bug that the checker must find.

    Attributes:
        sides: staging sides of the counts; 1 lets a fast rank overwrite counts that a slow one has not read.
        row_sides: staging sides of rows, results and their counters. 1 is a bug where rows are sent before all counts
            are known (the paper's layout). Where they wait for the counts (compact layout), a peer's counts say that it
            has ended its last call, and one side would do: the search confirms it.
        payload_first: a signal follows its payload; False lets it overtake.
        keep_counters: counters grow over calls; False resets a side's counters when its call starts.
        recheck: after the targets are known, counters that were reached before are looked at again; False loses that
            wake-up.
        keep_idle: a processor that reports room while nothing is ready is remembered; False forgets it.
        extra_tasks: added to every rank's task total, which must be exact.
    """

    sides: int = SIDES
    row_sides: int = SIDES
    payload_first: bool = True
    keep_counters: bool = True
    recheck: bool = True
    keep_idle: bool = True
    extra_tasks: int = 0


class Wait(NamedTuple):
    """What an actor waits for: how far its counter has come, and how far it must come."""

    rank: int
    role: str
    what: str
    seen: int
    expected: int

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.role}, waits for {self.what}: seen {self.seen}, expected {self.expected}"


class MegakernelTimeout(CheckFailed):
    """A wait passed its deadline, or nothing is left that could end it. `waits` says who waited for what."""

    def __init__(self, reason: str, waits: Sequence[Wait]) -> None:
        self.waits = tuple(waits)
        shown = "; ".join(str(w) for w in self.waits[:4]) + ("; ..." if len(self.waits) > 4 else "")
        super().__init__(f"{reason}: {shown or 'no actor waits'}")


class ProtocolViolation(CheckFailed):
    """A rule of the protocol was broken. `rule` is one of deadlock, overwritten, unwritten, stale, task, idle,
    result."""

    def __init__(self, rule: str, text: str) -> None:
        self.rule = rule
        self.text = text
        super().__init__(f"{rule}: {text}")
