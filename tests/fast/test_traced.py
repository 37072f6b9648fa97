"""The integer code that the kernel traces, compiled by the DSL and run on the host, equals the Python functions.

The same functions of `moe_ref.layout` and `moe_ref.runtime.encoding` are called with Python ints and traced with the
DSL's integers; here the traced ones run as compiled host code on random operands. So is the arithmetic of the ordered
task list, against a list that is simply written down.
"""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest
import torch
from optional import without_dsl

from moe_fast import compiler
from moe_fast.kernel.shapes import KernelShape
from moe_ref import layout
from moe_ref.config import MoEConfig
from moe_ref.errors import BackendUnavailable
from moe_ref.gate import group_mask
from moe_ref.runtime import encoding as enc

try:
    cute = compiler.import_cutlass()
except BackendUnavailable as error:
    without_dsl(error)

import cutlass
from cutlass import Float32, Int32, Int64

from moe_fast.kernel import tile_pairs
from moe_fast.kernel.gate import best_groups
from moe_fast.kernel.pairs import dropped_column, pair_words
from moe_fast.kernel.plan import first_expert_of
from moe_fast.kernel.regions import gate_tiles
from moe_fast.kernel.scheduler import ticket_place

SHAPE = KernelShape.from_config(MoEConfig(2048, 768, 60, 8, dtype="bfloat16"), 8)

# name: (function of Int64 operands, function of Python ints, upper bounds of the operands)
FUNCTIONS = {
    "pack_task": (enc.pack_task, enc.pack_task, (7, 4000, 4_000_000, 2000)),
    "task_kind": (enc.task_kind, enc.task_kind, (1 << 48,)),
    "task_slot": (enc.task_slot, enc.task_slot, (1 << 48,)),
    "task_row_tile": (enc.task_row_tile, enc.task_row_tile, (1 << 48,)),
    "task_column_tile": (enc.task_column_tile, enc.task_column_tile, (1 << 48,)),
    "pack_mail": (enc.pack_mail, enc.pack_mail, (1 << 20, 1 << 48)),
    "mail_sequence": (enc.mail_sequence, enc.mail_sequence, (1 << 62,)),
    "mail_task": (enc.mail_task, enc.mail_task, (1 << 62,)),
    "side_of": (enc.side_of, enc.side_of, (1 << 30,)),
    "counts_signal": (enc.counts_signal, enc.counts_signal, (1 << 30,)),
    "next_target": (enc.next_target, enc.next_target, (1 << 30, 128)),
    "combine_tasks": (enc.combine_tasks, enc.combine_tasks, (1 << 20, 128)),
    "ceil_div": (layout.ceil_div, layout.ceil_div, (1 << 30, 1000)),
    "compact_row": (layout.compact_row, layout.compact_row, (1 << 20, 1 << 20, 1 << 20, 128)),
    "return_row": (layout.return_row, layout.return_row, (1 << 20, 8, 8)),
    "owner": (SHAPE.owner, SHAPE.owner, (60,)),
    **{
        name: (*(2 * [getattr(tile_pairs, name)]), bounds)
        for name, bounds in {
            "pack_fields": (129, 2, 2, 33),
            "field_rows": (1 << 16,),
            "field_same": (1 << 16,),
            "field_wide": (1 << 16,),
            "field_void": (1 << 16,),
            "field_few": (1 << 16,),
            "carried_tile": (1 << 16, 2, 1 << 20),
        }.items()
    },
    **{
        f"{function.__name__} {carries}": (*(2 * [lambda n, f=function, c=carries: f(n, c)]), (3000,))
        for function in (tile_pairs.carried_rows, tile_pairs.own_tiles, tile_pairs.count_pairs)
        for carries in (False, True)
    },
    "dealt_tiles": (tile_pairs.dealt_tiles, tile_pairs.dealt_tiles, (1 << 30,)),
    **{
        f"place_tile {part}": (*(2 * [lambda *given, i=part: place_tile(*given)[i]]), (12, 1600, 100, 40, 100, 3))
        for part in (0, 1)
    },
    **{
        f"pair_words {member}": (
            *(2 * [lambda task, s, t, u, v, m, n, c, i=member: pair_words(task, (s, t), (u, v), (m, n), c)[i]]),
            (1 << 48, 4000, 4000, 1000, 1000, 1 << 16, 1 << 16, 60),
        )
        for member in (0, 1)
    },
    "dropped_column": (dropped_column, dropped_column, (40, 40, 2)),
    "gate_height": (lambda s, p: gate_tiles(s, p)[0], lambda s, p: gate_tiles(s, p)[0], (20_000, 150)),
    "gate_tiles": (lambda s, p: gate_tiles(s, p)[1], lambda s, p: gate_tiles(s, p)[1], (20_000, 150)),
    "first_expert": (lambda r: first_expert_of(SHAPE, r), SHAPE.first_expert, (8,)),
}


