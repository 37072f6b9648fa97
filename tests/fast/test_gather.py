"""Rows gathered on their way into the pipeline: where each is read, where its pieces go in a stage, and who tells of
rows that stay; the kernel's own functions on the CPU, one lane at a time."""

from __future__ import annotations

import random
import types
from collections.abc import Iterator
from typing import Any

import pytest
from kernel_source import kernel_function
from optional import cutlass_dsl

from moe_fast.bench import LAYERS
from moe_fast.kernel.constants import CARRIED_ROWS, FEW_ROWS, HOME_BITS, LINE_BYTES, STAGES, TILE_ROWS
from moe_fast.kernel.shapes import KernelShape
from moe_ref.config import MoEConfig

GROUP, BATCH = 8, 4
HEIGHTS = (TILE_ROWS, TILE_ROWS // 2, CARRIED_ROWS, FEW_ROWS)
"""Rows of a stage that are copied together."""
PIECE = 16
"""Bytes that a lane copies at once."""
SOURCES, STAGE = 1 << 20, 1 << 16
"""Where shared memory has the addresses, and a stage."""


class Pointer:
    """To elements of `size` bytes."""

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size, self.dtype = address, size, types.SimpleNamespace(width=8 * size)

    def __add__(self, elements: int) -> Pointer:
        return Pointer(self.address + elements * self.size, self.size)

    def toint(self) -> int:
        return self.address


def copied(rows: int, step: int, addresses: list[int], size: int = 2) -> Iterator[tuple[int, int]]:
    """(place in shared memory, address in global memory) of every piece that a warp copies into a stage."""
    found: list[tuple[int, int]] = []

    def fetch(source: tuple[int, int], into: list[int]) -> None:
        at, count = source
        assert (at % 16, count) == (0, 2), "not one load of 16 bytes"
        place = (at - SOURCES) // 8
        into[:] = addresses[place : place + 2]

    cute = types.SimpleNamespace(
        make_copy_atom=lambda op, dtype, num_bits_per_copy: None, make_layout=lambda elements: elements,
        make_rmem_tensor=lambda count, dtype: [0] * count, AddressSpace=types.SimpleNamespace(smem=0),
        make_ptr=lambda dtype, at, space, assumed_align: at, make_tensor=lambda at, count: (at, count),
        copy=lambda atom, source, target: found.append((target[0], source[0])), autovec_copy=fetch,
        nvgpu=types.SimpleNamespace(LoadCacheMode=types.SimpleNamespace(GLOBAL=0)),
    )  # fmt: skip
    names: dict[str, Any] = {
        "cute": cute, "cpasync": types.SimpleNamespace(CopyG2SOp=lambda mode: None), "LINE_BYTES": LINE_BYTES,
        "GROUP": GROUP, "BATCH": BATCH, "gmem": lambda at, dtype, align: at,
    }  # fmt: skip
    names["fetch_two"] = kernel_function("gather", "fetch_two", **names)
    run = kernel_function("gather", "copy_line", **names)
    for lane in range(32):
        found.clear()
        run(None, step, rows, Pointer(SOURCES, 8), Pointer(STAGE, size), lane)
        assert len(found) == rows * LINE_BYTES // PIECE // 32
        yield from found


@pytest.mark.parametrize("rows", HEIGHTS)
@pytest.mark.parametrize("step", [0, 5])
def test_a_line_of_every_row_is_copied_once_into_the_swizzle(rows, step):
    """Piece p of row r lies at p ^ (r % 8); a copy's lanes read whole lines of 128 bytes."""
    addresses = [(1 << 40) + 10_000 * ((row * 37) % rows) for row in range(rows)]
    found = list(copied(rows, step, addresses))
    wanted = {
        STAGE + row * LINE_BYTES + (piece ^ row % 8) * PIECE: addresses[row] + step * LINE_BYTES + piece * PIECE
        for row in range(rows)
        for piece in range(LINE_BYTES // PIECE)
    }
    assert len(found) == len(wanted)
    assert dict(found) == wanted
    assert sorted(wanted) == list(range(STAGE, STAGE + rows * LINE_BYTES, PIECE))


def test_that_is_where_tma_and_the_tensor_cores_have_it():
    """The DSL's own layout of the row stages and of the carried rows' ring, and its swizzle of their bytes."""
    cute = cutlass_dsl()
    import cutlass
    from cutlass import range_constexpr  # pyright: ignore[reportPrivateImportUsage]
    from cutlass.cute.nvgpu import warpgroup

    line = LINE_BYTES // 2
    found: dict[tuple[int, int, int, int], int] = {}

    @cute.jit
    def look():
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, cutlass.BFloat16)
        for rows in range_constexpr(CARRIED_ROWS, TILE_ROWS + 1, TILE_ROWS - CARRIED_ROWS):
            layout = cute.tile_to_shape(atom, (rows, line, STAGES), order=(0, 1, 2))
            swizzle = cute.make_composed_layout(layout.inner, 0, cute.make_layout(STAGES * rows * LINE_BYTES))
            for stage in range_constexpr(0, STAGES, STAGES - 1):
                for row in range_constexpr(0, rows, 5):
                    for column in range_constexpr(0, line, 4):
                        found[rows, stage, row, column] = int(swizzle(layout.outer((row, column, stage)) * 2))

    look()
    assert found
    for (rows, stage, row, column), place in found.items():
        piece, rest = divmod(2 * column, PIECE)
        assert place == (stage * rows + row) * LINE_BYTES + (piece ^ row % 8) * PIECE + rest


RANK, TOKENS, TOP_K, ROW_BYTES, PITCH = 1, 300, 4, 512, 640
X, HEAP, ROWS_AT = 1 << 40, 1 << 41, 4096


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("kind", ["local", "peers", "mixed", "stale"])
@pytest.mark.parametrize(("rows", "most"), [(128, 128), (100, 128), (64, 64), (17, 64), (1, 16), (16, 16), (20, 32)])
def test_every_row_is_read_where_it_lies(by_token, kind, rows, most):
    """Rows of this rank's tokens there, others where peers put them or where the row lies that theirs follow; beyond
    the last row the last one again. Homes and leaders of a call before, as after a failed wait, never lead out of the
    buffers."""
    choose, first, height, side = random.Random(rows), 3 * TILE_ROWS, 1024, 1
    homes, leaders = {}, {}
    for row in range(first, first + rows):
        rank = {"local": RANK, "peers": 0}.get(kind, choose.choice((0, RANK)))
        homes[row] = rank << HOME_BITS | choose.randrange((TOKENS if kind != "stale" else 2 * TOKENS) * TOP_K)
        leaders[row] = choose.choice((row, choose.randrange(height)))
        if kind == "stale":
            leaders[row] = choose.choice((-1, row, 1 << 30))
    stored: dict[int, int] = {}
    votes: list[bool] = []
    arch = types.SimpleNamespace(
        sync_warp=lambda: None, store=lambda at, value: stored.__setitem__(at.toint(), value),
        vote_any_sync=lambda vote: votes.append(bool(vote)),
    )  # fmt: skip
    find = kernel_function(
        "gather", "find_sources", cute=types.SimpleNamespace(arch=arch), HOME_BITS=HOME_BITS, gmem=None,
        home_of=lambda k, a, side, row: homes[row], read=lambda address, row: leaders[row], leader_at=lambda k, a: 0,
    )  # fmt: skip
    k = types.SimpleNamespace(by_token=by_token, hidden=ROW_BYTES // 2, element_size=2, row_pitch=PITCH, top_k=TOP_K)
    a = types.SimpleNamespace(heap=HEAP, rows_at=ROWS_AT, rows=height, rank=RANK, tokens=TOKENS, x=X)
    for lane in range(32):
        find(k, a, side, first, rows, Pointer(SOURCES, 8), most, lane)
    wanted, local = {}, False
    for i in range(max(most, 32)):
        row = first + min(i, rows - 1)
        token = (homes[row] & ((1 << HOME_BITS) - 1)) // TOP_K
        lead = leaders[row] if by_token and 0 <= leaders[row] < height else row
        wanted[SOURCES + 8 * i] = HEAP + ROWS_AT + (side * height + lead) * PITCH
        if homes[row] >> HOME_BITS == RANK and token < TOKENS:
            wanted[SOURCES + 8 * i], local = X + token * ROW_BYTES, True
    assert stored == wanted
    # TMA may fetch what lies in its place in the buffer, one row after the other
    assert any(votes) == (local or by_token)


def test_layers_that_gather():
    """16-bit ones whose processors are pairs of blocks and whose first product has at most 16 column tiles."""
    gathers = {name: KernelShape.from_config(config, 2).gathers for name, config in LAYERS.items()}
    assert gathers == {"paper-e8": True, "paper-e32": True, "paper-e128": True, "qwen3": True, "mixtral": False}
    qwen3, paper = LAYERS["qwen3"], LAYERS["paper-e32"]
    for config in (qwen3, qwen3.replace(wire_format="tokens"), paper.replace(dtype="float16")):
        for scheduler in ("spare_warps", "tickets"):
            for ranks in (1, 2, 4):
                assert KernelShape.from_config(config, ranks, scheduler).gathers
    columns = {  # of the first product: gate and up columns in halves of a tile
        "gated": tuple(MoEConfig(2048, 16 * 128 + more, 8, 2, dtype="bfloat16") for more in (0, 64)),
        "plain": (paper.replace(intermediate=16 * 256), paper.replace(intermediate=16 * 256 + 64)),
    }  # fmt: skip
    for few, many in columns.values():
        shapes = KernelShape.from_config(few, 2), KernelShape.from_config(many, 2)
        assert [shape.columns0 for shape in shapes] == [16, 17]
        assert [shape.gathers for shape in shapes] == [True, False]
    for other in (
        KernelShape.from_config(qwen3, 2, paired=False),
        KernelShape.from_config(qwen3.replace(dtype="float32"), 1),
        KernelShape.from_config(qwen3, 2, transport="put_signal"),
        KernelShape.from_config(qwen3.replace(layout="fixed"), 2),
        KernelShape.from_config(qwen3.replace(shared_intermediate=512), 2),
        KernelShape.from_config(qwen3, 2, "os_block"),
    ):
        assert not other.gathers, other.name


# --- pushing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("begun", [0, 1, 3, 8])
def test_local_rows_keep_no_lead(begun, ranks):
    """They have begun with some units and follow those for the next rank at half the pace until these have caught up,
    then at theirs; units for other ranks bring none."""
    follows = kernel_function("dispatch", "near_follows", units_here=lambda k, a: (begun, 1000))
    k, a = types.SimpleNamespace(ranks=ranks), types.SimpleNamespace(rank=1)
    local = begun
    for number in range(50):
        for destination in [(1 + i) % ranks for i in range(1, ranks)]:
            local += bool(follows(k, a, destination, number))
        remote = number + 1
        assert local == (remote if remote > 2 * begun else begun + remote // 2)


@pytest.mark.parametrize("warps", [1, 5])
@pytest.mark.parametrize("seed", range(12))
def test_spare_warps_push_every_unit_once(warps, seed):
    """Units of local and of remote rows, as many as there are or none, by warps that take turns; and their shares go to
    all peers in turn."""
    choose, ranks = random.Random(seed), random.Random(seed).choice((1, 2, 4))
    begun, near = sorted((choose.choice((0, 1, 4)), choose.choice((0, 1, 7, 30))))
    far = 0 if ranks == 1 else choose.choice((0, 1, 2, 9, 40))
    plan = {"far": far * (ranks - 1)}
    heads, pushed = {"near": 0, "far": 0}, []

    def next_unit(a: Any, side: int, head: str, lane: int) -> int:
        heads[head] += 1
        return heads[head] - 1

    names: dict[str, Any] = {
        "units_here": lambda k, a: (begun, near), "read": lambda address, index: plan[index], "next_unit": next_unit,
        "PlanWord": types.SimpleNamespace(FAR_UNITS="far"),
        "Counter": types.SimpleNamespace(PUSH_FAR="far", PUSH_NEAR="near"),
        "push_unit": lambda k, a, side, rank, number, rows, lane: pushed.append((rank, number, rows)),
    }  # fmt: skip
    for name in ("next_far", "push_near", "near_follows"):
        names[name] = kernel_function("dispatch", name, **names)
    push = kernel_function("dispatch", "push_rest", **names)
    k = types.SimpleNamespace(ranks=ranks, far_unit=32, near_unit=8, by_token=False)
    a = types.SimpleNamespace(rank=ranks - 1, plan=0)
    for _ in range(warps):
        push(k, a, 0, 0)
    local = [(a.rank, number, 8) for number in range(begun, near)]
    remote = [(rank, number, 32) for rank in range(ranks - 1) for number in range(far)]
    assert sorted(pushed) == sorted(local + remote)
    order = [number for rank, number, _ in pushed if rank != a.rank]
    assert order == sorted(order), "one peer's rows before the others'"
    assert [one for one in pushed if one[0] == a.rank] == local
