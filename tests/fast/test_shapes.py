"""Compile-time arithmetic of the megakernel, as Python ints: sizes, refusals, the ordered task list."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moe_fast.kernel import constants, regions, shapes
from moe_fast.kernel.shapes import KernelShape
from moe_ref.config import MoEConfig
from moe_ref.errors import UsageError
from moe_ref.layout import SIDES, fixed_row
from moe_ref.placement import Placement

QWEN3 = MoEConfig(2048, 768, 128, 8, dtype="bfloat16", max_tokens=8192, tile_rows=128)


@pytest.mark.parametrize(("experts", "ranks"), [(8, 1), (8, 3), (60, 8), (7, 7), (128, 2), (5, 4)])
def test_owner_is_the_placement(experts, ranks):
    """The kernel's owner and first expert of a rank are those of the contiguous placement."""
    shape = KernelShape.from_config(QWEN3.replace(experts=experts, top_k=1), ranks)
    placement = Placement.contiguous(experts, ranks)
    assert [shape.owner(e) for e in range(experts)] == placement.rank_ED[:, 0].tolist()
    for rank, held in enumerate(placement.experts_of_rank):
        assert shape.first_expert(rank) == held[0]
    assert shape.slots == placement.slots


def test_heap_formula():
    """Allocated bytes are the config's formula plus the control words that the docstring names."""
    shape = KernelShape.from_config(QWEN3, 2)
    pieces, total = regions.heap_regions(shape, QWEN3.max_tokens)
    assert pieces["rows"].size + pieces["returned"].size == QWEN3.compact_bytes(2)
    rows = regions.buffer_rows(shape, QWEN3.max_tokens)
    control = SIDES * 4 * (rows + rows // 128 + QWEN3.max_tokens + 2 * shape.counts_stride) + 4 * 2
    assert 0 <= total - QWEN3.compact_bytes(2) - control < 1024 * len(pieces)
    assert total <= 1.8e9
    assert QWEN3.fixed_bytes(2) > 9 * total
    offsets = sorted((piece.offset, piece.size) for piece in pieces.values())
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(offsets))


@pytest.mark.parametrize("factor", [None, 1.25])
def test_fixed_layout_is_the_papers_tensor(factor):
    """L[P, R, B, X, C, H]: rows and results in one region of the config's formula; a side is X * C rows of it."""
    config = QWEN3.replace(layout="fixed", capacity_factor=factor)
    shape = KernelShape.from_config(config, 2)
    pieces, _ = regions.heap_regions(shape, config.max_tokens)
    assert pieces["rows"].size == config.fixed_bytes(2)
    assert pieces["returned"].size == 0
    capacity = shape.slot_capacity(config.max_tokens)
    last = fixed_row(1, 1, 1, 63, capacity - 1, shape.slots, capacity)
    assert last + 1 == regions.all_rows(shape, config.max_tokens) == pieces["rows"].size // config.row_bytes
    for source, side, slot, index in itertools.product(range(2), range(2), (0, 63), (0, capacity - 1)):
        row = fixed_row(source, 0, 0, slot, index, shape.slots, capacity)
        rows = regions.buffer_rows(shape, config.max_tokens)
        assert side * rows + row == fixed_row(source, 0, side, slot, index, shape.slots, capacity)


@pytest.mark.parametrize(("factor", "tokens"), [(1.0, 1000), (0.1, 7), (1.3, 0), (2.0, 129), (500.0, 33)])
def test_capacity_is_the_configs(factor, tokens):
    """What a launch passes is what the reference drops by."""
    config = QWEN3.replace(capacity_factor=factor)
    assert KernelShape.from_config(config, 2).capacity(tokens) == config.capacity(tokens)


def test_dropped_ids_can_be_read_back():
    assert all(shapes.dropped(e) < -1 and shapes.dropped(shapes.dropped(e)) == e for e in range(256))


