"""The planner's rehearsal: the kernel's own functions of the plan, 256 threads, without the DSL.

A rehearsal may write only what the plan writes again before anybody reads it, and must tell nobody.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_source import kernel_function, run_together

from moe_fast.kernel import tile_pairs
from moe_fast.kernel.constants import TILE_ROWS, Counter, PlanWord, Status
from moe_fast.kernel.shapes import KernelShape
from moe_ref.config import MoEConfig
from moe_ref.layout import ceil_div, compact_row

THREADS = 256
REGIONS = (
    "list_start", "row_shift", "tile_slot", "tile_rows", "tile_at", "dealt", "histogram", "arrived_target", "plan",
    "record", "heap", "counters",
)  # fmt: skip
AGAIN = {"list_start", "row_shift", "tile_slot", "tile_rows", "tile_at", "dealt"}
"""What a plan writes anew each time; the rest others write or read meanwhile, or counts from call to call."""
ROWS_OF_EXPERTS = [0, 1, 127, 128, 129, 160, 161, 300, 512, 5, 0, 256]


class Planner:
    """The planner's threads, a rank's memory, and what the rank has told others."""

    def __init__(self, k: KernelShape, histogram: np.ndarray, max_tokens: int) -> None:
        self.k, self.tiles = k, len(histogram)
        self.meet, self.own = threading.Barrier(THREADS, timeout=30), threading.local()
        self.values = [0] * THREADS
        self.shared = dict.fromkeys(range(2304), 0x5A5A)
        self.words: dict[int, dict[int, Any]] = {}
        self.waited: list[int] = []
        self.told = 0
        places = {name: (i + 1) << 40 for i, name in enumerate(REGIONS)}
        rows = max_tokens * k.top_k + k.experts * TILE_ROWS
        rows = ceil_div(rows, TILE_ROWS) * TILE_ROWS
        self.a = SimpleNamespace(**places, counts_at=0, rank=0, rows=rows, tokens=max_tokens)
        for tile, expert in np.ndindex(histogram.shape):
            self.memory("histogram")[tile * k.experts + expert] = int(histogram[tile, expert])
        self.names = self._names()

    def memory(self, name: str) -> dict[int, Any]:
        return self.words.setdefault(REGIONS.index(name) + 1, {})

    def _names(self) -> dict[str, Any]:
        arch = SimpleNamespace(load=lambda at, kind: self.shared[at], store=self.shared.__setitem__)
        names: dict[str, Any] = {name: getattr(tile_pairs, name) for name in (
            "EARLY", "count_pairs", "dealt_tiles", "field_few", "field_rows", "field_wide", "own_tiles", "pack_dealt",
            "place_tile",
        )}  # fmt: skip
        names |= {
            "cute": SimpleNamespace(arch=arch, make_rmem_tensor=lambda size, kind: [0] * size), "read": self.read,
            "write": self.write, "wait_reached": self.wait, "side_counters": lambda a, side: a.counters,
            "sync_consumers": self.meet.wait, "scan": self.scan, "Counter": Counter, "PlanWord": PlanWord,
            "Status": Status, "Role": SimpleNamespace(PLANNER=0), "Wait": SimpleNamespace(ROUTED=0), "BATCH": 32,
            "TILE_ROWS": TILE_ROWS, "CONSUMERS": THREADS, "TARGETS_AHEAD": 2, "ceil_div": ceil_div,
            "compact_row": compact_row, "dealt_at": lambda k, a: a.dealt, "boost_rows": lambda rows: min(rows, 2112),
            "next_target": lambda target, rows: target + rows, "tell_counts": self.tell, "place_replicas": None,
        }  # fmt: skip
        for module, found in {
            "plan": ("tiles_per_part", "sum_histograms", "first_expert_of", "place_experts"),
            "tables": ("slot_of", "early_bit", "publish_pairs", "publish_words", "publish_plan"),
        }.items():
            for name in sorted(found, key=lambda name: name == "place_experts"):
                if name != "place_experts":
                    names[name] = kernel_function(module, name, **names)
        names["place_experts"] = kernel_function("plan", "place_experts", **names)
        return names

    def read(self, address: int, index: int, *kind: Any, **order: Any) -> int:
        return self.words.get(address >> 40, {}).get(index + (address & (2**40 - 1)) // 4, 0)

    def write(self, address: int, index: int, value: int, *kind: Any, **order: Any) -> None:
        self.words.setdefault(address >> 40, {})[index + (address & (2**40 - 1)) // 4] = value

    def wait(self, counters: int, index: int, target: int, *more: Any) -> bool:
        self.waited.append(target)
        return True

    def tell(self, k, a, epoch, side, scratch, thread, kept, mine, status) -> None:
        """The other rank sends as many rows to each expert."""
        self.told += 1
        for rank in range(k.ranks if k.ranks > 1 and thread < k.experts else 0):
            self.memory("heap")[(side * k.ranks + rank) * k.counts_stride + thread] = kept

    def scan(self, value: int, scratch: int, thread: int) -> int:
        self.values[thread] = value
        self.meet.wait()
        before = sum(self.values[:thread])
        self.meet.wait()
        return before

    def run(self, real: bool) -> None:
        plan = kernel_function("plan", "make_plan", **self.names)
        run_together(THREADS, lambda thread: plan(self.k, self.a, 3, 0, self.tiles, 0, thread, real), self.meet)

    def state(self) -> dict[str, dict[int, Any]]:
        return {name: dict(self.memory(name)) for name in REGIONS}


def planner(seed: int, max_tokens: int, ranks: int = 1) -> Planner:
    k = KernelShape.from_config(MoEConfig(512, 256, len(ROWS_OF_EXPERTS), 2, dtype="bfloat16"), ranks)
    assert k.paired
    histogram = np.zeros((5, k.experts), dtype=int)
    rng = np.random.default_rng(seed)
    for expert, rows in enumerate(rng.permutation(ROWS_OF_EXPERTS)):
        np.add.at(histogram[:, expert], rng.integers(0, len(histogram), rows), 1)
    return Planner(k, histogram, max_tokens)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rehearsal_changes_nothing_of_the_plan(seed, ranks):
    rehearsed, plain = (planner(seed, 1024, ranks) for _ in range(2))
    # what an earlier call has left
    for one in (rehearsed, plain):
        one.memory("plan")[PlanWord.STATUS] = Status.NONFINITE
        one.memory("arrived_target").update({tile: 1000 + tile for tile in range(40)})
        one.memory("heap").update(dict.fromkeys(range(2 * one.k.counts_stride), 1 << 20))
    before = rehearsed.state()
    rehearsed.run(real=False)
    after = rehearsed.state()
    assert {name for name in REGIONS if after[name] != before[name]} == AGAIN
    assert (rehearsed.told, rehearsed.waited) == (0, [0])
    for one in (rehearsed, plain):
        one.run(real=True)
        assert (one.told, one.waited[-1]) == (THREADS, one.tiles)
        assert one.memory("counters") == {Counter.PLANNED: 1}
    want, found = plain.state(), rehearsed.state()
    assert want["plan"][PlanWord.ROW_TILES] > 0
    for name in REGIONS:
        assert {at: found[name].get(at) for at in want[name]} == want[name], name


def test_a_rehearsal_needs_no_more_room_than_one_token():
    """Of a layer whose buffers hold one token: no table is written beyond its end."""
    one = planner(0, 1)
    one.a.rows = 2 * TILE_ROWS
    one.run(real=False)
    for name in ("dealt", "tile_slot", "tile_rows", "tile_at"):
        assert one.memory(name).keys() == {0, 1}
