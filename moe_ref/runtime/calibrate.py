"""Fit a machine's parameters to recorded runs.

    1. "tiles" and "megakernel" records fit flops_16, exposed and remote_us (what a persistent kernel's tiles take),
    2. "products" records fit chain_flops_share and product_us (a library's grouped products),
    3. "chain" records fit issue_us, pass_bytes_per_s and sync_us (what a host-driven chain adds).

Everything else is measured on its own or stated by a data sheet and stays. Each group is a least-squares fit of
log(simulated / recorded) over the logarithms of its parameters (Gauss-Newton with damping): relative errors count, and
parameters stay positive. A group without records is left alone.

Letters: P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_ref.errors import UsageError
from moe_ref.runtime.callplan import CallPlan
from moe_ref.runtime.chains import bulk, product_times
from moe_ref.runtime.machine import Machine
from moe_ref.runtime.recorded import Record
from moe_ref.runtime.simulator import Simulator
from moe_ref.runtime.workload import Workload

GROUPS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("tiles", "megakernel"), ("flops_16", "exposed", "remote_us")),
    (("products",), ("chain_flops_share", "product_us")),
    (("chain",), ("issue_us", "pass_bytes_per_s", "sync_us")),
)
"""(kinds of records, parameters that they fit), in the order in which they are fitted."""


@dataclass(frozen=True)
class Calibration:
    """A fitted machine and how well it fits.

    Attributes:
        machine: with fitted parameters.
        simulated_ms: per record, in the order given.
        errors: per record, simulated / recorded - 1.
    """

    machine: Machine
    records: tuple[Record, ...]
    simulated_ms: tuple[float, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        return tuple(s / r.ms - 1 for s, r in zip(self.simulated_ms, self.records, strict=True))

    def summary(self) -> dict[str, dict[str, float]]:
        """Per kind of record: how many, mean and largest absolute relative error, mean signed relative error."""
        out = {}
        for kind in dict.fromkeys(r.kind for r in self.records):
            errors = np.array([e for e, r in zip(self.errors, self.records, strict=True) if r.kind == kind])
            out[kind] = {
                "records": len(errors),
                "mean_abs": float(np.abs(errors).mean()),
                "max_abs": float(np.abs(errors).max()),
                "mean": float(errors.mean()),
            }
        return out


def balanced_routing(work: Workload) -> list[np.ndarray]:
    """Every expert gets the same number of rows, to one: token s of every rank takes experts s * K, s * K + 1, ..."""
    ids = np.arange(work.tokens * work.top_k).reshape(work.tokens, work.top_k) % work.experts
    return [ids for _ in range(work.ranks)]


def simulate_ms(record: Record, machine: Machine, call: CallPlan | None = None) -> float:
    """What the model gives for a record; milliseconds. call: its geometry, if it is at hand."""
    work = record.work
    if call is None:
        call = _geometry(record)
    if record.kind == "products":
        time0, time1 = product_times(call, machine)
        return float((time0 + time1).max()) / 1e3
    if record.kind == "chain":
        return max(bulk(call, machine, work, grouped=True).ends_us) / 1e3
    if record.kind == "tiles":
        # No gate; on one rank the rows lay in place before the launch; the time ends when the last result is home.
        bare = machine.replace(gate_us=0.0, plan_us=0.0)
        if work.ranks == 1:
            bare = bare.replace(copy_bytes_per_s=1e18)
        run = Simulator([call], bare, 1).run()
        return run.last_put_us / 1e3
    return Simulator([call], machine, work.experts).run().latency_us() / 1e3


def _geometry(record: Record) -> CallPlan:
    """Products and tiles were recorded with balanced rows, whole layers with a random router."""
    balanced = record.kind in ("products", "tiles")
    return record.work.call(routing=balanced_routing(record.work) if balanced else None)


def calibrate(machine: Machine, records: Sequence[Record]) -> Calibration:
    """Fit `machine` to `records` (bf16; the fp32 rate keeps its ratio to the 16-bit one).

    Raises:
        UsageError: no records, or fewer of a group than it has parameters.
    """
    if not records:
        raise UsageError("calibrate needs records; see moe_ref.runtime.recorded for the form")
    calls = [_geometry(r) for r in records]
    for kinds, names in GROUPS:
        chosen = [i for i, r in enumerate(records) if r.kind in kinds]
        if not chosen:
            continue
        if len(chosen) < len(names):
            raise UsageError(f"{len(chosen)} records of kind {'/'.join(kinds)} can't fit {', '.join(names)}; give more")

        def residuals(m: Machine, chosen: list[int] = chosen) -> np.ndarray:
            return np.array([np.log(simulate_ms(records[i], m, calls[i]) / records[i].ms) for i in chosen])

        ratio = machine.flops_32 / machine.flops_16
        machine = _fit(machine, names, residuals)
        machine = machine.replace(flops_32=machine.flops_16 * ratio)
    simulated = tuple(simulate_ms(r, machine, c) for r, c in zip(records, calls, strict=True))
    return Calibration(machine, tuple(records), simulated)


def _fit(machine: Machine, names: Sequence[str], residuals: Callable[[Machine], np.ndarray]) -> Machine:
    """Damped Gauss-Newton in log parameters; stops when a step gains less than a millionth of the squared error."""

    def at(logs: np.ndarray) -> Machine:
        return replace(machine, **{n: float(v) for n, v in zip(names, np.exp(logs), strict=True)})

    logs = np.log([getattr(machine, n) for n in names])
    error = residuals(at(logs))
    damping = 1e-3
    for _ in range(20):
        slope = np.stack([(residuals(at(logs + 0.02 * unit)) - error) / 0.02 for unit in np.eye(len(names))], axis=1)
        normal = slope.T @ slope
        step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), slope.T @ error)
        trial = logs + np.clip(step, -0.7, 0.7)
        new = residuals(at(trial))
        gain = float(error @ error - new @ new)
        if gain > 0:
            logs, error, damping = trial, new, damping / 3
            if gain < 1e-6 * float(error @ error):
                break
        else:
            damping *= 10
            if damping > 1e3:
                break
    return at(logs)
