"""The gate's choice of experts: the kernel's own functions, run by the four threads that share a row, on the CPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_source import kernel_function, run_together

from moe_fast.kernel.shapes import KernelShape
from moe_ref.config import MoEConfig

NEGATIVE = np.float32(-3.0e38)


def columns_of(k: KernelShape, quad: int) -> list[int]:
    """Columns of a thread's values: two of every eight."""
    return [g * 8 + quad * 2 + i for g in range((k.experts + 7) // 8) for i in range(2)]


def run_choice(k: KernelShape, row: np.ndarray) -> list[tuple[int, np.float32]]:
    """(column or -1, weight) of each of the K turns for a row [E]; all four threads must say the same."""
    barrier = threading.Barrier(4, timeout=20)
    shared: tuple[list, list] = [None] * 4, [None] * 4
    local = threading.local()
    found: list[list[tuple[int, Any]]] = [[] for _ in range(4)]

    def shuffle(value: Any, distance: int) -> Any:
        # in turn, so that one barrier is enough: nobody is two ahead of another who still reads
        local.turn ^= 1
        shared[local.turn][local.quad] = value
        barrier.wait()
        return shared[local.turn][local.quad ^ distance]

    names: dict[str, Any] = {"cute": SimpleNamespace(arch=SimpleNamespace(shuffle_sync_bfly=shuffle))}
    best_column = kernel_function("gate", "best_column", **names, Float32=np.float32, NEGATIVE=NEGATIVE)

    def one(quad: int) -> None:
        local.quad, local.turn = quad, 0
        score = np.array([row[c] if c < k.experts else NEGATIVE for c in columns_of(k, quad)], np.float32)
        for _ in range(k.top_k):
            column, weight = best_column(k, None, score, quad)
            found[quad].append((column if column < k.experts else -1, weight))

    run_together(4, one, barrier)
    assert found[1:] == found[:1] * 3
    return found[0]


def expected(row: np.ndarray, top_k: int) -> list[tuple[int, np.float32]]:
    """One turn after the other: the largest value, of equal ones the first; nothing that is NaN or NEGATIVE."""
    left = {e: value for e, value in enumerate(row) if value > NEGATIVE}
    out = []
    for _ in range(top_k):
        best = max(left, key=lambda e: (left[e], -e), default=-1)
        out.append((best, left.pop(best, np.float32(0.0))))
    return out


@pytest.mark.parametrize(("experts", "top_k"), [(3, 1), (8, 2), (8, 8), (20, 5), (61, 8), (128, 8), (256, 8)])
@pytest.mark.parametrize("levels", [2, 5, 1 << 20])
def test_the_best_columns_in_order_and_of_equal_ones_the_first(experts, top_k, levels):
    """Few levels make many equal scores: in one thread's two columns, in one thread, in several."""
    k = KernelShape.from_config(MoEConfig(512, 256, experts, top_k, dtype="bfloat16"), 1)
    rng = np.random.default_rng(experts * levels)
    for _ in range(12):
        row = (rng.integers(0, levels, experts) / levels).astype(np.float32)
        assert run_choice(k, row) == expected(row, top_k)


@pytest.mark.parametrize("sign", [1, -1])
def test_rows_that_ascend_and_descend(sign):
    k = KernelShape.from_config(MoEConfig(512, 256, 128, 8, dtype="bfloat16"), 1)
    row = sign * np.arange(128, dtype=np.float32)
    assert run_choice(k, row) == expected(row, 8)


def test_what_is_no_number_is_never_chosen():
    k = KernelShape.from_config(MoEConfig(512, 256, 16, 8, dtype="bfloat16"), 1)
    row = np.full(16, np.nan, np.float32)
    row[[1, 4, 5, 11]] = 0.25, 0.5, 0.5, 0.125
    assert run_choice(k, row) == expected(row, 8)
    assert [column for column, _ in run_choice(k, row)] == [4, 5, 1, 11, -1, -1, -1, -1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 5, 31])
def test_a_logit_that_is_not_finite_is_noticed(bad, place):
    names: dict[str, Any] = {"cute": SimpleNamespace(arch=SimpleNamespace(fmax=np.fmax))}
    config = MoEConfig(512, 256, 128, 8, dtype="bfloat16", top_k_order="before_scores")
    k = KernelShape.from_config(config, 1)
    scores = kernel_function("gate", "scores_in_place", **names, Float32=np.float32, NEGATIVE=NEGATIVE)
    logits = np.linspace(-1, 1, 32).astype(np.float32)
    with np.errstate(invalid="ignore"):
        assert scores(k, None, logits, 0) == 0
        logits[place] = bad
        assert scores(k, None, logits, 0) == 1


@pytest.mark.parametrize("experts", [8, 32, 40, 128, 256])
def test_each_row_of_a_thread_is_chosen_from_once(experts):
    """A thread's logits are two of every eight columns of its row and of the row eight below."""
    k = KernelShape.from_config(MoEConfig(512, 256, experts, 2, dtype="bfloat16"), 1)
    groups = (experts + 7) // 8
    seen: list[tuple[int, list[int]]] = []

    class Tensor:
        def __init__(self, iterator, layout):
            size, (inner, outer) = layout
            assert size == (2, groups)
            self.values = [iterator[i * inner + g * outer] for g in range(groups) for i in range(2)]

        def __getitem__(self, at):
            return self.values[at]

    class Pointer(list):
        def __add__(self, offset):
            return Pointer(self[offset:])

    logits = np.arange(4 * groups)
    cute = SimpleNamespace(
        make_rmem_tensor=lambda size, kind: [0] * size, make_tensor=Tensor,
        make_layout=lambda shape, stride: (shape, stride),
    )  # fmt: skip

    def choose_row(k, a, row, begin, number, scratch, quad):
        assert (begin, quad) == (64, 2)
        seen.append((number, [int(row[i]) for i in range(2 * groups)]))

    class Logits:
        iterator = Pointer(logits.tolist())

        def __getitem__(self, at):
            return logits[at]

    choose = kernel_function("gate", "choose", cute=cute, Float32=float, SHORT=4, ROOM=16, choose_row=choose_row)
    choose(k, None, Logits(), 64, None, 38)
    own = 16 + (38 % 32 >> 2)
    assert seen == [
        (own + half * 8, [g * 4 + half * 2 + i for g in range(groups) for i in range(2)]) for half in range(2)
    ]
