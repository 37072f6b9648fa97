"""The differential harness: it finds each planted bug where it was planted, and accepts what is right."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from planted import BUGS, Bug, MutantBackend

from moe_ref import MoEConfig, MoELayer, cases
from moe_ref.comparison import Record, compare_buffer
from moe_ref.diff import check, compare
from moe_ref.errors import UsageError

CONFIG = MoEConfig(hidden=32, intermediate=48, experts=6, top_k=2)
SIZES = (60, 75, 90)


@pytest.fixture(scope="module")
def job() -> tuple[MoELayer, list[torch.Tensor]]:
    return MoELayer(CONFIG, world=3, seed=4), [cases.make_tokens(s, CONFIG, s) for s in SIZES]


def test_there_are_enough_bugs_of_every_stage() -> None:
    assert len(BUGS) >= 20
    assert {bug.stage for bug in BUGS} == {"gate", "counts", "plan", "dispatch", "gemm0", "gemm1", "return", "combine"}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "_"))
def test_planted_bug_is_located(bug: Bug, job) -> None:
    layer, xs = job
    report = compare(MutantBackend(bug.stage, bug.mutate), "ref", layer, xs)
    assert not report.ok
    first = report.first
    assert first is not None
    buffer, rank, expert, row, column = bug.where
    if row < 0:
        row = special_row(row, buffer, rank, expert, layer, xs)
    if buffer == "returned_NH":
        expert = int(layer.gate(xs[rank]).expert_SK.flatten()[row])
    assert (first.stage, first.buffer, first.rank, first.expert) == (bug.stage, buffer, rank, expert)
    assert first.row == row
    assert first.column == column
    assert first.tile == (None if buffer == "counts_PE" else row // 16)
    assert str(first.row) in str(report)
    json.dumps(report.to_dict())


def special_row(code: int, buffer: str, rank: int, expert: int | None, layer: MoELayer, xs: list[torch.Tensor]) -> int:
    """See planted.BUGS."""
    if code == -3:
        ids = layer.gate(xs[rank]).expert_SK.flatten().tolist()
        return next(i for i, e in enumerate(ids) if e in layer.experts_of(1))
    if expert is None:
        return xs[rank].shape[0] - 1
    rows = sum(int((layer.gate(x).expert_SK == expert).sum()) for x in xs)
    return rows - 1 if code == -1 else (rows - 1) // 16 * 16


def test_equal_backends_are_equal(job) -> None:
    layer, xs = job
    report = compare("ref", "ref", layer, xs)
    assert report.ok
    assert report.first is None
    assert len(report.buffers) == 9
    assert all(b.bit_equal and b.relative_error == 0 for b in report.buffers)


@pytest.mark.parametrize("stage", ["gemm0", "gemm1", "return"])
def test_start_from_isolates_a_stage(stage: str, job) -> None:
    """Fed with the right results of the stages before, a backend that is wrong only earlier is equal."""
    layer, xs = job
    report = compare("ref", MutantBackend("dispatch", next(b for b in BUGS if b.stage == "dispatch").mutate), layer, xs)
    assert not report.ok
    resumed = compare("ref", "ref", layer, xs, start_from=stage)
    assert resumed.ok
    assert all(b.bit_equal for b in resumed.buffers)


def test_stop_after(job) -> None:
    layer, xs = job
    bug = next(b for b in BUGS if b.stage == "combine")
    mutant = MutantBackend(bug.stage, bug.mutate)
    assert compare(mutant, "ref", layer, xs, stop_after="return").ok
    assert not compare(mutant, "ref", layer, xs, stop_after="combine").ok
    assert [b.stage for b in compare("ref", "ref", layer, xs, stop_after="counts").buffers] == [
        "gate",
        "gate",
        "counts",
    ]


def test_wrong_stages_are_refused(job) -> None:
    layer, xs = job
    with pytest.raises(UsageError, match="unknown stage 'gem'"):
        compare("ref", "ref", layer, xs, stop_after="gem")
    with pytest.raises(UsageError, match="can't start from 'gate'"):
        compare("ref", "ref", layer, xs, start_from="gate")
    with pytest.raises(UsageError, match="'mutant' can't start from 'gemm1'"):
        compare(MutantBackend("gate", lambda r, layer: None), "ref", layer, xs, start_from="gemm1")


def test_shapes_and_nan_are_differences() -> None:
    good = Record(y_SH=[torch.ones(4, 3)])
    for bad in (torch.ones(3, 3), torch.ones(4, 2), torch.full((4, 3), float("nan")), torch.full((4, 3), float("inf"))):
        result = compare_buffer("combine", "y_SH", Record(y_SH=[bad]), good, (0,), torch.float32, 16)
        assert result is not None
        assert not result.ok
        assert result.first is not None
    missing = compare_buffer("combine", "y_SH", Record(y_SH=[]), good, (0,), torch.float32, 16)
    assert missing is not None
    assert not missing.ok


def result(actual: list, expected: list):
    a, b = Record(y_SH=[torch.tensor(actual)]), Record(y_SH=[torch.tensor(expected)])
    return compare_buffer("combine", "y_SH", a, b, (0,), torch.float32, 16)


def test_what_is_not_finite_must_be_the_same() -> None:
    inf, nan = float("inf"), float("nan")
    assert result([[inf, 1.0]], [[inf, 1.0]]).ok
    assert result([[nan, 1.0]], [[nan, 1.0]]).ok
    for wrong in ([[0.0, 1.0]], [[nan, 1.0]], [[-inf, 1.0]], [[inf, 100.0]]):
        assert not result(wrong, [[inf, 1.0]]).ok
    big = compare_buffer(
        "combine",
        "y_SH",
        Record(y_SH=[torch.tensor([[1e200, 3e200]], dtype=torch.float64)]),
        Record(y_SH=[torch.tensor([[1e200, 1e200]], dtype=torch.float64)]),
        (0,),
        torch.float64,
        16,
    )
    assert big is not None
    assert not big.ok, "squares of 1e200 overflow; the comparison must not"


def test_zeros_of_different_sign_are_different_bits() -> None:
    assert result([[-0.0]], [[0.0]]).ok
    assert not result([[-0.0]], [[0.0]]).bit_equal
    moved = compare_buffer(
        "dispatch",
        "rows_NH",
        Record(rows_NH=[torch.tensor([[-0.0]])]),
        Record(rows_NH=[torch.tensor([[0.0]])]),
        (0,),
        torch.float32,
        16,
    )
    assert moved is not None
    assert not moved.ok


def test_results_of_ranks_that_do_not_exist() -> None:
    two, one = Record(y_SH=[torch.ones(1, 1)] * 2), Record(y_SH=[torch.ones(1, 1)])
    outcome = compare_buffer("combine", "y_SH", two, one, (0,), torch.float32, 16)
    assert outcome is not None
    assert not outcome.ok


def test_inputs_of_a_comparison_are_checked(job) -> None:
    layer, xs = job
    for wrong in (xs[0].double(), xs[:2], [*xs, xs[0]], [xs[0][:, :3]] * 3):
        with pytest.raises((TypeError, ValueError), match="expected"):
            compare("ref", "ref", layer, wrong)
    with pytest.raises(UsageError, match="tile_rows is 0, expected at least 1"):
        compare("ref", "ref", layer, xs, tile_rows=0)


# --- foreign functions ---------------------------------------------------------------------------------------------


def loop(x, weights, routing, wrong: str = ""):
    """A user's MoE: a loop over experts, right unless told otherwise."""
    y = torch.zeros_like(x)
    for e in range(weights["down_proj"].shape[0]):
        token, choice = (routing.expert_SK == e).nonzero(as_tuple=True)
        if wrong == "first_choice_only":
            token, choice = token[choice == 0], choice[choice == 0]
        gate, up = (x[token] @ weights["gate_up_proj"][e].T).chunk(2, dim=-1)
        out = (F.silu(gate) * up) @ weights["down_proj"][3 if wrong == "expert" and e == 5 else e].T
        weight = routing.weight_SK[token, choice, None]
        if wrong == "duplicates":
            y[token] += out * weight  # fancy indexing: a token that stands twice is added once
        else:
            y.index_add_(0, token, out * (weight if wrong != "weight" else 1))
    return y


