"""Discrete-event simulation: the actors' messages, delivered when the cost model says.

The simulator is a `Transport`: it holds a queue of (time, message) and hands each message to its rank in order of time.
Nothing of the protocol stands here, only durations:

    a task        `Machine.gemm_time` and so on, times jitter and the rank's slowdown
    a put         waits for the sender's link, occupies it for bytes / rate, arrives a latency later, and shares the
                  receiver's link with other senders (the payload and its signal arrive together)
    a mail        waits for the scheduler (one mail each `scheduler_task_us`), then takes `scheduler_us`
    "ready"       waits for the subscriber likewise

With `Data` that moves tensors the same run yields the layer's numbers; without, it is timing only and scales to
hundreds of ranks.

Letters: P ranks, S tokens of a rank, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from heapq import heappop, heappush
from typing import NamedTuple

from moe_ref.runtime import encoding as enc
from moe_ref.runtime.callplan import CallPlan
from moe_ref.runtime.machine import Machine, Noise
from moe_ref.runtime.messages import (
    CountsPut,
    Data,
    Finish,
    Idle,
    Launch,
    Mail,
    MegakernelTimeout,
    Message,
    Put,
    Ready,
    ResultsPut,
    RowsPut,
    Rules,
    Stopped,
    destination,
)
from moe_ref.runtime.rank import Rank
from moe_ref.runtime.run import Interval, Run

__all__ = ["Interval", "Run", "Simulator"]

POOL = 1 << 14
"""Jitter factors are drawn once and used in turn."""


class _LinkFree(NamedTuple):
    """The sender's link has pushed out a put; 0 NVLink, 1 network card, 2 copies inside the GPU."""

    link: int


class _Link:
    """One direction of a link: puts leave one after the other."""

    __slots__ = ("busy", "queue")

    def __init__(self) -> None:
        self.busy = False
        self.queue: deque[tuple[Put, int, int]] = deque()


