"""Task words, mails and counters: the inverse holds over the whole range, and words are what a 64-bit load gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ref.runtime import encoding as enc
from moe_ref.runtime.tasks import Combine, Dispatch, Gemm0, Gemm1, TileShape, check_fields

KINDS = (enc.NONE, enc.DISPATCH, enc.GEMM0, enc.GEMM1, enc.COMBINE, enc.STOP)


@given(
    st.sampled_from(KINDS),
    st.integers(0, (1 << enc.SLOT_BITS) - 1),
    st.integers(0, (1 << enc.ROW_BITS) - 1),
    st.integers(0, (1 << enc.COLUMN_BITS) - 1),
    st.integers(0, 1 << 40),
)
def test_word_and_mail_have_an_inverse_and_fit_in_63_bits(kind, slot, row, column, sequence):
    word = enc.pack_task(kind, slot, row, column)
    assert (enc.task_kind(word), enc.task_slot(word), enc.task_row_tile(word), enc.task_column_tile(word)) == (
        kind,
        slot,
        row,
        column,
    )
    mail = enc.pack_mail(sequence, word)
    assert 0 <= mail < 1 << 63
    assert enc.mail_task(mail) == word
    assert enc.mail_sequence(mail) == sequence % (1 << enc.SEQUENCE_BITS)


def test_zeroed_memory_is_no_task_and_no_signal():
    assert enc.task_kind(0) == enc.NONE
    assert enc.counts_signal(0) != 0
    assert [enc.side_of(epoch) for epoch in range(4)] == [0, 1, 0, 1]


@given(st.lists(st.integers(0, 128), min_size=1, max_size=50))
def test_counters_are_reached_exactly_when_every_expected_row_came(expected_per_call):
    seen = target = 0
    for expected in expected_per_call:
        target = enc.next_target(target, expected)
        assert enc.reached(seen, target) == (expected == 0)
        seen += expected
        assert enc.reached(seen, target)
        if expected:
            assert not enc.reached(seen - 1, target)


def test_descriptors_carry_their_word_dependency_and_cost():
    shape = TileShape(hidden=2048, intermediate=768, top_k=8, gated=True)
    assert (shape.columns0, shape.columns1, shape.row_bytes) == (6, 8, 4096)
    gemm0 = Gemm0(slot=3, row_tile=9, column_tile=2, rows=77)
    assert (gemm0.dependency.counter, gemm0.dependency.index, gemm0.dependency.expected) == ("arrived", 9, 77)
    assert gemm0.cost(shape).flops == 2 * 128 * 2048 * 256
    assert enc.task_kind(gemm0.word) == enc.GEMM0
    gemm1 = Gemm1(slot=3, row_tile=9, column_tile=2, rows=77, columns0=6, remote_rows=40)
    assert gemm1.dependency.expected == 6
    assert gemm1.cost(shape).wire_bytes == 40 * 256 * 2
    assert enc.task_row_tile(gemm1.word) == 9
    combine = Combine(token_tile=4, tokens=100, choices=750, columns1=8)
    assert combine.dependency.expected == 750 * 8
    assert combine.cost(shape).wire_bytes == 0
    local, remote = Dispatch(0, 0, 5, 10, 2), Dispatch(0, 1, 5, 10, 2)
    assert local.cost(shape).wire_bytes == 0
    assert remote.cost(shape).wire_bytes == 10 * 4096
    assert enc.task_slot(remote.word) == 1
    words = {t.word for t in (gemm0, gemm1, combine, local, remote)}
    assert len(words) == 5


def test_too_many_tiles_and_impossible_shapes_are_refused_by_name():
    check_fields(4096, 1 << 22, 2048)
    with pytest.raises(ValueError, match="column tiles"):
        check_fields(1, 1, 2049)
    with pytest.raises(ValueError, match="tile_rows is 0"):
        TileShape(64, 64, 2, tile_rows=0)
    with pytest.raises(ValueError, match="even number of columns"):
        TileShape(64, 64, 2, gated=True, tile_columns=15)
