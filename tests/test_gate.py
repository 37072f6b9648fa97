"""The gate: choice, ties, weights, groups, capacity, auxiliary losses; expected values are worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ref import MoEConfig, Routing
from moe_ref.gate import balance_loss, gate, keep_within_capacity, stable_top_k, z_loss

CONFIG = MoEConfig(hidden=4, intermediate=4, experts=4, top_k=2)
EYE = torch.eye(4)


def route(logits: list[float], bias=None, selection=None, **changes) -> Routing:
    """Route one token whose logits are given: the router weight is the identity."""
    return gate(torch.tensor([logits]), EYE, CONFIG.replace(**changes), bias, selection)


def test_softmax_then_top_k_then_renormalize() -> None:
    r = route([0.0, 2.0, 1.0, -1.0])
    assert r.expert_SK.tolist() == [[1, 2]]
    a, b = math.exp(2), math.exp(1)
    torch.testing.assert_close(r.weight_SK, torch.tensor([[a / (a + b), b / (a + b)]]))


def test_softmax_without_renormalizing() -> None:
    r = route([0.0, 2.0, 1.0, -1.0], renormalize=False, routed_scaling=3.0)
    total = sum(math.exp(v) for v in (0, 2, 1, -1))
    torch.testing.assert_close(r.weight_SK, torch.tensor([[3 * math.exp(2) / total, 3 * math.exp(1) / total]]))


def test_top_k_before_softmax_equals_renormalized() -> None:
    before = route([0.3, 2.0, 1.0, -1.0], top_k_order="before_scores", renormalize=False)
    after = route([0.3, 2.0, 1.0, -1.0])
    assert torch.equal(before.expert_SK, after.expert_SK)
    torch.testing.assert_close(before.weight_SK, after.weight_SK)


def test_sigmoid_weights() -> None:
    r = route([0.0, 2.0, 1.0, -1.0], scoring="sigmoid", renormalize=False)
    sigmoid = [1 / (1 + math.exp(-v)) for v in (2.0, 1.0)]
    torch.testing.assert_close(r.weight_SK, torch.tensor([sigmoid]))


def test_router_bias_enters_the_weights() -> None:
    r = route([0.0, 0.0, 0.0, 0.0], bias=torch.tensor([0.0, 0.0, 1.0, 2.0]), router_bias=True)
    assert r.expert_SK.tolist() == [[3, 2]]
    torch.testing.assert_close(r.weight_SK[0, 0] / r.weight_SK[0, 1], torch.tensor(math.e))


def test_selection_bias_chooses_but_does_not_weigh() -> None:
    bias = torch.tensor([5.0, 0.0, 0.0, 0.0])
    r = route([0.0, 2.0, 1.0, -1.0], selection=bias, scoring="sigmoid", selection_bias=True, renormalize=False)
    assert r.expert_SK.tolist() == [[0, 1]]
    torch.testing.assert_close(r.weight_SK[0, 0], torch.tensor(0.5))


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_ties_go_to_the_lower_id(top_k: int) -> None:
    assert route([1.0, 1.0, 1.0, 1.0], top_k=top_k).expert_SK.tolist() == [list(range(top_k))]


@given(st.lists(st.lists(st.integers(-2, 2), min_size=7, max_size=7), min_size=1, max_size=5), st.integers(1, 7))
def test_stable_top_k_is_a_sort_by_score_then_id(rows: list[list[int]], k: int) -> None:
    got = stable_top_k(torch.tensor(rows, dtype=torch.float32), k).tolist()
    assert got == [sorted(range(7), key=lambda e: (-row[e], e))[:k] for row in rows]


def test_group_limited_by_max() -> None:
    # groups {0,1}, {2,3}: the best single score is expert 3's, so 0 and 1 are out although 0 is second best
    r = route([1.0, -5.0, -6.0, 2.0], num_groups=2, top_groups=1)
    assert r.expert_SK.tolist() == [[3, 2]]


def test_group_limited_by_sum_of_two() -> None:
    # sigmoid scores: group 0 sums to about 1.46, group 1 to about 0.89 although it has the largest score
    r = route([1.0, 1.0, -6.0, 2.0], scoring="sigmoid", num_groups=2, top_groups=1, group_score="top2_sum")
    assert r.expert_SK.tolist() == [[0, 1]]


def test_zero_scores_stay_zero() -> None:
    """0 / 0 is guarded: sigmoid underflows to exactly 0 for every choice."""
    r = route([-200.0, -200.0, -200.0, -200.0], scoring="sigmoid")
    assert r.weight_SK.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_bad_logits_are_named(value: float) -> None:
    x = torch.zeros(3, 4)
    x[1, 2] = value
    with pytest.raises(ValueError, match=r"logit of token 1 for expert \d is .*expected a finite number"):
        gate(x, EYE, CONFIG)


def test_scores_are_fp32_in_16_bit_layers() -> None:
    config = CONFIG.replace(dtype="bfloat16")
    x = torch.tensor([[1.0, 1.0, 0.0, 0.0]], dtype=torch.bfloat16)
    weight = torch.zeros(4, 4, dtype=torch.bfloat16)
    weight[0, 0], weight[1, 0], weight[1, 1] = 1.0, 1.0, 2.0**-9
    r = gate(x, weight, config)
    assert r.weight_SK.dtype == torch.float32
    assert r.expert_SK.tolist() == [[1, 0]], "1 + 2^-9 is larger than 1 in fp32, equal in bf16"


# --- capacity ------------------------------------------------------------------------------------------------------


def test_capacity_drops_in_token_order() -> None:
    config = CONFIG.replace(capacity_factor=1.0)  # C = ceil(1.0 * 4 * 2 / 4) = 2
    ids = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 0]])
    kept, dropped = keep_within_capacity(Routing(ids, torch.ones(4, 2)), config)
    assert kept.expert_SK.tolist() == [[0, 1], [0, 2], [-1, 3], [1, -1]]
    assert dropped == 2


@given(st.integers(0, 12), st.floats(0.1, 3.0), st.integers(0, 1000))
def test_capacity_keeps_the_first_routes(tokens: int, factor: float, seed: int) -> None:
    config = CONFIG.replace(capacity_factor=factor)
    ids = np.random.default_rng(seed).integers(-1, 4, size=(tokens, 2))
    kept, dropped = keep_within_capacity(Routing(torch.from_numpy(ids), torch.ones(tokens, 2)), config)
    capacity = config.capacity(tokens)
    assert capacity is not None
    used = dict.fromkeys(range(4), 0)
    expected = ids.copy()
    for s in range(tokens):
        for k in range(2):
            e = int(ids[s, k])
            if e >= 0:
                used[e] += 1
                if used[e] > capacity:
                    expected[s, k] = -1
    assert kept.expert_SK.tolist() == expected.tolist()
    assert dropped == int((ids != expected).sum())


# --- losses --------------------------------------------------------------------------------------------------------


def test_balance_loss_is_one_when_balanced_and_e_when_collapsed() -> None:
    even = gate(torch.zeros(4, 4), EYE, CONFIG)
    torch.testing.assert_close(balance_loss(even, torch.tensor([2, 2, 2, 2])), torch.tensor(1.0))
    x = torch.tensor([[50.0, 0, 0, 0]]).repeat(4, 1)
    collapsed = gate(x, EYE, CONFIG.replace(top_k=1))
    torch.testing.assert_close(balance_loss(collapsed, torch.tensor([4, 0, 0, 0])), torch.tensor(4.0))


def test_z_loss_by_hand() -> None:
    r = gate(torch.zeros(3, 4), EYE, CONFIG)
    torch.testing.assert_close(z_loss(r), torch.tensor(math.log(4) ** 2))


def test_losses_need_the_gate() -> None:
    r = Routing(torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))
    with pytest.raises(ValueError, match="handed in without scores"):
        balance_loss(r, torch.ones(4))
    with pytest.raises(ValueError, match="handed in without logits"):
        z_loss(r)
