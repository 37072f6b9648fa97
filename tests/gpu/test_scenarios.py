"""The megakernel on real GPUs: every scenario on one device, and under torchrun on several.

pytest -m gpu tests/gpu                               one Hopper GPU
pytest -m multigpu tests/gpu                          two
MOE_REF_TEST_RANKS=8 pytest -m multigpu tests/gpu     as many as it says; python tests/gpu/compile_all.py 8 tests
                                                      scaling compiles their kernels beforehand, without a GPU

All scenarios of a number of GPUs run in one launch, outside the test process: a kernel that fails must not take the
tests along. Those of one GPU run in two launches side by side where there are two. With MOE_REF_RESULTS=FOLDER the
result file is written there as well. All tests are in this file because
pytest's workers take files: two of them at one time would share the GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from train_jobs import killed_run

from moe_fast.bench.scaling.cells import FIGURES
from moe_ref.results import write_results
from moe_ref.train import sharded

EVERYWHERE = (
    "special", "uneven", "many", "token_tiles", "repeat", "graph", "operations", "wrong_input", "refused", "traced",
    "layer", "training", "train_fused", "train_scheduled", "tf32", "matrix", "slow_start", "carried", "pairs",
)  # fmt: skip
SEVERAL_RANKS = (
    "several_matrix", "several_uneven", "several_bits", "several_repeat", "several_streams", "several_graph",
    "several_layers", "several_training", "several_failures",
)  # fmt: skip
"""2, 4 and 8 ranks on one GPU."""
# The ones that end with a kernel's failure come late.
ONE_GPU = (*EVERYWHERE, "solving", "families", "large", *SEVERAL_RANKS, "timeout", "layouts")
HALF = ("matrix", "special", "uneven", "many", "repeat", "graph", "traced", "tf32", "solving", "several_matrix")
"""About half of one GPU's time."""
SEVERAL_GPUS = (*EVERYWHERE, "placed", "replicas", "timeout", "layouts", "transports", "wire")
SCRIPT = Path(__file__).parent / "scenarios.py"
RANKS = int(os.environ.get("MOE_REF_TEST_RANKS") or "2")
"""Of the scenarios on several GPUs."""
LIMIT_S = 600 if RANKS <= 2 else 1200
TINY = ["--hidden", "64", "--intermediate", "32", "--experts", "4", "--sequences", "4", "--context", "16"]


def gpus() -> int:
    """Devices that can run the megakernel."""
    if not torch.cuda.is_available():
        return 0
    return sum(torch.cuda.get_device_capability(i) == (9, 0) for i in range(torch.cuda.device_count()))


@cache
def launched(ranks: int) -> tuple[list[dict], int, str]:
    """What the scenarios printed, the exit code, and the end of stderr."""
    folder = os.environ.get("MOE_REF_RESULTS")
    parts = [ONE_GPU if ranks == 1 else SEVERAL_GPUS]
    if ranks == 1 and gpus() > 1:
        parts = [HALF, tuple(name for name in ONE_GPU if name not in HALF)]
    outs = [Path(folder) / f"megakernel_tests_{ranks}gpu.{i}.json" if folder else None for i in range(len(parts))]
    devices = range(len(parts)) if len(parts) > 1 else [None]
    with ThreadPoolExecutor(len(parts)) as pool:
        done = list(pool.map(partial(launch, ranks), parts, outs, devices))
    if folder and all(out and out.exists() for out in outs):
        join_results([out for out in outs if out], Path(folder) / f"megakernel_tests_{ranks}gpu.json")
    lines = [found for one in done for line in one.stdout.splitlines() for found in objects_in(line)]
    return lines, max(one.returncode for one in done), "".join(one.stderr[-4000:] for one in done)


