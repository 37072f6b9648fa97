"""The final combine: the kernel's own functions, all consumer warps of a few blocks, in random order of their trips to
memory, without the DSL.

A warp is one thread here; what differs between its lanes, or may differ because they read it at different times, is an
array of 32, on which no plain branch can be taken.
"""

from __future__ import annotations

import ast
import operator
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Set
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_source import kernel_function, parsed

from moe_fast.kernel import constants
from moe_ref.layout import ceil_div
from moe_ref.runtime.encoding import reached

LANES, WARPS = 32, 8
TILE = constants.TOKEN_TILE
SIDE = 1
BACK, TARGETS, CLAIMED = 1 << 40, 2 << 40, 3 << 40
"""Addresses in global memory; smaller ones are words of shared memory, see `Device.place`."""
LISTS = 1 << 20
"""Address of the first block's lists."""
APART = 1 << 12
"""From one block's words to those of the next one."""

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


def own_constants() -> dict[str, Any]:
    """The numbers at the heads of combine.py and final_combine.py."""
    space = {name: getattr(constants, name) for name in ("HOME_BITS", "LINE_BYTES", "MAX_TOP_K", "TOKEN_TILE")}
    for module in ("combine", "final_combine"):
        head: list[ast.stmt] = [node for node in parsed(module).body if isinstance(node, ast.Assign)]
        exec(compile(ast.Module(head, []), f"{module}.py", "exec"), space)
    return {name: value for name, value in space.items() if isinstance(value, int)}


def shape(ranks: int, top_k: int, hidden: int = 1 << 12, by_token: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        ranks=ranks, signal_words=2, by_token=by_token, top_k=top_k, hidden=hidden, element_size=2,
        shared_intermediate=0,
    )  # fmt: skip


SHAPES = {"several": shape(2, 2), "arrival": shape(1, 2), "choices": shape(1, 8), "tokens": shape(2, 2, by_token=True)}
"""Pieces go to whoever comes first in one of them only."""
PARTS = {"several": 2, "arrival": 2, "choices": 8, "tokens": 1}
"""Among how many warps a token's columns can be divided: 16 steps of a row, of which a lane has 8 in flight, or 2."""


def int32(value):
    return value if isinstance(value, np.ndarray) else np.int32(value)


def lowest(bits) -> np.int32:
    return np.int32((int(bits) & -int(bits)).bit_length() - 1)


def bits_of(flags) -> np.int32:
    """A bit for each lane."""
    return np.packbits(np.broadcast_to(flags, LANES), bitorder="little").view(np.int32)[0]


NUMBERS = own_constants()
PLAIN = NUMBERS | {"Int32": int32, "Int64": int, "min": np.minimum, "ceil_div": ceil_div}
TURN, FEW_LEFT, SHARE_WORDS = (NUMBERS[name] for name in ("TOKENS_PER_TURN", "FEW_LEFT", "SHARE_WORDS"))
KEPT = [NUMBERS[name] for name in ("OPEN_SIDE", "BLOCKS", "SIDE")]
LIST_WORDS = 2 * NUMBERS["LEFT_AT"] + FEW_LEFT
ROUND = NUMBERS["SHARES"] * TILE
"""Tokens that a block claims together, at most."""
NEXT_ROUND = NUMBERS["NEXT_SHARES"] * TILE
"""The same where pieces go to whoever comes first."""


def round_of(form: str) -> int:
    return NEXT_ROUND if form == "arrival" else ROUND


class Mask:
    """A condition that differs between lanes: what is called in a branch under it can tell which lanes are there."""

    def __init__(self, local: threading.local, lanes: np.ndarray) -> None:
        self.local, self.lanes = local, lanes

    def __bool__(self) -> bool:
        self.local.mask = self.lanes
        return bool(self.lanes.any())


class Bits:
    """(word >> lane), of which only the lowest bit may be asked for."""

    def __init__(self, local: threading.local, bits: np.ndarray) -> None:
        self.local, self.bits = local, bits

    def __and__(self, other: int) -> Bits:
        assert other == 1
        return Bits(self.local, self.bits & 1)

    def differ(self, other: object) -> Mask:
        assert other == 0
        assert self.bits.max() <= 1
        assert self.bits.min() >= 0
        return Mask(self.local, self.bits == 1)

    __ne__: Any = differ