class Simulator:
    """Runs calls one after the other on all ranks.

    Args:
        calls: geometry of each call (`moe_ref.runtime.callplan.make_call`).
        machine, noise: cost model and disturbances.
        experts: E, for the gate's product and the size of the counts.
        data: what moves; None is timing only.
        processors: per rank; None takes the machine's.
        record: keep what every actor did (for traces and plots).
        deadline_us: a rank that has not ended a call this long after its launch raises MegakernelTimeout.
        dead_ranks: ranks that never launch (to see what the others report).
        rules: of the protocol (see the checker).
    """

    def __init__(
        self,
        calls: Sequence[CallPlan],
        machine: Machine,
        experts: int,
        noise: Noise | None = None,
        data: Data | None = None,
        processors: int | None = None,
        record: bool = False,
        deadline_us: float = 1e6,
        dead_ranks: frozenset[int] = frozenset(),
        rules: Rules | None = None,
    ) -> None:
        self.calls, self.machine, self.experts, self.noise = list(calls), machine, experts, noise or Noise()
        self.record, self.deadline_us, self.dead_ranks = record, deadline_us, dead_ranks
        count = processors or machine.processors
        ranks = self.calls[0].ranks
        self.ranks = [Rank(r, self.calls, count, self, data or Data(), rules, machine.mailbox) for r in range(ranks)]
        self.now = 0.0
        self._queue: list[tuple[float, int, int, Message | _LinkFree]] = []
        self._sequence = 0
        self._soon: deque[tuple[int, Message]] = deque()
        self._links = [[_Link() for _ in range(3)] for _ in range(ranks)]
        self._arrived_until = [[0.0, 0.0, 0.0] for _ in range(ranks)]
        self._scheduler_free = [0.0] * ranks
        self._subscriber_free = [0.0] * ranks
        self._jitter = self.noise.factors(1, POOL)
        self._durations: list[tuple[dict[int, float], dict[int, float], list[float]]] = [({}, {}, [])] * ranks
        self.run_ = Run([[-1.0] * ranks for _ in self.calls], [[-1.0] * ranks for _ in self.calls], [0.0] * ranks)

    def run(self) -> Run:
        """Simulate until every rank has ended every call.

        Raises:
            MegakernelTimeout: a rank didn't end a call within its deadline.
        """
        for rank, start in enumerate(self.noise.starts(len(self.ranks))):
            if rank not in self.dead_ranks:
                self.run_.starts_us[0][rank] = start
                self._launch(rank, 0, start)
        queue, soon, ranks = self._queue, self._soon, self.ranks
        events = 0
        next_check = self.deadline_us
        while queue:
            time, _, where, message = heappop(queue)
            self.now = time
            events += 1
            kind = type(message)
            if kind is _LinkFree:
                self._next_put(where, message.link)  # pyright: ignore[reportAttributeAccessIssue]
            elif kind is RowsPut or kind is ResultsPut or kind is CountsPut:
                rank = ranks[where]
                self.run_.last_put_us = time
                rank.data.land(message)  # pyright: ignore[reportArgumentType]
                rank.signal(message)  # pyright: ignore[reportArgumentType]
            else:
                ranks[where].handle(message)  # pyright: ignore[reportArgumentType]
            while soon:
                where, local = soon.popleft()
                ranks[where].handle(local)
            if time > next_check:
                next_check = self._check_deadlines()
        self.run_.events = events
        if any(end < 0 for ends in self.run_.ends_us for end in ends):
            # On a GPU the waiting actors would spin until their deadline.
            raise MegakernelTimeout(f"deadline of {self.deadline_us:g} us passed", self._waits())
        return self.run_

    # --- Transport -------------------------------------------------------------------------------------------------

    def post(self, rank: int, message: Message) -> None:
        """Decide when a message is delivered."""
        kind = type(message)
        if kind is Finish:
            self._start_task(rank, message.processor)  # pyright: ignore[reportAttributeAccessIssue]
        elif kind is Mail:
            machine = self.machine
            free = self._scheduler_free[rank]
            start = free if free > self.now else self.now
            self._scheduler_free[rank] = start + machine.scheduler_task_us
            self._push(start + machine.scheduler_us, rank, message)
            if self.record:
                self._note(rank, "scheduler", "mail", start, machine.scheduler_task_us, message.word)  # pyright: ignore[reportAttributeAccessIssue]
        elif kind is Idle or kind is Stopped:
            self._soon.append((rank, message))
        elif kind is Ready:
            machine = self.machine
            start = max(self.now, self._subscriber_free[rank])
            self._subscriber_free[rank] = start + machine.subscriber_task_us
            self._push(start + machine.subscriber_us, rank, message)
            if self.record:
                self._note(rank, "subscriber", "ready", start, machine.subscriber_task_us, message.word)  # pyright: ignore[reportAttributeAccessIssue]
        elif kind is Launch:
            epoch = message.epoch  # pyright: ignore[reportAttributeAccessIssue]
            self.run_.starts_us[epoch][rank] = self.now
            self._launch(rank, epoch, self.now)
        else:
            self._send(rank, message)  # pyright: ignore[reportArgumentType]

    def call_ended(self, rank: int, epoch: int) -> None:
        """All tasks of a call have run on a rank."""
        self.run_.ends_us[epoch][rank] = self.now

    # --- durations -------------------------------------------------------------------------------------------------

    def _push(self, time: float, rank: int, message: Message | _LinkFree) -> None:
        self._sequence += 1
        heappush(self._queue, (time, self._sequence, rank, message))

    def _factor(self) -> float:
        return self._jitter[self._sequence & (POOL - 1)]

    def _note(self, rank: int, actor: str, name: str, start: float, duration: float, word: int = 0) -> None:
        self.run_.intervals.append(Interval(rank, actor, name, start, duration, word))

    def _launch(self, rank: int, epoch: int, start: float) -> None:
        """Kernel launch and gate; then the gate's Launch message lets the counts go."""
        call, machine = self.calls[epoch], self.machine
        gate = machine.gate_time(call.tokens_P[rank], self.experts, call.shape) * self.noise.speed(rank)
        self._durations[rank] = self._tile_times(rank, call)
        self._push(start + machine.launch_us + gate, rank, Launch(epoch))
        processors = len(self.ranks[rank].processors)
        self.run_.busy_us[rank] += gate * processors
        if self.record:
            self._note(rank, "gate", "gate", start + machine.launch_us, gate)

    def _tile_times(self, rank: int, call: CallPlan) -> tuple[dict[int, float], dict[int, float], list[float]]:
        """Durations of the GEMM0, GEMM1 tasks of each row tile and of each Combine task, without jitter."""
        machine, shape, speed = self.machine, call.shape, self.noise.speed(rank)
        tiles_of_slot: dict[int, int] = {}
        for tile in call.tiles[rank].values():
            tiles_of_slot[tile.slot] = tiles_of_slot.get(tile.slot, 0) + 1
        count = len(call.tiles[rank])

        @cache
        def time(inner: int, columns: int, row_tiles: int, half: bool, left: int) -> float:
            rows = shape.tile_rows // 2 if half else shape.tile_rows
            tasks = count * columns
            if left < machine.sms:
                # the last tasks have the memory to themselves
                tasks = min(tasks, left)
            return speed * machine.gemm_time(shape, inner, row_tiles, machine.tile_us, rows=rows, tasks=tasks)

        first, second = {}, {}
        for number, (i, tile) in enumerate(call.tiles[rank].items()):
            row_tiles, half = tiles_of_slot[tile.slot], 2 * tile.rows <= shape.tile_rows
            away = sum(s.rows for s in tile.segments if s.source != rank) / tile.rows
            # second products of this tile, and all that comes after them
            left = (count - number) * shape.columns1 + (count - number - 1) * shape.columns0
            first[i] = time(shape.hidden, shape.columns0, row_tiles, half, machine.sms)
            second[i] = time(shape.intermediate, shape.columns1, row_tiles, half, min(left, machine.sms))
            second[i] += speed * machine.remote_us * away
        combine = [
            speed * machine.combine_time(call.combine_task(rank, t), shape) for t in range(call.token_tiles(rank))
        ]
        return first, second, combine

    def _start_task(self, rank: int, processor: int) -> None:
        word = self.ranks[rank].processors[processor].mails[0]
        kind, tile = word & 7, word >> enc.ROW_SHIFT
        first, second, combine = self._durations[rank]
        duration = first[tile] if kind == enc.GEMM0 else second[tile] if kind == enc.GEMM1 else combine[tile]
        duration *= self._jitter[self._sequence & (POOL - 1)]
        run = self.run_
        run.busy_us[rank] += duration
        run.tasks += 1
        self._push(self.now + duration, rank, Finish(processor))
        if self.record:
            self._note(rank, f"processor {processor}", enc.KIND_NAMES[kind], self.now, duration, word)

    def _send(self, rank: int, put: Put) -> None:
        """Queue a put on the sender's link; results for the own rank are ordinary stores, part of the tile's time."""
        machine, run, dest = self.machine, self.run_, destination(put)
        if isinstance(put, CountsPut):
            if dest != rank:
                run.counts_bytes += 4 * self.experts
            latency = 0.0 if dest == rank else machine.link_us if machine.same_node(rank, dest) else machine.nic_us
            self._push(self.now + latency * self._factor(), dest, put)
            return
        shape = self.ranks[rank].call.shape
        if isinstance(put, RowsPut):
            size = put.segment.rows * shape.row_bytes
            run.tasks += 1
        else:
            size = put.segment.rows * shape.result_columns(put.column) * shape.element_size
        if dest == rank:
            if isinstance(put, ResultsPut):
                self._push(self.now, dest, put)
                return
            link = 2
        else:
            link = 0 if machine.same_node(rank, dest) else 1
            run.payload_bytes[isinstance(put, ResultsPut)] += size
        lane = self._links[rank][link]
        lane.queue.append((put, dest, size))
        if not lane.busy:
            self._next_put(rank, link)

    def _next_put(self, rank: int, link: int) -> None:
        """The link is free: the next put leaves."""
        lane = self._links[rank][link]
        if not lane.queue:
            lane.busy = False
            return
        lane.busy = True
        put, dest, size = lane.queue.popleft()
        machine = self.machine
        rate = (machine.link_bytes_per_s, machine.nic_bytes_per_s, machine.copy_bytes_per_s)[link]
        latency = (machine.link_us, machine.nic_us, 0.0)[link]
        start = self.now
        duration = 1e6 * size / rate * self._factor() * self.noise.speed(rank)
        self._push(start + duration, rank, _LinkFree(link))
        arrival = max(start + duration + latency, self._arrived_until[dest][link] + duration)
        self._arrived_until[dest][link] = arrival
        self._push(arrival, dest, put)
        if self.record:
            actor = ("link", "network card", "copy")[link]
            name = f"{'rows' if isinstance(put, RowsPut) else 'results'} to rank {dest}"
            self._note(rank, actor, name, start, duration)

    # --- deadlines -------------------------------------------------------------------------------------------------

    def _waits(self) -> list:
        ended = self.run_.ends_us[-1]
        return [w for rank in self.ranks if ended[rank.index] < 0 for w in rank.waits()]

    def _check_deadlines(self) -> float:
        """Raise if a call has run too long; otherwise the time of the next look."""
        for starts, ends in zip(self.run_.starts_us, self.run_.ends_us, strict=True):
            for start, end in zip(starts, ends, strict=True):
                if end < 0 <= start and self.now - start > self.deadline_us:
                    raise MegakernelTimeout(f"deadline of {self.deadline_us:g} us passed", self._waits())
        return self.now + self.deadline_us / 8
