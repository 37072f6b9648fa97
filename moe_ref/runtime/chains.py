"""The execution models that the megakernel is compared with: chains of operations that a host issues.

    bulk      bulk-synchronous, Megatron-style: gate, permute, all-to-all, one launch per expert and product,
              all-to-all, unpermute. Every all-to-all is a barrier: nobody goes on before the slowest has arrived.
    chunked   COMET / FasterMoE-style: the tokens in a few chunks, so that the all-to-all of one chunk runs beside the
              products of another; fused and grouped launches, but still launches and barriers.

Both run the same tiles as the megakernel, at the same tile times. What differs is when a tile may start, what stands
idle meanwhile, and what is launched. An operation starts on the device when the one before it has ended (plus a gap)
and the host has issued it; a host that reads sizes back waits for the device. A chain captured as a CUDA graph pays
neither for issuing nor for reading back.

Letters: S tokens of a rank, H hidden, E experts, K choices per token, P ranks, X local expert slots, N routed rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moe_ref.runtime.callplan import CallPlan
from moe_ref.runtime.machine import Machine, Noise
from moe_ref.runtime.run import Interval
from moe_ref.runtime.workload import Workload

CHUNKS = 4
"""Parts of a batch in the chunked model."""


@dataclass
class Chain:
    """What a chain of operations took.

    Attributes:
        ends_us: per rank, since the first rank's start. busy_us: per rank, SM time in tiles, passes and the gate.
        gpu_ops: operations that one rank's host issued. payload_bytes: over links, both ways, all ranks.
        intervals: every operation, if recording was asked for.
    """

    ends_us: list[float]
    busy_us: list[float]
    gpu_ops: int
    payload_bytes: int
    intervals: list[Interval] = field(default_factory=list)


class _Ranks:
    """Hosts and device streams of all ranks. Stream 0 computes, stream 1 communicates."""

    def __init__(self, machine: Machine, noise: Noise, ranks: int, record: bool, captured: bool) -> None:
        self.machine, self.noise, self.record, self.captured = machine, noise, record, captured
        self.issue_us = 0.0 if captured else machine.issue_us
        self.host = np.array(noise.starts(ranks))
        self.free = np.zeros((2, ranks)) + self.host
        self.busy = np.zeros(ranks)
        self.ops = 0
        self.payload = 0
        self.intervals: list[Interval] = []
        self.speed = np.array([noise.speed(r) for r in range(ranks)])

    def op(
        self,
        name: str,
        work_us,
        busy_share: float = 1.0,
        after: np.ndarray | float = 0.0,
        stream: int = 0,
        launches: int = 1,
    ) -> np.ndarray:
        """Issue one operation (or `launches` that share the work) on every rank; returns when it ends.

        work_us: device time per rank [P] or one number. after: it also waits for this time per rank.
        """
        work = np.broadcast_to(np.asarray(work_us, dtype=float), self.speed.shape) * self.speed
        factors = np.array(self.noise.factors(1000 + self.ops, len(work)))
        for _ in range(launches):
            self.host = self.host + self.issue_us
            start = np.maximum(np.maximum(self.free[stream] + self.machine.gap_us, self.host), after)
            self._note(name, stream, start, work / launches * factors)
            self.free[stream] = start + work / launches * factors
            self.ops += 1
        self.busy += work * factors * busy_share * self.machine.sms
        return self.free[stream].copy()

    def all_to_all(
        self, name: str, bytes_PG: np.ndarray, node_of_P: np.ndarray, after: np.ndarray | float = 0.0, stream: int = 0
    ) -> np.ndarray:
        """A library's all-to-all: a barrier at its start and its end; bytes_PG from rank to rank."""
        machine = self.machine
        self.host = self.host + self.issue_us
        ready = np.maximum(np.maximum(self.free[stream] + machine.gap_us, self.host), after)
        remote = bytes_PG * (1 - np.eye(len(bytes_PG)))
        inside = node_of_P[:, None] == node_of_P[None, :]
        took = 0.0
        for share, rate in (
            (remote * inside, machine.collective_bytes_per_s),
            (remote * ~inside, machine.nic_bytes_per_s),
        ):
            took = max(took, 1e6 * max(share.sum(axis=0).max(), share.sum(axis=1).max()) / rate)
        if remote.shape[0] > 1:
            took += machine.collective_us * float(max(self.noise.factors(2000 + self.ops, 1)))
        start = np.full_like(ready, ready.max())
        self._note(name, stream, start, np.full_like(start, took))
        self.free[stream] = start + took
        self.ops += 1
        self.payload += int(remote.sum())
        return self.free[stream].copy()

    def sync(self, stream: int = 0) -> None:
        """The host waits for the device."""
        if self.captured:
            return
        self.host = np.maximum(self.host, self.free[stream]) + self.machine.sync_us

    def _note(self, name: str, stream: int, start: np.ndarray, duration: np.ndarray) -> None:
        if self.record:
            actor = ("compute stream", "communication stream")[stream]
            for rank, (s, d) in enumerate(zip(start.tolist(), duration.tolist(), strict=True)):
                self.intervals.append(Interval(rank, actor, name, s, d))

    def result(self) -> Chain:
        return Chain(self.free.max(axis=0).tolist(), self.busy.tolist(), self.ops, self.payload, self.intervals)


