"""The training loop, as an example to copy: a byte-level MoE model on P ranks, with replicas and token scheduling.

    model, wrapped for replicas -> per step: micro-batches, backward, synchronise, clip, optimiser step
                                -> watch the loads, re-place if the manager says so, write a checkpoint now and then

Batches are a function of (seed, step) and of nothing else: however many ranks there are, the global batch is the same,
and its sequences are dealt out to them. So a run can go on from a checkpoint with another number of ranks.

Letters: B sequences, L positions of a sequence, P ranks, E experts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ref.stats import LayerStats
from moe_ref.train import sharded
from moe_ref.train.balancing import layer_planner, make_placement
from moe_ref.train.exchange import sum_everywhere
from moe_ref.train.managers import Managers
from moe_ref.train.model import ByteMoE
from moe_ref.train.optimizer import ReplicaOptimizer
from moe_ref.train.outcome import Outcome
from moe_ref.train.pretrain import Corpus, draw_batch
from moe_ref.train.progress import bar
from moe_ref.train.recompute import recompute
from moe_ref.train.replicated import Replicated
from moe_ref.train.settings import TrainJob
from moe_ref.train.start import check, digest
from moe_ref.world import SimulatedWorld, World


def train(job: TrainJob, world: World, device: torch.device | str = "cpu") -> tuple[Outcome, Replicated]:
    """Train with a progress bar; every rank of the world calls it with the same job.

    Raises:
        UsageError: sizes that don't fit the ranks, a text that can't be had, a checkpoint that can't be used.
        RuntimeError: a loss that is not finite; another rank that is lost (see moe_ref.train.launch.WorkerLost).
    """
    run = training_steps(job, world, device)
    outcome, training = next(run)
    with bar(outcome.first_step, job.steps, world.local_ranks[0]) as show:
        for _ in run:
            ratio, plain = float(np.mean(outcome.scheduled_TL[-1])), float(np.mean(outcome.plain_TL[-1]))
            step = outcome.first_step + len(outcome.losses)
            show(step, f"{outcome.losses[-1]:.3f} bits/byte, max/mean {ratio:.3f} (plain {plain:.2f})")
    return outcome, training


def training_steps(
    job: TrainJob, world: World, device: torch.device | str = "cpu"
) -> Iterator[tuple[Outcome, Replicated]]:
    """The loop itself: yields once before the first step, and after each; what it yields is always the same objects."""
    corpus, meta = check(job, world.num_ranks)
    # The lock is held as long as this generator lives.
    with nullcontext() if job.folder is None else sharded.owned(Path(job.folder), world):
        yield from _steps(job, world, device, corpus, meta)


def _steps(
    job: TrainJob, world: World, device: torch.device | str, corpus: Corpus, meta: dict[str, Any] | None
) -> Iterator[tuple[Outcome, Replicated]]:
    """`training_steps`, after its checks."""
    torch.manual_seed(job.seed)
    model = ByteMoE(job.model).to(device)
    training = Replicated(model, _placements(job, world, model, meta), world, sharded=job.sharded)
    for layer in training.layers.values():
        layer.planner = layer_planner(job.balancing, world.num_ranks, job.replicas, job.group_size)
        layer.backend = job.backend
    optimizer = ReplicaOptimizer(
        training, torch.optim.AdamW, lr=job.learning_rate, betas=(0.9, 0.95), weight_decay=job.recipe.weight_decay
    )
    outcome = Outcome()
    if meta is not None:
        outcome.first_step = int(sharded.load(Path(str(job.folder)), optimizer)["step"])
    managers, sha256 = Managers(job, optimizer), digest(corpus)
    yield outcome, training
    for step in range(outcome.first_step, job.steps):
        start = time.perf_counter()
        loss, all_stats = _step(job, training, optimizer, corpus, step, device)
        outcome.losses.append(loss)
        outcome.note_loads(all_stats, job.replicas)
        outcome.placement_TL.append(list(training.placements.values()))
        managers.observe(step, outcome)
        if job.folder is not None and ((step + 1) % job.every == 0 or step + 1 == job.steps):
            sharded.save(Path(job.folder), step + 1, optimizer, {"job": asdict(job), "text_sha256": sha256})
        outcome.step_seconds.append(time.perf_counter() - start)
        outcome.sync_seconds = training.sync_seconds
        yield outcome, training


def _step(
    job: TrainJob,
    training: Replicated,
    optimizer: ReplicaOptimizer,
    corpus: Corpus,
    step: int,
    device: torch.device | str,
) -> tuple[float, list[list[LayerStats]]]:
    """One optimiser step; returns the global loss in bits per byte and the statistics per micro-batch and layer."""
    world = training.world
    batch_BL = draw_batch([corpus], job.recipe, job.context, step)
    tokens = batch_BL[:, 1:].numel()
    for group in optimizer.inner.param_groups:
        group["lr"] = job.recipe.rate(step)
    losses, all_stats = [], []
    for micro_BL in batch_BL.tensor_split(job.micro_batches):
        mine_BL = _own_sequences(micro_BL, world).to(device)
        logits, stats = recompute(training, mine_BL[:, :-1]) if job.recompute else training(mine_BL[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), mine_BL[:, 1:].flatten(), reduction="sum")
        losses.append(loss.detach())
        for layer_stats in stats:
            # Means over this rank's tokens; weighted by them, the sum over ranks is that of the whole batch. Backends
            # that keep no scores give none.
            if layer_stats.balance_loss is not None:
                weight = mine_BL[:, 1:].numel()
                loss = loss + weight * (job.balance * layer_stats.balance_loss + job.z * layer_stats.z_loss)
        loss.backward()
        all_stats.append(stats)
    training.synchronize(denominator=tokens)
    training.clip(job.clip)
    optimizer.step()
    # Only now is a loss asked for: before, the host would wait for a forward with nothing enqueued behind it.
    mean = sum_everywhere(world, sum(map(float, losses)), torch.device(device)) / tokens
    if not math.isfinite(mean):
        raise RuntimeError(f"the loss of step {step} is {mean}; lower --learning-rate")
    return mean / math.log(2), all_stats


def _own_sequences(batch_BL: Tensor, world: World) -> Tensor:
    """This process' sequences of a (micro-)batch, dealt out in turn; all of them in a simulated world."""
    if isinstance(world, SimulatedWorld):
        return batch_BL
    return batch_BL[world.local_ranks[0] :: world.num_ranks]


def _placements(job: TrainJob, world: World, model: ByteMoE, meta: dict[str, Any] | None) -> dict:
    """Placement of every layer: of the checkpoint if it fits these ranks, else as a run of this mode starts."""
    fresh = make_placement(job.balancing, world.num_ranks, job.experts, job.replicas, group_size=job.group_size)
    names = [f"blocks.{block}.ffn" for block in model.config.moe_blocks]
    before = {} if meta is None else meta["extra"]["job"]
    same = all(before.get(name) == getattr(job, name) for name in ("balancing", "replicas", "group_size"))
    if meta is not None and meta["ranks"] == world.num_ranks and same:
        saved = sharded.saved_placements(meta)
        return {name: saved.get(name, fresh) for name in names}
    return dict.fromkeys(names, fresh)
