"""The training loop and its command: resume on the same and on other ranks, errors, torchrun, recorded loads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from train_jobs import goes_on, killed_run, resume_twice

from moe_ref import SimulatedWorld
from moe_ref.balance.loads import read_loads
from moe_ref.cli import main
from moe_ref.errors import UsageError
from moe_ref.train import sharded
from moe_ref.train.balancing import even_plan, make_placement, make_planner
from moe_ref.train.job import TrainJob, train, training_steps
from moe_ref.train.loads import RECORDED
from moe_ref.train.model import ByteMoE

SMALL = TrainJob(
    steps=24, sequences=6, context=24, hidden=32, intermediate=16, experts=8, interval=5, always=True, text="excerpt"
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict:
    """Runs on 4 ranks with a checkpoint at step 14, and how they went on from there on the same ranks.

    The first re-places all the time and shards its optimiser, the second does neither. `folder` is the first one's,
    with that checkpoint only.
    """
    folder = tmp_path_factory.mktemp("runs")
    moving = replace(SMALL, every=14, sharded=True)
    results = run_ranks(resume_twice, 4, str(folder), [moving, replace(moving, interval=0, sharded=False)])
    return {"folder": folder / "0" / "stopped", "job": moving, "results": results}


@pytest.fixture
def stopped(checkpoints, tmp_path: Path) -> Path:
    """A copy of the checkpoint at step 14, to go on from."""
    return Path(shutil.copytree(checkpoints["folder"], tmp_path / "stopped"))


def test_resume_on_the_same_ranks(checkpoints) -> None:
    for moving, still in checkpoints["results"]:
        assert moving == checkpoints["results"][0][0]
        assert moving["moves"] > 0
        assert moving["from"] == still["from"] == 14
        assert np.abs(np.array(moving["then"]) - np.array(moving["first"][14:])).max() <= 1e-5
        # Placements are in the checkpoint, what a manager has seen is not. Without one, nothing at all differs.
        assert still["then"] == still["first"][14:]


def test_resume_on_other_ranks_continues_the_curve(checkpoints, stopped: Path) -> None:
    first = checkpoints["results"][0][0]["first"]
    # Replicas and sharding may differ, too; the checkpoint knows logical experts only.
    task = replace(checkpoints["job"], sharded=False, replicas=1, balancing="plain")
    results = run_ranks(goes_on, 2, str(stopped), task, timeout_s=300)
    for result in results:
        assert result["from"] == 14
        differences = np.abs(np.array(result["losses"]) - np.array(first[14:]))
        assert len(differences) == 10
        assert differences.max() <= 1e-5, differences
    print(f"from 4 ranks to 2: losses of ten steps differ by at most {differences.max():.2e} bits per byte")


def test_resume_in_one_process(checkpoints, stopped: Path, one_thread) -> None:
    """No process group at all: a simulated world reads the same checkpoint, and so does a plain model."""
    task = replace(checkpoints["job"], folder=str(stopped), resume=True)
    outcome, training = train(task, SimulatedWorld(4))
    first = checkpoints["results"][0][0]["first"]
    assert np.abs(np.array(outcome.losses) - np.array(first[14:])).max() <= 1e-5
    state = sharded.full_state_dict(stopped)
    ByteMoE(task.model).load_state_dict(state)
    for name, value in training.module.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_checkpoint_is_atomic(checkpoints, stopped: Path) -> None:
    # A run killed while it writes leaves a folder that nothing names: it is not seen.
    unfinished = stopped / "step-00000099-deadbeef"
    unfinished.mkdir()
    (unfinished / "rank-0000.safetensors").write_bytes(b"half a fi")
    (stopped / "latest.part").write_text('{"folder": "step-000')
    assert sharded.read_meta(stopped)["step"] == 14
    task = replace(checkpoints["job"], folder=str(stopped), resume=True, every=2)
    outcome, _ = train(task, SimulatedWorld(4))
    assert outcome.first_step == 14
    assert not unfinished.exists()
    assert len(list(stopped.glob("step-*"))) == sharded.KEPT
    # One that is named but damaged is refused, by name.
    newest = Path(sharded.read_meta(stopped)["path"])
    (newest / "rank-0000.safetensors").write_bytes(b"half a file")
    with pytest.raises(UsageError, match=r"rank-0000.safetensors is not a readable part of a checkpoint"):
        sharded.full_state_dict(stopped)
    (stopped / "latest.json").write_text('{"folder": "../elsewhere"}')
    with pytest.raises(UsageError, match=r"names the folder '../elsewhere', expected one inside"):
        sharded.read_meta(stopped)


def test_resume_of_another_run_is_refused(checkpoints, stopped: Path, tmp_path: Path) -> None:
    base = replace(checkpoints["job"], folder=str(stopped), resume=True)
    with pytest.raises(UsageError, match="the checkpoint is of a run with seed 0, this one has 7"):
        train(replace(base, seed=7), SimulatedWorld(4))
    with pytest.raises(UsageError, match="nothing is left of 14 steps; raise --steps"):
        train(replace(base, steps=14), SimulatedWorld(4))
    with pytest.raises(UsageError, match=r"no checkpoint at .*start without --resume"):
        train(replace(base, folder=str(tmp_path)), SimulatedWorld(4))
    with pytest.raises(UsageError, match=r"8 experts x 1 replicas don't fill 3 ranks evenly.*--experts can be 3, 6"):
        train(replace(base, replicas=1), SimulatedWorld(3))


def run_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0)


TINY = ("--sequences", "6", "--context", "24", "--hidden", "32", "--intermediate", "16", "--experts", "8",
        "--text", "excerpt")  # fmt: skip


def test_command(tmp_path: Path, capfd, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    record, picture = tmp_path / "loads.npz", tmp_path / "run.png"
    code = run_command("train", *TINY, "--ranks", "2", "--steps", "8", "--micro-batches", "2", "--recompute", "--json",
                       "--record", str(record), "--plot", str(picture))  # fmt: skip
    captured = capfd.readouterr()
    assert code == 0, captured.err
    assert captured.out.count("\n") == 1
    values = json.loads(captured.out)
    assert values["ranks"] == 2
    assert len(values["losses"]) == 8
    assert values["loss_last"] < values["loss_first"]
    assert values["max_over_mean_scheduled"] <= values["max_over_mean_plain"]
    for key in ("sync_seconds", "moves", "seconds", "stage_seconds_per_step"):
        assert key in values
    assert picture.stat().st_size > 5000
    loads = read_loads(record)
    assert loads.load_NTE.shape == (2, 8, 8)
    assert (loads.load_NTE.sum(axis=2) == 6 * 24 * 2).all()


def test_command_refuses_before_it_starts(capsys) -> None:
    for arguments, message in (
        (("--experts", "6", "--ranks", "4", "--replicas", "1"), "6 experts x 1 replicas don't fill 4 ranks evenly"),
        (("--compare", "plain,best"), "balancing is 'best', expected one of plain, eplb, scheduled"),
        (("--resume",), "resume needs the folder"),
        (("--record", "loads.csv"), "expected a file that ends in .npz"),
        (("--replicas", "5"), "--replicas is 5, expected 1 to 4"),
        (("--ranks", "0"), "--ranks is 0, expected at least 1"),
        (("--group-size", "3"), "--group-size is 3, expected a divisor of 4 ranks"),
        (("--ranks", "16", "--compare", "plain"), "16 ranks were asked for, but --machine h100-8 has 8 GPUs"),
        (("--steps", "0"), "steps is 0, expected at least 1"),
    ):
        assert run_command("train", *arguments) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_killed_process_ends_the_run(tmp_path: Path) -> None:
    """Rank 1 is killed with SIGKILL; the command ends with an error, soon, and the checkpoint before can be used."""
    end = killed_run([*TINY, "--ranks", "3", "--replicas", "3", "--timeout", "20"], tmp_path, ENVIRONMENT)
    assert end.code == 1
    assert end.out == ""
    said = " ".join(end.err.split())
    assert "the process of rank 1 was ended by signal 9" in said
    assert "lost another rank during training" in said
    assert "Traceback" not in said
    print(f"ended {end.seconds:.1f} s after the kill")
    assert sharded.read_meta(tmp_path)["step"] >= 1
    assert sharded.full_state_dict(tmp_path)


@pytest.mark.slow
def test_the_default_run_learns_and_balances(capfd, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run_command("train", "--ranks", "4", "--steps", "60", "--json") == 0
    values = json.loads(capfd.readouterr().out)
    assert values["loss_last"] <= 0.6 * values["loss_first"]
    assert values["max_over_mean_scheduled"] <= 1.01 < values["max_over_mean_plain"]
    assert values["seconds"] <= 120
    assert values["sync_seconds"] < values["seconds"]
    assert values["moves"] >= 0


@pytest.mark.slow
def test_eight_ranks_through_torchrun_in_four_groups() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8", "-m", "moe_ref",
               "train", *TINY, "--steps", "4", "--replicas", "4", "--balancing", "plain", "--sharded",
               "--json"]  # fmt: skip
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    values = json.loads(done.stdout)
    assert values["ranks"] == 8
    assert values["loss_last"] < values["loss_first"]
    # The same run in one process has the same losses.
    job = replace(SMALL, steps=4, replicas=4, balancing="plain", interval=20, always=False)
    outcome, _ = train(job, SimulatedWorld(8))
    assert np.abs(np.array(values["losses"]) - np.array(outcome.losses)).max() <= 1e-5


LAST_THREADS = """
import atexit
import sys
from pathlib import Path
from moe_ref.cli import main

