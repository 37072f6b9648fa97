"""Replicas in training: a wrapper in the manner of DistributedDataParallel (FineMoE, sections 3 and 6).

    training = Replicated(model, placement, world)            # model: whole, the same on every rank
    optimizer = ReplicaOptimizer(training, torch.optim.AdamW, lr=1e-3)
    for batch in micro_batches:                                # gradients accumulate where they are computed
        loss_sum(training(batch)).backward()
    training.synchronize(denominator=tokens_of_all_ranks)      # now every replica holds the same gradient
    training.clip(1.0)
    optimizer.step()

Two differences to plain data parallelism. The gradient of an expert is the sum over its replica set, and the
denominator is that of the dense parameters (tokens, or ranks): never the mean over the replica set, whose size differs
from expert to expert and says nothing about how many tokens there were. And an expert counts once in the norm, however
many replicas it has. The gradient of an expert without tokens is zero, never None.

Expert parameters become new objects when the model is wrapped and whenever experts move: make an optimiser after
wrapping, and a `ReplicaOptimizer` where experts move. Gradients of micro-batches add up in the parameters' dtype; over
ranks they are summed in fp32. The backward uses the plan of its forward; to recompute see `moe_ref.train.recompute`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_ref import balance
from moe_ref.errors import UsageError
from moe_ref.layer import MoELayer
from moe_ref.placement import Placement
from moe_ref.train.buckets import Bucket, expert_parameters, make_buckets, moe_layers
from moe_ref.train.exchange import sum_buckets, sum_everywhere
from moe_ref.world import DistributedWorld, World

Placements = Placement | Mapping[str, Placement]


class Replicated(nn.Module):
    """See the module's docstring.

    Args:
        module: model with `MoELayer`s that hold all experts (made without a world). They become this rank's share of
            layers in `world`, in place; rank 0's weights count, as in DistributedDataParallel.
        placement: of every layer, or one per layer by its name in the model.
        world: real, or simulated (one process stands for all ranks; nothing is exchanged).
        group_size: ranks of a scheduling group; None for one group of all ranks. Tokens stay inside their group;
            gradients are summed over all replicas of the world.
        sharded: optimiser states are divided inside every replica set (ZeRO-1): `synchronize` leaves each rank its own
            part of the sums, and only a `ReplicaOptimizer` can use them.

    Attributes:
        sync_seconds: time spent in `synchronize` and in what the optimiser exchanges.

    Raises:
        UsageError: no MoE layer; placements that don't match layers or ranks; an expert parameter that is used at two
            places of the model; or ranks with different models or settings (on every rank).
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Placements,
        world: World,
        *,
        group_size: int | None = None,
        sharded: bool = False,
    ) -> None:
        super().__init__()
        self.module, self.world, self.sharded = module, world, sharded
        self.layers = moe_layers(module)
        if not self.layers:
            raise UsageError("the model has no MoELayer; use torch's DistributedDataParallel")
        if not isinstance(world, World):
            raise UsageError(f"world is a {type(world).__name__}, expected a DistributedWorld or a SimulatedWorld")
        if not isinstance(placement, (Placement, Mapping)):
            raise UsageError(
                f"placement is a {type(placement).__name__}, expected a Placement, or a mapping from names of layers"
            )
        _refuse_tied_experts(module, self.layers)
        placements = dict.fromkeys(self.layers, placement) if isinstance(placement, Placement) else dict(placement)
        if set(placements) != set(self.layers):
            raise UsageError(f"placements are for {sorted(placements)}, expected one for each of {list(self.layers)}")
        if isinstance(world, DistributedWorld):
            world.agree("the model that is replicated", _fingerprint(module, sharded, group_size))
            for value in [*module.parameters(), *module.buffers()]:
                dist.broadcast(value.detach(), group=world.group, group_src=0)
        for name, layer in self.layers.items():
            distribute(layer, world, placements[name], group_size)
        self.buckets: list[Bucket] = []
        self.gradients: list[Tensor] | None = None
        self._written: list[tuple[int, int] | None] = []
        self.sync_seconds = 0.0
        self.rebuild()

    def rebuild(self) -> None:
        """Make the buckets for the present placements."""
        self.buckets = make_buckets(self.module, self.world)
        self.gradients = None

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """The model's forward."""
        return self.module(*arguments, **named)

    @property
    def trainable(self) -> list[Bucket]:
        """Buckets whose gradients are summed."""
        return [bucket for bucket in self.buckets if bucket.trainable]

    @property
    def placements(self) -> dict[str, Placement]:
        """Present placement of every layer."""
        return {name: layer.placement for name, layer in self.layers.items()}

    def synchronize(self, denominator: float | None = None) -> None:
        """Sum gradients over replica sets and divide them; call it once per optimiser step, after all micro-batches.

        Afterwards `parameter.grad` is the gradient of the global batch, bit-identical on all replicas (or, if sharded,
        None: each rank has its part of the sums in `gradients`).

        Args:
            denominator: the same on every rank, for dense parameters and experts alike. Default: number of processes,
                right where a process' loss is a mean and all have equally many tokens; for sums over tokens give the
                number of tokens of all ranks and micro-batches.

        Raises:
            ValueError: a denominator that is not a positive number.
            RuntimeError: gradients are sums over ranks already; or parameters were frozen, unfrozen or added since
                the buckets were made.
        """
        processes = self.world.num_ranks // len(self.world.local_ranks)
        denominator = float(processes if denominator is None else denominator)
        if not 0 < denominator < float("inf"):
            raise ValueError(
                f"denominator is {denominator}, expected a positive number, such as the tokens of all ranks"
            )
        self._check_parameters()
        if self.gradients is not None and self._written == self._versions():
            raise RuntimeError("synchronize() twice for the same gradients: they are sums over all ranks already")
        start = time.perf_counter()
        buckets = self.trainable
        sums = sum_buckets(self.world, buckets, [bucket.gradients() for bucket in buckets], self.sharded)
        self.gradients = [total / denominator for total in sums]
        if self.sharded:
            self.zero_grad()
        else:
            self._write_gradients()
        self._written = self._versions()
        self.sync_seconds += time.perf_counter() - start

    def clip(self, max_norm: float) -> float:
        """Scale gradients so that their norm is at most `max_norm`; call it after `synchronize`.

        Returns:
            The norm before, the same bits on every rank; each expert counts once, however many replicas it has.

        Raises:
            ValueError: max_norm is not positive; RuntimeError: gradients were not synchronised, or are not finite.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}, expected a positive number")
        if self.gradients is None:
            raise RuntimeError("clip() before synchronize(): gradients still differ between replicas")
        # added up where the gradients are: the host waits for them once, not for every bucket
        squares = torch.zeros((), dtype=torch.float64, device=self.gradients[0].device)
        for bucket, gradient in zip(self.trainable, self.gradients, strict=True):
            if self.sharded or bucket.place == 0:
                squares += gradient.double().square().sum()
        norm = sum_everywhere(self.world, float(squares), squares.device) ** 0.5
        if not norm < float("inf"):
            raise RuntimeError(f"the gradient's norm is {norm}; a loss or an activation is not finite")
        if norm > max_norm:
            for gradient in self.gradients:
                gradient.mul_(max_norm / norm)
            if not self.sharded:
                self._write_gradients()
            self._written = self._versions()
        return norm

    def _versions(self) -> list[tuple[int, int] | None]:
        """What changes when somebody writes into a gradient, or replaces it."""
        gradients = [parameter.grad for parameter in self.module.parameters()]
        return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]

    def _check_parameters(self) -> None:
        """Raise RuntimeError unless the buckets still are what the model has to train."""
        expected = {id(piece.parameter) for bucket in self.trainable for piece in bucket.pieces}
        for name, parameter in self.module.named_parameters():
            # A layer that holds no expert here has parameters without numbers, and no pieces.
            if parameter.requires_grad != (id(parameter) in expected) and parameter.numel():
                raise RuntimeError(
                    f"{name} was frozen, unfrozen or put into the model after it was wrapped; call rebuild() on every "
                    "rank and make a new optimiser"
                )

    def _write_gradients(self) -> None:
        """Put `gradients` into the parameters' grad."""
        assert self.gradients is not None
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket, flat in zip(self.trainable, self.gradients, strict=True):
            bucket.write_gradients(flat)


