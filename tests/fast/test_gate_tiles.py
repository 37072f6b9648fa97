"""Token tiles of the gate: how high they are, that buffers have room for them, and the way of every route from its tile
into the send list; the kernel's own functions, run on the CPU."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_source import kernel_function, run_together

from moe_fast.kernel.constants import LINE_BYTES, STAGES, TILE_COLUMNS, TILE_ROWS
from moe_fast.kernel.regions import gate_tiles, most_gate_tiles, workspace_regions
from moe_fast.kernel.shapes import KernelShape
from moe_ref.config import MoEConfig
from moe_ref.layout import ceil_div
from moe_ref.runtime.encoding import next_target

H200 = 132
"""Processor blocks of a kernel that has the GPU to itself."""


@pytest.mark.parametrize(
    ("tokens", "processors", "expected"),
    [
        (0, H200, (64, 0)),
        (1, H200, (64, 1)),
        (63, H200, (64, 1)),
        (64, H200, (64, 1)),
        (65, H200, (64, 2)),
        (4096, H200, (64, 64)),
        (64 * H200, H200, (64, H200)),
        (64 * H200 + 1, H200, (128, 67)),
        (16384, H200, (128, 128)),
        (128 * H200 + 1, H200, (128, H200 + 1)),
        (64 * 131, 131, (64, 131)),
        (64 * 131 + 1, 131, (128, 66)),
        (64, 1, (64, 1)),
        (65, 1, (128, 1)),
        (129, 1, (128, 2)),
    ],
)
def test_tiles_are_low_as_long_as_each_has_a_block_of_its_own(tokens, processors, expected):
    assert gate_tiles(tokens, processors) == expected


@pytest.mark.parametrize("processors", [1, 2, 16, 131, H200])
def test_tiles_hold_every_token_once(processors):
    for tokens in range(128 * processors + 200):
        height, tiles = gate_tiles(tokens, processors)
        assert tiles == ceil_div(tokens, height)
        assert (height == 64) == (ceil_div(tokens, 64) <= processors)
        assert height in (64, 128)


@pytest.mark.parametrize("blocks", [1, 3, 16, H200])
def test_histogram_has_room_for_any_call(blocks):
    """For every number of tokens up to the largest, also where one block has no processor; and none to spare."""
    for most in [1, 63, 64, 65, 64 * blocks - 1, 64 * blocks, 64 * blocks + 1, 128 * blocks + 1, 20_000]:
        calls = [gate_tiles(s, p)[1] for s in range(most + 1) for p in {blocks, max(blocks - 1, 1)}]
        assert max(calls) == most_gate_tiles(most, blocks)
        shape = KernelShape.from_config(MoEConfig(512, 256, 60, 2, dtype="bfloat16"), 1)
        assert workspace_regions(shape, most, blocks)[0]["histogram"].size == max(calls) * 60 * 4
    assert workspace_regions(shape, 0, blocks)[0]["histogram"].size == 60 * 4


class Values(list):
    """A thread's registers."""

    def fill(self, value: int) -> None:
        self[:] = [value] * len(self)


class Memory(types.SimpleNamespace):
    """Arrays of a rank, as `Args` has them, each at an address of its own; nothing is read that wasn't written, but for
    the index of a masked route, which is anything; and of the arrays `once` nothing is written twice."""

    names = (
        "given_expert",
        "given_weight",
        "expert",
        "weight",
        "index",
        "histogram",
        "list_start",
        "row_shift",
        "send",
    )
    once = ("expert", "index", "send", "where", "back_target")

    def __init__(self, **more: Any) -> None:
        names = (*self.names, "back_target", "plan", "where", "home")
        super().__init__(**{name: (i + 1) << 40 for i, name in enumerate(names)}, **more)
        self.words: dict[tuple[int, int], Any] = {}
        self.written: set[tuple[int, int]] = set()

    def place(self, address: int, index: int) -> tuple[int, int]:
        return address >> 40, (address & ((1 << 40) - 1)) // 4 + index

    def read(self, address: int, index: int, kind: Any = None) -> Any:
        place = self.place(address, index)
        return self.words.get(place, 1 << 29) if address == self.index else self.words[place]

    def write(self, address: int, index: int, value: Any, kind: Any = None) -> None:
        place = self.place(address, index)
        once = place[0] in [getattr(self, name) >> 40 for name in self.once]
        assert not (once and place in self.written), "written twice"
        self.written.add(place)
        self.words[place] = value

    def entries(self, name: str) -> dict[int, Any]:
        return {at: v for (region, at), v in self.words.items() if region == getattr(self, name) >> 40}


