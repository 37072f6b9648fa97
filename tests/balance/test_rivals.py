"""The skew sweep: every rival computes every row, and the figures of the comparison hold."""

from __future__ import annotations

import numpy as np
import pytest

from moe_ref.balance import schedule
from moe_ref.balance.loads import LoadModel, as_prediction
from moe_ref.balance.rivals import RIVALS, plain
from moe_ref.balance.sweep import skew_sweep
from moe_ref.placement import Placement, by_name


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize(("ranks", "experts", "replicas"), [(8, 32, 2), (6, 12, 3), (4, 8, 1), (5, 10, 2), (2, 8, 2)])
def test_no_row_is_lost(name: str, ranks: int, experts: int, replicas: int) -> None:
    model = LoadModel(ranks, experts, 1.0, rows_per_rank=600)
    counts = np.stack(list(model.batches(3)))
    rows = RIVALS[name](counts, as_prediction(model.popularity()), replicas)
    assert rows.shape == (3, ranks)
    total = counts.sum(axis=(1, 2))
    if name == "padded":
        assert (rows.sum(axis=1) > total).all()
    else:
        assert rows.sum(axis=1) == pytest.approx(total)
    optimum = [schedule(c, by_name("symmetric", ranks, experts, ranks).placement).max_load for c in counts]
    assert (rows.max(axis=1) >= np.array(optimum) - 1).all()  # nobody beats every expert on every rank


@pytest.mark.parametrize("name", RIVALS)
def test_a_batch_without_rows_and_a_prediction_of_nothing(name: str) -> None:
    rows = RIVALS[name](np.zeros((1, 4, 8), dtype=np.int64), np.zeros(8, dtype=np.int64), 2)
    assert (rows == 0).all()


def test_plain_expert_parallelism_by_hand() -> None:
    counts = np.zeros((1, 4, 4), dtype=np.int64)
    counts[0, 0] = [1, 2, 3, 4]  # group of ranks 0, 1: experts 0, 1 on rank 0
    counts[0, 3] = [10, 20, 30, 40]  # group of ranks 2, 3
    assert plain(counts, np.ones(4, dtype=int), 2)[0].tolist() == [3, 7, 30, 70]
    assert plain(counts, np.ones(4, dtype=int), 1)[0].tolist() == [11, 22, 33, 44]
    assert RIVALS["padded"](counts, np.ones(4, dtype=int), 2)[0].tolist() == [80, 80, 80, 80]


@pytest.fixture(scope="module", params=[(8, 32, 40), (16, 64, 25), (64, 256, 12)], ids=lambda p: f"{p[0]}x{p[1]}")
def table(request):
    ranks, experts, steps = request.param
    return ranks, skew_sweep(ranks, experts, 2, steps, skews=(0.0, 0.5, 0.75, 1.0, 1.5))


def test_asymmetric_with_scheduling_is_perfect_at_every_skew(table) -> None:
    for row in table[1]:
        assert row["asymmetric"]["mean"] <= 1.005
        if row["zipf"] >= 0.5:
            assert row["asymmetric_stale"]["mean"] <= 1.01


def test_symmetric_is_perfect_below_its_limit(table) -> None:
    ranks, rows = table
    by_skew = {row["zipf"]: row["symmetric"]["mean"] for row in rows}
    assert by_skew[0.0] <= 1.001
    if ranks == 8:
        assert by_skew[0.5] <= 1.01
        assert by_skew[0.75] <= 1.015
    if ranks == 16:
        assert by_skew[0.5] <= 1.01
    assert by_skew[1.5] > 1.5  # the hottest expert doesn't fit into two ranks: no symmetric placement can help


def test_the_order_of_the_rivals(table) -> None:
    """The shape of the figure: scheduling under everything else, and only scheduling survives a stale plan."""
    for row in table[1]:
        mean = {name: entry["mean"] for name, entry in row.items() if name != "zipf"}
        assert mean["asymmetric"] <= min(mean.values()) + 1e-3
        assert mean["symmetric"] <= mean["merged"] + 1e-9 <= mean["plain"] + 0.02
        assert mean["padded"] >= mean["plain"]
        assert mean["eplb_style_stale"] > mean["asymmetric_stale"] + 0.02
    last = table[1][-1]
    assert last["plain"]["mean"] > 2
    assert last["smartmoe_style"]["mean"] > 1.5  # one replica count, however it is placed
    assert last["lplb_style"]["mean"] > 1.5  # at most two copies
    assert last["eplb_style"]["mean"] < 1.15
    assert last["flexmoe_style"]["mean"] < 1.5


@pytest.mark.parametrize("name", RIVALS)
def test_all_rivals_have_the_same_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank holds more than experts x replicas / ranks (in a group of expert parallelism: experts / degree)."""
    made = []
    build = Placement.from_replicas

    def record(*arguments):
        made.append(build(*arguments))
        return made[-1]

    monkeypatch.setattr(Placement, "from_replicas", record)
    model = LoadModel(8, 32, 1.2)
    RIVALS[name](np.stack(list(model.batches(1))), as_prediction(model.popularity()), 2)
    assert all(max(map(len, placement.experts_of_rank)) <= 8 for placement in made)
    assert made or name in ("plain", "padded")
