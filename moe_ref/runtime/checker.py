"""Adversarial schedules: deliver messages in any order, and see that no order breaks the protocol.

    random_order   one run; every message, inside a rank too, waits until chance picks it
    Explorer       every order of a small case (`moe_ref.runtime.explorer`)

In both, every read sees the call it is for, nothing is overwritten before it was read, every task runs exactly once,
results are right (`moe_ref.runtime.stamps`), no task waits while a processor has room, and no state is a deadlock;
anything else is a ProtocolViolation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from moe_ref.runtime.callplan import CallPlan
from moe_ref.runtime.messages import (
    CountsPut,
    Data,
    Launch,
    Message,
    ProtocolViolation,
    ResultsPut,
    RowsPut,
    Rules,
    Signal,
    destination,
)
from moe_ref.runtime.rank import Rank
from moe_ref.runtime.stamps import Stamps

Delivery = tuple[int, Message]
"""A message and the rank that it is for."""


class Untimed:
    """A transport without time: what was sent lies in `sent` until someone delivers it."""

    def __init__(
        self, calls: Sequence[CallPlan], processors: int, rules: Rules, depth: int = 1, data: Data | None = None
    ) -> None:
        self.calls, self.rules = calls, rules
        self.stamps = Stamps(calls, rules.sides, rules.row_sides)
        self.data: Data = data or self.stamps
        self.ranks = [Rank(r, calls, processors, self, self.data, rules, depth) for r in range(calls[0].ranks)]
        self.sent: list[Delivery] = []
        self.ended = [0] * len(self.ranks)

    def post(self, rank: int, message: Message) -> None:
        if not isinstance(message, (CountsPut, RowsPut, ResultsPut)):
            self.sent.append((rank, message))
            return
        self.sent.append((destination(message), message))
        if not self.rules.payload_first:
            self.sent.append((destination(message), Signal(message)))

    def call_ended(self, rank: int, epoch: int) -> None:
        if self.data is self.stamps:
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
        scheduler = rank.scheduler
        if any(scheduler.ready.values()) and any(scheduler.room) and scheduler.assigned != scheduler.total:
            raise ProtocolViolation("idle", f"rank {where} has a ready task and a processor with room, but no mail")

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
    depth: int = 1,
) -> int:
    """One run in an order drawn from the seed: either the next message is drawn each time, or each message draws a
    priority when it is sent (so that some stay behind for very long).

    Args:
        data: what moves; None checks with stamps, tensors make it a numerical run.
        depth: mails that a processor can hold.

    Returns:
        Number of deliveries.

    Raises:
        ProtocolViolation: a rule was broken.
    """
    chance = random.Random(seed)
    by_priority = chance.random() < 0.5
    world = Untimed(calls, processors, rules or Rules(), depth, data)
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
