"""The geometry of one call: which tiles there are, who sends which rows into them, and where results go home.

Everything here is a pure function of (routing of every rank, plan, layout), computed once per call with numpy. In the
kernel every rank derives its part from the gathered counts; the actors of the simulator therefore look at it only once
the counts of all ranks have arrived.

The unit of communication is a `Segment`: the rows that one source has in one row tile of one owner. They lie together
in the owner's heap and in the source's sending order, so a segment is one put on the way out and, per column tile of
GEMM1, one put on the way home.

Letters: S tokens of a rank, K choices per token, P ranks, X local expert slots, T tile rows, N routed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from moe_ref.balance.plan import Plan
from moe_ref.dispatch import send_order
from moe_ref.layout import CompactLayout, FixedLayout, align_up, ceil_div, fixed_row
from moe_ref.replicas import Placement
from moe_ref.runtime.encoding import side_of
from moe_ref.runtime.tasks import Combine, Dispatch, Gemm0, Gemm1, TileShape, check_fields


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows of one source in one row tile of one owner.

    Attributes:
        source, owner: home rank of the rows, and the rank that computes them.
        row_tile: counter index of the tile on the owner.
        first_row: heap row on the owner of the segment's first row (H apart).
        rows: how many.
        route_N: flat routes token * K + choice of its rows, in heap order; int64 [rows].
        token_tiles, token_rows: token tiles of the source that these rows belong to, ascending, and rows in each.
    """

    source: int
    owner: int
    row_tile: int
    first_row: int
    rows: int
    route_N: np.ndarray
    token_tiles: np.ndarray
    token_rows: np.ndarray


@dataclass(slots=True)
class RowTile:
    """One row tile of an owner: its expert, its rows, the segments that fill it (by source)."""

    index: int
    slot: int
    expert: int
    first_row: int
    rows: int = 0
    segments: list[Segment] = field(default_factory=list)


@dataclass
class CallPlan:
    """Geometry of one call on all ranks.

    Attributes:
        shape, layout: tile sizes; where rows live.
        tokens_P: S of each rank.
        early_dispatch: a source can send before it knows the others' counts (the paper's layout, one replica each).
        tiles: per owner {counter index: RowTile}, only tiles that have rows.
        outgoing: per source its segments in the order in which it puts them.
        choices: per rank int64 [token tiles]: routed (token, choice) pairs of each token tile.
        routing: per rank the logical expert of every (token, choice), int64 [S, K].
    """

    shape: TileShape
    layout: CompactLayout | FixedLayout
    tokens_P: tuple[int, ...]
    early_dispatch: bool
    tiles: list[dict[int, RowTile]]
    outgoing: list[list[Segment]]
    choices: list[np.ndarray]
    routing: list[np.ndarray]

    @property
    def ranks(self) -> int:
        return len(self.tokens_P)

    def token_tiles(self, rank: int) -> int:
        """Combine tasks of a rank: ceil(S / token_rows)"""
        return len(self.choices[rank])

    def total_tasks(self, rank: int) -> int:
        """GEMM0 + GEMM1 + Combine tasks of a rank: what its processors must have run before the call may end."""
        per_tile = self.shape.columns0 + self.shape.columns1
        return len(self.tiles[rank]) * per_tile + self.token_tiles(rank)

    @property
    def all_tasks(self) -> int:
        """Tasks of all ranks, Dispatch included."""
        return sum(self.total_tasks(r) for r in range(self.ranks)) + sum(len(o) for o in self.outgoing)

    @property
    def row_counters(self) -> int:
        """Row tile counters that a rank needs, the largest index + 1 of any rank."""
        return max((max(t, default=-1) for t in self.tiles), default=-1) + 1

    def rows_PG(self) -> np.ndarray:
        """Rows from rank to rank, int64 [P, P]."""
        return self.layout.quota_PGX.sum(axis=2)

    def slot_tiles(self) -> np.ndarray:
        """Row tiles of each expert slot, int64 [P, X]."""
        counts = np.zeros((self.ranks, self.layout.slots), dtype=np.int64)
        for rank, tiles in enumerate(self.tiles):
            for tile in tiles.values():
                counts[rank, tile.slot] += 1
        return counts

    def remote_rows(self) -> int:
        """Routed rows that cross a link on the way out (the same number crosses on the way home)."""
        return sum(s.rows for out in self.outgoing for s in out if s.owner != s.source)

    def dispatch_tasks(self, rank: int) -> list[Dispatch]:
        """Descriptors of a source's puts, in order."""
        return [Dispatch(s.source, s.owner, s.row_tile, s.rows, self.ranks) for s in self.outgoing[rank]]

    def gemm0_task(self, rank: int, row_tile: int, column: int) -> Gemm0:
        """Descriptor of one GEMM0 task."""
        tile = self.tiles[rank][row_tile]
        return Gemm0(tile.slot, row_tile, column, tile.rows)

    def gemm1_task(self, rank: int, row_tile: int, column: int) -> Gemm1:
        """Descriptor of one GEMM1 task."""
        tile = self.tiles[rank][row_tile]
        remote = sum(s.rows for s in tile.segments if s.source != rank)
        return Gemm1(tile.slot, row_tile, column, tile.rows, self.shape.columns0, remote)

    def combine_task(self, rank: int, token_tile: int) -> Combine:
        """Descriptor of one Combine task."""
        size = self.shape.token_rows
        tokens = min(size, self.tokens_P[rank] - token_tile * size)
        return Combine(token_tile, tokens, int(self.choices[rank][token_tile]), self.shape.columns1)

    def tasks(self, rank: int) -> list[Dispatch | Gemm0 | Gemm1 | Combine]:
        """Every task of a rank, Dispatch included, each once."""
        out: list[Dispatch | Gemm0 | Gemm1 | Combine] = list(self.dispatch_tasks(rank))
        for index in sorted(self.tiles[rank]):
            out += [self.gemm0_task(rank, index, c) for c in range(self.shape.columns0)]
            out += [self.gemm1_task(rank, index, c) for c in range(self.shape.columns1)]
        return out + [self.combine_task(rank, t) for t in range(self.token_tiles(rank))]