def place_tile(tile, rows, pairs, singles, more_pairs, more_singles):
    """`place_tile`, sums given as their parts, with carried rows."""
    before = pairs + (singles << tile_pairs.SINGLES_SHIFT)
    total = pairs + more_pairs + ((singles + more_singles) << tile_pairs.SINGLES_SHIFT)
    return tile_pairs.place_tile(tile, rows, before, total, True)


def operands(given, row, count: int) -> list:
    """Row `row` of a flat tensor of `count` columns, element by element."""
    return [given[row * count + column] for column in range(count)]


def evaluate(function, operands_NA: np.ndarray) -> list[int]:
    """Compile `function` over Int64 operands as host code and run it on every row."""
    count = operands_NA.shape[1]

    @cute.jit
    def run(source: Int64, target: Int64, rows: Int32):
        given = cute.make_tensor(
            cute.make_ptr(Int64, source, cute.AddressSpace.generic, assumed_align=8), cute.make_layout(rows * count)
        )
        out = cute.make_tensor(
            cute.make_ptr(Int64, target, cute.AddressSpace.generic, assumed_align=8), cute.make_layout(rows)
        )
        for i in cutlass.range(rows):
            out[i] = Int64(function(*operands(given, i, count)))

    values = np.ascontiguousarray(operands_NA, dtype=np.int64)
    result = np.zeros(len(values), dtype=np.int64)
    run(
        Int64(values.ctypes.data_as(ctypes.c_void_p).value),
        Int64(result.ctypes.data_as(ctypes.c_void_p).value),
        Int32(len(values)),
    )
    return result.tolist()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_traced_integers_equal_python(name):
    traced, plain, bounds = FUNCTIONS[name]
    generator = np.random.default_rng(len(name))
    values = np.stack([generator.integers(0, bound, 500) for bound in bounds], axis=1)
    if name in ("ceil_div", "combine_tasks"):
        values[:, 1] += 1
    if name == "pack_fields":
        values[:, 0] = values[:, 0] % 128 + 1
    if name == "return_row":
        values[:, 2] += 1
    # of a word whose highest bit is set Python's int has no sign
    wanted = [(plain(*row) + (1 << 63)) % (1 << 64) - (1 << 63) for row in values.tolist()]
    assert evaluate(traced, values) == wanted


@pytest.mark.parametrize(
    ("row_tiles", "paired"),
    [(n, False) for n in (1, 2, 33, 34, 35, 68, 69, 200)] + [(n, True) for n in (2, 34, 68, 200)],
)
def test_ordered_list_holds_every_task_once_and_gemm1_after_its_gemm0(row_tiles, paired):
    """Every ticket is another task, together they are all; a row tile's GEMM1 comes after all of its GEMM0. A pair of
    blocks takes two numbers at a time, of which there is always an even one."""
    shape = dataclasses.replace(SHAPE, paired=paired)

    def place(ticket, tiles):
        second, row_tile, column = ticket_place(shape, Int32(ticket), Int32(tiles))
        return (Int64(Int32(second)) * 1_000_000 + Int64(row_tile)) * 1000 + Int64(column)

    firsts = range(0, row_tiles, 2 if paired else 1)
    total = len(firsts) * (SHAPE.columns0 + SHAPE.columns1)
    got = evaluate(place, np.array([[t, row_tiles] for t in range(total)]))
    tasks = [(v // 1_000_000_000, v // 1000 % 1_000_000, v % 1000) for v in got]
    columns = (SHAPE.columns0, SHAPE.columns1)
    assert sorted(tasks) == [(k, m, n) for k in (0, 1) for m in firsts for n in range(columns[k])]
    last0 = {m: i for i, (k, m, _) in enumerate(tasks) if k == 0}
    assert all(i > last0[m] for i, (k, m, _) in enumerate(tasks) if k == 1)


@pytest.mark.parametrize("kept", [1, 3, 8])
def test_best_groups_are_the_references(kept):
    """Bits of the best groups, ties to the lower one, as the reference's mask has them."""
    config = MoEConfig(512, 256, 8, 1, num_groups=8, top_groups=kept, dtype="bfloat16")
    shape = dataclasses.replace(KernelShape.from_config(config, 1), num_groups=8, top_groups=kept)

    def bits(*scores):
        group = cute.make_rmem_tensor(8, Float32)
        for q in range(8):
            group[q] = Float32(Int32(scores[q]))
        return Int64(best_groups(shape, group))

    values = np.random.default_rng(kept).integers(0, 6, (200, 8))
    mask = group_mask(torch.from_numpy(values).float(), config).numpy()
    assert evaluate(bits, values) == (mask << np.arange(8)).sum(axis=1).tolist()
