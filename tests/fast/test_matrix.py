"""The GPU tests' differential matrix, without a GPU: what its shapes cover, and that the kernel takes every case."""

from __future__ import annotations

import ast
import itertools
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra [fused]) is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import cases
from harness import ROUTINGS
from kernel_source import parsed

from moe_fast.kernel import constants, regions
from moe_fast.kernel.final_combine import SHARE_WORDS
from moe_fast.kernel.gather import SOURCES
from moe_fast.kernel.shapes import KernelShape


@pytest.mark.parametrize("size", [2, 3])
def test_every_pair_meets_and_every_three_of_the_axes_that_move_rows(size):
    """Counted from the axes, not by the code that makes the rows."""
    axes = range(len(cases.AXES)) if size == 2 else cases.THREES
    for group in itertools.combinations(axes, size):
        met = {tuple(cases.AXES[i].index(row[i]) for i in group) for row in cases.SHAPES}
        wanted = set(itertools.product(*(range(len(cases.AXES[i])) for i in group)))
        assert met == wanted, f"axes {group}: {sorted(wanted - met)} never meet"


def test_axes_hold_every_value_that_the_kernel_has():
    """A new scheduler, transport, layout or dtype doesn't stay out of the matrix."""
    assert set(cases.SCHEDULERS) == set(constants.SCHEDULERS)
    assert set(cases.TRANSPORTS) == set(constants.TRANSPORTS)
    assert set(cases.DTYPES) == set(constants.DTYPES)
    assert {layout for layout, _ in cases.LAYOUTS} == {"compact", "fixed"}
    assert len({factor for _, factor in cases.LAYOUTS}) > 1
    assert set(cases.THREES) == {
        cases.AXES.index(axis)
        for axis in (cases.SCHEDULERS, cases.FORMS, cases.REPLICAS, cases.LAYOUTS, cases.TRANSPORTS)
    }


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_matrix_of_several_ranks(ranks):
    """Every pair of what decides who sends what where; every S with every routing; every gate, form and size occurs."""
    axes = cases.SEVERAL_AXES
    for i, j in itertools.combinations(range(len(axes)), 2):
        met = {(axes[i].index(row[i]), axes[j].index(row[j])) for row in cases.SEVERAL}
        assert met == set(itertools.product(range(len(axes[i])), range(len(axes[j])))), f"axes {i} and {j}"
    every = [cases.several_cases(number, ranks) for number in range(len(cases.SEVERAL))]
    found = [one[0].shape(ranks) for one in every]
    assert len(set(found)) == len(cases.SEVERAL)
    for row, one, shape in zip(cases.SEVERAL, every, found, strict=True):
        assert {case.shape(ranks) for case in one} == {shape}
        (layout, factor, wire), *_ = row
        assert (shape.layout, shape.capacity_factor, shape.by_token) == (layout, factor, bool(wire))
        assert not shape.put
        assert (shape.replicas > 1) == ("none" not in row)
        assert all(len(case.tokens) == ranks for case in one)
    flat = [case for one in every for case in one]
    met = {(tokens, case.routing) for case in flat for tokens in case.tokens}
    assert met == set(itertools.product(cases.SEVERAL_TOKENS, ROUTINGS))
    assert {(shape.hidden, shape.intermediate) for shape in found} == set(cases.SIZES)
    assert len({(s.scoring, s.top_k_order, s.renormalize, s.num_groups > 1, s.routed_scaling) for s in found}) >= 6
    assert {bool(s.shared_intermediate) for s in found} == {s.expert_bias for s in found} == {True, False}
    assert {s.activation for s in found} == {"relu", "gelu", "silu", "clamped_swiglu"}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_kernel_takes_every_shape(ranks):
    """No cell is refused, each is a kernel of its own, and what the axes say is in it; one rank puts nothing."""
    every = [cases.cases_of(number) for number in range(len(cases.SHAPES))]
    found = [one[0].shape(ranks) for one in every]
    assert len(set(found)) == len(cases.SHAPES)
    assert all({case.shape(ranks) for case in one} == {shape} for one, shape in zip(every, found, strict=True))
    for row, shape in zip(cases.SHAPES, found, strict=True):
        assert (shape.layout, shape.capacity_factor) in row
        assert shape.scheduler in row
        assert shape.put == (ranks > 1 and "put_signal" in row)
        assert (shape.replicas > 1) == (ranks > 1 and "none" not in row)
    # six engines stay open, beside what NVSHMEM and the inputs take
    sizes = [regions.heap_regions(shape, cases.cases_of(0)[0].max_tokens)[1] for shape in found]
    assert sum(sorted(sizes)[-6:]) < cases.heap_bytes(ranks) * 2 // 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_gathered_rows_meet_all_that_they_can_be(ranks):
    """Few of the matrix's shapes gather, so others meet every S: either scheduler, replicas, a capacity, carried rows
    together with an odd number of column tiles; and in the other wire format carried rows."""
    found = [shape for shape in (case.shape(ranks) for case in cases.SWEPT_PAIRS) if shape.gathers]
    assert {shape.scheduler for shape in found} == {"spare_warps", "tickets"}
    assert {shape.carries for shape in found} == {shape.drops for shape in found} == {True, False}
    assert {shape.replicas > 1 for shape in found} == {False, ranks > 1}
    assert any(k.carries and k.columns0 % 2 == k.columns1 % 2 == 1 < min(k.columns0, k.columns1) for k in found)
    # the sweep's second rank has another S
    assert 0 in cases.TOKENS
    if ranks > 1:
        by_token = cases.CARRIED_TOKENS.shape(ranks)
        assert by_token.by_token
        assert by_token.gathers
        assert by_token.carries
        assert by_token in {case.shape(ranks) for case in cases.WIRE}


