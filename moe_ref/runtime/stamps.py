"""Stamps instead of tensors: every cell of memory knows which call wrote it and whether it was read.

The checker's `Data`. A row is an integer in a small ring, an expert an affine map, a sum over choices depends on its
order: enough that a wrong, stale or missing operand shows, and small enough for hundreds of thousands of states. Every
read is checked against the call it is for, every write against what it would destroy, every result against a direct
evaluation that knows nothing of tiles or messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_ref.runtime import encoding as enc
from moe_ref.runtime.callplan import CallPlan, Segment
from moe_ref.runtime.messages import CountsPut, Data, ProtocolViolation, Put, RowsPut, destination

MODULUS = 1_000_003


def row_value(epoch: int, rank: int, token: int) -> int:
    """The "hidden state" of a token in a call."""
    return (epoch * 7919 + rank * 104_729 + token * 31 + 17) % MODULUS


def hidden_value(row: int, expert: int, column: int) -> int:
    """GEMM0: one column tile of the hidden activations of a row."""
    return (row * (2 * expert + 3) + 1000 * column + expert) % MODULUS


def result_value(hidden: Sequence[int], expert: int, column: int) -> int:
    """GEMM1: one column tile of an expert's output, from all column tiles of the hidden row."""
    return sum(h * (expert + 5 + i) for i, h in enumerate(hidden)) * (column + 2) % MODULUS


def combined(results: Sequence[int]) -> int:
    """Combine: a fold that depends on the order of the choices."""
    total = 0
    for result in results:
        total = (total * 31 + result) % MODULUS
    return total


class _Cells:
    """Cells of a buffer: (call that wrote it, value) and how often it must still be read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: dict[Any, tuple[int, int, int]] = {}

    def write(self, key: Any, epoch: int, value: int, reads: int) -> None:
        """Raise ProtocolViolation if what stands there has not been read as often as it must be."""
        old = self.held.get(key)
        if old is not None and old[2] > 0:
            raise ProtocolViolation(
                "overwritten", f"{self.name} {key} of call {old[0]} was overwritten by call {epoch} before it was read"
            )
        self.held[key] = (epoch, value, reads)

    def read(self, key: Any, epoch: int) -> int:
        """Raise ProtocolViolation if nothing was written, or by another call than the reader's."""
        found = self.held.get(key)
        if found is None:
            raise ProtocolViolation("unwritten", f"{self.name} {key} was read in call {epoch} before it was written")
        if found[0] != epoch:
            raise ProtocolViolation("stale", f"{self.name} {key} was read in call {epoch}, but holds call {found[0]}'s")
        self.held[key] = (found[0], found[1], found[2] - 1)
        return found[1]


class _RankCells:
    """Buffers of one rank, and the tasks of the running call that it has run (a bit each)."""

    def __init__(self) -> None:
        self.counts, self.rows = _Cells("counts cell"), _Cells("dispatch row")
        self.hidden, self.results = _Cells("hidden tile"), _Cells("result cell")
        self.ran = 0

    def freeze(self) -> tuple:
        buffers = (self.counts, self.rows, self.hidden, self.results)
        return (self.ran, *(tuple(sorted(b.held.items())) for b in buffers))

    def thaw(self, state: tuple) -> None:
        self.ran = state[0]
        for buffer, items in zip((self.counts, self.rows, self.hidden, self.results), state[1:], strict=True):
            buffer.held = dict(items)


