"""Compile-time arithmetic of the megakernel, as Python ints: sizes, refusals, the ordered task list."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moe_fast.kernel import shapes
from moe_fast.kernel.shapes import KernelShape
from moe_ref.config import MoEConfig
from moe_ref.errors import UsageError
from moe_ref.layout import SIDES
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
    pieces, total = shapes.heap_regions(shape, QWEN3.max_tokens)
    assert pieces["rows"].size + pieces["returned"].size == QWEN3.compact_bytes(2)
    rows = shapes.buffer_rows(shape, QWEN3.max_tokens)
    control = SIDES * 4 * (rows + rows // 128 + QWEN3.max_tokens + 2 * shape.counts_stride) + 4 * 2
    assert 0 <= total - QWEN3.compact_bytes(2) - control < 1024 * len(pieces)
    assert total <= 1.8e9
    assert QWEN3.fixed_bytes(2) > 9 * total
    offsets = sorted((piece.offset, piece.size) for piece in pieces.values())
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(offsets))


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
        ({"layout": "fixed"}, "layout"),
        ({"capacity_factor": 1.0}, "capacity_factor"),
    ],
)
def test_what_the_kernel_lacks_is_refused_by_name(change, word):
    with pytest.raises(UsageError, match=word):
        KernelShape.from_config(QWEN3.replace(**change), 2)


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
        for scheduler in shapes.SCHEDULERS
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


def test_local_counters_do_not_overlap():
    """Every local counter of a call has words of its own, inside the side's words."""
    from types import SimpleNamespace

    from moe_fast.kernel import scheduler, signals

    config = QWEN3.replace(shared_intermediate=512, max_tokens=300)
    shape, blocks, side_words = KernelShape.from_config(config, 2), 132, 0
    side_words = shapes.counter_words(shape, 300, blocks)
    rows = shapes.buffer_rows(shape, 300)
    tiles = rows // 128
    a = SimpleNamespace(rows=rows, token_tiles=-(-300 // shapes.TOKEN_TILE), counter_words=side_words, max_tokens=300)
    single = list(range(shapes.COUNTER_WORDS))
    per_tile = [
        f(tile)
        for tile in range(tiles)
        for f in (
            signals.done_word,
            lambda t: scheduler.ready_at(a, 0, t),
            lambda t: scheduler.ready_at(a, 1, t),
            lambda t: shapes.COUNTER_WORDS + 3 * tiles + t,
            lambda t: signals.returned_word(a, t),
        )
    ]
    combined = [signals.combined_word(a, t) for t in range(a.token_tiles)]
    taken = [scheduler.taken_at(a, p) for p in range(blocks)]
    mails = [2 * scheduler.mail_at(a, blocks, p) + half for p in range(blocks) for half in (0, 1)]
    shared = [f(a, t) for t in range(3) for f in (signals.shared_done, signals.shared_returned)]
    every = single + per_tile + combined + taken + mails + shared
    assert len(set(every)) == len(every)
    assert max(every) < side_words
