"""The heap formulas against bytes that are really allocated, for the paper's layer."""

from __future__ import annotations

import math

import pytest

from moe_ref.config import MoEConfig
from moe_ref.runtime.machine import machine
from moe_ref.runtime.memory import EXPERTS, TOKENS, heap_bytes, paper_table, table_rows

SIZE = {"float32": 4, "bfloat16": 2}


def test_formulas_are_exact_for_the_papers_layer():
    table = paper_table(ranks=8)
    assert len(table) == 2 * len(SIZE) * len(EXPERTS) * len(TOKENS)
    for entry in table:
        assert entry.formula == entry.allocated, entry
        assert entry.touched > 0
        slots = math.ceil(entry.experts / 8)
        if entry.layout == "fixed":
            capacity = 128 * math.ceil(math.ceil(entry.tokens * 2 / entry.experts) / 128)
            assert entry.allocated == 8 * 2 * 2 * slots * capacity * 2048 * SIZE[entry.dtype]
        else:
            rows = min(2, slots) * entry.tokens * 8 + slots * 128 + 2 * entry.tokens
            assert entry.allocated == 2 * rows * 2048 * SIZE[entry.dtype]


def test_shares_of_eighty_gigabytes():
    rows = table_rows(paper_table(), machine("h100-8").memory_bytes)
    fixed = max(r["share"] for r in rows if r["layout"] == "fixed")
    compact = max(r["share"] for r in rows if r["layout"] == "compact")
    print(f"largest share of 80 GB: fixed {fixed:.2%}, compact {compact:.2%}")
    assert fixed == pytest.approx(1073741824 / 80e9)
    assert fixed < 0.0215
    assert fixed < compact < 0.10
    even = max(r["touched_bytes"] for r in rows if r["layout"] == "compact")
    assert even / 80e9 < 0.0215


def test_dropless_fixed_layout_takes_every_token_of_every_source():
    config = MoEConfig(64, 64, 8, 2, layout="fixed", max_tokens=100, tile_rows=16)
    entry = heap_bytes(config, 4)
    assert entry.formula == entry.allocated == 4 * 2 * 2 * 2 * 112 * 64 * 4
