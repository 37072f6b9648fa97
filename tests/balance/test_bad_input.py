"""Bad loads are refused before any solver, with the offending index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moe_ref.balance import flow, flow_compiled, lp, replica_loads, schedule
from moe_ref.balance.communication import communication_aware
from moe_ref.balance.groups import balance_cost, repeat_placement
from moe_ref.balance.loads import read_loads
from moe_ref.balance.overlap import PlanWorker
from moe_ref.balance.rivals import RIVALS
from moe_ref.placement import Placement, max_density, symmetric

PLACEMENT = symmetric(4, 8, 2).placement
METHODS = ("flow", "flow_compiled", "lp")


def counts(value=5, at=None, bad=None, dtype=np.int64, shape=(4, 8)):
    array = np.full(shape, value, dtype=dtype)
    if at is not None:
        array[at] = bad
    return array


BAD_COUNTS = [
    (counts(at=(1, 3), bad=-1), "load of rank 1, expert 3 is -1, expected a non-negative integer"),
    (counts(dtype=float, at=(2, 0), bad=np.nan), "load of rank 2, expert 0 is NaN"),
    (counts(dtype=float, at=(3, 7), bad=np.inf), "load of rank 3, expert 7 is infinite"),
    (counts(dtype=float, at=(3, 7), bad=-np.inf), "load of rank 3, expert 7 is infinite"),
    (counts(dtype=float, at=(0, 1), bad=2.5), r"load of rank 0, expert 1 is 2.5, expected a whole number"),
    (counts(dtype=float, at=(0, 1), bad=2.0**60), "floats are exact only to 2"),
    (counts(dtype=float, at=(0, 1), bad=-3.0), r"load of rank 0, expert 1 is -3, expected a non-negative"),
    (counts(at=(1, 1), bad=2**62), r"add up to 2\^62 or more \(largest: 4611686018427387904 at rank 1, expert 1\)"),
    (counts(dtype=np.uint64, at=(1, 1), bad=2**63), r"load of rank 1, expert 1 is 9223372036854775808"),
    (counts(shape=(4, 7)), r"counts have shape \(4, 7\), expected \(4, 8\) = ranks x logical experts"),
    (counts(shape=(3, 8)), "gather the counts of every rank"),
    (counts(shape=(8,)), r"loads have shape \(8,\), expected 2 dimensions: rank x expert"),
    (counts(shape=(4, 8, 2)), "expected 2 dimensions"),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("bad", "message"), BAD_COUNTS, ids=[message[:40] for _, message in BAD_COUNTS])
def test_bad_counts(bad, message: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def solver(*arguments):
        raise AssertionError("a solver saw bad loads")

    for module in (flow, flow_compiled, lp):
        monkeypatch.setattr(module, "solve", solver)
    monkeypatch.setattr(flow_compiled, "_plan", solver)
    with pytest.raises(ValueError, match=message):
        schedule(bad, PLACEMENT, method)


@pytest.mark.parametrize(
    "bad", [counts().astype(str), counts().astype(object), counts() > 3, counts().astype(complex)], ids=str
)
def test_what_is_no_number(bad) -> None:
    with pytest.raises(TypeError, match=r"loads have dtype .*, expected integers"):
        schedule(bad, PLACEMENT)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint64, np.float32, np.float64])
def test_any_whole_numbers_are_taken(dtype) -> None:
    assert schedule(counts(dtype=dtype), PLACEMENT).digest() == schedule(counts(), PLACEMENT).digest()
    assert schedule(counts().tolist(), PLACEMENT).digest() == schedule(counts(), PLACEMENT).digest()
    fortran = np.asfortranarray(counts(dtype=dtype))
    assert schedule(fortran, PLACEMENT, "flow_compiled").digest() == schedule(counts(), PLACEMENT).digest()


def test_loads_of_the_wrong_size() -> None:
    for method in METHODS:
        with pytest.raises(ValueError, match="got loads of 7 experts, expected 8"):
            replica_loads(np.ones(7, dtype=int), PLACEMENT, method)
    with pytest.raises(ValueError, match="got loads of 9 experts, expected 8"):
        max_density(np.ones(9, dtype=int), PLACEMENT)
    with pytest.raises(ValueError, match="load of expert 2 is -4"):
        max_density([0, 0, -4, 0, 0, 0, 0, 0], PLACEMENT)
    with pytest.raises(ValueError, match=r"expected less than 2\^62 / 4 ranks"):
        max_density([2**61, 0, 0, 0, 0, 0, 0, 0], PLACEMENT)


def test_counts_of_one_rank_only_are_found_out() -> None:
    """Counts that weren't gathered: total = tokens * top_k over all ranks doesn't hold."""
    gathered = counts()
    assert schedule(gathered, PLACEMENT, expected_total=160).max_load == 40
    own = np.where(np.arange(4)[:, None] == 0, gathered, 0)
    with pytest.raises(ValueError, match="add up to 40 rows, expected 160 = tokens \\* top_k over all ranks"):
        schedule(own, PLACEMENT, expected_total=160)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="unknown method 'simplex', expected one of plain, flow, flow_compiled, lp"):
        schedule(counts(), PLACEMENT, "simplex")
    with pytest.raises(ValueError, match="unknown method 'plain', expected one of flow"):
        replica_loads(counts().sum(axis=0), PLACEMENT, "plain")
    with pytest.raises(ValueError, match="unknown formulation 'dual'"):
        lp.LinearProgram(PLACEMENT, "dual")
    with pytest.raises(ValueError, match="unknown method"):
        PlanWorker("simplex")
    with pytest.raises(ValueError, match="up to 2 replicas of an expert; use moe_ref"):
        schedule(counts(), PLACEMENT, "plain")


def test_groups_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"group_size is 3, expected a divisor of 4 ranks: \[1, 2, 4\]"):
        schedule(counts(), PLACEMENT, group_size=3)
    with pytest.raises(ValueError, match="expert 0 has no replica on ranks 2 to 3; every scheduling group"):
        schedule(counts(), Placement.from_replicas([[0, 1]] * 8, 4), group_size=2)
    with pytest.raises(ValueError, match="group_size is 0"):
        balance_cost(counts(), PLACEMENT, 0)
    with pytest.raises(ValueError, match="groups is 0"):
        repeat_placement(PLACEMENT, 0)


def test_communication_weights() -> None:
    for arguments, message in (
        ({"alpha": -1.0}, "alpha is -1.0"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"ranks_per_node": 3}, "ranks_per_node is 3, expected a divisor of 4"),
        ({"inter": float("inf")}, "inter is inf"),
    ):
        with pytest.raises(ValueError, match=message):
            communication_aware(counts(), PLACEMENT, **{"alpha": 1.0, "ranks_per_node": 2, **arguments})


def test_rivals_need_full_ranks() -> None:
    batch = counts(shape=(1, 4, 7))
    with pytest.raises(ValueError, match="7 experts x 2 replicas don't fill 4 ranks evenly"):
        RIVALS["eplb_style"](batch, np.ones(7, dtype=int), 2)


FILES = [
    ("x.csv", "1,2\n3\n", "line 2: 1 values, expected 2"),
    ("x.csv", "a,b\n1,2\n3,x\n", "line 3"),
    ("x.csv", "a,b\n1,2\n3,-4\n", "load of step 1, expert 1 is -4"),
    ("x.csv", "1,2\n3,4.5\n", "load of step 1, expert 1 is 4.5"),
    ("x.csv", "a,b\n", "loads have shape"),
    ("x.csv", "", "loads have shape"),
    ("x.json", "[[1, 2], [3]]", "differ in length"),
    ("x.json", '{"rows": []}', "expected 'loads'"),
    ("x.json", "[[1, 2], [3, null]]", "dtype object"),
    ("x.json", '[["a"]]', "expected integers"),
    ("x.json", "[1, 2]", r"loads have shape \(2,\)"),
    ("x.json", "[[[[[1]]]]]", r"loads have shape \(1, 1, 1, 1, 1\)"),
    ("x.json", "{", "is not JSON"),
    ("x.npz", "not a zip", "can't be read as npz"),
    ("x.npz", "", "can't be read as npz"),
    ("x.txt", "1", "suffix '.txt', expected one of .npz, .json, .csv"),
]


@pytest.mark.parametrize(("name", "content", "message"), FILES, ids=[f"{f[0]} {f[1]!r}" for f in FILES])
def test_bad_files_of_loads(name: str, content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises((ValueError, TypeError), match=message) as error:
        read_loads(path)
    assert str(path) in str(error.value)


def test_npz_files_are_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, loads=np.array([[1, {}]], dtype=object))
    with pytest.raises(ValueError, match="can't be read as npz"):
        read_loads(path)
    np.savez(path, other=np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"arrays \['other'\], expected one named 'loads'"):
        read_loads(path)
