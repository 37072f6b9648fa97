"""Task descriptors of the actor runtime.

FlashMoE (section 3, "task abstraction") describes all work of a distributed MoE layer by one descriptor: which
operator, which tile, which operands. Here a descriptor is one of four dataclasses

    Dispatch  put the rows of one source for one row tile into the owner's heap       (implicit in the paper)
    Gemm0     hidden tile = act(rows @ W1)                                            (one row tile x one column tile)
    Gemm1     result tile = hidden @ W2, put back to the rows' home ranks             (one row tile x one column tile)
    Combine   y rows of one token tile = sum over k of weight * result, in k order    (home rank)

each with the counter that releases it (`dependency`), what it costs (`cost`) and one packed integer (`word`, see
`moe_ref.runtime.encoding`, whose functions the megakernel shares).

Letters: S tokens of a rank, H hidden, D intermediate, K choices per token, P ranks, X local expert slots, T tile rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moe_ref.layout import ceil_div
from moe_ref.runtime.encoding import (
    COLUMN_BITS,
    COMBINE,
    DISPATCH,
    GEMM0,
    GEMM1,
    ROW_BITS,
    SLOT_BITS,
    pack_task,
)

if TYPE_CHECKING:
    from moe_ref.config import MoEConfig

CounterName = Literal["counts", "arrived", "gemm0_done", "returned"]
"""Counters by name. counts: peers whose counts row is here. arrived[row tile]: rows. gemm0_done[row tile]: finished
column tiles. returned[token tile]: result rows times column tiles of GEMM1."""


@dataclass(frozen=True)
class TileShape:
    """Sizes that decide the tiles of a layer.

    Attributes:
        hidden, intermediate, top_k: H, D, K.
        gated: a GEMM0 column tile holds gate and up columns interleaved, so tile_columns / 2 hidden columns.
        tile_rows: T, rows of a GEMM tile. tile_columns: weight columns of a GEMM tile.
        token_rows: tokens of a Combine tile. element_size: bytes of an element in memory and on the wire.
    """

    hidden: int
    intermediate: int
    top_k: int
    gated: bool = False
    tile_rows: int = 128
    tile_columns: int = 256
    token_rows: int = 128
    element_size: int = 2

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "top_k", "tile_rows", "tile_columns", "token_rows", "element_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.gated and self.tile_columns % 2:
            raise ValueError(f"tile_columns is {self.tile_columns}; a gated tile needs an even number of columns")

    @classmethod
    def from_config(cls, config: MoEConfig, tile_columns: int = 256, token_rows: int | None = None) -> TileShape:
        """Shape of a configured layer; the row tile is the layer's, Combine tiles have as many tokens by default."""
        return cls(
            config.hidden, config.intermediate, config.top_k, config.gated, config.tile_rows, tile_columns,
            token_rows or config.tile_rows, config.element_size,
        )  # fmt: skip

    @property
    def up_columns(self) -> int:
        """2 D if gated else D"""
        return 2 * self.intermediate if self.gated else self.intermediate

    @property
    def hidden_columns(self) -> int:
        """Hidden activations that one GEMM0 column tile makes: tile_columns, half of it if gated."""
        return self.tile_columns // 2 if self.gated else self.tile_columns

    @property
    def columns0(self) -> int:
        """Column tiles of GEMM0: ceil(D / hidden_columns)"""
        return ceil_div(self.intermediate, self.hidden_columns)

    @property
    def columns1(self) -> int:
        """Column tiles of GEMM1: ceil(H / tile_columns)"""
        return ceil_div(self.hidden, self.tile_columns)

    def result_columns(self, column: int) -> int:
        """Columns of result tile `column`: tile_columns, fewer in the last one if it doesn't divide H."""
        return min(self.tile_columns, self.hidden - column * self.tile_columns)

    @property
    def row_bytes(self) -> int:
        """H * element_size"""
        return self.hidden * self.element_size


@dataclass(frozen=True)
class Dependency:
    """A counter of the rank that runs the task, and how much of it this call must have brought."""

    counter: CounterName
    index: int
    expected: int


@dataclass(frozen=True)
class Cost:
    """What a task asks of the machine: floating-point operations (padding rows included, as a tile computes them),
    bytes through the GPU's own memory, bytes over a link to another rank."""

    flops: int = 0
    memory_bytes: int = 0
    wire_bytes: int = 0