class Block:
    """The 256 consumer threads of a block, with their barriers and shared memory."""

    def __init__(self) -> None:
        self.shared: dict[int, Any] = {}
        self.everyone = threading.Barrier(256)
        self.warps = [threading.Barrier(32) for _ in range(8)]
        self.values: list[Any] = [0] * 256
        self.own = threading.local()

    def sync_warp(self) -> None:
        self.warps[self.own.thread // 32].wait()

    def exchange(self, value: Any) -> list:
        """What every lane of the warp has."""
        self.values[self.own.thread] = value
        self.sync_warp()
        warp = self.own.thread // 32 * 32
        values = self.values[warp : warp + 32]
        self.sync_warp()
        return values

    def match(self, mask: int, value: int) -> int:
        return sum(1 << lane for lane, other in enumerate(self.exchange(value)) if other == value)

    def ballot(self, value: bool) -> int:
        return sum(1 << lane for lane, other in enumerate(self.exchange(value)) if other)

    def arch(self) -> types.SimpleNamespace:
        """The `cute.arch` of these threads."""
        return types.SimpleNamespace(
            load=lambda at, kind: self.shared[at], store=lambda at, value: self.shared.update({at: value}),
            sync_warp=self.sync_warp, match_sync=self.match, vote_ballot_sync=self.ballot,
            shuffle_sync=lambda value, lane: self.exchange(value)[lane], popc=lambda bits: bits.bit_count(),
            fence_acq_rel_gpu=lambda: None,
        )  # fmt: skip

    def run(self, function: Callable[[int], None]) -> None:
        def one(thread: int) -> None:
            self.own.thread = thread
            function(thread)

        run_together(256, one, self.everyone, *self.warps)


PROCESSORS, EXPERTS, PARTS, SIDE, MAX_TOKENS = 3, 5, 2, 1, 512
"""Of the ranks below: 192 tokens are the last that have low tiles."""
CALLS = [(1, 3), (64, 1), (65, 3), (192, 8), (193, 8), (500, 3)]
"""Tokens and choices."""


class Rank:
    """A rank whose token tiles have been routed and summed: given routing through the gate's copy, the ranks in a tile
    and the planner's sums."""

    def __init__(self, tokens: int, top_k: int, **more: Any) -> None:
        from moe_fast.kernel import gate, plan

        k = self.k = types.SimpleNamespace(
            experts=EXPERTS, top_k=top_k, plan_parts=PARTS, drops=False, placed=False, fixed=False, put=False,
            by_place=False, shared_intermediate=0, hidden=512, element_size=2, row_pitch=1024, trace=False, **more,
        )  # fmt: skip
        self.ids = np.random.default_rng(tokens * 10 + top_k).integers(-1, EXPERTS, tokens * top_k).tolist()
        self.a = a = Memory(tokens=tokens, max_tokens=MAX_TOKENS, rows=4096, rank=0)
        for route, expert in enumerate(self.ids):
            a.write(a.given_expert, route, expert)
            a.write(a.given_weight, route, route / 7)
        for token in range(tokens):
            # of the call before on this side
            a.words[a.place(a.back_target, SIDE * MAX_TOKENS + token)] = 1000 + token
        for expert in range(EXPERTS):
            a.write(a.row_shift, expert, 10_000 * expert)
        self.height, self.tiles = gate_tiles(tokens, PROCESSORS)
        routed: list[int] = []
        for tile in range(self.tiles):
            block = Block()
            names: dict[str, Any] = {
                "cute": types.SimpleNamespace(arch=block.arch()), "CONSUMERS": 256, "TILE_ROWS": TILE_ROWS,
                "IDS": gate.IDS, "RANKS": gate.RANKS, "COUNTS": gate.COUNTS, "Float32": float, "read": a.read,
                "write": a.write, "sync_consumers": block.everyone.wait, "Counter": types.SimpleNamespace(ROUTED=0),
                "side_counters": lambda a, side: 0, "add": lambda *order: routed.append(order[2]),
            }  # fmt: skip
            take = kernel_function("gate", "take_given", **names)
            rank = kernel_function("gate", "rank_routes", **names)

            def both(thread: int, take=take, rank=rank, tile=tile) -> None:
                take(k, a, tile, self.height, 0, thread)
                rank(k, a, SIDE, tile, self.height, 0, thread)

            block.run(both)
        # what the planner waits for
        assert routed == [1] * self.tiles
        sums = kernel_function(
            "plan", "sum_histograms", BATCH=plan.BATCH, tiles_per_part=plan.tiles_per_part, read=a.read, write=a.write,
            cute=types.SimpleNamespace(make_rmem_tensor=lambda size, kind: Values([0] * size)),
        )  # fmt: skip
        before = dict(a.words)
        rehearsed = [[sums(k, a, self.tiles, p, e, False) for e in range(EXPERTS)] for p in range(PARTS)]
        assert a.words == before, "a rehearsal changes what the gate may be writing"
        self.total = np.array([[sums(k, a, self.tiles, p, e, True) for e in range(EXPERTS)] for p in range(PARTS)])
        assert (self.total == rehearsed).all()
        counts = self.total.sum(axis=0)
        self.start = np.cumsum(counts) - counts
        for part in range(PARTS):
            for expert in range(EXPERTS):
                place = self.start[expert] + self.total[:part, expert].sum()
                a.write(a.list_start, part * EXPERTS + expert, int(place))

    @property
    def order(self) -> list[tuple[int, int]]:
        """(expert, route) of every entry of the send list: a stable sort by expert."""
        return sorted((expert, route) for route, expert in enumerate(self.ids) if expert >= 0)

    def place_of(self) -> Any:
        return kernel_function("send_list", "place_of", read=self.a.read)


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize(("tokens", "top_k"), CALLS)
def test_every_route_gets_its_place_in_the_send_list(tokens, top_k, gathers):
    """Where a stable sort by expert puts it; every token waits for its rows; and where each block has one tile, its
    threads push the first local rows of it, each once: copied only where no loader reads them from the tokens."""
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra [fused]) is not installed")
    from moe_fast.kernel import send_list

    one = Rank(tokens, top_k)
    k, a, ids, height, tiles = one.k, one.a, one.ids, one.height, one.tiles
    assert a.entries("expert") == dict(enumerate(ids))
    assert a.entries("weight") == {r: r / 7 for r in range(tokens * top_k)}
    assert set(a.entries("histogram")) == set(range(tiles * EXPERTS))
    assert one.total.sum(axis=0).tolist() == [ids.count(e) for e in range(EXPERTS)]
    names = {
        "CONSUMERS": 256, "routes_per_thread": send_list.routes_per_thread, "read": a.read, "write": a.write,
        "starts_of": send_list.starts_of, "next_target": next_target, "place_of": one.place_of(),
    }  # fmt: skip
    load, enter = (kernel_function("send_list", name, **names) for name in ("load_routes", "list_routes"))
    most = send_list.routes_per_thread(k)  # pyright: ignore[reportArgumentType]
    places = [[(Values([-1] * most), Values([0] * most)) for _ in range(256)] for _ in range(PROCESSORS)]

    def list_all(usable: bool, given_up: bool) -> None:
        for block in range(PROCESSORS):
            for thread in range(256):
                routes = tuple(Values([0] * n) for n in (most, most, 2))
                load(k, a, SIDE, block, height, routes, thread)
                for tile in range(block, tiles, PROCESSORS):
                    enter(k, a, SIDE, tile, height, tiles, usable, given_up, routes, places[block][thread], thread)
                    load(k, a, SIDE, tile + PROCESSORS, height, routes, thread)

    # without a plan, or when a role has given up, nobody waits for anything, and nothing is pushed
    before = a.entries("back_target")
    for usable, given_up in ((False, False), (True, True)):
        list_all(usable, given_up)
        assert a.entries("send") == {}
        assert a.entries("back_target") == before
        assert all(place == -1 for block in places for mine, _ in block for place in mine)
    list_all(True, False)
    entries = a.entries("send")
    assert sorted(entries) == list(range(len(one.order)))
    for place, (expert, route) in enumerate(one.order):
        assert entries[place] & 0xFFFFFFFF == route
        assert entries[place] >> 32 == place + 10_000 * expert
    waits = a.entries("back_target")
    for token in range(tokens):
        rows = sum(e >= 0 for e in ids[token * top_k : (token + 1) * top_k])
        assert waits[SIDE * MAX_TOKENS + token] == next_target(1000 + token, rows)
    if tiles > PROCESSORS:
        return

    # experts 0 to 2 are this rank's; half of their rows are the first ones
    near, first = int(one.start[3]), int(one.start[3]) // 2
    for rank, begin in enumerate((0, near)):
        a.write(a.list_start, PARTS * EXPERTS + rank, begin)
    copied: list[tuple[int, int]] = []
    landed: list[int] = []
    homes: dict[int, int] = {}

    def home(address: int, row: int, value: int) -> None:
        assert address == a.home
        homes[row - SIDE * a.rows] = value

    here = types.SimpleNamespace(
        **{**vars(a), "x": 0, "heap": 0, "rows_at": 1 << 30, "home_at": a.home, "arrived_at": 0}
    )
    k = types.SimpleNamespace(**{**vars(k), "gathers": gathers})
    for tile in range(tiles):
        one_block = Block()

        def copy_pair(k, source0, source1, target0, target1, lane) -> None:
            if lane == 0:
                copied.extend({(source0, target0), (source1, target1)})

        push = kernel_function(
            "dispatch", "push_own", read=a.read, write=home, CONSUMERS=256, TILE_ROWS=TILE_ROWS, VECTOR_BYTES=16,
            HOME_BITS=26, boost_rows=lambda rows: rows // 2, copy_pair=copy_pair,
            arrived_word=lambda k, a, side, tile: tile, add=lambda *order: landed.append(order[1]),
            cute=types.SimpleNamespace(arch=one_block.arch(), size=len),
        )  # fmt: skip
        own = kernel_function("dispatch", "first_places", read=a.read)(k, here)
        one_block.run(
            lambda t, tile=tile, push=push, own=own: push(k, here, SIDE, tile, height, own, places[tile][t], t)
        )
    want = one.order[:first]
    rows = [place + 10_000 * expert for place, (expert, _) in enumerate(want)]
    pairs = [
        (route // top_k * 1024, (1 << 30) + (SIDE * a.rows + row) * 1024)
        for row, (_, route) in zip(rows, want, strict=True)
    ]
    assert sorted(copied) == ([] if gathers else sorted(pairs))
    assert homes == {row: route for row, (_, route) in zip(rows, want, strict=True)}
    assert sorted(landed) == sorted(row // TILE_ROWS for row in rows)


@pytest.mark.parametrize(("tokens", "top_k"), CALLS)
def test_peers_are_told_of_every_token_once(tokens, top_k):
    """The wire format "tokens" on two ranks: the list, and what the other rank hears of each token and route."""
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra [fused]) is not installed")
    from moe_fast.kernel import send_list
    from moe_fast.kernel.constants import FOLLOWER

    one = Rank(tokens, top_k, ranks=2, owner=lambda expert: int(expert >= 3))
    k, a, ids, height, tiles = one.k, one.a, one.ids, one.height, one.tiles
    told: dict[tuple[int, str, int], Any] = {}
    sent = [0, 0]
    parts = ("home", "leader", "place", "weight", "need")

    def write(address: int, index: int, value: Any, kind: Any = None) -> None:
        if address < 1 << 50:
            return a.write(address, index, value, kind)
        rank, part = divmod(address >> 32, 1 << 18)
        entry = (rank - 1, parts[part], index)
        assert entry not in told, "told twice"
        told[entry] = value
        return None

    def add(counters: int, rank: int, value: int, scope: str) -> None:
        sent[rank] += value

    here = types.SimpleNamespace(**{**vars(a), "home_at": 0})
    for tile in range(tiles):
        block = Block()
        enter = kernel_function(
            "tokens", "list_tokens", CONSUMERS=256, TILE_ROWS=TILE_ROWS, FOLLOWER=FOLLOWER, HOME_BITS=26,
            cute=types.SimpleNamespace(arch=block.arch()), sync_consumers=block.everyone.wait, read=a.read, write=write,
            starts_of=send_list.starts_of, place_of=one.place_of(), keep_within=lambda *route: True, add=add,
            peer=lambda a, rank: (rank + 1) << 50, side_counters=lambda a, side: 0, next_target=next_target,
            sent_word=lambda k, a, rank: rank,
            **{f"{name}_at": lambda *_, at=at: at << 32 for at, name in enumerate(parts)},
        )  # fmt: skip
        block.run(lambda t, tile=tile, enter=enter: enter(k, here, SIDE, tile, height, tiles, 0, t))

    entries = a.entries("send")
    rows = {route: place + 10_000 * expert for place, (expert, route) in enumerate(one.order)}
    assert [entries[p] & (FOLLOWER - 1) for p in range(len(entries))] == [route for _, route in one.order]
    assert {e & (FOLLOWER - 1): e >> 32 for e in entries.values()} == rows
    by_token = np.array(ids).reshape(tokens, top_k)
    need = {0: ((by_token >= 0) & (by_token < 3)).sum(axis=1), 1: (by_token >= 3).sum(axis=1)}
    of_other = [route for route, expert in enumerate(ids) if expert >= 3]
    assert {at: v for (rank, part, at), v in told.items() if (rank, part) == (1, "need")} == dict(enumerate(need[1]))
    assert {at: v for (rank, part, at), v in told.items() if (rank, part) == (1, "place")} == {
        route: rows[route] if route in of_other else -1 for route in range(tokens * top_k)
    }
    assert sum(part == "weight" for _, part, _ in told) == tokens * top_k
    assert {at - SIDE * a.rows for rank, part, at in told if (rank, part) == (1, "home")} == {
        rows[route] for route in of_other
    }
    assert sent == [int((need[rank] > 0).sum()) for rank in range(2)]
    assert a.entries("where") == {
        route: rows[route] if 0 <= expert < 3 else -1 if expert < 0 else -3 for route, expert in enumerate(ids)
    }
    waits = a.entries("back_target")
    for token in range(tokens):
        expected = next_target(1000 + token, int(need[0][token] + (need[1][token] > 0)))
        assert waits[SIDE * MAX_TOKENS + token] == expected


@pytest.mark.parametrize(("rows", "steps"), [(128, 1), (128, 2), (64, 1), (64, 2)])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_stage_of_the_gate_gets_what_its_barrier_expects(rows, steps, parts):
    """Bytes of its boxes; steps in the places that the stage has for its first rows, and one after the other."""
    expected: list[tuple[int, int]] = []
    copied: list[tuple[int, tuple[str, int], tuple[str, int]]] = []

    class Box:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, place: tuple) -> tuple[str, int]:
            return self.name, place[1]

    def copy(atom, source, target, tma_bar_ptr) -> None:
        copied.append((tma_bar_ptr, source, target))

    arch = types.SimpleNamespace(
        mbarrier_wait=lambda *_: None, elect_one=contextlib.nullcontext,
        mbarrier_arrive_and_expect_tx=lambda barrier, size: expected.append((barrier, size)),
    )  # fmt: skip
    load = kernel_function(
        "loads", "load_logits", STAGES=STAGES, TILE_ROWS=TILE_ROWS, LINE_BYTES=LINE_BYTES,
        cute=types.SimpleNamespace(arch=arch, copy=copy),
    )  # fmt: skip
    k = types.SimpleNamespace(gate_depth=6 * parts, gate_columns=128, router_parts=parts, depth0=6)
    boxes = [Box(name) for name in ("rows", "place of rows", "router", "place of router")]
    stages = 6 * parts // steps
    assert load(k, 100, 200, 3, None, boxes[0], boxes[1], None, boxes[2], boxes[3], rows, steps) == 3 + stages
    assert expected == [(100 + (3 + i) % STAGES, (rows + 128) * LINE_BYTES * steps) for i in range(stages)]
    want = []
    for i in range(stages):
        stage = (3 + i) % STAGES
        for step in range(steps):
            at = i * steps + step
            place = stage * TILE_ROWS // rows + step
            if rows == TILE_ROWS and step > 0:
                # behind the places that all stages have for rows
                place = STAGES + stage
            want.append((100 + stage, ("rows", at % 6), ("place of rows", place)))
            want.append((100 + stage, ("router", at), ("place of router", stage * steps + step)))
    assert copied == want


