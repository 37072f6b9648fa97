"""The settings of a training run: everything that fixes it, the number of ranks apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_ref.config import MoEConfig
from moe_ref.errors import UsageError
from moe_ref.limits import check_seed
from moe_ref.train.model import ByteMoEConfig
from moe_ref.train.pretrain import Recipe

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
