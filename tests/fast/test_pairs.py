"""Processors of two blocks: the words of a pair's task, what is refused, and the pair's barriers in random order.

The last is a model: the roles of both blocks as coroutines, barriers with the arrivals, bytes and phases of mbarriers,
bytes that come when they like. It finds waits that never end and stages that are written while they are read, among all
the orders in which a seeded generator lets the roles run.
"""

from __future__ import annotations

import itertools
import random
import types

import pytest
from kernel_source import kernel_function

pytest.importorskip("cutlass", reason="the CuTe DSL (extra [fused]) is not installed")

from moe_fast.blocks import whole_pairs
from moe_fast.kernel.constants import FIELDS_SHIFT, STAGES
from moe_fast.kernel.limits import unsupported_pairs
from moe_fast.kernel.pairs import dropped_column, pair_words
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.tile_pairs import (
    EARLY,
    SAME_BIT,
    VOID,
    field_few,
    field_rows,
    field_same,
    field_void,
    field_wide,
    pack_fields,
)
from moe_ref.config import MoEConfig
from moe_ref.errors import UsageError
from moe_ref.runtime.encoding import GEMM1, STOP, pack_task, task_column_tile, task_kind, task_row_tile, task_slot

CONFIG = MoEConfig(2048, 768, 128, 8, dtype="bfloat16")
WORDS = 3
LANES = 32


@pytest.mark.parametrize("slots", [(5, 5), (5, 6), (6, 5), (0, 4094), (4094, 0)])
@pytest.mark.parametrize("tiles", [(1003, 2000), (12, 12), (0, (1 << 22) - 1)])
def test_each_block_gets_its_own_tile_and_fields(slots, tiles):
    """Whether a tile's rows are early is nothing for the blocks."""
    fields = pack_fields(128, 1, 0, 32), pack_fields(1, 0, 0, 0)
    words = pair_words(pack_task(GEMM1, 0, 1000, 7), slots, tiles, (fields[0] | EARLY, fields[1]), 8)
    for member, word in enumerate(words):
        assert 0 <= word < 1 << 63
        assert (task_kind(word), task_slot(word)) == (GEMM1, slots[member])
        assert (task_row_tile(word), task_column_tile(word)) == (tiles[member], 7)
        assert word >> FIELDS_SHIFT == fields[member]