@pytest.mark.parametrize(
    ("rows", "steps", "group"), [(128, 1, 0), (128, 1, 1), (128, 2, 0), (128, 2, 1), (64, 1, 0), (64, 2, 0)]
)
def test_the_product_reads_each_step_where_it_was_loaded(rows, steps, group):
    """From the places of its rows and of the router, in the order of the steps; and hands a stage back once, when the
    product of its last step has ended."""
    depth, count = 18, 3
    loaded: list[tuple[int, int, int]] = []
    log: list[tuple] = []

    class Place:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, place: tuple) -> tuple:
            return (self.name, *place[1:])

    def copy(atom, source, target, tma_bar_ptr) -> None:
        if target[0] == "rows":
            loaded.append((tma_bar_ptr, target[1], 0))
        else:
            loaded[-1] = (*loaded[-1][:2], target[1])

    names: dict[str, Any] = {"STAGES": STAGES, "TILE_ROWS": TILE_ROWS, "LINE_BYTES": LINE_BYTES}
    arch = types.SimpleNamespace(
        mbarrier_wait=lambda *_: None, elect_one=contextlib.nullcontext, mbarrier_arrive_and_expect_tx=lambda *_: None
    )
    load = kernel_function("loads", "load_logits", cute=types.SimpleNamespace(arch=arch, copy=copy), **names)
    k = types.SimpleNamespace(gate_depth=depth, gate_columns=128, router_parts=1, depth0=depth)
    places = [Place("source"), Place("rows"), Place("source"), Place("router")]
    end = load(k, 100, 200, count, None, *places[:2], None, *places[2:], rows, steps)

    arch = types.SimpleNamespace(mbarrier_wait=lambda barrier, phase: log.append(("wait", barrier, phase)))
    product = kernel_function(
        "gemm", "multiply_logits", tiled_mma=lambda dtype, columns: types.SimpleNamespace(set=lambda *_: None),
        warpgroup=types.SimpleNamespace(
            Field=types.SimpleNamespace(ACCUMULATE=0), fence=lambda: None, commit_group=lambda: log.append(("commit",)),
            wait_group=lambda left: log.append(("ended", left)),
        ),
        release=lambda empty, count: log.append(("release", count)),
        cute=types.SimpleNamespace(
            arch=arch, size=lambda fragment, mode: 4, gemm=lambda mma, acc, a, b, _: log.append(("gemm", a, b))
        ), **names,
    )  # fmt: skip
    a, b = Place("a"), Place("b")
    # of a low tile the first warpgroup hands the stages back for both
    alone = rows == 64
    high = int(rows == TILE_ROWS)
    assert product(None, 128, None, a, b, 100, 200, count, depth, steps - 1, high, group, alone) == end
    assert end == count + depth // steps
    step, ended, released, seen, each = -1, 0, [], 0, 1 + alone
    for what, *more in log:
        if what == "wait":
            step += 1
            stage = count + step // steps
            assert more == [100 + stage % STAGES, stage // STAGES & 1]
            seen = 0
        elif what == "gemm":
            barrier, row_place, router_place = loaded[step]
            # a place of 128 rows is one of 64 for each warpgroup
            row_place = row_place * 2 + group if rows == 128 else row_place
            assert barrier == 100 + (count + step // steps) % STAGES
            assert more == [("a", None, seen, row_place), ("b", None, seen, router_place)]
            seen += 1
        elif what == "ended":
            assert seen == 4
            ended = step + 1 - more[0]
        elif what == "release":
            released += more
            assert ended >= -(-len(released) // each) * steps
    assert step == depth - 1
    assert released == [stage for stage in range(count, end) for _ in range(each)]


def test_stages_take_two_steps_where_both_operands_have_room():
    """The router of at most 128 columns of a low token tile, of at most 64 of a high one, and an even number of steps;
    not the products of float32."""
    plain = MoEConfig(2048, 768, 128, 8, dtype="bfloat16")
    for experts, fp32_router, steps in (
        (128, False, (2, 1)),
        (64, False, (2, 2)),
        (65, False, (2, 1)),
        (8, True, (2, 2)),
    ):
        shape = KernelShape.from_config(plain.replace(experts=experts), 1, fp32_router=fp32_router)
        assert (shape.gate_steps(True), shape.gate_steps(False)) == steps, shape.name
    for other in (
        KernelShape.from_config(plain.replace(experts=129), 1),
        KernelShape.from_config(plain.replace(hidden=2880), 1),
        KernelShape.from_config(plain.replace(hidden=64 * 33), 1, fp32_router=True),
        KernelShape.from_config(plain.replace(dtype="float32"), 1),
    ):
        assert (other.gate_steps(True), other.gate_steps(False)) == (1, 1), other.name


@pytest.mark.parametrize("experts", [8, 40, 64, 65, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_and_router_of_the_gate_share_no_memory(experts, dtype):
    """Of all stages and steps: rows go from the stages' rows on into those of the weights, where the router lies."""
    k = KernelShape.from_config(MoEConfig(2048, 768, experts, 2, dtype=dtype), 1)
    for low in (True, False):
        height, steps = TILE_ROWS // 2 if low else TILE_ROWS, k.gate_steps(low)
        per, used = TILE_ROWS // height, []
        for stage in range(STAGES):
            for i in range(steps):
                place = stage * per + i // per * (STAGES * per) + i % per
                used.append(range(place * height, (place + 1) * height))
                at = STAGES * TILE_ROWS + k.router_at + (stage * steps + i) * k.gate_columns
                used.append(range(at, at + k.gate_columns))
        rows = [row for part in used for row in part]
        assert len(rows) == len(set(rows))
        assert max(rows) < STAGES * (TILE_ROWS + TILE_COLUMNS)
