"""The pipeline of tasks of one block and of a pair, as threads: the kernel's own loader, storer, main loops and the
consumers' loop over tasks, for whole, wide and mixed tile pairs, with and without carried rows. Every operand must be
what it should be until the tensor cores have read it, every epilogue buffer until the storer has; a block may load only
what it has acquired; every hidden line and every result is written once, and nobody may wait for ever.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from kernel_source import kernel_function, kernel_loop

from moe_fast.kernel import tile_pairs
from moe_fast.kernel.constants import (
    AHEAD,
    CARRIED_ROWS,
    FEW_ROWS,
    FIELDS_SHIFT,
    HALF_COLUMNS,
    LINE_BYTES,
    SHARED_SLOT,
    STAGES,
    TILE_COLUMNS,
    TILE_ROWS,
    WORDS,
)
from moe_ref.runtime.encoding import (
    GEMM0,
    GEMM1,
    STOP,
    pack_task,
    task_column_tile,
    task_kind,
    task_row_tile,
    task_slot,
)

FULL, EMPTY, FREE, CHUNK_FULL, CHUNK_EMPTY, SENT, ASKED, ADDRESSES = (n * 100 for n in range(8))
WARPS = 4
"""Of a consumer warpgroup."""
PATIENCE = 20
"""Seconds after which a wait is one for ever."""
UNIT, UNITS = FEW_ROWS, TILE_ROWS // FEW_ROWS
"""Rows of a row tile in which the model counts, and how many of those a tile has."""
BUFFER_TILES, SIDE = 64, 1
"""Row tiles of one side of the dispatch buffer; the side of the call."""
COUNTERS, ARRIVED, HIDDEN, RESULTS, ROW_STAGES, RING = (n << 40 for n in range(1, 7))
"""Addresses."""


@dataclass(frozen=True)
class Part:
    """What one block has of a tile pair: `rows` of row tile `tile`, and `few` rows of tile `few_tile`. wide: whether
    the other block has other columns of the same rows. void: whether there is nothing left for this block."""

    expert: int
    tile: int
    rows: int
    same: bool = True
    wide: bool = False
    few: int = 0
    few_tile: int = -1
    void: bool = False

    @property
    def fields(self) -> int:
        fields = tile_pairs.pack_fields(self.rows, int(self.same), int(self.wide), self.few)
        return tile_pairs.VOID if self.void else fields

    def groups(self, member: int, paired: bool) -> list[int]:
        """The warpgroups that multiply rows of the tile."""
        if self.void:
            return []
        return [g for g in (0, 1) if self.rows > 64 * g or (not paired and g == 0)]

    def loaded(self, member: int) -> int:
        """Rows that the block loads for a step: 16, 64 or 128 for its own ones, and those that it carries."""
        here = 1 if self.void else self.rows
        own = next(n for n in (FEW_ROWS, TILE_ROWS // 2, TILE_ROWS) if here <= n)
        return own + CARRIED_ROWS * (self.few > 0)

    def carrying(self, member: int) -> list[int]:
        """Those that multiply carried rows: one in each block where both have the weights."""
        if not self.few:
            return []
        return [member] if self.same else [0, 1]


@dataclass(frozen=True)
class Task:
    """A column tile of a first or second product of a tile pair (of one part: of a row tile); of a wide one its number
    is for both column tiles."""

    first: bool
    number: int
    parts: tuple[Part, ...]

    def column(self, member: int) -> int:
        """Column tile of a block; where it has none, any other."""
        part = self.parts[member]
        return self.number * (1 + part.wide) + member * (part.wide and not part.void)


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


@dataclass
class Memory:
    """Global memory: what is written, and what each block knows to be."""

    written: list[set] = field(default_factory=lambda: [set(), set()])
    """By each block, hidden lines and parts of carried rows' hidden lines."""
    published: dict[int, set] = field(default_factory=dict)
    """What the counter of a row tile's hidden tiles hands on to those who acquire it."""
    acquired: list[set] = field(default_factory=lambda: [set(), set()])
    counters: Counter[int] = field(default_factory=Counter)
    lines: Counter[tuple] = field(default_factory=Counter)
    """How often each hidden line of 64 rows, or of a warp's carried columns, was written; results by column tile."""


