"""Every order of a small case, thousands of random orders of larger ones, and every broken rule found.

The small case: 2 ranks, 2 experts, 2 row tiles x 2 column tiles per rank, two successive calls. "full" sends every
token to both experts; "uneven" lets rank 0 keep everything in the first call, so that it can run ahead.
"""

from __future__ import annotations

import numpy as np
import pytest

from moe_ref.balance import schedule
from moe_ref.placement import Placement
from moe_ref.runtime.callplan import count_experts, make_call
from moe_ref.runtime.cases import BROKEN, SHAPE, small_case
from moe_ref.runtime.checker import random_order
from moe_ref.runtime.explorer import Explorer
from moe_ref.runtime.messages import ProtocolViolation, Rules
from moe_ref.runtime.tasks import TileShape

CASES = {f"{name}, {layout}": (name, layout) for name in ("full", "uneven") for layout in ("compact", "fixed")}


@pytest.mark.parametrize("case", CASES)
def test_every_order_between_ranks_is_right(case):
    calls = small_case(*CASES[case])
    if case.startswith("full"):
        assert all(len(call.tiles[rank]) == 2 for call in calls for rank in range(2))
        assert (SHAPE.columns0, SHAPE.columns1) == (2, 2)
    found = Explorer(calls, processors=2).run()
    print(f"{case}: {found.states} distinct states, {found.transitions} deliveries, complete: {found.complete}")
    assert found.violation is None, found.path
    assert found.complete
    assert found.finals == 1, "all orders must end in one and the same state"
    assert found.states >= 100_000


def test_every_order_of_every_message_is_right():
    found = Explorer(small_case("full", "compact"), processors=1, inside=True).run()
    print(f"every message free: {found.states} distinct states, {found.transitions} deliveries")
    assert found.violation is None, found.path
    assert found.complete
    assert found.finals == 1
    assert found.states >= 1_000_000


@pytest.mark.parametrize("case", CASES)
def test_processors_that_hold_a_mail_in_advance(case):
    found = Explorer(small_case(*CASES[case]), processors=1, depth=2).run()
    assert found.violation is None, found.path
    assert found.complete
    assert found.finals == 1


EXPECTED = {
    "signal-before-payload": {"unwritten"},
    "one-side": {"overwritten", "stale", "task"},
    "reset-epoch": {"deadlock"},
    "lost-wake-up": {"deadlock"},
    "forgotten-idle": {"deadlock"},
    "total-too-small": {"task"},
    "total-too-large": {"deadlock"},
}


@pytest.mark.parametrize("case", ["uneven, compact", "uneven, fixed"])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_rules_are_found_by_search_and_by_chance(name, case):
    rules, expected = BROKEN[name], EXPECTED[name]
    calls = small_case(*CASES[case])
    found = Explorer(calls, processors=2, rules=rules).run()
    assert found.violation is not None, f"{name} was not found in {found.states} states"
    assert found.violation.rule in expected, found.violation
    assert found.path, "a violation comes with the deliveries that led to it"
    print(f"{name}, {case}: {found.violation} after {found.states} states, {len(found.path)} deliveries")
    rules_broken = set()
    for seed in range(300):
        try:
            random_order(calls, seed, rules=rules)
        except ProtocolViolation as violation:
            rules_broken.add(violation.rule)
    assert rules_broken, f"{name} was not found in 300 random orders"


def test_rows_need_one_side_only_where_they_wait_for_all_counts():
    one_row_side = Rules(row_sides=1)
    assert Explorer(small_case("uneven", "compact"), processors=2, rules=one_row_side).run().violation is None
    assert Explorer(small_case("full", "fixed"), processors=2, rules=one_row_side).run().violation is not None
    assert Explorer(small_case("uneven", "compact"), processors=2, rules=Rules(sides=1)).run().violation is not None


def _random_calls(seed: int):
    """2 or 3 calls on 1 to 4 ranks with uneven S, zero included, masked routes, both layouts, replicas at times."""
    rng = np.random.default_rng(seed)
    ranks, experts, top_k = int(rng.integers(1, 5)), int(rng.integers(1, 7)), int(rng.integers(1, 3))
    shape = TileShape(
        8, 8, top_k, tile_rows=int(rng.integers(1, 4)), tile_columns=4, token_rows=int(rng.integers(1, 4))
    )
    fixed, replicas = bool(rng.integers(2)), ranks > 1 and rng.random() < 0.3
    owners = [sorted(rng.choice(ranks, size=2 if replicas else 1, replace=False).tolist()) for _ in range(experts)]
    placement = Placement.from_replicas(owners, ranks)
    calls = []
    for epoch in range(int(rng.integers(2, 4))):
        ids = [rng.integers(-1, experts, size=(int(rng.choice([0, 1, 5])), top_k)) for _ in range(ranks)]
        counts = np.stack([count_experts(i, experts) for i in ids])
        plan = schedule(counts, placement) if placement.max_replicas > 1 else None
        capacity = max(1, int(counts.max())) if fixed else None
        # The capacity stands in for one fixed beforehand: heap rows of different calls may overlap in any case.
        calls.append(make_call(ids, placement, shape, plan, capacity, epoch))
    if fixed:
        largest = max(call.layout.capacity for call in calls)
        calls = [
            make_call(
                c.routing, placement, shape, None if placement.max_replicas == 1 else _plan(c, placement), largest, e
            )
            for e, c in enumerate(calls)
        ]
    return calls


def _plan(call, placement):
    return schedule(np.stack([count_experts(i, placement.num_experts) for i in call.routing]), placement)


def test_two_thousand_random_orders_are_right():
    deliveries = 0
    for case in range(500):
        calls = _random_calls(case)
        for seed in range(4 * case, 4 * case + 4):
            deliveries += random_order(calls, seed, processors=1 + seed % 3, depth=1 + seed % 2)
    print(f"2000 random orders of 500 cases, {deliveries} deliveries")
    assert deliveries > 100_000


def test_a_limit_ends_the_search_and_says_so():
    found = Explorer(small_case("full", "compact"), processors=2).run(limit=1000)
    assert not found.complete
    assert found.states >= 1000