class Lane:
    """A warp's lane numbers. What lane 0 alone does is done once for the warp."""

    __array_ufunc__ = None
    NUMBERS = np.arange(LANES, dtype=np.int32)

    def __init__(self, local: threading.local) -> None:
        self.local = local

    def __eq__(self, other: object) -> bool:
        assert other == 0
        return True

    def __lt__(self, other: Any) -> Mask:
        return Mask(self.local, other > self.NUMBERS)

    def __mod__(self, other: int) -> np.ndarray:
        return self.NUMBERS % other

    def __floordiv__(self, other: int) -> np.ndarray:
        return self.NUMBERS // other

    def __radd__(self, other: Any) -> np.ndarray:
        return other + self.NUMBERS

    def __rlshift__(self, other: Any) -> np.ndarray:
        return other << self.NUMBERS

    def __rrshift__(self, other: Any) -> Bits:
        return Bits(self.local, other >> self.NUMBERS)


def popc(bits):
    counts = np.bitwise_count(np.asarray(bits).view(np.uint32)).astype(np.int32)
    return counts if counts.ndim else counts[()]


class Device:
    """Blocks of eight warps that combine a rank's tokens; `claimed` of them others have taken before, and `spare` more
    warps take some meanwhile. Blocks of `late` come only when all others are through."""

    def __init__(
        self, tokens: int, blocks: int, seed: int, claimed: float = 0.0, spare: int = 0, form: str = "several",
        late: Set[int] = frozenset(),
    ) -> None:  # fmt: skip
        self.random = random.Random(seed)
        self.k = SHAPES[form]
        self.tokens, self.blocks, self.spare, self.late = tokens, blocks, spare, late
        # how often a warp is the next one again: those that run far ahead find other cases than those in step
        self.stay = self.random.choice((0.0, 0.5, 0.9))
        self.target = np.array([self.random.randrange(9) for _ in range(tokens)], dtype=np.int32)
        # from which trip on a token is back
        self.since = np.zeros(tokens, dtype=np.int64)
        self.patience = 20_000
        self.words = np.zeros(-(-tokens // TILE), dtype=np.int32)
        self.pieces = np.zeros(constants.COUNTER_WORDS, dtype=np.int32)
        # few tokens are the consumers' alone
        self.few = tokens <= WARPS * blocks
        self.parts = min(WARPS * blocks // max(tokens, 1), PARTS[form]) if self.few else 1
        self.early = {t for t in range(tokens) if not self.few and self.random.random() < claimed}
        for t in self.early:
            self.words[t // TILE] |= np.int32(1) << np.int32(t % TILE)
        # whatever lay there before
        garbage = np.random.default_rng(seed)
        self.shares = garbage.integers(-(2**31), 2**31, (blocks, SHARE_WORDS)).astype(np.int32)
        self.lists = garbage.integers(-(2**31), 2**31, (blocks, LIST_WORDS)).astype(np.int32)
        self.kept = self.shares[:, KEPT].copy()
        self.finished: Counter[tuple[int, int]] = Counter()
        self.by: dict[tuple[int, int], int] = {}
        self.looked: dict[int, int] = {}
        self.waited: dict[int, int] = {}
        self.asked: set[int] = set()
        # which block has claimed a token, and after how many barriers
        self.owner: dict[int, tuple[int, int]] = {}
        self.given_up: set[int] = set()
        self.failed: list[int] = []
        self.slow: Callable[[int], bool] = lambda token: False
        self.trips = 0
        self.tickets: Counter[int] = Counter()
        self.arrived: defaultdict[int, list[int]] = defaultdict(list)
        self.barriers: Counter[int] = Counter()
        self.error: BaseException | None = None
        self.ended = threading.Semaphore(0)
        self.local = threading.local()
        self.lane = Lane(self.local)
        self.a = SimpleNamespace(heap=0, back_at=BACK, back_target=TARGETS, max_tokens=tokens, tokens=np.int32(tokens))
        self.names = self._names()

    def _names(self) -> dict[str, Any]:
        arch = SimpleNamespace(
            load=self.load, store=self.store, vote_ballot_sync=bits_of, popc=popc,
            atomic_or=self.atomic(operator.or_), atomic_add=self.atomic(operator.add),
            shuffle_sync=lambda value, lane: value[lane] if isinstance(value, np.ndarray) else value,
        )  # fmt: skip
        names: dict[str, Any] = PLAIN | {
            "cute": SimpleNamespace(arch=arch), "read": self.read,
            "reached": lambda seen, target: reached(seen, target) & self.local.mask,
            "sync_consumers": self.barrier, "wait_reached": self.wait, "finish_token": self.finish_sum,
            "combine_token": self.finish_row, "combine_staged": self.finish_staged, "ask_for_rows": self.ask,
            "stage_of": lambda dtype, lists, warp, lane: (lists, int(warp)),
            "word": lambda address, index: address + int(index), "side_counters": lambda a, side: CLAIMED,
            "fetch_add": self.ticket, "Counter": constants.Counter, "combined_word": lambda k, a, tile: tile,
            "back_word": lambda k, a, side, token: (side * a.max_tokens + token) * k.signal_words,
            "choices_of": self.choices,
            "Role": SimpleNamespace(COMBINE=5), "Wait": SimpleNamespace(BACK=7),
        }  # fmt: skip
        for name in ("steps_together", "most_parts", "are_few", "claim"):
            names[name] = kernel_function("combine", name, **names)
        for name in ("ones", "rank_in", "by_arrival", "next_turn", "put_by", "listed"):
            names[name] = kernel_function("final_combine", name, **names)
        names["listed"] = self.by_lane(names["listed"])
        for name in ("claim_pieces", "combine_turn", "combine"):
            names[name] = kernel_function("final_combine", name, **names)
        return names

    # --- who runs ---

    def trip(self) -> None:
        """Let others run."""
        self.trips += 1
        if self.trips > 400_000:
            raise TimeoutError("the warps find no end")
        if self.random.random() >= self.stay:
            self.hand_over()

    def hand_over(self) -> None:
        if not self.ready:
            raise TimeoutError("all warps wait at barriers")
        following = self.random.choice(self.ready)
        if following != self.local.warp:
            self.go[following].release()
            self.go[self.local.warp].acquire()

    def barrier(self) -> None:
        block, warp = divmod(self.local.warp, WARPS)
        self.barriers[self.local.warp] += 1
        self.arrived[block].append(warp)
        if len(self.arrived[block]) < WARPS:
            self.ready.remove(self.local.warp)
        else:
            self.ready += [block * WARPS + w for w in self.arrived.pop(block) if w != warp]
        self.hand_over()

    def check_left(self) -> None:
        """A warp leaves."""
        block = self.local.warp // WARPS
        mine = {t for t, (owner, _) in self.owner.items() if owner == block}
        assert mine <= {t for t, _ in self.finished} | self.given_up | set(self.waited), "left while tokens were put by"

    def run(self) -> Device:
        waiting = [block * WARPS + warp for block in self.late for warp in range(WARPS)]
        every = range(self.blocks * WARPS + self.spare)
        self.ready = [warp for warp in every if warp not in waiting]
        self.later = waiting
        self.go = [threading.Semaphore(0) for _ in every]
        for warp in every:
            threading.Thread(target=self.one, args=(warp,), daemon=True).start()
        self.go[self.random.choice(self.ready)].release()
        self.ended.acquire()
        if self.error is not None:
            raise self.error
        for block in range(self.blocks):
            assert len({self.barriers[block * WARPS + warp] for warp in range(WARPS)}) == 1
        assert (self.shares[:, KEPT] == self.kept).all(), "words of others"
        return self

    def one(self, warp: int) -> None:
        self.local.warp, self.local.mask = warp, np.ones(LANES, dtype=bool)
        self.go[warp].acquire()
        try:
            block, inside = divmod(warp, WARPS)
            with np.errstate(over="ignore"):
                if block < self.blocks:
                    self.names["combine"](
                        self.k, None, self.a, np.int32(SIDE), block * APART, LISTS + block * APART, np.int32(block),
                        np.int32(self.blocks), np.int32(inside), self.lane,
                    )  # fmt: skip
                    self.check_left()
                else:
                    self.combine_some()
            self.ready.remove(warp)
            if not self.ready and self.later:
                assert not self.arrived, "a warp has left others at a barrier"
                self.ready, self.later = self.later, []
            if self.ready:
                self.go[self.random.choice(self.ready)].release()
                return
            assert not self.arrived, "a warp has left others at a barrier"
        except BaseException as error:
            self.error = error
        self.ended.release()

    def combine_some(self) -> None:
        """What a spare warp does, in short."""
        for _ in range(0 if self.few else self.tokens // 4):
            tile = self.random.randrange(len(self.words))
            there = [t for t in range(tile * TILE, min(self.tokens, tile * TILE + TILE)) if self.since[t] <= self.trips]
            bits = np.int32(0)
            for t in self.random.sample(there, min(2, len(there))):
                bits |= np.int32(1) << np.int32(t % TILE)
            won = int(self.names["claim"](self.k, self.a, SIDE, tile, bits, self.lane)) & (2**TILE - 1)
            for i in range(TILE):
                if (won >> i) & 1:
                    self.finish(tile * TILE + i)

    # --- memory ---

    def place(self, place: int) -> tuple[np.ndarray, int]:
        """Of shared memory: nobody has anything to do with another block's, nor with what lies behind the lists."""
        block, lists = self.local.warp // WARPS, place >= LISTS
        index = int(place) - block * APART - (LISTS if lists else 0)
        memory = (self.lists if lists else self.shares)[block]
        assert 0 <= index < len(memory), "not this block's, or beyond the end"
        return memory, index

    def by_lane(self, function: Callable[..., Any]) -> Callable[..., np.ndarray]:
        """A function that lanes take different ways through."""

        def run(shares, lists, left, number):
            found = {n: function(shares, lists, left, n) for n in np.unique(number)}
            return np.array([found[n] for n in number], dtype=np.int32)

        return run

    def atomic(self, change: Callable[[Any, Any], Any]) -> Callable[..., np.ndarray]:
        def run(place, value, sem, scope):
            self.trip()
            assert scope == ("gpu" if place >= CLAIMED else "cta")
            memory, index = (self.words, place - CLAIMED) if place >= CLAIMED else self.place(place)
            old = memory[index]
            memory[index] = change(old, value)
            if memory is self.words and self.local.warp < self.blocks * WARPS:
                self.own(index, int(value & ~old) & (2**TILE - 1))
            return self.of_lane_0(old)

        return run

    @staticmethod
    def of_lane_0(value) -> np.ndarray:
        """What the other lanes don't know."""
        return np.where(np.arange(LANES) == 0, value, np.int32(0))

    def own(self, tile: int, bits: int) -> None:
        """A consumer warp has claimed some, while its block has few left of those before."""
        block, time = self.local.warp // WARPS, self.barriers[self.local.warp]
        taken = {t for t, (owner, when) in self.owner.items() if owner == block and when < time}
        left = taken - {t for t, _ in self.finished} - self.given_up
        assert len(left) < FEW_LEFT, "claims more than it can combine"
        self.owner |= {tile * TILE + i: (block, time) for i in range(TILE) if (bits >> i) & 1}

    def ticket(self, address, index) -> np.ndarray:
        assert (address, index) == (CLAIMED, constants.Counter.PIECE)
        assert (self.k.ranks, self.k.top_k) == (1, 2)
        self.trip()
        self.pieces[index] += 1
        self.tickets[self.local.warp] += 1
        return self.of_lane_0(self.pieces[index] - np.int32(1))

    def store(self, place, value) -> None:
        self.trip()
        lanes = self.local.mask if isinstance(place, np.ndarray) else np.ones(1, dtype=bool)
        places, values = np.atleast_1d(place)[lanes], np.broadcast_to(value, len(lanes))[lanes]
        assert len(set(places)) == len(places)
        for one, new in zip(places, values, strict=True):
            memory, index = self.place(one)
            memory[index] = new

    def load(self, place, dtype):
        memory, index = self.place(place)
        self.trip()
        first = memory[index]
        self.trip()
        assert first == memory[index], "read while it changes"
        return first

    def read(self, address, index, **order):
        if address == TARGETS + SIDE * self.tokens * 4:
            return self.target[index]
        assert address == BACK + SIDE * self.tokens * self.k.signal_words * 4
        assert order == {"sem": "acquire", "scope": "sys" if self.k.ranks > 1 else "gpu"}
        self.trip()
        seen, token = self.seen(index), index // self.k.signal_words
        for t in token[self.local.mask & (seen < self.target[token])]:
            self.looked[int(t)] = self.local.warp
        return seen

    def seen(self, index) -> np.ndarray:
        """Counters, by each lane as they were at some time not long ago."""
        assert not (index % self.k.signal_words).any()
        token = np.broadcast_to(index // self.k.signal_words, LANES)
        at = self.trips - np.array([self.random.randrange(3) for _ in range(LANES)])
        there = (self.since[token] == 0) | (self.since[token] <= at)
        return np.where(there, self.target[token], self.target[token] - 1).astype(np.int32)

    def wait(self, address, index, target, a, role, wait, token, scope):
        assert address == BACK + SIDE * self.tokens * self.k.signal_words * 4
        assert scope == ("sys" if self.k.ranks > 1 else "gpu")
        assert (target == self.target[token]).all()
        mine, start = self.local.mask.copy(), self.trips
        back = np.zeros(LANES, dtype=bool)
        tokens = np.broadcast_to(token, LANES)[mine]
        assert len(set(tokens)) == len(tokens)
        for t in tokens:
            self.waited[int(t)] = self.local.warp
        while True:
            self.trip()
            back |= mine & reached(self.seen(index), target)
            if self.failed or (back == mine).all():
                self.given_up |= {int(t) for t in tokens[~back[mine]]}
                return back
            if self.trips - start > self.patience:
                self.failed.append(self.local.warp)

    # --- sums ---

    def choices(self, k, a, token, lane):
        return (np.broadcast_to(token, LANES),)

    def ask(self, k, a, side, token) -> None:
        self.asked |= {int(t) for t in np.broadcast_to(token, LANES)[self.local.mask]}

    def finish_row(self, k, dtype, a, side, token, choices, number, part, parts, lane) -> None:
        assert self.few
        assert not k.by_token
        assert (number, parts) == (0, self.parts)
        assert choices[0][0] == token
        self.finish(int(token), int(part))

    def finish_sum(self, k, dtype, a, side, token, choices, number, part, parts, lane) -> None:
        assert k.by_token
        assert choices == ()
        assert parts == self.parts == 1
        self.finish(int(token))

    def finish_staged(self, k, dtype, a, side, counted, choices, done, stage, lane) -> None:
        block, warp = divmod(self.local.warp, WARPS)
        assert not self.few
        assert not k.by_token
        assert stage == (LISTS + block * APART, warp)
        assert 0 < done < 1 << TURN
        numbers = [i for i in range(TURN) if (done >> i) & 1]
        self.local.turn = {int(counted[i]) for i in numbers}
        for i in numbers:
            assert choices[0][i * constants.MAX_TOP_K] == counted[i]
            self.finish(int(counted[i]))

    def finish(self, token: int, part: int = 0) -> None:
        assert 0 <= token < self.tokens
        assert self.since[token] <= self.trips, "combined before its rows were back"
        assert token not in self.early
        self.finished[token, part] += 1
        self.trip()
        while self.slow(token):
            self.trip()
        self.by[token, part] = self.local.warp

    def check(self, without: Set[int] = frozenset()) -> None:
        tokens = set(range(self.tokens)) - self.early - without
        assert set(self.finished) == {(t, part) for t in tokens for part in range(self.parts)}
        assert set(self.finished.values()) <= {1}


def sizes(blocks: int) -> list[int]:
    """Numbers of tokens around those at which the pieces get another size, and one, two and three rounds."""
    full = blocks * ROUND
    return [
        0, 1, 2, 31, 8 * blocks - 1, 8 * blocks, 8 * blocks + 1, 16 * blocks - 1, 16 * blocks, 16 * blocks + 1,
        32 * blocks - 1, 32 * blocks, 32 * blocks + 1, 64 * blocks - 6, full - 1, full, full + 1, 2 * full + 75,
    ]  # fmt: skip


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("blocks", [3, 5])
@pytest.mark.parametrize("order", ["there", "random", "at once"])
def test_every_token_is_combined_once(blocks, order, form):
    """By a warp that has claimed it, once it is back; all warps leave, none before all that was put by is taken."""
    for seed, tokens in enumerate(sizes(blocks)):
        for claimed, spare in ((0.0, 0), (0.4, 2)):
            device = Device(tokens, blocks, 100 * blocks + seed, claimed, spare if tokens else 0, form)
            if order == "random":
                device.since[:] = np.random.default_rng(seed).integers(0, 6 * tokens + 1, tokens)
            elif order == "at once":
                device.since[:] = 5 * tokens
            device.run().check()
            assert not device.failed
            assert bool(device.tickets) == (form == "arrival" and not device.few)


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("blocks", [1, 3])
def test_few_tokens_have_a_warp_each_or_several(blocks, form):
    """As many as a token's columns can be divided among, where there are so many."""
    for tokens in (1, 2, 3, 7, WARPS * blocks // 2, WARPS * blocks):
        device = Device(tokens, blocks, tokens, form=form)
        device.since[:] = 50
        device.run().check()
        assert device.parts == min(PARTS[form], WARPS * blocks // tokens)
        assert len(set(device.by.values())) == tokens * device.parts
        assert not device.barriers
        if not device.k.by_token:
            assert not device.words.any(), "claimed what is nobody else's"


@pytest.mark.parametrize("claimed", [[], [0], [1, 4]])
def test_few_tokens_that_others_may_have_taken(claimed):
    """In the wire format "tokens" a spare warp may have come before."""
    device = Device(7, 1, 3, form="tokens")
    device.early = set(claimed)
    device.words[0] = sum(1 << t for t in claimed)
    device.run().check()


@pytest.mark.parametrize("form", ["several", "arrival", "choices"])
@pytest.mark.parametrize("share", [9, 16, 32, 64, ROUND])
def test_what_comes_last_and_together_is_divided_among_the_warps(share, form):
    """All warps wait, and for equally many tokens where a turn each is enough."""
    blocks = 3
    device = Device(share * blocks, blocks, share, form=form)
    device.since[:] = 8000
    device.run().check()
    each = Counter(device.by.values())
    if share >= 16:
        assert Counter(warp // WARPS for warp in each) == dict.fromkeys(range(blocks), WARPS)
    if 16 <= share <= WARPS * TURN:
        assert set(each.values()) == {share // WARPS}
    # what a block has claimed in its first round, in turns that are as even as can be
    for block in range(blocks):
        first = Counter(device.waited[t] for t, (owner, time) in device.owner.items() if (owner, time) == (block, 1))
        assert first.total() > 0
        take = min(-(-first.total() // WARPS), TURN)
        assert len(first) == min(-(-first.total() // take), WARPS)


@pytest.mark.parametrize("form", ["several", "arrival"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("number", [1, FEW_LEFT - 1, FEW_LEFT, 40])
def test_those_that_are_back_come_first(seed, form, number):
    """Nobody waits before all that the block has claimed was looked at by somebody; few that are left have a warp
    each."""
    tokens = round_of(form)
    device = Device(tokens, 1, seed, form=form)
    late = set(random.Random(seed).sample(range(tokens), number))
    for t in late:
        device.since[t] = 8000
    device.run().check()
    order = [token for token, _ in device.finished]
    assert set(order[-len(late) :]) == late
    assert set(device.waited) == late
    assert len(set(device.waited.values())) == min(number, WARPS)


@pytest.mark.parametrize("form", ["several", "arrival"])
@pytest.mark.parametrize("seed", range(6))
def test_any_warp_waits_for_what_another_has_put_by(seed, form):
    """One warp, which has put tokens by, is held up by one of those that it waits for, until all but its turn are
    combined."""
    tokens = round_of(form)
    device = Device(tokens, 1, seed, form=form)
    device.stay = 0.0
    device.since[:] = 3000
    held, busy, turn = tokens // 2, [], set()

    def slow(token: int) -> bool:
        if token == held:
            busy.append(device.local.warp)
            turn.update(device.local.turn)
        return token == held and not set(range(tokens)) - turn <= {t for t, _ in device.finished}

    device.slow = slow
    device.run().check()
    rest = {t for t in range(tokens) if device.by[t, 0] != busy[0]}
    assert busy[0] in {device.looked[t] for t in rest}, "the warp had put none by"
    assert len(busy) > 1


@pytest.mark.parametrize("form", ["several", "arrival"])
@pytest.mark.parametrize(("late", "waits"), [(FEW_LEFT - 1, False), (FEW_LEFT, True)])
def test_a_block_with_some_left_claims_no_more(late, waits, form):
    """Until they are back; with fewer left it goes on, and waits for all of them at the end."""
    tokens = 3 * round_of(form) + 5
    for seed in range(3):
        device = Device(tokens, 1, seed, form=form)
        device.since[random.Random(seed).sample(range(round_of(form)), late)] = 5000
        device.run().check()
        done = list(device.finished)
        before = [t for t, _ in done[: min(i for i, (t, _) in enumerate(done) if device.since[t])]]
        assert (max(before) < round_of(form)) == waits
        assert len(before) == (round_of(form) if waits else tokens) - late
        times = sorted({time for _, time in device.owner.values()})
        # two barriers a round, and two more before a wait
        assert times == ([1, 5, 7, 9] if waits else [1, 3, 5, 7])


@pytest.mark.parametrize("form", ["several", "arrival", "choices"])
@pytest.mark.parametrize("tokens", [25, 97, 1000])
def test_a_block_that_comes_late(tokens, form):
    """Where pieces go to whoever comes first, nothing is left to it but its barriers; else its own pieces."""
    blocks, late = 3, 1
    for seed in range(3):
        device = Device(tokens, blocks, seed, form=form, late={late})
        device.run().check()
        own = [t for (t, _), warp in device.by.items() if warp // WARPS == late]
        assert bool(own) == (form != "arrival")
        if form == "arrival":
            assert late not in {owner for owner, _ in device.owner.values()}
            for warp in range(WARPS):
                assert device.barriers[late * WARPS + warp] == 4
                assert device.tickets[late * WARPS + warp] <= (warp < NUMBERS["NEXT_SHARES"])


def test_one_block_takes_no_more_than_its_part_of_few_pieces():
    """Where pieces go to whoever comes first, and all come at one time."""
    for tokens in (48, 90, 96):
        device = Device(tokens, 3, tokens, form="arrival")
        device.since[:] = 5000
        device.run().check()
        firsts = Counter(owner for owner, time in device.owner.values() if time == 1)
        assert len(firsts) == 3
        assert max(firsts.values()) <= TILE


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize(("tokens", "blocks"), [(5, 1), (24, 3), (25, 3), (90, 3), (384, 3), (700, 4)])
@pytest.mark.parametrize("lost", [1, 3, 60])
def test_tokens_that_never_come_back_hold_up_nobody(tokens, blocks, lost, form):
    """The wait for one of them ends by the clock, then those for the others; all that are back are combined."""
    lost = min(lost, tokens)
    device = Device(tokens, blocks, tokens + lost, claimed=0.2, spare=1, form=form)
    device.since[:] = np.random.default_rng(lost).integers(0, 2 * tokens, tokens)
    never = set(random.Random(lost).sample(range(tokens), lost)) - device.early
    for t in never:
        device.since[t] = 1 << 40
    device.patience = 6 * tokens + 2000
    device.run().check(without=never)
    assert bool(device.failed) == bool(never)


@pytest.mark.parametrize("hidden", [512, 1 << 12])
@pytest.mark.parametrize("tokens", [11, 50])
def test_rows_are_asked_for_where_those_of_all_warps_have_room(tokens, hidden):
    device = Device(tokens, 2, hidden)
    device.k = shape(2, 2, hidden)
    device.parts = 1
    if tokens == 11 and hidden > 512:
        device.parts = WARPS * 2 // tokens
    device.run().check()
    assert device.asked == (set(range(tokens)) if hidden == 512 else set())


def test_ones():
    for count in range(1, 33):
        with np.errstate(over="ignore"):
            assert int(kernel_function("final_combine", "ones", **PLAIN)(np.int32(count))) & (2**32 - 1) == 2**count - 1
