"""Processor time of placements at the largest size that is tested, 64 ranks x 256 experts: at most 2 s each.

    pytest tests/benchmarks/test_placement_speed.py -n 0 -s

The default run has the same cases with a limit five times as high, so that cores shared with others don't fail it.
"""

from __future__ import annotations

import time

import pytest

from moe_ref import cli
from moe_ref.placement import symmetric

LIMIT_S = 2.0
RANKS, EXPERTS = 64, 256

pytestmark = pytest.mark.benchmark


@pytest.mark.parametrize("replicas", [2, 3, 4, 8])
def test_symmetric(replicas: int) -> None:
    start = time.process_time()
    symmetric(RANKS, EXPERTS, replicas)
    seconds = time.process_time() - start
    print(f"symmetric({RANKS}, {EXPERTS}, {replicas}): {seconds:.2f} s, limit {LIMIT_S} s")
    assert seconds <= LIMIT_S


def test_command(capfd: pytest.CaptureFixture) -> None:
    def run(ranks: int, experts: int) -> None:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["place", "--ranks", str(ranks), "--experts", str(experts), "--replicas", "2", "--json"])
        assert stopped.value.code == 0

    run(8, 32)  # imports and compiled code, but no placement of this size
    start = time.process_time()
    run(RANKS, EXPERTS)
    seconds = time.process_time() - start
    capfd.readouterr()
    with capfd.disabled():
        print(f"place --replicas 2: {seconds:.2f} s, limit {LIMIT_S} s")
    assert seconds <= LIMIT_S
