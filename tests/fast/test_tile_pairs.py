"""Tile pairs: which row tiles and rows each block of a pair gets, the planner's tables of them, who signals their rows,
and where a thread's values of carried rows belong; the kernel's own functions, run on the CPU."""

from __future__ import annotations

import itertools
import random
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_source import kernel_function, run_together
from optional import cutlass_dsl

from moe_fast.kernel import tile_pairs
from moe_fast.kernel.constants import CARRIED_ROWS, FIELDS_SHIFT, HALF_COLUMNS, STAGES, TILE_COLUMNS, TILE_ROWS
from moe_fast.kernel.pairs import dealt_kind, dropped_column, pair_words
from moe_fast.kernel.regions import workspace_regions
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.tile_pairs import EARLY, FIELDS
from moe_ref.config import MoEConfig
from moe_ref.layout import ceil_div
from moe_ref.runtime.encoding import (
    GEMM1,
    GEMM1_HIGH,
    GEMM1_LOW,
    pack_task,
    reached,
    task_column_tile,
    task_kind,
    task_row_tile,
    task_slot,
)

QWEN3 = MoEConfig(2048, 768, 128, 8, dtype="bfloat16")
PAPER = MoEConfig(2048, 2048, 128, 2, activation="relu", gated=False, dtype="bfloat16")
EDGES = [128 * n + rest for n in range(6) for rest in (0, 1, CARRIED_ROWS, CARRIED_ROWS + 1, 64, 65, 127)]
ROWS = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 1500)), min_size=1, max_size=40)
"""Rows of the experts of a rank, with every interesting remainder among them."""
Piece = tuple[int, int, int, int]


@dataclass(frozen=True)
class Part:
    """What one block of a pair has of a tile pair. few: carried rows, of row tile few_tile."""

    expert: int
    tile: int
    rows: int
    same: bool
    wide: bool
    few: int
    few_tile: int


