"""The megakernel on real GPUs: every scenario on one device, and under torchrun on two.

pytest -m gpu tests/gpu          one Hopper GPU
pytest -m multigpu tests/gpu     two
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCENARIOS = (
    "special", "repeat", "graph", "operations", "wrong_input", "refused", "traced", "layer", "training", "matrix",
    "timeout",
)  # fmt: skip
HERE = Path(__file__).parent


def gpus() -> int:
    """Devices that can run the megakernel."""
    if not torch.cuda.is_available():
        return 0
    return sum(torch.cuda.get_device_capability(i) == (9, 0) for i in range(torch.cuda.device_count()))


def run(command: list[str], scenario: str) -> dict:
    """Run a scenario in processes of its own: a failed kernel must not take the test process along."""
    done = subprocess.run(
        [*command, str(HERE / "scenarios.py"), scenario],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TRACEBACK": "1"},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    assert done.returncode == 0, "\n".join([json.dumps(line) for line in lines] + [done.stderr[-2000:]])
    assert all(line["ok"] for line in lines), lines
    return lines[0]


@pytest.mark.gpu
@pytest.mark.skipif(gpus() < 1, reason="needs one GPU of compute capability 9.0")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_one_gpu(scenario):
    print(run([sys.executable], scenario))


@pytest.mark.multigpu
@pytest.mark.skipif(gpus() < 2, reason="needs two GPUs of compute capability 9.0")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_gpus(scenario):
    print(run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"], scenario))
