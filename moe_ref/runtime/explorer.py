"""Every order of a small case: a depth-first search over all distinct states, see `moe_ref.runtime.checker`.

A violation is reported with the deliveries that led there.

What `Explorer` leaves to the adversary: the delivery of every payload and of every signal between ranks, when a task
finishes, and when a rank launches its next call. With `inside` also every message inside a rank (ready, mail, idle) and
a rank's stores into its own memory, which otherwise are delivered at once, in the order in which they were sent.
`random_order` always frees all of them.

The search is cheap because a message changes one rank only: what a rank in state s does with message m is computed
once, and the product of the ranks is walked in integers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_ref.runtime.callplan import CallPlan
from moe_ref.runtime.checker import Delivery, Untimed
from moe_ref.runtime.messages import (
    CountsPut,
    Finish,
    Launch,
    ProtocolViolation,
    ResultsPut,
    RowsPut,
    Rules,
    Signal,
)

RANK_BITS = 24
"""Bits of a rank's number in a state of the search."""


def describe(delivery: Delivery) -> str:
    """A delivery in words."""
    rank, message = delivery
    put = message.put if isinstance(message, Signal) else message
    what = "signal" if isinstance(message, Signal) else "payload"
    if isinstance(put, CountsPut):
        return f"{what} of counts, rank {put.source} -> {rank}, call {put.epoch}"
    if isinstance(put, (RowsPut, ResultsPut)):
        s = put.segment
        if isinstance(put, RowsPut):
            return f"{what} of {s.rows} rows, rank {s.source} -> tile {s.row_tile} of rank {rank}, call {put.epoch}"
        place = f"tile {s.row_tile} of rank {s.owner} -> rank {rank}, column {put.column}"
        return f"{what} of results, {place}, call {put.epoch}"
    if isinstance(message, Launch):
        return f"rank {rank} launches call {message.epoch}"
    if isinstance(message, Finish):
        return f"rank {rank}, processor {message.processor}, ends a task"
    return f"rank {rank}: {message}"


@dataclass
class Exploration:
    """What a search found.

    Attributes:
        states: distinct states visited; transitions: deliveries tried; finals: states in which all calls had ended.
        complete: every reachable state was visited (the limit wasn't reached).
        violation: the first broken rule, None if there is none; path: the deliveries that lead to it.
    """

    states: int = 0
    transitions: int = 0
    finals: int = 0
    complete: bool = False
    violation: ProtocolViolation | None = None
    path: list[str] = field(default_factory=list)


