"""Row tiles that go along with the tile before them: which ones, the kernel's tables of them, and where a thread's
values of their product belong; the kernel's own functions, run on the CPU."""

from __future__ import annotations

import types
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from kernel_source import kernel_function

from moe_fast import compiler
from moe_fast.kernel import carry
from moe_fast.kernel.constants import CARRIED_ROWS, EARLY, HALF_COLUMNS, STAGES, TILE_COLUMNS, TILE_ROWS
from moe_fast.kernel.shapes import KernelShape
from moe_ref.config import MoEConfig
from moe_ref.errors import BackendUnavailable
from moe_ref.runtime.encoding import reached

QWEN3 = MoEConfig(2048, 768, 128, 8, dtype="bfloat16")
PAPER = MoEConfig(2048, 2048, 128, 2, activation="relu", gated=False, dtype="bfloat16")


def rows_of_experts(seed: int) -> list[int]:
    """Rows of 1 to 40 experts, with every interesting remainder among them."""
    random = np.random.default_rng(seed)
    edges = [128 * n + rest for n in range(3) for rest in (0, 1, CARRIED_ROWS, CARRIED_ROWS + 1, 127)]
    count = int(random.integers(1, 41))
    return [int(random.choice(edges)) if random.random() < 0.6 else int(random.integers(0, 700)) for _ in range(count)]


@pytest.mark.parametrize("rows", [*range(600), 16384, 16385, 16400, 16401])
def test_tasks_of_an_expert_hold_each_of_its_rows_once(rows):
    begun = list(range(0, rows, TILE_ROWS))
    tasks = [carry.task_rows(rows, b) for b in begun]
    assert sum(tasks) == rows
    assert tasks.count(0) == carry.carried_tiles(rows)
    # only the last tile is ever carried, only by a full one, and only where a few rows are left
    carried = rows > TILE_ROWS and 0 < rows % TILE_ROWS <= CARRIED_ROWS
    assert carry.carried_tiles(rows) == carried
    for b, task in zip(begun, tasks, strict=True):
        assert task == 0 or carry.carries(task) == (task > TILE_ROWS)
        if task > TILE_ROWS:
            assert carried
            assert b + task == rows
        elif task:
            assert task == min(rows - b, TILE_ROWS)


