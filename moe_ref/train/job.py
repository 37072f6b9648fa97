"""The training loop, as an example to copy: a byte-level MoE model on P ranks, with replicas and token scheduling.

    model, wrapped for replicas -> per step: micro-batches, backward, synchronise, clip, optimiser step
                                -> watch the loads, re-place if the manager says so, write a checkpoint now and then

Batches are a function of (seed, step) and of nothing else: however many ranks there are, the global batch is the same,
and its sequences are dealt out to them. So a run can go on from a checkpoint with another number of ranks.

Letters: B sequences, L positions of a sequence, P ranks, E experts.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ref import backends, text
from moe_ref.config import MoEConfig
from moe_ref.environment import local_world_size_from_environment, world_size_from_environment
from moe_ref.errors import UsageError
from moe_ref.layout import ceil_div
from moe_ref.limits import check_memory, check_seed
from moe_ref.stats import LayerStats
from moe_ref.train import sharded
from moe_ref.train.balancing import check_sizes, make_placement, make_planner
from moe_ref.train.exchange import sum_everywhere
from moe_ref.train.managers import Managers
from moe_ref.train.model import ByteMoE, ByteMoEConfig
from moe_ref.train.optimizer import ReplicaOptimizer
from moe_ref.train.outcome import Outcome
from moe_ref.train.pretrain import Corpus, Recipe, draw_batch
from moe_ref.train.progress import bar
from moe_ref.train.recompute import recompute
from moe_ref.train.replicated import Replicated
from moe_ref.world import SimulatedWorld, World

MAX_TIMEOUT_S = 10**7
"""Longest wait for another rank, 116 days: what every transport can count in milliseconds of 64 bits."""


@dataclass(frozen=True)
class TrainJob:
    """Everything that fixes a run, the number of ranks apart.

    Attributes:
        steps: optimiser steps in all. sequences: of a global batch. context: bytes of a sequence.
        micro_batches: parts of a global batch whose gradients accumulate.
        hidden, intermediate, experts, top_k, blocks: of the model; every block but the first has an MoE.
        replicas: d, of every expert. balancing: one of moe_ref.train.balancing.MODES.
        group_size: ranks of a scheduling group, or None for all.
        interval: steps between the manager's checks, 0 for no manager. always: move at every check.
        learning_rate, clip, balance, z: of Recipe. seed: of weights and batches. text: built-in name, or a file.
        sharded: ZeRO-1 inside replica sets. recompute: activations of each block are made again in the backward.
        folder: of checkpoints, or None. every: steps between checkpoints. resume: go on from the latest.
        timeout_s: how long a rank waits for another before it gives up.
        backend, dtype: of the MoE layers; the rest of the model, sums and optimiser stay in fp32.
    """

    steps: int = 60
    sequences: int = 16
    context: int = 128
    micro_batches: int = 1
    hidden: int = 64
    intermediate: int = 64
    experts: int = 16
    top_k: int = 2
    blocks: int = 3
    replicas: int = 2
    balancing: str = "scheduled"
    group_size: int | None = None
    interval: int = 20
    always: bool = False
    learning_rate: float = 6e-3
    clip: float = 1.0
    balance: float = 2e-3
    z: float = 1e-4
    seed: int = 0
    text: str = "prose"
    sharded: bool = False
    recompute: bool = False
    folder: str | None = None
    every: int = 20
    resume: bool = False
    timeout_s: float = 60.0
    backend: str = "ref"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, low in (("steps", 1), ("sequences", 1), ("context", 1), ("micro_batches", 1), ("blocks", 2),
                          ("every", 1), ("interval", 0)):  # fmt: skip
            if getattr(self, name) < low:
                raise UsageError(f"{name} is {getattr(self, name)}, expected at least {low}")
        if self.micro_batches > self.sequences:
            raise UsageError(f"micro_batches is {self.micro_batches}, expected at most the {self.sequences} sequences")
        if not (math.isfinite(self.balance) and self.balance >= 0):
            raise UsageError(f"the weight of the balance loss is {self.balance}, expected 0 or a positive number")
        if not 0 < self.learning_rate < math.inf or not self.clip > 0:
            raise UsageError(f"learning_rate is {self.learning_rate}, clip {self.clip}, expected positive numbers")
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise UsageError(f"--timeout is {self.timeout_s}, expected more than 0 and at most {MAX_TIMEOUT_S} seconds")
        check_seed(self.seed, "--seed")
        if self.resume and self.folder is None:
            raise UsageError("resume needs the folder of the checkpoints")
        if self.backend != "ref" and (self.balance or self.recompute):
            raise UsageError(
                f"backend {self.backend!r} gives no balance loss and keeps no plan for recomputation; "
                "take --balance-loss 0, without --recompute"
            )

    @property
    def model(self) -> ByteMoEConfig:
        """Config of the model."""
        moe = MoEConfig(
            hidden=self.hidden,
            intermediate=self.intermediate,
            experts=self.experts,
            top_k=self.top_k,
            max_tokens=self.sequences * self.context,
            dtype=self.dtype,
        )
        return ByteMoEConfig(
            moe,
            self.blocks,
            tuple(range(1, self.blocks)),
            heads=4,
            dense_intermediate=2 * self.hidden,
            context=self.context,
        )

    @property
    def recipe(self) -> Recipe:
        """Schedule of learning rates, and what draws batches."""
        return Recipe(
            steps=self.steps,
            batch=self.sequences,
            learning_rate=self.learning_rate,
            warm_up=min(10, self.steps),
            balance=self.balance,
            z=self.z,
            clip=self.clip,
            seed=self.seed,
        )


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
        layer.planner = make_planner(job.balancing, world.num_ranks, job.replicas, job.group_size)
        layer.backend = job.backend
    optimizer = ReplicaOptimizer(
        training, torch.optim.AdamW, lr=job.learning_rate, betas=(0.9, 0.95), weight_decay=job.recipe.weight_decay
    )
    outcome = Outcome()
    if meta is not None:
        outcome.first_step = int(sharded.load(Path(str(job.folder)), optimizer)["step"])
    managers, digest = Managers(job, optimizer), _digest(corpus)
    yield outcome, training
    for step in range(outcome.first_step, job.steps):
        start = time.perf_counter()
        loss, all_stats = _step(job, training, optimizer, corpus, step, device)
        outcome.losses.append(loss)
        outcome.note_loads(all_stats, job.replicas)
        outcome.placement_TL.append(list(training.placements.values()))
        managers.observe(step, outcome)
        if job.folder is not None and ((step + 1) % job.every == 0 or step + 1 == job.steps):
            sharded.save(Path(job.folder), step + 1, optimizer, {"job": asdict(job), "text_sha256": digest})
        outcome.step_seconds.append(time.perf_counter() - start)
        outcome.sync_seconds = training.sync_seconds
        yield outcome, training


def check(job: TrainJob, ranks: int) -> tuple[Corpus, dict[str, Any] | None]:
    """What a run needs from outside: its text, and the checkpoint that it goes on from.

    Raises:
        UsageError: see `train`; this is all that can be refused before any rank is started.
    """
    check_sizes(job.balancing, ranks, job.experts, job.replicas, job.group_size)
    _ = job.model  # raises if the sizes make no model
    processes = local_world_size_from_environment() if world_size_from_environment() else ranks
    check_memory(
        _least_bytes(job, processes),
        f"{processes} processes with a model of these sizes",
        "lower --ranks, --sequences, --context, --experts, --blocks or the widths",
    )
    backend = backends.get(job.backend).unavailable()
    if backend is not None:
        raise backends.BackendUnavailable(f"backend {job.backend!r} can't run here: {backend}")
    meta = sharded.read_meta(Path(str(job.folder))) if job.resume else None
    corpus = _corpus(job)
    if meta is not None:
        _check_same_run(job, meta, corpus)
    elif job.folder is not None and (Path(job.folder) / sharded.LATEST).exists():
        raise UsageError(
            f"{job.folder} has checkpoints of another run, which this one would replace; go on from them with "
            "--resume, or name another folder"
        )
    return corpus, meta


PROCESS_BYTES = 100e6
"""What a process with torch takes before it does anything, roughly and at least."""


def _least_bytes(job: TrainJob, processes: int) -> int:
    """Bytes that the processes of one machine need at least: each makes the whole model before it keeps its share."""
    expert = 3 * job.hidden * job.intermediate * job.experts
    parameters = 2 * 256 * job.hidden + job.blocks * 4 * job.hidden**2 + (job.blocks - 1) * expert
    tokens = job.sequences * job.context
    activations = 8 * tokens + 4 * ceil_div(tokens, job.micro_batches) * 256  # the batch, and one part's logits
    return int(processes * (PROCESS_BYTES + 4 * parameters) + activations)


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
    nats, all_stats = 0.0, []
    for micro_BL in batch_BL.tensor_split(job.micro_batches):
        mine_BL = _own_sequences(micro_BL, world).to(device)
        logits, stats = recompute(training, mine_BL[:, :-1]) if job.recompute else training(mine_BL[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), mine_BL[:, 1:].flatten(), reduction="sum")
        nats += float(loss.detach())
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
    mean = sum_everywhere(world, nats, torch.device(device)) / tokens
    if not math.isfinite(mean):
        raise RuntimeError(f"the loss of step {step} is {mean}; lower --learning-rate")
    return mean / math.log(2), all_stats


def _own_sequences(batch_BL: Tensor, world: World) -> Tensor:
    """This process' sequences of a (micro-)batch, dealt out in turn; all of them in a simulated world."""
    if isinstance(world, SimulatedWorld):
        return batch_BL
    return batch_BL[world.local_ranks[0] :: world.num_ranks]


