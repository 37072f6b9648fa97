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
from moe_ref.runtime.encoding import reached

LANES, WARPS = 32, 8
TILE = constants.TOKEN_TILE
SIDE = 1
K = SimpleNamespace(
    ranks=2, signal_words=2, by_token=False, top_k=2, hidden=1 << 12, element_size=2, shared_intermediate=0
)  # fmt: skip
BACK, TARGETS, CLAIMED = 1 << 40, 2 << 40, 3 << 40
"""Addresses in global memory; smaller ones are words of shared memory."""
SHARED_WORDS = 64
"""Of each block."""

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


def own_constants() -> dict[str, Any]:
    """The numbers at the head of combine.py."""
    space = {name: getattr(constants, name) for name in ("HOME_BITS", "LINE_BYTES", "MAX_TOP_K", "TOKEN_TILE")}
    head: list[ast.stmt] = [node for node in parsed("combine").body if isinstance(node, ast.Assign)]
    exec(compile(ast.Module(head, []), "combine.py", "exec"), space)
    return {name: value for name, value in space.items() if isinstance(value, int)}


def int32(value):
    return value if isinstance(value, np.ndarray) else np.int32(value)


def lowest(bits) -> np.int32:
    return np.int32((int(bits) & -int(bits)).bit_length() - 1)


def bits_of(flags) -> np.int32:
    """A bit for each lane."""
    return np.packbits(np.broadcast_to(flags, LANES), bitorder="little").view(np.int32)[0]


NUMBERS = own_constants()
PLAIN = NUMBERS | {"Int32": int32, "Int64": int, "lowest": lowest, "reached": reached, "min": np.minimum}
PUT_BY, TURN = NUMBERS["PUT_BY"], NUMBERS["TOKENS_PER_TURN"]
PARTS = 2
"""Among how many warps a token's columns can be divided: 16 steps of a row, of which a lane has 8 in flight."""
ROUND = PUT_BY * TILE
"""Tokens that a block claims together, at most: there are as many pieces as words before those of what is put by."""


class Lane:
    """A warp's lane numbers. What lane 0 alone does is done once for the warp."""

    def __eq__(self, other: object) -> bool:
        assert other == 0
        return True

    def __mod__(self, other: int) -> np.ndarray:
        return np.arange(LANES, dtype=np.int32) % other

    def __floordiv__(self, other: int) -> np.ndarray:
        return np.arange(LANES, dtype=np.int32) // other


class Mask:
    """A condition that differs between lanes: what is called in a branch under it can tell which lanes are there."""

    def __init__(self, local: threading.local, lanes: np.ndarray) -> None:
        self.local, self.lanes = local, lanes

    def __bool__(self) -> bool:
        self.local.mask = self.lanes
        return bool(self.lanes.any())


