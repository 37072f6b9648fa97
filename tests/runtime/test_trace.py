"""Traces: valid, complete events, one track per rank and actor, nothing overlaps; the check finds what is wrong."""

from __future__ import annotations

import copy
import itertools
import json

import pytest

from moe_ref.errors import CheckFailed
from moe_ref.runtime import encoding as enc
from moe_ref.runtime.machine import Noise, machine
from moe_ref.runtime.models import MODELS, run_model
from moe_ref.runtime.run import Interval
from moe_ref.runtime.simulator import Simulator
from moe_ref.runtime.trace import check_trace, chrome_trace, write_trace
from moe_ref.runtime.workload import Workload

WORK = Workload(ranks=3, tokens=300, experts=6, hidden=256, intermediate=256)


@pytest.mark.parametrize("noise", [Noise(), Noise(jitter=0.5, launch_jitter_us=20, straggler=1, slowdown=3, seed=2)])
@pytest.mark.parametrize("model", MODELS)
def test_traces_are_valid(model, noise, tmp_path):
    result = run_model(model, WORK, machine("h200-8"), noise, record=True)
    path = tmp_path / "trace.json"
    count = write_trace(path, result.intervals, model=model)
    trace = json.loads(path.read_text())
    assert check_trace(trace) == count == len(trace["traceEvents"]) == len(result.intervals)
    assert {e["ph"] for e in trace["traceEvents"]} == {"X"}
    tracks = {(e["pid"], e["tid"]): e["args"]["actor"] for e in trace["traceEvents"]}
    assert len(tracks) == len({(i.rank, i.actor) for i in result.intervals})
    assert {pid for pid, _ in tracks} == {0, 1, 2}
    assert max(e["ts"] + e["dur"] for e in trace["traceEvents"]) <= result.latency_us + 1e-3 + 20


def test_every_task_of_every_call_is_in_the_trace():
    calls = [WORK.call(epoch) for epoch in range(2)]
    run = Simulator(calls, machine("h200-8"), 6, record=True).run()
    events = chrome_trace(run.intervals)["traceEvents"]
    for rank in range(3):
        shown = sorted(
            (e["args"]["task"], e["args"]["slot"], e["args"]["row_tile"], e["args"]["column_tile"])
            for e in events
            if e["pid"] == rank and e["cat"] == "processor"
        )
        expected = sorted(
            (enc.KIND_NAMES[enc.task_kind(w)], enc.task_slot(w), enc.task_row_tile(w), enc.task_column_tile(w))
            for call in calls
            for w in (task.word for task in call.tasks(rank))
            if enc.task_kind(w) != enc.DISPATCH
        )
        assert shown == expected
        puts = [e for e in events if e["pid"] == rank and e["name"].startswith("rows to")]
        assert len(puts) == sum(len(call.dispatch_tasks(rank)) for call in calls)


def test_names_are_metadata_on_request():
    run = Simulator([WORK.call()], machine("h200-8"), 6, record=True).run()
    trace = chrome_trace(run.intervals, names=True, note="x")
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert all(names[e["pid"], e["tid"]] == e["args"]["actor"] for e in trace["traceEvents"] if e["ph"] == "X")
    assert check_trace(trace) == len(run.intervals)
    assert trace["otherData"] == {"note": "x"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.update(ph="B"), "not a complete event"),
        (lambda e: e.update(dur=-1.0), "dur is -1.0"),
        (lambda e: e.update(ts=float("nan")), "ts is nan"),
        (lambda e: e.update(ts="0"), "ts is '0'"),
        (lambda e: e.update(pid=0.5), "pid is 0.5"),
        (lambda e: e.pop("args"), "args is None"),
        (lambda e: e.update(dur=1e6), "overlaps"),
    ],
)
def test_the_check_finds_what_is_wrong(change, message):
    run = Simulator([WORK.call()], machine("h200-8"), 6, record=True, processors=2).run()
    trace = copy.deepcopy(chrome_trace(run.intervals))
    change(next(e for e in trace["traceEvents"] if e["name"] == "gemm0"))
    with pytest.raises(CheckFailed, match=message):
        check_trace(trace)
    with pytest.raises(CheckFailed, match="list 'traceEvents'"):
        check_trace({"traceEvents": 3})


def test_events_that_touch_do_not_overlap_by_a_rounding_error() -> None:
    """Sums of decimal fractions differ in their last bit; a viewer that adds start and duration must not see it."""
    spans = [(n * 0.016, 0.016) for n in range(4000)]
    assert any(a + d > b for (a, d), (b, _) in itertools.pairwise(spans)), "the case must be a real one"
    events = chrome_trace([Interval(0, "processor 0", "gemm0", a, d) for a, d in spans])["traceEvents"]
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(events))
    assert all(abs(event["ts"] - a) < 2e-3 for event, (a, _) in zip(events, spans, strict=True))
