"""Which numbers are the same on which ranks: one flat bucket per replica set.

An expert lives on the ranks of its replica set, a dense parameter on all ranks: it is treated as an expert that lives
everywhere, so one mechanism sums gradients, shards optimisers and writes checkpoints for both. Replica sets overlap
(with symmetric placements nearly every expert has its own), so a rank has several buckets, and an expert of one layer
shares a bucket with the experts of other layers that live on the same ranks.

All ranks have their buckets in one global order, and pieces in the order of parameters and experts; what two replicas
exchange is therefore described completely by its position.

Letters: N numbers of a bucket, P ranks, X local expert slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from moe_ref.experts import accumulate_dtype
from moe_ref.layer import MoELayer
from moe_ref.world import World


@dataclass(frozen=True)
class Piece:
    """A dense parameter, or one expert's row of an expert parameter.

    Attributes:
        key: logical name, the same on every rank and in every placement: the parameter's name, and for an expert
            "/" and its logical id.
        parameter: the parameter in this process; slot: row of it, None for all of it.
    """

    key: str
    parameter: nn.Parameter
    slot: int | None

    @property
    def data(self) -> Tensor:
        """View of the values."""
        value = self.parameter.detach()
        return value if self.slot is None else value[self.slot]

    @property
    def gradient(self) -> Tensor | None:
        """View of the gradient, or None."""
        value = self.parameter.grad
        return value if value is None or self.slot is None else value[self.slot]


@dataclass(frozen=True)
class Run:
    """Pieces side by side in their bucket that are evenly spaced rows of one parameter (replica sets may take turns).
    They are copied at once: a copy for every expert is more work for the host than for the device.

    Attributes:
        parameter: in this process; slots: rows of it, None for all of it. size: numbers.
    """

    parameter: nn.Parameter
    slots: slice | None
    size: int

    def of(self, value: Tensor) -> Tensor:
        """View of these rows of the parameter, or of something of its shape."""
        return value if self.slots is None else value[self.slots]


@dataclass
class Bucket:
    """All pieces that live on one set of ranks.

    Attributes:
        ranks: the set, in replica order. place: this rank's position in it.
        dtype: of sums and of the optimiser's masters: fp32, or fp64 for fp64 parameters.
        trainable: whether gradients are summed; frozen pieces only move and are saved.
    """

    ranks: tuple[int, ...]
    place: int
    dtype: torch.dtype
    trainable: bool
    pieces: list[Piece] = field(default_factory=list)

    # once the buckets are made no piece is added
    @cached_property
    def sizes(self) -> list[int]:
        """Numbers of each piece."""
        return [piece.data.numel() for piece in self.pieces]

    @cached_property
    def runs(self) -> list[Run]:
        """All pieces, in their order, as few runs as there can be."""
        found: list[Run] = []
        for piece, size in zip(self.pieces, self.sizes, strict=True):
            slot, last = piece.slot, found[-1] if found else None
            if slot is None:
                found.append(Run(piece.parameter, None, size))
                continue
            joined = _joined(last.slots, slot) if last is not None and last.parameter is piece.parameter else None
            if last is None or joined is None:
                found.append(Run(piece.parameter, slice(slot, slot + 1, 1), size))
            else:
                found[-1] = Run(piece.parameter, joined, last.size + size)
        return found

    @property
    def size(self) -> int:
        """N."""
        return sum(self.sizes)

    def bounds(self, place: int) -> slice:
        """Part of the bucket that replica `place` sums and optimises: parts differ by at most one number."""
        count, size = len(self.ranks), self.size
        return slice(size * place // count, size * (place + 1) // count)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat [N], one per piece, in the piece's shape."""
        parts = flat.split(self.sizes)
        return [part.view(piece.data.shape) for part, piece in zip(parts, self.pieces, strict=True)]

    def values(self) -> Tensor:
        """All pieces' values, [N] in `dtype`."""
        return torch.cat([run.of(run.parameter.detach()).reshape(-1).to(self.dtype) for run in self.runs])

    def gradients(self) -> Tensor:
        """All pieces' gradients, [N] in `dtype`; zeros where there is none (nothing reached the parameter)."""
        flat = torch.empty(self.size, dtype=self.dtype, device=self.pieces[0].data.device)
        for run, part in self._parts(flat):
            gradient = run.parameter.grad
            part.zero_() if gradient is None else part.copy_(run.of(gradient).reshape(-1))
        return flat

    def write_values(self, flat: Tensor) -> None:
        """Round [N] into the parameters."""
        for run, part in self._parts(flat):
            target = run.of(run.parameter.detach())
            target.copy_(part.view(target.shape))

    def write_gradients(self, flat: Tensor) -> None:
        """Round [N] into the parameters' gradients, which must be there."""
        for run, part in self._parts(flat):
            assert run.parameter.grad is not None
            target = run.of(run.parameter.grad)
            target.copy_(part.view(target.shape))

    def _parts(self, flat: Tensor) -> Iterator[tuple[Run, Tensor]]:
        """Each run with its part of [N]."""
        return zip(self.runs, flat.split([run.size for run in self.runs]), strict=True)


def _joined(slots: slice | None, slot: int) -> slice | None:
    """These rows and one more behind them, or None where they would not be evenly spaced."""
    if slots is None:
        return None
    first, last = slots.start, slots.stop - 1
    step = slot - last if first == last else slots.step
    return slice(first, slot + 1, step) if step > 0 and slot == last + step else None


def expert_parameters(layer: MoELayer) -> dict[str, nn.Parameter]:
    """The parameters of a layer whose first dimension is experts, by their names in the layer."""
    named = {
        "gate_up_proj" if layer.config.gated else "up_proj": layer.up_parameter,
        "gate_up_proj_bias" if layer.config.gated else "up_proj_bias": layer.up_bias_parameter,
        "down_proj": layer.down_proj,
        "down_proj_bias": layer.down_proj_bias,
    }
    return {name: value for name, value in named.items() if value is not None}


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """All MoE layers of a model by name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}


def make_buckets(model: nn.Module, world: World) -> list[Bucket]:
    """The buckets of this process, in the global order.

    In a simulated world the one process holds all replicas at once: every set is this process alone.
    """
    here = world.local_ranks[0]
    distributed = len(world.local_ranks) < world.num_ranks
    everyone = tuple(range(world.num_ranks)) if distributed else (here,)
    experts: dict[int, tuple[MoELayer, str]] = {}
    for name, layer in moe_layers(model).items():
        for inner, parameter in expert_parameters(layer).items():
            experts[id(parameter)] = (layer, f"{name}.{inner}" if name else inner)
    buckets: dict[tuple, Bucket] = {}

    def add(ranks: tuple[int, ...], piece: Piece) -> None:
        dtype, trainable = accumulate_dtype(piece.parameter.dtype), piece.parameter.requires_grad
        key = (ranks, str(dtype), trainable)
        if key not in buckets:
            buckets[key] = Bucket(ranks, ranks.index(here), dtype, trainable)
        buckets[key].pieces.append(piece)

    for name, parameter in model.named_parameters():
        if id(parameter) not in experts:
            add(everyone, Piece(name, parameter, None))
            continue
        layer, key = experts[id(parameter)]
        for slot, expert in enumerate(layer.held_experts):
            ranks = layer.placement.ranks_of_expert[expert] if distributed else (here,)
            add(ranks, Piece(f"{key}/{expert}", parameter, slot))
    return [buckets[key] for key in sorted(buckets)]
