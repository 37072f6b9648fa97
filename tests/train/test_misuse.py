"""Wrong use of the wrapper, its optimiser and its checkpoints: refused in words, before anything is lost or wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

from moe_ref import DistributedWorld, MoEConfig, MoELayer, SimulatedWorld
from moe_ref.errors import UsageError
from moe_ref.placement import Placement
from moe_ref.train import sharded
from moe_ref.train.job import TrainJob, check, train
from moe_ref.train.optimizer import ReplicaOptimizer
from moe_ref.train.replacement import replace
from moe_ref.train.replicated import Replicated

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = MoEConfig(8, 4, 4, 2)
PLACEMENT = Placement.contiguous(4, 2)
JOB = TrainJob(
    steps=2, sequences=4, context=8, hidden=32, intermediate=8, experts=4, replicas=1, text="excerpt", every=1
)


def make(layers: int = 1, **arguments: Any) -> Replicated:
    torch.manual_seed(0)
    model = nn.Sequential(*(MoELayer(CONFIG) for _ in range(layers)))
    return Replicated(model, PLACEMENT, SimulatedWorld(2), **arguments)


def backward(training: Replicated, seed: int = 0) -> None:
    training(torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))).square().sum().backward()


def step(training: Replicated, optimizer: ReplicaOptimizer, seed: int = 0) -> None:
    backward(training, seed)
    training.synchronize(5.0)
    optimizer.step()


def test_expert_parameters_that_are_used_twice() -> None:
    one, two = MoELayer(CONFIG), MoELayer(CONFIG)
    two.down_proj = one.down_proj
    with pytest.raises(UsageError, match=r"0\.down_proj and 1\.down_proj are one parameter"):
        Replicated(nn.Sequential(one, two), PLACEMENT, SimulatedWorld(2))
    twice = MoELayer(CONFIG)  # the same layer at two places is one layer
    assert list(Replicated(nn.Sequential(twice, twice), PLACEMENT, SimulatedWorld(2)).layers) == ["0"]


def test_what_is_no_world_and_no_placement() -> None:
    model: Any = nn.Sequential(MoELayer(CONFIG))
    wrong: Any = [[0], [0], [1], [1]]
    with pytest.raises(UsageError, match="placement is a list, expected a Placement"):
        Replicated(model, wrong, SimulatedWorld(2))
    number: Any = 2
    with pytest.raises(UsageError, match="world is a int, expected"):
        Replicated(model, PLACEMENT, number)
    with pytest.raises(UsageError, match="training is a Sequential, expected the model wrapped in Replicated"):
        ReplicaOptimizer(model, torch.optim.Adam)


def test_parameters_frozen_or_added_later() -> None:
    def freeze(training: Replicated) -> None:
        training.layers["0"].router.weight.requires_grad_(False)

    def add(training: Replicated) -> None:
        training.module.register_parameter("extra", nn.Parameter(torch.ones(3)))

    changes: list[Callable[[Replicated], None]] = [freeze, add]
    for change in changes:
        training = make()
        change(training)
        backward(training)
        with pytest.raises(RuntimeError, match="was frozen, unfrozen or put into the model after it was wrapped"):
            training.synchronize(5.0)
        training.rebuild()
        training.synchronize(5.0)
    with pytest.raises(UsageError, match="every parameter of the model is frozen"):
        ReplicaOptimizer(make().requires_grad_(False), torch.optim.Adam)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_sums_are_not_summed_again(is_sharded: bool) -> None:
    training = make(sharded=is_sharded)
    optimizer = ReplicaOptimizer(training, torch.optim.SGD, lr=0.1)
    backward(training)
    training.synchronize(5.0)
    training.clip(1e-3)
    with pytest.raises(RuntimeError, match=r"synchronize\(\) twice"):
        training.synchronize(5.0)
    optimizer.step()
    step(training, optimizer)


def test_another_optimiser_that_clears_gradients_itself() -> None:
    training = make()
    plain = torch.optim.SGD(training.parameters(), lr=0.1)
    for set_to_none in (True, False, True):
        before = [value.detach().clone() for value in training.parameters()]
        backward(training)
        training.synchronize(5.0)
        plain.step()
        plain.zero_grad(set_to_none=set_to_none)
        assert any(not torch.equal(a, b) for a, b in zip(before, training.parameters(), strict=True))


def test_weights_that_somebody_else_wrote() -> None:
    training = make()
    optimizer = ReplicaOptimizer(training, torch.optim.Adam, lr=0.1)
    step(training, optimizer)
    training.load_state_dict({name: torch.ones_like(value) for name, value in training.state_dict().items()})
    with pytest.raises(RuntimeError, match="its masters would undo it"):
        step(training, optimizer)
    training.zero_grad()
    step(training, ReplicaOptimizer(training, torch.optim.Adam, lr=0.1))


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "ASGD", "RAdam", "Rprop"])
def test_every_state_of_an_optimiser_is_kept(name: str, tmp_path: Path) -> None:
    """After a checkpoint and after a move the next step is the one that would have come."""
    training = make()
    optimizer = ReplicaOptimizer(training, getattr(torch.optim, name), lr=0.1)
    step(training, optimizer)
    step(training, optimizer, 1)
    sharded.save(tmp_path, 2, optimizer)
    step(training, optimizer, 2)
    expected = [value.clone() for value in training.state_dict().values()]
    for other in (PLACEMENT, Placement.from_replicas([[1], [0], [1], [0]], 2)):
        sharded.load(tmp_path, optimizer)
        replace(optimizer, {"0": other})
        step(training, optimizer, 2)
        assert all(map(torch.equal, expected, training.state_dict().values()))
    with pytest.raises(UsageError, match=f"written with the optimiser {name}, this run has Adagrad"):
        sharded.load(tmp_path, ReplicaOptimizer(make(), torch.optim.Adagrad))


def test_damaged_metadata(tmp_path: Path) -> None:
    sharded.save(tmp_path, 2, ReplicaOptimizer(make(), torch.optim.Adam))
    path = next(tmp_path.glob("step-*")) / sharded.META
    good = json.loads(path.read_text())
    for key, value in (("step", None), ("step", -1), ("step", 1.5), ("ranks", 0), ("files", "2"), ("placements", []),
                       ("extra", None), ("optimizer_steps", True), ("optimizer_scalars", {"mu": "x"})):  # fmt: skip
        path.write_text(json.dumps(good | {key: value}))
        with pytest.raises(UsageError, match=f"^{key} in .*meta.json is .*expected"):
            sharded.read_meta(tmp_path)
    path.write_text(json.dumps({key: value for key, value in good.items() if key != "step"}))
    with pytest.raises(UsageError, match=r"step in .*meta.json is None"):
        sharded.read_meta(tmp_path)
    path.write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"meta\.json can't be read"):
        sharded.read_meta(tmp_path)
    for name in ("..", "", "step-1-x", 7, "a\0b", "a" * 5000):
        (tmp_path / sharded.LATEST).write_text(json.dumps({"folder": name}))
        with pytest.raises(UsageError, match="names the folder"):
            sharded.read_meta(tmp_path)


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    job = replaced(JOB, folder=str(tmp_path))
    mine = tmp_path / "step-by-step"  # somebody else's, whatever it is called
    mine.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
         "print('held', flush=True); sys.stdin.read()", str(tmp_path / sharded.OWNER)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match="another run is writing there; name another"):
            train(job, SimulatedWorld(2))
    finally:
        holder.kill()
        holder.communicate()
    train(job, SimulatedWorld(2))  # the lock of a run that was killed is nobody's
    assert mine.is_dir()
    before = (tmp_path / sharded.LATEST).read_text()
    with pytest.raises(UsageError, match=r"has checkpoints of another run.*--resume, or name another folder"):
        train(job, SimulatedWorld(2))
    assert (tmp_path / sharded.LATEST).read_text() == before
    train(replaced(job, steps=3, resume=True), SimulatedWorld(2))
    with pytest.raises(UsageError, match=r"checkpoints can't go into the folder .*: Not a directory; name another"):
        train(replaced(job, folder=str(tmp_path / sharded.LATEST / "below")), SimulatedWorld(2))


def test_resume_with_another_text_under_the_same_name(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(200)))
    job = replaced(JOB, folder=str(tmp_path / "run"), text=str(text))
    train(job, SimulatedWorld(2))
    text.write_bytes(bytes(range(50, 250)))
    with pytest.raises(UsageError, match="has other bytes than when the checkpoint was written"):
        train(replaced(job, steps=3, resume=True), SimulatedWorld(2))


def test_settings_that_no_run_can_have() -> None:
    for wrong, message in (
        ({"timeout_s": float("inf")}, "--timeout is inf, expected more than 0 and at most 10000000 seconds"),
        ({"timeout_s": float("nan")}, "--timeout is nan"),
        ({"learning_rate": float("inf")}, "learning_rate is inf"),
        ({"seed": 2**53}, "--seed is 9007199254740992, expected 0 to"),
    ):
        with pytest.raises(UsageError, match=message):
            replaced(JOB, **wrong)
    for wrong in ({"sequences": 10**10}, {"blocks": 10**7}, {"experts": 10**9}):
        with pytest.raises(UsageError, match=r"processes with a model of these sizes need at least .* of memory"):
            check(replaced(JOB, **wrong), 2)
    with pytest.raises(UsageError, match=r"100000 processes .* need at least .*lower --ranks"):
        check(replaced(JOB, experts=100_000), 100_000)
    train(replaced(JOB, seed=2**53 - 1, steps=1), SimulatedWorld(2))


def test_as_many_micro_batches_as_were_asked_for(monkeypatch) -> None:
    rows: list[int] = []
    forward = Replicated.forward
    monkeypatch.setattr(Replicated, "forward", lambda self, x: rows.append(len(x)) or forward(self, x))
    train(replaced(JOB, sequences=6, micro_batches=4, steps=1), SimulatedWorld(2))
    assert rows == [2, 2, 1, 1]


def _disagree(rank: int, folder: str) -> list[str]:
    """What each rank is told where ranks were given different things, or one of them can't write."""
    world, said = DistributedWorld(), []

    def attempt(function: Callable[[], object]) -> None:
        try:
            function()
            said.append("")
        except UsageError as error:
            said.append(str(error))

    def model(layers: int = 1) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(MoELayer(CONFIG) for _ in range(layers)))

    attempt(lambda: Replicated(model(1 + rank), PLACEMENT, world))
    attempt(lambda: Replicated(model(), PLACEMENT, world, sharded=rank == 1))
    attempt(lambda: Replicated(model().requires_grad_(rank == 0), PLACEMENT, world))
    training = Replicated(model(), PLACEMENT, world)
    attempt(lambda: ReplicaOptimizer(training, torch.optim.Adam, lr=0.1 * (1 + rank)))
    optimizer = ReplicaOptimizer(training, torch.optim.Adam, lr=0.1)
    path = Path(folder)
    sharded.save(path, 1, optimizer)
    write = sharded.save_file
    if rank == 1:

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        sharded.save_file = full
    attempt(lambda: sharded.save(path, 2, optimizer))
    sharded.save_file = write
    said.append(str(sharded.read_meta(path)["step"]))
    sharded.save(path, 3, optimizer)
    said.append(str(sharded.read_meta(path)["step"]))
    return said


def test_ranks_that_were_given_different_things(tmp_path: Path) -> None:
    one, two = run_ranks(_disagree, 2, str(tmp_path))
    assert one == two
    models, is_sharded, frozen, optimiser, full, step_then, step_now = one
    assert "the model that is replicated differs between ranks: rank 0 has 3 tensors" in models
    assert "sharded False" in is_sharded
    assert "sharded True" in is_sharded
    assert "the model that is replicated differs" in frozen
    assert "the optimiser differs between ranks: rank 0 has Adam, [('lr', 0.1)]" in optimiser
    assert "the checkpoint of step 2 can't be written" in full
    assert "rank 1: [Errno 28] No space left" in full
    assert (step_then, step_now) == ("1", "3")
    assert len(list(tmp_path.glob("step-*"))) == 2
    shutil.rmtree(tmp_path)