def test_a_right_function_passes() -> None:
    report = check(loop)
    assert report.ok
    assert report.backend == "loop"


@pytest.mark.parametrize("wrong", ["first_choice_only", "expert", "weight", "duplicates"])
def test_a_wrong_function_is_found(wrong: str) -> None:
    report = check(lambda x, weights, routing: loop(x, weights, routing, wrong))
    assert not report.ok
    assert report.first is not None
    assert report.first.buffer == "y_SH"
    if wrong == "expert":
        assert "routed to expert 5" in report.note
    if wrong == "duplicates":
        assert "case: duplicates" in report.note


def test_a_function_that_returns_nothing() -> None:
    with pytest.raises(UsageError, match=r"returned a NoneType, expected a torch.float32 tensor"):
        check(lambda x, weights, routing: None)


def test_a_function_that_spoils_what_it_was_given() -> None:
    def spoil(x, weights, routing):
        for value in weights.values():
            value.zero_()
        return torch.zeros_like(x)

    assert not check(spoil).ok


def test_a_check_of_nothing_is_refused() -> None:
    for nothing in ({"sizes": ()}, {"sizes": (0,)}, {"kinds": ()}):
        with pytest.raises(UsageError, match="leave nothing to test"):
            check(loop, **nothing)


def test_a_wrong_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match=r"returned a torch.float64 tensor \[0, 64\], expected a torch.float32 tensor"):
        check(lambda x, weights, routing: x.double())
    with pytest.raises(UsageError, match=r"returned a torch.float32 tensor \[0, 3\], expected a torch.float32 tensor"):
        check(lambda x, weights, routing: x[:, :3])


def test_nan_of_one_expert_is_blamed_on_it() -> None:
    def poisoned(x, weights, routing):
        y = loop(x, weights, routing)
        y[(routing.expert_SK == 3).any(dim=1)] = float("nan")
        return y

    assert "routed to expert 3" in check(poisoned).note