@pytest.mark.parametrize("ranks", [4, 8])
def test_every_scenario_has_kernels_on_more_ranks(ranks):
    """All of them can be compiled ahead of time; every expert has a rank and every rank an expert."""
    assert len(cases.all_shapes(ranks)) > len(cases.SHAPES)
    for case in (*cases.uneven(ranks), *cases.PLACED, *cases.LAYOUTS_ALONE, *cases.PUTS, *cases.WIRE):
        placement = case.placement(ranks)
        assert all(placement.ranks_of_expert)
        assert all(placement.experts_of_rank), f"{case}: a rank of {ranks} holds nothing"
    assert all(case.experts % ranks for case in cases.uneven(ranks))
    assert cases.uneven(2) == cases.UNEVEN


def test_every_size_meets_every_routing():
    met = {(case.tokens[0], case.routing) for n in range(len(cases.SHAPES)) for case in cases.cases_of(n)}
    assert met == set(itertools.product(cases.TOKENS, ROUTINGS))


def shared_bytes(shape: KernelShape) -> int:
    """Bytes of the kernel's shared memory, by its own list of what is in there."""
    names = types.SimpleNamespace
    operand = names(size=shape.element_size)

    class Range:
        def __class_getitem__(cls, given):
            kind, count = given
            return kind.size, kind.size * count

    class Align:
        def __class_getitem__(cls, given):
            (_, size), align = given
            return align, size

    space = {
        "cute": names(struct=names(MemRange=Range, Align=Align), cosize=lambda elements: elements),
        "Int64": names(size=8), "dtype": operand, "operand": operand, "k": shape, "STAGES": constants.STAGES,
        "SHARE_WORDS": SHARE_WORDS, "SOURCES": SOURCES, "TILE_COLUMNS": constants.TILE_COLUMNS,
        "lA": constants.TILE_ROWS * shape.line * constants.STAGES,
        "lB": constants.TILE_COLUMNS * shape.line * constants.STAGES, "lC": constants.TILE_ROWS * shape.line * 2,
    }  # fmt: skip
    (found,) = (n for n in ast.walk(parsed("megakernel")) if isinstance(n, ast.ClassDef) and n.name == "Shared")
    at = 0
    for one in found.body:
        assert isinstance(one, ast.AnnAssign)
        align, size = eval(ast.unparse(one.annotation), space)
        at = -(-at // align) * align + size
    return at


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_every_variant_fits_into_shared_memory(ranks):
    """227 KB of an SM's for one block, of which stages and epilogue buffers are 224."""
    shapes = cases.all_shapes(ranks)
    sizes = {shape: shared_bytes(shape) for shape in shapes}
    assert max(sizes.values()) <= 227 * 1024
    assert min(sizes.values()) > 224 * 1024
    assert {shape.gathers for shape in shapes} == {True, False}
    assert {shape.halves for shape in shapes} == {True, False}
