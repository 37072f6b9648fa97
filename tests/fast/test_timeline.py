"""Timelines from trace words, the doctor's checks, the NVSHMEM version check: what needs no device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_fast.bench import contestants, measure
from moe_fast.doctor import gpu_checks
from moe_fast.heap import check_version
from moe_fast.kernel import tile_pairs
from moe_fast.memory import EVENTS, TRACKS, trace_words
from moe_fast.timeline import ACTORS, timeline_of
from moe_ref.errors import BackendUnavailable
from moe_ref.runtime import encoding as enc
from moe_ref.runtime.trace import check_trace, chrome_trace


def words(blocks: int, events: list[tuple[int, int, int, int, int]]) -> torch.Tensor:
    """Trace words of (block, track, start, end, what) events."""
    tracks = torch.zeros(trace_words(blocks), dtype=torch.int64).view(blocks, TRACKS, EVENTS + 1, 3)
    for block, track, start, end, what in events:
        tracks[block, track, 0, 0] += 1
        tracks[block, track, int(tracks[block, track, 0, 0])] = torch.tensor([start, end, what])
    return tracks


def test_timeline_counts_work_and_leaves_waiting_out():
    gemm0 = enc.pack_task(enc.GEMM0, 3, 17, 2) | (100 << 48)
    gemm1 = enc.pack_task(enc.GEMM1, 3, 17, 1) | (100 << 48)
    tracks = words(
        2,
        [
            (0, 0, 1_000, 2_000, -1),
            (0, 0, 2_000, 6_000, gemm0),
            (0, 0, 7_000, 9_000, gemm1),
            (0, 1, 5_990, 6_500, gemm0),
            (0, 3, 2_000, 5_500, gemm0),
            (0, 3, 7_000, 8_000, gemm1),
            (0, 4, 2_100, 5_600, gemm0),
            (1, 0, 3_000, 7_000, gemm0),
            (1, 0, 10_000, 11_000, -5),
        ],
    )
    # between the ends of the first and the last main loop, at 5500 and 8000 ns
    tracks[0, 3, 0, 1:] = torch.tensor([1_000_000, 1_000_000 + 3_750])
    line = timeline_of(tracks, rank=1, processors=2)
    assert line.clock_ghz == pytest.approx(1.5)
    assert line.tasks == 3
    assert line.wall_us == 10.0
    assert line.utilisation == pytest.approx((4 + 2 + 4) / 20)
    assert line.share["wait"] == pytest.approx(1 - (4 + 2 + 4 + 1 + 1) / 20)
    trace = chrome_trace(line.intervals)
    assert line.main_loops == pytest.approx((3.5 + 1) / 20)
    assert check_trace(trace) == 9
    first = next(e for e in trace["traceEvents"] if e["name"] == "gemm1")
    assert (first["args"]["slot"], first["args"]["row_tile"], first["args"]["column_tile"]) == (3, 17, 1)


def test_an_event_within_the_timers_tick_does_not_overlap():
    tracks = words(1, [(0, 0, 1_000, 2_048, -1), (0, 0, 2_016, 3_000, -2)])
    assert check_trace(chrome_trace(timeline_of(tracks, 0, 1).intervals)) == 2


def test_a_block_that_only_keeps_step_waits():
    """The last task of a row tile whose odd number of column tiles two blocks share: its word's sign bit is set."""
    task = enc.pack_task(enc.GEMM1, 3, 9, 2)
    pair = task | tile_pairs.pack_fields(100, 0, 1, 0) << 48, task | tile_pairs.VOID << 48
    signed = [word - (word >> 63 << 64) for word in pair]
    assert signed[0] >= 0 > signed[1]
    tracks = words(2, [(m, track, 0, 1000, word) for m, word in enumerate(signed) for track in (0, 1, 3, 4)])
    line = timeline_of(tracks, 0, 2)
    assert (line.tasks, line.utilisation, line.main_loops) == (1, 0.5, 0.5)
    assert {interval.actor for interval in line.intervals} == {f"{ACTORS[track]} 0" for track in (0, 1, 3, 4)}


