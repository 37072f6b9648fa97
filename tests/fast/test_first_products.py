"""What processors begin with: the places of rings, first products that nobody deals, and the queue behind them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from kernel_source import kernel_function

from moe_fast.kernel.constants import Counter
from moe_fast.kernel.ring import ring_phase, ring_place
from moe_fast.kernel.shapes import KernelShape
from moe_ref.config import MoEConfig
from moe_ref.layout import ceil_div
from moe_ref.runtime.encoding import GEMM0, NONE, pack_task, task_column_tile, task_kind, task_row_tile

LAYERS = {
    "pairs": MoEConfig(2048, 2048, 8, 2, "relu", gated=False, dtype="bfloat16"),
    "single": MoEConfig(2048, 768, 8, 2, "relu", gated=False, dtype="float32"),
    "many columns": MoEConfig(4096, 14336, 8, 2, dtype="bfloat16"),
}


@pytest.mark.parametrize("size", range(1, 13))
def test_places_and_phases_of_a_ring(size):
    """Each place in turn, and the other phase in every round."""
    assert [ring_place(n, size) for n in range(5 * size)] == 5 * list(range(size))
    assert [ring_phase(n, size) for n in range(5 * size)] == [n // size % 2 for n in range(5 * size)]


def test_only_one_rank_without_shared_expert_deals_ahead():
    """Elsewhere rows don't come in the order of the tasks, or processors don't come at one time."""
    layer = LAYERS["pairs"]
    assert KernelShape.from_config(layer, 1, "spare_warps").deals_ahead
    assert not KernelShape.from_config(layer, 2, "spare_warps").deals_ahead
    assert not KernelShape.from_config(layer, 1, "tickets").deals_ahead
    assert not KernelShape.from_config(layer.replace(shared_intermediate=512), 1, "spare_warps").deals_ahead


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("row_tiles", [0, 1, 2, 3, 7, 8, 9, 33, 260])
def test_every_first_product_is_somebodys(name, row_tiles):
    """Those that processors begin with, and those that the Scheduler deals from its queue, whatever the order in which
    blocks of row tiles become ready: each once, and padding to nobody."""
    k = KernelShape.from_config(LAYERS[name], 1, "spare_warps")
    processors = 66 if k.paired else 132
    per = kernel_function("scheduler", "first_products_of")(k)
    names = {"ceil_div": ceil_div, "first_products_of": lambda k: per, "GEMM0": GEMM0, "NONE": NONE}
    ahead_of = kernel_function("scheduler", "ahead_of", **names)
    first_word = kernel_function("scheduler", "first_word", pack_task=pack_task, **names)
    blocks, queue, counters = ceil_div(row_tiles, k.block_tiles), {}, {Counter.READY0: 0}

    def fetch_add(at, word):
        counters[word] += 1
        return counters[word] - 1

    ready = kernel_function(
        "scheduler", "make_ready", ahead_of=ahead_of, side_counters=lambda a, side: 0, fetch_add=fetch_add,
        Counter=SimpleNamespace(READY0=Counter.READY0), ready_at=lambda k, a, q, place: place,
        write=lambda at, place, entry, **order: queue.__setitem__(place, entry - 1), **names,
    )  # fmt: skip
    order = list(range(blocks))
    random.Random(row_tiles).shuffle(order)
    for block in order:
        ready(k, None, 1, 0, block, row_tiles, processors)
    assert sorted(queue) == sorted(queue.values()) == list(range(blocks))
    ahead = ahead_of(k, row_tiles, processors)
    assert ahead == min(processors, blocks * per)
    words = [first_word(k, processor, row_tiles) for processor in range(ahead)]
    dealt = [(task_row_tile(w), task_column_tile(w)) for w in words if task_kind(w) == GEMM0]
    size = k.task_rows(k.block_tiles)
    for number in range(ahead, blocks * per):
        # as the Scheduler does from its queue
        tile = k.first_tile(queue[number // per] * size + number % per % size)
        if tile < row_tiles:
            dealt.append((tile, number % per // size))
    step = 2 if k.paired else 1
    assert sorted(dealt) == [(tile, column) for tile in range(0, row_tiles, step) for column in range(k.columns0)]