class Explorer:
    """Search over all orders of a small case.

    A state is one integer: a number per rank, which stands for a frozen rank state, and above them a bit per message in
    flight (no two equal messages are ever in flight together).

    Args:
        calls, processors, rules: of the case. depth: mails that a processor can hold.
        inside: leave every message to the adversary, also those inside a rank and a rank's stores to itself.
    """

    def __init__(
        self,
        calls: Sequence[CallPlan],
        processors: int = 1,
        rules: Rules | None = None,
        inside: bool = False,
        depth: int = 1,
    ) -> None:
        self.inside = inside
        self.world = Untimed(calls, processors, rules or Rules(), depth)
        self.stamps = self.world.stamps
        self.flight_shift = RANK_BITS * len(self.world.ranks)
        self.frozen: list[tuple] = []
        self.number: dict[tuple, int] = {}
        self.messages: list[Delivery] = []
        self.bit: dict[tuple[type, Delivery], int] = {}
        self.steps: dict[tuple[int, int], tuple[int, int] | ProtocolViolation] = {}

    def run(self, limit: int = 5_000_000) -> Exploration:
        """Search until everything was seen, a rule is broken, or `limit` distinct states were visited."""
        found = Exploration()
        ranks, calls, shift = len(self.world.ranks), len(self.world.calls), self.flight_shift
        start = self._bits([(r, Launch(0)) for r in range(ranks)]) << shift
        for rank in range(ranks):
            start |= self._number(rank) << (RANK_BITS * rank)
        came_from = {start: -1}
        stack = [start]
        steps, mask = self.steps, (1 << RANK_BITS) - 1
        while stack:
            state = stack.pop()
            rest = state >> shift
            if not rest:
                numbers = [(state >> (RANK_BITS * r)) & mask for r in range(ranks)]
                if any(self.frozen[n][1] < calls for n in numbers):
                    for number in numbers:
                        self._restore(number)
                    return self._report(found, came_from, state, None, self.world.deadlock())
                found.finals += 1
            while rest:
                low = rest & -rest
                rest ^= low
                message = low.bit_length() - 1
                place = RANK_BITS * self.messages[message][0]
                number = (state >> place) & mask
                step = steps.get((number, message))
                if step is None:
                    step = steps[number, message] = self._step(number, message)
                if isinstance(step, ProtocolViolation):
                    return self._report(found, came_from, state, message, step)
                found.transitions += 1
                after = (state ^ (low << shift) ^ ((number ^ step[0]) << place)) | (step[1] << shift)
                if after not in came_from:
                    came_from[after] = state
                    stack.append(after)
            if len(came_from) >= limit:
                found.states = len(came_from)
                return found
        found.states, found.complete = len(came_from), True
        return found

    def _step(self, number: int, message: int) -> tuple[int, int] | ProtocolViolation:
        """What a rank in a state does with a message: (number of its next state, bits of what is then in flight)."""
        rank, world = self._restore(number), self.world
        free: list[Delivery] = []
        at_once = deque([self.messages[message]])
        try:
            while at_once:
                world.deliver(at_once.popleft())
                for delivery in world.sent:
                    (free if self.inside or _left_to_adversary(rank, delivery) else at_once).append(delivery)
                world.sent.clear()
        except ProtocolViolation as violation:
            world.sent.clear()
            return violation
        return self._number(rank), self._bits(free)

    def _number(self, rank: int) -> int:
        """Number of the state in which a rank is now."""
        key = (rank, self.world.ended[rank], self.world.ranks[rank].freeze(), self.stamps.cells[rank].freeze())
        if key not in self.number:
            self.number[key] = len(self.frozen)
            self.frozen.append(key)
        return self.number[key]

    def _restore(self, number: int) -> int:
        """Bring a rank back into a state; returns the rank."""
        rank, self.world.ended[rank], state, cells = self.frozen[number]
        self.world.ranks[rank].thaw(state)
        self.stamps.cells[rank].thaw(cells)
        return rank

    def _bits(self, deliveries: Sequence[Delivery]) -> int:
        bits = 0
        for delivery in deliveries:
            # Messages are tuples, and tuples of different kinds compare equal: Launch(0) == Finish(0).
            key = (type(delivery[1]), delivery)
            if key not in self.bit:
                self.bit[key] = len(self.messages)
                self.messages.append(delivery)
            bits |= 1 << self.bit[key]
        return bits

    def _report(
        self,
        found: Exploration,
        came_from: dict[int, int],
        state: int,
        message: int | None,
        violation: ProtocolViolation,
    ) -> Exploration:
        path = [] if message is None else [describe(self.messages[message])]
        mask = (1 << RANK_BITS) - 1
        while (before := came_from[state]) >= 0:
            for candidate, (rank, _) in enumerate(self.messages):
                if not (before >> self.flight_shift) & (1 << candidate):
                    continue
                number, place = (before >> (RANK_BITS * rank)) & mask, RANK_BITS * rank
                step = self.steps.get((number, candidate))
                if isinstance(step, tuple) and state == (
                    before ^ (1 << candidate << self.flight_shift) ^ ((number ^ step[0]) << place)
                ) | (step[1] << self.flight_shift):
                    path.append(describe(self.messages[candidate]))
                    break
            state = before
        found.states, found.violation, found.path = len(came_from), violation, path[::-1]
        return found


def _left_to_adversary(rank: int, delivery: Delivery) -> bool:
    """Whether the order of a message is free: it crosses between ranks, ends a task or begins a call."""
    message = delivery[1]
    put = message.put if isinstance(message, Signal) else message
    if isinstance(put, CountsPut):
        return put.source != put.dest
    if isinstance(put, (RowsPut, ResultsPut)):
        return put.segment.source != put.segment.owner
    return isinstance(put, (Finish, Launch))
