"""The pipeline of tasks with and without carried rows, of one block and of a pair, as threads: the kernel's own loader
and main loops, around them the waits of consumers and storer in the kernel's order. Every operand must be what it
should be until the tensor cores have read it, every epilogue buffer until the storer has, and nobody may wait for ever.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from kernel_source import kernel_function

from moe_fast.kernel.constants import (
    AHEAD,
    CARRIED_ROWS,
    FEW_ROWS,
    HALF_COLUMNS,
    LINE_BYTES,
    STAGES,
    TILE_COLUMNS,
    TILE_ROWS,
)

FULL, EMPTY, FREE, CHUNK_FULL, CHUNK_EMPTY, SENT, ASKED = (n * 100 for n in range(7))
WARPS = 4
"""Of a consumer warpgroup."""
PATIENCE = 20
"""Seconds after which a wait is one for ever."""
WEIGHTS, CARRIED = (HALF_COLUMNS, "low", "high"), (CARRIED_ROWS, "few")
"""Copy atoms: rows that one brings, and of what."""


@dataclass(frozen=True)
class Task:
    """Whether it is a first product, whether both blocks of a pair multiply by the same weights, the blocks' rows."""

    first: bool
    same: bool
    filled: tuple[int, ...]


class Stopped(Exception):
    """Another thread has failed."""


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes have."""

    def __init__(self, count: int, pipeline: Pipeline) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0
        self.pipeline, self.change = pipeline, threading.Condition(pipeline.lock)

    def update(self, arrivals: int = 0, expected: int = 0, came: int = 0) -> None:
        with self.change:
            self.pending -= arrivals
            self.bytes += expected - came
            assert self.pending >= 0, "more arrivals than a phase has"
            assert self.pending > 0 or self.bytes >= 0, "more bytes than a phase has"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.change.notify_all()

    def wait(self, parity: int) -> None:
        with self.change:
            over = self.change.wait_for(lambda: self.pipeline.failed or self.phase & 1 != parity, timeout=PATIENCE)
            if self.pipeline.failed:
                raise Stopped
            assert over, "waits for ever"


class Block:
    """One block: its barriers, its shared memory and its roles."""

    def __init__(self, member: int, pipeline: Pipeline) -> None:
        self.member, self.pipeline = member, pipeline
        counts = [(FULL, STAGES, 1), (EMPTY, STAGES, pipeline.releases), (FREE, 1, 2 * WARPS), (CHUNK_FULL, 4, WARPS)]
        counts += [(CHUNK_EMPTY, 4, 1), (SENT, 64, 2 * WARPS), (ASKED, 1, 1)]
        self.barriers = {at + i: Barrier(count, pipeline) for at, n, count in counts for i in range(n)}
        self.memory: dict[Any, Any] = {}
        self.both = threading.Barrier(2 * WARPS)
        self.own = threading.local()
        self.multiplied = 0
        """Steps that the warps have handed to the tensor cores, all warps together."""
        # here, for Python's parser isn't made for several threads
        self.kernel = self.functions()

    def functions(self) -> types.SimpleNamespace:
        """The kernel's own, on this block's barriers and memory."""
        warpgroup = types.SimpleNamespace(
            Field=types.SimpleNamespace(ACCUMULATE=0), fence=lambda: None, commit_group=self.commit,
            wait_group=self.finish,
        )  # fmt: skip
        cute = types.SimpleNamespace(arch=self.arch(), copy=self.copy, gemm=self.gemm, size=lambda fragment, mode: 4)
        names = {
            "STAGES": STAGES, "AHEAD": AHEAD, "TILE_ROWS": TILE_ROWS, "TILE_COLUMNS": TILE_COLUMNS,
            "LINE_BYTES": LINE_BYTES, "CARRIED_ROWS": CARRIED_ROWS, "Int16": int, "cute": cute, "warpgroup": warpgroup,
            "tiled_mma": lambda dtype, columns=0: types.SimpleNamespace(set=lambda field, value: None),
        }  # fmt: skip
        names["load_weights"] = kernel_function("loads", "load_weights", **names)
        names["release"] = self.pipeline.releasing(kernel_function("gemm", "release", **names))
        used = {"loads": ("load_product", "load_carrying"), "gemm": ("multiply", "multiply_carrying", "pass_over")}
        return types.SimpleNamespace(
            **{name: kernel_function(file, name, **names) for file, some in used.items() for name in some}
        )

    # the ring of a stage is two warps' parts of a first epilogue buffer
    def part(self, group: int, buffer: int, warp: int) -> list[Any]:
        return [("few", 2 * group + warp // 2), ("part", group, 0, warp)] if buffer == 0 else [("part", group, 1, warp)]

    def copy(self, atom: tuple, source: tuple, target: Any, tma_bar_ptr: int, mcast_mask: int | None = None) -> None:
        size, *names = atom
        assert source[0] in names
        members = [self.member] if mcast_mask is None else [m for m in (0, 1) if mcast_mask >> m & 1]
        self.pipeline.ask([(m, source, target, tma_bar_ptr, size * LINE_BYTES) for m in members])

    def land(self, source: tuple, target: Any, barrier: int, size: int) -> None:
        with self.pipeline.lock:
            self.memory[target] = source
            if target[0] == "few":
                for warp in range(WARPS):
                    if warp // 2 == target[1] % 2:
                        self.memory["part", target[1] // 2, 0, warp] = source
        self.barriers[barrier].update(came=size)

    def arch(self) -> types.SimpleNamespace:
        def arrive(at: int, member: int = self.member) -> None:
            self.pipeline.blocks[member].barriers[at].update(arrivals=1)

        return types.SimpleNamespace(
            elect_one=contextlib.nullcontext,
            mbarrier_arrive=arrive,
            mbarrier_arrive_and_expect_tx=lambda at, size: self.barriers[at].update(arrivals=1, expected=size),
            mbarrier_wait=lambda at, parity: self.barriers[at].wait(parity),
        )

    def operand(self, name: str, number: int) -> tuple:
        """Which operand of a task this block multiplies by."""
        shared = name in WEIGHTS and self.pipeline.tasks[number].same
        return name, number, "both" if shared else self.member

    def load(self) -> None:
        count = turn = 0
        for number, task in enumerate(self.pipeline.tasks):
            rows, low, high, few = (Tagged(self.operand(name, number)) for name in ("rows", "low", "high", "few"))
            k, depth, pair = self.pipeline.k, self.pipeline.depth[task.first], (task.same, self.member)
            weights, filled = Places("weights"), task.filled[self.member]
            if filled > TILE_ROWS:
                count = self.kernel.load_carrying(
                    k, depth, FULL, EMPTY, count, (TILE_ROWS, "rows"), rows, Places("rows"), WEIGHTS, low, high,
                    weights, CARRIED, few, Places("few"), ASKED, FREE, turn, pair,
                )  # fmt: skip
                turn += 1
            else:
                there = next(n for n in (FEW_ROWS, TILE_ROWS // 2, TILE_ROWS) if filled <= n)
                count = self.kernel.load_product(
                    k, depth, FULL, EMPTY, count, (there, "rows"), rows, Places("rows", TILE_ROWS // there), WEIGHTS,
                    low, high, weights, ASKED, there, pair,
                )  # fmt: skip

    def gemm(self, mma: Any, acc: Any, a: Any, b: Any, _: Any) -> None:
        self.own.reads += [(place, self.own.task, self.own.steps) for place in (a, b)]

    def commit(self) -> None:
        if (*self.own.who, self.own.task, self.own.steps) == self.pipeline.late:
            time.sleep(self.pipeline.pause)
        self.own.groups.append(self.own.reads)
        self.own.reads, self.own.steps = [], self.own.steps + 1
        with self.pipeline.lock:
            self.multiplied += 1

    def finish(self, left: int) -> None:
        """The tensor cores read as late as they may."""
        while len(self.own.groups) > left:
            for (kind, stage), task, step in self.own.groups.pop(0):
                places = [((kind, stage), kind)]
                if kind == "weights":
                    places = [((kind, 2 * stage), "low"), ((kind, 2 * stage + 1), "high")]
                for place, name in places:
                    found = self.memory[place]
                    assert found == (*self.operand(name, task), step), f"{name} of {task}, {step} are {found}"

    def consume(self, group: int, warp: int) -> None:
        rows, weights, few = Fragment("rows"), Fragment("weights"), Fragment("few")
        own, count, parity, returns, paired = self.own, 0, 0, 0, self.pipeline.k.paired
        own.who = self.member, group, warp
        chunk = [CHUNK_EMPTY + group * 2, CHUNK_EMPTY + group * 2 + 1]
        for number, task in enumerate(self.pipeline.tasks):
            own.task, own.steps, own.reads, own.groups = number, 0, [], []
            depth, filled = self.pipeline.depth[task.first], task.filled[self.member]
            if filled > TILE_ROWS:
                self.barriers[chunk[0]].wait((parity & 1) ^ 1)
                self.barriers[FREE].update(arrivals=1)
                count = self.kernel.multiply_carrying(
                    None, None, None, rows, weights, weights, few, FULL, EMPTY, count, depth, paired
                )
                self.both.wait(timeout=PATIENCE)
                self.barriers[chunk[1]].wait((parity & 1) ^ 1)
                self.put(group, 1, warp, ("turned", number))
            elif filled > group * (TILE_ROWS // 2):
                count = self.kernel.multiply(None, 256, None, rows, weights, FULL, EMPTY, count, depth, paired)
            else:
                count = self.kernel.pass_over(FULL, EMPTY, count, depth, paired)
            if task.first:
                for c in range(self.pipeline.chunks):
                    self.barriers[chunk[c % 2]].wait(((parity + c // 2) & 1) ^ 1)
                    self.put(group, c % 2, warp, ("chunk", number, c))
                    self.barriers[CHUNK_FULL + group * 2 + c % 2].update(arrivals=1)
                parity += self.pipeline.chunks // 2
            else:
                for buffer in (0, 1):
                    self.barriers[chunk[buffer]].wait((parity & 1) ^ 1)
                for c in range(4):
                    self.put(group, c % 2, warp, ("result", number, c))
                self.barriers[SENT + returns].update(arrivals=1)
                returns += 1

    def put(self, group: int, buffer: int, warp: int, value: tuple) -> None:
        with self.pipeline.lock:
            for place in self.part(group, buffer, warp):
                self.memory[place] = value

    def store(self) -> None:
        parity = returns = 0
        for number, task in enumerate(self.pipeline.tasks):
            if not task.first:
                self.barriers[SENT + returns].wait(0)
                returns += 1
                continue
            for c in range(self.pipeline.chunks):
                for group in range(2):
                    self.barriers[CHUNK_FULL + group * 2 + c % 2].wait((parity + c // 2) & 1)
                    for warp in range(WARPS):
                        assert self.memory["part", group, c % 2, warp] == ("chunk", number, c), (
                            "a chunk was overwritten"
                        )
                    self.barriers[CHUNK_EMPTY + group * 2 + c % 2].update(arrivals=1)
            parity += self.pipeline.chunks // 2


class Pipeline:
    """The blocks that share tasks, one or a pair of them.

    depth: steps of a second and of a first product. late: the consumer warp (block, warpgroup, warp, task, step) that
    pauses before it hands that step to the tensor cores. own: whether stages are handed back to the own block only,
    whose barriers then count its own consumers, as they must not.
    """

    def __init__(
        self, tasks: list[Task], depth: tuple[int, int], chunks: int, seed: int, late: tuple = (), pause: float = 0.0,
        own: bool = False,
    ) -> None:  # fmt: skip
        members = len(tasks[0].filled)
        self.tasks, self.depth, self.chunks, self.late, self.pause = tasks, depth, chunks, late, pause
        self.k = types.SimpleNamespace(paired=members == 2)
        self.only_own, self.releases = own, 2 * WARPS if own else 2 * WARPS * members
        self.random, self.lock = random.Random(seed), threading.RLock()
        self.asked = threading.Condition(self.lock)
        self.copies: list[tuple] = []
        self.over = self.failed = False
        self.errors: list[BaseException] = []
        self.blocks = [Block(m, self) for m in range(members)]

    def releasing(self, release: Callable) -> Callable:
        return (lambda empty, count, paired: release(empty, count)) if self.only_own else release

    def ask(self, copies: list[tuple]) -> None:
        with self.asked:
            self.copies += copies
            self.asked.notify_all()

    def transfer(self) -> None:
        """Asynchronous copies, in any order; one that goes to both blocks needn't come to both at once."""
        while True:
            with self.asked:
                self.asked.wait_for(lambda: self.copies or self.over)
                if not self.copies:
                    return
                member, *copy = self.copies.pop(self.random.randrange(len(self.copies)))
            self.blocks[member].land(*copy)

    def guarded(self, role: Any, *given: int) -> None:
        try:
            role(*given)
        except Stopped:
            return
        except BaseException as error:
            with self.lock:
                if not self.failed:
                    self.errors.append(error)
                self.failed = True
                for block in self.blocks:
                    block.both.abort()
                    for barrier in block.barriers.values():
                        barrier.change.notify_all()

    def run(self) -> list[int]:
        """Until every role has come to the end of the tasks; returns the steps that each block's warps multiplied.

        Raises:
            AssertionError: an operand or a buffer was overwritten, somebody waits for ever, or bytes are missing.
        """
        roles: list[tuple] = []
        for block in self.blocks:
            roles += [(block.load,), (block.store,)]
            roles += [(block.consume, group, warp) for group in range(2) for warp in range(WARPS)]
        threads = [threading.Thread(target=self.guarded, args=role, daemon=True) for role in roles]
        copier = threading.Thread(target=self.guarded, args=(self.transfer,), daemon=True)
        for thread in (*threads, copier):
            thread.start()
        for thread in threads:
            thread.join(timeout=3 * PATIENCE)
        with self.asked:
            self.over = True
            self.asked.notify_all()
        copier.join(timeout=3 * PATIENCE)
        if self.errors:
            raise self.errors[0]
        assert not any(thread.is_alive() for thread in (*threads, copier))
        for block in self.blocks:
            assert not any(barrier.bytes for barrier in block.barriers.values()), "bytes are still expected"
            # all stages are handed back: each has had as many phases of loads as of releases
            for stage in range(STAGES):
                assert block.barriers[FULL + stage].phase == block.barriers[EMPTY + stage].phase
        return [block.multiplied for block in self.blocks]