def test_heap_formula_with_replicas():
    """Slots of the placement instead of ceil(E / P); more replicas, more padding, the same rows."""
    plain = KernelShape.from_config(QWEN3, 2)
    two = KernelShape.from_config(QWEN3, 2, placement=Placement.from_replicas([[0, 1]] * 128, 2))
    assert (two.replicas, two.slots, plain.slots) == (2, 128, 64)
    assert regions.buffer_rows(two, 8192) - regions.buffer_rows(plain, 8192) == 64 * 128
    assert two.name != plain.name


def test_early_tiles_are_marked_only_where_nobody_takes_the_mark_for_rows():
    """The wire format "tokens" reads a tile's rows without taking the mark off; replicas move rows between tiles."""
    two = Placement.from_replicas([[0, 1]] * 128, 2)
    others = (QWEN3.replace(wire_format="tokens"), QWEN3.replace(layout="fixed"))
    assert all(
        KernelShape.from_config(QWEN3, ranks, transport=way).early for ranks in (1, 2) for way in constants.TRANSPORTS
    )
    assert KernelShape.from_config(QWEN3.replace(capacity_factor=0.5), 2).early
    assert not any(KernelShape.from_config(config, 2).early for config in others)
    assert not KernelShape.from_config(QWEN3, 2, placement=two).early


def test_a_placement_in_blocks_is_the_plain_kernel():
    """So that a layer with the default placement shares its kernel."""
    placed = KernelShape.from_config(QWEN3, 2, placement=Placement.contiguous(128, 2))
    assert placed == KernelShape.from_config(QWEN3, 2)


def test_a_placement_that_cannot_run_is_refused():
    many = Placement.from_replicas([list(range(32))] * 256, 32)
    with pytest.raises(UsageError, match="32 replicas in 256 slots of 32 ranks"):
        KernelShape.from_config(QWEN3.replace(experts=256), 32, placement=many)
    with pytest.raises(UsageError, match="placement of 8 experts on 2 ranks"):
        KernelShape.from_config(QWEN3, 2, placement=Placement.from_replicas([[1, 0]] * 8, 2))


def test_placement_tables():
    """Ranks of every replica, what every slot holds, what each rank pours in each round, and the number of rounds;
    missing replicas, empty slots and ranks that pour nothing are -1."""
    placement = Placement.from_replicas([[1], [0, 1], [2, 1]], 3)
    tables = regions.placement_tables(placement, 2, 3).tolist()
    assert tables[:15] == [1, -1, 0, 1, 2, 1, 2, -1, -1, 0, 3, 5, 4, -1, -1]
    assert placement.rounds == ((1,), (2,))
    assert tables[15:] == [2, 3, -1, -1, 5, 4, -1, -1, -1, 2]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"dtype": "float64"}, "dtype=float64"),
        ({"dtype": "float32", "hidden": 2016 + 16}, "hidden=2032 .must be a multiple of 32"),
        ({"hidden": 2000}, "hidden=2000"),
        ({"intermediate": 100}, "intermediate=100"),
        ({"experts": 512}, "experts=512"),
        ({"top_k": 9}, "top_k=9"),
        ({"shared_intermediate": 100}, "shared_intermediate=100"),
        ({"num_groups": 64, "top_groups": 8}, "num_groups=64"),
        ({"hidden": 2**19}, "hidden=524288 .at most 65536 with bfloat16: copying a row is unrolled"),
        ({"hidden": 2**16 + 64}, "hidden=65600 .at most 65536"),
        ({"hidden": 2**15 + 32, "dtype": "float32"}, "hidden=32800 .at most 32768 with float32"),
        ({"intermediate": 2**18 + 64}, "intermediate=262208 .at most 262144"),
        ({"intermediate": 2**19 + 64, "gated": False, "activation": "relu"}, "intermediate=524352 .at most 524288"),
        ({"shared_intermediate": 2**18 + 64}, "shared_intermediate=262208 .at most 262144"),
    ],
)
def test_what_the_kernel_lacks_is_refused_by_name(change, word):
    with pytest.raises(UsageError, match=word):
        KernelShape.from_config(QWEN3.replace(**change), 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks is 0, expected an integer of at least 1"),
        ({"ranks": -3}, "ranks is -3, expected"),
        ({"ranks": True}, "ranks is True, expected"),
        ({"ranks": 2.0}, "ranks is 2.0, expected"),
        ({"ranks": None}, "ranks is None, expected"),
        ({"placement": [[0], [1]]}, "placement is a list, expected a Placement or None"),
        ({"config": {"hidden": 64}}, "config is a dict, expected a MoEConfig"),
        ({"trace": "yes"}, "trace is 'yes', expected True or False"),
        ({"fp32_router": 1}, "fp32_router is 1, expected True or False"),
        ({"paired": 1}, "paired is 1, expected True, False or None"),
    ],
)
def test_arguments_that_make_no_kernel_are_named(arguments, message):
    """Equal kernels have equal shapes, so a 1 for True would be a kernel of its own in the cache."""
    with pytest.raises(UsageError, match=message):
        KernelShape.from_config(**{"config": QWEN3, "ranks": 2, **arguments})


