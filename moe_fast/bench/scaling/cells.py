"""What a scaling run measures on P ranks: its cells, their kernels, and the symmetric memory that they need.

A cell is one line of one figure and is measured at once; its key says which, the same in every run. Cells that
something was aimed at come first, so that a run that is cut short has them; beside each other stand cells that share a
layer, which is then set up once.

Letters: S tokens of a rank, E experts, K choices, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moe_fast.bench import balanced
from moe_fast.bench.layers import layer_config
from moe_fast.kernel.limits import unsupported
from moe_fast.kernel.regions import heap_regions
from moe_fast.kernel.shapes import KernelShape
from moe_ref.config import MoEConfig
from moe_ref.placement import Placement
from moe_ref.train.balancing import make_placement
from moe_ref.train.job import TrainJob

FIGURES = ("latency", "wire", "timeline", "costs", "balance", "training")
"""latency: fused, floor and both chains at one S. wire: both wire formats. timeline: utilisation. costs: GPU operations
and bytes. balance: replicas against plain placement at one skew. training: step time of a small GPT-MoE."""
SIZES = (1024, 2048, 4096, 8192, 16384)
MOST = 16384
BALANCED_LAYER, BALANCED_TOKENS = "paper-e32", 8192
SKEWS = (0.0, 0.5, 1.0, 1.5, 2.0)
AIMED = {
    ("latency", "paper-e128", "bfloat16", MOST), ("latency", "paper-e8", "bfloat16", MOST),
    ("latency", "paper-e32", "bfloat16", MOST), ("latency", "qwen3", "bfloat16", 8192),
    ("wire", "qwen3", "bfloat16", 8192),
}  # fmt: skip
"""(figure, layer, dtype, S) of the cells that `report.aims` looks at, beside all of "balance"."""
SPARE_BYTES = 1 << 30
"""Of NVSHMEM's heap beyond what the largest cell takes: heaps that come and go leave holes."""


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        figure: one of FIGURES. layer: a name for `layer_config`; of training the balancing.
        tokens: S. dtype: of the layer; of training the backend. skew: Zipf exponent, of balance.
        most: the largest S of the cells that share this one's layer; buffers are made for it.
    """

    figure: str
    layer: str
    tokens: int = 0
    dtype: str = "bfloat16"
    skew: float = 0.0
    most: int = 0

    @property
    def key(self) -> str:
        """What a result file knows the cell by."""
        if self.figure == "balance":
            return f"balance {self.layer} S={self.tokens} zipf={self.skew:g}"
        if self.figure == "training":
            return f"training {self.dtype} {self.layer}"
        return f"{self.figure} {self.layer} {self.dtype} S={self.tokens}"

    @property
    def config(self) -> MoEConfig:
        """Its layer, with the buffers' sizes."""
        return layer_config(self.layer).replace(dtype=self.dtype, max_tokens=self.most or self.tokens)

    @property
    def aimed(self) -> bool:
        """Whether something was aimed at, on 8 ranks."""
        return self.figure == "balance" or (self.figure, self.layer, self.dtype, self.tokens) in AIMED


@dataclass(frozen=True)
class Planned:
    """Cells in the order in which they are measured, and (key, why) of those that so many ranks can't run."""

    cells: tuple[Cell, ...]
    left_out: tuple[tuple[str, str], ...]


def training_job(ranks: int, balancing: str, backend: str, steps: int) -> TrainJob:
    """A small GPT-MoE: four MoE blocks of 32 experts, two replicas of each, 2048 tokens of a rank in a step."""
    return TrainJob(
        steps=steps, sequences=8 * ranks, context=256, hidden=512, intermediate=512, experts=32, blocks=5,
        replicas=balanced.REPLICAS, balancing=balancing, interval=0, learning_rate=1e-3, balance=0.0, z=0.0,
        backend=backend, dtype="bfloat16",
    )  # fmt: skip


