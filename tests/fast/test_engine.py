"""What the megakernel's host side refuses before it launches anything, and how it reads what a call left behind."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_fast.backend import FusedBackend
from moe_fast.buffers import Readback
from moe_fast.engine import Engine
from moe_fast.heap import Heap
from moe_fast.kernel.constants import HOME_BITS
from moe_fast.kernel.regions import heap_regions
from moe_fast.kernel.shapes import KernelShape
from moe_fast.memory import Memory
from moe_fast.record import fill_record
from moe_ref import LayerStats, MoEConfig, MoELayer, cases
from moe_ref.errors import UsageError
from moe_ref.pipeline import Record
from moe_ref.placement import Placement

SHAPE = KernelShape.from_config(MoEConfig(hidden=128, intermediate=64, experts=4, top_k=2, dtype="bfloat16"), 1)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of a capability that the test chooses, as far as torch's host side tells."""

    def of(major: int, minor: int, name: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))

    return of


def heap_of(size: int) -> Heap:
    return Heap(torch.zeros(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(("major", "minor", "name"), [(8, 0, "NVIDIA A100"), (10, 0, "NVIDIA B200")])
def test_another_gpu_is_refused(gpu, major, minor, name) -> None:
    gpu(major, minor, name)
    says = f"{name} has compute capability {major}.{minor}.* needs 9.0"
    with pytest.raises(UsageError, match=says):
        Engine(SHAPE, heap_of(1024), 64)
    reason = FusedBackend().unavailable()
    assert reason is not None
    assert reason.startswith(f"{name} has compute capability {major}.{minor}")


def test_a_heap_that_is_too_small_is_refused(gpu) -> None:
    gpu(9, 0, "NVIDIA H200")
    need = heap_regions(SHAPE, 64)[1]
    with pytest.raises(UsageError, match=rf"the symmetric heap has {need - 1} bytes, this layer needs {need}"):
        Engine(SHAPE, heap_of(need - 1), 64)


def engine_with(shape: KernelShape, rank: int) -> Engine:
    """Engine of a rank whose memory holds nothing that was written, as far as reading it back goes."""
    size, engine = heap_regions(shape, 64)[1], object.__new__(Engine)
    heap = Heap(
        torch.full((size,), 0x7F, dtype=torch.uint8), torch.zeros(shape.ranks, dtype=torch.int64), rank, shape.ranks
    )
    engine.shape, engine.heap, engine.memory = shape, heap, Memory(shape, heap, 64, 132)
    engine.memory.workspace.fill_(0x7F)
    engine.readback = Readback(engine.memory)
    return engine


def left_by_tokens(rank: int, want: Record, tokens_P: list[int]) -> Engine:
    """Engine of a rank of three, with the reference's buffers where the kernel puts them."""
    tokens = tokens_P[rank]
    engine = engine_with(KernelShape.from_config(BY_TOKENS, 3), rank)
    heap, own = engine.memory.symmetric, engine.memory.local
    side = 1
    own("control")[0] = side + 1
    # behind them, twice as large, as they came
    counts = heap("counts").view(3, -1)[0].view(2, 3, -1)[side]
    counts[:, :6] = torch.from_numpy(want.counts_PE)
    counts[:, 7] = torch.tensor(tokens_P)
    ids_SK = want.routing[rank].expert_SK
    own("expert")[: tokens * 4] = ids_SK.flatten().int()
    own("weight", torch.float32)[: tokens * 4] = want.routing[rank].weight_SK.flatten()
    # of a route to another rank -2 - rank; of one that stays its row, which nobody reads here
    owner_SK = torch.where(ids_SK >= 0, ids_SK // 2, -1)
    own("where")[: tokens * 4] = torch.where(owner_SK == rank, 0, -2 - owner_SK).masked_fill(ids_SK < 0, -1).flatten()
    held = torch.from_numpy(want.layout.held_rows(rank))
    # a row that stayed is read where its token lies, one that follows another of its token from that one's place
    rows_RH, home_R = heap("rows", torch.bfloat16).view(2, -1, 128)[side], heap("home").view(2, -1)[side]
    lead_R = heap("wire")[engine.memory.rows + 3 :][: engine.memory.rows]
    leaders: dict[tuple[int, int], int] = {}
    routes = [
        (source, int(route))
        for expert in (2 * rank, 2 * rank + 1)
        for source in range(3)
        for route in (want.routing[source].expert_SK.flatten() == expert).nonzero().flatten()
    ]
    for row, (source, route), value in zip(held.tolist(), routes, want.rows_NH[rank], strict=True):
        home_R[row] = (source << HOME_BITS) | route
        lead_R[row] = row if source == rank else leaders.setdefault((source, route // 4), row)
        rows_RH[row] = value if source != rank and lead_R[row] == row else float("nan")
    heap("results", torch.bfloat16).view(-1, 128)[held] = want.output_NH[rank]
    own("hidden", torch.bfloat16).view(-1, 64)[held] = want.hidden_ND[rank]
    partial_SPH = want.partial_NH[rank].view(tokens, 3, 128)
    back = heap("returned", torch.bfloat16).view(2, 2, 64, 128)[side]
    for i, g in enumerate(g for g in range(3) if g != rank):
        sent = (owner_SK == g).any(dim=1)
        back[i, :tokens][sent] = partial_SPH[sent, g]
    # after the flags and the leaders, see `wire_words`
    heap("wire")[2 * engine.memory.rows + 3 :][:9] = torch.from_numpy(want.sent_PG).flatten()
    return engine


BY_TOKENS = MoEConfig(
    hidden=128, intermediate=64, experts=6, top_k=4, dtype="bfloat16", wire_format="tokens", max_tokens=64,
    tile_rows=128,
)  # fmt: skip


@pytest.mark.parametrize("ranks", [[0], [1], [2], [0, 1, 2]])
def test_what_a_call_by_tokens_leaves_behind(ranks: list[int]) -> None:
    """The reference's buffers, put where the kernel puts them, are read back as the reference's record.

    Of one rank of a process, or of all that are side by side in one.
    """
    layer, sizes = MoELayer(BY_TOKENS, world=3), [40, 0, 64]
    xs = [cases.make_tokens(size, BY_TOKENS, size) for size in sizes]
    routings = [cases.make_routing("masked", len(x), BY_TOKENS, len(x)) for x in xs]
    with torch.no_grad():
        want = layer._backend.forward(layer, xs, routings, keep=True)
    got = Record()
    engines = [left_by_tokens(rank, want, sizes) for rank in ranks]
    fill_record(got, engines, layer, [sizes[rank] for rank in ranks], None, [xs[rank] for rank in ranks])
    for name in ("rows_NH", "hidden_ND", "output_NH", "partial_NH"):
        assert len(getattr(got, name)) == len(ranks), name
        for one, rank in zip(getattr(got, name), ranks, strict=True):
            assert torch.equal(one, getattr(want, name)[rank]), name
    for one, rank in zip(got.routing, ranks, strict=True):
        assert torch.equal(one.expert_SK, want.routing[rank].expert_SK)
    assert got.returned_NH is None
    assert np.array_equal(got.tokens_P, sizes)
    assert np.array_equal(got.sent_PG, want.sent_PG)
    remote = [LayerStats.of(record, BY_TOKENS, torch.bfloat16).bytes_remote for record in (got, want)]
    assert remote[0] == remote[1] > 0


@pytest.mark.parametrize("layout", ["compact", "fixed"])
def test_results_that_were_put_are_read_back_by_route(layout) -> None:
    """They lie line by line, pieces of 16 bytes as in the owner's tile: in the order of the send list, in the fixed
    layout slot by slot."""
    hidden, tokens, side = 576, 50, 1
    config = MoEConfig(
        hidden=hidden, intermediate=64, experts=4, top_k=2, dtype="float16", layout=layout, max_tokens=64, tile_rows=128
    )
    shape = KernelShape.from_config(
        config, 2, placement=Placement.contiguous(4, 2) if layout == "fixed" else None, transport="put_signal"
    )
    engine = engine_with(shape, 0)
    own, side_rows = engine.memory.local, engine.memory.rows
    own("control")[0] = side + 1
    generator = torch.Generator().manual_seed(3)
    masked = torch.rand(tokens * 2, generator=generator) < 0.2
    own("expert")[: tokens * 2] = torch.where(masked, -1, 3).int()
    rows = side_rows if shape.fixed else tokens * 2
    where = torch.randperm(rows, generator=generator)[: tokens * 2]
    want = torch.randn(tokens * 2, hidden, generator=generator).half()
    # of each slot and rank in the fixed layout, else all that a side has room for
    block = 128 if shape.fixed else 64 * 2
    name, pitch = ("rows", hidden + 64) if shape.fixed else ("returned", hidden)
    flat = engine.memory.symmetric(name, torch.float16)
    # L[1, 1, side]: of rank 1, that came back
    first = ((1 * 2 + 1) * 2) * side_rows if shape.fixed else 0
    for route in (~masked).nonzero().flatten().tolist():
        row = first + int(where[route])
        twist = row % 8 if shape.fixed else route % 8
        own("where")[route] = row if shape.fixed else row | twist << 26
        row += side * (side_rows if shape.fixed else block)
        for line in range(0, hidden, 64):
            at = row // block * block * pitch + block * line + row % block * 64
            for piece in range(8):
                lies = at + (piece ^ twist) * 8
                flat[lies : lies + 8] = want[route, line + piece * 8 : line + piece * 8 + 8]
    got = engine.buffers(tokens).returned_NH
    assert got is not None
    assert torch.equal(got[~masked], want[~masked])
