"""The timeline of one call, from timestamps that traced kernel variants write: the simulator's trace format.

Every block notes what its consumers, its storer and its spare warp did and when (globaltimer). A processor's
utilisation is the time its consumers spent in main loops and epilogues over the wall time of the kernel; waiting for
the first operands of a task, gate, pushing of rows and combine are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_fast.memory import EVENTS, TRACKS
from moe_ref.runtime import encoding as enc
from moe_ref.runtime.simulator import Interval

if TYPE_CHECKING:
    from moe_fast.engine import Engine

PHASES = {-1: "gate", -2: "plan", -3: "list", -4: "push", -5: "combine", -6: "solve"}
ACTORS = ("processor", "storer", "spare", "main-loop-1", "main-loop-2")
"""By track; the main loops of either warpgroup of a processor, without the epilogue, have tracks of their own."""


@dataclass(frozen=True)
class Timeline:
    """One rank's call.

    Attributes:
        intervals: what every track did.
        tasks: GEMM tasks, all processors together.
        wall_us: from the first event's start to the last one's end.
        utilisation: mean over processors of the share of the wall time spent in main loops and epilogues.
        main_loops: the same without epilogues.
        clock_ghz: mean clock of the SMs while products run, from the end of a processor's first main loop to that of
            its last; 0 where none has run two.
        share: mean share of the wall time of a processor's consumers per kind of work; "wait" is the rest.
        dropped: events beyond a track's capacity.
    """

    intervals: list[Interval]
    tasks: int
    wall_us: float
    utilisation: float
    main_loops: float
    clock_ghz: float
    share: dict[str, float]
    dropped: int


def read_timeline(engine: Engine) -> Timeline:
    """Read and clear the events of the last call of a traced engine; waits for the device."""
    torch.cuda.synchronize(engine.heap.device)
    words = engine.trace.cpu()
    engine.trace.zero_()
    return timeline_in(words, engine)


def timeline_in(words: torch.Tensor, engine: Engine) -> Timeline:
    """Timeline from a copy of a traced engine's trace on the CPU, int64 [`trace_words`]."""
    tracks = words.view(engine.blocks, TRACKS, EVENTS + 1, 3)
    return timeline_of(tracks, engine.heap.rank, engine.blocks - (engine.shape.scheduler == "os_block"))


def timeline_of(tracks: torch.Tensor, rank: int, processors: int) -> Timeline:
    """Timeline from the trace's words: int64 [blocks, TRACKS, EVENTS + 1, 3], a header (number of events, clock at the
    end of the first and of the last) and then (start, end, what)."""
    events, dropped, clocks = [], 0, []
    for block in range(tracks.shape[0]):
        for track in range(TRACKS):
            count = int(tracks[block, track, 0, 0])
            dropped += max(0, count - EVENTS)
            ends = tracks[block, track, 1 : min(count, EVENTS) + 1, 1]
            if ACTORS[track] == "main-loop-1" and len(ends) > 1:
                clocks.append(
                    float(tracks[block, track, 0, 2] - tracks[block, track, 0, 1]) / float(ends[-1] - ends[0])
                )
            for start, end, word in tracks[block, track, 1 : min(count, EVENTS) + 1].tolist():
                # a block that only keeps step with the other one of its pair waits
                if word >= 0 or word in PHASES:
                    events.append((block, track, start, end, word))
    if not events:
        return Timeline([], 0, 0.0, 0.0, 0.0, 0.0, {}, 0)
    begin, end = min(e[2] for e in events), max(e[3] for e in events)
    wall = max(end - begin, 1)
    intervals: list[Interval] = []
    spent: dict[str, float] = {}
    tasks, looping = 0, 0.0
    free: dict[tuple[int, int], float] = {}
    for block, track, start, stop, word in events:
        name = PHASES[word] if word < 0 else enc.KIND_NAMES[enc.task_kind(word)]
        # a tick of globaltimer is 32 ns: an event may seem to begin before its track's last one ended
        at = max((start - begin) / 1e3, free.get((block, track), 0.0))
        length = max((stop - begin) / 1e3 - at, 0.0)
        free[block, track] = at + length
        actor = f"{ACTORS[track]} {block}"
        intervals.append(Interval(rank, actor, name, at, length, max(word, 0) & enc.TASK_MASK))
        if track == 0:
            spent[name] = spent.get(name, 0.0) + length
            tasks += word >= 0
        looping += length * (track == 3)
    share = {name: value * 1e3 / wall / processors for name, value in spent.items()}
    share["wait"] = 1.0 - sum(share.values())
    busy = share.get("gemm0", 0.0) + share.get("gemm1", 0.0)
    clock = sum(clocks) / max(len(clocks), 1)
    return Timeline(intervals, tasks, wall / 1e3, busy, looping * 1e3 / wall / processors, clock, share, dropped)
