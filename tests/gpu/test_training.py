"""`moe-ref train` on two GPUs: its ranks exchange through NCCL. The training itself: scenario `replicas`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from train_jobs import killed_run

from moe_ref.train import sharded

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
TINY = ["--hidden", "64", "--intermediate", "32", "--experts", "4", "--sequences", "4", "--context", "16"]


def test_command_through_torchrun(tmp_path: Path) -> None:
    """Four steps on two GPUs, then four more by one process from the checkpoint."""
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "moe_ref",
        "train",
        *TINY,
    ]
    command = [*start, "--steps", "4", "--every", "4", "--folder", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    first = json.loads(done.stdout)
    assert (first["ranks"], len(first["losses"])) == (2, 4)
    command = [sys.executable, "-m", "moe_ref", "train", *TINY, "--ranks", "1", "--replicas", "1", "--steps", "8",
               "--folder", str(tmp_path), "--resume", "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    then = json.loads(done.stdout)
    assert (then["first_step"], len(then["losses"])) == (4, 4)
    assert then["losses"][-1] < first["losses"][0]


def test_a_killed_process_ends_the_run(tmp_path: Path) -> None:
    """A rank that waits in NCCL for a lost one does not notice; whoever started it does."""
    end = killed_run([*TINY, "--ranks", "2", "--replicas", "2", "--timeout", "20"], tmp_path, dict(os.environ))
    assert end.code == 1
    assert end.out == ""
    assert "the process of rank 1 was ended by signal 9" in " ".join(end.err.split())
    assert end.seconds < 30
    print(f"ended {end.seconds:.1f} s after the kill")
    assert sharded.read_meta(tmp_path)["step"] >= 1
    assert sharded.full_state_dict(tmp_path)