def _fingerprint(module: nn.Module, sharded: bool, group_size: int | None) -> str:
    """What all ranks must have alike before they exchange anything, as text."""
    values = [
        (name, str(value.dtype), tuple(value.shape), value.requires_grad)
        for name, value in [*module.named_parameters(), *module.named_buffers()]
    ]
    digest = hashlib.sha256(repr(values).encode()).hexdigest()[:16]
    return f"{len(values)} tensors ({digest}), sharded {sharded}, group_size {group_size}"


def _refuse_tied_experts(module: nn.Module, layers: Mapping[str, MoELayer]) -> None:
    """Experts become new parameters, whatever else holds the old ones; so nothing else may."""
    own = {id(value) for layer in layers.values() for value in expert_parameters(layer).values()}
    seen: dict[int, str] = {}
    # A layer that stands at several places is one layer, and is met once.
    for path, part in module.named_modules():
        for name, value in part.named_parameters(path, recurse=False, remove_duplicate=False):
            if id(value) in own and id(value) in seen:
                raise UsageError(
                    f"{seen[id(value)]} and {name} are one parameter; experts move between ranks and can't be tied"
                )
            seen[id(value)] = name


def distribute(layer: MoELayer, world: World, placement: Placement, group_size: int | None = None) -> None:
    """Turn a layer that holds all experts into this rank's share of it in `world`, in place.

    Raises:
        UsageError: the layer holds a part of the experts already; placement and layer or world don't match; or ranks
            were given different configs or placements.
    """
    if len(layer.held_experts) != layer.config.experts or len(layer.world.local_ranks) != layer.world.num_ranks:
        raise UsageError("the layer is a rank's share already; make the model without a world and hand it in whole")
    # A layer of the new world makes all checks and agrees with the other ranks; only its share of slots is wanted.
    probe = MoELayer(layer.config, world=world, placement=placement, device="meta")
    layer.world, layer.placement = world, placement
    set_held(layer, probe.held_experts, {name: value.detach() for name, value in expert_parameters(layer).items()})
    layer.planner = None if group_size is None else partial(_grouped, layer=layer, group_size=group_size)


def set_held(layer: MoELayer, held: tuple[int, ...], rows: Mapping[str, Mapping[int, Tensor] | Tensor]) -> None:
    """Let a layer hold these experts: rows[parameter name][expert] are their values.

    The layer gets new parameters: a graph that is still alive would give the old ones gradients of their shape.
    """
    layer.held_experts = held
    for name, parameter in expert_parameters(layer).items():
        values = [rows[name][expert] for expert in held]
        value = torch.stack(values) if values else parameter.detach()[:0].clone()
        setattr(layer, name, nn.Parameter(value, requires_grad=parameter.requires_grad))


def _grouped(counts_PE, placement: Placement, layer: MoELayer, group_size: int) -> balance.Plan:
    return balance.schedule(counts_PE, placement, method=layer.schedule_method, group_size=group_size)
