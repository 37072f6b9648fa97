"""Symmetric constructions: legal for every size, distinct edges where there are any, better than rings and tori."""

from __future__ import annotations

import time
from collections import Counter
from itertools import combinations

import networkx as nx
import numpy as np
import pytest

from moe_ref.placement import by_name, max_density, symmetric
from moe_ref.placement.cayley import cayley_edges
from moe_ref.placement.circulant import best_steps, circulant_edges, matching_edges, second_eigenvalue
from moe_ref.placement.drawing import shared_experts
from moe_ref.placement.skew import is_perfect, perfect_up_to_zipf, zipf_limit, zipf_popularity
from moe_ref.placement.symmetric import base_blocks, check_sizes

RANKS = [*range(4, 13), 15, 16, 17, 24, 31, 32, 48, 61, 63, 64]
EXPERTS = [8, 9, 15, 16, 28, 31, 36, 64, 65, 96, 127, 128, 200, 255, 256]


@pytest.mark.parametrize("ranks", RANKS)
def test_a_construction_for_every_legal_size(ranks: int) -> None:
    for experts in EXPERTS:
        for replicas in range(1, 9):
            if replicas > ranks or experts * replicas < ranks:
                with pytest.raises(ValueError, match=r"use (1 to|at least)"):
                    symmetric(ranks, experts, replicas)
                continue
            made = symmetric(ranks, experts, replicas)
            placement = made.placement
            assert made.recipe
            assert (placement.num_ranks, placement.num_experts) == (ranks, experts)
            assert (placement.replica_counts == replicas).all()
            held = [len(e) for e in placement.experts_of_rank]
            assert max(held) - min(held) <= (experts * replicas % ranks > 0)
            # Equal loads are balanced, up to the slots that can't be equal.
            if experts * replicas % ranks == 0:
                assert is_perfect(np.full(experts, 12 * ranks), placement), made.recipe


def test_the_largest_size_takes_less_than_two_seconds() -> None:
    for replicas in (2, 3, 4, 8):
        start = time.process_time()
        symmetric(64, 256, replicas)
        assert time.process_time() - start < 5 * 2, "2 s on a quiet core, see tests/benchmarks"


@pytest.mark.parametrize(
    ("sizes", "recipe"),
    [
        ((8, 32, 1), "round robin"),
        ((8, 28, 2), "complete graph"),
        ((8, 32, 2), "complete graph + perfect matching"),
        ((8, 16, 2), "complete bipartite graph K_{4,4}"),
        ((16, 64, 2), "complete bipartite graph K_{8,8}"),
        ((64, 256, 2), "circulant with steps"),
        ((64, 256, 4), "translates of 4 base blocks in Z_64"),
        ((4, 16, 4), "every expert on every rank"),
    ],
)
def test_recipes_are_what_they_are_called(sizes, recipe: str) -> None:
    made = symmetric(*sizes)
    assert made.recipe.startswith(recipe)
    graph = shared_experts(made.placement)
    if "complete graph" in recipe:
        assert nx.density(graph) == 1.0
    if "bipartite" in recipe:
        left, right = nx.bipartite.sets(graph)
        assert nx.is_isomorphic(graph, nx.complete_bipartite_graph(len(left), len(right)))
    if "circulant" in recipe:
        steps = [int(s) for s in made.recipe.removeprefix("circulant with steps ").split(",")]
        assert nx.is_isomorphic(graph, nx.circulant_graph(64, steps))


