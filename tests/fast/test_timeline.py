"""Timelines from trace words, the doctor's checks, the NVSHMEM version check: what needs no device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_fast.doctor import gpu_checks
from moe_fast.engine import EVENTS, TRACKS, trace_words
from moe_fast.heap import check_version
from moe_fast.timeline import timeline_of
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
    line = timeline_of(tracks, rank=1, processors=2)
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


def test_events_beyond_a_track_are_counted():
    tracks = words(1, [(0, 0, 0, 10, -1)])
    tracks[0, 0, 0, 0] = EVENTS + 7
    assert timeline_of(tracks, 0, 1).dropped == 7


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