def test_transport_and_layout_are_part_of_the_shape():
    assert KernelShape.from_config(QWEN3, 2, transport="put_signal").put
    assert KernelShape.from_config(QWEN3.replace(layout="fixed"), 2).fixed
    with pytest.raises(UsageError, match="transport='pigeon'"):
        KernelShape.from_config(QWEN3, 2, transport="pigeon")


def test_more_ranks_than_experts_is_refused():
    with pytest.raises(UsageError, match="experts=8 on 9 ranks"):
        KernelShape.from_config(QWEN3.replace(experts=8, top_k=2), 9)


def test_unknown_scheduler_is_refused():
    with pytest.raises(UsageError, match="scheduler='fifo'"):
        KernelShape.from_config(QWEN3, 2, "fifo")


def test_names_are_unique():
    """A cache file's name tells variants apart."""
    changes = (
        {}, {"dtype": "float16"}, {"dtype": "float32"}, {"activation": "gelu"}, {"renormalize": False},
        {"scoring": "sigmoid"},
        {"router_bias": True}, {"expert_bias": True}, {"selection_bias": True}, {"interleaved": True},
        {"top_k_order": "before_scores"}, {"num_groups": 8, "top_groups": 4},
        {"num_groups": 8, "top_groups": 4, "group_score": "top2_sum"}, {"activation": "clamped_swiglu"},
        {"activation": "clamped_swiglu", "clamp_limit": 3.0}, {"shared_intermediate": 768},
        {"shared_intermediate": 768, "shared_gate": True},
    )  # fmt: skip
    names = {
        KernelShape.from_config(QWEN3.replace(**change), ranks, scheduler, trace, fp32_router).name
        for change in changes
        for ranks in (1, 2)
        for scheduler in constants.SCHEDULERS
        for trace in (False, True)
        for fp32_router in (False, True)
    }
    assert len(names) == len(changes) * 2 * 3 * 2 * 2


def test_what_has_no_effect_makes_no_other_kernel():
    """All groups chosen, or a clamp that the activation doesn't have: the same kernel as without."""
    plain = KernelShape.from_config(QWEN3, 2)
    for change in ({"num_groups": 8, "top_groups": 8, "group_score": "top2_sum"}, {"clamp_limit": 1.0}):
        assert KernelShape.from_config(QWEN3.replace(**change), 2) == plain


@pytest.mark.parametrize("parts_of", [1, 8, 9, 60, 128, 129, 256])
def test_planner_threads(parts_of):
    """Every (part, expert) has a thread, and every route's place is the sum of three prefixes."""
    shape = KernelShape.from_config(QWEN3.replace(experts=parts_of, top_k=1), 1)
    width = 256 // shape.plan_parts
    assert width >= parts_of
    assert shape.plan_parts * width == 256
    assert np.log2(width) % 1 == 0


