"""The kernel's solver, run on 32 lanes in plain Python, divides rows exactly as `moe_ref.balance` does.

The source is the kernel's own; what the CuTe DSL brings is played by tests/warps.py. On GPUs: tests/gpu/solving.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import warps
from warps import Lanes, Memory

from moe_fast.kernel import limits, regions
from moe_fast.kernel.shapes import KernelShape
from moe_ref import balance
from moe_ref.balance import flow, routing
from moe_ref.config import MoEConfig
from moe_ref.placement import Placement

solver = warps.load(Path(limits.__file__).with_name("solver.py"))


class WarpSolver:
    """The kernel's solver for one placement, with slots and replicas to spare."""

    def __init__(self, placement: Placement, replicas: int, slots: int) -> None:
        config = MoEConfig(128, 64, placement.num_experts, 1, dtype="bfloat16")
        plain = KernelShape.from_config(config, 1)
        self.shape = replace(plain, ranks=placement.num_ranks, replicas=replicas, placed_slots=slots)
        k, w = self.shape, solver.words_of(self.shape)
        self.words = w
        self.memory = Memory(np.full(w.total, -7, dtype=np.int32))
        tables = regions.placement_tables(placement, replicas, slots)
        pairs = k.experts * replicas
        self.memory.words[w.rank : w.rank + pairs] = tables[:pairs]
        self.memory.words[w.held : w.held + k.ranks * slots] = tables[pairs : pairs + k.ranks * slots]
        self.memory.words[w.turn : w.rounds + 1] = tables[pairs + k.ranks * slots :]

    def solve(self, counts_PE: np.ndarray) -> tuple[np.ndarray, int]:
        """(rows of every replica, int64 [E, D], rows of the busiest rank)."""
        k, w, m = self.shape, self.words, self.memory
        pairs = k.experts * k.replicas
        # as replicas.divide_rows begins: a rank's own rows on its own replica
        for e in range(k.experts):
            for j in range(k.replicas):
                rank = m.words[w.rank + e * k.replicas + j]
                m.words[w.start + e * k.replicas + j] = counts_PE[rank, e] if rank >= 0 else 0
            solver.begin_tables(k, m, Lanes([e]))
            solver.begin_expert(k, m, Lanes([e]), Lanes([counts_PE[:, e].sum()]))
        # the planner's barrier between its threads and the warp
        solver.sync()
        most = int(solver.solve(k, m, Lanes(np.arange(warps.WIDTH))))
        solver.sync()
        return m.words[w.rows : w.rows + pairs].reshape(k.experts, k.replicas).astype(np.int64), most

    def quotas(self, counts_PE: np.ndarray) -> np.ndarray:
        """After `solve`, quotas int64 [P, E, D]: what each source sends to each replica."""
        k, w, m = self.shape, self.words, self.memory
        counts = Memory(counts_PE.astype(np.int32).ravel())
        quota = np.zeros((k.ranks, k.experts, k.replicas), dtype=np.int64)
        start = m.words.copy()
        for p in range(k.ranks):
            for e in range(k.experts):
                solver.route_expert(k, m, Lanes([e]), counts, Lanes([k.experts]), Lanes([p]))
            quota[p] = m.words[w.start : w.start + k.experts * k.replicas].reshape(k.experts, k.replicas)
            # route_expert leaves a rank's quotas where the start was: put the start back for the next rank
            m.words[w.start : w.start + k.experts * k.replicas] = start[w.start : w.start + k.experts * k.replicas]
        return quota


def random_placement(generator: np.random.Generator, experts: int, ranks: int, most: int) -> Placement:
    """Every expert on 1 to `most` ranks, in any order."""
    return Placement.from_replicas(
        [generator.permutation(ranks)[: generator.integers(1, most + 1)] for _ in range(experts)], ranks
    )


def random_counts(generator: np.random.Generator, batches: int, ranks: int, experts: int) -> np.ndarray:
    """Skewed loads, some experts and some ranks without any."""
    share = np.arange(1, experts + 1) ** -generator.uniform(0, 2.5)
    generator.shuffle(share)
    counts = generator.poisson(share / share.sum() * generator.integers(1, 4000), (batches, ranks, experts))
    counts[generator.random(counts.shape) < generator.choice([0, 0.3])] = 0
    counts[0, generator.integers(ranks)] = 0
    return counts


