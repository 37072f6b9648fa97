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


def run_choice(k: KernelShape, row: np.ndarray, bias: np.ndarray | None = None) -> list[tuple[int, np.float32]]:
    """(column or -1, weight) of each of the K turns for a row [E]; all four threads must say the same. bias [E]: that
    of the selection."""
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

    def staged(scratch: Any, place: int, column: int) -> Any:
        assert bias is not None
        return bias[column] if column < k.experts else np.float32(np.nan)

    names: dict[str, Any] = {"cute": SimpleNamespace(arch=SimpleNamespace(shuffle_sync_bfly=shuffle))}
    names |= {"staged": staged, "SELECTION_BIAS": 0}
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


@pytest.mark.parametrize(("experts", "top_k"), [(20, 5), (61, 8), (128, 8)])
def test_a_selection_bias_decides_who_but_not_how_much(experts, top_k):
    config = MoEConfig(512, 256, experts, top_k, dtype="bfloat16", selection_bias=True)
    k = KernelShape.from_config(config, 1)
    rng = np.random.default_rng(experts)
    for _ in range(6):
        row, bias = (rng.integers(0, 5, (2, experts)) / np.float32(4)).astype(np.float32)
        assert run_choice(k, row, bias) == [(column, row[column]) for column, _ in expected(row + bias, top_k)]


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


class Single(np.float32):
    """fp32 with the bit cast to what shared memory takes, which is anything here."""

    def bitcast(self, kind: Any) -> Any:
        return self


def rounded(name: str) -> Any:
    return lambda self, other: Single(getattr(np.float32, name)(np.float32(self), np.float32(other)))


for operator in ("__add__", "__radd__", "__sub__", "__mul__", "__truediv__"):
    setattr(Single, operator, rounded(operator))


class Words(int):
    """An address in shared memory, in words."""

    def __add__(self, words: int) -> Words:
        return Words(int(self) + words)

    def toint(self) -> int:
        return 4 * self


class Registers:
    """A thread's logits, or a view of them or of shared memory: pairs that lie `stride` apart, `size` values in all."""

    def __init__(self, values: Any, at: int = 0, stride: int = 2, size: int = 0) -> None:
        self.values, self.at, self.stride, self.size = values, at, stride, size

    @property
    def iterator(self) -> Registers:
        return self

    def __add__(self, offset: int) -> Registers:
        return Registers(self.values, self.at + offset)

    def place(self, v: int) -> int:
        return self.at + v // 2 * self.stride + v % 2

    def __getitem__(self, v: int) -> Any:
        return self.values[self.place(v)]

    def __setitem__(self, v: int, value: Any) -> None:
        self.values[self.place(v)] = value