def _pass_us(machine: Machine, moved: np.ndarray | float) -> np.ndarray:
    return 1e6 * np.asarray(moved, dtype=float) / machine.pass_bytes_per_s


def _waves(tiles: np.ndarray, tile_us: np.ndarray, sms: int) -> np.ndarray:
    """Time of a launch with equal tiles: whole waves."""
    return np.ceil(tiles / sms) * tile_us


def _gemm(
    machine: Machine, call: CallPlan, sms: int, grouped: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Per rank and slot [P, X]: device time of both products as launches of their own, and SM time that tiles take.

    Grouped: one launch takes the tiles of all experts in common waves, so its time stands in slot 0.
    """
    shape = call.shape
    tiles_PX = call.slot_tiles()
    out = []
    for inner, columns in ((shape.hidden, shape.columns0), (shape.intermediate, shape.columns1)):
        each = np.zeros(tiles_PX.shape)
        for n in np.unique(tiles_PX[tiles_PX > 0]):
            each[tiles_PX == n] = machine.gemm_time(shape, inner, float(n), machine.tile_us, machine.chain_flops_share)
        count = tiles_PX * columns
        sm_time = count * each
        if grouped:
            total = count.sum(axis=1)
            mean = np.divide(sm_time.sum(axis=1), total, out=np.zeros(len(total)), where=total > 0)
            time = np.zeros(tiles_PX.shape)
            time[:, 0] = _waves(total, mean, sms) + machine.product_us
        else:
            time = _waves(count, each, sms)
        out += [time, sm_time.sum(axis=1)]
    return out[0], out[2], out[1], out[3]


def product_times(call: CallPlan, machine: Machine) -> tuple[np.ndarray, np.ndarray]:
    """Device time of the two grouped products of every rank, launches apart; us [P]."""
    time0, time1, _, _ = _gemm(machine, call, machine.sms, grouped=True)
    return time0[:, 0], time1[:, 0]


def _gate(ranks: _Ranks, machine: Machine, work: Workload, tokens_P: np.ndarray) -> None:
    """Router product, scores, top-k, counting: the operations that a library chain has before anything can move."""
    scores = tokens_P * work.experts * 4.0
    full = np.array([machine.gate_time(int(t), work.experts, work.shape) - machine.gate_us for t in tokens_P])
    ranks.op("router product", full)
    ranks.op("scores", _pass_us(machine, 2 * scores))
    ranks.op("top-k", _pass_us(machine, 2 * scores), launches=2)
    ranks.op("weights", _pass_us(machine, tokens_P * work.top_k * 16.0), launches=2)
    ranks.op("sort routes", _pass_us(machine, tokens_P * work.top_k * 8 * 16.0), launches=4)
    ranks.op("count rows", _pass_us(machine, tokens_P * work.top_k * 8.0), launches=2)


def bulk(
    call: CallPlan,
    machine: Machine,
    work: Workload,
    noise: Noise | None = None,
    record: bool = False,
    grouped: bool = False,
    captured: bool = False,
) -> Chain:
    """Bulk-synchronous execution of one call.

    Args:
        grouped: one launch per product for all local experts (torch grouped_mm) instead of one per expert.
        captured: as a CUDA graph.
    """
    ranks = _Ranks(machine, noise or Noise(), call.ranks, record, captured)
    tokens_P, rows_PG = np.array(call.tokens_P), call.rows_PG()
    node_P = np.arange(call.ranks) // machine.gpus_per_node
    row = call.shape.row_bytes
    sent, got = rows_PG.sum(axis=1), rows_PG.sum(axis=0)
    _gate(ranks, machine, work, tokens_P)
    if call.ranks > 1:
        ranks.all_to_all("counts", np.full(rows_PG.shape, 4.0 * call.slot_tiles().shape[1]), node_P)
        ranks.payload = 0
        ranks.sync()
    ranks.op("permute", _pass_us(machine, 2 * sent * row), launches=2)
    if call.ranks > 1:
        ranks.all_to_all("all-to-all out", rows_PG * row, node_P)
    ranks.op("rows by expert", _pass_us(machine, 2 * got * row), launches=2)
    _experts(ranks, machine, call, grouped, machine.sms)
    ranks.op("rows by source", _pass_us(machine, 2 * got * row), launches=2)
    if call.ranks > 1:
        ranks.all_to_all("all-to-all home", rows_PG.T * row, node_P)
    ranks.op("unpermute", _pass_us(machine, 2 * sent * row))
    ranks.op("weigh and sum", _pass_us(machine, (2 * sent + tokens_P) * row), launches=3)
    return ranks.result()


def _experts(
    ranks: _Ranks, machine: Machine, call: CallPlan, grouped: bool, sms: int, after: np.ndarray | float = 0.0
) -> None:
    """Both products and the activation between them."""
    time0, time1, busy0, busy1 = _gemm(machine, call, sms, grouped)
    hidden = call.rows_PG().sum(axis=0) * call.shape.element_size * (call.shape.up_columns + call.shape.intermediate)
    slots = [0] if grouped else range(time0.shape[1])
    for x in slots:
        ranks.op("product 0", time0[:, x], 0.0, after)
        ranks.op("activation", _pass_us(machine, hidden / len(slots)))
        ranks.op("product 1", time1[:, x], 0.0)
    ranks.busy += (busy0 + busy1) * ranks.speed


def chunked(
    call: CallPlan,
    machine: Machine,
    work: Workload,
    noise: Noise | None = None,
    record: bool = False,
    captured: bool = False,
) -> Chain:
    """Chunked overlap of one call: chunk i + 1 travels while chunk i is computed."""
    ranks = _Ranks(machine, noise or Noise(), call.ranks, record, captured)
    node_P, row = np.arange(call.ranks) // machine.gpus_per_node, call.shape.row_bytes
    tokens_P = np.array(call.tokens_P)
    _gate(ranks, machine, work, tokens_P)
    parts = [work.call(routing=part) for part in _chunks(call, CHUNKS)]
    sent = call.rows_PG().sum(axis=1)
    if call.ranks > 1:
        ranks.all_to_all("counts", np.full((call.ranks, call.ranks), 4.0 * call.slot_tiles().shape[1]), node_P)
        ranks.payload = 0
        ranks.sync()
    permuted = ranks.op("permute", _pass_us(machine, 2 * sent * row))
    sms = machine.sms - (machine.communication_sms if call.ranks > 1 else 0)
    arrived = [permuted] * CHUNKS
    if call.ranks > 1:
        arrived = [ranks.all_to_all(f"out {i}", p.rows_PG() * row, node_P, permuted, 1) for i, p in enumerate(parts)]
    done = []
    for i, part in enumerate(parts):
        time0, time1, busy0, busy1 = _gemm(machine, part, sms, grouped=True)
        ranks.op(f"product 0, chunk {i}", time0[:, 0], 0.0, arrived[i])
        done.append(ranks.op(f"product 1, chunk {i}", time1[:, 0], 0.0))
        ranks.busy += (busy0 + busy1) * ranks.speed
    home = done[-1]
    if call.ranks > 1:
        for i, part in enumerate(parts):
            home = ranks.all_to_all(f"home {i}", part.rows_PG().T * row, node_P, done[i], 1)
    ranks.op("weigh and sum", _pass_us(machine, (sent + tokens_P) * row), after=home)
    return ranks.result()


def _chunks(call: CallPlan, count: int) -> list[list[np.ndarray]]:
    """The routing of each rank, its tokens cut into `count` parts."""
    per_rank = [np.array_split(ids, count) for ids in call.routing]
    return [[parts[i] for parts in per_rank] for i in range(count)]
