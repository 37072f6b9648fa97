"""Waits with a deadline, the abort flag and the error record; how roles talk through memory.

A wait that runs past its deadline writes who waited for what into the record (pinned host memory), raises the abort
flag and goes on as if it had succeeded. Every role looks at the flag, so the whole kernel drains and ends; nothing is
sent or combined after it. That way no shared-memory pipeline can be left half full.

Ordering: rows arrive by ordinary (generic proxy) stores. Where TMA (async proxy) reads them: acquire, then a proxy
fence, then the load. Where the loader gathers them, its copies read and write by the generic proxy: acquire, look up
homes, copy; the proxy fence is the consumers', behind the stage's full barrier. Counters of peers are added to at
system scope, own ones at GPU scope.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from moe_fast.kernel.constants import COUNTER_WORDS, LINE_BYTES, TILE_COLUMNS, TILE_ROWS
from moe_fast.kernel.regions import sum_words
from moe_fast.kernel.shapes import KernelShape
from moe_ref.layout import ROUNDS, SIDES, ceil_div
from moe_ref.runtime.encoding import reached

EPOCH, EXITED, ABORT, SENT_ROWS, PUT_ROWS, PUT_RESULTS = range(6)
"""Words of the control block. SENT_ROWS counts rows stored into peers, over all calls (variants with trace only);
PUT_ROWS and PUT_RESULTS count rows and results sent by put-with-signal."""

ROLES = ("none", "gate", "planner", "dispatch", "loader", "combine", "dispatcher", "scheduler", "subscriber")
WAITS = (
    "nothing",
    "token tiles routed",
    "counts of rank",
    "the plan",
    "the send list",
    "rows of tile",
    "hidden tiles of row tile",
    "returned rows of token",
    "mail of processor",
    "arrivals",
    "the tokens of rank",
    "the token of row",
    "results of another rank's token",
)
DERIVED = (3, 4, 6, 7, 8)
"""Waits for another role of this GPU or for what follows from other waits: they are twice as patient, so that the error
names the wait that everything else waits for."""
RECORD_WORDS = 8
"""code, rank, role, wait, index, seen, expected, status"""


class Role:
    """Index into ROLES."""

    GATE, PLANNER, DISPATCH, LOADER, COMBINE, DISPATCHER, SCHEDULER, SUBSCRIBER = range(1, 9)


class Wait:
    """Index into WAITS."""

    ROUTED, COUNTS, PLAN, LIST, ARRIVED, HIDDEN, BACK, MAIL, ARRIVALS, TOKENS, LEADER, RESULTS = range(1, 13)


class Args(NamedTuple):
    """Everything a launch passes: addresses (bytes), offsets in the symmetric heap (bytes), sizes."""

    x: Int64
    y: Int64
    bias: Int64
    router_bias: Int64
    given_expert: Int64
    given_weight: Int64
    peers: Int64
    heap: Int64
    rows_at: Int64
    returned_at: Int64
    home_at: Int64
    arrived_at: Int64
    back_at: Int64
    counts_at: Int64
    counts_flag_at: Int64
    expert: Int64
    weight: Int64
    index: Int64
    send: Int64
    histogram: Int64
    row_shift: Int64
    list_start: Int64
    plan: Int64
    tile_slot: Int64
    tile_rows: Int64
    arrived_target: Int64
    back_target: Int64
    counters: Int64
    control: Int64
    shared_rows: Int64
    shared_gate: Int64
    record: Int64
    trace: Int64
    deadline: Int64
    tokens: Int32
    max_tokens: Int32
    rows: Int32
    rank: Int32
    given: Int32
    counter_words: Int32
    token_tiles: Int32
    placement: Int64
    quota: Int64
    quota_end: Int64
    list_shift: Int64
    wire_at: Int64
    results_at: Int64
    tile_at: Int64
    where: Int64
    planned: Int32
    capacity: Int32
    slot_capacity: Int32


class Operands(NamedTuple):
    """Addresses from which the host function makes descriptors: weights, biases, hidden activations; what a layer
    hasn't is never read."""

    router: Int64
    first: Int64
    second: Int64
    hidden: Int64
    first_bias: Int64
    second_bias: Int64
    shared_first: Int64
    shared_second: Int64
    shared_hidden: Int64


# --- addresses: plain functions, traced where they are called -----------------------------------------------------


