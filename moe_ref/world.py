"""A world of P ranks: simulated in one process, or real through torch.distributed.

The pipeline is written once for both. It speaks of *local* ranks, those whose tensors live in this process: all of them
in a simulated world, exactly one in a real one. Whatever crosses between ranks goes through two calls, `gather` (small
integers that everybody needs) and `exchange` (rows). A GPU kernel replaces them by one-sided puts with signals; what
moves, and where it lands, is the same.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ref.environment import (
    local_rank_from_environment,
    local_world_size_from_environment,
    rank_from_environment,
    world_size_from_environment,
)
from moe_ref.errors import UsageError


class World(ABC):
    """P ranks, some of them in this process."""

    num_ranks: int
    local_ranks: tuple[int, ...]

    @abstractmethod
    def gather(self, values_LN: np.ndarray) -> np.ndarray:
        """All ranks' integers: int64 [local ranks, N] -> [P, N], the same result on every rank."""

    @abstractmethod
    def exchange(self, rows: Sequence[Tensor], sizes_PG: np.ndarray, anchor: Tensor | None = None) -> list[Tensor]:
        """Move rows between ranks; differentiable.

        Args:
            rows: for each local rank p its rows [N_p, H], sorted by destination rank.
            sizes_PG: rows from rank p to rank g, int64 [P, P]; row p sums to N_p.
            anchor: a tensor that requires grad keeps the exchange in the graph, so that all ranks take part in its
                backward even where nothing of their own needs a gradient.

        Returns:
            For each local rank the rows it received, in order of source rank.
        """

    @abstractmethod
    def gather_text(self, value: str) -> list[str]:
        """Every process' string, in rank order."""

    def agree(self, what: str, value: str) -> None:
        """Raise UsageError on every rank unless all ranks hold the same `value`."""
        values = self.gather_text(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise UsageError(f"{what} differs between ranks: rank 0 has {values[0]}, rank {rank} has {other}")

    def gather_flags(self, flag: bool) -> list[int]:
        """Ranks whose process raised `flag`, the same list on every rank."""
        flags_P1 = self.gather(np.full((len(self.local_ranks), 1), int(flag)))
        return np.flatnonzero(flags_P1[:, 0]).tolist()

    def split(self, value: Tensor) -> list[Tensor]:
        """Cut dimension 0 into one part per local rank, as evenly as possible (the first parts get one more)."""
        count = len(self.local_ranks)
        if count == 1:
            return [value]
        base, extra = divmod(value.shape[0], count)
        return list(value.split([base + (i < extra) for i in range(count)]))


class SimulatedWorld(World):
    """P ranks in this process, for learning and testing: same data movement, no processes."""

    def __init__(self, ranks: int = 1) -> None:
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise UsageError(f"a world of {ranks!r} ranks was asked for, expected an integer of at least 1")
        self.num_ranks = ranks
        self.local_ranks = tuple(range(ranks))

    def gather(self, values_LN: np.ndarray) -> np.ndarray:
        return np.asarray(values_LN, dtype=np.int64)

    def exchange(self, rows: Sequence[Tensor], sizes_PG: np.ndarray, anchor: Tensor | None = None) -> list[Tensor]:
        if self.num_ranks == 1:
            return [rows[0]]
        parts = [part.split(sizes.tolist()) for part, sizes in zip(rows, sizes_PG, strict=True)]
        return [torch.cat([sent[g] for sent in parts]) for g in range(self.num_ranks)]

    def gather_text(self, value: str) -> list[str]:
        return [value]

    def __repr__(self) -> str:
        return f"SimulatedWorld(ranks={self.num_ranks})"


class DistributedWorld(World):
    """The ranks of a torch.distributed process group, one per process.

    Args:
        group: process group; None is the default group, which must be initialised.

    Raises:
        UsageError: torch.distributed is not initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                "torch.distributed is not initialised; start the program with torchrun and call "
                "DistributedWorld.from_environment(), or use SimulatedWorld"
            )
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        if self.num_ranks < 1:
            raise UsageError("this process is not a member of the process group; build the world on its members only")
        self.local_ranks = (dist.get_rank(group),)

    @classmethod
    def from_environment(cls, timeout_s: float = 300.0) -> DistributedWorld:
        """Join the group that torchrun (or SLURM, Kubernetes, Ray through it) describes: NCCL on GPUs, else gloo.

        Raises:
            UsageError: RANK and WORLD_SIZE are not set.
        """
        if not dist.is_initialized():
            missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
            if missing:
                raise UsageError(
                    f"{', '.join(missing)} not set; start with `torchrun --nproc-per-node N -m moe_ref ...`, "
                    "or use a simulated world (--ranks N without torchrun)"
                )
            rank_from_environment()  # refuses what is no number, before torch does it less clearly
            local = local_rank_from_environment()
            # All ranks must decide alike, so it is not enough that there is a GPU for this one.
            on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size_from_environment()
            if on_gpu:
                torch.cuda.set_device(local)
            try:
                dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout_s))
            except (RuntimeError, OSError, ValueError) as error:
                where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                raise UsageError(
                    f"rank {os.environ['RANK']} can't join the {os.environ['WORLD_SIZE']} ranks that meet at {where} "
                    f"({' '.join(str(error).split())[:160]}); check that all of them were started, that rank 0 is "
                    "there, and that nothing else uses the port"
                ) from error
        return cls()

    @property
    def rank(self) -> int:
        """This process' rank."""
        return self.local_ranks[0]

    @property
    def device(self) -> torch.device:
        """Where tensors must be for this group to exchange them: this process' GPU under NCCL, else the CPU."""
        on_gpu = "nccl" in dist.get_backend(self.group)
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def gather(self, values_LN: np.ndarray) -> np.ndarray:
        mine_N = torch.as_tensor(np.asarray(values_LN, dtype=np.int64)[0]).to(self.device)
        all_PN = [torch.empty_like(mine_N) for _ in range(self.num_ranks)]
        dist.all_gather(all_PN, mine_N, group=self.group)
        return torch.stack(all_PN).cpu().numpy()

    def exchange(self, rows: Sequence[Tensor], sizes_PG: np.ndarray, anchor: Tensor | None = None) -> list[Tensor]:
        send, receive = sizes_PG[self.rank].tolist(), sizes_PG[:, self.rank].tolist()
        received = _AllToAll.apply(rows[0], anchor, send, receive, self.group)
        assert isinstance(received, Tensor)
        return [received]

    def gather_text(self, value: str) -> list[str]:
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    def __repr__(self) -> str:
        return f"DistributedWorld(rank={self.rank}, ranks={self.num_ranks}, backend={dist.get_backend(self.group)!r})"


def all_gather(everyone: Tensor, mine: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill `everyone` with all ranks' `mine`, in rank order; torch 2.13 gave the call another name."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(everyone, mine, group=group)


class _AllToAll(torch.autograd.Function):
    """all_to_all_single whose backward is the opposite all_to_all_single."""

    @staticmethod
    def forward(ctx: Any, rows_NH: Tensor, anchor: Tensor | None, send: list[int], receive: list[int], group: Any):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(rows_NH, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        # apply, not the bare exchange: so that a second derivative can be taken
        return _AllToAll.apply(grads[0], None, ctx.receive, ctx.send, ctx.group), None, None, None, None


def _all_to_all(rows_NH: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    """Rows travel as bytes: gloo knows fewer dtypes than PyTorch, and bits must arrive as they were sent."""
    rows_NH = rows_NH.detach().contiguous()
    if not rows_NH.numel():  # of any strides, and those of the bytes must be known
        rows_NH = rows_NH.new_empty(rows_NH.shape)
    out_NH = rows_NH.new_empty(sum(receive), rows_NH.shape[1])
    dist.all_to_all_single(out_NH.view(torch.uint8), rows_NH.view(torch.uint8), receive, send, group=group)
    return out_NH


def world_for(ranks: int | None, default: int) -> tuple[World, torch.device]:
    """The world that a command runs in, and the device of its tensors.

    Under torchrun it is the real one, and `ranks` must be its size or None; otherwise `ranks` simulated ranks (default
    if None). The device is the process' GPU if there is one for every process of the machine, else the CPU.

    Raises:
        UsageError: `ranks` contradicts torchrun's world, or is below 1.
    """
    size = world_size_from_environment()
    if size is None:
        world: World = SimulatedWorld(default if ranks is None else ranks)
    else:
        if ranks is not None and ranks != size:
            raise UsageError(f"--ranks is {ranks}, but torchrun started {size} processes; leave --ranks out")
        world = DistributedWorld.from_environment()
        return world, world.device
    on_gpu = torch.cuda.is_available()
    return world, torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
