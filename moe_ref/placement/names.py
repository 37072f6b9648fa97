"""Placements by name or from a file, and back into a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_ref.placement import cayley
from moe_ref.placement.asymmetric import asymmetric
from moe_ref.placement.symmetric import Construction, check_sizes, symmetric
from moe_ref.replicas import Placement


def merged(num_ranks: int, num_experts: int, replicas: int) -> Placement:
    """`replicas` expert-parallel groups with the same placement, merged but not shuffled (FineMoE, figure 3b).

    Replica sets are equal or disjoint, so load moves inside a set and never between sets.

    Raises:
        ValueError: num_ranks is no multiple of replicas.
    """
    if num_ranks % replicas:
        raise ValueError(
            f"{num_ranks} ranks can't form {replicas} equal expert-parallel groups; use a divisor of {num_ranks} as "
            "replicas, or the placement 'symmetric'"
        )
    degree = num_ranks // replicas
    owners = Placement.contiguous(num_experts, degree).ranks_of_expert
    return Placement.from_replicas([[o + g * degree for g in range(replicas)] for (o,) in owners], num_ranks)


def shifted(num_ranks: int, num_experts: int) -> Placement:
    """Two replicas by formula: expert e on ranks e mod G and (e + 1 + (e div G) mod (G - 1)) mod G."""
    if num_ranks < 2:
        raise ValueError("the placement 'shifted' needs at least 2 ranks")
    return Placement.from_replicas(
        [[e % num_ranks, (e + 1 + (e // num_ranks) % (num_ranks - 1)) % num_ranks] for e in range(num_experts)],
        num_ranks,
    )


_TWO_REPLICAS: dict[str, tuple[Callable[[int, int], Placement], str]] = {
    "shifted": (shifted, "e mod G and a growing distance from it"),
    "ring": (cayley.ring, "ring, edges repeated"),
    "torus": (cayley.torus, "torus, edges repeated"),
    "bipartite": (cayley.complete_bipartite, "complete bipartite graph, edges repeated"),
}

NAMES = ("symmetric", "asymmetric", "merged", "plain", *_TWO_REPLICAS)


def by_name(name: str, num_ranks: int, num_experts: int, replicas: int, load_E: Any = None) -> Construction:
    """The placement called `name`.

    Args:
        name: one of `NAMES`. "asymmetric" has num_experts * replicas slots in all and needs `load_E`; "plain" is one
            replica, whatever `replicas` says; those of the Cayley graphs have two.
        num_ranks, num_experts, replicas: G, E, d.
        load_E: predicted loads, for "asymmetric".

    Raises:
        ValueError: unknown name, or sizes that this placement doesn't exist for.
    """
    if name == "plain":
        check_sizes(num_ranks, num_experts, 1)
        return Construction(Placement.contiguous(num_experts, num_ranks), "one replica, experts in blocks")
    check_sizes(num_ranks, num_experts, replicas)
    if name == "symmetric":
        return symmetric(num_ranks, num_experts, replicas)
    if name == "merged":
        return Construction(merged(num_ranks, num_experts, replicas), f"{replicas} equal expert-parallel groups merged")
    if name == "asymmetric":
        if load_E is None:
            raise ValueError("the placement 'asymmetric' is made for predicted loads; give them")
        if num_experts * replicas % num_ranks:
            raise ValueError(
                f"{num_experts} x {replicas} replicas don't fill {num_ranks} ranks evenly; the placement 'asymmetric' "
                f"needs experts x replicas to be a multiple of {num_ranks}"
            )
        placement = asymmetric(load_E, num_ranks, num_experts * replicas // num_ranks)
        return Construction(placement, "greedy replica counts + Monte Carlo on noisy draws")
    if name not in _TWO_REPLICAS:
        raise ValueError(f"unknown placement {name!r}, expected one of {', '.join(NAMES)}, or a file")
    if replicas != 2:
        raise ValueError(f"the placement {name!r} has two replicas of every expert, not {replicas}")
    make, recipe = _TWO_REPLICAS[name]
    return Construction(make(num_ranks, num_experts), recipe)


def save(placement: Placement, path: str | Path) -> None:
    """Write a placement as JSON: {"num_ranks": G, "ranks_of_expert": [[...], ...]}."""
    value = {"num_ranks": placement.num_ranks, "ranks_of_expert": placement.ranks_of_expert}
    Path(path).write_text(json.dumps(value) + "\n")


def load(path: str | Path) -> Placement:
    """Read what `save` wrote.

    Raises:
        ValueError: no JSON, or not of that form, or no legal placement.
        OSError: the file can't be read.
    """
    try:
        value = json.loads(Path(path).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    form = f'{path} holds no placement; expected {{"num_ranks": 8, "ranks_of_expert": [[0, 1], ...]}}'
    if not isinstance(value, dict) or {"num_ranks", "ranks_of_expert"} - set(value):
        raise ValueError(form)
    ranks_of, num_ranks = value["ranks_of_expert"], value["num_ranks"]

    def is_id(x: Any) -> bool:
        return isinstance(x, int) and not isinstance(x, bool)

    if not is_id(num_ranks) or not isinstance(ranks_of, list):
        raise ValueError(form)
    for expert, ranks in enumerate(ranks_of):
        if not isinstance(ranks, list) or not all(is_id(r) for r in ranks):
            raise ValueError(f"{path}: ranks of expert {expert} are {ranks!r}, expected a list of integers")
    return Placement.from_replicas(ranks_of, num_ranks)