SIZES = [(8, 2, 2), (32, 2, 2), (16, 4, 2), (32, 8, 2), (12, 5, 3), (24, 6, 6), (64, 8, 3), (40, 16, 2), (6, 32, 32)]


@pytest.mark.parametrize(("experts", "ranks", "most"), SIZES)
def test_rows_are_those_of_flow(experts, ranks, most):
    """Random batches on random placements: the same rows for every replica, the same largest load."""
    generator = np.random.default_rng(experts * ranks + most)
    placements = [random_placement(generator, experts, ranks, most) for _ in range(6)]
    if ranks == 2:
        placements[0] = Placement.from_replicas([[0, 1]] * experts, 2)
    slots = max(placement.slots for placement in placements)
    for placement in placements:
        warp = WarpSolver(placement, most, slots)
        for counts in random_counts(generator, 6, ranks, experts):
            want = flow.solve(counts.sum(axis=0), placement, routing.local_rows(counts, placement))
            rows, largest = warp.solve(counts)
            assert np.array_equal(rows[:, : want.rows_ED.shape[1]], want.rows_ED), (placement, counts.tolist())
            assert not rows[:, want.rows_ED.shape[1] :].any()
            assert largest == want.max_load


@pytest.mark.parametrize(("experts", "ranks", "most"), [(16, 4, 2), (12, 5, 3)])
def test_quotas_are_those_of_the_plan(experts, ranks, most):
    """What every source sends to every replica."""
    generator = np.random.default_rng(experts)
    placement = random_placement(generator, experts, ranks, most)
    warp = WarpSolver(placement, placement.max_replicas, placement.slots)
    for counts in random_counts(generator, 4, ranks, experts):
        warp.solve(counts)
        assert np.array_equal(warp.quotas(counts), balance.schedule(counts, placement).quota_PED)


def test_more_slots_than_lanes():
    """A rank's slots are looked at 32 at a time; rows that arrive while one part is looked at count in the next."""
    generator = np.random.default_rng(2)
    placement = random_placement(generator, 128, 2, 2)
    assert placement.slots > 64
    warp = WarpSolver(placement, 2, placement.slots)
    for counts in random_counts(generator, 6, 2, 128):
        want = flow.solve(counts.sum(axis=0), placement, routing.local_rows(counts, placement))
        assert np.array_equal(warp.solve(counts)[0], want.rows_ED)


def test_a_solve_is_short():
    """Shuffles, votes, sums over the warp and loads of 64 experts on two of 8 ranks each."""
    generator = np.random.default_rng(3)
    placement = Placement.from_replicas([generator.permutation(8)[:2] for _ in range(64)], 8)
    warp, most = WarpSolver(placement, 2, placement.slots), 0
    for counts in generator.poisson(100, (5, 8, 64)):
        warps.counts.clear()
        warp.solve(counts)
        most = max(most, sum(warps.counts.values()))
    assert most < 1300


def test_a_read_without_a_barrier_shows():
    """Of what another lane wrote or added; a lane's own writes it sees at once."""
    lanes, memory = Lanes(np.arange(warps.WIDTH)), Memory(np.zeros(64, dtype=np.int32))
    solver.put_where(memory, lanes < 8, lanes, lanes)
    assert (memory[lanes].values[:8] == np.arange(8)).all()
    with pytest.raises(AssertionError, match="without a barrier"):
        memory[Lanes(np.full(warps.WIDTH, 3))]
    with pytest.raises(AssertionError, match="without a barrier"):
        solver.put_where(memory, lanes == 5, 3, 1)
    solver.sync()
    assert (memory[Lanes(np.full(warps.WIDTH, 3))].values == 3).all()
    with pytest.raises(AssertionError, match="several lanes"):
        solver.put_where(memory, lanes < 2, 4, 1)
    solver.add_where(memory, lanes < 2, 3, 1)
    with pytest.raises(AssertionError, match="without a barrier"):
        memory[Lanes(np.full(warps.WIDTH, 3))]


def test_a_branch_that_lanes_take_differently_shows():
    with pytest.raises(AssertionError, match="differently"):
        bool(Lanes(np.arange(32)) < 3)


def test_solver_words_are_what_the_border_counts():
    for experts, replicas, ranks, slots in ((8, 2, 2, 8), (256, 2, 8, 64), (32, 32, 32, 32)):
        assert solver.Words.of(experts, replicas, ranks, slots).total == limits.solver_words(
            experts, replicas, ranks, slots
        )