def _corpus(job: TrainJob) -> Corpus:
    """The text to train on, the end of it held out."""
    sources = {"prose": text.prose, "code": text.code, "excerpt": text.excerpt}
    data = sources[job.text]() if job.text in sources else text.load_text(job.text, _file_bytes(job.text)).data
    corpus = Corpus.of(job.text, data)
    if len(corpus.train) <= job.context + 1:
        raise UsageError(
            f"{job.text} has {len(data)} bytes, expected more than the context of {job.context} to draw from"
        )
    return corpus


MAX_TEXT_BYTES = 64 << 20
"""Of a longer file the beginning: every rank holds the text, and no run of this size reads more."""


def _file_bytes(name: str) -> int:
    path = Path(name)
    return min(path.stat().st_size, MAX_TEXT_BYTES) if path.is_file() else 1  # anything else is load_text's to refuse


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


_FIXED = (
    "sequences",
    "context",
    "hidden",
    "intermediate",
    "experts",
    "top_k",
    "blocks",
    "seed",
    "text",
    "learning_rate",
    "clip",
    "balance",
    "z",
    "dtype",
)
"""What must be the same for a run to go on as if it had not stopped; ranks, replicas and balancing may change."""


def _digest(corpus: Corpus) -> str:
    """SHA-256 of the bytes that are trained on."""
    return hashlib.sha256(corpus.train.numpy().tobytes()).hexdigest()


def _check_same_run(job: TrainJob, meta: dict[str, Any], corpus: Corpus) -> None:
    said = meta["extra"].get("job")
    if not isinstance(said, dict):
        raise UsageError(
            f"the checkpoint in {job.folder} is not one of moe-ref train; start without --resume elsewhere"
        )
    before = {"dtype": "float32", **said}  # older checkpoints knew no other
    for name in _FIXED:
        if before.get(name) != getattr(job, name):
            raise UsageError(
                f"the checkpoint is of a run with {name} {before.get(name)!r}, this one has {getattr(job, name)!r}; "
                "give the same value, or start without --resume in another folder"
            )
    if meta["extra"].get("text_sha256", _digest(corpus)) != _digest(corpus):
        raise UsageError(
            f"the text {job.text} has other bytes than when the checkpoint was written; give the same text"
        )
    if int(meta["step"]) >= job.steps:
        raise UsageError(
            f"the checkpoint is at step {meta['step']}, nothing is left of {job.steps} steps; raise --steps"
        )