class ChoosingBlock:
    """The 256 consumer threads of a block, who choose for one token tile."""

    def __init__(self, k: KernelShape, tokens: int) -> None:
        gate = pytest.importorskip("moe_fast.kernel.gate", reason="the CuTe DSL (extra [fused]) is not installed")
        self.k, self.a, self.gate = k, SimpleNamespace(tokens=tokens, expert={}, weight={}, plan=None), gate
        self.shared: dict[int, Any] = {}
        self.handed: set[int] = set()
        self.everyone = threading.Barrier(256, timeout=50)
        self.quads = [threading.Barrier(4, timeout=50) for _ in range(64)]
        self.values: tuple[list, list] = [None] * 256, [None] * 256
        self.own = threading.local()
        self.writers: dict[tuple[int, int], int] = {}
        self.rehearses, self.bad = False, 0
        arch = SimpleNamespace(
            shuffle_sync_bfly=self.shuffle, fmax=lambda x, y: Single(np.fmax(x, y)), atomic_or=self.notice,
            exp2=lambda x: Single(np.exp2(x)), rcp_approx=lambda x: Single(1) / x,
            load=lambda at, kind: self.shared[at], store=lambda at, value: self.shared.update({at: value}),
        )  # fmt: skip
        arch = {"cute": SimpleNamespace(
            arch=arch, make_layout=lambda shape, stride: (shape, stride), make_tensor=self.tensor,
            make_ptr=lambda kind, address, space, assumed_align: address // 4, autovec_copy=self.copy,
            AddressSpace=SimpleNamespace(smem=None),
        )}  # fmt: skip
        names: dict[str, Any] = {
            **arch, "Float32": Single, "Status": SimpleNamespace(NONFINITE=1), "PlanWord": SimpleNamespace(STATUS=0),
            "word": lambda *_: None, "write": self.write, "sync_consumers": self.everyone.wait,
            "rehearses": lambda k: self.rehearses,
        }  # fmt: skip
        constants = "IDS", "WEIGHTS", "HANDED", "AT_ONCE", "SHORT", "NEGATIVE", "LOG2E", "TINY", "TILE_ROWS"
        names |= {name: getattr(gate, name) for name in constants}
        parts = ("exp", "sigmoid", "quad_max", "quad_sum", "scores_in_place", "score_chosen", "best_column")
        for part in (*parts, "choose_row", "rows_of", "hand_over", "choose"):
            names[part] = kernel_function("gate", part, **names)
        self.choose = names["choose"]

    def shuffle(self, value: Any, distance: int) -> Any:
        self.own.turn ^= 1
        thread = self.own.thread
        self.values[self.own.turn][thread] = value
        self.quads[thread // 4].wait()
        return self.values[self.own.turn][thread ^ distance]

    def notice(self, *order: Any, **scope: Any) -> None:
        self.bad += 1

    def write(self, array: dict, at: int, value: Any, kind: Any = None) -> None:
        # what a thread writes in a rehearsal it writes again
        again = self.rehearses and self.writers.get((id(array), at)) == self.own.thread
        assert at not in array or again, "written twice"
        self.writers[id(array), at] = self.own.thread
        array[at] = value

    def tensor(self, start: Any, layout: Any) -> Any:
        (_, size), (_, stride) = layout
        if isinstance(start, Registers):
            return Registers(start.values, start.at, stride, 2 * size)
        self.handed.update(start + g * stride + i for g in range(size) for i in range(2))
        return Registers(self.shared, start, stride, 2 * size)

    def copy(self, source: Any, target: Any) -> None:
        assert source.size == target.size
        for v in range(source.size):
            target[v] = source[v]

    def run(self, logits: np.ndarray, tile: int, height: int, rehearses: bool = False) -> None:
        """logits [S, E], as wgmma leaves the tile's rows to the threads; who multiplies nothing has anything, or zeros
        to rehearse with."""
        self.rehearses = rehearses
        groups = (self.k.experts + 7) // 8
        padded = np.zeros((len(logits) + 128, groups * 8), np.float32)
        padded[: len(logits), : self.k.experts] = logits

        def one(thread: int) -> None:
            self.own.thread, self.own.turn = thread, 0
            values = [Single(0 if rehearses else np.nan)] * (4 * groups)
            if thread < 128 or height > 64:
                for g, half, i in np.ndindex(groups, 2, 2):
                    row = tile * height + thread // 32 * 16 + thread % 32 // 4 + half * 8
                    values[g * 4 + half * 2 + i] = Single(padded[row, g * 8 + thread % 4 * 2 + i])
            with np.errstate(all="ignore"):
                self.choose(self.k, self.a, Registers(values), tile * height, height, Words(0), thread)

        run_together(256, one, self.everyone, *self.quads)


@pytest.mark.parametrize(
    ("experts", "top_k", "order"),
    [
        (20, 2, "after_scores"),
        (40, 2, "before_scores"),
        (61, 3, "after_scores"),
        (128, 8, "after_scores"),
        (200, 2, "before_scores"),
        (256, 1, "after_scores"),
    ],
)
@pytest.mark.parametrize("rehearses", [False, True])
def test_low_tiles_are_chosen_for_by_both_warpgroups_as_high_ones(experts, top_k, order, rehearses):
    """Every token has the same ids and weights, to the bit, whoever chose and whether the second warpgroup has
    rehearsed; and its tile's memory the same ids."""
    tokens = 101
    config = MoEConfig(512, 256, experts, top_k, dtype="bfloat16", top_k_order=order)
    k = KernelShape.from_config(config, 1)
    rng = np.random.default_rng(experts)
    logits = (rng.integers(-40, 40, (tokens, experts)) / 8).astype(np.float32)
    logits[70, 3] = np.inf
    high = ChoosingBlock(k, tokens)
    low = [ChoosingBlock(k, tokens) for _ in range(2)]
    high.run(logits, 0, 128)
    for tile, block in enumerate(low):
        block.run(logits, tile, 64, rehearses)
    assert sorted(high.a.expert) == sorted(high.a.weight) == list(range(tokens * top_k))
    for token in [*range(70), *range(71, tokens)]:
        found = [high.a.expert[token * top_k + j] for j in range(top_k)]
        assert found == [column for column, _ in expected(logits[token], top_k)]
    assert low[0].a.expert | low[1].a.expert == high.a.expert
    for route, weight in high.a.weight.items():
        assert low[route // top_k // 64].a.weight[route].tobytes() == weight.tobytes()
    gate = high.gate
    for tile, block in enumerate(low):
        for r in range(64 * top_k):
            assert block.shared[gate.IDS + r] == high.shared[gate.IDS + tile * 64 * top_k + r]
        # beside what the faster warpgroup writes already, and what both read
        assert bool(block.handed) == (experts > 32)
        for at in block.handed:
            assert gate.WEIGHTS + 128 * gate.MAX_TOP_K <= at < gate.SELECTION_BIAS
    assert not high.handed
    assert (high.bad, low[0].bad, low[1].bad) == (1, 0, 1)
    assert gate.ROUTER_BIAS + 256 == 2 * 128 * 128 // 4
