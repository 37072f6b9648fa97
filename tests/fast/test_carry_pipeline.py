"""The pipeline of tasks with and without carried rows, as threads: the kernel's own loader and main loops, around them
the waits of consumers and storer in the kernel's order. Every operand must be what it should be until the tensor cores
have read it, every epilogue buffer until the storer has, and nobody may wait for ever."""

from __future__ import annotations

import contextlib
import random
import threading
import types
from typing import Any

import pytest
from kernel_source import kernel_function

from moe_fast.kernel.constants import AHEAD, CARRIED_ROWS, LINE_BYTES, STAGES, TILE_COLUMNS, TILE_ROWS

FULL, EMPTY, FREE, CHUNK_FULL, CHUNK_EMPTY, SENT, ASKED = (n * 100 for n in range(7))
WARPS = 4
"""Of a consumer warpgroup."""
BYTES = {"rows": TILE_ROWS, "low": TILE_COLUMNS // 2, "high": TILE_COLUMNS // 2, "few": CARRIED_ROWS}


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes have."""

    def __init__(self, count: int, change: threading.Condition) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0
        self.change = change

    def update(self, arrivals: int = 0, expected: int = 0, came: int = 0) -> None:
        with self.change:
            self.pending -= arrivals
            self.bytes += expected - came
            assert self.pending >= 0
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.change.notify_all()

    def wait(self, parity: int) -> None:
        with self.change:
            assert self.change.wait_for(lambda: self.phase & 1 != parity, timeout=20), "waits for ever"


class Pipeline:
    """One block: its barriers and shared memory; tasks: (is it a first product, does it carry)."""

    def __init__(self, tasks: list[tuple[bool, bool]], depth: int, chunks: int, seed: int) -> None:
        self.tasks, self.depth, self.chunks = tasks, depth, chunks
        self.random = random.Random(seed)
        self.change = threading.Condition()
        counts = [(FULL, STAGES, 1), (EMPTY, STAGES, 2 * WARPS), (FREE, 1, 2 * WARPS), (CHUNK_FULL, 4, WARPS)]
        counts += [(CHUNK_EMPTY, 4, 1), (SENT, 64, 2 * WARPS), (ASKED, 1, 1)]
        self.barriers = {at + i: Barrier(count, self.change) for at, n, count in counts for i in range(n)}
        self.memory: dict[Any, Any] = {}
        self.both = threading.Barrier(2 * WARPS)
        self.copies: list[tuple[Any, Any, int]] = []
        self.over = False
        self.own = threading.local()
        self.errors: list[BaseException] = []

    # the ring of a stage is two warps' parts of a first epilogue buffer
    def part(self, group: int, buffer: int, warp: int) -> list[Any]:
        return [("few", 2 * group + warp // 2), ("part", group, 0, warp)] if buffer == 0 else [("part", group, 1, warp)]

    def copy(self, atom: str, source: tuple, target: Any, tma_bar_ptr: int) -> None:
        assert source[0] == atom
        with self.change:
            self.copies.append((source, target, tma_bar_ptr))
            self.change.notify_all()

    def transfer(self) -> None:
        """Asynchronous copies, in any order."""
        while True:
            with self.change:
                self.change.wait_for(lambda: self.copies or self.over, timeout=20)
                if not self.copies:
                    return
                source, target, barrier = self.copies.pop(self.random.randrange(len(self.copies)))
                self.memory[target] = source
                if target[0] == "few":
                    for warp in range(WARPS):
                        if warp // 2 == target[1] % 2:
                            self.memory["part", target[1] // 2, 0, warp] = source
            self.barriers[barrier].update(came=BYTES[source[0]] * LINE_BYTES)

    def arch(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            elect_one=contextlib.nullcontext,
            mbarrier_arrive=lambda at: self.barriers[at].update(arrivals=1),
            mbarrier_arrive_and_expect_tx=lambda at, size: self.barriers[at].update(arrivals=1, expected=size),
            mbarrier_wait=lambda at, parity: self.barriers[at].wait(parity),
        )

    def load(self) -> None:
        cute = types.SimpleNamespace(arch=self.arch(), copy=self.copy)
        names = {
            "STAGES": STAGES, "AHEAD": AHEAD, "TILE_ROWS": TILE_ROWS, "TILE_COLUMNS": TILE_COLUMNS,
            "LINE_BYTES": LINE_BYTES, "CARRIED_ROWS": CARRIED_ROWS, "cute": cute,
        }  # fmt: skip
        plain = kernel_function("gemm", "load_product", **names)
        carrying = kernel_function("gemm", "load_carrying", **names)
        count = turn = 0
        for number, (_, carries) in enumerate(self.tasks):
            rows, low, high, few = (Tagged(name, number) for name in ("rows", "low", "high", "few"))
            weights = Places("weights")
            if carries:
                count = carrying(
                    self.depth, FULL, EMPTY, count, "rows", rows, Places("rows"), Weights(), low, high, weights,
                    "few", few, Places("few"), ASKED, FREE, turn,
                )  # fmt: skip
                turn += 1
            else:
                count = plain(
                    self.depth, FULL, EMPTY, count, "rows", rows, Places("rows"), Weights(), low, high, weights, ASKED,
                    TILE_ROWS,
                )  # fmt: skip

    def gemm(self, mma: Any, acc: Any, a: Any, b: Any, _: Any) -> None:
        self.own.reads += [(place, self.own.task, self.own.steps) for place in (a, b)]

    def commit(self) -> None:
        self.own.groups.append(self.own.reads)
        self.own.reads, self.own.steps = [], self.own.steps + 1

    def finish(self, left: int) -> None:
        """The tensor cores read as late as they may."""
        while len(self.own.groups) > left:
            for (kind, stage), task, step in self.own.groups.pop(0):
                if kind == "weights":
                    assert self.memory[kind, 2 * stage] == ("low", task, step)
                    assert self.memory[kind, 2 * stage + 1] == ("high", task, step)
                else:
                    assert self.memory[kind, stage] == (kind, task, step), "an operand was overwritten"

    def consume(self, group: int, warp: int) -> None:
        warpgroup = types.SimpleNamespace(
            Field=types.SimpleNamespace(ACCUMULATE=0), fence=lambda: None, commit_group=self.commit,
            wait_group=self.finish,
        )  # fmt: skip
        cute = types.SimpleNamespace(arch=self.arch(), gemm=self.gemm, size=lambda fragment, mode: 4)
        names = {
            "STAGES": STAGES, "CARRIED_ROWS": CARRIED_ROWS, "cute": cute, "warpgroup": warpgroup,
            "tiled_mma": lambda dtype, columns=0: types.SimpleNamespace(set=lambda field, value: None),
            "release": lambda empty, count: self.barriers[empty + count % STAGES].update(arrivals=1),
        }  # fmt: skip
        plain, carrying = (kernel_function("gemm", name, **names) for name in ("multiply", "multiply_carrying"))
        rows, weights, few = Fragment("rows"), Fragment("weights"), Fragment("few")
        own, count, parity, returns = self.own, 0, 0, 0
        chunk = [CHUNK_EMPTY + group * 2, CHUNK_EMPTY + group * 2 + 1]
        for number, (first, carries) in enumerate(self.tasks):
            own.task, own.steps, own.reads, own.groups = number, 0, [], []
            if carries:
                self.barriers[chunk[0]].wait((parity & 1) ^ 1)
                self.barriers[FREE].update(arrivals=1)
                count = carrying(None, None, None, rows, weights, weights, few, FULL, EMPTY, count, self.depth)
                self.both.wait(timeout=20)
                self.barriers[chunk[1]].wait((parity & 1) ^ 1)
                self.put(group, 1, warp, ("turned", number))
            else:
                count = plain(None, 256, None, rows, weights, FULL, EMPTY, count, self.depth)
            if first:
                for c in range(self.chunks):
                    self.barriers[chunk[c % 2]].wait(((parity + c // 2) & 1) ^ 1)
                    self.put(group, c % 2, warp, ("chunk", number, c))
                    self.barriers[CHUNK_FULL + group * 2 + c % 2].update(arrivals=1)
                parity += self.chunks // 2
            else:
                for buffer in (0, 1):
                    self.barriers[chunk[buffer]].wait((parity & 1) ^ 1)
                for c in range(4):
                    self.put(group, c % 2, warp, ("result", number, c))
                self.barriers[SENT + returns].update(arrivals=1)
                returns += 1

    def put(self, group: int, buffer: int, warp: int, value: tuple) -> None:
        with self.change:
            for place in self.part(group, buffer, warp):
                self.memory[place] = value

    def store(self) -> None:
        parity = returns = 0
        for number, (first, _) in enumerate(self.tasks):
            if not first:
                self.barriers[SENT + returns].wait(0)
                returns += 1
                continue
            for c in range(self.chunks):
                for group in range(2):
                    self.barriers[CHUNK_FULL + group * 2 + c % 2].wait((parity + c // 2) & 1)
                    for warp in range(WARPS):
                        assert self.memory["part", group, c % 2, warp] == ("chunk", number, c), (
                            "a chunk was overwritten"
                        )
                    self.barriers[CHUNK_EMPTY + group * 2 + c % 2].update(arrivals=1)
            parity += self.chunks // 2

    def run(self) -> None:
        def guarded(role: Any, *given: int) -> None:
            try:
                role(*given)
            except BaseException as error:
                self.errors.append(error)
                self.both.abort()

        roles: list[tuple] = [(self.load,), (self.store,)]
        roles += [(self.consume, group, warp) for group in range(2) for warp in range(WARPS)]
        threads = [threading.Thread(target=guarded, args=role, daemon=True) for role in roles]
        copier = threading.Thread(target=guarded, args=(self.transfer,), daemon=True)
        for thread in (*threads, copier):
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        with self.change:
            self.over = True
            self.change.notify_all()
        copier.join(timeout=60)
        for error in sorted(self.errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        assert not any(thread.is_alive() for thread in (*threads, copier))
        used = {place: barrier for place, barrier in self.barriers.items() if barrier.bytes}
        assert not used, "bytes are still expected"


class Tagged:
    """An operand of a task in global memory, by steps."""

    def __init__(self, name: str, task: int) -> None:
        self.name, self.task = name, task

    def __getitem__(self, at: tuple) -> tuple:
        return self.name, self.task, at[1]


class Places:
    """Places in shared memory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, at: tuple) -> tuple:
        return self.name, at[1]


class Weights(str):
    """The copy atom of both halves."""

    def __eq__(self, other: object) -> bool:
        return other in ("low", "high")

    __hash__ = str.__hash__


class Fragment(Places):
    """What wgmma's descriptors point at."""

    def __getitem__(self, at: tuple) -> tuple:
        return self.name, at[3]


@pytest.mark.parametrize("depth", [STAGES, STAGES + 1, 12])
@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_no_operand_and_no_buffer_is_overwritten_and_nobody_waits_for_ever(depth, chunks, seed):
    choose = random.Random(100 * seed + depth)
    tasks = [(choose.random() < 0.6, choose.random() < 0.6) for _ in range(14)]
    Pipeline(tasks, depth, chunks, seed).run()
