"""The megakernel on real GPUs: every scenario on one device, and under torchrun on two.

pytest -m gpu tests/gpu          one Hopper GPU
pytest -m multigpu tests/gpu     two

All scenarios of a number of GPUs run in one launch, outside the test process: a kernel that fails must not take the
tests along. With MOE_REF_RESULTS=FOLDER its result file is written there as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

EVERYWHERE = (
    "special", "uneven", "repeat", "graph", "operations", "wrong_input", "refused", "traced", "layer", "training",
    "train_fused", "matrix", "slow_start",
)  # fmt: skip
# The one that ends with a kernel's failure comes last.
ONE_GPU = (*EVERYWHERE, "families", "large", "timeout")
TWO_GPUS = (*EVERYWHERE, "replicas", "timeout")
SCRIPT = Path(__file__).parent / "scenarios.py"
LIMIT_S = 600


def gpus() -> int:
    """Devices that can run the megakernel."""
    if not torch.cuda.is_available():
        return 0
    return sum(torch.cuda.get_device_capability(i) == (9, 0) for i in range(torch.cuda.device_count()))


@cache
def launched(ranks: int) -> tuple[list[dict], int, str]:
    """What the scenarios printed, the exit code, and the end of stderr."""
    start = (
        [sys.executable]
        if ranks == 1
        else [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    )
    command = [*start, str(SCRIPT), *(ONE_GPU if ranks == 1 else TWO_GPUS)]
    if folder := os.environ.get("MOE_REF_RESULTS"):
        command += ["--out", str(Path(folder) / f"megakernel_tests_{ranks}gpu.json")]
    environment = {**os.environ, "TRACEBACK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return lines, done.returncode, done.stderr[-4000:]


def check(ranks: int, scenario: str) -> None:
    """Every rank passed the scenario."""
    lines, code, said = launched(ranks)
    mine = [line for line in lines if line["scenario"] == scenario]
    assert mine, f"{scenario} did not end; exit code {code}: {said}"
    assert all(line["ok"] for line in mine), json.dumps(mine) + said
    print(json.dumps(mine[0]))


@pytest.mark.gpu
@pytest.mark.skipif(gpus() < 1, reason="needs one GPU of compute capability 9.0")
@pytest.mark.parametrize("scenario", ONE_GPU)
def test_one_gpu(scenario):
    check(1, scenario)


@pytest.mark.multigpu
@pytest.mark.skipif(gpus() < 2, reason="needs two GPUs of compute capability 9.0")
@pytest.mark.parametrize("scenario", TWO_GPUS)
def test_two_gpus(scenario):
    check(2, scenario)
