"""Cayley graphs: placements that look the same from every rank (FineMoE, section 6.2).

The ranks are the elements of a commutative group Z_a x Z_b x ..., and an expert with two replicas is an edge g - g + s
for a generator s. Translating the group maps the graph to itself, so no corner of it is denser than another. The torus
and K_{n,n} of the paper are here for comparison; `symmetric` picks better generators, see `circulant`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from moe_ref.replicas import Placement


def cayley_edges(orders: Sequence[int], generators: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Edges of the Cayley graph of Z_orders[0] x Z_orders[1] x ..., one sweep over the group per generator.

    A generator of order two (s = -s) gives half a sweep: each of its edges would come twice. Elements are numbered in
    row-major order. The list may hold an edge several times (networkx' simple graphs could not).

    >>> cayley_edges((4,), [(1,), (2,)])
    [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2), (1, 3)]
    """
    elements = list(product(*(range(n) for n in orders)))
    number = {element: index for index, element in enumerate(elements)}
    edges = []
    for generator in generators:
        if all(s % n == 0 for s, n in zip(generator, orders, strict=True)):
            raise ValueError(f"generator {tuple(generator)} is the identity of the group; an edge needs two ranks")
        twice = all(2 * s % n == 0 for s, n in zip(generator, orders, strict=True))
        for element in elements:
            other = tuple((x + s) % n for x, s, n in zip(element, generator, orders, strict=True))
            a, b = sorted((number[element], number[other]))
            if not (twice and number[element] > number[other]):
                edges.append((a, b))
    return edges


def repeat_edges(edges: Sequence[tuple[int, int]], num_ranks: int, num_experts: int, name: str) -> Placement:
    """Placement whose experts are the edges, as often as needed.

    Raises:
        ValueError: num_experts is no multiple of the number of edges; the message names the legal values nearby.
    """
    times, rest = divmod(num_experts, len(edges))
    if rest or not times:
        nearby = sorted({max(times, 1) * len(edges), (times + 1) * len(edges)})
        raise ValueError(
            f"the {name} on {num_ranks} ranks has {len(edges)} edges; {num_experts} experts are no multiple of that, "
            f"use {' or '.join(map(str, nearby))} experts, or the placement 'symmetric'"
        )
    return Placement.from_replicas(list(edges) * times, num_ranks)


def ring(num_ranks: int, num_experts: int) -> Placement:
    """Two replicas on neighbours of a ring: the same few edges again and again, the worst of the symmetric ones."""
    return repeat_edges(cayley_edges((num_ranks,), [(1,)]), num_ranks, num_experts, "ring")


def torus(num_ranks: int, num_experts: int) -> Placement:
    """The toroidal grid, as square as num_ranks allows (the paper's 4 x 4 for 16 ranks)."""
    rows = max((r for r in range(2, int(num_ranks**0.5) + 1) if num_ranks % r == 0), default=0)
    if not rows:
        raise ValueError(f"a torus needs a number of ranks with two factors of at least 2, not {num_ranks}")
    edges = cayley_edges((rows, num_ranks // rows), [(0, 1), (1, 0)])
    return repeat_edges(edges, num_ranks, num_experts, "torus")


def complete_bipartite(num_ranks: int, num_experts: int) -> Placement:
    """K_{n,n} with n = num_ranks / 2: the Cayley graph of Z_2n whose generators are the odd numbers."""
    if num_ranks < 2 or num_ranks % 2:
        raise ValueError(f"K_{{n,n}} needs an even number of ranks, not {num_ranks}")
    edges = cayley_edges((num_ranks,), [(s,) for s in range(1, num_ranks // 2 + 1, 2)])
    return repeat_edges(edges, num_ranks, num_experts, "complete bipartite graph")
