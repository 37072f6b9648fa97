"""The main job: as a function, as a command, and the same bits from real processes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_ref import text
from moe_ref.config import DTYPES
from moe_ref.layer import MoELayer
from moe_ref.main_job import TOLERANCE, Job, run_job, trained_layer
from moe_ref.train.checkpoint import tiny_moe
from moe_ref.train.model import hidden_states
from moe_ref.world import SimulatedWorld

# Small products: a second thread costs more than it gives, above all on a busy machine.
pytestmark = pytest.mark.usefixtures("one_thread")

KEYS = [
    "backend", "ranks", "tokens", "hidden", "experts", "top_k", "rows_per_rank", "expert_load", "max_over_mean",
    "bytes_local", "bytes_remote", "dropped", "max_abs_error", "relative_error", "output_sha256", "seconds",
    "seconds_per_stage",
]  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    """One thread, and nothing of a torchrun that runs this test."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def moe_ref(*arguments: str, program: tuple[str, ...] = (sys.executable, "-m"), cwd: Path | None = None) -> str:
    """stdout of `python -m moe_ref ...`, which must succeed."""
    done = subprocess.run(
        [*program, "moe_ref", *arguments], capture_output=True, text=True, env=environment(), timeout=300, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_json(*arguments: str, **more: Any) -> dict[str, Any]:
    """The report of `run --json`, which must be one line."""
    line = moe_ref("run", "--json", *arguments, **more)
    assert line.count("\n") == 1
    return json.loads(line)


@pytest.fixture(scope="module")
def default_report() -> dict[str, Any]:
    return run_json()


def test_report_has_every_key_and_agrees_with_itself(default_report: dict[str, Any]) -> None:
    v = default_report
    assert set(KEYS) <= set(v)
    assert (v["backend"], v["ranks"], v["tokens"], v["experts"], v["top_k"]) == ("ref", 4, 2048, 32, 4)
    assert len(v["expert_load"]) == 32
    assert sum(v["expert_load"]) == sum(v["rows_per_rank"]) == 4 * 2048 * 4
    assert v["rows_per_rank"] == np.reshape(v["expert_load"], (4, 8)).sum(axis=1).tolist()
    assert v["max_over_mean"] == pytest.approx(max(v["rows_per_rank"]) / (2048 * 4))
    assert v["bytes_local"] + v["bytes_remote"] == 4 * 2048 * 4 * v["hidden"] * 4
    assert v["dropped"] == 0
    assert 0 < v["relative_error"] <= 1e-5
    assert 0 < v["max_abs_error"] < 1e-3
    assert isinstance(v["seconds"], float)
    assert set(v["seconds_per_stage"]) >= {"gate", "plan", "dispatch", "return", "combine"}
    assert 0 < sum(v["seconds_per_stage"].values()) <= v["seconds"]


def test_torchrun_gives_the_same_bits(default_report: dict[str, Any], same_rows) -> None:
    program = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "-m")
    real = run_json(program=program)
    assert real["world"] == "distributed"
    varying = {"world", "seconds", "seconds_per_stage"}
    assert {k: v for k, v in real.items() if k not in varying} == {
        k: v for k, v in default_report.items() if k not in varying
    }
    assert real["seconds_per_stage"].keys() == default_report["seconds_per_stage"].keys()


def test_digest_and_loads_are_those_of_the_layer() -> None:
    """Everything again by hand: hidden states, routing, sum over experts, digest."""
    report = run_job(Job(tokens=100, text="excerpt"), SimulatedWorld(3))
    config, state = trained_layer()
    layer = MoELayer(config)
    layer.load_state_dict(state)
    x_SH = hidden_states(tiny_moe()[0], text.excerpt(), 300)
    with torch.no_grad():
        y_SH = layer(x_SH)
        expert_SK = layer.gate(x_SH).expert_SK.numpy()
    assert report.values["expert_load"].tolist() == np.bincount(expert_SK.flatten(), minlength=32).tolist()
    assert report.values["output_sha256"] == hashlib.sha256(y_SH.numpy().astype("<f4").tobytes()).hexdigest()
    owner_SK, home_S = np.searchsorted([11, 22], expert_SK, side="right"), np.repeat([0, 1, 2], 100)
    sent_PG = np.array([[(owner_SK[home_S == p] == g).sum() for g in range(3)] for p in range(3)])
    assert report.rows_PG.tolist() == sent_PG.tolist()
    assert report.values["bytes_local"] == int(sent_PG.trace()) * 512
    assert report.values["bytes_remote"] == int(sent_PG.sum() - sent_PG.trace()) * 512