class Tables(types.SimpleNamespace):
    """A rank's tables, as `Args` has them, each at an address of its own."""

    def __init__(self, row_tiles: int) -> None:
        names = ("tile_slot", "tile_rows", "tile_at", "dealt", "arrived_target", "arrived")
        super().__init__(**{name: (i + 1) << 40 for i, name in enumerate(names)}, rows=row_tiles * TILE_ROWS)
        self.words: dict[int, int] = {}

    def read(self, address: int, index: int, **order: Any) -> int:
        return self.words[address + 4 * index]

    def write(self, address: int, index: int, value: int) -> None:
        assert (address + 4 * index) not in self.words or address >= self.arrived_target, "written twice"
        self.words[address + 4 * index] = value

    def entries(self, name: str) -> dict[int, int]:
        base = getattr(self, name)
        return {(at - base) // 4: v for at, v in self.words.items() if base <= at < base + (1 << 40)}


def tables(rows: list[int], pushed: list[tuple[int, int]], side: int = 1) -> tuple[Tables, list[tuple[int, int]], int]:
    """What `publish_tasks` writes for slots of `rows` rows; the (slot, first row) of every row tile, and how many are
    carried. pushed: of each slot, first and end of the rows that are early."""
    slots = len(rows)
    k = types.SimpleNamespace(slots=slots)
    first, carried_before, places = [], [], []
    for slot, count in enumerate(rows):
        first.append(len(places))
        carried_before.append(sum(carry.carried_tiles(r) for r in rows[:slot]))
        places += [(slot, begun) for begun in range(0, count, TILE_ROWS)]
    carried = sum(carry.carried_tiles(r) for r in rows)
    shared = dict(enumerate([*rows, *first, *(p[0] for p in pushed), *(p[1] for p in pushed), *carried_before]))
    a = Tables(len(places))
    targets = a.arrived_target + side * len(places) * 4
    for tile in range(len(places)):
        a.words[targets + 4 * tile] = 1000 + tile
    run = kernel_function(
        "plan", "publish_tasks", CONSUMERS=256, TILE_ROWS=TILE_ROWS, EARLY=EARLY, task_rows=carry.task_rows,
        next_target=lambda target, expected: target + expected, read=a.read, write=a.write,
        dealt_at=lambda k, a: a.dealt,
        cute=types.SimpleNamespace(arch=types.SimpleNamespace(load=lambda at, kind: shared[at])),
    )  # fmt: skip
    for thread in range(256):
        run(k, a, side, thread, 0, slots, slots, len(places), carried)
    return a, places, carried


@pytest.mark.parametrize("seed", range(60))
def test_planner_deals_every_row_once_and_waits_for_every_tile(seed):
    """Numbers without gaps, translated both ways; arrivals are expected of carried tiles, too."""
    rows = rows_of_experts(seed)
    random = np.random.default_rng(1000 + seed)
    ends = [sorted(int(v) for v in random.integers(0, r + 1, 2)) for r in rows]
    pushed = [(low, high) for low, high in ends]
    a, places, carried = tables(rows, pushed)
    dealt = len(places) - carried
    at, slot, filled = (a.entries(name) for name in ("tile_at", "tile_slot", "tile_rows"))
    assert sorted(at) == sorted(slot) == sorted(filled) == list(range(dealt))
    assert a.entries("dealt") == {tile: number for number, tile in at.items()}
    assert list(dict(sorted(at.items())).values()) == sorted(at.values()), "dealt in the order of the buffer"
    seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number in range(dealt):
        expert, begun = places[at[number]]
        assert slot[number] == expert
        count = filled[number] & (EARLY - 1)
        seen[expert].append((begun, begun + count))
        low, high = pushed[expert]
        assert bool(filled[number] & EARLY) == (low <= begun and begun + count <= high)
    for expert, count in enumerate(rows):
        spans = seen[expert]
        assert [s for s, _ in spans] == ([0] + [e for _, e in spans[:-1]] if spans else [])
        assert (spans[-1][1] if spans else 0) == count
    target = a.entries("arrived_target")
    for tile, (expert, begun) in enumerate(places):
        assert target[len(places) + tile] == 1000 + tile + min(rows[expert] - begun, TILE_ROWS)


@pytest.mark.parametrize("missing", [None, 0, 1, 2, 3])
def test_a_block_of_tiles_is_ready_with_the_rows_of_its_carried_tiles(missing):
    """Four tiles in the buffer, two of them carried, are one block of two."""
    a, places, _ = tables([140, 130], [(0, 0), (0, 0)], side=0)
    for tile in range(4):
        a.words[a.arrived + 4 * tile] = a.words[a.arrived_target + 4 * tile] - (tile == missing)
    there = kernel_function(
        "subscriber", "all_there", read=a.read, carries=carry.carries, reached=reached, EARLY=EARLY,
        buffer_tile=lambda k, a, tile: tile,
    )  # fmt: skip
    k = types.SimpleNamespace(early=True, carries=True, block_tiles=2, signal_words=1)
    assert len(places) == 4
    assert there(k, a, a.arrived, a.arrived_target, 0, 2) == (missing is None)


class Value(float):
    """A thread's fp32 value."""

    def to(self, dtype: Any) -> Value:
        return self

    def __mul__(self, other: float) -> Value:
        return Value(float(self) * float(other))


@pytest.mark.parametrize("config", [QWEN3, PAPER, PAPER.replace(intermediate=1984)], ids=["gated", "plain", "ragged"])
@pytest.mark.parametrize("first", [True, False])
def test_values_of_carried_rows_go_to_their_rows_and_columns(config, first):
    """Every warp of a task with its own number for each (row, column of weights); then memory is looked at."""
    k = KernelShape.from_config(config, 1)
    assert k.carries
    gated = first and k.gated
    width, here = (k.intermediate if first else k.hidden), (HALF_COLUMNS if gated else TILE_COLUMNS)
    column = (width - 1) // here
    memory: dict[int, float] = {}
    shared: dict[int, float] = {}
    address = [(1 << 30) + row * 65536 if row != 5 else 0 for row in range(CARRIED_ROWS)]

    class Block:
        def __init__(self, base: int, layout: tuple) -> None:
            self.base, (self.shape, self.stride) = base, layout

        def __setitem__(self, place: tuple[int, int], value: float) -> None:
            assert all(0 <= p < s for p, s in zip(place, self.shape, strict=True))
            shared[self.base + place[0] * self.stride[0] + place[1] * self.stride[1]] = value

    def store(at: int, piece: list[float]) -> None:
        assert at % 16 == 0
        memory.update({at + 2 * i: value for i, value in enumerate(piece)})

    def weight_row(block: int, group: int, warp: int, lane: int, v: int) -> tuple[int, int]:
        return (
            block * HALF_COLUMNS + group * 64 + warp * 16 + lane // 4 + v // 2 % 2 * 8,
            lane % 4 * 2 + v % 2 + v // 4 * 8,
        )

    arch = types.SimpleNamespace(
        sync_warp=lambda: None, shuffle_sync=lambda value, lane: address[lane], store=store,
        load=lambda at, kind, ss: [shared.get(at + i, -1.0) for i in range(8)],
    )  # fmt: skip
    run = kernel_function(
        "epilogue", "turn_few", CARRIED_ROWS=CARRIED_ROWS, HALF_COLUMNS=HALF_COLUMNS, TILE_COLUMNS=TILE_COLUMNS,
        LOWEST=1 << 24, activate=lambda name, x: x, gmem=lambda at, kind, align: at,
        ir=types.SimpleNamespace(VectorType=types.SimpleNamespace(get=lambda *_: None)),
        cute=types.SimpleNamespace(
            arch=arch, make_tensor=Block, make_layout=lambda shape, stride: (shape, stride),
        ), Int32=types.SimpleNamespace(mlir_type=None),
    )  # fmt: skip
    # lanes one after the other: the second time all others have written what a lane reads
    for _ in range(2):
        memory.clear()
        for thread in range(256):
            group, warp, lane = thread // 128, thread % 128 // 32, thread % 32
            acc = []
            for block in range(2):
                for v in range(CARRIED_ROWS // 2):
                    c, row = weight_row(block, group, warp, lane, v)
                    acc.append(Value(row * 1000 + c) if not gated else Value([row + 1, c % HALF_COLUMNS + 1][block]))
            run(k, None, first, acc, (group * 4 + warp) * 4096, address[lane], column, group, thread)
    want = {}
    for row in range(CARRIED_ROWS):
        for c in range(here):
            if address[row] and column * here + c < width:
                value = (row + 1) * (c + 1) if gated else row * 1000 + c
                want[address[row] + 2 * (column * here + c)] = value
    assert memory == want


@pytest.mark.parametrize("group", [0, 1])
def test_a_thread_of_the_turned_product_holds_what_the_epilogue_takes_it_for(group):
    """The DSL's own partition of out^T, 256 weight rows by CARRIED_ROWS rows: the order of a thread's values; and
    blocks g and 2 + g of the weights for warpgroup g."""
    try:
        cute = compiler.import_cutlass()
    except BackendUnavailable as error:
        pytest.skip(f"the CuTe DSL (extra [fused]) is not installed: {error}")
    import cutlass
    from cutlass import range_constexpr  # pyright: ignore[reportPrivateImportUsage]

    from moe_fast.kernel.gemm import tiled_mma

    found: list[tuple[int, int, int, int]] = []

    @cute.jit
    def look():
        mma = tiled_mma(cutlass.BFloat16, CARRIED_ROWS)
        whole = cute.make_identity_tensor((TILE_COLUMNS, CARRIED_ROWS))
        for warp in range_constexpr(4):
            for lane in range_constexpr(32):
                part = mma.get_slice(group * 128 + warp * 32 + lane).partition_C(whole)
                for v in range_constexpr(CARRIED_ROWS):
                    m, n = part[v]
                    found.append((warp, lane, int(m), int(n)))

    look()
    assert len(found) == 128 * CARRIED_ROWS
    for number, (warp, lane, m, n) in enumerate(found):
        block, v = divmod(number % CARRIED_ROWS, CARRIED_ROWS // 2)
        assert m == block * HALF_COLUMNS + group * 64 + warp * 16 + lane // 4 + v // 2 % 2 * 8
        assert n == lane % 4 * 2 + v % 2 + v // 4 * 8


def test_only_plain_16_bit_layers_carry():
    assert KernelShape.from_config(QWEN3, 2).carries
    assert KernelShape.from_config(PAPER, 1).carries
    for other in (
        KernelShape.from_config(QWEN3.replace(dtype="float32"), 1),
        KernelShape.from_config(QWEN3.replace(wire_format="tokens"), 2),
        KernelShape.from_config(QWEN3, 2, transport="put_signal"),
        KernelShape.from_config(QWEN3.replace(layout="fixed"), 2),
        KernelShape.from_config(QWEN3.replace(shared_intermediate=512), 2),
        KernelShape.from_config(QWEN3.replace(expert_bias=True), 1),
        # fewer steps than stages: the few rows of the first ones are asked for together
        KernelShape.from_config(QWEN3.replace(intermediate=64 * (STAGES - 1)), 1),
    ):
        assert not other.carries, other.name
