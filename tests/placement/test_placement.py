"""A placement is checked where it is made, and is the one place that converts logical and physical experts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypergraphs import count_instances, placements
from hypothesis import given

from moe_ref.balance import schedule
from moe_ref.placement import Placement, by_name
from moe_ref.placement.names import NAMES, load, save

BAD = [
    ([[0, 1], [2, 2]], "expert 1 is placed twice on one rank: \\[2, 2\\]; ranks must be distinct"),
    ([[0, 1], []], "expert 1 has no replica"),
    ([[0, 4]], "expert 0 is placed on rank 4, expected 0 to 3"),
    ([[0], [-1]], "expert 1 is placed on rank -1"),
    ([], "at least one expert"),
]


@pytest.mark.parametrize(("replicas", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_placements_are_refused(replicas, message: str) -> None:
    """Two copies of an expert on one rank among them: it would count as freedom and give none."""
    with pytest.raises(ValueError, match=message):
        Placement.from_replicas(replicas, 4)


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_placement_needs_a_rank(ranks: int) -> None:
    for make in (lambda: Placement.contiguous(4, ranks), lambda: Placement.from_replicas([[0]] * 4, ranks)):
        with pytest.raises(ValueError, match=f"num_ranks is {ranks}, expected at least 1"):
            make()


def test_slots_must_be_equal() -> None:
    uneven = Placement.from_replicas([[0, 1], [0, 1], [0, 2]], 3)
    with pytest.raises(ValueError, match=r"rank 0 holds 3 replicas, expected 2: 6 replicas on 3 ranks"):
        uneven.check_slots()
    Placement.from_replicas([[0, 1], [2, 0]], 3).check_slots()  # 2, 1, 1: as equal as four replicas can be
    with pytest.raises(ValueError, match=r"rank 0 holds 1 replicas, expected 2: .* such as 3 or 6"):
        Placement.contiguous(3, 3).check_slots(2)


@given(placements())
def test_logical_and_physical_ids_are_a_bijection(placement: Placement) -> None:
    seen = set()
    for expert, ranks in enumerate(placement.ranks_of_expert):
        for j, rank in enumerate(ranks):
            slot = int(placement.slot_ED[expert, j])
            assert placement.experts_of_rank[rank][slot] == expert
            assert placement.rank_ED[expert, j] == rank
            assert (expert, j) in placement.replicas_of_rank[rank]
            assert (rank, j) in placement.replicas_by_rank[expert]
            seen.add((rank, slot))
        assert (placement.slot_ED[expert, len(ranks) :] == -1).all()
    assert len(seen) == placement.replica_counts.sum() == sum(map(len, placement.experts_of_rank))


@given(count_instances())
def test_quotas_by_slot_are_those_of_the_logical_experts(instance) -> None:
    """Rows of a physical slot belong to the expert that the placement says lives there, and to no other."""
    placement, counts = instance
    plan = schedule(counts, placement)
    by_slot = plan.quota_by_slot()
    back = np.zeros_like(counts)
    for rank, experts in enumerate(placement.experts_of_rank):
        for slot, expert in enumerate(experts):
            back[:, expert] += by_slot[:, rank, slot]
        assert by_slot[:, rank, len(experts) :].sum() == 0
    assert (back == counts).all()


def test_counts_by_physical_slot_are_refused() -> None:
    placement = by_name("symmetric", 4, 8, 2).placement
    by_slot = np.ones((4, 16), dtype=int)
    with pytest.raises(
        ValueError, match=r"\(4, 16\), expected \(4, 8\) = ranks x logical experts .* logical expert ids"
    ):
        schedule(by_slot, placement)


@pytest.mark.parametrize("name", NAMES)
def test_placements_by_name(name: str, tmp_path: Path) -> None:
    experts = 36 if name == "torus" else 32
    loads = np.arange(experts)
    made = by_name(name, 8, experts, 2, loads)
    made.placement.check_slots()
    assert made.placement.num_experts == experts
    path = tmp_path / "p.json"
    save(made.placement, path)
    assert load(path) == made.placement
    assert by_name(name, 8, experts, 2, loads) == made


NO_SUCH = [
    (("circle", 8, 32, 2), "unknown placement 'circle', expected one of symmetric"),
    (("merged", 8, 32, 3), "use a divisor of 8 as replicas"),
    (("asymmetric", 8, 32, 2), "made for predicted loads; give them"),
    (("torus", 7, 14, 2), "two factors of at least 2, not 7"),
    (("torus", 8, 32, 2), "use 24 or 36 experts"),
    (("bipartite", 9, 16, 2), "an even number of ranks, not 9"),
    (("ring", 8, 32, 3), "two replicas of every expert, not 3"),
    (("shifted", 1, 4, 1), "two replicas of every expert, not 1"),
    (("symmetric", 4, 8, 5), "use 1 to 4 replicas"),
    (("symmetric", 64, 8, 2), "use at least 8 replicas, at least 32 experts, or at most 16 ranks"),
    (("symmetric", 0, 8, 2), "ranks is 0"),
    (("plain", 8, 4, 1), "at most 4 ranks"),
]


@pytest.mark.parametrize(("arguments", "message"), NO_SUCH, ids=[str(a) for a, _ in NO_SUCH])
def test_what_there_is_no_placement_for(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        by_name(*arguments)


FILES = [
    ("{", "is not JSON"),
    ("[[0]]", "holds no placement; expected"),
    ('{"num_ranks": 2}', "holds no placement"),
    ('{"num_ranks": 2, "ranks_of_expert": [[0, 1.5]]}', "ranks of expert 0 are"),
    ('{"num_ranks": 2, "ranks_of_expert": [0]}', "ranks of expert 0 are 0"),
    ('{"num_ranks": true, "ranks_of_expert": [[0]]}', "holds no placement"),
    ('{"num_ranks": 2, "ranks_of_expert": [[0, 0]]}', "expert 0 is placed twice"),
    ('{"num_ranks": 2, "ranks_of_expert": [[0], [5]]}', "expert 1 is placed on rank 5"),
]


@pytest.mark.parametrize(("content", "message"), FILES, ids=[content for content, _ in FILES])
def test_bad_placement_files(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load(path)


def test_files_are_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save(Placement.from_replicas([[1, 0]], 2), path)
    assert json.loads(path.read_text()) == {"num_ranks": 2, "ranks_of_expert": [[1, 0]]}


@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (5, 2), (3, 1), (2, 4)])
def test_in_blocks_is_plain_expert_parallelism(experts, ranks):
    plain = Placement.contiguous(experts, ranks)
    assert plain.in_blocks
    moved = [list(r) for r in plain.ranks_of_expert]
    moved[0], moved[-1] = [ranks - 1], [0]
    assert Placement.from_replicas(moved, ranks).in_blocks == (ranks == 1)