def every_cell(quick: bool) -> list[Cell]:
    """All cells, whatever the number of ranks."""
    sizes, most = ((1024, 4096), 4096) if quick else (SIZES, MOST)
    cells = [Cell("latency", f"paper-e{e}", s) for e in (8, 32, 128) for s in sizes]
    cells += [Cell("latency", f"paper-e{e}", most) for e in (16, 64)]
    cells += [Cell("latency", "paper-e32", s, "float32") for s in sizes]
    cells += [Cell("latency", f"paper-e{e}", most, "float32") for e in (8, 16, 64, 128)]
    real = {"qwen3": (1024, 8192) if quick else (1024, 4096, 8192, MOST), "mixtral": (1024, 4096, 8192)}
    for figure in ("latency", "wire"):
        cells += [Cell(figure, name, s) for name, several in real.items() for s in several]
    cells += [Cell("timeline", name, s) for name, s in (("paper-e8", most), ("paper-e128", most), ("qwen3", 8192))]
    costs = (("paper-e8", "bfloat16"), ("paper-e128", "bfloat16"), ("paper-e32", "float32"), ("qwen3", "bfloat16"))
    cells += [Cell("costs", name, most, dtype) for name, dtype in costs] + [Cell("costs", "mixtral", 4096)]
    skews = (0.0, 1.0) if quick else SKEWS
    cells += [Cell("balance", BALANCED_LAYER, BALANCED_TOKENS, skew=skew) for skew in skews]
    modes = (("unfused", "plain"), ("unfused", "scheduled"), ("fused", "plain"), ("fused", "scheduled"))
    return cells + [Cell("training", mode, dtype=backend) for backend, mode in modes]


def plan(ranks: int, quick: bool = False, figures: Iterable[str] = FIGURES) -> Planned:
    """The cells of a run on `ranks` ranks.

    >>> len(plan(8).cells)
    57
    """
    cells, left_out = [], []
    for cell in every_cell(quick):
        if cell.figure not in figures:
            continue
        why = _cannot(cell, ranks)
        if why is None:
            cells.append(cell)
        else:
            left_out.append((cell.key, why))
    largest: dict[tuple[str, str, str], int] = {}
    for cell in cells:
        shared = (cell.figure, cell.layer, cell.dtype)
        largest[shared] = max(largest.get(shared, 0), cell.tokens)
    sized = [_sized(cell, largest[cell.figure, cell.layer, cell.dtype]) for cell in cells]
    return Planned(tuple(sorted(sized, key=lambda cell: not cell.aimed)), tuple(left_out))


def _sized(cell: Cell, most: int) -> Cell:
    """Only latency cells share a layer that is set up; the others have buffers of their own."""
    return Cell(
        cell.figure, cell.layer, cell.tokens, cell.dtype, cell.skew, most if cell.figure == "latency" else cell.tokens
    )


def _cannot(cell: Cell, ranks: int) -> str | None:
    """Why so many ranks can't run a cell; None if they can."""
    if cell.figure == "training":
        return balanced.cannot(training_job(max(ranks, 2), cell.layer, "ref", 1).model.moe, ranks)
    if cell.figure == "wire" and ranks == 1:
        return "one rank sends nothing: both formats are the same"
    if cell.figure == "balance" and (why := balanced.cannot(cell.config, ranks)):
        return why
    return "; ".join(unsupported(cell.config, ranks)) or None


def kernels(cell: Cell, ranks: int, scheduler: str = "spare_warps") -> list[list[KernelShape]]:
    """Kernels of a cell; each inner list holds those whose buffers are open at one time."""

    def shape(config: MoEConfig, trace: bool = False, placement: Placement | None = None) -> KernelShape:
        return KernelShape.from_config(config, ranks, scheduler, trace, placement=placement)

    if cell.figure == "training":
        if cell.dtype != "fused":
            return []
        config = training_job(ranks, cell.layer, "ref", 1).model.moe
        return [[shape(config, placement=make_placement(cell.layer, ranks, config.experts, balanced.REPLICAS))]]
    if cell.figure == "wire":
        return [[shape(cell.config.replace(wire_format=name)) for name in ("routes", "tokens")]]
    if cell.figure == "timeline":
        return [[shape(cell.config, trace=True)]]
    if cell.figure == "balance":
        places = balanced.placements(cell.config, ranks, cell.skew).values()
        return [[shape(cell.config, placement=p) for p in places]] + [
            [shape(cell.config, True, placement)] for placement in places
        ]
    return [[shape(cell.config)]]


def shapes(planned: Planned, ranks: int, scheduler: str = "spare_warps") -> list[KernelShape]:
    """Every kernel of these cells once, for compiling ahead of time."""
    every = (shape for cell in planned.cells for group in kernels(cell, ranks, scheduler) for shape in group)
    return list(dict.fromkeys(every))


def symmetric_bytes(planned: Planned, ranks: int) -> int:
    """Size of NVSHMEM's heap, which is fixed when it starts: what the largest cell has open at one time, and
    SPARE_BYTES."""
    most = 0
    for cell in planned.cells:
        tokens = cell.most or cell.tokens
        if cell.figure == "training":
            tokens = training_job(ranks, cell.layer, "ref", 1).model.moe.max_tokens
        for group in kernels(cell, ranks):
            most = max(most, sum(heap_regions(shape, tokens)[1] for shape in group))
    return most + SPARE_BYTES
