"""What a warp puts to other ranks and signals: the kernel's own source, run by 32 threads, where there is no GPU.

NVSHMEM is played by copies between arrays, one heap for each rank. What lanes do together (shuffles, votes, barriers,
puts) waits for all 32, so a lane that stays away shows as a broken barrier. On GPUs: the scenario `transports`.
"""

from __future__ import annotations

import ast
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_source import run_together

from moe_fast.kernel import constants, limits
from moe_fast.kernel.shapes import KernelShape
from moe_ref import layout
from moe_ref.config import MoEConfig
from moe_ref.placement import Placement

KERNEL = Path(limits.__file__).parent
LANES, RANKS, RANK = 32, 3, 2
ROWS, TOKENS = 512, 64
PUT_ROWS, PUT_RESULTS = 4, 5
SOURCES = {
    "signals": (
        "arrived_word", "back_word", "buffer_tile", "home_of", "home_row", "landing_of", "tile_lines", "in_lines",
        "staged_at", "landed_rows", "tile_at_home",
    ),
    "transport": (
        "put_rows", "put_rows_in_place", "signal_rows", "put_run", "next_bit", "lowest", "highest", "homes_of",
        "landings_of", "put_results", "runs_of_warp", "put_lines", "count_put", "touch", "SIGNAL_ADD", "WARPS",
        "GROUPS", "PIECE_BYTES", "RESULT_PIECE_BYTES", "TOGETHER", "STEP_BYTES", "HOME_BYTES", "SECTOR_BYTES",
        "WARP_BYTES",
    ),
    "dispatch": ("push_unit", "push_own", "boost_rows", "VECTOR_BYTES"),
    "epilogue": ("home_address",),
    "combine": ("result_at_home", "PIECES"),
    "plan": ("tiles_per_part",), "send_list": ("list_routes", "routes_per_thread", "starts_of", "place_of"),
}  # fmt: skip
"""Of each file of the kernel what is run here."""


class Long(int):
    """Int64, which is told from Int32 where memory is read."""