@pytest.mark.parametrize(("ranks", "experts"), [(8, 28), (8, 56), (7, 21), (16, 120), (16, 240), (9, 72)])
def test_every_pair_equally_often(ranks: int, experts: int) -> None:
    pairs = Counter(tuple(sorted(r)) for r in symmetric(ranks, experts, 2).placement.ranks_of_expert)
    assert set(pairs.values()) == {2 * experts // (ranks * (ranks - 1))}
    assert len(pairs) == ranks * (ranks - 1) // 2


@pytest.mark.parametrize(("ranks", "experts"), [(64, 256), (32, 128), (16, 40), (12, 30), (63, 252), (10, 15)])
def test_distinct_edges_while_there_are_any(ranks: int, experts: int) -> None:
    sets = [frozenset(r) for r in symmetric(ranks, experts, 2).placement.ranks_of_expert]
    assert len(set(sets)) == len(sets)
    graph = shared_experts(symmetric(ranks, experts, 2).placement)
    assert nx.is_connected(graph)
    assert {degree for _, degree in graph.degree} == {2 * experts // ranks}


def test_eigenvalues_are_those_of_the_adjacency_matrix() -> None:
    for ranks, steps in ((12, (1, 5)), (13, (2, 3, 6)), (16, (1, 3, 8)), (8, (4,))):
        graph = nx.Graph(circulant_edges(ranks, steps))
        spectrum = np.sort(np.linalg.eigvalsh(nx.to_numpy_array(graph)))
        assert second_eigenvalue(ranks, np.array([steps]))[0] == pytest.approx(spectrum[-2])


def test_the_search_finds_the_smallest_eigenvalue() -> None:
    every = np.array(list(combinations(range(1, 10), 3)))
    best = best_steps(20, 3)
    assert second_eigenvalue(20, np.array([best]))[0] == pytest.approx(second_eigenvalue(20, every).min())
    assert best_steps(9, 4) == (1, 2, 3, 4)
    assert best_steps(8, 0, half_step=True) == (4,)
    with pytest.raises(ValueError, match="8 ranks have 3 distinct steps, 4 were asked for"):
        best_steps(8, 4)


def test_matchings_are_a_tournament() -> None:
    rounds = matching_edges(8)
    assert len(rounds) == 7
    assert all(sorted(x for pair in pairs for x in pair) == list(range(8)) for pairs in rounds)
    assert len({frozenset(pair) for pairs in rounds for pair in pairs}) == 28
    with pytest.raises(ValueError, match="even number of ranks, not 7"):
        matching_edges(7)


@pytest.mark.parametrize(
    ("ranks", "count", "size", "flat"), [(7, 1, 3, 0), (13, 1, 4, 0), (31, 1, 6, 1), (16, 4, 4, 2)]
)
def test_base_blocks_have_flat_differences(ranks: int, count: int, size: int, flat: int) -> None:
    """7 and 13 ranks have planar difference sets, found exactly; elsewhere counts stay close together."""
    differences = Counter((a - b) % ranks for block in base_blocks(ranks, count, size) for a in block for b in block)
    counts = [differences[d] for d in range(1, ranks)]
    assert max(counts) - min(counts) <= flat


def test_cayley_graphs_of_the_paper() -> None:
    torus = nx.Graph(cayley_edges((4, 4), [(0, 1), (1, 0)]))
    assert nx.is_isomorphic(torus, nx.grid_2d_graph(4, 4, periodic=True))
    bipartite = shared_experts(by_name("bipartite", 8, 16, 2).placement)
    assert nx.is_isomorphic(bipartite, nx.complete_bipartite_graph(4, 4))
    assert len(cayley_edges((6,), [(3,)])) == 3
    assert shared_experts(by_name("ring", 8, 32, 2).placement).number_of_edges() == 8
    with pytest.raises(ValueError, match="the identity"):
        cayley_edges((4, 4), [(0, 4)])


def test_spectral_steps_beat_rings_and_tori() -> None:
    """64 ranks, 256 experts: perfect in every order of popularity where a ring or a doubled torus is not."""
    reached = {
        name: perfect_up_to_zipf(by_name(name, 64, 256, 2).placement)
        for name in ("symmetric", "torus", "ring", "merged")
    }
    limit = zipf_limit(64, 256, 2)
    assert reached["merged"] == 0.0
    assert reached["ring"] < reached["torus"] < reached["symmetric"] <= limit
    assert reached["symmetric"] >= limit - 0.08


def test_the_limit_is_where_the_hottest_expert_fills_its_ranks() -> None:
    for (ranks, experts, replicas), expected in {
        (8, 32, 2): 1.01, (8, 64, 2): 1.10, (8, 32, 4): 1.65, (16, 64, 2): 0.74, (16, 64, 4): 1.10,
        (32, 128, 2): 0.59, (64, 256, 2): 0.49, (64, 256, 4): 0.68, (64, 256, 8): 0.90,
    }.items():  # fmt: skip
        limit = zipf_limit(ranks, experts, replicas)
        assert limit == pytest.approx(expected, abs=0.011)
        assert zipf_popularity(experts, limit)[0] * ranks <= replicas
        assert zipf_popularity(experts, limit + 0.01)[0] * ranks > replicas


def test_a_placement_that_never_balances_says_so() -> None:
    from moe_ref.placement import Placement

    assert perfect_up_to_zipf(Placement.from_replicas([[0], [0], [1]], 2)) is None


def test_density_of_equal_loads_is_the_mean() -> None:
    for sizes in ((8, 32, 2), (16, 64, 4), (12, 24, 3)):
        placement = symmetric(*sizes).placement
        densest = max_density(np.full(sizes[1], 120), placement)
        assert densest.max_over_mean == 1.0
        assert densest.witness == frozenset(range(sizes[0]))


def test_sizes_are_checked_before_anything_is_built() -> None:
    for sizes, message in (((8, 32, 0), "replicas is 0"), ((8, 0, 2), "experts is 0"), ((8, 3, 2), "leave 2 of 8")):
        with pytest.raises(ValueError, match=message):
            check_sizes(*sizes)