@pytest.mark.parametrize("change", [{}, {"layout": "fixed"}, {"wire_format": "tokens"}])
def test_local_counters_do_not_overlap(change):
    """Every local counter of a call has words of its own, inside the side's words."""
    from types import SimpleNamespace

    pytest.importorskip("cutlass", reason="the CuTe DSL (extra [fused]) is not installed")
    from moe_fast.kernel import scheduler, signals

    config = QWEN3.replace(shared_intermediate=512, max_tokens=300, **change)
    k, blocks = KernelShape.from_config(config, 2), 132
    side_words = regions.counter_words(k, 300, blocks)
    rows = regions.buffer_rows(k, 300)
    tiles = regions.most_tiles(k, 300)
    token_tiles = -(-300 // constants.TOKEN_TILE)
    a = SimpleNamespace(rows=rows, token_tiles=token_tiles, counter_words=side_words, max_tokens=300)
    single = list(range(constants.COUNTER_WORDS))
    per_tile = [
        f(tile)
        for tile in range(tiles)
        for f in (
            signals.done_word,
            lambda t: scheduler.ready_at(k, a, 0, t),
            lambda t: scheduler.ready_at(k, a, 1, t),
            lambda t: constants.COUNTER_WORDS + 3 * tiles + t,
            lambda t: signals.returned_word(k, a, t),
        )
    ]
    combined = [signals.combined_word(k, a, t) for t in range(a.token_tiles)]
    taken = [scheduler.taken_at(k, a, p) for p in range(blocks)]
    mails = [2 * scheduler.mail_at(k, a, blocks, p) + half for p in range(blocks) for half in (0, 1)]
    shared = [f(a, t) for t in range(3) for f in (signals.shared_done, signals.shared_returned)]
    every = single + per_tile + combined + taken + mails + shared
    if k.by_token:
        sums = [signals.summed_word(k, a, p, t) for p in range(2) for t in range(300)]
        sums += [signals.taken_word(k, a, p, t) for p in range(2) for t in range(a.token_tiles)]
        sums += [signals.sent_word(k, a, p) for p in range(2)]
        assert len(sums) == regions.sum_words(k, 300, a.token_tiles)
        every += sums
    assert len(set(every)) == len(every)
    assert max(every) < side_words


TOKENS = QWEN3.replace(wire_format="tokens")


def test_heap_formula_of_tokens():
    """Rows and partial sums are the config's formula; then results, control words and what stands beside the rows."""
    shape = KernelShape.from_config(TOKENS, 2)
    pieces, total = regions.heap_regions(shape, TOKENS.max_tokens)
    assert pieces["rows"].size + pieces["returned"].size == TOKENS.compact_bytes(2)
    rows = regions.buffer_rows(shape, TOKENS.max_tokens)
    assert pieces["results"].size == rows * TOKENS.row_bytes
    beside = 2 * rows + 2 + 4 + 2 * TOKENS.max_tokens * 17
    assert pieces["wire"].size == 4 * beside
    assert regions.wire_flags(shape, TOKENS.max_tokens) == rows + 2
    control = SIDES * 4 * (rows + rows // 128 + TOKENS.max_tokens + 2 * shape.counts_stride) + 4 * 2
    known = TOKENS.compact_bytes(2) + pieces["results"].size + pieces["wire"].size + control
    assert 0 <= total - known < 1024 * len(pieces)


def test_tokens_need_peers_that_are_mapped():
    """On one rank the formats are one kernel; put-with-signal is refused by name, where nothing crosses it isn't."""
    assert KernelShape.from_config(TOKENS, 1) == KernelShape.from_config(QWEN3, 1)
    plain = KernelShape.from_config(QWEN3, 2).name
    assert KernelShape.from_config(TOKENS, 2).name == plain.replace("-pairs-tickets", "-tokens-pairs-tickets") != plain
    with pytest.raises(UsageError, match="wire_format=tokens with transport=put_signal"):
        KernelShape.from_config(TOKENS, 2, transport="put_signal")
    assert KernelShape.from_config(TOKENS, 1, transport="put_signal").put