def test_events_beyond_a_track_are_counted():
    tracks = words(1, [(0, 0, 0, 10, -1)])
    tracks[0, 0, 0, 0] = EVENTS + 7
    assert timeline_of(tracks, 0, 1).dropped == 7


class TracedEngine:
    """Of a traced engine of one block what `median_timeline` touches; a call is one event of the next length."""

    def __init__(self, log: list[str], lengths_ns: list[int]) -> None:
        self.trace = torch.zeros(trace_words(1), dtype=torch.int64)
        self.blocks, self.shape, self.heap = 1, SimpleNamespace(scheduler="spare_warps"), SimpleNamespace(rank=0)
        self.log, self.lengths_ns = log, iter(lengths_ns)

    def check(self) -> None:
        self.log.append("check")

    def call(self) -> None:
        self.log.append("call")
        assert not self.trace.any(), "events of two calls would mix"
        self.trace.copy_(words(1, [(0, 0, 1_000, 1_000 + next(self.lengths_ns), -1)]).view(-1))


@pytest.fixture
def log_of_two_ranks(monkeypatch) -> list[str]:
    """What would be enqueued and waited for, noted by name; the other rank's calls last as long as this one's, but its
    first kept one lasts 90 us."""
    log: list[str] = []

    def all_reduce(tensor: torch.Tensor, op: object = None) -> None:
        log.append("all_reduce")
        if tensor.numel() == contestants.TRACED_CALLS:
            tensor[0] = max(tensor[0].item(), 90.0)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    for module in (measure, contestants):
        monkeypatch.setattr(module, "place", lambda: (0, 2))
    monkeypatch.setattr(torch.distributed, "barrier", lambda: log.append("barrier"))
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return log


def test_traced_calls_begin_like_timed_ones_and_nothing_is_read_between_them(log_of_two_ranks):
    log, calls = log_of_two_ranks, contestants.WARM_CALLS + contestants.TRACED_CALLS
    engine: Any = TracedEngine(log, [5_000] * calls)
    contestants.median_timeline(engine, engine.call)
    begin = ["synchronize", "barrier", "synchronize", "sleep", "all_reduce"]
    assert log == [*begin, "call"] * calls + ["check", "all_reduce"]
    # what `interleaved` does before a repetition
    log.clear()
    measure.start_together(torch.zeros(1))
    assert log == begin


def test_all_ranks_show_the_same_call(log_of_two_ranks):
    """The median of the slower rank's times: of 10, 20, ... 90 us the first lasts 90 on the other rank, so it is 60."""
    warm, kept = [1_000] * contestants.WARM_CALLS, [10_000 * n for n in range(1, contestants.TRACED_CALLS + 1)]
    assert contestants.TRACED_CALLS == 9
    engine: Any = TracedEngine(log_of_two_ranks, warm + kept)
    assert contestants.median_timeline(engine, engine.call).wall_us == 60.0


def test_doctor_reports_every_part_without_raising():
    checks = gpu_checks()
    names = {check.name for check in checks}
    assert {
        "nvidia-cutlass-dsl",
        "NVSHMEM host library",
        "NVSHMEM device code",
        "GPUs for the megakernel",
        "several ranks on one GPU",
        "peer access",
    } <= names
    assert all(check.state in ("ok", "optional") for check in checks), "a missing GPU is no problem of the reference"
    assert all(check.found for check in checks)


@pytest.mark.parametrize(("blocking", "says"), [("0", "up to 26"), ("1", "CUDA_LAUNCH_BLOCKING=1")])
def test_doctor_says_how_many_ranks_one_gpu_holds(monkeypatch, blocking, says):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
    found = {check.name: check for check in gpu_checks()}["several ranks on one GPU"]
    assert says in found.found
    assert (found.state == "ok") == (blocking == "0")


def test_an_old_nvshmem_is_refused_with_the_remedy():
    check_version(SimpleNamespace(libnvshmem_version="3.8.0"))
    with pytest.raises(BackendUnavailable, match=r"3\.4\.5.*LD_PRELOAD"):
        check_version(SimpleNamespace(libnvshmem_version="3.4.5"))
