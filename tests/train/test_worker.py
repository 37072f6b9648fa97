"""What a rank of a local run says and returns when it fails, what a run prints on its way, and how a text is read."""

from __future__ import annotations

import json

import pytest

from moe_ref.console import err
from moe_ref.errors import CheckFailed, UsageError
from moe_ref.train import commands, progress, start, worker
from moe_ref.train.commands import Task
from moe_ref.train.settings import TrainJob

TASK = json.dumps(Task(TrainJob()).to_dict())


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (MemoryError("2 TB"), 2, "not enough memory"),
        (UsageError("--ranks is 0"), 2, "--ranks is 0"),
        (CheckFailed("lost rank 1"), 1, "lost rank 1"),
        (RuntimeError("odd"), 1, "odd"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_rank_ends_with_the_documented_code(monkeypatch, capsys, error, code, says) -> None:
    def fail(task: Task) -> None:
        raise error

    monkeypatch.setattr(commands, "run_here", fail)
    assert worker.main(TASK) == code
    shown = capsys.readouterr().err
    assert says in shown
    assert "Traceback" not in shown


def test_debug_shows_the_traceback_of_a_rank(monkeypatch, capsys) -> None:
    def fail(task: Task) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(commands, "run_here", fail)
    assert worker.main(TASK, debug=True) == 1
    assert "Traceback" in capsys.readouterr().err


def test_progress_without_a_terminal_is_a_few_lines(monkeypatch, capsys) -> None:
    assert not err.is_terminal
    with progress.bar(20, 120, 0) as show:
        for step in range(21, 121):
            show(step, f"loss {step}")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == progress.LINES
    assert lines[-1] == "step 120/120: loss 120"
    with progress.bar(0, 5, 1) as show:
        show(1, "another rank")
    assert capsys.readouterr().err == ""


def test_of_a_long_file_the_beginning_is_read(monkeypatch, tmp_path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abcd" * 500)
    monkeypatch.setattr(start, "MAX_TEXT_BYTES", 1000)
    corpus, _ = start.check(TrainJob(text=str(path), context=16), ranks=2)
    assert len(corpus.train) + len(corpus.held_out) == 1000


@pytest.mark.parametrize("changes", [{}, {"balance": 0.0, "recompute": True}])
def test_what_a_kernel_cannot_give_is_refused(changes) -> None:
    with pytest.raises(UsageError, match=r"'fused' gives no balance loss .* --balance-loss 0, without --recompute"):
        TrainJob(backend="fused", **changes)
