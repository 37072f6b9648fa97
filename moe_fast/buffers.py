"""What calls left in a kernel's memory, read back for comparison and for the backward.

Letters: S tokens of a rank, H hidden, D intermediate, K choices, P ranks, X local slots, R rows of the dispatch buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_fast.kernel.constants import HOME_BITS, TILE_ROWS, PlanWord
from moe_fast.kernel.regions import wire_flags
from moe_fast.kernel.shapes import dropped
from moe_fast.memory import Memory
from moe_ref.layout import ceil_div, fixed_row


@dataclass
class Buffers:
    """What the last call left in memory, for comparison.

    rows_RH: one side of the dispatch buffer, in the fixed layout all of it. Where the kernel gathers rows
    (`KernelShape.gathers`), the places of those that stayed on their rank, in the wire format "tokens" also those of
    followers, hold what an earlier call left there; `Readback.dispatched` has the rows themselves. hidden_RD: in the
    order of the row tiles.
    dealt_tiles: row tiles that have tasks of their own; in a paired kernel as many as members of tile pairs.
    returned_NH: row (token, choice); of masked routes anything. before_PE, chosen_SK: before the capacity. With puts
    returned_NH is a copy: results lie line by line, by place in the send list.

    In the wire format "tokens" there is no returned_NH but results_RH, in the order of the row tiles; partial_NH, row
    (token, rank), what came back, zeros where nothing did; sent_PG: tokens from rank to rank, each counted once.
    """

    expert_SK: Tensor
    weight_SK: Tensor
    counts_PE: Tensor
    tokens_P: Tensor
    rows_RH: Tensor
    hidden_RD: Tensor
    returned_NH: Tensor | None
    row_tiles: int
    before_PE: Tensor
    chosen_SK: Tensor
    shared_SH: Tensor | None = None
    dealt_tiles: int = 0
    results_RH: Tensor | None = None
    partial_NH: Tensor | None = None
    sent_PG: Tensor | None = None


class Readback:
    """Reads what calls of one engine left behind, until the next call overwrites it."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.shape = memory, memory.shape
        self._ids: Tensor | None = None
        """Where the ids of calls of one S lie, int32 [S, K]."""

    def expert_ids(self, tokens: int) -> tuple[Tensor, Tensor]:
        """(what the last call's gate chose, the same without what the capacity dropped), int64 [S, K], -1 for none.

        Enqueued on the current stream, waits for nothing.
        """
        if self._ids is None or self._ids.shape[0] != tokens:
            flat = self.memory.local("expert")
            self._ids = flat[: tokens * self.shape.top_k].view(tokens, self.shape.top_k)
        ids_SK = self._ids.long()
        if not self.shape.drops:
            return ids_SK, ids_SK
        return torch.where(ids_SK < -1, dropped(ids_SK), ids_SK), ids_SK.clamp_min(-1)

    def stretches(self, quota_PX: np.ndarray) -> list[tuple[int, int, int]]:
        """(first row of the dispatch buffer, first hidden row, rows) of every stretch, in the order of the row tiles.

        quota_PX: rows of each source for each slot of this rank. Waits for the device (to know the side).
        """
        out, hidden = [], 0
        side, capacity = (self.memory.epoch - 1) & 1, self.shape.slot_capacity(self.memory.max_tokens)
        for slot in range(quota_PX.shape[1]):
            parts = quota_PX[:, slot].tolist() if self.shape.fixed else [int(quota_PX[:, slot].sum())]
            for source, rows in enumerate(parts):
                place = fixed_row(source, 0, side, slot, 0, self.shape.slots, capacity) if self.shape.fixed else hidden
                out.append((place, hidden, rows))
                hidden += ceil_div(rows, TILE_ROWS) * TILE_ROWS
        return out

    def dispatched(self, rows_RH: Tensor, where_N: Tensor, x_SH: Tensor) -> Tensor:
        """Rows `where_N` of the dispatch buffer as the last call's first products read them, [N, H]: a copy.

        rows_RH: `Buffers.rows_RH`. x_SH: this rank's tokens in that call, which its own rows are read from where the
        kernel gathers; in the wire format "tokens" followers are read from their leaders there.
        """
        shape = self.shape
        if not shape.gathers:
            return rows_RH[where_N]
        side = (self.memory.epoch - 1) & 1
        home_N = self.memory.symmetric("home").view(2, -1)[side][where_N]
        if shape.by_token:
            first = wire_flags(shape, self.memory.max_tokens)
            where_N = self.memory.symmetric("wire")[first:][: self.memory.rows][where_N].long()
        out_NH = rows_RH[where_N]
        own_N = home_N >> HOME_BITS == self.memory.heap.rank
        out_NH[own_N] = x_SH.detach()[(home_N[own_N] & ((1 << HOME_BITS) - 1)).long() // shape.top_k]
        return out_NH

    @property
    def sent_rows(self) -> int:
        """Rows that this rank's kernel stored into peers, over all calls (traced variants); waits for the device."""
        from moe_fast.kernel.signals import SENT_ROWS

        return int(self.memory.local("control")[SENT_ROWS])

    @property
    def put_rows(self) -> tuple[int, int]:
        """(rows, results) that this rank's kernel sent by put-with-signal, over all calls; waits for the device."""
        from moe_fast.kernel.signals import PUT_RESULTS, PUT_ROWS

        control = self.memory.local("control").tolist()
        return control[PUT_ROWS], control[PUT_RESULTS]

    def buffers(self, tokens: int) -> Buffers:
        """Views of what the last call of S = `tokens` left behind; waits for the device."""
        shape, dtype = self.shape, getattr(torch, self.shape.dtype)
        side = (self.memory.epoch - 1) & 1
        routes = tokens * shape.top_k
        symmetric, local = self.memory.symmetric, self.memory.local

        def half(name: str, kind: torch.dtype = torch.int32) -> Tensor:
            return symmetric(name, kind).view(2, -1)[side]

        # behind them, as they came
        counts = symmetric("counts", torch.int32)[: 2 * shape.ranks * shape.counts_stride]
        gathered = counts.view(2, shape.ranks, shape.counts_stride)[side]
        before = gathered[:, shape.experts + 2 :][:, : shape.experts] if shape.drops else gathered[:, : shape.experts]
        if shape.fixed:
            flat = symmetric("rows", dtype)
            rows = flat.view(-1, shape.row_pitch // shape.element_size)[:, : shape.hidden]
            where, twist = self._where(routes, side * self.memory.rows)
            block = self.shape.slot_capacity(self.memory.max_tokens)
            returned = self._from_lines(flat, block, shape.row_pitch, where, twist) if shape.put else rows[where]
        else:
            rows = half("rows", dtype).view(self.memory.rows, -1)[:, : shape.hidden]
            returned = None if shape.by_token else half("returned", dtype).view(-1, shape.hidden)[:routes]
            if shape.by_place:
                whole = half("returned", dtype)
                row_bytes, block = shape.hidden * shape.element_size, whole.numel() // shape.hidden
                returned = self._from_lines(whole, block, row_bytes, *self._where(routes, 0))
        plan = local("plan")
        more: dict[str, Any] = {"dealt_tiles": int(plan[PlanWord.ROW_TILES])}
        if shape.by_token:
            back = half("returned", dtype).view(shape.ranks - 1, -1, shape.hidden)[:, :tokens]
            more |= {
                "results_RH": symmetric("results", dtype).view(-1, shape.hidden),
                "partial_NH": self._partials(back),
                "sent_PG": self._sent_tokens(),
            }
        chosen_SK, expert_SK = self.expert_ids(tokens)
        return Buffers(
            expert_SK,
            local("weight", torch.float32)[:routes].view(tokens, shape.top_k),
            gathered[:, : shape.experts],
            gathered[:, shape.experts + 1],
            rows,
            local("hidden", dtype).view(-1, shape.intermediate),
            returned,
            int(plan[PlanWord.HELD_TILES if shape.paired else PlanWord.ROW_TILES]),
            before,
            chosen_SK,
            local("shared_rows", dtype).view(-1, shape.hidden)[:tokens] if shape.shared_intermediate else None,
            **more,
        )

    def _where(self, routes: int, first: int) -> tuple[Tensor, Tensor]:
        """Rows, from row `first` on, to which the results of this rank's routes have come back, 0 for masked ones; and
        with puts how the pieces of their lines lie, 0 to 7."""
        where = self.memory.local("where")[:routes].long()
        expert = self.memory.local("expert")[:routes]
        where, twist = torch.where(expert >= 0, where, 0), where % 8
        if self.shape.by_place:
            where, twist = where % (1 << HOME_BITS), where >> HOME_BITS
        return torch.where(expert >= 0, where + first, 0), twist

    def _from_lines(self, flat: Tensor, rows: int, pitch: int, where_N: Tensor, twist_N: Tensor) -> Tensor:
        """Rows `where_N` of a buffer whose blocks of `rows` times `pitch` bytes hold rows line by line of 128 bytes, as
        puts leave results: [N, H]. twist_N: 16-byte piece p of a row's lines lies at p ^ twist."""
        shape, count = self.shape, len(where_N)
        block = rows * pitch // shape.element_size
        lines = flat.view(-1, block)[:, : rows * shape.hidden].view(-1, shape.hidden // shape.line, rows, shape.line)
        found = lines[where_N // rows, :, where_N % rows]
        pieces = found.view(count, shape.hidden // shape.line, 8, 16 // shape.element_size)
        order = torch.arange(8, device=flat.device) ^ twist_N[:, None]
        order = order[:, None, :, None].expand_as(pieces)
        return pieces.gather(2, order).reshape(count, shape.hidden)

    def _partials(self, back_GSH: Tensor) -> Tensor:
        """Partial sums as the reference keeps them, [S * P, H], from what the other ranks stored."""
        own, tokens = self.memory.heap.rank, back_GSH.shape[1]
        where = self.memory.local("where")[: tokens * self.shape.top_k]
        out_SPH = back_GSH.new_zeros(tokens, self.shape.ranks, back_GSH.shape[2])
        for g in range(self.shape.ranks):
            if g != own:
                used_S = (where.view(tokens, self.shape.top_k) == -2 - g).any(dim=1)
                out_SPH[used_S, g] = back_GSH[g - (g > own), used_S]
        return out_SPH.view(-1, back_GSH.shape[2])

    def _sent_tokens(self) -> Tensor:
        """Tokens from every rank to every rank in the last call, int32 [P, P]."""
        ranks, rows = self.shape.ranks, self.memory.rows
        first = wire_flags(self.shape, self.memory.max_tokens) + rows
        flat = self.memory.symmetric("wire")
        return flat[first : first + ranks * ranks].view(ranks, ranks)
