"""The actors of one rank, as small state machines that know each other only through messages.

    Gate         counts its rows per expert, puts the counts to every rank; when all counts are here it knows the plan,
                 sets every counter's target and puts its rows (the Dispatch tasks)
    Subscriber   sees signals; a row tile whose rows are complete becomes GEMM0 work, a token tile whose results are
                 complete becomes Combine work
    Scheduler    work-conserving: whenever a processor has room and a task is ready, it sends a mail
    Processor    runs the task of a mail; a finished GEMM0 tile counts towards its GEMM1, a finished GEMM1 tile is put
                 home, where the returned rows are counted

This file is the specification of the megakernel's protocol (FlashMoE, sections 3.1-3.3), with the kernel's names. It
says nothing about time and nothing about numbers: a *transport* decides when a message is delivered (the simulator by a
cost model, the checker in any order it likes), and *data* decides what a put carries and what a task computes (tensors,
stamps, or nothing).

Counters (per staging side unless local): counts_signal[source], arrived[row tile], returned[token tile], and the local
gemm0_done[row tile]. They only grow. A rank ends a call when every one of its tasks has run, an exact number that
follows from the counts; then it starts the next one, without a barrier.

Letters: P ranks, K choices per token.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from moe_ref.runtime import encoding as enc
from moe_ref.runtime.messages import (
    CountsPut,
    Finish,
    Idle,
    Mail,
    ProtocolViolation,
    Ready,
    ResultsPut,
    RowsPut,
    Stopped,
)

if TYPE_CHECKING:
    from moe_ref.runtime.rank import Rank


class Gate:
    """Counts, plan, targets, Dispatch tasks. State: whether this call's plan is known.

    `looked_at` only saves work: the sources below it are known to have sent their counts.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.planned = False
        self.looked_at = 0

    def start(self) -> None:
        """Begin a call: put the counts to everybody; in the paper's layout rows needn't wait for other counts."""
        rank = self.rank
        self.planned = False
        self.looked_at = 0
        if not rank.rules.keep_counters:
            rank.memory.reset(rank.side, rank.row_side)
        data = rank.data.counts_payload(rank.epoch, rank.index)
        for dest in range(rank.call.ranks):
            rank.post(CountsPut(rank.epoch, rank.index, dest, data))
        if rank.call.early_dispatch:
            self.dispatch()

    def on_counts(self, put: CountsPut) -> None:
        """Signal of a counts row. Every arrival is a reason to look at all of them."""
        rank = self.rank
        rank.memory.counts_signal[put.epoch % rank.rules.sides][put.source] = enc.counts_signal(put.epoch)
        if rank.epoch < 0 or self.planned:
            return
        here, want, ranks = rank.memory.counts_signal[rank.side], enc.counts_signal(rank.epoch), rank.call.ranks
        while self.looked_at < ranks and enc.reached(here[self.looked_at], want):
            self.looked_at += 1
        if self.looked_at == ranks:
            self.plan()

    def plan(self) -> None:
        """All counts are here: move the targets, tell the scheduler its total, look again, send the rows."""
        rank, memory, call = self.rank, self.rank.memory, self.rank.call
        rank.data.read_counts(rank.index, rank.epoch)
        self.planned = True
        target = memory.arrived_target[rank.row_side]
        for index, tile in call.tiles[rank.index].items():
            target[index] = enc.next_target(target[index], tile.rows)
            memory.gemm0_target[index] = enc.next_target(memory.gemm0_target[index], call.shape.columns0)
        choices = call.choices[rank.index]
        memory.returned_target[rank.row_side][: len(choices)] += choices * call.shape.columns1
        rank.scheduler.set_total(call.total_tasks(rank.index) + rank.rules.extra_tasks)
        rank.subscriber.look_again()
        if not call.early_dispatch:
            self.dispatch()

    def dispatch(self) -> None:
        """One put per segment (the Dispatch tasks)."""
        rank = self.rank
        for segment in rank.call.outgoing[rank.index]:
            rank.post(RowsPut(rank.epoch, segment, rank.data.rows_payload(rank.epoch, segment)))