class Tagged:
    """An operand of a task in global memory, by steps."""

    def __init__(self, operand: tuple) -> None:
        self.operand = operand

    def __getitem__(self, at: tuple) -> tuple:
        return *self.operand, at[1]


class Places:
    """Places in shared memory; each: how many parts of one there are."""

    def __init__(self, name: str, each: int = 1) -> None:
        self.name, self.each = name, each

    def __getitem__(self, at: tuple) -> tuple:
        place, part = divmod(at[1], self.each)
        assert part == 0
        return self.name, place


class Fragment(Places):
    """What wgmma's descriptors point at."""

    def __getitem__(self, at: tuple) -> tuple:
        return self.name, at[3]


def steps_of(tasks: list[Task], depth: tuple[int, int]) -> list[int]:
    """What `Pipeline.run` has to return: a warpgroup multiplies where its 64 rows aren't all padding."""
    members = range(len(tasks[0].filled))
    groups = [[sum(task.filled[m] > 64 * group for group in range(2)) for task in tasks] for m in members]
    return [sum(n * WARPS * depth[t.first] for n, t in zip(one, tasks, strict=True)) for one in groups]


ROWS = (9, 40, 128)
"""Of a task that carries none: 16, 64 and 128 of them are loaded, one warpgroup computes or both."""
DEPTHS = [(STAGES, STAGES + 1), (STAGES + 1, 12), (12, STAGES)]


