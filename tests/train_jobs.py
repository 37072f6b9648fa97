"""What the tests of replicas run on each rank of a real world (see ranks.run_ranks), and the same in one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_ref import DistributedWorld, MoEConfig, MoELayer, Placement, SimulatedWorld
from moe_ref.train import job
from moe_ref.train.buckets import Bucket, Piece
from moe_ref.train.exchange import gather_parts, sum_buckets
from moe_ref.train.job import TrainJob
from moe_ref.train.launch import WorkerLost, naming_lost_ranks
from moe_ref.train.model import ByteMoE, ByteMoEConfig
from moe_ref.train.optimizer import ReplicaOptimizer
from moe_ref.train.recompute import recompute
from moe_ref.train.replacement import replace
from moe_ref.train.replicated import Replicated

CONFIG = ByteMoEConfig(
    MoEConfig(hidden=16, intermediate=12, experts=6, top_k=2, selection_bias=True),
    blocks=3,
    moe_blocks=(1, 2),
    heads=2,
    dense_intermediate=24,
)
CONTEXT = 12
BATCH = 9
"""Sequences of the global batch: no multiple of the number of ranks."""


@dataclass(frozen=True)
class Case:
    """One training run. `replicas`: ranks of each expert; `starve`: experts that the gate never chooses."""

    replicas: tuple[tuple[int, ...], ...]
    ranks: int = 4
    steps: int = 1
    micro_batches: int = 1
    clip: float | None = None
    sharded: bool = False
    starve: tuple[int, ...] = ()
    group_size: int | None = None
    recompute: bool = False
    empty_rank: bool = False
    frozen: bool = False
    config: ByteMoEConfig = CONFIG
    learning_rate: float = 1e-3
    moves: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def placement(self) -> Placement:
        return Placement.from_replicas(self.replicas, self.ranks)


def make_model(case: Case) -> ByteMoE:
    """The whole model, the same everywhere."""
    torch.manual_seed(5)
    model = ByteMoE(case.config)
    for block in case.config.moe_blocks:
        bias = model.blocks[block].ffn.router.selection_bias
        bias.copy_(torch.linspace(-0.01, 0.01, len(bias)))
        bias[list(case.starve)] = -100.0
        model.blocks[block].ffn.down_proj.requires_grad_(not case.frozen)
    return model.to(case.config.moe.torch_dtype)


def global_batch(case: Case, step: int) -> torch.Tensor:
    """[BATCH, CONTEXT + 1] bytes of a skewed alphabet."""
    generator = torch.Generator().manual_seed(100 + step)
    return (torch.randn(BATCH, CONTEXT + 1, generator=generator) * 9 + 70).long().clamp(0, 255)


def part_of(batch: torch.Tensor, rank: int, case: Case) -> torch.Tensor:
    """This rank's sequences; with empty_rank rank 1 has none."""
    ranks = [r for r in range(case.ranks) if not (case.empty_rank and r == 1)]
    if rank not in ranks:
        return batch[:0]
    return batch[ranks.index(rank) :: len(ranks)]


