"""An optimiser over replicas: fp32 masters, any elementwise torch optimiser, ZeRO-1 inside replica sets.

Values are updated in fp32 masters (fp64 for fp64 parameters), one flat vector per replica set, and then rounded into
the parameters. Every replica does the same arithmetic on the same bits and gets the same bits: replicas never drift.

Sharded (ZeRO-1), each replica keeps masters and moments of its own part of the bucket only, updates that part, and
hands the new values to the other replicas. Sets differ in size, and so do shards: a rank with many small sets holds
more than one with few large ones. Masters and moments take 12 N / d bytes per bucket of d replicas instead of 12 N.

Letters: N numbers of a bucket, d replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_ref.errors import UsageError
from moe_ref.train.exchange import gather_parts
from moe_ref.train.replicated import Replicated

Records = dict[str, dict[str, Tensor]]
"""By logical key: `weight`, `master` and the optimiser's states of that shape (`exp_avg`, ...), each whole."""


class ReplicaOptimizer:
    """See the module's docstring.

    Args:
        training: the wrapped model; its `sharded` says whether states are divided.
        make: class of a torch optimiser that works elementwise (SGD, Adam, AdamW, ...).
        options: for it (lr, betas, weight_decay, ...), the same for all parameters.

    Raises:
        UsageError: nothing to train; or ranks were given different optimisers or options (on every rank).

    Attributes:
        inner: the torch optimiser over the masters; change `inner.param_groups[0]["lr"]` for a schedule.
    """

    def __init__(self, training: Replicated, make: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        if not isinstance(training, Replicated):
            raise UsageError(f"training is a {type(training).__name__}, expected the model wrapped in Replicated")
        if not any(parameter.requires_grad for parameter in training.module.parameters()):
            raise UsageError("every parameter of the model is frozen: there is nothing to train")
        plain = {name: value for name, value in options.items() if isinstance(value, (int, float, str, tuple))}
        training.world.agree("the optimiser", f"{getattr(make, '__name__', make)}, {sorted(plain.items())}")
        self.training, self._make, self._options = training, make, options
        self.masters: list[nn.Parameter] = []
        self.inner = self._build([bucket.values() for bucket in training.trainable])

    def _build(self, whole: list[Tensor]) -> torch.optim.Optimizer:
        """Masters (own parts, if sharded) of these values and an optimiser without history."""
        self.masters = [nn.Parameter(self._own(i, value).clone()) for i, value in enumerate(whole)]
        self._written = self._versions()
        own = [master for master in self.masters if master.numel()]
        # A rank may have nothing to update (few numbers, many replicas); torch's optimisers want a parameter.
        return self._make(own or [nn.Parameter(torch.empty(0))], **self._options)

    def _versions(self) -> list[tuple[int, int]]:
        """What changes when somebody else than this optimiser writes into a parameter, or replaces it."""
        return [(id(p), p._version) for p in self.training.module.parameters() if p.requires_grad]

    def _own(self, index: int, whole: Tensor) -> Tensor:
        bucket = self.training.trainable[index]
        return whole[bucket.bounds(bucket.place)] if self.training.sharded else whole

    def zero_grad(self) -> None:
        """Forget gradients, so that the next micro-batch begins a new sum."""
        self.training.zero_grad()
        self.training.gradients = None

    @torch.no_grad()
    def step(self) -> None:
        """Update masters from the synchronised gradients, parameters from masters, and forget the gradients.

        Raises:
            RuntimeError: `synchronize` was not called since the last step; or somebody else has written into the
                parameters (`load_state_dict`, say), which the masters would undo.
        """
        training = self.training
        if training.gradients is None:
            raise RuntimeError("step() before synchronize(): gradients still differ between replicas")
        if self._written != self._versions():
            raise RuntimeError(
                "parameters were changed since this optimiser read or wrote them; make a new ReplicaOptimizer after "
                "such a change (its masters would undo it)"
            )
        for master, gradient in zip(self.masters, training.gradients, strict=True):
            master.grad = gradient
        self.inner.step()
        self.inner.zero_grad()
        self._write_parameters()
        self.zero_grad()

    def _write_parameters(self) -> None:
        for bucket, flat in zip(self.training.trainable, self._whole(self.masters), strict=True):
            bucket.write_values(flat)
        self._written = self._versions()

    def _whole(self, parts: list[Any]) -> list[Tensor]:
        """Own parts to whole buckets on every replica."""
        values = [part.detach() for part in parts]
        if not self.training.sharded:
            return values
        start = time.perf_counter()
        whole = gather_parts(self.training.world, self.training.trainable, values)
        self.training.sync_seconds += time.perf_counter() - start
        return whole

    # --- state by logical keys: for checkpoints and for moves ------------------------------------------------------

    def state_names(self) -> list[str]:
        """Names of the states that have a number per parameter, the same on every rank; empty before the first step."""
        names: set[str] = set()
        for master in self.masters:
            for name, value in self.inner.state.get(master, {}).items():
                if isinstance(value, Tensor) and value.shape == master.shape and value.dim():
                    names.add(name)
        return sorted(names)

    def scalars(self) -> dict[str, float]:
        """States of one number each beside the steps (NAdam's `mu_product`, ...): the same for all parameters, as all
        are updated together; empty where this rank has no masters."""
        for master in self.masters:
            state = self.inner.state.get(master, {})
            if state:
                return {
                    name: float(value)
                    for name, value in state.items()
                    if name != "step" and isinstance(value, Tensor) and not value.dim()
                }
        return {}

    def steps(self) -> int:
        """Optimiser steps so far, as its own state says (0 for optimisers that don't count)."""
        for state in self.inner.state.values():
            if "step" in state:
                return int(state["step"])
        return 0

    def export(self) -> Records:
        """Everything that this rank's replicas consist of, by logical key; every rank of the world calls it."""
        training = self.training
        columns = {"master": self._whole(self.masters)}
        for name in self.state_names():
            parts = [self.inner.state[m][name] if m.numel() else torch.empty_like(m) for m in self.masters]
            columns[name] = self._whole(parts)
        records: Records = {}
        for bucket in training.buckets:
            for piece in bucket.pieces:
                records[piece.key] = {"weight": piece.data.clone()}
        for i, bucket in enumerate(training.trainable):
            for name, flats in columns.items():
                for piece, value in zip(bucket.pieces, bucket.split(flats[i]), strict=True):
                    records[piece.key][name] = value.clone()
        return records

    @torch.no_grad()
    def load(
        self, records: Mapping[str, Mapping[str, Tensor]], steps: int, scalars: Mapping[str, float] | None = None
    ) -> None:
        """Take over weights, masters and states, for the training's present buckets.

        Args:
            records: by logical key, at least those that this rank holds.
            steps: optimiser steps that the states are from, for optimisers that count them; else 0.
            scalars: as `scalars()` gave them.

        Raises:
            UsageError: a key or a state is missing, or has another shape.
        """
        training = self.training
        training.rebuild()
        for bucket in training.buckets:
            for piece in bucket.pieces:
                piece.data.copy_(_find(records, piece.key, "weight", piece.data))
        names = sorted({name for record in records.values() for name in record} - {"weight", "master"})

        def flat(i: int, name: str) -> Tensor:
            bucket = training.trainable[i]
            parts = [_find(records, p.key, name, p.data).reshape(-1).to(bucket.dtype) for p in bucket.pieces]
            return torch.cat(parts).to(bucket.pieces[0].data.device)

        groups = self.inner.param_groups
        count = len(training.trainable)
        self.inner = self._build([flat(i, "master") for i in range(count)])
        for old, new in zip(groups, self.inner.param_groups, strict=True):
            new.update({name: value for name, value in old.items() if name != "params"})  # learning rates go on
        for i, master in enumerate(self.masters):
            if names and master.numel():
                self.inner.state[master] = {name: self._own(i, flat(i, name)).clone() for name in names}
                if steps:
                    self.inner.state[master]["step"] = torch.tensor(float(steps))
                self.inner.state[master] |= {name: torch.tensor(value) for name, value in (scalars or {}).items()}


def _find(records: Mapping[str, Mapping[str, Tensor]], key: str, name: str, like: Tensor) -> Tensor:
    if key not in records or name not in records[key]:
        raise UsageError(f"no {name} of {key} in the checkpoint; it was written for another model or optimiser")
    value = records[key][name]
    if value.shape != like.shape:
        raise UsageError(f"{name} of {key} has shape {list(value.shape)}, expected {list(like.shape)}: another model")
    return value