def count_experts(expert_SK: np.ndarray, experts: int) -> np.ndarray:
    """Rows of one rank for each expert, masked routes (-1) left out; int64 [E]."""
    flat = expert_SK.ravel()
    return np.bincount(flat[flat >= 0], minlength=experts).astype(np.int64)


def make_call(
    expert_SK: Sequence[np.ndarray],
    placement: Placement,
    shape: TileShape,
    plan: Plan | None = None,
    capacity: int | None = None,
    epoch: int = 0,
    early_dispatch: bool = True,
) -> CallPlan:
    """Geometry of a call.

    Args:
        expert_SK: per rank the logical expert of every (token, choice), int64 [S, K], -1 masked; S may differ and be 0.
        placement: replica sets.
        shape: tile sizes.
        plan: quotas where experts have replicas; None is plain expert parallelism.
        capacity: None is the compact layout; otherwise slots per (source, local expert) of the paper's layout.
        epoch: number of the call; decides the staging side.
        early_dispatch: with a capacity and one replica each, send rows before the counts of other ranks are known.

    Raises:
        ValueError: routing and placement disagree, or rows exceed the capacity; the message names what.
    """
    ranks = placement.num_ranks
    if len(expert_SK) != ranks:
        raise ValueError(f"routing of {len(expert_SK)} ranks was given, the placement has {ranks}")
    for rank, ids in enumerate(expert_SK):
        if ids.ndim != 2 or ids.shape[1] != shape.top_k:
            raise ValueError(f"routing of rank {rank} has shape {list(ids.shape)}, expected [S, {shape.top_k}]")
        if ids.size and (int(ids.min()) < -1 or int(ids.max()) >= placement.num_experts):
            raise ValueError(f"routing of rank {rank} names an expert outside [-1, {placement.num_experts})")
    if plan is None:
        plan = Plan.plain(np.stack([count_experts(ids, placement.num_experts) for ids in expert_SK]), placement)

    tile_rows = shape.tile_rows
    if capacity is None:
        layout: CompactLayout | FixedLayout = CompactLayout.from_plan(plan, tile_rows)
        first_PGX = (layout.tile_start_GX * tile_rows)[None] + layout.rows_before_PGX
        origin_PGX = np.zeros_like(first_PGX)
        counter_PGX = np.zeros_like(first_PGX)
    else:
        layout = FixedLayout.from_plan(plan, align_up(capacity, tile_rows), side_of(epoch))
        p, x = np.arange(ranks)[:, None, None], np.arange(placement.slots)[None, None, :]
        row = fixed_row(p, 0, layout.side, x, 0, placement.slots, layout.capacity)
        first_PGX = np.broadcast_to(row, layout.quota_PGX.shape)
        # A tile belongs to one (source, slot); its counter index needs no knowledge of other sources.
        origin_PGX = first_PGX
        counter_PGX = np.broadcast_to(
            (p * placement.slots + x) * (layout.capacity // tile_rows), layout.quota_PGX.shape
        )

    choices = [_choices(ids, shape) for ids in expert_SK]
    tiles: list[dict[int, RowTile]] = [{} for _ in range(ranks)]
    outgoing = []
    for source in range(ranks):
        quota_GX = layout.quota_PGX[source]
        peers, slots = np.nonzero(quota_GX)
        cuts = _cut(
            peers, slots, quota_GX[peers, slots], first_PGX[source][peers, slots], origin_PGX[source][peers, slots],
            counter_PGX[source][peers, slots], tile_rows,
        )  # fmt: skip
        segments = _segments(source, cuts, send_order(torch.from_numpy(expert_SK[source]), plan, source), shape)
        slot_of = cuts[1]
        for segment, slot in zip(segments, slot_of.tolist(), strict=True):
            owned = tiles[segment.owner]
            tile = owned.get(segment.row_tile)
            if tile is None:
                expert = placement.experts_of_rank[segment.owner][slot]
                start = segment.first_row - (segment.first_row % tile_rows)
                tile = owned[segment.row_tile] = RowTile(segment.row_tile, slot, expert, start)
            tile.segments.append(segment)
            tile.rows += segment.rows
        outgoing.append(_sending_order(source, segments, ranks))
    check_fields(max(placement.slots, ranks), max((max(t, default=0) for t in tiles), default=0) + 1, shape.columns0)
    check_fields(1, max(map(len, choices)), shape.columns1)
    early = early_dispatch and capacity is not None and placement.max_replicas == 1
    return CallPlan(shape, layout, tuple(len(i) for i in expert_SK), early, tiles, outgoing, choices, list(expert_SK))


def _choices(expert_SK: np.ndarray, shape: TileShape) -> np.ndarray:
    """Routed (token, choice) pairs per token tile."""
    valid_S = (expert_SK >= 0).sum(axis=1)
    starts = np.arange(0, len(valid_S), shape.token_rows)
    return np.add.reduceat(valid_S, starts) if len(starts) else np.zeros(0, dtype=np.int64)


def _cut(peers, slots, rows, first, origin, counter, tile_rows: int) -> tuple[np.ndarray, ...]:
    """Cut each run of rows at tile borders: arrays (peer, slot, row tile, first heap row, rows), in sending order."""
    low = (first - origin) // tile_rows
    pieces = ceil_div(first - origin + rows, tile_rows) - low
    run = np.repeat(np.arange(len(rows)), pieces)
    piece = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    tile = low[run] + piece
    start = np.maximum(first[run] - origin[run], tile * tile_rows)
    stop = np.minimum((first + rows - origin)[run], (tile + 1) * tile_rows)
    return peers[run], slots[run], counter[run] + tile, origin[run] + start, stop - start


def _segments(source: int, cuts: tuple[np.ndarray, ...], route_N: np.ndarray, shape: TileShape) -> list[Segment]:
    """Segments of one source; its routes come in the same order as the cuts, so they are consecutive slices."""
    peers, _, row_tiles, first_rows, rows = cuts
    ends = np.cumsum(rows)
    segment_N = np.repeat(np.arange(len(rows)), rows)
    token_tile_N = route_N // (shape.top_k * shape.token_rows)
    # Routes of a segment are in token order, so equal (segment, token tile) pairs stand together.
    border = np.flatnonzero((np.diff(segment_N, prepend=-1) != 0) | (np.diff(token_tile_N, prepend=-1) != 0))
    run_rows = np.diff(np.append(border, len(route_N)))
    run_tiles = token_tile_N[border]
    run_ends = np.searchsorted(border, ends)
    out = []
    row_start = run_start = 0
    columns = (peers, row_tiles, first_rows, rows, ends, run_ends)
    for peer, tile, first, count, end, run_end in zip(*(c.tolist() for c in columns), strict=True):
        tiles, per_tile = run_tiles[run_start:run_end], run_rows[run_start:run_end]
        out.append(Segment(source, peer, tile, first, count, route_N[row_start:end], tiles, per_tile))
        row_start, run_start = end, run_end
    return out


def _sending_order(source: int, segments: list[Segment], ranks: int) -> list[Segment]:
    """Round robin over owners, the source itself first: all owners get their first rows early, no link is crowded."""
    position = [0] * ranks
    keyed = []
    for segment in segments:
        keyed.append((position[segment.owner], (segment.owner - source) % ranks, segment))
        position[segment.owner] += 1
    keyed.sort(key=lambda item: item[:2])
    return [segment for _, _, segment in keyed]