def gmem(address, dtype=Int32, align=None):
    """Global pointer to an address in bytes."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align or dtype.width // 8)


def word(address, index):
    """Pointer to int32 number `index` at an address."""
    return gmem(address + Int64(index) * 4)


def read(address, index, dtype=Int32, **order):
    """Element `index` of an array of 4- or 8-byte elements."""
    return cute.arch.load(gmem(address + Int64(index) * (dtype.width // 8), dtype), dtype, **order)


def write(address, index, value, dtype=Int32, **order):
    """Store element `index`."""
    cute.arch.store(gmem(address + Int64(index) * (dtype.width // 8), dtype), dtype(value), **order)


def peer(a, rank):
    """Base address of the symmetric heap of `rank`, mapped here."""
    return read(a.peers, rank, Int64)


def side_counters(a, side):
    """Address of this call's local counters."""
    return a.counters + Int64(side * a.counter_words) * 4


def done_word(row_tile):
    """Index of the counter of finished hidden tiles of a row tile."""
    return COUNTER_WORDS + row_tile


def shared_done(a, token_tile):
    """Index of the counter of the shared expert's finished hidden tiles of a token tile."""
    return a.counter_words - 1 - 2 * token_tile


def shared_returned(a, token_tile):
    """Index of the counter of the shared expert's finished results of a token tile."""
    return a.counter_words - 2 - 2 * token_tile


def returned_word(k, a, row_tile):
    """Index of the counter of GEMM1 tiles of a row tile whose rows are home."""
    return COUNTER_WORDS + 4 * dense_tiles(k, a) + row_tile


def combined_word(k, a, token_tile):
    """Index of the word with a bit for each token of a tile that some warp combines or has combined."""
    return COUNTER_WORDS + 5 * dense_tiles(k, a) + token_tile


def dense_tiles(k, a):
    """Row tiles that a call can have at most."""
    return a.rows // TILE_ROWS * (k.ranks if k.fixed else 1)


def buffer_tile(k, a, row_tile):
    """Which tile of the dispatch buffer a row tile is: the same one, but for the fixed layout, which leaves gaps."""
    return read(a.tile_at, row_tile) if k.fixed else row_tile


def dealt_at(k, a):
    """Address of the table of the numbers that row tiles are dealt as, and of their rows, in a paired kernel: [R / T],
    words of `tile_pairs.pack_dealt`."""
    return a.tile_at + Int64(2 * dense_tiles(k, a)) * 4