def deal(rows: list[int], carries: bool) -> list[tuple[Part, Part]]:
    """Tile pairs of experts with so many rows, one after the other, as the module's docstring names them."""
    found, singles = [], []
    for expert, count in enumerate(rows):
        few = count % TILE_ROWS
        if not carries or count < TILE_ROWS or few > CARRIED_ROWS:
            few = 0
        tiles = [(i, min(count - i * TILE_ROWS, TILE_ROWS)) for i in range((count - few + 127) // 128)]
        if len(tiles) == 1:
            singles.append(Part(expert, 0, tiles[0][1], False, False, few, 1 if few else 0))
            continue
        for i in range(0, len(tiles), 2):
            pair, here = tiles[i : i + 2], few if i + 2 >= len(tiles) else 0
            parts = [
                Part(expert, i, n, len(pair) == 2, len(pair) == 1, here, len(tiles) if here else i) for i, n in pair
            ]
            found.append((parts[0], parts[-1]))
    for pair in itertools.zip_longest(singles[::2], singles[1::2]):
        if pair[1] is None:
            one = pair[0]
            alone = Part(one.expert, 0, one.rows, False, True, one.few, one.few_tile)
            pair = (alone, alone)
        found.append(pair)
    return found


def part_of(fields: int, member: int, expert: int, tile: int) -> Part:
    """What a block takes from its fields, by the functions that the kernel has for that."""
    return Part(
        expert, tile, tile_pairs.field_rows(fields), bool(tile_pairs.field_same(fields)),
        bool(tile_pairs.field_wide(fields)), tile_pairs.field_few(fields),
        tile_pairs.carried_tile(fields, member, tile),
    )  # fmt: skip


@given(ROWS, st.booleans())
@settings(max_examples=500, deadline=None)
def test_every_number_is_the_tile_that_the_pairs_written_down_have_there(rows, carries):
    sums = list(itertools.accumulate((tile_pairs.count_pairs(count, carries) for count in rows), initial=0))
    found: dict[int, Part] = {}
    for expert, count in enumerate(rows):
        for tile in range(tile_pairs.own_tiles(count, carries)):
            number, fields = tile_pairs.place_tile(tile, count, sums[expert], sums[-1], carries)
            assert 0 <= fields <= FIELDS
            for member in range(1 + tile_pairs.field_wide(fields)):
                assert number + member not in found, "dealt twice"
                found[number + member] = part_of(fields, (number + member) % 2, expert, tile)
    want = deal(rows, carries)
    assert tile_pairs.dealt_tiles(sums[-1]) == 2 * len(want)
    assert found == {2 * u + m: part for u, pair in enumerate(want) for m, part in enumerate(pair)}


def tasks_of(
    parts: dict[int, tuple[int, int, int]], columns: int, halved: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, int, int, list[Piece], int]]:
    """What the blocks of all pairs compute in one of the products: (member, row tile, fields, pieces, halves) of every
    task; halves as `count_returned` counts them.

    parts: of each number that is dealt, the expert slot, the place in the buffers and the fields of its row tile. A
    piece is half a column tile of a row: (row tile, row in it, column tile, half). halved: whether a task is dealt in
    halves.
    """
    for first in range(0, len(parts), 2):
        slots, tiles, fields = zip(parts[first], parts[first + 1], strict=True)
        assert tile_pairs.field_wide(fields[0]) == tile_pairs.field_wide(fields[1])
        for task in range(columns):
            if dropped_column(task, columns, tile_pairs.field_wide(fields[0])):
                continue
            kinds = [dealt_kind(kind, fields) for kind in ((GEMM1_LOW, GEMM1_HIGH) if halved() else (GEMM1,))]
            words = [
                pair_words(pack_task(kind, 0, first, task), slots, tiles, fields, columns) for kind in kinds if kind
            ]
            for member, word in ((member, word) for both in words for member, word in enumerate(both)):
                own, tile, column = word >> FIELDS_SHIFT, tiles[member], task_column_tile(word)
                # weights and rows are loaded even where nothing is computed
                assert (task_slot(word), task_row_tile(word)) == (slots[member], tile)
                assert 0 <= column < columns
                assert tile_pairs.field_same(own) == tile_pairs.field_same(fields[0]), "both load what both expect"
                pieces = []
                if not tile_pairs.field_void(own):
                    rows = range(tile_pairs.field_rows(own))
                    if task_kind(word) != GEMM1:
                        rows = rows[:64] if task_kind(word) == GEMM1_LOW else rows[64:]
                        assert len(rows) > 0
                        assert not tile_pairs.field_few(own)
                    pieces = [(tile, row, column, half) for row in rows for half in (0, 1)]
                    few = tile_pairs.carried_tile(own, member, tile)
                    # of two blocks that have the same weights each takes half of the columns
                    halves = (member,) if tile_pairs.field_same(own) else (0, 1)
                    carried = range(tile_pairs.field_few(own))
                    pieces += [(few, row, column, half) for row in carried for half in halves]
                yield member, tile, own, pieces, 1 + (task_kind(word) == GEMM1)


def pieces_of(rows: list[int], columns: int) -> set[Piece]:
    """All that must be computed of experts with so many rows, their row tiles one after the other."""
    sizes = [min(count - begun, TILE_ROWS) for count in rows for begun in range(0, count, TILE_ROWS)]
    return {
        (t, r, c, half) for t, size in enumerate(sizes) for r in range(size) for c in range(columns) for half in (0, 1)
    }


@given(st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 700)), min_size=1, max_size=8), st.booleans(),
       st.integers(1, 7), st.booleans())  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_every_column_of_every_row_is_computed_once(rows, carries, columns, halved):
    sums = list(itertools.accumulate((tile_pairs.count_pairs(count, carries) for count in rows), initial=0))
    begun = list(itertools.accumulate((ceil_div(count, TILE_ROWS) for count in rows), initial=0))
    parts = {}
    for expert, count in enumerate(rows):
        for tile in range(tile_pairs.own_tiles(count, carries)):
            number, fields = tile_pairs.place_tile(tile, count, sums[expert], sums[-1], carries)
            for member in range(1 + tile_pairs.field_wide(fields)):
                parts[number + member] = expert, begun[expert] + tile, fields
    found = Counter(piece for _, _, _, pieces, _ in tasks_of(parts, columns, lambda: halved) for piece in pieces)
    assert found == dict.fromkeys(pieces_of(rows, columns), 1)


