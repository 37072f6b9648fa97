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

from moe_fast.kernel import constants, limits
from moe_fast.kernel.shapes import KernelShape
from moe_ref.config import MoEConfig
from moe_ref.placement import Placement

KERNEL = Path(limits.__file__).parent
LANES, RANKS, RANK = 32, 3, 2
ROWS, TOKENS = 512, 64
PUT_ROWS, PUT_RESULTS = 4, 5
TRANSPORT = (
    "put_rows", "next_bit", "lowest", "homes_of", "put_results", "count_put", "touch", "SIGNAL_ADD", "WARPS", "GROUPS",
    "PIECE_BYTES", "HOME_BYTES", "SECTOR_BYTES", "WARP_BYTES",
)  # fmt: skip
SIGNALS = ("arrived_word", "back_word", "buffer_tile", "home_of", "home_row", "result_at")


class Warp:
    """Runs a function in 32 threads and plays what it calls."""

    def __init__(self, k: KernelShape, heaps: np.ndarray) -> None:
        self.k, self.heaps = k, heaps
        self.log: list[tuple] = []
        self.control: Counter[int] = Counter()
        self.counters: Counter[int] = Counter()
        self.touched: set[int] = set()
        self.asked_first = False
        self.names = self._names()

    def run(self, function: str, *arguments, lanes: dict[int, np.ndarray] | None = None) -> None:
        """Call `function` in every lane; lanes: arguments that differ, by position. The lane comes last."""
        self.barrier = threading.Barrier(LANES, timeout=20)
        # in turn, so that one barrier is enough: nobody is two ahead of another who still reads
        self.shared: tuple[list, list] = [None] * LANES, [None] * LANES
        errors: list[BaseException] = []

        def one(lane: int) -> None:
            own = [int(lanes[i][lane]) if lanes and i in lanes else value for i, value in enumerate(arguments)]
            self.local.lane, self.local.turn = lane, 0
            try:
                self.names[function](*own, lane)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        self.local = threading.local()
        threads = [threading.Thread(target=one, args=(lane,)) for lane in range(LANES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])

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
            if self.asked_first:
                asked = {s // 32 for s in range(source, source + size, 16)}
                assert asked <= self.touched, "a put's bytes weren't asked for"
            self.heaps[rank][target : target + size] = self.heaps[RANK][source : source + size]
            self.log.append(("put", size))
        self.together(None)

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

    def _read(self, address: int, index: int) -> int:
        at = address + index * 4
        assert 0 <= at <= self.heaps.shape[1] - 4, "a load beyond the heap"
        self.touched.add(at // 32)
        return int(self.heaps[RANK][at : at + 4].view(np.int32)[0])

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
            popc=lambda bits: (bits & 0xFFFFFFFF).bit_count(),
            fence_acq_rel_sys=lambda: None,
            fence_acq_rel_gpu=lambda: None,
        )
        names = {
            "cute": SimpleNamespace(jit=jit, arch=arch, make_rmem_tensor=lambda size, kind: [0] * size),
            "cutlass": SimpleNamespace(
                range_constexpr=range, const_expr=lambda value: value, Constexpr=None,
                select_=lambda condition, yes, no: yes if condition else no,
            ),
            "Int32": int, "Int64": int, "Uint64": int, "Boolean": bool, "KernelShape": KernelShape, "Args": None,
            "gmem": lambda address, dtype=None: address,
            "read": self._read,
            "await_values": lambda value: None,
            "nvshmem_put": self._put, "nvshmem_quiet": self._quiet, "nvshmem_signal": self._signal,
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
        for module, wanted in (("signals", SIGNALS), ("transport", TRANSPORT)):
            tree = ast.parse((KERNEL / f"{module}.py").read_text())
            kept = []
            for node in tree.body:
                if isinstance(node, ast.FunctionDef):
                    found = node.name
                elif isinstance(node, ast.Assign):
                    target = node.targets[0]
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
        "results_at": ROWS * row_bytes,
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
        tile_at=None, **at, **more,
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


@pytest.mark.parametrize("filled", [128, 77, 1])
@pytest.mark.parametrize(
    ("hidden", "dtype", "layout"),
    [
        (512, "bfloat16", "compact"),
        (320, "bfloat16", "compact"),
        (544, "float32", "compact"),
        (512, "bfloat16", "fixed"),
    ],
)
def test_column_tiles_of_remote_rows_go_home_and_the_last_block_signals(hidden, dtype, layout, filled):
    """Each column tile is put by its own block, remote rows only; a token hears of a row once, after all of them."""
    k = shape_of(hidden, dtype, layout)
    row_tile, buffer = 3, (2 if layout == "fixed" else 3)
    warp, a = machine(k)
    warp.names["buffer_tile"] = lambda k, a, tile: buffer
    side, rng = 1, np.random.default_rng(filled)
    owners = rng.integers(0, RANKS, 128)
    routes = rng.permutation(TOKENS * k.top_k)[:128]
    row_bytes, pitch, first = hidden * k.element_size, k.row_pitch, buffer * 128
    for r in range(128):
        home = a.rows_at + (side * ROWS + first + r) * pitch + row_bytes
        warp.heaps[RANK][home : home + 4].view(np.int32)[0] = (owners[r] << constants.HOME_BITS) | routes[r]
    before = warp.heaps.copy()
    for column in reversed(range(k.columns1)):
        warp.log.clear()
        shares = []
        for consumer in range(8):
            warp.run("put_results", k, a, side, row_tile, column, filled, consumer)
            shares.append(len(warp.log) - sum(shares))
        assert max(shares) - min(shares) <= 1, "the rows are dealt out evenly"
        warp.run("count_put", k, a, side, row_tile, column, filled, True)
        kinds = [entry[0] for entry in warp.log]
        remote = int((owners[:filled] != RANK).sum())
        assert kinds.count("put") == remote
        assert kinds[:remote] == ["put"] * remote
        assert kinds.count("quiet") == (remote > 0)
        assert kinds.count("signal") == (0 if column else filled)
    expected = before.copy()
    for r in range(filled):
        owner, route = owners[r], routes[r]
        if owner != RANK:
            target = a.returned_at + (side * TOKENS * k.top_k + route) * row_bytes
            if k.fixed:
                # L[source, 0, side, slot, index] comes back as L[owner, 1, side, slot, index]
                target = a.rows_at + (side * ROWS + first + r + ((RANK - owner) * 2 + 1) * 2 * ROWS) * pitch
            source = a.results_at + (row_tile * 128 + r) * row_bytes
            expected[owner][target : target + row_bytes] = before[RANK][source : source + row_bytes]
        expected[owner][a.back_at :][: 2 * TOKENS * 8].view(np.int64)[side * TOKENS + route // k.top_k] += 1
    assert (warp.heaps == expected).all()
    assert warp.control == ({PUT_RESULTS: remote} if remote else {PUT_RESULTS: 0})


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