def arrived_word(k, a, side, tile):
    """Index of a row tile's arrival counter."""
    return (side * (a.rows // TILE_ROWS) + tile) * k.signal_words


def back_word(k, a, side, token):
    """Index of the counter of a token's returned rows."""
    return (side * a.max_tokens + token) * k.signal_words


def home_of(k, a, side, row):
    """Where a row of the dispatch buffer goes home to: a word beside it; with puts the end of its packet."""
    if k.put:
        return read(a.heap + a.rows_at + (Int64(side) * a.rows + row) * k.row_pitch + k.hidden * k.element_size, 0)
    return read(a.heap + a.home_at, side * a.rows + row)


def landing_of(k, a, side, row):
    """Where the result of a row of the dispatch buffer lands: `home_of`, or in the second word of the packet's end the
    same with its place in the source's send list instead of its route."""
    if k.by_place:
        return read(a.heap + a.rows_at + (Int64(side) * a.rows + row) * k.row_pitch + k.hidden * k.element_size, 1)
    return home_of(k, a, side, row)


def home_row(a, row, owner, source):
    """Where in the fixed layout the result of buffer row `row`, computed by `owner`, comes back to its `source`.

    L[source, 0, side, slot, index] returns as L[owner, 1, side, slot, index]; rows without the side's part.
    """
    return row + ((owner - source) * ROUNDS + 1) * SIDES * a.rows


def result_at(k, a, side, rank, route, row):
    """Offset in the heap of `rank` of the result of its `route`, computed here from buffer row `row`."""
    if k.fixed:
        return a.rows_at + (Int64(side) * a.rows + home_row(a, row, a.rank, rank)) * k.row_pitch
    return a.returned_at + (Int64(side) * (a.max_tokens * k.top_k) + route) * (k.hidden * k.element_size)


# With put-with-signal results lie line by line of 128 bytes, where they are staged and where they land: what a task has
# made of neighbouring rows is one stretch of bytes for each line, as in the epilogue's buffers. Within a line it is
# as there, too: 16-byte piece p of a row lies at p ^ (row % 8), where `row` is that of its tile.


def tile_lines(k: KernelShape) -> int:
    """Lines of a column tile."""
    return TILE_COLUMNS // k.line


def in_lines(rows, row, line):
    """Offset of a row's line in a block of `rows` rows that lies line by line."""
    return Int64(rows) * (line * LINE_BYTES) + Int64(row) * LINE_BYTES


def staged_at(k, a, row, column):
    """Offset of the first line of a column tile of row `row` of the results that are put; 128 rows are a block."""
    tile = row // TILE_ROWS
    block = a.results_at + Int64(tile) * (TILE_ROWS * k.hidden * k.element_size)
    return block + in_lines(TILE_ROWS, row - tile * TILE_ROWS, column * tile_lines(k))


def landed_rows(k, a):
    """Rows of a block of results that peers have put here: all of a side, in the fixed layout those of a slot."""
    return a.slot_capacity if k.fixed else a.max_tokens * k.top_k


def tile_at_home(k, a, side, rank, place, row, column):
    """Offset in the heap of `rank` of a column tile's first line of a result that is put, computed here from buffer row
    `row`.

    place: in the send list of `rank`, which only the compact layout asks for.
    """
    rows = landed_rows(k, a)
    if not k.fixed:
        side_bytes = Int64(rows) * (k.hidden * k.element_size)
        return a.returned_at + Int64(side) * side_bytes + in_lines(rows, place, column * tile_lines(k))
    landing = home_row(a, row, a.rank, rank)
    block = landing // rows * rows
    start = a.rows_at + (Int64(side) * a.rows + block) * k.row_pitch
    return start + in_lines(rows, landing - block, column * tile_lines(k))


def add(address, index, value, scope, sem="relaxed"):
    """Add to a counter without reading it."""
    cute.arch.red(word(address, index), Int32(value), op="add", dtype="s32", sem=sem, scope=scope)


def fetch_add(address, index, value=1):
    """Add to a counter of this GPU and return what it was."""
    return cute.arch.atomic_add(word(address, index), Int32(value), sem="relaxed", scope="gpu")


# In the wire format "tokens": offsets in a heap of what peers write beside rows, see `regions.wire_words`.


def landed_at(a):
    """Call in which a row that leads others landed here: [R]."""
    return a.wire_at


def listed_at(a):
    """Call in which a rank told all that comes here: [P]."""
    return landed_at(a) + Int64(a.rows) * 4


def leader_at(k, a):
    """Row in which a row's token is sent, itself if it is sent or stays on its rank: [R]."""
    return listed_at(a) + k.ranks * 4


def sent_at(k, a):
    """Tokens that a rank has for a rank, each counted once: [P, P]."""
    return leader_at(k, a) + Int64(a.rows) * 4


def need_at(k, a):
    """Rows that a rank's token has here: [P, max_tokens]."""
    return sent_at(k, a) + k.ranks * k.ranks * 4


def place_at(k, a):
    """Row of each choice of a rank's token, -1 if it isn't here: [P, max_tokens, K]."""
    return need_at(k, a) + Int64(k.ranks * a.max_tokens) * 4


def weight_at(k, a):
    """Weight of each choice of a rank's token, fp32: [P, max_tokens, K]."""
    return place_at(k, a) + Int64(k.ranks * a.max_tokens) * (4 * k.top_k)


def summed_word(k, a, source, token):
    """Index of the counter of the results that are here of another rank's token."""
    shared = 2 * ceil_div(a.max_tokens, TILE_ROWS) if k.shared_intermediate else 0
    first = a.counter_words - shared - sum_words(k, a.max_tokens, a.token_tiles)
    return first + source * a.max_tokens + token


def taken_word(k, a, source, token_tile):
    """Index of the word with a bit for each token of a tile of another rank's that some warp sums or has summed."""
    return summed_word(k, a, k.ranks, 0) + source * a.token_tiles + token_tile


def sent_word(k, a, rank):
    """Index of the count of this rank's tokens for a rank."""
    return taken_word(k, a, k.ranks, 0) + rank


# --- failure -------------------------------------------------------------------------------------------------------


TRACKS = ("consumer", "storer", "spare", "main loop 1", "main loop 2")
EVENTS = 512
"""Events that a track of a block can hold; more are dropped (and counted)."""


def track_at(a: Args, block: Int32, track: int) -> Int64:
    """Address of a track of a block."""
    return a.trace + Int64(block * len(TRACKS) + track) * ((EVENTS + 1) * 24)


@cute.jit
def hold_start(a: Args, block: Int32, track: cutlass.Constexpr):
    """One thread: keep the time where the track's next event will be, for what leaves no registers to keep it in."""
    base = track_at(a, block, track)
    number = Int32(read(base, 0, Int64))
    if number < EVENTS:
        write(base, (number + 1) * 3, cute.arch.globaltimer(), Int64)


@cute.jit
def held_start(a: Args, block: Int32, track: cutlass.Constexpr) -> Int64:
    """The thread that has called `hold_start`: what it kept, if the track has room for the event."""
    base = track_at(a, block, track)
    number = Int32(read(base, 0, Int64))
    return read(base, (min(number, Int32(EVENTS - 1)) + 1) * 3, Int64)


@cute.jit
def note(a: Args, block: Int32, track: cutlass.Constexpr, start: Int64, what: Int64):
    """One thread: record that `what` (a task word, or a small negative number for a phase) ran from `start` to now.

    A track is EVENTS + 1 triples of int64: (number of events, the SM's clock at the end of the first and of the last
    one that is kept), then (start, end, what), times in ns of globaltimer.
    """
    base = track_at(a, block, track)
    number = Int32(read(base, 0, Int64))
    write(base, 0, number + 1, Int64)
    if number < EVENTS:
        at = (number + 1) * 3
        if number == 0:
            write(base, 1, cute.arch.clock64(), Int64)
        write(base, 2, cute.arch.clock64(), Int64)
        write(base, at, start, Int64)
        write(base, at + 1, cute.arch.globaltimer(), Int64)
        write(base, at + 2, what, Int64)


class Phase:
    """What a traced event was, where it wasn't a task."""

    GATE, PLAN, LIST, PUSH, COMBINE, SOLVE = -1, -2, -3, -4, -5, -6


@cute.jit
def now(k: cutlass.Constexpr[KernelShape]) -> Int64:
    """globaltimer in ns in traced variants, else 0."""
    time = Int64(0)
    if cutlass.const_expr(k.trace):
        time = Int64(cute.arch.globaltimer())
    return time


@cute.jit
def mark(
    k: cutlass.Constexpr[KernelShape], a: Args, block: Int32, track: cutlass.Constexpr, start: Int64,
    what: cutlass.Constexpr, me: Boolean,
):  # fmt: skip
    """In traced variants the thread `me` notes a phase."""
    if cutlass.const_expr(k.trace):
        if me:
            note(a, block, track, start, Int64(what))


@cute.jit
def aborted(a: Args) -> Boolean:
    """Whether some role has given up."""
    return read(a.control, ABORT, sem="relaxed", scope="gpu") != 0


@cute.jit
def aborted_together(a: Args) -> Boolean:
    """Whole warp: `aborted`, the same in all lanes. Lanes that read the flag by themselves may read different values,
    and those that go on would wait for the others in the next shuffle."""
    return cute.arch.vote_any_sync(aborted(a))


@cute.jit
def fail(a: Args, role: cutlass.Constexpr, wait: cutlass.Constexpr, index: Int32, seen: Int32, expected: Int32):
    """Record the first failure for the host and tell all roles."""
    first = cute.arch.atomic_cas(word(a.control, ABORT), cmp=Int32(0), val=Int32(1), sem="relaxed", scope="gpu")
    if first == 0:
        write(a.record, 1, a.rank)
        write(a.record, 2, role)
        write(a.record, 3, wait)
        write(a.record, 4, index)
        write(a.record, 5, seen)
        write(a.record, 6, expected)
        cute.arch.fence_acq_rel_sys()
        write(a.record, 0, 1, sem="release", scope="sys")


@cute.jit
def wait_reached(
    address: Int64,
    index: Int32,
    target: Int32,
    a: Args,
    role: cutlass.Constexpr,
    wait: cutlass.Constexpr,
    what: Int32,
    scope: cutlass.Constexpr,
) -> Boolean:
    """Acquire-spin until the counter has reached `target`; False when the deadline passed or another role gave up."""
    seen = read(address, index, sem="acquire", scope=scope)
    ok = reached(seen, target)
    if not ok:
        start = cute.arch.globaltimer()
        turns = Int32(0)
        go = Boolean(True)
        while go:
            seen = read(address, index, sem="acquire", scope=scope)
            ok = reached(seen, target)
            go = not ok
            turns += 1
            if go and (turns & 15) == 0:
                if aborted(a):
                    go = Boolean(False)
                elif Int64(cute.arch.globaltimer() - start) > a.deadline * (2 if wait in DERIVED else 1):
                    fail(a, role, wait, what, seen, target)
                    go = Boolean(False)
    return ok