class Subscriber:
    """Turns counters that are complete into ready tasks. Stateless: all it knows stands in memory."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def on_rows(self, put: RowsPut) -> None:
        """Signal of a RowsPut: its rows count towards the row tile."""
        rank, side, tile = self.rank, put.epoch % self.rank.rules.row_sides, put.segment.row_tile
        seen = rank.memory.arrived[side]
        seen[tile] += put.segment.rows
        if (
            rank.gate.planned
            and side == rank.row_side
            and enc.reached(seen[tile], rank.memory.arrived_target[side][tile])
        ):
            self.rows_complete(tile)

    def on_results(self, put: ResultsPut) -> None:
        """Signal of a ResultsPut: its rows count towards their token tiles."""
        rank, side, tiles = self.rank, put.epoch % self.rank.rules.row_sides, put.segment.token_tiles
        seen = rank.memory.returned[side]
        seen[tiles] += put.segment.token_rows
        if rank.gate.planned and side == rank.row_side:
            complete = tiles[enc.reached(seen[tiles], rank.memory.returned_target[side][tiles])]
            for tile in complete.tolist():
                rank.post(Ready(enc.pack_task(enc.COMBINE, 0, tile, 0), 1))

    def look_again(self) -> None:
        """The targets have just moved: what was complete before would otherwise never be noticed."""
        rank, memory = self.rank, self.rank.memory
        seen, target = memory.returned[rank.row_side], memory.returned_target[rank.row_side]
        tokens = rank.call.token_tiles(rank.index)
        nothing_expected = rank.call.choices[rank.index] == 0
        complete = enc.reached(seen[:tokens], target[:tokens]) & (nothing_expected | rank.rules.recheck)
        for tile in np.flatnonzero(complete).tolist():
            rank.post(Ready(enc.pack_task(enc.COMBINE, 0, tile, 0), 1))
        if rank.rules.recheck:
            arrived, expected = memory.arrived[rank.row_side], memory.arrived_target[rank.row_side]
            for tile in rank.call.tiles[rank.index]:
                if enc.reached(arrived[tile], expected[tile]):
                    self.rows_complete(tile)

    def rows_complete(self, tile: int) -> None:
        """All rows of a tile are here: its GEMM0 tasks are ready."""
        rank, found = self.rank, self.rank.call.tiles[self.rank.index].get(tile)
        if found is None:
            raise ProtocolViolation(
                "stale", f"rank {rank.index} got rows of a tile {tile} that call {rank.epoch} lacks"
            )
        rank.post(Ready(enc.pack_task(enc.GEMM0, found.slot, tile, 0), rank.call.shape.columns0))


class Scheduler:
    """Hands ready tasks to processors with room. GEMM1 first: it frees hidden tiles and starts the way home early.

    State: ready queues [word, next column, columns] per kind; processors with room, those without any task first;
    tasks assigned so far; the total, None until the counts are known.
    """

    ORDER = (enc.GEMM1, enc.GEMM0, enc.COMBINE)

    def __init__(self, rank: Rank, processors: int, depth: int) -> None:
        self.rank = rank
        self.processors = processors
        self.depth = depth
        self.start()

    def start(self) -> None:
        self.ready: dict[int, deque[list[int]]] = {kind: deque() for kind in self.ORDER}
        self.outstanding = [0] * self.processors
        self.room: list[deque[int]] = [deque(range(self.processors))] + [deque() for _ in range(self.depth - 1)]
        self.assigned = 0
        self.total: int | None = None
        self.stopped = 0

    def set_total(self, total: int) -> None:
        """The counts are known, so the number of tasks is."""
        self.total = total
        self.end_if_done()

    def on_ready(self, message: Ready) -> None:
        self.ready[message.word & 7].append([message.word, 0, message.columns])
        self.match()

    def on_idle(self, message: Idle) -> None:
        processor = message.processor
        held = self.outstanding[processor] = self.outstanding[processor] - 1
        if held + 1 < self.depth:
            self.room[held + 1].remove(processor)
        if self.rank.rules.keep_idle or any(self.ready.values()):
            self.room[held].append(processor)
        self.match()
        self.end_if_done()

    def match(self) -> None:
        """Work-conserving: while a task is ready and a processor has room, bring them together; empty ones first."""
        room, outstanding = self.room, self.outstanding
        for kind in self.ORDER:
            queue = self.ready[kind]
            while queue and self.assigned != self.total:
                for held in range(self.depth):
                    if room[held]:
                        processor = room[held].popleft()
                        break
                else:
                    return
                outstanding[processor] = held + 1
                if held + 1 < self.depth:
                    room[held + 1].append(processor)
                entry = queue[0]
                word = entry[0] + (entry[1] << enc.COLUMN_SHIFT)
                entry[1] += 1
                if entry[1] == entry[2]:
                    queue.popleft()
                self.assigned += 1
                self.rank.post(Mail(processor, word))

    def end_if_done(self) -> None:
        """Exact termination: all tasks are out and came back, so every processor may stop."""
        if self.assigned == self.total and len(self.room[0]) == self.processors:
            self.room[0].clear()
            for processor in range(self.processors):
                self.rank.post(Mail(processor, enc.STOP))

    def on_stopped(self, message: Stopped) -> None:
        self.stopped += 1
        if self.stopped == self.processors:
            self.rank.end_call()


class Processor:
    """Runs tasks one after the other. State: the mails it holds; the first one is running."""

    def __init__(self, rank: Rank, index: int) -> None:
        self.rank = rank
        self.index = index
        self.mails: deque[int] = deque()

    def on_mail(self, message: Mail) -> None:
        if message.word == enc.STOP:
            self.rank.post(Stopped(self.index))
            return
        self.mails.append(message.word)
        if len(self.mails) == 1:
            self.rank.post(Finish(self.index))

    def on_finish(self) -> None:
        """The running task is done: its effects become visible, then there is room for another mail."""
        rank, word = self.rank, self.mails.popleft()
        kind, tile = word & 7, enc.task_row_tile(word)
        if kind == enc.GEMM0:
            memory = rank.memory
            rank.data.gemm0(rank.index, rank.epoch, tile, enc.task_column_tile(word))
            memory.gemm0_done[tile] += 1
            if enc.reached(memory.gemm0_done[tile], memory.gemm0_target[tile]):
                word1 = enc.pack_task(enc.GEMM1, enc.task_slot(word), tile, 0)
                rank.post(Ready(word1, rank.call.shape.columns1))
        elif kind == enc.GEMM1:
            column = enc.task_column_tile(word)
            payloads = rank.data.gemm1(rank.index, rank.epoch, tile, column)
            segments = rank.call.tiles[rank.index][tile].segments
            for i, segment in enumerate(segments):
                rank.post(ResultsPut(rank.epoch, segment, column, payloads[i] if payloads else None))
        else:
            rank.data.combine(rank.index, rank.epoch, tile)
        rank.post(Idle(self.index))
        if self.mails:
            rank.post(Finish(self.index))
