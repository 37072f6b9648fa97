"""`moe-ref simulate` and `moe-ref trace` as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import matplotlib.image
import pytest

from moe_ref.cli import main
from moe_ref.results import PROVENANCE_KEYS
from moe_ref.runtime import paper
from moe_ref.runtime.trace import check_trace

SMALL = ["--tokens", "256", "--experts", "8", "--hidden", "256", "--intermediate", "256"]
KEYS = {"latency_us", "utilisation", "overlap_efficiency", "gpu_ops", "bytes_sent", "tokens_per_s"}


def _run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_simulate_prints_one_object_with_all_models(capsys):
    code, out, _ = _run(capsys, "simulate", "--machine", "h100-8", "--tokens", "16384", "--experts", "128", "--json")
    assert code == 0
    assert out.count("\n") == 1
    report = json.loads(out)
    assert set(report["models"]) == {"bulk", "chunked", "megakernel"}
    for figures in report["models"].values():
        assert set(figures) == KEYS
    assert report["models"]["megakernel"]["gpu_ops"] == 1
    assert report["models"]["megakernel"]["latency_us"] < report["models"]["chunked"]["latency_us"]
    assert report["models"]["chunked"]["latency_us"] < report["models"]["bulk"]["latency_us"]


@pytest.mark.parametrize("preset", ["h100-8", "h200-2", "h200-8", "a100-8", "h100-8x8"])
def test_every_preset_runs(capsys, preset):
    code, out, _ = _run(capsys, "simulate", "--machine", preset, *SMALL, "--model", "megakernel", "--json")
    assert code == 0
    report = json.loads(out)
    assert list(report["models"]) == ["megakernel"]
    assert report["ranks"] == {"h200-2": 2, "h100-8x8": 64}.get(preset, 8)


def test_options_reach_the_simulation(capsys):
    def latency(*more: str) -> float:
        _, out, _ = _run(capsys, "simulate", "--ranks", "4", *SMALL, "--model", "megakernel", "--json", *more)
        return json.loads(out)["models"]["megakernel"]["latency_us"]

    plain = latency()
    assert latency() == plain
    assert latency("--seed", "1") != plain
    assert latency("--straggler", "1", "--slowdown", "5") > plain
    assert latency("--launch-jitter", "100") > plain
    assert latency("--dtype", "float32", "--gated", "--top-k", "4") > plain
    assert latency("--skew", "2") > plain
    assert latency("--layout", "fixed", "--capacity-factor", "1") != plain


def test_plot_memory_and_records(capsys, tmp_path):
    records = [
        {"kind": "chain", "ms": ms, "ranks": 2, "tokens": s, "experts": 8}
        for s, ms in ((1024, 1.0), (4096, 1.7), (8192, 2.4))
    ]
    path = tmp_path / "records.json"
    path.write_text(json.dumps(records))
    picture = tmp_path / "models.png"
    code, out, err = _run(
        capsys,
        "simulate",
        "--machine",
        "h200-2",
        *SMALL,
        "--records",
        str(path),
        "--memory",
        "--plot",
        str(picture),
        "--json",
    )
    assert code == 0
    report = json.loads(out)
    assert report["calibration"]["chain"]["records"] == 3
    assert all(row["formula_bytes"] == row["allocated_bytes"] for row in report["memory"])
    assert str(picture) in err
    assert matplotlib.image.imread(picture).shape[0] > 300
    code, out, _ = _run(capsys, "simulate", *SMALL, "--ranks", "1")
    assert code == 0
    assert "megakernel" in out


def test_trace_writes_a_valid_trace_and_a_picture(capsys, tmp_path):
    path, picture = tmp_path / "trace.json", tmp_path / "gantt.png"
    for model in ("megakernel", "bulk", "chunked"):
        code, out, _ = _run(
            capsys, "trace", "--out", str(path), *SMALL, "--model", model, "--plot", str(picture), "--json"
        )
        assert code == 0
        report = json.loads(out)
        assert check_trace(json.loads(path.read_text())) == report["events"]
        assert matplotlib.image.imread(picture).shape[0] > 200
    code, out, _ = _run(capsys, "trace", "--out", str(path), *SMALL, "--calls", "2", "--processors", "3", "--names")
    assert code == 0
    assert "ui.perfetto.dev" in out
    named = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "M" and e["tid"] == 7]
    assert named


def test_the_papers_figures(capsys, tmp_path, monkeypatch):
    """On a layer an eighth of the paper's, which takes the same way."""
    monkeypatch.setattr(
        paper, "run_sweeps", partial(paper.run_sweeps, base=paper.BASE.replace(tokens=2048), tokens_axis=(512, 2048))
    )
    code, _, _ = _run(capsys, "simulate", *SMALL, "--model", "megakernel", "--paper", str(tmp_path), "--json")
    assert code == 0
    assert matplotlib.image.imread(tmp_path / "figures.png").shape[0] > 500
    table = (tmp_path / "table.md").read_text()
    for figure in (
        "SM utilisation",
        "Latency",
        "Throughput",
        "Overlap efficiency",
        "GPU operations",
        "Symmetric memory",
    ):
        assert figure in table
    assert (tmp_path / "memory.md").read_text().count("\n") == 2 + 30
    results = json.loads((tmp_path / "simulator_paper.json").read_text())
    assert set(PROVENANCE_KEYS) < set(results)
    assert set(results["comparison"][0]) == {"figure", "paper", "simulator", "difference"}
    assert set(results["gpus"]["8"]["megakernel"]) == KEYS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--machine", "tpu"], "presets: h200-2"),
        (["simulate", "--ranks", "9"], "--ranks is 9, but machine h100-8 has 8 GPUs"),
        (["simulate", "--ranks", "0"], "ranks is 0, expected at least 1"),
        (["simulate", "--tokens", "0"], "tokens is 0"),
        (["simulate", "--tokens", "-5"], "tokens is -5"),
        (["simulate", "--top-k", "64"], "top_k is 64, expected at most experts = 32"),
        (["simulate", "--model", "magic"], "--model is 'magic'"),
        (["simulate", "--dtype", "int8"], "--dtype is 'int8'"),
        (["simulate", "--layout", "round"], "--layout is 'round'"),
        (["simulate", "--seed", "-1"], "--seed is -1"),
        (["simulate", "--straggler", "8"], "--straggler is 8"),
        (["simulate", "--jitter", "nan"], "finite"),
        (["simulate", "--jitter", "3"], "jitter is 3.0, expected 0"),
        (["simulate", "--experts", "40000", "--tokens", "4"], "more ranks"),
        (["simulate", "--skew", "nan"], "skew is nan"),
        (["simulate", "--capacity-factor", "0"], "capacity_factor is 0"),
        (["simulate", "--records", "/nowhere.json"], "no file /nowhere.json"),
        (["simulate", "--tokens", "1000000000000"], "of memory, this machine has"),
        (["simulate", "--experts", "1000000000"], "more ranks"),
        (["simulate", "--plot", "/nowhere/x.png"], "no folder /nowhere"),
        (["trace", "--out", "t.json", "--processors", "1000000"], "--processors from 1 to"),
        (["trace", "--out", "/"], "is a folder"),
        (["simulate", "--machine", "h200-2", "--tokens", "64", "--paper", "x"], "at least 8 GPUs"),
        (["trace", "--out", "/nowhere/t.json", "--tokens", "16"], "no folder /nowhere"),
        (["trace", "--out", "/proc/t.json"], "--out /proc/t.json can't be written"),
        (["simulate", "--tokens", "64", "--paper", "/proc/x"], "error: /proc/x: No such file or directory"),
        (["trace", "--out", "t.json", "--calls", "0"], "--calls from 1 to"),
        (["trace", "--out", "t.json", "--model", "bulk", "--calls", "2"], "megakernel only"),
        (["trace"], "--out"),
        (["trace", "--out", "t.json", "--model", "chunked", "--check"], "megakernel only"),
        (["protocol", "--break", "all"], "--break is 'all'"),
        (["protocol", "--case", "big"], "case 'big' is not known"),
        (["protocol", "--layout", "big"], "layout is 'big'"),
        (["protocol", "--processors", "0"], "--processors from 1 to 8"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_two(capsys, arguments, message):
    code, out, err = _run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_the_gantt_shows_every_kind_of_work(tmp_path):
    """Few combine tasks go to whoever is idle: one who did them is shown though he isn't among the first."""
    from moe_ref.runtime.figures import _chosen, gantt
    from moe_ref.runtime.run import Interval

    def ran(processor: int, name: str, start: float, rank: int = 0) -> Interval:
        return Interval(rank, f"processor {processor}", name, start, 1.0)

    run = [ran(n, "gemm0", 0.0) for n in range(20)] + [ran(n, "gemm1", 2.0) for n in range(20)]
    assert _chosen(run, 0, 4) == {f"processor {n}" for n in range(4)}
    run += [ran(17, "combine", 5.0), ran(18, "combine", 5.0), ran(18, "combine", 7.0), ran(0, "combine", 9.0, rank=1)]
    assert _chosen(run, 0, 4) == {"processor 0", "processor 1", "processor 2", "processor 18"}
    assert _chosen(run, 1, 4) == {"processor 0"}
    assert _chosen([], 0, 4) == set()
    gantt(tmp_path / "gantt.png", run, "planted", processors_shown=4)
    assert (tmp_path / "gantt.png").stat().st_size > 1000


def test_figures_leave_pyplot_alone():
    """A notebook that imports the package keeps its inline backend."""
    program = "import sys, moe_ref.runtime.figures; print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_trace_can_check_its_numbers(capsys, tmp_path):
    path = str(tmp_path / "trace.json")
    sizes = ["--tokens", "40", "--experts", "4", "--hidden", "64", "--intermediate", "48"]
    for more in (["--gated", "--calls", "2"], ["--layout", "fixed", "--capacity-factor", "0.8", "--ranks", "1"]):
        code, out, _ = _run(capsys, "trace", "--out", path, *sizes, "--dtype", "float32", "--check", "--json", *more)
        assert code == 0
        assert json.loads(out)["relative_error"] <= 1e-6


def test_protocol_finds_bugs_and_finds_none_where_there_are_none(capsys):
    code, out, _ = _run(capsys, "protocol", "--case", "full", "--random", "20", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["complete"]
    assert report["states"] >= 100_000
    assert report["violation"] is None
    assert report["random_orders_failed"] == 0
    code, out, err = _run(capsys, "protocol", "--break", "one-side", "--random", "0")
    assert code == 1
    assert "payload of counts" in out
    assert "overwritten" in err
    code, out, _ = _run(capsys, "protocol", "--break", "total-too-large", "--layout", "fixed", "--json")
    assert code == 1
    assert json.loads(out)["random_orders_failed"] == 200
    code, _, err = _run(capsys, "protocol", "--limit", "50", "--random", "0")
    assert code == 0
    assert "raise --limit" in err
