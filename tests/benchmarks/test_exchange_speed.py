"""Gradient exchange of replicas: one message per neighbour against one all-reduce per expert, in turn in the same run.

    pytest tests/benchmarks/test_exchange_speed.py -n 0 -s

16 experts of 20,000 floats on 4 gloo processes: at least twice as fast (median of paired ratios).
"""

from __future__ import annotations

import numpy as np
import pytest
from ranks import run_ranks
from train_jobs import exchange_speed

LIMIT = 2.0

pytestmark = pytest.mark.benchmark


def test_neighbour_exchange() -> None:
    measured = run_ranks(exchange_speed, 4, 16, 20_000, 40)
    ratio = float(np.median([result["ratio"] for result in measured]))
    ms = {name: round(1e3 * measured[0][name], 2) for name in ("one_by_one", "flat_per_set", "neighbours")}
    print(f"ms {ms}, neighbours {ratio:.2f} times as fast as one by one, limit {LIMIT}")
    assert ratio >= LIMIT