class Stamps(Data):
    """Data of the checker.

    Args:
        calls: geometry of the calls; sides, row_sides: see Rules.
    """

    def __init__(self, calls: Sequence[CallPlan], sides: int, row_sides: int) -> None:
        self.calls, self.sides, self.row_sides = calls, sides, row_sides
        self.cells = [_RankCells() for _ in range(calls[0].ranks)]
        self.bits = [
            [{task.word: 1 << i for i, task in enumerate(call.tasks(rank))} for rank in range(call.ranks)]
            for call in calls
        ]
        self.expected = [[self._direct(call, e, rank) for rank in range(call.ranks)] for e, call in enumerate(calls)]

    def _direct(self, call: CallPlan, epoch: int, rank: int) -> list[int]:
        """Results of a rank's tokens without tiles and messages: from who computes which route, in choice order."""
        expert_of = {
            int(route): tile.expert
            for tiles in call.tiles
            for tile in tiles.values()
            for segment in tile.segments
            if segment.source == rank
            for route in segment.route_N
        }
        out = []
        for token in range(call.tokens_P[rank]):
            row, results = row_value(epoch, rank, token), []
            for route in range(token * call.shape.top_k, (token + 1) * call.shape.top_k):
                if route in expert_of:
                    e = expert_of[route]
                    hidden = [hidden_value(row, e, c) for c in range(call.shape.columns0)]
                    results += [result_value(hidden, e, c) for c in range(call.shape.columns1)]
            out.append(combined(results))
        return out

    def _ran(self, rank: int, epoch: int, word: int) -> None:
        bit, cells = self.bits[epoch][rank][word], self.cells[rank]
        if cells.ran & bit:
            raise ProtocolViolation("task", f"rank {rank} ran task {_name(word)} of call {epoch} twice")
        cells.ran |= bit

    def end_call(self, rank: int, epoch: int) -> None:
        """Raise ProtocolViolation unless every task of the call has run once."""
        cells = self.cells[rank]
        missing = [word for word, bit in self.bits[epoch][rank].items() if not cells.ran & bit]
        if missing:
            raise ProtocolViolation("task", f"rank {rank} ended call {epoch} without task {_name(missing[0])}")
        cells.ran = 0

    # --- Data ------------------------------------------------------------------------------------------------------

    def counts_payload(self, epoch: int, source: int) -> int:
        return epoch

    def rows_payload(self, epoch: int, segment: Segment) -> tuple[int, ...]:
        self._ran(segment.source, epoch, enc.pack_task(enc.DISPATCH, segment.owner, segment.row_tile, 0))
        top_k = self.calls[epoch].shape.top_k
        return tuple(row_value(epoch, segment.source, int(route) // top_k) for route in segment.route_N)

    def land(self, put: Put) -> None:
        cells, side, shape = self.cells[destination(put)], put.epoch % self.row_sides, self.calls[put.epoch].shape
        if isinstance(put, CountsPut):
            cells.counts.write((put.epoch % self.sides, put.source), put.epoch, put.data, 1)
        elif isinstance(put, RowsPut):
            for i, value in enumerate(put.data):
                cells.rows.write((side, put.segment.first_row + i), put.epoch, value, shape.columns0)
        else:
            for route, value in zip(put.segment.route_N.tolist(), put.data, strict=True):
                cells.results.write((side, route, put.column), put.epoch, value, 1)

    def read_counts(self, rank: int, epoch: int) -> None:
        for source in range(self.calls[epoch].ranks):
            self.cells[rank].counts.read((epoch % self.sides, source), epoch)

    def gemm0(self, rank: int, epoch: int, row_tile: int, column: int) -> None:
        call, cells = self.calls[epoch], self.cells[rank]
        tile = call.tiles[rank][row_tile]
        self._ran(rank, epoch, enc.pack_task(enc.GEMM0, tile.slot, row_tile, column))
        for segment in tile.segments:
            for row in range(segment.first_row, segment.first_row + segment.rows):
                value = hidden_value(cells.rows.read((epoch % self.row_sides, row), epoch), tile.expert, column)
                cells.hidden.write((row_tile, column, row), epoch, value, call.shape.columns1)

    def gemm1(self, rank: int, epoch: int, row_tile: int, column: int) -> list[tuple[int, ...]]:
        call, cells = self.calls[epoch], self.cells[rank]
        tile = call.tiles[rank][row_tile]
        self._ran(rank, epoch, enc.pack_task(enc.GEMM1, tile.slot, row_tile, column))
        out = []
        for segment in tile.segments:
            values = []
            for row in range(segment.first_row, segment.first_row + segment.rows):
                hidden = [cells.hidden.read((row_tile, c, row), epoch) for c in range(call.shape.columns0)]
                values.append(result_value(hidden, tile.expert, column))
            out.append(tuple(values))
        return out

    def combine(self, rank: int, epoch: int, token_tile: int) -> None:
        call, cells = self.calls[epoch], self.cells[rank]
        self._ran(rank, epoch, enc.pack_task(enc.COMBINE, 0, token_tile, 0))
        shape, size = call.shape, call.shape.token_rows
        routed = {int(r) for segment in call.outgoing[rank] for r in segment.route_N}
        for token in range(token_tile * size, min((token_tile + 1) * size, call.tokens_P[rank])):
            results = [
                cells.results.read((epoch % self.row_sides, route, column), epoch)
                for route in range(token * shape.top_k, (token + 1) * shape.top_k)
                if route in routed
                for column in range(shape.columns1)
            ]
            if combined(results) != self.expected[epoch][rank][token]:
                raise ProtocolViolation("result", f"token {token} of rank {rank} is wrong in call {epoch}")


def _name(word: int) -> str:
    kind = enc.KIND_NAMES[enc.task_kind(word)]
    return f"{kind}(tile {enc.task_row_tile(word)}, column {enc.task_column_tile(word)})"