def tell():
    print("threads:", *((task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()))

atexit.register(tell)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="names of threads are read from /proc")
def test_no_thread_of_the_process_group_outlives_the_training() -> None:
    """One that did would now and then abort the process when the interpreter ends."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--no-python",
               sys.executable, "-c", LAST_THREADS, "train", *TINY, "--steps", "1", "--replicas", "1"]  # fmt: skip
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("threads:")]
    assert "gloo" not in said


def test_comparison(capfd, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    picture = tmp_path / "compare.png"
    code = run_command("train", *TINY, "--ranks", "2", "--steps", "4", "--interval", "2", "--compare",
                       "plain,eplb,scheduled", "--json", "--plot", str(picture))  # fmt: skip
    captured = capfd.readouterr()
    assert code == 0, captured.err
    values = json.loads(captured.out)
    assert list(values["modes"]) == ["plain", "eplb", "scheduled"]
    assert values["paper"]["mean_gain_percent"] == 36.9
    losses = [result["loss_last"] for result in values["modes"].values()]
    assert max(losses) - min(losses) <= 1e-4, "balancing must not change what is learned"
    for result in values["modes"].values():
        for times in (result["measured_s"], result["modelled_us"]):
            assert set(times) == {"gate", "dispatch", "compute", "combine", "scheduling", "sync"}
            assert all(value >= 0 for value in times.values())
    scheduled, plain = values["modes"]["scheduled"], values["modes"]["plain"]
    assert scheduled["max_over_mean"] <= plain["max_over_mean"]
    assert picture.stat().st_size > 5000


def test_plans_of_the_modes_keep_every_row() -> None:
    rng = np.random.default_rng(0)
    counts_PE = rng.integers(0, 50, (4, 8))
    counts_PE[:, 0] += 200
    for mode in ("plain", "eplb", "scheduled"):
        placement = make_placement(mode, 4, 8, 2, counts_PE.sum(axis=0))
        placement.check_slots(4)
        plan = make_planner(mode, 4, 2)(counts_PE, placement)
        assert (plan.counts_PE == counts_PE).all()
    even = even_plan(counts_PE, make_placement("eplb", 4, 8, 2, counts_PE.sum(axis=0)))
    for expert, ranks in enumerate(even.placement.ranks_of_expert):
        rows = even.quota_PED.sum(axis=0)[expert, : len(ranks)]
        assert rows.max() - rows.min() <= 1
    # Plain expert parallelism: ranks 0 and 1 are a group, and what they bring stays there.
    plain = make_planner("plain", 4, 2)(counts_PE, make_placement("plain", 4, 8, 2))
    assert plain.rank_loads[:2].sum() == counts_PE[:2].sum()


@pytest.mark.parametrize(
    ("mode", "group_size", "by_itself"),
    [("scheduled", None, True), ("scheduled", 4, True), ("scheduled", 2, False), ("plain", None, False),
     ("eplb", None, False)],
)  # fmt: skip
def test_a_layer_schedules_by_itself_where_it_can(mode: str, group_size: int | None, by_itself: bool) -> None:
    """Then no planner is set, so that a backend may plan where it computes; the plans are the mode's either way."""
    rng = np.random.default_rng(1)
    steps = training_steps(replace(SMALL, balancing=mode, group_size=group_size), SimulatedWorld(4))
    _, training = next(steps)
    for layer in training.layers.values():
        assert (layer.planner is None) == by_itself
        counts_PE = rng.integers(0, 50, (4, 8))
        wanted = make_planner(mode, 4, 2, group_size)(counts_PE, layer.placement)
        assert (layer.make_plan(counts_PE).quota_PED == wanted.quota_PED).all()
    steps.close()


def test_the_recorded_loads_ship_and_are_documented() -> None:
    loads = read_loads(RECORDED)
    layers, steps, experts = loads.load_NTE.shape
    assert (layers, steps, experts) == (TrainJob().blocks - 1, TrainJob().steps, TrainJob().experts)
    with np.load(RECORDED, allow_pickle=False) as file:
        assert set(file) == {"loads", "layers", "steps", "tokens", "top_k", "about"}
        assert (loads.load_NTE.sum(axis=2) == int(file["tokens"]) * int(file["top_k"])).all()
        about = json.loads(str(file["about"]))
    assert about["steps"] == steps
    assert RECORDED.stat().st_size < 20_000
