"""The kernel's solver, compiled by the DSL and run on the host, divides rows exactly as `moe_ref.balance` does.

The same traced code runs in the kernel with 32 lanes; here with one.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from moe_fast import compiler
from moe_fast.kernel import shapes
from moe_fast.kernel.shapes import KernelShape
from moe_ref import balance
from moe_ref.config import MoEConfig
from moe_ref.errors import BackendUnavailable
from moe_ref.placement import Placement

try:
    cute = compiler.import_cutlass()
except BackendUnavailable as error:
    pytest.skip(f"the CuTe DSL (extra [fused]) is not installed: {error}", allow_module_level=True)

import cutlass
from cutlass import Int32, Int64

from moe_fast.kernel import solver


class HostSolver:
    """The kernel's solver for one shape, as a host function."""

    def __init__(self, experts: int, ranks: int, replicas: int, slots: int) -> None:
        config = MoEConfig(128, 64, experts, 1, dtype="bfloat16")
        plain = KernelShape.from_config(config, 1)
        self.shape = shape = replace(plain, ranks=ranks, replicas=replicas, placed_slots=slots)
        self.words = solver.words_of(shape)

        @cute.jit
        def run(memory: Int64, counts_at: Int64, quota_at: Int64, cases: Int32):
            k, w = shape, solver.words_of(shape)
            pairs = k.experts * k.replicas

            def array(address, size):
                return cute.make_tensor(
                    cute.make_ptr(Int32, address, cute.AddressSpace.generic, assumed_align=4), cute.make_layout(size)
                )

            m = array(memory, w.total)
            for case in cutlass.range(cases):
                counts = array(counts_at + Int64(case) * (4 * k.ranks * k.experts), k.ranks * k.experts)
                quota = array(quota_at + Int64(case) * (4 * k.ranks * pairs), k.ranks * pairs)
                for e in cutlass.range(k.experts):
                    total = Int32(0)
                    for p in cutlass.range_constexpr(k.ranks):
                        total += counts[p * k.experts + e]
                    for j in cutlass.range_constexpr(k.replicas):
                        rank = m[w.rank + e * k.replicas + j]
                        m[w.start + e * k.replicas + j] = Int32(0)
                        if rank >= 0:
                            m[w.start + e * k.replicas + j] = counts[rank * k.experts + e]
                    solver.begin_tables(k, m, e)
                    solver.begin_expert(k, m, e, total)
                solver.solve(k, m, Int32(0), 1)
                for p in cutlass.range(k.ranks):
                    for e in cutlass.range(k.experts):
                        # route_expert leaves a rank's quotas where the start was: put the start back for the next rank
                        for j in cutlass.range_constexpr(k.replicas):
                            quota[p * pairs + e * k.replicas + j] = m[w.start + e * k.replicas + j]
                        solver.route_expert(k, m, e, counts, Int32(k.experts), p)
                        for j in cutlass.range_constexpr(k.replicas):
                            v = e * k.replicas + j
                            mine, old = m[w.start + v], quota[p * pairs + v]
                            quota[p * pairs + v] = mine
                            m[w.start + v] = old

        self.run = cute.compile(run, Int64(0), Int64(0), Int64(0), Int32(1))

    def plan(self, counts_NPE: np.ndarray, placement: Placement) -> np.ndarray:
        """Quotas of many batches on one placement, int64 [N, P, E, D]."""
        k, w = self.shape, self.words
        memory = np.full(w.total, -7, dtype=np.int32)
        tables = shapes.placement_tables(placement, k.replicas, k.slots)
        pairs = k.experts * k.replicas
        memory[w.rank : w.rank + pairs] = tables[:pairs]
        memory[w.held : w.held + k.ranks * k.slots] = tables[pairs:]
        counts = np.ascontiguousarray(counts_NPE, dtype=np.int32)
        quota = np.zeros((len(counts), k.ranks, k.experts, k.replicas), dtype=np.int32)

        def address(array):
            return Int64(array.ctypes.data_as(ctypes.c_void_p).value)

        self.run(address(memory), address(counts), address(quota), Int32(len(counts)))
        return quota.astype(np.int64)


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


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "ranks", "most"), SIZES)
def test_plans_are_those_of_flow(experts, ranks, most):
    """120 random batches each, on 12 placements: the same quotas for every (source, expert, replica)."""
    generator = np.random.default_rng(experts * ranks + most)
    placements = [random_placement(generator, experts, ranks, most) for _ in range(12)]
    if ranks == 2:
        placements[0] = Placement.from_replicas([[0, 1]] * experts, 2)
    host = HostSolver(experts, ranks, most, max(placement.slots for placement in placements))
    for placement in placements:
        counts = random_counts(generator, 10, ranks, experts)
        got = host.plan(counts, placement)
        for batch, quota in zip(counts, got, strict=True):
            want = balance.schedule(batch, placement).quota_PED
            assert np.array_equal(quota[..., : want.shape[2]], want), (placement, batch.tolist())
            assert not quota[..., want.shape[2] :].any()


def test_solver_words_are_what_the_border_counts():
    for experts, replicas, ranks, slots in ((8, 2, 2, 8), (256, 2, 8, 64), (32, 32, 32, 32)):
        assert solver.Words.of(experts, replicas, ranks, slots).total == shapes.solver_words(
            experts, replicas, ranks, slots
        )
