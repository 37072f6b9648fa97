"""The GPU tests' differential matrix, without a GPU: what its shapes cover, and that the kernel takes every case."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra [fused]) is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import cases
from harness import ROUTINGS

from moe_fast.kernel import constants, regions


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
