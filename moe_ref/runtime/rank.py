"""One rank: its counters, its actors, and the switch that hands a message to the actor it is for.

Letters: P ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moe_ref.runtime import encoding as enc
from moe_ref.runtime.actors import Gate, Processor, Scheduler, Subscriber
from moe_ref.runtime.callplan import CallPlan
from moe_ref.runtime.messages import (
    CountsPut,
    Data,
    Finish,
    Idle,
    Launch,
    Mail,
    Message,
    Put,
    Ready,
    ResultsPut,
    RowsPut,
    Rules,
    Stopped,
    Transport,
    Wait,
)


class Memory:
    """Counters in one rank's symmetric heap (and its own gemm0_done). Zeroed once, never reset.

    Attributes:
        counts_signal: [side][source], set by the source to `encoding.counts_signal(epoch)`.
        arrived, arrived_target: [side][row tile]; gemm0_done, gemm0_target: [row tile].
        returned, returned_target: [side] int64 [token tiles].
    """

    def __init__(self, ranks: int, row_tiles: int, token_tiles: int, sides: int, row_sides: int) -> None:
        self.counts_signal = [[0] * ranks for _ in range(sides)]
        self.arrived = [[0] * row_tiles for _ in range(row_sides)]
        self.arrived_target = [[0] * row_tiles for _ in range(row_sides)]
        self.gemm0_done = [0] * row_tiles
        self.gemm0_target = [0] * row_tiles
        self.returned = [np.zeros(token_tiles, dtype=np.int64) for _ in range(row_sides)]
        self.returned_target = [np.zeros(token_tiles, dtype=np.int64) for _ in range(row_sides)]

    def reset(self, side: int, row_side: int) -> None:
        """What the protocol never does (Rules.keep_counters)."""
        self.counts_signal[side] = [0] * len(self.counts_signal[side])
        for counters in (self.arrived, self.arrived_target):
            counters[row_side] = [0] * len(counters[row_side])
        for counters in (self.returned, self.returned_target):
            counters[row_side] = np.zeros_like(counters[row_side])


class Rank:
    """The actors of one rank and their memory.

    Args:
        index: which rank.
        calls: geometry of the calls that it takes part in, one after the other.
        processors: how many Processors (blocks that compute).
        transport, data: see `moe_ref.runtime.messages`.
        rules: of the protocol; anything but the defaults is a bug on purpose.
        depth: mails that a processor can hold, the running task included; 2 hides the scheduler's round trip.
    """

    def __init__(
        self,
        index: int,
        calls: Sequence[CallPlan],
        processors: int,
        transport: Transport,
        data: Data,
        rules: Rules | None = None,
        depth: int = 1,
    ) -> None:
        self.index, self.calls, self.data, self.transport = index, calls, data, transport
        self.rules = rules or Rules()
        row_counters = max(call.row_counters for call in calls)
        token_tiles = max(call.token_tiles(index) for call in calls)
        self.memory = Memory(calls[0].ranks, row_counters, token_tiles, self.rules.sides, self.rules.row_sides)
        self.epoch = -1
        self.gate = Gate(self)
        self.subscriber = Subscriber(self)
        self.scheduler = Scheduler(self, processors, depth)
        self.processors = [Processor(self, i) for i in range(processors)]
        self._handlers: dict[type, Callable[[Any], None]] = {
            Ready: self.scheduler.on_ready,
            Idle: self.scheduler.on_idle,
            Stopped: self.scheduler.on_stopped,
            Mail: lambda m: self.processors[m.processor].on_mail(m),
            Finish: lambda m: self.processors[m.processor].on_finish(),
            Launch: self._launch,
        }
        self._signals: dict[type, Callable[[Any], None]] = {
            CountsPut: self.gate.on_counts,
            RowsPut: self.subscriber.on_rows,
            ResultsPut: self.subscriber.on_results,
        }

    @property
    def call(self) -> CallPlan:
        """Geometry of the running call."""
        return self.calls[self.epoch]

    @property
    def side(self) -> int:
        """Staging side of the running call: encoding.side_of(epoch) unless the rules are broken."""
        return self.epoch % self.rules.sides

    @property
    def row_side(self) -> int:
        """The same for rows, results and their counters."""
        return self.epoch % self.rules.row_sides

    def post(self, message: Message) -> None:
        """Send a message."""
        self.transport.post(self.index, message)

    def handle(self, message: Message) -> None:
        """A message inside the rank is delivered."""
        self._handlers[type(message)](message)

    def signal(self, put: Put) -> None:
        """The signal of a put arrives in this rank's memory."""
        self._signals[type(put)](put)

    def _launch(self, message: Launch) -> None:
        self.epoch = message.epoch
        self.scheduler.start()
        self.gate.start()

    def end_call(self) -> None:
        """All processors have stopped; the next call, if any, is launched."""
        self.transport.call_ended(self.index, self.epoch)
        if self.epoch + 1 < len(self.calls):
            self.post(Launch(self.epoch + 1))

    def waits(self) -> list[Wait]:
        """What keeps the running call from ending, for the record of an expired deadline."""
        rank, memory, side = self.index, self.memory, self.row_side
        if self.epoch < 0:
            return [Wait(rank, "host", "its first launch", 0, 1)]
        want = enc.counts_signal(self.epoch)
        if not self.gate.planned:
            return [
                Wait(rank, "gate", f"counts of rank {source}", seen, want)
                for source, seen in enumerate(memory.counts_signal[self.side])
                if not enc.reached(seen, want)
            ]
        out = []
        for tile in self.call.tiles[rank]:
            if not enc.reached(memory.arrived[side][tile], memory.arrived_target[side][tile]):
                seen, target = memory.arrived[side][tile], memory.arrived_target[side][tile]
                out.append(Wait(rank, "subscriber", f"rows of row tile {tile}", seen, target))
        for tile in range(self.call.token_tiles(rank)):
            seen, target = int(memory.returned[side][tile]), int(memory.returned_target[side][tile])
            if not enc.reached(seen, target):
                out.append(Wait(rank, "subscriber", f"results of token tile {tile}", seen, target))
        scheduler = self.scheduler
        if scheduler.assigned != scheduler.total:
            out.append(Wait(rank, "scheduler", "tasks to become ready", scheduler.assigned, scheduler.total or 0))
        elif scheduler.stopped < len(self.processors):
            out.append(Wait(rank, "scheduler", "processors to stop", scheduler.stopped, len(self.processors)))
        return out

    # --- for the checker: the whole state as one hashable value, and back ------------------------------------------

    def freeze(self) -> tuple:
        """The state of all actors and counters of this rank."""
        m, s = self.memory, self.scheduler
        return (
            self.epoch,
            self.gate.planned,
            tuple(map(tuple, m.counts_signal)),
            tuple(map(tuple, m.arrived)),
            tuple(map(tuple, m.arrived_target)),
            tuple(m.gemm0_done),
            tuple(m.gemm0_target),
            tuple(tuple(a.tolist()) for a in m.returned),
            tuple(tuple(a.tolist()) for a in m.returned_target),
            tuple(tuple(map(tuple, s.ready[kind])) for kind in s.ORDER),
            tuple(s.outstanding),
            tuple(map(tuple, s.room)),
            (s.assigned, s.total, s.stopped),
            tuple(tuple(p.mails) for p in self.processors),
        )

    def thaw(self, state: tuple) -> None:
        """Go back to a state that `freeze` returned."""
        m, s = self.memory, self.scheduler
        (self.epoch, self.gate.planned, counts, arrived, arrived_target, done, done_target, returned, returned_target,
         ready, outstanding, room, (s.assigned, s.total, s.stopped), mails) = state  # fmt: skip
        self.gate.looked_at = 0
        m.counts_signal, m.arrived, m.arrived_target = ([list(x) for x in v] for v in (counts, arrived, arrived_target))
        m.gemm0_done, m.gemm0_target = list(done), list(done_target)
        m.returned, m.returned_target = ([np.array(x, dtype=np.int64) for x in v] for v in (returned, returned_target))
        s.ready = {kind: deque(map(list, queue)) for kind, queue in zip(s.ORDER, ready, strict=True)}
        s.outstanding, s.room = list(outstanding), [deque(r) for r in room]
        for processor, held in zip(self.processors, mails, strict=True):
            processor.mails = deque(held)