@pytest.mark.parametrize("rows", [*range(1, 600), 16384, 16385, 16400, 16401])
def test_each_row_of_an_expert_has_tasks_of_its_own_or_is_carried(rows):
    carried = tile_pairs.carried_rows(rows, True)
    # only rows of the last tile are ever carried, only beside a full one, and only where a few are left
    assert carried == (rows % TILE_ROWS if rows > TILE_ROWS and rows % TILE_ROWS <= CARRIED_ROWS else 0)
    assert tile_pairs.carried_rows(rows, False) == 0
    assert tile_pairs.own_tiles(rows, True) == -(-(rows - carried) // TILE_ROWS)
    assert tile_pairs.own_tiles(rows, False) == -(-rows // TILE_ROWS)


@given(st.integers(1, TILE_ROWS), st.integers(0, 1), st.integers(0, 1), st.integers(0, CARRIED_ROWS))
def test_fields_come_out_as_they_went_in(rows, same, wide, few):
    fields = tile_pairs.pack_fields(rows, same, wide, few)
    for early in (0, EARLY):
        read = [getattr(tile_pairs, f"field_{name}")(fields | early) for name in ("rows", "same", "wide", "few")]
        assert read == [rows, same, wide, few]
    assert fields & ~FIELDS == 0
    assert not tile_pairs.field_void(fields)
    void = tile_pairs.VOID
    assert (tile_pairs.field_void(void), tile_pairs.field_wide(void), tile_pairs.field_few(void)) == (1, 0, 0)


# --- the planner's tables ---------------------------------------------------------------------------------------------

THREADS = 64
"""Consumers of the model: two warps."""


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


class Threads:
    """Threads of a block that meet: in barriers, sums and votes."""

    def __init__(self) -> None:
        self.meet = threading.Barrier(THREADS)
        self.values = [0] * THREADS
        self.own = threading.local()

    def together(self, value: int, answer: Callable[[list[int], int], int]) -> int:
        self.values[self.own.thread] = value
        self.meet.wait(timeout=20)
        found = answer(self.values, self.own.thread)
        self.meet.wait(timeout=20)
        return found

    def scan(self, value: int, scratch: int, thread: int) -> int:
        assert thread == self.own.thread
        return self.together(value, lambda values, t: sum(values[:t]))

    def run(self, role: Callable[[int], Any]) -> list[Any]:
        def one(thread: int) -> Any:
            self.own.thread = thread
            return role(thread)

        return run_together(THREADS, one, self.meet)


def tables(
    rows: list[int], pushed: list[tuple[int, int]], carries: bool = True, side: int = 1, early: bool = True,
    ahead: int = 2,
) -> tuple[Tables, list[tuple[int, int]], int]:  # fmt: skip
    """What `publish_pairs` writes for slots of `rows` rows; the (slot, first row) of every row tile; how many are
    dealt. pushed: of each slot, first and end of the rows that are early; ahead: targets that are asked for ahead."""
    slots = len(rows)
    k = types.SimpleNamespace(slots=slots, carries=carries, early=early)
    places = [(slot, begun) for slot, count in enumerate(rows) for begun in range(0, count, TILE_ROWS)]
    first = [sum(-(-r // TILE_ROWS) for r in rows[:slot]) for slot in range(slots)]
    scratch, slot_rows = 0, 1024
    # what was left behind the tables is no zero
    shared = dict.fromkeys(range(slot_rows + 5 * slots), 77)
    known = [*rows, *first]
    known += [p[0] for p in pushed] + [p[1] for p in pushed] if early else []
    shared |= dict(enumerate(known, start=slot_rows))
    a, block = Tables(len(places)), Threads()
    targets = a.arrived_target + side * len(places) * 4
    for tile in range(len(places)):
        a.words[targets + 4 * tile] = 1000 + tile
    names = {name: getattr(tile_pairs, name) for name in (
        "EARLY", "count_pairs", "dealt_tiles", "field_few", "field_rows", "field_wide", "own_tiles", "pack_dealt",
        "place_tile",
    )}  # fmt: skip

    def load(at: int, kind: Any) -> int:
        return shared[at]

    arch = types.SimpleNamespace(load=load, store=shared.__setitem__)
    names |= {
        "CONSUMERS": THREADS, "TILE_ROWS": TILE_ROWS, "next_target": lambda target, expected: target + expected,
        "read": a.read, "write": a.write, "dealt_at": lambda k, a: a.dealt, "scan": block.scan,
        "sync_consumers": lambda: block.together(0, lambda values, thread: 0),
        "cute": types.SimpleNamespace(arch=arch, make_rmem_tensor=lambda size, kind: [0] * size),
        "TARGETS_AHEAD": ahead,
    }  # fmt: skip
    for name in ("slot_of", "early_bit"):
        names[name] = kernel_function("tables", name, **names)
    run = kernel_function("tables", "publish_pairs", **names)

    def publish(real: bool) -> list[int]:
        at = slot_rows, slot_rows + slots
        return block.run(lambda t: run(k, a, side, scratch, t, *at, slots, len(places), real))

    before = dict(a.words)
    publish(real=False)
    assert {at: a.words[at] for at in before} == before, "a rehearsal changes what arrivals are waited for"
    a.words = before
    answers = publish(real=True)
    assert len(set(answers)) == 1, "threads see different sums"
    return a, places, answers[0]


@pytest.mark.parametrize("seed", range(40))
def test_planner_writes_every_entry_once_and_waits_for_every_tile(seed):
    """Every dealt number has the part that it should, translated both ways; arrivals are expected of carried tiles,
    too; a part is early if all rows that its block loads are."""
    choose, carries = random.Random(1000 + seed), seed % 4 != 0
    rows = [choose.choice(EDGES) if choose.random() < 0.6 else choose.randrange(1500) for _ in range(1 + seed)]
    pushed = [(low, high) for low, high in (sorted(choose.randrange(r + 1) for _ in range(2)) for r in rows)]
    pushed = [(0, r) if choose.random() < 0.4 else span for r, span in zip(rows, pushed, strict=True)]
    early = seed % 8 != 0
    a, places, dealt = tables(rows, pushed, carries, early=early, ahead=seed % 3)
    want = deal(rows, carries)
    assert dealt == (2 * len(want) if places else 0)
    at, slot, fields = (a.entries(name) for name in ("tile_at", "tile_slot", "tile_rows"))
    assert sorted(at) == sorted(slot) == sorted(fields) == list(range(dealt))
    first = {expert: tile for tile, (expert, begun) in enumerate(places) if begun == 0}
    for u, pair in enumerate(want):
        for m, part in enumerate(pair):
            number = 2 * u + m
            tile = first[part.expert] + part.tile
            assert (slot[number], at[number]) == (part.expert, tile)
            found = part_of(fields[number], m, part.expert, tile)
            assert found == Part(**(vars(part) | {"tile": tile, "few_tile": first[part.expert] + part.few_tile}))
            begun, end = part.tile * TILE_ROWS, part.tile * TILE_ROWS + part.rows
            low, high = pushed[part.expert]
            # the carried rows are the expert's last ones
            needs = [(begun, end)] + ([(rows[part.expert] - part.few, rows[part.expert])] if part.few else [])
            if fields[number] & EARLY:
                assert early
                assert all(low <= b and e <= high for b, e in needs)
            else:
                assert not (early and low <= begun and (rows[part.expert] if part.few else end) <= high)
    back = a.entries("dealt")
    numbers = {tile: min(n for n in at if at[n] == tile) for tile in at.values()}
    # of a carried tile, which has no number, the rows
    assert {t: tile_pairs.dealt_number(word) for t, word in back.items() if t in numbers} == numbers
    held = [min(rows[expert] - begun, TILE_ROWS) for expert, begun in places]
    assert {t: tile_pairs.dealt_rows(word) for t, word in back.items()} == dict(enumerate(held))
    target = a.entries("arrived_target")
    for tile, (expert, begun) in enumerate(places):
        assert target[len(places) + tile] == 1000 + tile + min(rows[expert] - begun, TILE_ROWS)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "rows", [[256 + 20], [384 + 20], [140, 130], [140], [512 + 9, 640], [70, 140, 300]], ids=str
)  # fmt: skip
def test_a_block_of_tiles_is_ready_with_its_own_and_its_carried_rows(rows, early):
    """Whole, wide and mixed pairs: of the tiles that a block of numbers needs, any may be the last to come."""
    a, places, dealt = tables(rows, [(0, 0)] * len(rows), side=0)
    parts = {number: (at, a.entries("tile_rows")[number]) for number, at in a.entries("tile_at").items()}
    names = {"read": a.read, "carried_tile": tile_pairs.carried_tile, "reached": reached, "EARLY": EARLY}
    there = kernel_function("subscriber", "all_there", **names, buffer_tile=None)
    k = types.SimpleNamespace(early=early, paired=True, carries=True, block_tiles=2, signal_words=1)
    first = {expert: tile for tile, (expert, begun) in enumerate(places) if begun == 0}
    for begin in range(0, dealt, 2):
        needed = set()
        for number in (begin, begin + 1):
            tile, fields = parts[number]
            expert = places[tile][0]
            needed |= {tile} | (
                {first[expert] + (rows[expert] // TILE_ROWS)} if tile_pairs.field_few(fields) else set()
            )
        for missing in (None, *range(len(places))):
            for tile in range(len(places)):
                a.words[a.arrived + 4 * tile] = a.words[a.arrived_target + 4 * tile] - (tile == missing)
            assert there(k, a, a.arrived, a.arrived_target, begin, dealt) == (missing not in needed)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_subscribers_make_a_block_ready_when_its_rows_have_come(by_token, seed):
    """Tiles get their rows one after the other, in any order, the blocks of other lanes never."""
    choose = random.Random(seed)
    rows = [choose.choice(EDGES) for _ in range(choose.randrange(2, 9))]
    a, places, dealt = tables(rows, [(0, 0)] * len(rows), side=0)
    late = list(range(len(places)))
    choose.shuffle(late)
    for tile in late:
        a.words[a.arrived + 4 * tile] = a.words[a.arrived_target + 4 * tile] - 1
    # where a call before had more tiles, their counters are at their targets
    for tile in range(len(places), 2 * len(places) + 2):
        a.words |= {a.arrived + 4 * tile: 7, a.arrived_target + 4 * tile: 7}
    first = {expert: tile for tile, (expert, begun) in enumerate(places) if begun == 0}
    needed: dict[int, set[int]] = {}
    for number, fields in a.entries("tile_rows").items():
        tile = a.entries("tile_at")[number]
        expert = places[tile][0]
        carried = {first[expert] + rows[expert] // TILE_ROWS} if tile_pairs.field_few(fields) else set()
        needed.setdefault(number // 2, set()).update({tile} | carried)
    vars(a).update(heap=0, arrived_at=a.arrived, deadline=10)
    ready: list[int] = []

    def make_ready(k: Any, a: Any, side: int, queue: int, block: int, row_tiles: int, processors: int) -> None:
        assert (queue, block % 2, row_tiles, processors) == (0, lane, dealt, 66)
        assert not needed[block] & set(late), "tasks of a block without its rows"
        ready.append(block)

    def aborted(a: Any) -> bool:
        assert late, "waits for ever"
        tile = late.pop()
        a.words[a.arrived + 4 * tile] += 1
        return False

    names = {
        "read": a.read, "carried_tile": tile_pairs.carried_tile, "reached": reached, "EARLY": EARLY, "LANES": 2,
        "buffer_tile": lambda k, a, tile: tile, "arrived_word": lambda k, a, side, tile: 0, "TILE_ROWS": TILE_ROWS,
        "ceil_div": ceil_div, "make_ready": make_ready, "aborted": aborted, "fail": None,
        "cute": types.SimpleNamespace(arch=types.SimpleNamespace(globaltimer=lambda: 0)),
    }  # fmt: skip
    names["all_there"] = kernel_function("subscriber", "all_there", **names)
    k = types.SimpleNamespace(
        early=not by_token, paired=True, carries=True, block_tiles=2, signal_words=1, by_token=by_token
    )
    for lane in range(2):
        kernel_function("subscriber", "subscribe", **names)(k, a, 0, dealt, 66, lane)
    assert sorted(ready) == list(range(dealt // 2))


def test_a_block_of_tiles_is_ready_at_once_if_all_of_its_rows_are_early():
    a, places, dealt = tables([276, 300], [(0, 276), (0, 290)], side=0)
    for tile in range(len(places)):
        a.words[a.arrived + 4 * tile] = a.words[a.arrived_target + 4 * tile] - 1
    names = {"read": a.read, "carried_tile": tile_pairs.carried_tile, "reached": reached, "EARLY": EARLY}
    there = kernel_function("subscriber", "all_there", **names, buffer_tile=None)
    ready = []
    for early in (True, False):
        k = types.SimpleNamespace(early=early, paired=True, carries=True, block_tiles=2, signal_words=1)
        ready.append([there(k, a, a.arrived, a.arrived_target, begin, dealt) for begin in range(0, dealt, 2)])
    # of the second expert's last pair, wide, ten rows aren't
    assert ready == [[True, True, False], [False, False, False]]


def test_tables_have_room_for_tiles_that_are_dealt_twice():
    """Every expert with three tiles: the last one of each twice."""
    shape = KernelShape.from_config(QWEN3, 1)
    assert shape.paired
    alone = KernelShape.from_config(QWEN3, 1, paired=False)
    paired, single = (
        {name: region.size for name, region in workspace_regions(k, 4096, 132)[0].items()} for k in (shape, alone)
    )
    assert paired["tile_rows"] == paired["tile_slot"] == 2 * single["tile_rows"]
    assert paired["tile_at"] == 3 * single["tile_rows"]


# --- who signals a row ------------------------------------------------------------------------------------------------


class Taken(Exception):
    """A lane has come to the first shuffle."""


class Storers:
    """The storers of all pairs, one GEMM1 task after the other; each as 32 lanes that run `count_returned`."""

    def __init__(self, columns: int, halves: bool) -> None:
        self.counters: Counter[int] = Counter()
        self.signalled: list[tuple[int, int]] = []
        self.k = types.SimpleNamespace(carries=True, columns1=columns, top_k=1, by_token=False, halves=halves)
        self.a = types.SimpleNamespace(rank=0, back_at=0)
        self.fences = 0
        names: dict[str, Any] = {"TILE_ROWS": TILE_ROWS, "HOME_BITS": 26}
        names |= {"add": self.add, "back_word": lambda k, a, side, token: token, "peer": lambda a, rank: 0}
        names |= {"buffer_tile": lambda k, a, tile: tile, "home_of": lambda k, a, side, row: row, "summed_word": None}
        for name in ("home_in", "signal_home"):
            names[name] = kernel_function("processor", name, **names)
        names |= {name: getattr(tile_pairs, name) for name in (
            "carried_tile", "field_few", "field_rows", "field_same", "field_wide",
        )}  # fmt: skip
        arch = types.SimpleNamespace(sync_warp=lambda: None, shuffle_sync=self.shuffle)
        names |= {
            "cute": types.SimpleNamespace(arch=arch), "fence_results": self.fence, "side_counters": lambda a, side: 0,
            "returned_word": lambda k, a, tile: tile, "shared_returned": None, "fetch_add": self.fetch_add,
            "aborted": lambda a: False,
        }  # fmt: skip
        self.count = kernel_function("processor", "count_returned", **names)
        self.before: dict[int, int] | None = {}
        self.lane = 0

    def fence(self, k: Any) -> None:
        self.fences += 1

    def add(self, base: int, token: int, value: int, scope: str) -> None:
        assert (value, scope) == (1, "sys")
        assert self.fences > 1, "signalled without a fence after the count"
        self.signalled.append(divmod(token, TILE_ROWS))

    def fetch_add(self, counters: int, place: int, value: int = 1) -> int:
        if self.before is not None:
            self.counters[place] += value
            return self.counters[place] - value
        return self.answers[self.lane]

    def shuffle(self, value: int, lane: int) -> int:
        if self.before is not None:
            self.before[self.lane] = value
            raise Taken
        return self.answers[lane]

    def task(self, tile: int, fields: int, member: int, halves: int) -> list[tuple[int, int]]:
        """The rows that the storer of one task signals."""
        self.before, self.signalled = {}, []
        for self.lane in range(32):
            with pytest.raises(Taken):
                self.count(self.k, self.a, 0, tile, fields, member, True, halves, self.lane)
        self.answers, self.before = self.before, None
        for self.lane in range(32):
            self.fences = 0
            self.count(self.k, self.a, 0, tile, fields, member, True, halves, self.lane)
        return self.signalled


@pytest.mark.parametrize(
    "rows",
    [[256 + 32], [384 + 1], [140, 150, 129], [17, 256, 128, 300], [512 + 20], [64], [65, 0, 1024 + 5], [160], [1], []],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("columns", [1, 3, 4])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("halves", [False, True])
def test_every_row_is_signalled_once_and_after_all_that_compute_it(rows, columns, seed, halves):
    """Tasks of all pairs, columns and members end in any order, some of them in halves; a row is complete with the last
    column of the last block that computes a part of it. Who has nothing to compute counts nothing, see `storer`."""
    choose = random.Random(seed)
    a, places, dealt = tables(rows, [(0, 0)] * len(rows)) if rows else (None, [], 0)
    halved = (lambda: choose.random() < 0.5) if halves else (lambda: False)
    tasks = [task for task in tasks_of(parts_of(a, dealt), columns, halved) if task[3]]
    left = Counter((tile, row) for _, _, _, pieces, _ in tasks for tile, row, *_ in pieces)
    every = {(tile, row) for tile, (e, begun) in enumerate(places) for row in range(min(rows[e] - begun, TILE_ROWS))}
    assert left == dict.fromkeys(every, 2 * columns), "a row that isn't computed, or padding"
    choose.shuffle(tasks)
    storers, signalled = Storers(columns, halves), Counter()
    for member, tile, fields, pieces, parts in tasks:
        left.subtract((tile, row) for tile, row, *_ in pieces)
        found = storers.task(tile, fields, member, parts if halves else 1)
        assert all(left[row] == 0 for row in found), "signalled before it is complete"
        signalled.update(found)
    assert signalled == dict.fromkeys(every, 1)


def parts_of(a: Any, dealt: int) -> dict[int, tuple[int, int, int]]:
    """Slot, place and fields of every number that the planner's tables deal."""
    names = ("tile_slot", "tile_at", "tile_rows")
    return {number: tuple(a.entries(name)[number] for name in names) for number in range(dealt)}


@pytest.mark.parametrize(
    "rows", [[256 + 32], [384 + 1], [140, 150, 129], [17, 256, 128, 300], [64], [65, 0, 1029]], ids=str
)
@pytest.mark.parametrize("columns", [1, 3, 6])
@pytest.mark.parametrize("size", [2, 8])
def test_second_products_are_ready_with_the_last_hidden_tile(rows, columns, size):
    """Every block of numbers, once: after all hidden tiles of its row tiles, of which a wide one's count twice."""
    a, _, dealt = tables(rows, [(0, 0)] * len(rows), side=0)
    parts, counters = parts_of(a, dealt), Counter()
    ready: list[int] = []

    def fetch_add(base: int, at: int, value: int) -> int:
        counters[at] += value
        return counters[at] - value

    finish = kernel_function(
        "scheduler", "finish_hidden", side_counters=lambda a, side: 0, dealt_number=tile_pairs.dealt_number,
        dealt_at=lambda k, a: a.dealt, read=a.read, COUNTER_WORDS=0, dense_tiles=lambda k, a: 0, fetch_add=fetch_add,
        make_ready=lambda k, a, side, queue, block, row_tiles, processors: ready.append(block),
    )  # fmt: skip
    k = types.SimpleNamespace(paired=True, block_tiles=size, columns0=columns)
    tasks = [(tile, fields) for _, tile, fields, pieces, _ in tasks_of(parts, columns) if pieces]
    numbers = {tile: [n for n, part in parts.items() if part[1] == tile] for tile, _ in tasks}
    random.Random(columns).shuffle(tasks)
    left = Counter(numbers[tile][0] // size for tile, _ in tasks)
    assert all(left.values())
    for tile, fields in tasks:
        block = numbers[tile][0] // size
        left[block] -= 1
        finish(k, a, 0, tile, 1 + tile_pairs.field_wide(fields), dealt)
        assert ready.count(block) == (left[block] == 0)
    assert sorted(ready) == list(range(ceil_div(dealt, size)))


# --- values of carried rows -------------------------------------------------------------------------------------------


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
    cute = cutlass_dsl()
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


def test_only_pairs_of_16_bit_layers_carry():
    assert KernelShape.from_config(QWEN3, 2).carries
    assert KernelShape.from_config(PAPER, 1).carries
    assert KernelShape.from_config(QWEN3.replace(wire_format="tokens"), 2).carries
    for other in (
        KernelShape.from_config(QWEN3, 2, paired=False),
        KernelShape.from_config(QWEN3.replace(dtype="float32"), 1),
        KernelShape.from_config(QWEN3, 2, transport="put_signal"),
        KernelShape.from_config(QWEN3.replace(layout="fixed"), 2),
        KernelShape.from_config(QWEN3.replace(shared_intermediate=512), 2),
        KernelShape.from_config(QWEN3.replace(expert_bias=True), 1),
        # fewer steps than stages: the few rows of the first ones are asked for together
        KernelShape.from_config(QWEN3.replace(intermediate=64 * (STAGES - 1)), 1),
    ):
        assert not other.carries, other.name


@pytest.mark.parametrize("per", [1, 3, 64])
@pytest.mark.parametrize("whole", [0, 1, 5])
def test_second_products_of_the_last_blocks_are_dealt_in_halves(per, whole):
    """Which ready block each second product is of: `per` of each of the first ones, then twice as many."""
    before, of = (kernel_function("scheduler", name) for name in ("seconds_before", "block_of_second"))
    want = [block for block in range(9) for _ in range(per * (1 + (block >= whole)))]
    assert [of(number, whole, per) for number in range(len(want))] == want
    assert [before(block, whole, per) for block in range(9)] == [want.index(block) for block in range(9)]
