"""The config: derived sizes against their formulas, and what it refuses."""

from __future__ import annotations

import pytest

from moe_ref import MoEConfig

BASE = MoEConfig(hidden=2048, intermediate=768, experts=128, top_k=8, dtype="bfloat16", tile_rows=128, max_tokens=8192)


def test_derived_sizes_of_the_qwen3_layer() -> None:
    assert BASE.up_rows == 1536
    assert BASE.parameters_per_expert == 3 * 2048 * 768
    assert BASE.flops_per_row == 6 * 2048 * 768
    assert BASE.row_bytes == 4096
    assert BASE.slots(2) == 64
    assert BASE.slots(3) == 43
    assert BASE.max_rows(2) == 8 * 8192 * 2
    assert BASE.compact_bytes(2) == 2 * (131072 + 64 * 128 + 8 * 8192) * 4096
    assert BASE.fixed_bytes(2) == 2 * 2 * 2 * 64 * 8192 * 4096
    assert BASE.capacity(100) is None
    assert BASE.replace(capacity_factor=1.25).capacity(100) == 8  # ceil(1.25 * 100 * 8 / 128) = ceil(7.8)


def test_round_trip() -> None:
    assert MoEConfig.from_dict(BASE.to_dict()) == BASE
    with pytest.raises(ValueError, match=r"unknown config fields \['hiden'\]; legal ones: hidden, "):
        MoEConfig.from_dict({"hiden": 3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 0}, "hidden is 0, expected an integer of at least 1"),
        ({"hidden": 2.5}, "hidden is 2.5"),
        ({"top_k": 129}, "top_k is 129, expected at most experts = 128"),
        ({"activation": "tanh"}, "activation is 'tanh', expected one of relu, gelu, silu, clamped_swiglu"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"num_groups": 3}, "num_groups is 3, expected a divisor of experts = 128"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups is 5, expected at most num_groups = 4"),
        ({"num_groups": 64, "top_groups": 2}, "top_k is 8, but the 2 chosen groups hold only 4 experts"),
        ({"num_groups": 128, "top_groups": 8, "group_score": "top2_sum"}, "needs groups of at least two experts"),
        ({"activation": "clamped_swiglu", "gated": False}, "set gated=True"),
        ({"interleaved": True, "gated": False}, "it needs gated=True"),
        ({"shared_gate": True}, "shared_gate needs a shared expert"),
        ({"capacity_factor": -1.0}, "capacity_factor is -1.0, expected a positive number"),
        ({"capacity_factor": float("nan")}, "capacity_factor is nan"),
        ({"routed_scaling": float("inf")}, "routed_scaling is inf, expected a finite number"),
        ({"routed_scaling": "2"}, "routed_scaling is '2', expected a finite number"),
        ({"routed_scaling": 10**400}, "routed_scaling is 1000"),
        ({"gated": "false"}, "gated is 'false', expected true or false"),
        ({"capacity_factor": True}, "capacity_factor is True, expected a positive number"),
        ({"clamp_limit": -1.0}, "clamp_limit is -1.0, expected a positive number"),
        ({"experts": 10**15, "num_groups": 7}, "num_groups is 7, expected a divisor of experts"),
        ({"max_tokens": -1}, "max_tokens is -1"),
    ],
)
def test_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        BASE.replace(**changes)


@pytest.mark.parametrize("factor", [1e12, 1e300, 1e308])
def test_capacity_is_at_most_all_routes(factor: float) -> None:
    assert BASE.replace(capacity_factor=factor).capacity(100) == 800