class Block:
    """One block: its barriers, its shared memory and its roles."""

    def __init__(self, member: int, pipeline: Pipeline) -> None:
        self.member, self.pipeline, self.k = member, pipeline, pipeline.k
        # all lanes of the loader arrive as one
        counts = [
            (FULL, STAGES, 1 + pipeline.k.gathers),
            (EMPTY, STAGES, pipeline.releases),
            (FREE, 1, 2 * WARPS),
            (CHUNK_FULL, 4, WARPS),
        ]
        counts += [(CHUNK_EMPTY, 4, 1), (SENT, 64, 2 * WARPS), (ASKED, 1, 1)]
        self.barriers = {at + i: Barrier(count, pipeline) for at, n, count in counts for i in range(n)}
        self.memory: dict[Any, Any] = {}
        self.both = threading.Barrier(2 * WARPS)
        self.own = threading.local()
        self.multiplied = 0
        """Steps that the warps have handed to the tensor cores, all warps together."""
        self.loaded = 0
        """Rows that were asked for, of all steps together."""
        self.words = [self.word(task) for task in pipeline.tasks] + [STOP]
        # here, for Python's parser isn't made for several threads
        self.kernel = self.functions()
        self.loops = {(g, w): self.consumer(g, w) for g in range(2) for w in range(WARPS)}

    def word(self, task: Task) -> int:
        part = task.parts[self.member]
        word = pack_task(GEMM0 if task.first else GEMM1, part.expert, part.tile, task.column(self.member))
        return word | (part.fields << FIELDS_SHIFT)

    def names(self) -> dict[str, Any]:
        """What the kernel's functions use, on this block's barriers and memory."""
        warpgroup = types.SimpleNamespace(
            Field=types.SimpleNamespace(ACCUMULATE=0), fence=lambda: None, commit_group=self.commit,
            wait_group=self.finish,
        )  # fmt: skip
        cute = types.SimpleNamespace(
            arch=self.arch(), copy=self.copy, gemm=self.gemm, size=lambda fragment, mode: 4,
            make_layout=lambda *shape: None, group_modes=lambda tensor, *modes: tensor, local_tile=Boxes,
            domain_offset=lambda offset, tensor: "up", make_rmem_tensor=lambda size, kind: [0] * size,
        )  # fmt: skip
        cpasync = types.SimpleNamespace(tma_partition=lambda atom, _, layout, smem, tiled: (smem, tiled))
        fields = ("carried_tile", "field_few", "field_rows", "field_same", "field_void", "field_wide")
        return {name: getattr(tile_pairs, name) for name in fields} | {
            "STAGES": STAGES, "AHEAD": AHEAD, "TILE_ROWS": TILE_ROWS, "TILE_COLUMNS": TILE_COLUMNS, "GEMM0": GEMM0,
            "STOP": STOP, "LINE_BYTES": LINE_BYTES, "CARRIED_ROWS": CARRIED_ROWS, "FEW_ROWS": FEW_ROWS,
            "HALF_COLUMNS": HALF_COLUMNS, "SHARED_SLOT": SHARED_SLOT, "Int16": int, "cute": cute, "cpasync": cpasync,
            "warpgroup": warpgroup, "task_slot": task_slot, "min": min, "Float32": float, "PIECE": 4,
            "tiled_mma": lambda dtype, columns=0: types.SimpleNamespace(set=lambda field, value: None),
            "unpack": lambda word: (task_kind(word), task_row_tile(word), task_column_tile(word)),
            "member_of": lambda block: block & 1, "fields_of": lambda word: word >> FIELDS_SHIFT,
            "take_word": self.take_word,
            "buffer_tile": lambda k, a, tile: tile, "side_counters": lambda a, side: COUNTERS,
            "arrived_word": lambda k, a, side, tile: 0, "done_word": lambda tile: tile,
            "wait_reached": self.wait_reached, "read": lambda address, index, *more: 1,
            "Role": types.SimpleNamespace(LOADER=0), "Wait": types.SimpleNamespace(ARRIVED="rows", HIDDEN="hidden"),
            "PlanWord": types.SimpleNamespace(ROW_TILES=0), "release_hidden": self.release_hidden,
            "count_returned": self.count_returned, "see_gathered": self.see_gathered, "find_sources": self.find_sources,
            "copy_line": self.copy_line,
        }  # fmt: skip

    def functions(self) -> types.SimpleNamespace:
        names = self.names()
        for name in ("load_weights", "arrive_lanes"):
            names[name] = kernel_function("loads", name, **names)
        names["release"] = self.pipeline.releasing(kernel_function("gemm", "release", **names))
        names |= {
            "put_piece": lambda *given: None, "put_line": self.put_line, "activate": lambda name, x: x,
            "round_line": lambda *given: None, "store_line": self.store_line, "turn_few": self.turn_few,
            "home_address": lambda k, a, side, home, used, peers, staged, row, column: (RESULTS + row) * used,
            "landing_of": lambda k, a, side, row: 0, "now": lambda k: 0, "sync_consumers": self.sync,
        }  # fmt: skip
        for file, some in {
            "loads": ("load_product", "load_carrying"), "gemm": ("multiply", "multiply_carrying", "pass_over"),
            "gather": ("fill_stage", "load_gathered", "load_gathered_carrying", "load_gathered_or_landed"),
            "loader": ("load",), "storer": ("store",),
            "epilogue": ("wait_buffers", "store_chunks", "return_rows"),
        }.items():  # fmt: skip
            for name in some:
                names[name] = kernel_function(file, name, **names)
        return types.SimpleNamespace(**names)

    def arch(self) -> types.SimpleNamespace:
        def arrive(at: int, member: int = self.member) -> None:
            self.pipeline.blocks[member].barriers[at].update(arrivals=1)

        return types.SimpleNamespace(
            elect_one=contextlib.nullcontext, sync_warp=lambda: None, fence_proxy=lambda *kind, **space: None,
            mbarrier_arrive=arrive,
            mbarrier_arrive_and_expect_tx=lambda at, size: self.barriers[at].update(arrivals=1, expected=size),
            mbarrier_wait=lambda at, parity: self.barriers[at].wait(parity),
            cp_async_bulk_commit_group=self.commit_stores, cp_async_bulk_wait_group=self.finish_stores,
            store=lambda *given, **order: None, cp_async_mbarrier_arrive_noinc=self.arrive_copied,
        )  # fmt: skip

    # --- the loader -----------------------------------------------------------------------------------------------

    def load(self) -> None:
        self.own.addresses, self.own.begun = {}, []
        few = ("rows16", "rows", "hidden16", "hidden")
        following = ("rows32", "rows", "hidden32", "hidden")
        a = types.SimpleNamespace(given=1, heap=0, arrived_at=ARRIVED, arrived_target=0, rows=BUFFER_TILES * TILE_ROWS)
        smem = {name: Places(name) for name in ("few", "rows", "weights", "router")}
        self.kernel.load(
            self.k, a, "x", "x", "x", "x", "router", "router", "rows128", "rows", "hidden128", "hidden", "weights",
            "first", "weights", "second", "rows64", "rows", "hidden64", "hidden", few, (), (), following, smem["few"],
            *[smem["rows"]] * 4, smem["weights"], smem["router"], None, FULL, EMPTY, 0, 0, 0, ASKED, FREE,
            (FULL, EMPTY), (ADDRESSES, ROW_STAGES, RING), SIDE, self.member, 1, TILE_ROWS, 0, 0,
        )  # fmt: skip

    def find_sources(
        self, k: Any, a: Any, side: int, first: int, rows: int, sources: int, most: int, lane: int
    ) -> bool:
        """Some row tiles' rows all come from peers, whichever task asks."""
        assert (side, first % TILE_ROWS) == (SIDE, 0)
        assert 0 < rows <= most
        tile = SIDE * BUFFER_TILES + first // TILE_ROWS
        missing = {("rows", tile)} - self.pipeline.memory.acquired[self.member]
        assert not missing, f"looks for rows that it hasn't acquired: {missing}"
        self.own.addresses[sources] = tile, most
        return first // TILE_ROWS % 4 != 1

    def copy_line(self, k: Any, step: int, rows: int, sources: int, target: int, lane: int) -> None:
        """The lanes begin to copy a line of each row: from where the addresses say now."""
        tile, found = self.own.addresses[sources]
        assert found >= rows, "addresses of fewer rows"
        name, height = ("rows", TILE_ROWS) if target < RING else ("few", CARRIED_ROWS)
        stage, rest = divmod(target - (ROW_STAGES if target < RING else RING), height * k.line)
        assert rest == 0
        # the first of some rows of a stage is where a part of as many would be
        source = Source("rows", rows, (tile * (TILE_ROWS // rows),), step)
        self.loaded += rows
        copy = [(source, (name, stage * (height // rows)))]
        self.own.begun.append(copy)
        self.pipeline.ask([(self.member, copy, None)])

    def arrive_copied(self, barrier: int) -> None:
        """Arrive when all that the lanes have begun to copy is there."""
        self.pipeline.ask([(self.member, list(self.own.begun), barrier)])

    def see_gathered(self, gathers: bool) -> None:
        """A fence between the barrier and the product."""
        assert gathers == self.k.gathers

    def wait_reached(
        self, address: int, index: int, target: int, a: Any, role: int, wait: str, what: int, scope: str
    ) -> bool:
        memory = self.pipeline.memory
        with self.pipeline.lock:
            if wait == "rows":
                # they come as soon as somebody waits for them: who doesn't wait hasn't got them
                assert address == ARRIVED
                memory.acquired[self.member] |= {("rows", SIDE * BUFFER_TILES + index)}
                return True
            assert address == COUNTERS
            over = self.pipeline.told.wait_for(
                lambda: self.pipeline.failed or memory.counters[index] >= target, timeout=PATIENCE
            )
            if self.pipeline.failed:
                raise Stopped
            assert over, f"waits for ever for hidden tile {index}"
            memory.acquired[self.member] |= memory.published[index]
        return True

    def copy(self, atom: str, source: Any, target: Any, tma_bar_ptr: int = 0, mcast_mask: int | None = None) -> None:
        if atom == "out":
            self.own.stores.append((source, target))
            return
        assert source.atoms(atom), f"{source} by {atom}"
        if source.tensor in ("rows", "hidden"):
            missing = self.needs(source) - self.pipeline.memory.acquired[self.member]
            assert not missing, f"loads what it hasn't acquired: {missing}"
            self.loaded += source.box
        members = [self.member] if mcast_mask is None else [m for m in (0, 1) if mcast_mask >> m & 1]
        self.pipeline.ask([(m, source, target, tma_bar_ptr) for m in members])

    def needs(self, source: Source) -> set:
        """What must be there before a copy of rows: their tile, or of the hidden ones each line of 64 rows; carried
        rows' hidden lines come from the four warps that have their columns."""
        tile, start = source.tile()
        if source.tensor == "rows":
            return {("rows", tile)}
        column, line = divmod(source.step, self.k.chunks0)
        if tile in self.pipeline.carried:
            return {("few", tile, column, line % 2, warp) for warp in range(WARPS)}
        last = min(start + source.box, self.pipeline.rows[tile])
        return {("line", tile, q, source.step) for q in (0, 1) if max(start, 64 * q) < min(last, 64 * q + 64)}

    # the ring of a stage is two warps' parts of a first epilogue buffer
    def part(self, group: int, buffer: int, warp: int) -> list[Any]:
        return [("few", 2 * group + warp // 2), ("part", group, 0, warp)] if buffer == 0 else [("part", group, 1, warp)]

    def land_copied(self, copies: list, barrier: int | None) -> None:
        """One copy of the lanes, or all those that a barrier waits for."""
        for copy in copies if barrier is not None else [copies]:
            with self.pipeline.lock:
                one = copy.pop() if copy else None
            if one:
                self.place(*one)
        if barrier is not None:
            self.barriers[barrier].update(arrivals=1)

    def land(self, source: Source, target: tuple, barrier: int) -> None:
        self.place(source, target)
        self.barriers[barrier].update(came=source.box * LINE_BYTES)

    def place(self, source: Source, target: tuple) -> None:
        name, place = target
        with self.pipeline.lock:
            if name == "rows":
                for i in range(source.box // UNIT):
                    stage, unit = divmod(place * source.box // UNIT + i, UNITS)
                    self.memory["rows", stage, unit] = source.unit(i)
            else:
                self.memory[target] = source.unit(0)
            if name == "few":
                for warp in range(WARPS):
                    if warp // 2 == place % 2:
                        self.memory["part", place // 2, 0, warp] = source

    # --- the consumers --------------------------------------------------------------------------------------------

    def gemm(self, mma: Any, acc: str, a: tuple, b: tuple, _: Any) -> None:
        assert (a[0], b[0]) == (("rows", "weights") if acc == "acc" else ("weights", "few"))
        self.own.reads += [(place, self.own.steps) for place in (a, b)]

    def commit(self) -> None:
        own = self.own
        if (*own.who, own.task, own.steps) == self.pipeline.late:
            time.sleep(self.pipeline.pause)
        own.groups.append(own.reads)
        own.reads, own.steps = [], own.steps + 1
        with self.pipeline.lock:
            self.multiplied += 1

    def finish(self, left: int) -> None:
        """The tensor cores read as late as they may."""
        while len(self.own.groups) > left:
            for (kind, stage), step in self.own.groups.pop(0):
                for place, wanted in self.operands(kind, stage, step):
                    found = self.memory[place]
                    assert found == wanted, f"{place} is {found} instead of {wanted}"

    def operands(self, kind: str, stage: int, step: int) -> list[tuple]:
        """Places of a stage that the own warpgroup multiplies by, and what must be there."""
        task, part = self.pipeline.tasks[self.own.task], self.pipeline.tasks[self.own.task].parts[self.member]
        tensor, base = ("rows", SIDE * BUFFER_TILES) if task.first else ("hidden", 0)
        if kind == "few":
            return [(("few", stage), (tensor, (base + part.few_tile) * UNITS, step))]
        if kind == "rows":
            units = [u for u in range(UNITS) if u // 4 == self.own.who[1] and u * UNIT < part.rows]
            return [(("rows", stage, u), (tensor, (base + part.tile) * UNITS + u, step)) for u in units]
        column = task.column(self.member)
        halves = [("first", 2 * column), ("first", 2 * column + 1)]
        if self.k.gated:
            halves = [("first", column), ("up", column)]
        if not task.first:
            halves = [("second", 2 * column), ("second", 2 * column + 1)]
        return [
            (("weights", 2 * stage + i), (name, number, part.expert, step)) for i, (name, number) in enumerate(halves)
        ]

    def sync(self) -> None:
        try:
            self.both.wait(timeout=PATIENCE)
        except threading.BrokenBarrierError:
            raise (Stopped if self.pipeline.failed else AssertionError)("a barrier of the consumers") from None

    def consumer(self, group: int, warp: int) -> Callable:
        """The kernel's loop over tasks, of one warp: its first lane."""
        names = {name: value for name, value in vars(self.kernel).items() if name not in ("load", "store")}
        names |= {
            "k": self.k, "a": None, "dtype": "bfloat16", "side": SIDE, "block": self.member, "slots": 0, "word_full": 0,
            "word_empty": 0, "thread": group * 128 + warp * 32, "lane": 0, "warp_id": group * WARPS + warp,
            "group": group, "acc": "acc", "few_acc": "few_acc", "a_frag": Fragment("rows"), "copy": (),
            "b_frag": Fragment("weights"), "w_frag": Fragment("weights"), "few_frag": Fragment("few"), "peers": 0,
            "memory": 0, "hidden": (types.SimpleNamespace(toint=lambda: HIDDEN),), "sBias": 0, "full": FULL,
            "empty": EMPTY, "chunk_full": CHUNK_FULL, "chunk_empty": CHUNK_EMPTY, "few_free": FREE, "sent": SENT,
            "mapped": False, "take_word": self.take, "store_chunks": self.from_zeros(self.kernel.store_chunks),
            "try_word": self.try_word, "unpack": self.begin,
        }  # fmt: skip
        changing = ("count", "number", "parity", "returns", "known", "following", "go")
        return kernel_loop("consumer", "consume", *changing, **names)

    @staticmethod
    def from_zeros(store_chunks: Callable) -> Callable:
        zeros = [0] * TILE_COLUMNS

        def run(k: Any, dtype: str, group: int, parity: int, acc: str, *more: Any) -> None:
            store_chunks(k, dtype, group, parity, zeros, *more)

        return run

    def consume(self, group: int, warp: int) -> None:
        self.own.who = self.member, group, warp
        self.own.groups, self.own.task, self.own.taken = [], -1, -1
        self.loops[group, warp](0, 0, 0, 0, False, 0, True)

    def take_word(self, k: Any, slots: int, full: int, empty: int, number: int) -> int:
        """Of the loader and the storer."""
        self.own.task = number
        return self.words[number]

    def take(self, k: Any, slots: int, full: int, empty: int, number: int) -> int:
        self.own.taken += 1
        assert number == self.own.taken, "each word is taken once, in order"
        return self.words[number]

    def try_word(self, k: Any, slots: int, full: int, empty: int, number: int) -> tuple[bool, int]:
        """Of one warp earlier, of another later than the end of its task."""
        with self.pipeline.lock:
            there = self.pipeline.random.random() < 0.5
        return (True, self.take(k, slots, full, empty, number)) if there else (False, 0)

    def begin(self, word: int) -> tuple[int, int, int]:
        """A consumer warp turns to its next task."""
        own = self.own
        assert not own.groups, "a product is still in flight"
        own.task, own.steps, own.reads, own.lines = own.task + 1, 0, [], 0
        assert word == self.words[own.task], "a task that isn't next"
        return self.kernel.unpack(word)

    def put(self, buffer: int, value: tuple) -> None:
        _, group, warp = self.own.who
        with self.pipeline.lock:
            for place in self.part(group, buffer, warp):
                self.memory[place] = value

    def put_line(self, copy: tuple, buffer: int) -> None:
        """A line of the product into the warp's part of a buffer, and whether the warp has computed it."""
        own = self.own
        self.put(buffer, ("line", own.task, own.lines, own.steps > 0))
        own.lines += 1

    def store_line(
        self, k: Any, column: int, c: int, address: int, further: int, unswizzle: int, group: int, memory: int,
        thread: int,
    ) -> None:  # fmt: skip
        own = self.own
        if c == 0:
            own.lines = 0
        self.put(c % 2, ("result", own.task, c))
        if address:
            assert own.steps > 0, "stores what it hasn't computed"
            row = address - RESULTS
            assert row % TILE_ROWS == (group * WARPS + thread % 128 // 32) * UNIT
            with self.pipeline.lock:
                self.pipeline.memory.lines["result", row // UNIT, column, c] += 1

    def turn_few(
        self, k: Any, dtype: str, first: bool, few_acc: str, base: int, address: int, column: int, group: int,
        thread: int,
    ) -> None:  # fmt: skip
        """Columns of the carried rows, through the warp's part of the second buffer."""
        own, warp = self.own, thread % 128 // 32
        if (*own.who, own.task, "turn") == self.pipeline.late:
            time.sleep(self.pipeline.pause)
        assert own.steps > 0
        assert base == ((group + 2) * 64 + warp * 16) * k.line
        self.put(1, ("turned", own.task))
        row = (address - HIDDEN) // (k.intermediate * 2) if first else address - RESULTS
        assert row % TILE_ROWS == 0
        what = ("few" if first else "few result", row // TILE_ROWS, column, group, warp)
        with self.pipeline.lock:
            self.pipeline.memory.lines[what] += 1
            self.pipeline.memory.written[self.member].add(what)

    # --- the storer -----------------------------------------------------------------------------------------------

    def store(self) -> None:
        self.own.stores, self.own.asked, self.own.read = [], [], []
        self.kernel.store(
            self.k, types.SimpleNamespace(plan=0), "out", "out", (), Places("buffer"), CHUNK_FULL, CHUNK_EMPTY, SENT, 0,
            0, 0, 0, SIDE, self.member, 0,
        )  # fmt: skip

    def commit_stores(self) -> None:
        self.own.asked.append(self.own.stores)
        self.own.stores = []

    def finish_stores(self, left: int, read: bool = False) -> None:
        """TMA reads and writes as late as it may."""
        own = self.own
        while len(own.asked) > left:
            for (_, buffer), line in own.asked.pop(0):
                group, second = buffer % 2, buffer // 2
                for warp in range(WARPS):
                    wanted = ("line", own.task, line.index[1] % self.k.chunks0, True)
                    found = self.memory["part", group, second, warp]
                    assert found == wanted, f"a hidden line is {found} instead of {wanted}"
                tile, q = divmod(line.index[0], 2)
                own.read.append(("line", tile, q, line.index[1]))
        if not read and left == 0:
            with self.pipeline.lock:
                self.pipeline.memory.written[self.member].update(own.read)
                self.pipeline.memory.lines.update(own.read)
            own.read = []

    def release_hidden(self, k: Any, a: Any, side: int, tile: int, wide: int, row_tiles: int) -> None:
        assert wide == self.pipeline.tasks[self.own.task].parts[self.member].wide
        if (self.member, "storer", self.own.task) == self.pipeline.late:
            time.sleep(self.pipeline.pause)
        memory = self.pipeline.memory
        with self.pipeline.told:
            memory.published.setdefault(tile, set()).update(memory.written[self.member])
            memory.counters[tile] += 1
            self.pipeline.told.notify_all()

    def count_returned(self, k: Any, a: Any, side: int, tile: int, fields: int, member: int, *more: Any) -> None:
        """All results of the task are on their way."""
        task = self.pipeline.tasks[self.own.task]
        part, lines = task.parts[self.member], self.pipeline.memory.lines
        assert (tile, fields, member) == (part.tile, part.fields, self.member)
        with self.pipeline.lock:
            for what in results_of(task, self.member, self.k.paired):
                assert lines[what] == 1, f"{what} is counted, but not stored"


def results_of(task: Task, member: int, paired: bool) -> list[tuple]:
    """What a second product's task has to store."""
    part = task.parts[member]
    units = [u for u in range(UNITS) if u // 4 in part.groups(member, paired) and u * UNIT < part.rows]
    column = task.column(member)
    out: list[tuple] = [("result", part.tile * UNITS + u, column, c) for u in units for c in range(4)]
    return out + [
        ("few result", part.few_tile, column, group, warp) for group in part.carrying(member) for warp in range(WARPS)
    ]


class Pipeline:
    """The blocks that share tasks, one or a pair of them.

    chunks: lines of a first product, 2 in a gated layer, else 4. late: the consumer warp (block, warpgroup, warp, task,
    step) that pauses before it hands that step to the tensor cores, with "turn" for the step before it stores carried
    rows; or (block, "storer", task), before that storer tells of its hidden tile. own: whether stages are handed back
    to the own block only, whose barriers then count its own consumers, as they must not. gathers: whether loaders fetch
    rows of the first products row by row.
    """

    def __init__(
        self, tasks: list[Task], columns: tuple[int, int], depth0: int, chunks: int, seed: int, late: tuple = (),
        pause: float = 0.0, own: bool = False, gathers: bool = False,
    ) -> None:  # fmt: skip
        members = len(tasks[0].parts)
        self.tasks, self.late, self.pause = tasks, late, pause
        depth1 = columns[0] * chunks
        self.k = types.SimpleNamespace(
            paired=members == 2, carries=members == 2, gathers=gathers, halves=False, gated=chunks == 2,
            interleaved=False,
            expert_bias=False, shared_intermediate=0, by_token=False, put=False, put_from_shared=False, trace=False,
            activation="none", line=64, element_size=2, gate_columns=8, signal_words=1, columns0=columns[0],
            columns1=columns[1], depth0=depth0, depth1=depth1, chunks0=chunks, intermediate=depth1 * 64,
            sent=64, biases=1, words=WORDS,
        )  # fmt: skip
        self.rows = {part.tile: part.rows for task in tasks for part in task.parts}
        self.carried = {part.few_tile for task in tasks for part in task.parts if part.few}
        self.only_own, self.releases = own, 2 * WARPS if own else 2 * WARPS * members
        self.random, self.lock = random.Random(seed), threading.RLock()
        self.asked, self.told = threading.Condition(self.lock), threading.Condition(self.lock)
        self.copies: list[tuple] = []
        self.over = self.failed = False
        self.errors: list[BaseException] = []
        self.memory = Memory()
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
            (self.blocks[member].land_copied if len(copy) == 2 else self.blocks[member].land)(*copy)

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
                self.told.notify_all()
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


class Boxes:
    """A matrix in global memory, in boxes."""

    def __init__(self, tensor: str, box: tuple[int, int], modes: tuple) -> None:
        self.tensor, self.box = tensor, box[0]

    def __getitem__(self, at: tuple) -> Source:
        # (None, box, None) of rows, (None, box, None, expert) of weights, (None, box, line) of the hidden tiles
        return Source(self.tensor, self.box, tuple(i for i in at if i is not None))


@dataclass(frozen=True)
class Source:
    """A box of `box` rows in global memory. index: which one, and of weights the expert."""

    tensor: str
    box: int
    index: tuple[int, ...]
    step: int = -1

    def __getitem__(self, at: tuple) -> Source:
        return Source(self.tensor, self.box, self.index, at[1])

    def atoms(self, atom: str) -> bool:
        """Whether a copy atom is made for such boxes."""
        if self.tensor in ("first", "up", "second"):
            return atom == "weights" and self.box == HALF_COLUMNS
        return atom == f"{self.tensor}{self.box}"

    def tile(self) -> tuple[int, int]:
        """Row tile and first row in it."""
        return divmod(self.index[0] * self.box, TILE_ROWS)

    def unit(self, number: int) -> tuple:
        """Which 16 rows in global memory the box has at place `number`, or which box of weights it is."""
        if self.tensor in ("rows", "hidden"):
            return self.tensor, self.index[0] * self.box // UNIT + number, self.step
        return self.tensor, *self.index, self.step


class Places:
    """Places in shared memory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, at: tuple) -> tuple:
        return self.name, at[1]


class Fragment(Places):
    """What wgmma's descriptors point at."""

    def __getitem__(self, at: tuple) -> tuple:
        return self.name, at[3]


def check(pipeline: Pipeline) -> None:
    """Run it; then every warpgroup that should has multiplied, nothing was loaded in vain, and every line and result is
    written once."""
    k, wanted, steps, loaded = pipeline.k, Counter(), [0, 0], [0, 0]
    for task in pipeline.tasks:
        for m, part in enumerate(task.parts):
            groups = part.groups(m, k.paired)
            depth = k.depth0 if task.first else k.depth1
            steps[m] += len(groups) * WARPS * depth
            loaded[m] += part.loaded(m) * depth
            if not task.first:
                wanted.update(results_of(task, m, k.paired))
                continue
            stored = [g for g in groups if part.rows > 64 * g]
            column = task.column(m)
            wanted.update(("line", part.tile, g, column * k.chunks0 + c) for g in stored for c in range(k.chunks0))
            wanted.update(("few", part.few_tile, column, g, w) for g in part.carrying(m) for w in range(WARPS))
    assert pipeline.run() == steps[: len(pipeline.blocks)]
    assert [block.loaded for block in pipeline.blocks] == loaded[: len(pipeline.blocks)]
    assert pipeline.memory.lines == wanted


ROWS = (9, 16, 40, 64, 65, 80, 128)
"""Of a row tile: 16, 64 and 128 of them are loaded, one warpgroup computes or both."""
LAYERS = [((2, 2), STAGES, 2), ((3, 1), 9, 2), ((1, 2), STAGES + 1, 4), ((2, 1), STAGES, 4)]
"""Column tiles of both products, steps of the first one, its lines."""


def random_pair(choose: random.Random, kind: str, tile: int, expert: int) -> tuple[tuple[Part, Part], int, int]:
    """A tile pair whose first row tile is `tile`; the tile and the expert after it."""
    few = choose.randrange(1, CARRIED_ROWS + 1) if choose.random() < 0.6 else 0
    # a carrying tile is full
    rows = TILE_ROWS if few else choose.choice(ROWS)
    if kind == "whole":
        pair = (
            Part(expert, tile, TILE_ROWS, few=few, few_tile=tile + 2),
            Part(expert, tile + 1, rows, few=few, few_tile=tile + 2),
        )
        return pair, tile + 3, expert + 1
    if kind == "wide":
        part = Part(expert, tile, rows, False, True, few, tile + 1)
        return (part, part), tile + 2, expert + 1
    other = choose.randrange(1, CARRIED_ROWS + 1) if choose.random() < 0.6 else 0
    pair = (
        Part(expert, tile, rows, same=False, few=few, few_tile=tile + 1),
        Part(expert + 1, tile + 2, TILE_ROWS if other else choose.choice(ROWS), False, few=other, few_tile=tile + 3),
    )
    return pair, tile + 4, expert + 2


def tasks_of(choose: random.Random, pairs: list[tuple[Part, ...]], columns: tuple[int, int]) -> list[Task]:
    """All tasks of tile pairs in random order, but second products after the pair's first ones."""
    left = {i: [task for first in (True, False) for task in product(parts, columns, first)]
            for i, parts in enumerate(pairs)}  # fmt: skip
    order = [i for i, some in left.items() for _ in some]
    choose.shuffle(order)
    return [left[i].pop(0) for i in order]


def product(parts: tuple[Part, ...], columns: tuple[int, int], first: bool) -> list[Task]:
    """The tasks of one product of a tile pair. Where both blocks share a row tile and the number of column tiles is
    odd, the second block has none in the last."""
    here = columns[not first]
    if not parts[0].wide:
        return [Task(first, number, parts) for number in range(here)]
    last = (parts[0], replace(parts[1], void=True, few=0))
    return [Task(first, number, parts if 2 * number + 1 < here else last) for number in range((here + 1) // 2)]


def random_tasks(choose: random.Random, kinds: list[str], columns: tuple[int, int]) -> list[Task]:
    tile, expert, pairs = 0, 0, []
    for kind in kinds:
        pair, tile, expert = random_pair(choose, kind, tile, expert)
        pairs.append(pair)
    return tasks_of(choose, pairs, columns)


@pytest.mark.parametrize(("columns", "depth0", "chunks"), LAYERS)
@pytest.mark.parametrize("seed", range(2))
def test_no_operand_and_no_buffer_is_overwritten_and_nobody_waits_for_ever(columns, depth0, chunks, seed):
    choose = random.Random(100 * seed + depth0)
    tiles = [(Part(choose.randrange(3), tile, choose.choice(ROWS), same=False),) for tile in range(4)]
    check(Pipeline(tasks_of(choose, tiles, columns), columns, depth0, chunks, seed))


@pytest.mark.parametrize(("columns", "depth0", "chunks"), LAYERS)
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_nor_in_a_pair_of_blocks(columns, depth0, chunks, gathers, seed):
    """Tile pairs of all kinds, with and without carried rows, while one warp is late."""
    choose = random.Random(1000 * seed + 10 * depth0 + chunks)
    kinds = ["whole", "wide", "mixed", choose.choice(("whole", "wide", "mixed"))]
    tasks = random_tasks(choose, choose.sample(kinds, 4), columns)
    late = (choose.randrange(2), choose.randrange(2), choose.randrange(WARPS), choose.randrange(3), 1)
    check(Pipeline(tasks, columns, depth0, chunks, seed, late, 0.05, gathers=gathers))


def one_pair(kind: str, few: int) -> tuple[Part, Part]:
    if kind == "mixed":
        parts = [Part(m, 2 * m, TILE_ROWS, same=False, few=few, few_tile=2 * m + 1) for m in (0, 1)]
    else:
        wide = kind == "wide"
        parts = [Part(0, m * (not wide), TILE_ROWS, not wide, wide, few, 2 - wide) for m in (0, 1)]
    return parts[0], parts[1]


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("kind", ["whole", "wide", "mixed"])
@pytest.mark.parametrize(
    "late",
    [
        (m, *who)
        for m in (0, 1)
        for who in (("storer", 1), (0, 2, 1, "turn"), (1, 1, 1, "turn"), (0, 3, 1, 3), (1, 0, 2, 0))
    ],
    ids=str,
)  # fmt: skip
def test_a_late_storer_or_warp_of_either_block_holds_the_others_up(kind, late, gathers):
    """Second products that carry rows follow the first ones at once; somebody is late with the last hidden tile or with
    the carried rows' part of it, or still reads the ring."""
    # two tasks of each product
    columns = (4, 4) if kind == "wide" else (2, 2)
    tasks = [task for first in (True, False) for task in product(one_pair(kind, 20), columns, first)]
    assert len(tasks) == 4
    check(Pipeline(tasks, columns, STAGES, 2, 0, late, 0.15, gathers=gathers))


@pytest.mark.parametrize("kind", ["whole"])
@pytest.mark.parametrize("few", [0, 20])
def test_stages_of_a_pair_need_the_consumers_of_both_blocks(kind, few):
    """With barriers that count a block's own consumers only, the other block's loader writes too early."""
    columns = (4, 1)
    tasks = [Task(True, c, one_pair(kind, few)) for c in range(4)] + [Task(False, 0, one_pair(kind, few))]
    late = (1, 1, 2, 0, 2)
    check(Pipeline(tasks, columns, 8, 2, 0, late, 0.5))
    with pytest.raises(AssertionError, match=r"weights.* is .* instead of|more bytes than a phase has"):
        check(Pipeline(tasks, columns, 8, 2, 0, late, 0.5, own=True))