class Warp:
    """Runs a function in 32 threads and plays what it calls."""

    def __init__(self, k: KernelShape, heaps: np.ndarray) -> None:
        self.k, self.heaps = k, heaps
        self.log: list[tuple] = []
        self.control: Counter[int] = Counter()
        self.counters: Counter[int] = Counter()
        self.touched: set[int] = set()
        self.asked_first = False
        self.shared_at = 0
        self.names = self._names()

    def run(self, function: str, *arguments, lanes: dict[int, np.ndarray] | None = None) -> None:
        """Call `function` in every lane; lanes: arguments that differ, by position. The lane comes last."""
        self.barrier = threading.Barrier(LANES, timeout=20)
        # in turn, so that one barrier is enough: nobody is two ahead of another who still reads
        self.shared: tuple[list, list] = [None] * LANES, [None] * LANES

        def one(lane: int) -> None:
            own = [int(lanes[i][lane]) if lanes and i in lanes else value for i, value in enumerate(arguments)]
            self.local.lane, self.local.turn = lane, 0
            self.names[function](*own, lane)

        self.local = threading.local()
        run_together(LANES, one, self.barrier)

    def together(self, value) -> list:
        """Every lane's value."""
        self.local.turn = 1 - self.local.turn
        values = self.shared[self.local.turn]
        values[self.local.lane] = value
        self.barrier.wait()
        return list(values)

    def _put(self, target: int, source: int, words: int, rank: int) -> None:
        every = self.together((target, source, words, rank))
        assert len(set(every)) == 1, f"lanes put different things: {set(every)}"
        if self.local.lane == 0:
            size = words * 4
            assert rank != RANK
            assert min(source, target) >= 0
            assert max(source, target) + size <= self.heaps.shape[1]
            assert target % 16 == source % 16 == size % 16 == 0
            if self.asked_first and size > self.names["STEP_BYTES"]:
                asked = {s // 32 for s in range(source, source + size, 16)}
                assert asked <= self.touched, "a put's bytes weren't asked for"
            self.heaps[rank][target : target + size] = self.heaps[RANK][source : source + size]
            self.log.append(("put", size))
        self.together(None)

    def _put_word(self, target: int, value: int, rank: int) -> None:
        assert rank != RANK
        self.heaps[rank][target : target + 8].view(np.int64)[0] = value

    def _quiet(self) -> None:
        self.together(None)
        if self.local.lane == 0:
            self.log.append(("quiet",))

    def _signal(self, at: int, value: int, operation: int, rank: int) -> None:
        assert operation == 10
        assert rank != RANK
        self._add_signal(at, value, rank)

    def _add_signal(self, at: int, value: int, rank: int = RANK) -> None:
        self.heaps[rank][at : at + 8].view(np.int64)[0] += value
        self.log.append(("signal", rank))

    def _read(self, address, index: int, dtype: type = int) -> int:
        if not isinstance(address, int):
            return int(address[index])
        size = 8 if dtype is Long else 4
        at = address + index * size
        assert 0 <= at <= self.heaps.shape[1] - size, "a load beyond the heap"
        self.touched.add(at // 32)
        return int(self.heaps[RANK][at : at + size].view(f"i{size}")[0])

    def _write(self, address, index: int, value: int, dtype: type = int) -> None:
        if not isinstance(address, int):
            address[index] = value
            return
        assert dtype is int
        self.heaps[RANK][address + index * 4 :][:4].view(np.int32)[0] = value

    def _fetch_add(self, counters: Counter, place: int) -> int:
        counters[place] += 1
        return counters[place] - 1

    def _names(self) -> dict:
        def jit(function):
            return function

        def up(value, steps, mask_and_clamp):
            every = self.together(value)
            return every[max(self.local.lane - steps, 0)]

        arch = SimpleNamespace(
            shuffle_sync=lambda value, lane: self.together(value)[lane % LANES],
            shuffle_sync_up=up,
            vote_ballot_sync=lambda bit: sum(1 << i for i, one in enumerate(self.together(bool(bit))) if one),
            sync_warp=lambda: self.together(None) and None,
            clz=lambda bits: 32 - (bits & 0xFFFFFFFF).bit_length(),
            popc=lambda bits: (bits & 0xFFFFFFFF).bit_count(),
            fence_acq_rel_sys=lambda: None,
            fence_acq_rel_gpu=lambda: None,
        )
        names = {
            "cute": SimpleNamespace(
                jit=jit, arch=arch, make_rmem_tensor=lambda size, kind: [0] * size, size=len, Tensor=None, Pointer=None
            ),
            "cutlass": SimpleNamespace(
                range_constexpr=range, const_expr=lambda value: value, Constexpr=None,
                select_=lambda condition, yes, no: yes if condition else no,
            ),
            "Int32": int, "Int64": Long, "Uint64": int, "Boolean": bool, "KernelShape": KernelShape, "Args": None,
            "gmem": lambda address, dtype=None: address,
            "read": self._read, "write": self._write, "copy_pair": lambda *_: None, "fence_far": lambda k: None,
            "ceil_div": layout.ceil_div, "return_row": layout.return_row, "CONSUMERS": 256,
            "next_target": lambda last, rows: last + rows,
            "PlanWord": constants.PlanWord,
            "await_values": lambda value: None,
            "nvshmem_put": self._put, "nvshmem_put_word": self._put_word, "anywhere": lambda address: address,
            "peer_mapped": lambda a, rank: a.mapped,
            # shared memory is played by a part of the heap; pointers into it count elements
            "generic_address": lambda place: self.shared_at + place * self.k.element_size,
            "nvshmem_quiet": self._quiet, "nvshmem_signal": self._signal,
            "add_signal": self._add_signal,
            "add": lambda control, index, value, scope: control.update({index: value}),
            "fetch_add": self._fetch_add,
            "side_counters": lambda a, side: a.counters,
            "returned_word": lambda k, a, row_tile: row_tile,
            "shared_returned": lambda a, token_tile: 1000 + token_tile,
            "aborted_together": lambda a: a.aborted,
            "PUT_ROWS": PUT_ROWS, "PUT_RESULTS": PUT_RESULTS,
            "ROUNDS": 2, "SIDES": 2,
            **{name: value for name, value in vars(constants).items() if name.isupper()},
        }  # fmt: skip
        for module, wanted in SOURCES.items():
            tree = ast.parse((KERNEL / f"{module}.py").read_text())
            kept = []
            for node in tree.body:
                if isinstance(node, ast.FunctionDef):
                    found = node.name
                elif isinstance(node, ast.Assign):
                    target = node.targets[0]
                    # the last of several names tells them
                    found = ast.unparse(target).strip("()").split(",")[-1].strip()
                else:
                    continue
                if found in wanted:
                    kept.append(node)
            assert len(kept) == len(wanted), f"{module}: {[ast.unparse(node)[:40] for node in kept]}"
            code = ast.Module([*ast.parse("from __future__ import annotations").body, *kept], [])
            exec(compile(ast.fix_missing_locations(code), module, "exec"), names)
        return names


def machine(k: KernelShape, **more) -> tuple[Warp, SimpleNamespace]:
    """A warp of rank RANK and its arguments: heaps with the regions that puts concern, full of noise."""
    pitch, row_bytes = k.row_pitch, k.hidden * k.element_size
    sizes = {
        "rows_at": ROWS * pitch * k.row_factor, "returned_at": 2 * TOKENS * k.top_k * row_bytes,
        "wire_at": TOKENS * k.top_k * pitch, "arrived_at": ROWS * k.row_factor // 128 * 8, "back_at": 2 * TOKENS * 8,
        "x": TOKENS * row_bytes, "results_at": ROWS * row_bytes,
    }  # fmt: skip
    at, offset = {}, 0
    for name, size in sizes.items():
        at[name] = offset
        offset += (size + 1023) // 1024 * 1024
    # nothing lies behind the results, as in the real heap
    end = at["results_at"] + sizes["results_at"]
    heaps = np.random.default_rng(0).integers(0, 256, (RANKS, end), dtype=np.uint8)
    for name in ("arrived_at", "back_at"):
        heaps[:, at[name] : at[name] + sizes[name]] = 0
    warp = Warp(k, heaps)
    a = SimpleNamespace(
        heap=0, rows=ROWS, max_tokens=TOKENS, rank=RANK, control=warp.control, counters=warp.counters, aborted=False,
        mapped=False, tile_at=None, slot_capacity=ROWS // k.slots, **at, **more,
    )  # fmt: skip
    return warp, a


def shape_of(hidden: int, dtype: Any = "bfloat16", layout: Any = "compact") -> KernelShape:
    config = MoEConfig(
        hidden, 64, 6, 2, dtype=dtype, layout=layout, capacity_factor=1.0 if layout == "fixed" else None, tile_rows=128
    )
    return KernelShape.from_config(
        config, RANKS, "spare_warps", placement=Placement.contiguous(6, RANKS), transport="put_signal"
    )


def signals_of(k: KernelShape, heap: np.ndarray, at: int, side: int, count: int) -> np.ndarray:
    return heap[at : at + 2 * count * 8].view(np.int64)[side * count : (side + 1) * count]


@pytest.mark.parametrize(("hidden", "dtype"), [(64, "bfloat16"), (1472, "bfloat16"), (4160, "float32")])
@pytest.mark.parametrize("runs", [(1,) * 7, (16,), (3, 1, 9), (32,), (5, 27)])
def test_staged_packets_land_in_runs_with_a_signal_for_each_tile(hidden, dtype, runs):
    """Every packet is at its row, nothing else has changed, and a tile hears of its rows after all puts."""
    k = shape_of(hidden, dtype)
    warp, a = machine(k)
    begin, side, destination, count = 5, 1, 0, sum(runs)
    starts, row = [], 120
    for run in runs:
        starts += range(row, row + run)
        row += run + 2
    rows = np.array(starts + [starts[-1]] * (LANES - count))
    before = warp.heaps.copy()
    warp.asked_first = True
    warp.run("put_rows", k, a, side, destination, begin, count, None, lanes={6: rows})
    expected, pitch, size = before[destination].copy(), k.row_pitch, k.hidden * k.element_size + 16
    for i in range(count):
        source, target = a.wire_at + (begin + i) * pitch, a.rows_at + (side * ROWS + rows[i]) * pitch
        expected[target : target + size] = before[RANK][source : source + size]
    got = warp.heaps[destination]
    tiles = np.bincount(rows[:count] // 128, minlength=ROWS // 128)
    assert (signals_of(k, got, a.arrived_at, side, ROWS // 128) == tiles).all()
    # between two packets of a run the tail travels too: it means nothing
    for heap in (got, expected):
        heap[a.arrived_at : a.arrived_at + 2 * ROWS // 128 * 8] = 0
        packets = heap[a.rows_at : a.rows_at + 2 * ROWS * pitch].reshape(-1, pitch)
        packets[side * ROWS + rows[: count - 1], size:] = 0
    assert (got == expected).all()
    assert (warp.heaps[[1, RANK]] == before[[1, RANK]]).all()
    kinds = [entry[0] for entry in warp.log]
    assert kinds == ["put"] * kinds.count("put") + ["quiet"] + ["signal"] * np.count_nonzero(tiles)
    assert max(entry[1] for entry in warp.log if entry[0] == "put") <= warp.names["PIECE_BYTES"]
    assert warp.control == {PUT_ROWS: count}


def in_lines(rows: np.ndarray) -> np.ndarray:
    """Rows of bytes as one string, line by line of 128 bytes."""
    return np.concatenate([rows[:, c : c + 128].reshape(-1) for c in range(0, rows.shape[1], 128)])


def from_lines(lines: np.ndarray, rows: int) -> np.ndarray:
    """The rows of which `in_lines` made a string."""
    return lines.reshape(-1, rows, 128).transpose(1, 0, 2).reshape(rows, -1)


def runs_of(owners: np.ndarray, places: np.ndarray) -> list[tuple[int, int]]:
    """(warp, rows) of every run of neighbours that are neighbours at home, too, within each warp's share."""
    leaving = np.flatnonzero(owners != RANK)
    share = max(1, -(-len(leaving) // 8))
    out: list[tuple[int, int]] = []
    for number, r in enumerate(leaving):
        begins = number % share == 0 or owners[r - 1] != owners[r] or places[r - 1] + 1 != places[r]
        if begins:
            out.append((number // share, 0))
        out[-1] = (out[-1][0], out[-1][1] + 1)
    return out


@pytest.mark.parametrize(
    ("filled", "order"),
    [(128, "neighbours"), (128, "one source"), (77, "scattered"), (77, "neighbours"), (1, "scattered")],
)
@pytest.mark.parametrize(
    ("hidden", "dtype", "layout"),
    [
        (512, "bfloat16", "compact"),
        (320, "bfloat16", "compact"),
        (544, "float32", "compact"),
        (448, "bfloat16", "fixed"),
    ],
)
def test_column_tiles_of_remote_rows_go_home_and_the_last_block_signals(hidden, dtype, layout, order, filled):
    """Each column tile is put by its own block, remote rows only, a run of neighbours in one go; there the combine
    finds them. A token hears of a row once, after all of them."""
    k = shape_of(hidden, dtype, layout)
    row_tile, buffer = (3, 2) if k.fixed else (3, 3)
    warp, a = machine(k)
    warp.names["buffer_tile"] = lambda k, a, tile: buffer
    side, rng, routes_here = 1, np.random.default_rng(filled), TOKENS * k.top_k
    routes, places = (rng.permutation(routes_here)[:128] for _ in range(2))
    if order == "scattered":
        owners = rng.integers(0, RANKS, 128)
    elif order == "one source":
        owners, places = np.full(128, 1), np.arange(128)
    else:
        # rows of rank 0, 1 and 2, with a gap in the places of each: what replicas may leave
        owners = np.repeat([0, 1, 2], [50, 40, 38])
        places = np.concatenate([np.arange(50) + 7, np.arange(40), np.arange(38)])
        places[[*range(20, 50), *range(75, 90)]] += 5
    if k.fixed:
        # a tile is of one source
        owners = np.full(128, RANK if order == "neighbours" else 0)
    row_bytes, pitch, first = hidden * k.element_size, k.row_pitch, buffer * 128
    for r in range(128):
        end = a.rows_at + (side * ROWS + first + r) * pitch + row_bytes
        words = warp.heaps[RANK][end : end + 8].view(np.int32)
        words[:] = (owners[r] << constants.HOME_BITS) | np.array([routes[r], places[r]])
    before = warp.heaps.copy()
    share = warp.names["put_results"]
    warp.names["put_share"] = lambda k, a, side, row_tile, column, filled, consumer, lane: share(
        k, a, side, row_tile, column, warp.names["landings_of"](k, a, side, row_tile, filled, lane), consumer, lane
    )
    own, index = owners[:filled], np.arange(filled) if k.fixed else places[:filled]
    remote, runs = int((own != RANK).sum()), runs_of(own, index)
    width = 256 * k.element_size
    for column in reversed(range(k.columns1)):
        bytes_each = min(width, row_bytes - column * width)
        puts = []
        for consumer in range(8):
            warp.log.clear()
            warp.touched.clear()
            warp.asked_first = True
            warp.run("put_share", k, a, side, row_tile, column, filled, consumer)
            assert [entry[0] for entry in warp.log] == ["put"] * len(warp.log)
            sizes = [entry[1] for entry in warp.log]
            assert sum(sizes) == sum(rows for one, rows in runs if one == consumer) * bytes_each
            puts += sizes
        piece = warp.names["RESULT_PIECE_BYTES"]
        assert len(puts) == sum(-(-rows * 128 // piece) for _, rows in runs) * (bytes_each // 128)
        warp.log.clear()
        warp.run("count_put", k, a, side, row_tile, column, filled, True)
        kinds = [entry[0] for entry in warp.log]
        assert kinds == ["quiet"] * (remote > 0) + ["signal"] * (0 if column else filled)
    expected = before.copy()
    staged = before[RANK][a.results_at + row_tile * 128 * row_bytes :][: 128 * row_bytes]
    results = from_lines(staged, 128)
    # a block of results at home, row by row
    block = a.slot_capacity if k.fixed else routes_here
    for owner in {0, 1, 2} - {RANK}:
        start = a.returned_at + side * routes_here * row_bytes
        inside = places
        if k.fixed:
            # L[source, 0, side, slot, index] comes back as L[owner, 1, side, slot, index]
            there = side * ROWS + first + ((RANK - owner) * 2 + 1) * 2 * ROWS
            start, inside = a.rows_at + there // block * block * pitch, there % block + np.arange(128)
        home = from_lines(before[owner][start : start + block * row_bytes], block)
        mine = np.flatnonzero(own == owner)
        home[inside[mine]] = results[mine]
        expected[owner][start : start + block * row_bytes] = in_lines(home)
    for r in range(filled):
        back = expected[owners[r]][a.back_at :][: 2 * TOKENS * 8].view(np.int64)
        back[side * TOKENS + routes[r] // k.top_k] += 1
    assert (warp.heaps == expected).all()
    assert warp.control == {PUT_RESULTS: remote}
    # what the combine reads at home is what was computed
    for r in range(0, filled, 5):
        twist = (first + r) % 8
        where, side_at = [int(places[r]) | twist << 26] * k.top_k, a.returned_at + side * routes_here * row_bytes
        if k.fixed:
            row = first + r + ((RANK - owners[r]) * 2 + 1) * 2 * ROWS
            where = [int(row % block)] * 2 + [int(row // block * block)] * 2
            side_at = a.rows_at + side * ROWS * pitch
        for inside in range(0, row_bytes, 16):
            at = warp.names["result_at_home"](k, a, side_at, None, where, 1, inside % 512, inside // 512 * 512)
            lies = inside // 128 * 128 + ((inside // 16 ^ twist) % 8) * 16
            if owners[r] != RANK:
                assert (warp.heaps[owners[r]][at : at + 16] == results[r, lies : lies + 16]).all()
            elif lies % width == 0:
                arguments = (k, a, side, (RANK << 26) | int(places[r]), True, None, row_tile * 128 + r, first + r)
                assert warp.names["home_address"](*arguments, lies // width) == at, "where it is stored at home"


@pytest.mark.parametrize("order", ["neighbours", "scattered", "none leaves"])
@pytest.mark.parametrize(
    ("hidden", "layout", "filled"), [(512, "compact", 16), (320, "compact", 11), (448, "fixed", 16)]
)
def test_a_warp_puts_the_lines_of_its_rows_from_shared_memory(hidden, layout, filled, order):
    """Of its 16 rows those of other ranks, a run of neighbours in one go, to where the combine looks for them."""
    k = shape_of(hidden, layout=layout)
    warp, a = machine(k)
    side, first, column, rng = 1, 256 + 48, k.columns1 - 1, np.random.default_rng(filled)
    routes_here, row_bytes = TOKENS * k.top_k, hidden * 2
    places = rng.permutation(routes_here)[:16]
    owners = rng.integers(0, RANKS, 16)
    if order == "neighbours":
        owners = np.repeat([0, 1, RANK], [7, 3, 6])
        places = np.concatenate([np.arange(7) + 7, np.arange(3) + 9, np.arange(6) + 12])
        places[4:7] += 3
    elif order == "none leaves":
        owners = np.full(16, RANK)
    if k.fixed:
        owners = np.full(16, RANK if order == "none leaves" else 1)
    home = np.tile((owners << 26) | places, 2)
    leaves = (np.arange(32) % 16 < filled) & (home >> 26 != RANK)
    # two buffers of 128 rows of a line; this warp's rows lie in the first group's, as the third of four warps
    warp.shared_at = a.wire_at
    shared = warp.heaps[RANK][a.wire_at : a.wire_at + 2 * 128 * 128].reshape(2, 128, 128)[:, 32:48]
    before, lines = warp.heaps.copy(), (k.hidden - column * 256) // 64

    def share(k, a, pair, lane):
        names, owner, row = warp.names, int(home[lane]) >> 26, first + lane % 16
        starts, ends = names["runs_of_warp"](k, int(home[lane]), bool(leaves[lane]), lane)
        target = names["tile_at_home"](k, a, side, owner, int(home[lane]) & 0x3FFFFFF, row, column)
        put = (starts, ends, owner, target, names["landed_rows"](k, a) * 128)
        names["put_lines"](k, column, pair * 2, put, 0, 64 + lane)

    warp.names["share"] = share
    expected = before.copy()
    for pair in range(2):
        shared[:] = rng.integers(0, 256, shared.shape)
        warp.run("share", k, a, pair)
        for c in range(pair * 2, min(pair * 2 + 2, lines)):
            for r in np.flatnonzero(leaves[:16]):
                start, place, block = a.returned_at + side * routes_here * row_bytes, places[r], routes_here
                if k.fixed:
                    block, there = a.slot_capacity, side * ROWS + first + r + ((RANK - owners[r]) * 2 + 1) * 2 * ROWS
                    start, place = a.rows_at + there // block * block * k.row_pitch, there % block
                at = start + block * 128 * (column * 4 + c) + place * 128
                expected[owners[r]][at : at + 128] = shared[c % 2, r]
    expected[RANK] = warp.heaps[RANK]
    assert (warp.heaps == expected).all()
    mine = np.flatnonzero(leaves[:16])
    begun = [r for r in mine if r == 0 or not leaves[r - 1] or (home[r] != home[r - 1] + 1 and not k.fixed)]
    assert len(warp.log) == len(begun) * lines
    assert sum(entry[1] for entry in warp.log) == len(mine) * lines * 128


@pytest.mark.parametrize(("hidden", "dtype"), [(64, "bfloat16"), (1472, "bfloat16"), (4160, "float32")])
@pytest.mark.parametrize("count", [1, 7, 8])
def test_rows_leave_from_where_they_lie_to_a_peer_that_is_mapped(hidden, dtype, count):
    """Row and packet end land, nothing is staged, every byte is asked for first, and signals come last."""
    k = shape_of(hidden, dtype)
    side, begin, destination, rng = 1, 40, 0, np.random.default_rng(count)
    starts = np.zeros(k.plan_parts * k.experts + RANKS + 1, int)
    starts[k.plan_parts * k.experts :] = [begin] + [begin + count] * RANKS
    send = np.zeros(TOKENS * k.top_k, np.int64)
    routes, rows = rng.permutation(TOKENS * k.top_k)[:count], np.sort(rng.permutation(ROWS)[:count])
    send[begin : begin + count] = routes | (rows << 32)
    warp, a = machine(k, list_start=starts, send=send)
    a.mapped, warp.asked_first = True, True
    expected, row_bytes = warp.heaps.copy(), hidden * k.element_size
    for place, (route, row) in enumerate(zip(routes, rows, strict=True), begin):
        at, source = a.rows_at + (side * ROWS + row) * k.row_pitch, a.x + route // k.top_k * row_bytes
        expected[destination][at : at + row_bytes] = expected[RANK][source : source + row_bytes]
        words = expected[destination][at + row_bytes : at + row_bytes + 8].view(np.int32)
        words[:] = (RANK << constants.HOME_BITS) | np.array([route, place])
    tiles = np.bincount(rows // 128, minlength=ROWS // 128)
    signals_of(k, expected[destination], a.arrived_at, side, ROWS // 128)[:] += tiles
    warp.run("push_unit", k, a, side, destination, 0, 8)
    assert (warp.heaps == expected).all()
    kinds = [entry[0] for entry in warp.log]
    assert kinds == ["put"] * kinds.count("put") + ["quiet"] + ["signal"] * np.count_nonzero(tiles)
    assert warp.control == {PUT_ROWS: count}


def test_every_route_finds_its_place_again():
    """Where a route's result comes back to is its entry's place in the send list; masked routes have neither."""
    k, rng = shape_of(512), np.random.default_rng(5)
    count = TOKENS * k.top_k
    expert = rng.integers(-1, 6, count)
    each = np.bincount(expert[expert >= 0], minlength=6)
    starts, noise = np.cumsum(each) - each, -7
    warp, a = machine(
        k, tokens=TOKENS, expert=expert, index=[int((expert[:r] == expert[r]).sum()) for r in range(count)],
        histogram=np.zeros(6, int), list_start=np.tile(starts, k.plan_parts), row_shift=np.arange(6) * 1003,
        send=np.full(count, noise), where=np.full(count, noise),
    )  # fmt: skip
    # this side's targets, one word a token
    a.back_target = a.back_at
    for thread in range(256):
        routes = [[expert[thread] if thread < count else -1], [a.index[thread] if thread < count else 0], [1, 2]]
        warp.names["list_routes"](k, a, 1, 0, 64, 1, True, False, routes, ([-1], [0]), thread)
    kept = expert >= 0
    assert (a.where[~kept] == noise).all()
    assert (a.send[kept.sum() :] == noise).all()
    order = np.argsort(expert, kind="stable")[(~kept).sum() :]
    # its row there is 1003 e further: how the pieces of its lines lie comes from that
    place = np.arange(kept.sum())
    assert (a.where[order] == place | ((place + expert[order] * 1003) % 8 << 26)).all()
    assert (a.send[: kept.sum()] & 0xFFFFFFFF == order).all()


@pytest.mark.parametrize(("layout", "own"), [("compact", False), ("compact", True), ("fixed", False)])
def test_a_packet_tells_its_route_and_its_place(layout, own):
    """Behind every row lie its home and, where results come back by place, the same with the place in the send list."""
    k = shape_of(64, layout=layout)
    side, begin, count, destination = 1, 40, 13, RANK if own else 0
    starts = np.zeros(k.plan_parts * k.experts + RANKS + 1, int)
    starts[k.plan_parts * k.experts + destination :] = [begin] + [begin + count] * (RANKS - destination)
    send, rng = np.zeros(TOKENS * k.top_k, np.int64), np.random.default_rng(1)
    routes, rows = rng.permutation(TOKENS * k.top_k)[:count], rng.permutation(ROWS)[:count]
    send[begin : begin + count] = routes | (rows << 32)
    for pushed in ("push_unit", "push_own"):
        warp, a = machine(k, list_start=starts, send=send)
        warp.names["put_rows"] = lambda *_: None
        if pushed == "push_own":
            if not own:
                continue
            # one route a thread, of token tile 0
            place, row = np.full((32, 1), -1), np.zeros((32, 1), int)
            place[:count, 0], row[:count, 0] = begin + np.arange(count), rows
            push = warp.names["push_own"]
            warp.names["push"] = lambda k, a, side, tile, lane, push=push, place=place, row=row: push(
                k, a, side, tile, 64, (begin, begin + count), (place[lane], row[lane]), lane
            )
            warp.run("push", k, a, side, 0)
            routes = np.arange(count)
        else:
            for number in range(2):
                warp.run("push_unit", k, a, side, destination, number, 8)
        for i in range(count):
            at = a.wire_at + (begin + i) * k.row_pitch
            if own:
                at = a.rows_at + (side * ROWS + rows[i]) * k.row_pitch
            words = warp.heaps[RANK][at + 128 : at + 136].view(np.int32)
            assert words[0] == (RANK << constants.HOME_BITS) | routes[i]
            if k.by_place:
                assert words[1] == (RANK << constants.HOME_BITS) | (begin + i)


def test_nothing_is_signalled_after_a_failure_and_shared_rows_stay():
    """Rows of the shared expert are counted at home; a call that was given up counts tiles but tells nobody."""
    k = shape_of(512)
    warp, a = machine(k)
    before = warp.heaps.copy()
    for column in range(k.columns1):
        warp.run("count_put", k, a, 0, 0, column, 3, False)
    assert warp.counters == {1000: k.columns1}
    back = signals_of(k, warp.heaps[RANK], a.back_at, 0, TOKENS)
    assert back[:3].tolist() == [1, 1, 1]
    assert back.sum() == 3
    assert (warp.heaps[[0, 1]] == before[[0, 1]]).all()
    warp, a = machine(k)
    a.aborted = True
    for column in range(k.columns1):
        warp.run("count_put", k, a, 0, 1, column, 128, True)
    assert warp.counters == {1: k.columns1}
    assert not [entry for entry in warp.log if entry[0] != "quiet"]