@pytest.mark.parametrize("columns", range(1, 34))
@pytest.mark.parametrize("early", [0, EARLY])
def test_the_blocks_of_a_wide_tile_share_its_columns(columns, early):
    """Every column tile is one block's, the first block is never without one, and neighbours are computed together.
    Nothing to compute is only the second block's, in the last task, and only where the columns are odd."""
    fields = pack_fields(77, 0, 1, 20)
    found = []
    for task in range(columns):
        if dropped_column(task, columns, 1):
            continue
        words = pair_words(pack_task(GEMM1, 0, 6, task), (5, 5), (9, 9), (fields | early, fields | early), columns)
        for member, word in enumerate(words):
            assert (task_kind(word), task_slot(word), task_row_tile(word)) == (GEMM1, 5, 9)
            own = word >> FIELDS_SHIFT
            if field_void(own):
                # it reads weights and rows that are there, and carries nothing
                assert (member, columns % 2, task) == (1, 1, columns // 2)
                assert task_column_tile(word) < columns
                assert (field_same(own), field_few(own)) == (0, 0)
            else:
                assert own == fields
                assert task_column_tile(word) == 2 * task + member
                found.append(task_column_tile(word))
    assert found == list(range(columns))
    assert not any(dropped_column(task, columns, 0) for task in range(columns))


@pytest.mark.parametrize("same", [0, 1])
@pytest.mark.parametrize("member", [0, 1])
def test_a_block_without_a_plan_loads_the_same_weights_and_has_no_rows(same, member):
    """What the second block's dispatcher makes of its words when it has given up waiting for the plan."""
    fields = pack_fields(100, same, 0, 20)
    word = pair_words(pack_task(GEMM1, 0, 1000, 7), (5, 5), (10, 11), (fields, fields), 8)[member]
    taken, given, told = [], [word, STOP], []
    arch = types.SimpleNamespace(
        mbarrier_arrive_and_expect_tx=lambda at, size: None, mbarrier_wait=lambda at, parity: None,
        mbarrier_arrive=lambda at, *there, **scope: None, load=lambda at, kind: given.pop(0),
        store=lambda at, value: taken.append(value),
    )  # fmt: skip
    run = kernel_function(
        "pairs", "pass_words_on", cute=types.SimpleNamespace(arch=arch), wait_plan=lambda a, side, role: False,
        Role=types.SimpleNamespace(DISPATCHER=0), MemScopeKind=types.SimpleNamespace(CLUSTER=0), WORD=0, FULL=1, FREE=2,
        STOP=STOP, task_kind=task_kind, wait_list=lambda a, side, blocks: None, VOID=VOID, FIELDS_SHIFT=FIELDS_SHIFT,
        SAME_BIT=SAME_BIT, open_side=lambda a, side, shares: told.append((len(taken), shares)),
    )  # fmt: skip
    run(types.SimpleNamespace(words=WORDS), None, 0, 0, 0, 0, 96, 0, 2)
    assert told == [(1, 96)], "the consumers look at it after the last word"
    found, last = taken
    assert last == STOP
    mask = (1 << FIELDS_SHIFT) - 1
    assert found & mask == word & mask
    fields = found >> FIELDS_SHIFT
    assert (field_void(fields), field_rows(fields), field_same(fields), field_few(fields)) == (1, 1, same, 0)
    assert field_wide(fields) == 0


@pytest.mark.parametrize(
    ("change", "scheduler", "transport", "word"),
    [
        ({}, "os_block", "stores", "paired with scheduler=os_block"),
        ({}, "tickets", "put_signal", "paired with transport=put_signal"),
        ({"layout": "fixed"}, "tickets", "stores", "paired with layout=fixed"),
        ({"shared_intermediate": 768}, "tickets", "stores", "paired with a shared expert"),
        ({"expert_bias": True}, "tickets", "stores", "paired with expert_bias"),
    ],
)
def test_what_pairs_cannot_do_is_refused_by_name(change, scheduler, transport, word):
    with pytest.raises(UsageError, match=word):
        KernelShape.from_config(CONFIG.replace(**change), 2, scheduler, transport=transport, paired=True)


def test_pairs_wherever_a_layer_allows_them():
    for scheduler, transport, change in (
        ("spare_warps", "stores", {}), ("tickets", "stores", {"dtype": "float32"}), ("os_block", "stores", {}),
        ("tickets", "put_signal", {}), ("tickets", "stores", {"expert_bias": True}),
    ):  # fmt: skip
        shape = KernelShape.from_config(CONFIG.replace(**change), 2, scheduler, transport=transport)
        assert shape.paired == (not unsupported_pairs(CONFIG.replace(**change), 2, scheduler, transport))
    assert KernelShape.from_config(CONFIG, 2).paired


def test_pairs_are_another_kernel():
    plain, paired = (KernelShape.from_config(CONFIG, 1, paired=value) for value in (False, True))
    assert plain.name != paired.name
    assert [plain.task_rows(n) for n in (1, 2, 5)] == [1, 2, 5]
    assert [paired.task_rows(n) for n in (0, 2, 6)] == [0, 1, 3]
    assert paired.block_tiles % 2 == 0


def test_a_launch_has_whole_pairs():
    assert [whole_pairs(blocks, "spare_warps") for blocks in (132, 67, 7, 6)] == [132, 66, 6, 6]
    with pytest.raises(UsageError, match=r"5 blocks: .*needs at least 6"):
        whole_pairs(5, "spare_warps")


# --- the barriers of a pair ----------------------------------------------------------------------------------------


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all expected bytes have come."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.missing, self.bytes, self.phase = arrivals, arrivals, 0, 0

    def come(self, arrivals: int = 0, size: int = 0) -> None:
        """arrivals come; size: bytes expected (> 0) or here (< 0)."""
        self.missing -= arrivals
        self.bytes += size
        assert self.missing >= 0, "more arrivals than a phase has"
        if self.missing == 0 and self.bytes == 0:
            self.phase += 1
            self.missing = self.arrivals

    def over(self, parity: int) -> bool:
        """Whether the phase of that parity has ended."""
        return self.phase & 1 != parity


class Block:
    """Barriers and stages of one block; a stage holds what (task, step) its rows and both halves of weights are of."""

    def __init__(self, releases: int, gathers: bool) -> None:
        self.full = [Barrier(1 + LANES * gathers) for _ in range(STAGES)]
        self.empty = [Barrier(releases) for _ in range(STAGES)]
        self.word_full = [Barrier(1) for _ in range(WORDS)]
        self.word_empty = [Barrier(4) for _ in range(WORDS)]
        self.inbox_full, self.inbox_free, self.asked = Barrier(1), Barrier(1), Barrier(1)
        self.inbox = None
        self.words = [None] * WORDS
        # of carried rows: free once both warpgroups are through with the task before; their ring; a barrier of both
        self.few_free, self.few, self.consumers = Barrier(2), [None] * STAGES, Barrier(2)
        self.stages = [[None, None, None] for _ in range(STAGES)]
        self.readers = [0] * STAGES
        self.computed = 0
        self.stored = 0


class Pair:
    """Both blocks' roles over a list of tasks, STOP at the end: (steps, whether both multiply by the same weights, the
    warpgroups of each block that multiply, whether each block carries rows, tasks that have to be stored before).

    gathers: whether the loaders copy some tasks' rows themselves, whose lanes arrive at the stages' barriers.
    """

    def __init__(self, seed: int, tasks: list, releases: int, gathers: bool = False) -> None:
        self.random, self.tasks, self.gathers = random.Random(seed), tasks, gathers
        self.blocks = [Block(releases, gathers), Block(releases, gathers)]
        self.coming: list = []
        # of each loader, all that its lanes have begun to copy
        self.begun: tuple[list, list] = ([], [])
        self.roles = [self.fetch(), self.hand_on()]
        for m in (0, 1):
            self.roles += [self.load(m), self.consume(m, 0), self.consume(m, 1), self.store(m)]

    def take(self, m: int, number: int):
        block, slot = self.blocks[m], number % WORDS
        yield lambda: block.word_full[slot].over((number // WORDS) & 1)
        word = block.words[slot]
        assert word == (number if number < len(self.tasks) else "stop")
        block.word_empty[slot].come(1)
        return self.tasks[number] if word != "stop" else None

    def enter(self, m: int, number: int, word):
        block, slot = self.blocks[m], number % WORDS
        block.words[slot] = word
        block.word_full[slot].come(1)

    def fetch(self):
        first, second = self.blocks
        for number in range(len(self.tasks) + 1):
            yield lambda n=number: first.word_empty[n % WORDS].over(((n // WORDS) & 1) ^ 1)
            yield lambda n=number: first.asked.over((n & 1) ^ 1)
            word = number if number < len(self.tasks) else "stop"
            yield lambda n=number: first.inbox_free.over((n & 1) ^ 1)
            self.coming.append(lambda w=word: (setattr(second, "inbox", w), second.inbox_full.come(0, -8)))
            self.enter(0, number, word)

    def hand_on(self):
        first, second = self.blocks
        for number in range(len(self.tasks) + 1):
            second.inbox_full.come(1, 8)
            yield lambda n=number: second.inbox_full.over(n & 1)
            word = second.inbox
            first.inbox_free.come(1)
            yield lambda n=number: second.word_empty[n % WORDS].over(((n // WORDS) & 1) ^ 1)
            self.enter(1, number, word)

    def land(self, m: int, stage: int, part: int, what, size: int) -> None:
        block = self.blocks[m]
        assert block.readers[stage] == 0, "a stage was written while it was read"
        block.stages[stage][part] = what
        block.full[stage].come(0, -size)

    def copy(self, m: int, land) -> None:
        """The lanes of a loader copy: that comes at any time."""
        left = [land]
        self.begun[m].append(left)
        self.coming.append(lambda: left and left.pop()())

    def arrive_copied(self, m: int, stage: int) -> None:
        """They arrive once all that they have begun to copy is there."""
        before = list(self.begun[m])

        def arrive():
            for left in before:
                if left:
                    left.pop()()
            self.blocks[m].full[stage].come(LANES)

        self.coming.append(arrive)

    def load(self, m: int):
        block, count, turn = self.blocks[m], 0, 0
        for number in itertools.count():
            task = yield from self.take(m, number)
            if task is None:
                return
            depth, same, _, few, needs = task
            gathered = self.gathers and self.random.random() < 0.7
            # what a second product reads, the storers have stored; here at least this pair's
            yield lambda need=needs: all(b.stored >= need for b in self.blocks)
            for step in range(depth):
                stage = count % STAGES
                if step == max(depth - 2, 0):
                    block.asked.come(1)
                yield lambda s=stage, c=count: block.empty[s].over(((c // STAGES) & 1) ^ 1)
                what = (number, step)
                block.full[stage].come(1, 32 if gathered else 52 if few[m] else 48)
                if gathered:
                    self.copy(m, lambda s=stage, w=what: self.land(m, s, 0, w, 0))
                    if not few[m]:
                        self.arrive_copied(m, stage)
                else:
                    block.full[stage].come(LANES * self.gathers)
                    self.coming.append(lambda s=stage, w=what: self.land(m, s, 0, w, 16))
                for half in (0, 1):
                    for target in (0, 1) if same else (m,):
                        if not same or half == m:
                            self.coming.append(lambda t=target, s=stage, h=half, w=what: self.land(t, s, 1 + h, w, 16))
                if few[m] and step == STAGES - 1:
                    yield lambda t=turn: block.few_free.over(t & 1)
                    for early in range(STAGES - 1):
                        self.ask_few(m, (count - (STAGES - 1 - early)) % STAGES, (number, early), gathered)
                if few[m] and step >= STAGES - 1:
                    self.ask_few(m, stage, what, gathered)
                count += 1
            turn += few[m]

    def ask_few(self, m: int, stage: int, what, gathered: bool) -> None:
        def land():
            assert self.blocks[m].readers[stage] == 0, "carried rows were written while they were read"
            self.blocks[m].few[stage] = what
            self.blocks[m].full[stage].come(0, 0 if gathered else -4)

        if gathered:
            self.copy(m, land)
            self.arrive_copied(m, stage)
        else:
            self.coming.append(land)

    def consume(self, m: int, group: int):
        block, count = self.blocks[m], 0
        for number in itertools.count():
            task = yield from self.take(m, number)
            if task is None:
                return
            depth, _, groups, few, _ = task
            held = []
            if few[m]:
                yield lambda n=number: block.stored >= n
                block.few_free.come(1)
            for step in range(depth):
                stage = count % STAGES
                yield lambda s=stage, c=count: block.full[s].over((c // STAGES) & 1)
                assert block.stages[stage] == [(number, step)] * 3
                assert not few[m] or block.few[stage] == (number, step)
                block.readers[stage] += 1
                held.append(stage)
                # a product stays in flight; a group without rows hands a stage back at once
                if len(held) > 1 or group not in groups[m]:
                    self.release(m, held.pop(0))
                count += 1
                yield lambda: True
            for stage in held:
                self.release(m, stage)
            if few[m]:
                # the other warpgroup may still read the ring out of the epilogue's buffers
                phase = block.consumers.phase
                block.consumers.come(1)
                yield lambda p=phase: block.consumers.phase > p
            yield lambda n=number: block.stored >= n - 1
            block.few = [None] * STAGES
            block.computed += 1

    def release(self, m: int, stage: int) -> None:
        self.blocks[m].readers[stage] -= 1
        for block in self.blocks if self.blocks[m].empty[stage].arrivals == 16 else (self.blocks[m],):
            block.empty[stage].come(4)

    def store(self, m: int):
        block = self.blocks[m]
        for number in itertools.count():
            if (yield from self.take(m, number)) is None:
                return
            yield lambda n=number: block.computed >= 2 * (n + 1)
            block.stored += 1

    def run(self) -> None:
        """Until every role has ended and every byte has come.

        Raises:
            AssertionError: nobody can go on, or something was written while it was read.
        """
        waiting = {i: next(role) for i, role in enumerate(self.roles)}
        while waiting or self.coming:
            able = [i for i, ready in waiting.items() if ready()]
            assert able or self.coming, f"roles {sorted(waiting)} wait for ever"
            pick = self.random.randrange(len(able) + len(self.coming))
            if pick >= len(able):
                self.coming.pop(pick - len(able))()
            else:
                try:
                    waiting[able[pick]] = next(self.roles[able[pick]])
                except StopIteration:
                    del waiting[able[pick]]


KINDS = {
    # groups of both blocks that multiply
    "whole": (True, [((0, 1), (0, 1)), ((0, 1), (0,))]),
    # the last task of an odd number of columns has none for the second block
    "wide": (False, [((0, 1), (0, 1)), ((0, 1), ()), ((0,), (0,)), ((0,), ())]),
    "mixed": (False, [((0, 1), (0, 1)), ((0,), (0, 1)), ((0,), (0,))]),
}


def random_tasks(seed: int) -> list:
    """Tasks of some steps, of whole, wide and mixed tile pairs; full tiles may carry rows, in a mixed pair either or
    both; and second products that read what tasks before have stored."""
    choose, tasks = random.Random(seed), []
    for number in range(choose.randrange(12)):
        kind = choose.choice(sorted(KINDS))
        same, choices = KINDS[kind]
        groups = choose.choice(choices)
        few = tuple(choose.random() < 0.5 for _ in (0, 1)) if groups == choices[0] else (False, False)
        if kind != "mixed":
            few = few[:1] * 2
        if groups == ((0, 1), ()):
            few = (choose.random() < 0.5, False)
        needs = choose.randrange(number + 1) if choose.random() < 0.5 else 0
        depth = choose.choice((STAGES, 5, 7) if any(few) else (1, 2, 3, 7))
        tasks.append((depth, same, groups, few, needs))
    return tasks


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("start", range(0, 200, 50))
def test_a_pair_comes_to_its_end_in_any_order(start, gathers):
    for seed in range(start, start + 50):
        pair = Pair(seed, random_tasks(seed), 16, gathers)
        pair.run()
        tasks = len(pair.tasks)
        assert [(block.computed, block.stored) for block in pair.blocks] == [(2 * tasks, tasks)] * 2


def test_stages_need_the_consumers_of_both_blocks():
    """With barriers that count a block's own consumers only, the other block's loader writes too early."""
    caught = 0
    for seed in range(20):
        try:
            Pair(seed, [(7, True, ((0, 1), (0, 1)), (False, False), 0)] * 4, 8).run()
        except AssertionError:
            caught += 1
    assert caught == 20
