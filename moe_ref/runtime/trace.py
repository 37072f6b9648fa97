"""Traces in the Chrome format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

One process per rank, one thread per actor, complete events ("ph": "X") only. The megakernel's in-kernel timeline writes
the same format, so a simulated and a measured layer can be laid side by side.

    {"traceEvents": [{"ph": "X", "name": "gemm0", "cat": "processor", "pid": 0, "tid": 7, "ts": 12.5, "dur": 21.9,
                      "args": {"actor": "processor 4", "slot": 1, "row_tile": 12, "column_tile": 3}}, ...],
     "displayTimeUnit": "ns"}

`ts` and `dur` are microseconds. Track names are no complete events, so they are written on request only; without them a
track is known by the actor in its events' args.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moe_ref.errors import CheckFailed
from moe_ref.runtime import encoding as enc
from moe_ref.runtime.run import Interval

_ORDER = ("gate", "subscriber", "scheduler", "copy", "link", "network card", "compute stream", "communication stream")
"""Actors of a rank that are one each, from the top; processors follow."""

TICKS = 1024
"""Times are written in 1/1024 us, just under a nanosecond: sums of such numbers are exact, so a viewer that adds start
and duration never finds that one event ends after the next one of its track has begun."""


def actor_key(actor: str) -> tuple[int, int]:
    """Sorts the tracks of a rank."""
    if actor in _ORDER:
        return _ORDER.index(actor), 0
    head, _, number = actor.rpartition(" ")
    return len(_ORDER) + (head != "processor"), int(number) if number.isdigit() else 0


def chrome_trace(intervals: Iterable[Interval], names: bool = False, **other: Any) -> dict[str, Any]:
    """The trace as a JSON object.

    Args:
        names: also write metadata events ("ph": "M") that name processes and threads.
        other: goes into "otherData" (how the run came about).
    """
    intervals = sorted(intervals, key=lambda i: (i.rank, actor_key(i.actor), i.start_us))
    tracks: dict[tuple[int, str], int] = {}
    for i in intervals:
        if (i.rank, i.actor) not in tracks:
            tracks[i.rank, i.actor] = sum(rank == i.rank for rank, _ in tracks)
    events: list[dict[str, Any]] = []
    if names:
        for rank in dict.fromkeys(rank for rank, _ in tracks):
            events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for (rank, actor), tid in tracks.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": actor}})
    ended: dict[tuple[int, str], int] = {}
    for i in intervals:
        start, end = round(i.start_us * TICKS), round((i.start_us + i.duration_us) * TICKS)
        # An end and the next start that differ in their last bit may round to neighbouring ticks.
        start += ended.get((i.rank, i.actor), 0) - start == 1
        end = ended[i.rank, i.actor] = max(start, end)
        arguments: dict[str, Any] = {"actor": i.actor}
        if i.word and enc.task_kind(i.word) != enc.STOP:
            arguments |= {
                "task": enc.KIND_NAMES[enc.task_kind(i.word)],
                "slot": enc.task_slot(i.word),
                "row_tile": enc.task_row_tile(i.word),
                "column_tile": enc.task_column_tile(i.word),
            }
        events.append(
            {
                "ph": "X",
                "name": i.name,
                "cat": i.actor.split(" ")[0],
                "pid": i.rank,
                "tid": tracks[i.rank, i.actor],
                "ts": start / TICKS,
                "dur": (end - start) / TICKS,
                "args": arguments,
            }
        )
    trace: dict[str, Any] = {"traceEvents": events, "displayTimeUnit": "ns"}
    if other:
        trace["otherData"] = other
    return trace


def check_trace(trace: dict[str, Any]) -> int:
    """Check a trace: field types, non-negative times, no overlap within one track. Returns the number of events.

    Raises:
        CheckFailed: says which event breaks which rule.
    """
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        raise CheckFailed("a trace is an object with a list 'traceEvents'")
    tracks: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    complete = 0
    for n, event in enumerate(events):
        if not isinstance(event, dict) or event.get("ph") not in ("X", "M"):
            raise CheckFailed(f"event {n} is not a complete event (ph X) or metadata (ph M): {event!r:.100}")
        for key, kind in (("name", str), ("pid", int), ("tid", int), ("args", dict)):
            if not isinstance(event.get(key), kind) or isinstance(event.get(key), bool):
                raise CheckFailed(f"event {n}: {key} is {event.get(key)!r}, expected {kind.__name__}")
        if event["ph"] == "M":
            continue
        complete += 1
        for key in ("ts", "dur"):
            value = event.get(key)
            if (
                not isinstance(value, (int, float))
                or isinstance(value, bool)
                or not value >= 0
                or value == float("inf")
            ):
                raise CheckFailed(f"event {n} ({event['name']}): {key} is {value!r}, expected a number of at least 0")
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"], event["name"]))
    for (pid, tid), found in tracks.items():
        found.sort()
        for (ts, dur, name), (later, _, other) in itertools.pairwise(found):
            if ts + dur > later:
                raise CheckFailed(f"track {pid}/{tid}: {name} at {ts} us for {dur} us overlaps {other} at {later} us")
    return complete


def write_trace(path: Path, intervals: Sequence[Interval], names: bool = False, **other: Any) -> int:
    """Check and write a trace; returns the number of events.

    Raises:
        CheckFailed: the trace breaks a rule. OSError: the file can't be written.
    """
    trace = chrome_trace(intervals, names, **other)
    count = check_trace(trace)
    path.write_text(json.dumps(trace, allow_nan=False))
    return count