@dataclass(frozen=True)
class Dispatch:
    """Rows of one source rank for one row tile of one owner: one put, one signal.

    Attributes: source, peer (the owner), row_tile (on the peer), rows, ranks (P, for the dependency).
    """

    source: int
    peer: int
    row_tile: int
    rows: int
    ranks: int

    @property
    def dependency(self) -> Dependency:
        """In the compact layout an offset is known when the counts of all ranks are."""
        return Dependency("counts", 0, self.ranks)

    def cost(self, shape: TileShape) -> Cost:
        """Every row is read once; it crosses a link once, or is written to the rank's own memory."""
        payload = self.rows * shape.row_bytes
        if self.peer == self.source:
            return Cost(memory_bytes=2 * payload)
        return Cost(memory_bytes=payload, wire_bytes=payload)

    @property
    def word(self) -> int:
        return pack_task(DISPATCH, self.peer, self.row_tile, 0)


@dataclass(frozen=True)
class Gemm0:
    """hidden[row tile, column tile] = act(rows @ W1 of the slot). Attributes: slot, row_tile, column_tile, rows."""

    slot: int
    row_tile: int
    column_tile: int
    rows: int

    @property
    def dependency(self) -> Dependency:
        """All rows of the tile are here."""
        return Dependency("arrived", self.row_tile, self.rows)

    def cost(self, shape: TileShape) -> Cost:
        """2 T H tile_columns operations; the rows, a slab of weights and the hidden tile move."""
        element = shape.element_size
        moved = (shape.tile_rows + shape.tile_columns) * shape.hidden + shape.tile_rows * shape.hidden_columns
        return Cost(2 * shape.tile_rows * shape.hidden * shape.tile_columns, moved * element)

    @property
    def word(self) -> int:
        return pack_task(GEMM0, self.slot, self.row_tile, self.column_tile)


@dataclass(frozen=True)
class Gemm1:
    """result[row tile, column tile] = hidden @ W2 of the slot, put to the home ranks of its rows.

    Attributes: slot, row_tile, column_tile, rows, columns0 (for the dependency), remote_rows (home elsewhere).
    """

    slot: int
    row_tile: int
    column_tile: int
    rows: int
    columns0: int
    remote_rows: int = 0

    @property
    def dependency(self) -> Dependency:
        """All column tiles of the hidden row tile are finished."""
        return Dependency("gemm0_done", self.row_tile, self.columns0)

    def cost(self, shape: TileShape) -> Cost:
        """2 T D tile_columns operations; only routed rows are put back, padding stays."""
        element, columns = shape.element_size, shape.result_columns(self.column_tile)
        moved = (shape.tile_rows + shape.tile_columns) * shape.intermediate + (self.rows - self.remote_rows) * columns
        wire = self.remote_rows * columns * element
        return Cost(2 * shape.tile_rows * shape.intermediate * shape.tile_columns, moved * element, wire)

    @property
    def word(self) -> int:
        return pack_task(GEMM1, self.slot, self.row_tile, self.column_tile)


@dataclass(frozen=True)
class Combine:
    """y of one token tile. Attributes: token_tile, tokens, choices (routed (token, k) pairs of the tile), columns1."""

    token_tile: int
    tokens: int
    choices: int
    columns1: int

    @property
    def dependency(self) -> Dependency:
        """Every column tile of every result row of these tokens is back."""
        return Dependency("returned", self.token_tile, self.choices * self.columns1)

    def cost(self, shape: TileShape) -> Cost:
        """One multiply-add per choice and column; results in, y out."""
        return Cost(2 * self.choices * shape.hidden, (self.choices + self.tokens) * shape.row_bytes)

    @property
    def word(self) -> int:
        return pack_task(COMBINE, 0, self.token_tile, 0)


Task = Dispatch | Gemm0 | Gemm1 | Combine


def check_fields(slots: int, row_tiles: int, column_tiles: int) -> None:
    """Raise ValueError if a layer has more slots (or ranks), row tiles or column tiles than a task word can name."""
    for name, value, bits, remedy in (
        ("expert slots or ranks", slots, SLOT_BITS, "spread the experts over more ranks"),
        ("row tiles", row_tiles, ROW_BITS, "use larger tiles"),
        ("column tiles", column_tiles, COLUMN_BITS, "use larger tiles"),
    ):
        if value > 1 << bits:
            raise ValueError(f"{value} {name}, but a task word can name at most {1 << bits}; {remedy}")