class Device:
    """Blocks of eight warps that combine a rank's tokens; `claimed` of them others have taken before, and `spare` more
    warps take some meanwhile."""

    def __init__(self, tokens: int, blocks: int, seed: int, claimed: float = 0.0, spare: int = 0) -> None:
        self.random = random.Random(seed)
        self.tokens, self.blocks, self.spare = tokens, blocks, spare
        # how often a warp is the next one again: those that run far ahead find other cases than those in step
        self.stay = self.random.choice((0.0, 0.5, 0.9))
        self.target = np.array([self.random.randrange(9) for _ in range(tokens)], dtype=np.int32)
        # from which trip on a token is back
        self.since = np.zeros(tokens, dtype=np.int64)
        self.patience = 20_000
        self.words = np.zeros(-(-tokens // TILE), dtype=np.int32)
        # few tokens are the consumers' alone
        self.few = tokens <= WARPS * blocks
        self.parts = min(WARPS * blocks // max(tokens, 1), PARTS) if self.few else 1
        self.early = {t for t in range(tokens) if not self.few and self.random.random() < claimed}
        for t in self.early:
            self.words[t // TILE] |= np.int32(1) << np.int32(t % TILE)
        # whatever lay there before
        self.shared = np.full(blocks * SHARED_WORDS, 0x5A5A5A5A, dtype=np.int32)
        self.finished: Counter[tuple[int, int]] = Counter()
        self.by: dict[tuple[int, int], int] = {}
        self.looked: dict[int, int] = {}
        self.waited: dict[int, int] = {}
        self.failed: list[int] = []
        self.slow: Callable[[int], bool] = lambda token: False
        self.trips = 0
        self.arrived: defaultdict[int, list[int]] = defaultdict(list)
        self.barriers: Counter[int] = Counter()
        self.error: BaseException | None = None
        self.ended = threading.Semaphore(0)
        self.local = threading.local()
        self.a = SimpleNamespace(heap=0, back_at=BACK, back_target=TARGETS, max_tokens=tokens, tokens=np.int32(tokens))
        self.names = self._names()

    def _names(self) -> dict[str, Any]:
        arch = SimpleNamespace(
            load=self.load, store=self.store, vote_ballot_sync=bits_of, sync_warp=lambda: None,
            atomic_or=self.atomic(operator.or_), atomic_add=self.atomic(operator.add),
            atomic_and=self.atomic(operator.and_),
            shuffle_sync=lambda value, lane: value[lane] if isinstance(value, np.ndarray) else value,
        )  # fmt: skip
        names: dict[str, Any] = PLAIN | {
            "cute": SimpleNamespace(arch=arch), "Boolean": self.boolean, "read": self.read,
            "sync_consumers": self.barrier, "wait_reached": self.wait, "finish_token": self.finish,
            "word": lambda address, index: address + int(index), "side_counters": lambda a, side: CLAIMED,
            "combined_word": lambda k, a, tile: tile,
            "back_word": lambda k, a, side, token: (side * a.max_tokens + token) * k.signal_words,
            "choices_of": lambda k, a, token, lane: (token,),
            "Role": SimpleNamespace(COMBINE=5), "Wait": SimpleNamespace(BACK=7),
        }  # fmt: skip
        for name in ("steps_together", "most_parts"):
            names[name] = kernel_function("combine", name, **names)
        for name in ("are_few", "ones", "claim", "take_bits", "next_turn", "share_out", "combine_turn", "combine"):
            names[name] = kernel_function("combine", name, **names)
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
        if self.barriers[self.local.warp] % 2 == 0:
            self.check_left()
        self.barriers[self.local.warp] += 1
        self.arrived[block].append(warp)
        if len(self.arrived[block]) < WARPS:
            self.ready.remove(self.local.warp)
        else:
            self.ready += [block * WARPS + w for w in self.arrived.pop(block) if w != warp]
        self.hand_over()

    def check_left(self) -> None:
        """A warp has no more to do in this round, the first barrier of the next one comes."""
        if self.barriers[self.local.warp]:
            put_by = self.local.warp // WARPS * SHARED_WORDS + PUT_BY
            assert not self.shared[put_by : put_by + PUT_BY].any(), "left while tokens were put by"

    def run(self) -> Device:
        self.ready = list(range(self.blocks * WARPS + self.spare))
        self.go = [threading.Semaphore(0) for _ in self.ready]
        for warp in self.ready:
            threading.Thread(target=self.one, args=(warp,), daemon=True).start()
        self.go[self.random.choice(self.ready)].release()
        self.ended.acquire()
        if self.error is not None:
            raise self.error
        return self

    def one(self, warp: int) -> None:
        self.local.warp, self.local.mask = warp, np.ones(LANES, dtype=bool)
        self.go[warp].acquire()
        try:
            block, inside = divmod(warp, WARPS)
            with np.errstate(over="ignore"):
                if block < self.blocks:
                    self.names["combine"](
                        K, None, self.a, np.int32(SIDE), block * SHARED_WORDS, np.int32(block), np.int32(self.blocks),
                        np.int32(inside), Lane(),
                    )  # fmt: skip
                    self.check_left()
                else:
                    self.combine_some()
            self.ready.remove(warp)
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
            won = int(self.names["claim"](K, self.a, SIDE, tile, bits, Lane())) & (2**TILE - 1)
            for i in range(TILE):
                if (won >> i) & 1:
                    self.finish(K, None, self.a, SIDE, tile * TILE + i, (), 0, 0, 1, Lane())

    # --- memory ---

    def boolean(self, value):
        return Mask(self.local, value) if isinstance(value, np.ndarray) else bool(value)

    def at(self, place: int) -> tuple[np.ndarray, int]:
        return (self.words, place - CLAIMED) if place >= CLAIMED else (self.shared, int(place))

    def atomic(self, change: Callable[[Any, Any], Any]) -> Callable[..., np.ndarray]:
        def run(place, value, sem, scope):
            self.trip()
            memory, index = self.at(place)
            assert scope == ("gpu" if memory is self.words else "cta")
            old = memory[index]
            memory[index] = change(old, value)
            # only lane 0 knows
            return np.where(np.arange(LANES) == 0, old, np.int32(0))

        return run

    def store(self, place, value) -> None:
        self.trip()
        self.shared[place] = value

    def load(self, place, dtype, **order):
        self.trip()
        first = self.shared[place]
        self.trip()
        second = self.shared[place]
        if not order:
            assert first == second, "read while it changes"
            return first
        # lanes see the one or the other
        return np.where([self.random.random() < 0.5 for _ in range(LANES)], first, second)

    def read(self, address, index, **order):
        if address == TARGETS + SIDE * self.tokens * 4:
            return self.target[index]
        assert address == BACK + SIDE * self.tokens * K.signal_words * 4
        assert order == {"sem": "acquire", "scope": "sys"}
        self.trip()
        seen = self.seen(index)
        for t in (index // K.signal_words)[self.local.mask & (seen < self.target[index // K.signal_words])]:
            self.looked[int(t)] = self.local.warp
        return seen

    def seen(self, index) -> np.ndarray:
        """Counters, by each lane as they were at some time not long ago."""
        assert not (index % K.signal_words).any()
        token = index // K.signal_words
        at = self.trips - np.array([self.random.randrange(3) for _ in range(LANES)])
        there = (self.since[token] == 0) | (self.since[token] <= at)
        return np.where(there, self.target[token], self.target[token] - 1).astype(np.int32)

    def wait(self, address, index, target, a, role, wait, token, scope):
        assert address == BACK + SIDE * self.tokens * K.signal_words * 4
        assert scope == "sys"
        assert (target == self.target[token]).all()
        mine, start = self.local.mask.copy(), self.trips
        back = np.zeros(LANES, dtype=bool)
        for t in token[mine]:
            self.waited[int(t)] = self.local.warp
        while True:
            self.trip()
            back |= mine & reached(self.seen(index), target)
            if self.failed or (back == mine).all():
                return back
            if self.trips - start > self.patience:
                self.failed.append(self.local.warp)

    def finish(self, k, dtype, a, side, token, choices, number, part, parts, lane) -> None:
        token = int(token)
        assert parts == self.parts
        assert 0 <= token < self.tokens
        assert self.since[token] <= self.trips, "combined before its rows were back"
        if choices:
            assert choices[0][number * constants.MAX_TOP_K] == token
        assert token not in self.early
        self.finished[token, int(part)] += 1
        self.trip()
        while self.slow(token):
            self.trip()
        self.by[token, int(part)] = self.local.warp

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


@pytest.mark.parametrize("blocks", [3, 5])
@pytest.mark.parametrize("order", ["there", "random", "at once"])
def test_every_token_is_combined_once(blocks, order):
    """By a warp that has claimed it, once it is back; all warps leave, none before all that was put by is taken."""
    for seed, tokens in enumerate(sizes(blocks)):
        for claimed, spare in ((0.0, 0), (0.4, 2)):
            device = Device(tokens, blocks, 100 * blocks + seed, claimed, spare if tokens else 0)
            if order == "random":
                device.since[:] = np.random.default_rng(seed).integers(0, 6 * tokens + 1, tokens)
            elif order == "at once":
                device.since[:] = 5 * tokens
            device.run().check()
            assert not device.failed


@pytest.mark.parametrize("blocks", [1, 3])
def test_few_tokens_have_a_warp_each_or_several(blocks):
    """As many as a token's columns can be divided among, where there are so many."""
    for tokens in (1, 2, 3, 7, WARPS * blocks // 2, WARPS * blocks):
        device = Device(tokens, blocks, tokens)
        device.since[:] = 50
        device.run().check()
        assert device.parts == min(PARTS, WARPS * blocks // tokens)
        assert len(set(device.by.values())) == tokens * device.parts
        assert not device.barriers
        assert not device.words.any(), "claimed what is nobody else's"


@pytest.mark.parametrize("share", [16, 32, 64, ROUND])
def test_what_comes_last_and_together_is_divided_among_the_warps(share):
    """Each of a block's turns has a warp of its own that waits, or as many as there are warps."""
    blocks = 3
    device = Device(share * blocks, blocks, share)
    device.since[:] = 8000
    device.run().check()
    each = Counter(device.by.values())
    assert Counter(warp // WARPS for warp in each) == {block: min(share // TURN, WARPS) for block in range(blocks)}
    if share <= WARPS * TURN:
        assert set(each.values()) == {TURN}


@pytest.mark.parametrize("seed", range(4))
def test_those_that_are_back_come_first(seed):
    """Nobody waits before all of the block's tokens have been looked at by somebody."""
    device = Device(ROUND, 1, seed)
    late = set(random.Random(seed).sample(range(ROUND), 40))
    for t in late:
        device.since[t] = 8000
    device.run().check()
    order = [token for token, _ in device.finished]
    assert set(order[-len(late) :]) == late


@pytest.mark.parametrize("seed", range(6))
def test_any_warp_waits_for_what_another_has_put_by(seed):
    """One warp puts tokens by and is then held up by another one, until all but its turn are combined."""
    device = Device(ROUND, 1, seed)
    device.stay = 0.0
    device.since[:] = 3000
    # the last turn
    held = ROUND - TURN
    device.since[held] = 0
    rest = set(range(held))
    busy: list[int] = []

    def slow(token: int) -> bool:
        if token == held:
            busy.append(device.local.warp)
        return token == held and not rest <= {t for t, _ in device.finished}

    device.slow = slow
    device.run().check()
    assert busy[0] in {device.looked[t] for t in rest}, "the warp had put none by"
    assert busy[0] not in {device.by[t, 0] for t in rest}


@pytest.mark.parametrize(("tokens", "blocks"), [(5, 1), (24, 3), (25, 3), (90, 3), (384, 3), (700, 4)])
@pytest.mark.parametrize("lost", [1, 3, 60])
def test_tokens_that_never_come_back_hold_up_nobody(tokens, blocks, lost):
    """The wait for one of them ends by the clock, then those for the others; all that are back are combined."""
    lost = min(lost, tokens)
    device = Device(tokens, blocks, tokens + lost, claimed=0.2, spare=1)
    device.since[:] = np.random.default_rng(lost).integers(0, 2 * tokens, tokens)
    never = set(random.Random(lost).sample(range(tokens), lost)) - device.early
    for t in never:
        device.since[t] = 1 << 40
    device.patience = 6 * tokens + 2000
    device.run().check(without=never)
    assert bool(device.failed) == bool(never)


def test_ones():
    for count in range(1, 33):
        with np.errstate(over="ignore"):
            assert int(kernel_function("combine", "ones", **PLAIN)(np.int32(count))) & (2**32 - 1) == 2**count - 1