def loss_sum(model: Any, batch: torch.Tensor, case: Case) -> torch.Tensor:
    """Cross entropy and auxiliary losses, summed over the tokens of this batch."""
    run = (lambda x: recompute(model, x)) if case.recompute else model
    logits, all_stats = run(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
    tokens = batch[:, 1:].numel()
    for stats in all_stats:
        loss = loss + tokens * (0.01 * stats.balance_loss + 0.001 * stats.z_loss)
    return loss


def whole_gradients(training: Replicated) -> dict[str, np.ndarray]:
    """Synchronised gradients by logical key."""
    flats = training.gradients
    assert flats is not None
    if training.sharded:
        flats = gather_parts(training.world, training.trainable, flats)
    result = {}
    for bucket, flat in zip(training.trainable, flats, strict=True):
        for piece, value in zip(bucket.pieces, bucket.split(flat), strict=True):
            result[piece.key] = value.numpy().copy()
    return result


def count_plans(layer: MoELayer, plans: list[list[int]]) -> None:
    """Note every plan that the layer makes (its rows per rank)."""
    make_plan = layer.make_plan

    def counted(counts_PE):
        plan = make_plan(counts_PE)
        plans.append(plan.rank_loads.tolist())
        return plan

    layer.make_plan = counted


def train(rank: int, case: Case, world: Any) -> dict[str, Any]:
    """Run a case; in a simulated world on the whole batch."""
    model = make_model(case)
    training = Replicated(model, case.placement, world, group_size=case.group_size, sharded=case.sharded)
    optimizer = ReplicaOptimizer(training, torch.optim.AdamW, lr=case.learning_rate, betas=(0.9, 0.95))
    distributed = isinstance(world, DistributedWorld)
    result: dict[str, Any] = {"norms": [], "moved": [], "same_bits": [], "losses": [], "plans": []}
    for layer in training.layers.values():
        count_plans(layer, result["plans"])
    for step in range(case.steps):
        tokens = 0
        for micro in range(case.micro_batches):
            batch = global_batch(case, step * case.micro_batches + micro)
            tokens += batch[:, 1:].numel()
            mine = part_of(batch, rank, case) if distributed else batch
            loss = loss_sum(training, mine, case)
            result["losses"].append(float(loss.detach()))
            loss.backward()
        training.synchronize(tokens)
        if case.clip is not None:
            result["norms"].append(training.clip(case.clip))
        if step == case.steps - 1:
            result["gradients"] = whole_gradients(training)
            if not case.sharded:
                assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        optimizer.step()
        if step + 1 in case.moves:
            probe = part_of(global_batch(case, 999), rank, case) if distributed else global_batch(case, 999)
            with torch.no_grad():
                before, _ = training(probe[:, :-1])
                report = replace(
                    optimizer,
                    {n: Placement.from_replicas(case.moves[step + 1], case.ranks) for n in training.layers},
                )
                after, _ = training(probe[:, :-1])
            result["moved"].append(report.moves)
            result["same_bits"].append(torch.equal(before, after))
    records = optimizer.export()
    result["records"] = {
        key: {name: (v.float() if v.dtype == torch.bfloat16 else v).numpy().copy() for name, v in record.items()}
        for key, record in records.items()
    }
    result["shards"] = [master.numel() for master in optimizer.masters]
    result["held"] = {name: layer.held_experts for name, layer in training.layers.items()}
    return result


def train_all(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Several cases in one set of processes."""
    torch.set_num_threads(1)
    return [train(rank, case, DistributedWorld()) for case in cases]


def train_alone(case: Case) -> dict[str, Any]:
    """The same global batches in one process with one rank and no replicas."""
    alone = Case(
        **{
            **case.__dict__,
            "replicas": tuple((0,) for _ in case.replicas),
            "ranks": 1,
            "sharded": False,
            "group_size": None,
            "recompute": False,
            "moves": {},
        }
    )
    return train(0, alone, SimulatedWorld(1))


def train_in_subgroups(rank: int, case: Case) -> dict[str, Any]:
    """Ranks 0 and 2 train, and at the same time ranks 3 and 1, each pair a world of its own."""
    torch.set_num_threads(1)
    groups = [dist.new_group(ranks) for ranks in ((0, 2), (1, 3))]
    return train(rank // 2, case, DistributedWorld(groups[rank % 2]))


def exchange_speed(rank: int, experts: int, floats: int, repeats: int) -> dict[str, float]:
    """Seconds per gradient exchange of `experts` experts of so many floats, three ways, in turn in the same run."""
    world = DistributedWorld()
    ranks = world.num_ranks
    sets = [(e % ranks, (e + 1 + e // ranks % (ranks - 1)) % ranks) for e in range(experts)]
    here = [e for e in range(experts) if rank in sets[e]]
    groups = {s: dist.new_group(sorted(s)) for s in sorted(set(sets))}
    values = {e: torch.full((floats,), float(rank + 1 + e)) for e in here}
    buckets: dict[tuple[int, ...], Bucket] = {}
    for e in here:
        bucket = buckets.setdefault(sets[e], Bucket(sets[e], sets[e].index(rank), torch.float32, True))
        parameter = torch.nn.Parameter(torch.zeros(floats))
        parameter.grad = values[e]
        bucket.pieces.append(Piece(str(e), parameter, None))
    ordered = [buckets[key] for key in sorted(buckets)]

    def one_by_one() -> list[torch.Tensor]:
        out = [values[e].clone() for e in here]
        for e, value in zip(here, out, strict=True):
            dist.all_reduce(value, group=groups[sets[e]])
        return out

    def flat_per_set() -> list[torch.Tensor]:
        out = [bucket.gradients() for bucket in ordered]
        for bucket, value in zip(ordered, out, strict=True):
            dist.all_reduce(value, group=groups[bucket.ranks])
        return out

    def neighbours() -> list[torch.Tensor]:
        return sum_buckets(world, ordered, [bucket.gradients() for bucket in ordered], sharded=False)

    times: dict[str, list[float]] = {"one_by_one": [], "flat_per_set": [], "neighbours": []}
    for repeat in range(repeats + 2):
        for name, way in (("one_by_one", one_by_one), ("flat_per_set", flat_per_set), ("neighbours", neighbours)):
            dist.barrier()
            start = time.perf_counter()
            way()
            if repeat >= 2:
                times[name].append(time.perf_counter() - start)
    for bucket, value in zip(ordered, neighbours(), strict=True):
        want = [sum(r + 1 + int(piece.key) for r in bucket.ranks) for piece in bucket.pieces]
        assert [float(part[0]) for part in bucket.split(value)] == want
    ratios = [a / b for a, b in zip(times["one_by_one"], times["neighbours"], strict=True)]
    return {**{name: float(np.median(t)) for name, t in times.items()}, "ratio": float(np.median(ratios))}


def resumes(rank: int, folder: str, task: TrainJob) -> dict[str, Any]:
    """A run without a stop, and one that goes on from its checkpoint at step `task.every`, on the same ranks.

    folder/whole has the first run's checkpoints, folder/stopped only the one at that step.
    """
    world, whole, stopped, again = DistributedWorld(), *(Path(folder) / name for name in ("whole", "stopped", "again"))
    outcome, _ = job.train(replace_fields(task, folder=str(whole)), world)
    if rank == 0:
        checkpoint = next(path for path in whole.glob(f"step-{task.every:08d}-*"))
        shutil.copytree(checkpoint, stopped / checkpoint.name)
        (stopped / "latest.json").write_text(json.dumps({"folder": checkpoint.name, "step": task.every}))
        shutil.copytree(stopped, again)
    dist.barrier()
    resumed, _ = job.train(replace_fields(task, folder=str(again), resume=True), world)
    return {"first": outcome.losses, "then": resumed.losses, "from": resumed.first_step, "moves": outcome.moves}


def resume_twice(rank: int, folder: str, tasks: list[TrainJob]) -> list[dict[str, Any]]:
    """Several runs like that in one set of processes."""
    return [resumes(rank, f"{folder}/{i}", task) for i, task in enumerate(tasks)]


def goes_on(rank: int, folder: str, task: TrainJob) -> dict[str, Any]:
    """Go on from a checkpoint that another number of ranks wrote."""
    outcome, _ = job.train(replace_fields(task, folder=folder, resume=True), DistributedWorld())
    return {"losses": outcome.losses, "from": outcome.first_step}


def dies(rank: int, victim: int, step: int, where: str) -> dict[str, Any]:
    """One rank ends at some step without a word; the others must say so, soon."""
    case = Case(((0, 1), (1, 2), (2, 0), (0, 1), (1, 2), (2, 0)), ranks=3)
    world = DistributedWorld()
    training = Replicated(make_model(case), case.placement, world)
    optimizer = ReplicaOptimizer(training, torch.optim.AdamW, lr=1e-3)
    start = time.monotonic()
    try:
        with naming_lost_ranks(world, "training"):
            for now in range(step + 3):
                if rank == victim and now == step and where == "forward":
                    os._exit(7)
                loss_sum(training, part_of(global_batch(case, now), rank, case), case).backward()
                if rank == victim and now == step and where == "synchronize":
                    os._exit(7)
                training.synchronize(100)
                if rank == victim and now == step and where == "clip":
                    os._exit(7)
                training.clip(1.0)
                optimizer.step()
    except WorkerLost as error:
        return {"error": str(error), "seconds": time.monotonic() - start}
    return {"error": None, "seconds": time.monotonic() - start}


@dataclass(frozen=True)
class End:
    """How a run ended whose rank 1 was killed: exit code, what it printed, and how soon."""

    code: int
    out: str
    err: str
    seconds: float


def killed_run(arguments: list[str], folder: Path, environment: dict[str, str]) -> End:
    """`moe-ref train` with these arguments; once there is a checkpoint in `folder`, rank 1 is killed with SIGKILL."""
    command = [sys.executable, "-m", "moe_ref", "train", *arguments, "--steps", "100000", "--every", "1",
               "--folder", str(folder), "--json"]  # fmt: skip
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not (folder / "latest.json").exists():
            assert time.monotonic() < deadline, "no checkpoint was written"
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        victim = next(pid for pid in _children(process.pid) if _environment_of(pid).get("RANK") == "1")
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        out, err = process.communicate(timeout=60)
        return End(process.returncode, out, err, time.monotonic() - killed)
    finally:
        process.kill()


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _environment_of(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
