"""Adversarial schedules: deliver messages in any order, and see that no order breaks the protocol.

    random_order   one run; every message, inside a rank too, waits until chance picks it
    explore        every order of a small case: a depth-first search over all distinct states

In both, every read sees the call it is for, nothing is overwritten before it was read, every task runs exactly once,
results are right, and no state is a deadlock (`moe_ref.runtime.stamps`); anything else raises ProtocolViolation with
the deliveries that led there.

What `explore` leaves to the adversary: the delivery of every payload and of every signal between ranks, when a task
finishes, and when a rank launches its next call. Messages inside a rank that only hand work on (ready, mail, idle) are
delivered at once in their order, and a rank's stores into its own memory are immediate; `random_order` frees those too.

The search is cheap because a message changes one rank only: what a rank in state s does with message m is computed
once, and the product of the ranks is walked in integers.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_ref.runtime.callplan import CallPlan
from moe_ref.runtime.messages import (
    CountsPut,
    Data,
    Finish,
    Launch,
    Message,
    Put,
    ResultsPut,
    RowsPut,
    Rules,
    Signal,
    destination,
)
from moe_ref.runtime.rank import Rank
from moe_ref.runtime.stamps import ProtocolViolation, Stamps

Delivery = tuple[int, Message]
"""A message and the rank that it is for."""


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
    return f"rank {rank}: {message}"


class _Untimed:
    """A transport without time: what was sent lies in `sent` until someone delivers it."""

    def __init__(self, calls: Sequence[CallPlan], processors: int, rules: Rules, data: Data | None = None) -> None:
        self.calls, self.rules = calls, rules
        self.stamps = Stamps(calls, rules.sides) if data is None else None
        self.data: Data = data or self.stamps  # type: ignore[assignment]
        self.ranks = [Rank(r, calls, processors, self, self.data, rules) for r in range(calls[0].ranks)]
        self.sent: list[Delivery] = []
        self.ended = [0] * len(self.ranks)

    def post(self, rank: int, message: Message) -> None:
        is_put = isinstance(message, (CountsPut, RowsPut, ResultsPut))
        self.sent.append((destination(message) if is_put else rank, message))
        if is_put and not self.rules.payload_first:
            self.sent.append((destination(message), Signal(message)))

    def call_ended(self, rank: int, epoch: int) -> None:
        if self.stamps is not None:
            self.stamps.end_call(rank, epoch)
        self.ended[rank] = epoch + 1

    def deliver(self, delivery: Delivery) -> None:
        """One step of one rank."""
        where, message = delivery
        rank = self.ranks[where]
        if isinstance(message, (CountsPut, RowsPut, ResultsPut)):
            self.data.land(message)
            if self.rules.payload_first:
                self.sent.append((where, Signal(message)))
        elif isinstance(message, Signal):
            rank.signal(message.put)
        else:
            rank.handle(message)

    def deadlock(self) -> ProtocolViolation:
        """What the ranks wait for."""
        waits = [str(w) for rank in self.ranks if self.ended[rank.index] < len(self.calls) for w in rank.waits()]
        return ProtocolViolation("deadlock", "; ".join(waits[:3]) or "calls have not ended")


def random_order(
    calls: Sequence[CallPlan],
    seed: int,
    processors: int = 2,
    rules: Rules | None = None,
    data: Data | None = None,
) -> int:
    """One run in an order drawn from the seed: either the next message is drawn each time, or each message draws a
    priority when it is sent (so that some stay behind for very long).

    Args:
        data: what moves; None checks with stamps, tensors make it a numerical run.

    Returns:
        Number of deliveries.

    Raises:
        ProtocolViolation: a rule was broken.
    """
    chance = random.Random(seed)
    by_priority = chance.random() < 0.5
    world = _Untimed(calls, processors, rules or Rules(), data)
    waiting: list[tuple[float, Delivery]] = [(chance.random(), (r.index, Launch(0))) for r in world.ranks]
    steps = 0
    while waiting:
        index = chance.randrange(len(waiting))
        if by_priority:
            index = min(range(len(waiting)), key=lambda i: waiting[i][0])
        waiting[index], waiting[-1] = waiting[-1], waiting[index]
        _, delivery = waiting.pop()
        world.deliver(delivery)
        waiting += [(chance.random(), d) for d in world.sent]
        world.sent.clear()
        steps += 1
    if min(world.ended) < len(calls):
        raise world.deadlock()
    return steps


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

    A state is (one number per rank, bits of the messages in flight). The numbers stand for frozen rank states, the bits
    for messages: no two equal messages are ever in flight together.
    """

    def __init__(self, calls: Sequence[CallPlan], processors: int = 1, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.world = _Untimed(calls, processors, self.rules)
        assert self.world.stamps is not None
        self.stamps = self.world.stamps
        self.frozen: list[tuple] = []
        self.number: dict[tuple, int] = {}
        self.messages: list[Delivery] = []
        self.bit: dict[tuple[type, Delivery], int] = {}
        self.steps: dict[tuple[int, int], tuple[int, int] | ProtocolViolation] = {}

    def _state_of(self, rank: int) -> int:
        key = (rank, self.world.ended[rank], self.world.ranks[rank].freeze(), self.stamps.cells[rank].freeze())
        if key not in self.number:
            self.number[key] = len(self.frozen)
            self.frozen.append(key)
        return self.number[key]

    def _restore(self, number: int) -> int:
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

    def _step(self, number: int, message: int) -> tuple[int, int] | ProtocolViolation:
        """What a rank in a state does with a message: (its next state, bits of what it sends)."""
        rank, world = self._restore(number), self.world
        free: list[Delivery] = []
        at_once = deque([self.messages[message]])
        try:
            while at_once:
                world.deliver(at_once.popleft())
                for delivery in world.sent:
                    to_adversary = isinstance(delivery[1], (Finish, Launch)) or self._crosses(rank, delivery)
                    (free if to_adversary else at_once).append(delivery)
                world.sent.clear()
        except ProtocolViolation as violation:
            world.sent.clear()
            return violation
        return self._state_of(rank), self._bits(free)

    def _crosses(self, rank: int, delivery: Delivery) -> bool:
        message = delivery[1]
        put: Message | Put = message.put if isinstance(message, Signal) else message
        if isinstance(put, CountsPut):
            return put.source != put.dest
        return isinstance(put, (RowsPut, ResultsPut)) and put.segment.source != put.segment.owner

    def run(self, limit: int = 2_000_000) -> Exploration:
        """Search until everything was seen, a rule is broken, or `limit` distinct states were visited."""
        found = Exploration()
        ranks = len(self.world.ranks)
        calls = len(self.world.calls)
        start: tuple[int, ...] = (
            *(self._state_of(r) for r in range(ranks)),
            self._bits([(r, Launch(0)) for r in range(ranks)]),
        )
        parents: dict[tuple[int, ...], tuple[tuple[int, ...], int] | None] = {start: None}
        stack = [start]
        steps = self.steps
        while stack:
            state = stack.pop()
            flight = rest = state[-1]
            if not flight:
                if any(self.frozen[n][1] < calls for n in state[:-1]):
                    for number in state[:-1]:
                        self._restore(number)
                    return self._report(found, parents, state, None, self.world.deadlock())
                found.finals += 1
            while rest:
                low = rest & -rest
                rest ^= low
                message = low.bit_length() - 1
                rank = self.messages[message][0]
                key = (state[rank], message)
                step = steps.get(key)
                if step is None:
                    step = steps[key] = self._step(*key)
                if isinstance(step, ProtocolViolation):
                    return self._report(found, parents, state, message, step)
                found.transitions += 1
                after = (*state[:rank], step[0], *state[rank + 1 : -1], (flight ^ low) | step[1])
                if after not in parents:
                    parents[after] = (state, message)
                    stack.append(after)
            if len(parents) >= limit:
                found.states = len(parents)
                return found
        found.states, found.complete = len(parents), True
        return found

    def _report(
        self, found: Exploration, parents: dict, state: tuple, message: int | None, violation: ProtocolViolation
    ) -> Exploration:
        path = [] if message is None else [describe(self.messages[message])]
        step = parents[state]
        while step is not None:
            path.append(describe(self.messages[step[1]]))
            step = parents[step[0]]
        found.states, found.violation, found.path = len(parents), violation, path[::-1]
        return found
