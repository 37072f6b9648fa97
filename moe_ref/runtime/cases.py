"""Small cases for the checker, and the protocol's rules broken one at a time.

A case is 2 ranks, 2 experts, 2 tokens per rank with K = 2 choices, row tiles of 2 rows, 2 column tiles per product, two
successive calls.

    full      every token goes to both experts, so each rank has 2 x 2 tiles in either call
    uneven    in the first call rank 0 keeps all its rows, and can run ahead into the second
"""

from __future__ import annotations

import numpy as np

from moe_ref.errors import UsageError
from moe_ref.replicas import Placement
from moe_ref.runtime.callplan import CallPlan, make_call
from moe_ref.runtime.messages import Rules
from moe_ref.runtime.tasks import TileShape

SHAPE = TileShape(hidden=8, intermediate=8, top_k=2, tile_rows=2, tile_columns=4, token_rows=2)

_FULL = ([[0, 1], [1, 0]], [[0, 1], [1, 0]])
_AHEAD = ([[0, 0], [0, 0]], [[1, 1], [1, -1]])
_MIXED = ([[0, 1], [1, 0]], [[0, 1], [1, 1]])

CASES = {"full": (_FULL, _FULL), "uneven": (_AHEAD, _MIXED)}
"""Per call and rank the expert of every (token, choice); -1 is masked."""

BROKEN = {
    "signal-before-payload": Rules(payload_first=False),
    "one-side": Rules(sides=1, row_sides=1),
    "reset-epoch": Rules(keep_counters=False),
    "lost-wake-up": Rules(recheck=False),
    "forgotten-idle": Rules(keep_idle=False),
    "total-too-small": Rules(extra_tasks=-1),
    "total-too-large": Rules(extra_tasks=1),
}
"""Bugs by name; every one is found in the uneven case, in either layout."""


def small_case(name: str, layout: str = "compact") -> list[CallPlan]:
    """The calls of a case.

    Raises:
        UsageError: no such case or layout.
    """
    if name not in CASES:
        raise UsageError(f"case {name!r} is not known, expected one of {', '.join(CASES)}")
    if layout not in ("compact", "fixed"):
        raise UsageError(f"layout is {layout!r}, expected compact or fixed")
    capacity = {"full": 2, "uneven": 4}[name] if layout == "fixed" else None
    calls = []
    for epoch, ids in enumerate(CASES[name]):
        routing = [np.array(rank, dtype=np.int64) for rank in ids]
        calls.append(make_call(routing, Placement.contiguous(2, 2), SHAPE, capacity=capacity, epoch=epoch))
    return calls
