"""The problem that every level solves, the order of tasks, and how a level is compiled and called.

Letters: N rows (padding included), H hidden, D intermediate, X experts, T row tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_fast.compiler import import_cutlass
from moe_ref.layout import ceil_div

ROWS, COLUMNS = 128, 256
"""Of a task; the same as in `tiles`, which needs the compiler to be imported."""
SECOND = 1 << 30
"""Marks a task of the second product in the list of level 5."""
GROUP_TASKS = 200
"""At least so many first products lie between those of a row tile and its second products."""
LEVELS = ("plain", "wgmma", "tma", "pipeline", "persistent", "fused")


@dataclass
class Problem:
    """Rows in expert-major order, each expert's padded with zeros to whole tiles of 128.

    Attributes:
        rows_NH: bfloat16 [N, H]; first_XDH, second_XHD: weights; rows_X: rows of each expert without padding.
        tile_expert_T: int32 [T], the expert of each row tile; hidden_ND, out_NH: filled by a level.
        failed: int32 [1], not 0 once a wait inside a level has run out of patience.
    """

    rows_NH: Tensor
    first_XDH: Tensor
    second_XHD: Tensor
    rows_X: list[int]

    def __post_init__(self) -> None:
        device = self.rows_NH.device
        tiles_X = [ceil_div(rows, ROWS) for rows in self.rows_X]
        self.tile_expert = [expert for expert, tiles in enumerate(tiles_X) for _ in range(tiles)]
        self.tile_expert_T = torch.tensor(self.tile_expert, dtype=torch.int32, device=device)
        self.hidden_ND = self.rows_NH.new_zeros(len(self.rows_NH), self.first_XDH.shape[1])
        self.out_NH = torch.zeros_like(self.rows_NH)
        self.failed = torch.zeros(1, dtype=torch.int32, device=device)

    @classmethod
    def of_routes(
        cls, x_SH: Tensor, expert_SK: Tensor, first_XDH: Tensor, second_XHD: Tensor
    ) -> tuple[Problem, Tensor]:
        """Tokens x behind their routes, int64 [S, K]; returns the problem and each route's row, [S, K]."""
        expert_N = expert_SK.flatten()
        order_N = torch.sort(expert_N, stable=True).indices
        rows_X = torch.bincount(expert_N, minlength=len(first_XDH))
        padded_X = (rows_X + ROWS - 1) // ROWS * ROWS
        # how far padding moves an expert's first row
        shift_X = (padded_X - rows_X).cumsum(0) - (padded_X - rows_X)
        place_N = torch.arange(len(order_N), device=x_SH.device) + shift_X[expert_N[order_N]]
        rows_NH = x_SH.new_zeros(int(padded_X.sum()), x_SH.shape[1])
        rows_NH[place_N] = x_SH[order_N // expert_SK.shape[1]]
        place_SK = torch.empty_like(place_N)
        place_SK[order_N] = place_N
        return cls(rows_NH, first_XDH, second_XHD, rows_X.tolist()), place_SK.view_as(expert_SK)

    @property
    def flops(self) -> int:
        """Of both products over the rows that are no padding: 2 * 2 * H * D each."""
        return 4 * sum(self.rows_X) * self.first_XDH.shape[1] * self.first_XDH.shape[2]

    def expected(self) -> tuple[Tensor, Tensor]:
        """(hidden, out) by the definition: fp32 arithmetic expert by expert, hidden rounded once, out not at all."""
        hidden, out, at = torch.zeros_like(self.hidden_ND), torch.zeros_like(self.rows_NH, dtype=torch.float32), 0
        for expert, count in enumerate(self.rows_X):
            x = self.rows_NH[at : at + count].float()
            h = torch.relu(x @ self.first_XDH[expert].float().T).to(torch.bfloat16)
            hidden[at : at + count] = h
            out[at : at + count] = h.float() @ self.second_XHD[expert].float().T
            at += ceil_div(count, ROWS) * ROWS
        return hidden, out


def random_weights(experts: int, hidden: int, intermediate: int, device: Any, seed: int = 0) -> tuple[Tensor, Tensor]:
    """bfloat16 [E, D, H] and [E, H, D], scaled as in a trained layer."""
    g = torch.Generator(device=device).manual_seed(seed)
    first = torch.empty(experts, intermediate, hidden, dtype=torch.bfloat16, device=device)
    second = torch.empty(experts, hidden, intermediate, dtype=torch.bfloat16, device=device)
    for weight, scale in ((first, hidden**-0.5), (second, intermediate**-0.5)):
        for one in weight:
            one.copy_(torch.randn(one.shape, device=device, generator=g) * scale)
    return first, second


def ordered_tasks(tile_expert: list[int], columns: int) -> list[int]:
    """The list of level 4: expert after expert, column after column, row tile fastest."""
    out = []
    for expert in sorted(set(tile_expert)):
        tiles = [t for t, e in enumerate(tile_expert) if e == expert]
        out += [t << 8 | c for c in range(columns) for t in tiles]
    return out


def fused_tasks(tile_expert: list[int], columns0: int, columns1: int) -> list[int]:
    """The list of level 5: first products of a group of row tiles, then second ones of the group before."""
    size = ceil_div(GROUP_TASKS, columns0)
    groups = [range(at, min(at + size, len(tile_expert))) for at in range(0, len(tile_expert), size)]
    out: list[int] = []
    for before, now in zip([None, *groups], [*groups, None], strict=True):
        out += [t << 8 | c for c in range(columns0) for t in now or ()]
        out += [SECOND | t << 8 | c for c in range(columns1) for t in before or ()]
    return out


def compile_level(name: str, hidden: int, intermediate: int) -> list[Any]:
    """The compiled kernels of a level, [first product, second product] or [both]; needs no GPU.

    Raises:
        ValueError: no such level, or sizes that the tiles don't divide.
    """
    if name not in LEVELS:
        raise ValueError(f"no level {name!r}; there are {', '.join(LEVELS)}")
    if hidden % COLUMNS or intermediate % COLUMNS:
        raise ValueError(f"hidden={hidden}, intermediate={intermediate}: the ladder takes multiples of {COLUMNS}")
    cute = import_cutlass()
    import cuda.bindings.driver as cuda
    from cutlass import Int32, Int64

    from moe_fast.ladder import fused, persistent, pipeline, plain, tma, wgmma

    address, number, stream = Int64(1 << 20), Int32(1), cuda.CUstream(0)
    if name == "fused":
        kernel = fused.Fused(hidden, intermediate)
        arguments = [*(address,) * 6, number, number, address, number, address, number, address, number, stream]
        return [cute.compile(kernel, *arguments)]
    kinds = {
        "plain": plain.Plain,
        "wgmma": wgmma.Wgmma,
        "tma": tma.Tma,
        "pipeline": pipeline.Pipeline,
        "persistent": persistent.Persistent,
    }
    more = [address, number, number] if name == "persistent" else []
    arguments = [*(address,) * 4, number, number, *more, stream]
    pairs = ((hidden, intermediate, True), (intermediate, hidden, False))
    return [cute.compile(kinds[name](*pair), *arguments) for pair in pairs]


def caller(name: str, problem: Problem) -> Callable[[], None]:
    """A function that runs a level on the problem, on the current stream."""
    import cuda.bindings.driver as cuda
    from cutlass import Int32, Int64

    p = problem
    device = p.rows_NH.device
    kernels = compile_level(name, p.rows_NH.shape[1], p.first_XDH.shape[1])
    tiles, slots = Int32(len(p.tile_expert)), Int32(len(p.rows_X))
    blocks = Int32(torch.cuda.get_device_properties(device).multi_processor_count)
    stream = cuda.CUstream(torch.cuda.current_stream(device).cuda_stream)
    columns0, columns1 = p.first_XDH.shape[1] // COLUMNS, p.second_XHD.shape[1] // COLUMNS

    def at(tensor: Tensor) -> Any:
        return Int64(tensor.data_ptr())

    def listed(tasks: list[int]) -> Tensor:
        return torch.tensor(tasks, dtype=torch.int32, device=device)

    experts = p.tile_expert_T
    if name == "fused":
        tasks = listed(fused_tasks(p.tile_expert, columns0, columns1))
        counters = torch.zeros(len(p.tile_expert), dtype=torch.int32, device=device)
        calls = 0

        def both() -> None:
            nonlocal calls
            calls += 1
            kernels[0](
                at(p.rows_NH), at(p.first_XDH), at(p.hidden_ND), at(p.second_XHD), at(p.out_NH), at(experts), tiles,
                slots, at(tasks), Int32(len(tasks)), at(counters), Int32(calls), at(p.failed), blocks, stream,
            )  # fmt: skip

        return both

    lists = [listed(ordered_tasks(p.tile_expert, columns)) for columns in (columns0, columns1)]
    more = [[at(tasks), Int32(len(tasks)), blocks] if name == "persistent" else [] for tasks in lists]

    def one_after_the_other() -> None:
        _ = lists  # the kernels hold their addresses
        kernels[0](at(p.rows_NH), at(p.first_XDH), at(p.hidden_ND), at(experts), tiles, slots, *more[0], stream)
        kernels[1](at(p.hidden_ND), at(p.second_XHD), at(p.out_NH), at(experts), tiles, slots, *more[1], stream)

    return one_after_the_other
