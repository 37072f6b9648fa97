"""The report as a person sees it: every number of the JSON, on a terminal of any width, and a picture."""

from __future__ import annotations

import io
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from moe_ref.errors import UsageError
from moe_ref.limits import check_plot_path
from moe_ref.main_job import Job, Report, run_job
from moe_ref.report import BUSIEST, amount, bar, plot_report, print_report
from moe_ref.world import SimulatedWorld

# Small products: a second thread costs more than it gives, above all on a busy machine.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def report() -> Report:
    return run_job(Job(tokens=64, text="excerpt", capacity_factor=1.0), SimulatedWorld(3))


def shown(report: Report, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_bars_are_proportional() -> None:
    assert bar(1, 1, 10) == "█" * 10
    assert bar(1, 2, 10) == "█" * 5
    assert bar(1, 16, 1) == "▏"
    assert bar(1, 10**6, 10) == "▏", "anything above zero shows"
    assert bar(1, 2, 10, ascii_only=True) == "#####"
    assert bar(1, 10**6, 10, ascii_only=True) == "#"
    assert bar(0, 5, 10) == bar(0, 0, 10) == ""


def test_amounts() -> None:
    assert [amount(n) for n in (0, 12, 1500, 2_000_000, 3.2e9, 5e13)] == [
        "0 B",
        "12 B",
        "1.5 kB",
        "2 MB",
        "3.2 GB",
        "50 TB",
    ]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_terminal_shows_every_load(report: Report, width: int) -> None:
    text, v = shown(report, width), report.values
    lines = text.splitlines()
    for expert, load in enumerate(v["expert_load"]):
        assert any(re.match(rf"\s*{expert}\s+{report.expert_rank[expert]}\s+{load}\b", line) for line in lines), expert
    for rank, rows in enumerate(v["rows_per_rank"]):
        assert any(re.match(rf"\s*{rank}\s+64\s+{rows}\b", line) for line in lines)
    assert f"max/mean over ranks {v['max_over_mean']:.3f}" in text
    assert f"{amount(v['bytes_local'])} stay, {amount(v['bytes_remote'])} cross" in text
    assert f"{v['dropped']} of 768 routes" in text
    assert f"relative error {v['relative_error']:.2e}" in text
    assert v["output_sha256"] in text.replace("\n", "").replace(" ", "")
    for stage in v["seconds_per_stage"]:
        assert stage in text
    assert max(len(line.rstrip()) for line in lines) <= width


def test_many_experts_show_the_busiest(capsys: pytest.CaptureFixture) -> None:
    report = run_job(Job(tokens=64, text="excerpt", experts=100), SimulatedWorld(2))
    text = shown(report)
    load_E = np.sort(report.values["expert_load"])[::-1]
    assert f"and {100 - BUSIEST} others with {load_E[-1]} to {load_E[BUSIEST]} rows each" in text
    assert "the gate is untrained" in " ".join(text.split())


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_picture(report: Report, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"report.{ending}"
    plot_report(report, path)
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert path.read_bytes().startswith(starts[ending])
    if ending == "svg":
        assert "Load per expert" in path.read_text() or path.stat().st_size > 20_000


def test_picture_that_can_not_be_written(report: Report, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ends in '.doc', expected one of .*png"):
        plot_report(report, tmp_path / "x.doc")
    with pytest.raises(UsageError, match=r"no folder .*; make it, or name another"):
        plot_report(report, tmp_path / "gone" / "x.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UsageError, match=r"folder.png is a folder, expected a file"):
        plot_report(report, tmp_path / "folder.png")
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(UsageError, match=r"pipe.png is no regular file, expected a file"):
        plot_report(report, tmp_path / "pipe.png")
    with pytest.raises(UsageError, match=r"can't be written: File name too long"):
        check_plot_path(tmp_path / ("x" * 300 + ".png"))


def test_looking_at_the_path_changes_nothing(tmp_path: Path) -> None:
    there = tmp_path / "there.png"
    there.write_bytes(b"kept")
    check_plot_path(there)
    check_plot_path(tmp_path / "new.png")
    assert [path.name for path in tmp_path.iterdir()] == ["there.png"]
    assert there.read_bytes() == b"kept"


@pytest.mark.parametrize("name", ["a$b$\\frac", "a\udcffb", "a\nb\x1b", "x" * 300])
def test_picture_of_a_text_of_any_name(report: Report, name: str, tmp_path: Path) -> None:
    odd = replace(report, values={**report.values, "text": name})
    plot_report(odd, tmp_path / "p.png")
    text = shown(odd)
    assert "\x1b" not in text
    text.encode()


def test_ascii_terminal(report: Report) -> None:
    written = io.BytesIO()
    console = Console(file=io.TextIOWrapper(written, "ascii"), width=100, color_system=None)
    print_report(report, console)
    console.file.flush()
    assert b"####" in written.getvalue()


@pytest.mark.parametrize("width", [20, 40])
def test_narrow_terminal_cuts_no_number(report: Report, width: int) -> None:
    text = shown(report, width)
    assert report.values["output_sha256"] in text
    assert "…" not in text