def test_two_runs_and_any_number_of_ranks_give_the_same_bits(same_rows) -> None:
    digests = {
        run_job(Job(tokens=240 // ranks, text="excerpt", layout=layout), SimulatedWorld(ranks)).values["output_sha256"]
        for ranks in (1, 2, 2, 3, 5)
        for layout in ("compact", "fixed")
    }
    assert len(digests) == 1


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_deviation_is_what_the_dtype_allows(dtype: str) -> None:
    report = run_job(Job(tokens=64, dtype=dtype, text="excerpt"), SimulatedWorld(2))
    assert report.correct
    assert 0 < report.values["relative_error"] <= TOLERANCE[dtype]
    # A tolerance far above what is reached would hide errors.
    assert report.values["relative_error"] > TOLERANCE[dtype] / 1e5


def test_every_dtype_has_a_tolerance() -> None:
    assert set(TOLERANCE) == set(DTYPES)


def test_wrong_results_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that forgets the last token's result is not within the tolerance."""
    forward = MoELayer.forward

    def forgetful(self, x, *arguments, **options):
        result = forward(self, x, *arguments, **options)
        if options.get("return_stats"):
            result[0][-1][-1] = 0
        return result

    monkeypatch.setattr(MoELayer, "forward", forgetful)
    report = run_job(Job(tokens=64, text="excerpt"), SimulatedWorld(2))
    assert not report.correct
    assert report.values["relative_error"] > 1e-3


def test_capacity_drops_are_counted(default_report: dict[str, Any]) -> None:
    v = run_json("--capacity-factor", "1.0", "--layout", "fixed")
    assert v["dropped"] > 0
    assert sum(v["expert_load"]) + v["dropped"] == 4 * 2048 * 4
    assert v["expert_load_before_capacity"] == default_report["expert_load"]
    assert max(v["expert_load"]) <= 4 * 256
    assert v["relative_error"] <= 1e-5


def test_other_sizes() -> None:
    fresh = run_job(Job(tokens=50, experts=10, top_k=3, text="code"), SimulatedWorld(4))
    assert not fresh.values["trained_gate"]
    assert "the gate is untrained" in fresh.notes[0]
    assert fresh.values["expert_load"].sum() == 4 * 50 * 3
    assert (
        fresh.values["output_sha256"]
        == run_job(Job(tokens=50, experts=10, top_k=3, text="code"), SimulatedWorld(4)).values["output_sha256"]
    )
    other = run_job(Job(tokens=50, experts=10, top_k=3, text="code", seed=1), SimulatedWorld(4))
    assert other.values["output_sha256"] != fresh.values["output_sha256"]
    top_one = run_job(Job(tokens=50, top_k=1), SimulatedWorld(2))
    assert top_one.values["trained_gate"]
    assert top_one.values["expert_load"].sum() == 2 * 50
    assert top_one.correct


def test_no_tokens() -> None:
    v = run_json("--tokens", "0", "--ranks", "2")
    assert v["expert_load"] == [0] * 32
    assert v["rows_per_rank"] == [0, 0]
    assert (v["relative_error"], v["max_abs_error"], v["max_over_mean"]) == (0.0, 0.0, 1.0)
    assert v["output_sha256"] == hashlib.sha256(b"").hexdigest()


def test_short_file_is_repeated_and_the_report_says_so(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("To be, or not to be")
    printed = moe_ref("run", "--text", str(path), "--tokens", "64", "--plot", str(tmp_path / "p.png"))
    assert "it was repeated from its start" in " ".join(printed.split())
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_report_for_people(tmp_path: Path) -> None:
    printed = moe_ref("run", "--tokens", "128", cwd=tmp_path)
    for word in (
        "Load per expert",
        "Load per rank",
        "max/mean",
        "stay",
        "cross",
        "dropped",
        "relative error",
        "sha256",
    ):
        assert word in printed
    assert "█" in printed


def test_info_shows_every_size_with_its_formula() -> None:
    info = json.loads(moe_ref("info", "--json", "--ranks", "8", "--tokens", "100", "--capacity-factor", "1.5"))
    assert info["config"]["hidden"] == 128
    assert set(info["derived"]) == set(info["formulas"])
    assert all(info["formulas"].values())
    derived = info["derived"]
    assert derived["slots"] == 4
    assert derived["capacity"] == 19
    assert derived["parameters_per_expert"] == 3 * 128 * 64
    assert derived["fixed_bytes"] == 8 * 2 * 2 * 4 * 1536 * 512
    printed = moe_ref("info")
    assert "parameters_per_expert" in printed
    assert "24,576" in printed


def test_info_reads_a_config(tmp_path: Path) -> None:
    path = tmp_path / "layer.json"
    path.write_text(json.dumps({"hidden": 4096, "intermediate": 14336, "experts": 8, "top_k": 2, "dtype": "bfloat16"}))
    info = json.loads(moe_ref("info", "--config", str(path), "--json"))
    assert info["derived"]["row_bytes"] == 8192
    assert info["config"]["intermediate"] == 14336


def test_installed_script_is_the_same_program() -> None:
    script = shutil.which("moe-ref", path=os.path.dirname(sys.executable))
    assert script, "the console script is not installed beside this interpreter"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, env=environment(), timeout=60)
    assert done.stdout == moe_ref("--version")


def test_buffers_are_sized_for_the_tokens_asked_for() -> None:
    report = run_job(Job(tokens=8200, text="excerpt"), SimulatedWorld(1))
    assert report.values["tokens_per_rank"].tolist() == [8200]