def random_rows(choose: random.Random) -> int:
    return TILE_ROWS + choose.randrange(1, CARRIED_ROWS + 1) if choose.random() < 0.6 else choose.choice(ROWS)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_no_operand_and_no_buffer_is_overwritten_and_nobody_waits_for_ever(depth, chunks, seed):
    choose = random.Random(100 * seed + sum(depth))
    tasks = [Task(choose.random() < 0.6, False, (random_rows(choose),)) for _ in range(14)]
    assert Pipeline(tasks, depth, chunks, seed).run() == steps_of(tasks, depth)


def pair_tasks(choose: random.Random, number: int) -> list[Task]:
    """Where one block carries, both or none; the same weights or not; now and then a second block without rows."""
    tasks = []
    for _ in range(number):
        rows = random_rows(choose), 0 if choose.random() < 0.2 else random_rows(choose)
        tasks.append(Task(choose.random() < 0.6, choose.random() < 0.6, rows))
    return tasks


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("seed", range(8))
def test_nor_in_a_pair_of_blocks(depth, chunks, seed):
    """Whose weights come from both, while one carries rows, the other has none, and one warp is late."""
    choose = random.Random(1000 * seed + 10 * sum(depth) + chunks)
    tasks = pair_tasks(choose, 12)
    late = (choose.randrange(2), choose.randrange(2), choose.randrange(WARPS), choose.randrange(3), 1)
    assert Pipeline(tasks, depth, chunks, seed, late, 0.05).run() == steps_of(tasks, depth)


@pytest.mark.parametrize("filled", [(130, 130), (128, 130), (130, 128), (9, 130)])
def test_stages_of_a_pair_need_the_consumers_of_both_blocks(filled):
    """With barriers that count a block's own consumers only, the other block's loader writes too early."""
    tasks = [Task(first, True, filled) for first in (True, False)]
    Pipeline(tasks, (8, 8), 2, 0, late=(1, 0, 2, 0, 2), pause=0.5).run()
    with pytest.raises(AssertionError, match=r"(low|high) of 0, \d+ are|more bytes than a phase has"):
        Pipeline(tasks, (8, 8), 2, 0, late=(1, 0, 2, 0, 2), pause=0.5, own=True).run()