def launch(ranks: int, names: tuple[str, ...], out: Path | None, gpu: int | None) -> subprocess.CompletedProcess[str]:
    """Run scenarios in a process of their own, one for each rank, on the visible GPU number `gpu` or on all."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*start, str(SCRIPT), *names, *(["--out", str(out)] if out else [])]
    environment = {**os.environ, "TRACEBACK": "1"}
    if gpu is not None:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        environment["CUDA_VISIBLE_DEVICES"] = visible[gpu] if visible else str(gpu)
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)


def join_results(parts: list[Path], path: Path) -> None:
    """Make one result file of those of several launches, and remove them."""
    found = [json.loads(part.read_text()) for part in parts]
    whole = {**found[0], "command": "; ".join(one["command"] for one in found)}
    whole["scenarios"] = [line for one in found for line in one["scenarios"]]
    write_results(path, whole)
    for part in parts:
        part.unlink()


def objects_in(line: str) -> list[dict]:
    """The JSON objects of a line: of ranks that fail at the same time there may be several."""
    found, decoder = [], json.JSONDecoder()
    while line.startswith("{"):
        one, end = decoder.raw_decode(line)
        found.append(one)
        line = line[end:].lstrip()
    return found


def test_lines_of_ranks_that_ran_into_each_other_are_read():
    assert objects_in('{"rank": 0, "ok": false}{"rank": 1}') == [{"rank": 0, "ok": False}, {"rank": 1}]
    assert objects_in('{"rank": 0}') == [{"rank": 0}]
    assert objects_in("W1130 torch.distributed: a warning") == []


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
@pytest.mark.skipif(gpus() < RANKS, reason=f"needs {RANKS} GPUs of compute capability 9.0")
@pytest.mark.parametrize("scenario", SEVERAL_GPUS)
def test_several_gpus(scenario):
    check(RANKS, scenario)


@pytest.mark.multigpu
@pytest.mark.skipif(gpus() < 2, reason="needs two GPUs of compute capability 9.0")
def test_training_through_torchrun(tmp_path: Path) -> None:
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


@pytest.mark.multigpu
@pytest.mark.skipif(gpus() < 2, reason="needs two GPUs of compute capability 9.0")
def test_a_killed_process_ends_the_training(tmp_path: Path) -> None:
    """A rank that waits in NCCL for a lost one does not notice; whoever started it does."""
    end = killed_run([*TINY, "--ranks", "2", "--replicas", "2", "--timeout", "20"], tmp_path, dict(os.environ))
    assert end.code == 1
    assert end.out == ""
    assert "the process of rank 1 was ended by signal 9" in " ".join(end.err.split())
    assert end.seconds < 30
    print(f"ended {end.seconds:.1f} s after the kill")
    assert sharded.read_meta(tmp_path)["step"] >= 1
    assert sharded.full_state_dict(tmp_path)


@pytest.mark.multigpu
@pytest.mark.skipif(gpus() < RANKS, reason=f"needs {RANKS} GPUs of compute capability 9.0")
def test_a_scaling_run_is_complete_and_gone_on_with(tmp_path: Path) -> None:
    """Every cell of a quick run is measured, balance gives the same bits in all forms; again, nothing is left to do."""
    out = tmp_path / f"scaling_{RANKS}gpu.json"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*start, "-m", "moe_fast.bench", "scaling", "--quick", "--json", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    first = json.loads(done.stdout)
    measured = sum(len(first[figure]) for figure in FIGURES)
    assert (measured, first["left"], first["given_up"], first["gpus"]) == (first["cells"], [], [], RANKS)
    again = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert again.returncode == 0, again.stderr[-3000:]
    assert json.loads(again.stdout)["latency"] == first["latency"]
    print(json.dumps(first["report"]["balance"]))


@pytest.mark.gpu
@pytest.mark.skipif(gpus() < 1, reason="needs one GPU of compute capability 9.0")
def test_every_level_of_the_ladder_is_right() -> None:
    """The program compares each level with fp32 arithmetic, calls it twice, and ends with 1 if one is wrong."""
    command = [sys.executable, "-m", "moe_fast.ladder", "--layer", "paper-e8", "--tokens", "1000", "--repetitions", "1"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    levels = [row["level"] for row in json.loads(done.stdout)["levels"] if row["level"] is not None]
    assert levels == list(range(7))
