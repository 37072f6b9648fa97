"""One layer's kernel with its buffers: what a call needs, allocated once.

The engine knows addresses and sizes, not layers: `backend.py` maps a `MoELayer` onto it.

Letters: S tokens of a rank, H hidden, D intermediate, E experts, K choices, P ranks, R rows of the dispatch buffer.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_fast import compiler
from moe_fast.heap import Heap
from moe_fast.kernel.constants import HOME_BITS, TILE_ROWS, PlanWord, Status
from moe_fast.kernel.regions import (
    Region,
    buffer_rows,
    counter_words,
    heap_regions,
    placement_tables,
    wire_flags,
    wire_words,
    workspace_regions,
)
from moe_fast.kernel.shapes import KernelShape, dropped
from moe_ref.errors import UsageError
from moe_ref.layout import ceil_div, fixed_row
from moe_ref.placement import Placement

TRACKS, EVENTS = 5, 512
"""Tracks of a block and events of a track in traced variants: those of `signals.TRACKS` and `signals.EVENTS`."""


def trace_words(blocks: int) -> int:
    """int64 words of the trace: per block and track a header and EVENTS events of three words."""
    return blocks * TRACKS * (EVENTS + 1) * 3


def router_parts(router_EH: Tensor, dtype: torch.dtype) -> Tensor:
    """A router of fp32 as the kernel takes it: summands side by side, [E, 3 H] in 16 bits for a layer of 16 bits, and
    [E, 2 H], what TF32 has of it and the rest, for a layer of fp32.

    In bfloat16 their sum is the router's every bit; in float16 it is what lies above 2**-25.
    """
    rest, parts = router_EH.float(), []
    if dtype == torch.float32:
        high = (rest.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
        return torch.cat([high, rest - high], dim=1)
    for _ in range(3):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return torch.cat(parts, dim=1)


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""What torch's own compiled code asks for the stream, without making an object of it; not in builds for CPUs."""


def current_stream(device: torch.device) -> int:
    """Address of a device's current CUDA stream."""
    if _raw_stream is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)


DEADLINE_S = 10.0
"""Default deadline of every wait inside the kernel."""
LEAST_BLOCKS = {"tickets": 1, "os_block": 2, "spare_warps": 5}
"""Blocks that a launch has at least, by scheduler: one block whose spare warp sends rows, and what the scheduler takes:
the OS block, or the spare warps of the first four blocks (one Scheduler, three Subscribers)."""


def blocks_per_rank(multiprocessors: int, ranks: int, scheduler: str) -> int:
    """Blocks of each rank's kernel where `ranks` ranks share a GPU: SMs // P, for a block takes a whole SM.

    Every rank's kernel waits for all others, so all of them must be on the GPU at one time.

    Raises:
        UsageError: too many ranks for that, or for the scheduler.
    """
    blocks, least = multiprocessors // ranks, LEAST_BLOCKS[scheduler]
    if blocks < least:
        raise UsageError(
            f"{ranks} ranks on a GPU of {multiprocessors} SMs leave {blocks} block{'s' * (blocks != 1)} for each "
            f"rank's kernel, scheduler={scheduler!r} needs {least}: at most {multiprocessors // least} ranks"
        )
    return blocks


class MegakernelError(RuntimeError):
    """The kernel reported a failure."""


class MegakernelTimeout(MegakernelError):
    """A wait inside the kernel ran past its deadline: names rank, role, what it waited for and how far that was.

    Later calls are refused until `Engine.recover` was called on every rank.
    """


class MegakernelInputError(MegakernelError, ValueError):
    """Input that only the device could see to be wrong: a logit that isn't finite, an expert id out of range."""


CHANGING = (
    "stream", "x", "y", "tokens", "given", "given_expert", "given_weight", "router", "first", "second", "slots", "bias",
    "router_bias", "first_bias", "second_bias", "shared_first", "shared_second", "shared_gate", "deadline", "placement",
    "planned", "quota", "capacity",
)  # fmt: skip
"""Arguments that may differ from one launch of an engine to the next, in the order in which `Call` takes them."""


class Call:
    """The kernel's host function with its arguments kept in place: a call writes those that may change, and goes.

    Building 45 argument objects for each call took 0.23 ms of host time, more than small layers take on the device. The
    DSL's own caller then still lists the addresses of all of them each time; here the list is made once, and what may
    change lies side by side, written in one go.
    """

    def __init__(self, function: Any, fixed: dict[str, int]) -> None:
        import cuda.bindings.driver as cuda
        from cutlass import Int32, Int64

        from moe_fast.kernel.signals import Args, Operands

        kinds = {name: Int64 if "Int64" in str(kind) else Int32 for name, kind in Args.__annotations__.items()}
        operands = dict.fromkeys(Operands._fields, Int64)
        more = {"slots": Int32, "grid": Int32}
        given: list[dict[str, Any]] = [
            {name: kind(fixed.get(name, 0)) for name, kind in part.items()} for part in (kinds, operands, more)
        ]
        arguments = (Args(**given[0]), Operands(**given[1]), *given[2].values(), cuda.CUstream(0))
        owners, adapted = function.execution_args.generate_execution_args(arguments, {})
        addresses = list(owners)
        names = {**kinds, **operands, **more, "stream": Int64}
        for (name, kind), place in zip(names.items(), addresses, strict=True):
            address: Any = place.value if isinstance(place, ctypes.c_void_p) else place
            value = (ctypes.c_int64 if kind is Int64 else ctypes.c_int32).from_address(address).value
            if value != fixed.get(name, 0):
                raise RuntimeError(f"argument {name} of the kernel isn't where the DSL said it is")
        # cells of 64 bits; of those of Int32 the kernel's host function reads the lower half, which comes first
        self._cells = (ctypes.c_int64 * len(CHANGING))()
        order = list(names)
        for i, name in enumerate(CHANGING):
            addresses[order.index(name)] = ctypes.addressof(self._cells) + 8 * i
        # what JitExecutor.run_compiled_program does, apart from the call; nobody else uses this executor
        executor = function.to(None)
        self._packed = executor._get_invoke_packed_args(addresses)
        self._run, self._result = executor.capi_func, executor.cuda_result
        # each of the DSL's addresses owns the value there: what it keeps isn't in the arguments
        self._keep = (function, executor, arguments, owners, adapted)
        self._write = struct.Struct(f"<{len(CHANGING)}q").pack_into

    def __call__(self, stream: int, values: tuple[int, ...]) -> None:
        """Launch on a stream, with the other values of `CHANGING` in its order.

        Raises:
            MegakernelError: CUDA refused the launch.
        """
        self._write(self._cells, 0, stream, *values)
        self._run(self._packed)
        if self._result.value:
            from cuda.bindings.runtime import cudaError_t

            raise MegakernelError(f"the kernel was not launched: {cudaError_t(self._result.value).name}")


@dataclass
class Buffers:
    """What the last call left in memory, for comparison.

    rows_RH: one side of the dispatch buffer, in the fixed layout all of it. hidden_RD: in the order of the row tiles.
    returned_NH: row (token, choice); of masked routes anything. before_PE, chosen_SK: before the capacity. With puts
    returned_NH is a copy: results lie line by line, by place in the send list.

    In the wire format "tokens" there is no returned_NH but results_RH, in the order of the row tiles; partial_NH, row
    (token, rank), what came back, zeros where nothing did; sent_PG: tokens from rank to rank, each counted once.
    """

    expert_SK: Tensor
    weight_SK: Tensor
    counts_PE: Tensor
    tokens_P: Tensor
    rows_RH: Tensor
    hidden_RD: Tensor
    returned_NH: Tensor | None
    row_tiles: int
    before_PE: Tensor
    chosen_SK: Tensor
    shared_SH: Tensor | None = None
    results_RH: Tensor | None = None
    partial_NH: Tensor | None = None
    sent_PG: Tensor | None = None


class Engine:
    """Compiled kernel, symmetric heap, workspace. For one thread at a time: calls share arguments and buffers.

    Args:
        shape: the variant.
        heap: symmetric memory of `heap_bytes(shape, max_tokens)` bytes.
        max_tokens: largest S.
        deadline_s: of every wait in the kernel.
        blocks: of the launch, which are all on the GPU at one time; by default all SMs, or this rank's share of them
            where several ranks' heaps are on one GPU. No result depends on it.

    Raises:
        UsageError: the device isn't a Hopper GPU, the heap is too small, there are too few blocks, or the ranks of one
            GPU were to put with signals.
    """

    _ids: Tensor | None = None
    """Where the ids of calls of one S lie, int32 [S, K]."""

    def __init__(
        self,
        shape: KernelShape,
        heap: Heap,
        max_tokens: int,
        deadline_s: float = DEADLINE_S,
        blocks: int | None = None,
    ) -> None:
        self.shape, self.heap, self.max_tokens = shape, heap, max_tokens
        self.deadline_s = deadline_s
        device = heap.device
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) != (9, 0):
            raise UsageError(
                f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; the megakernel uses "
                "wgmma and TMA and needs 9.0 (H100, H200)"
            )
        if shape.put and heap.on_one_gpu:
            raise UsageError('transport="put_signal" is between GPUs; ranks on one GPU store into each other: "stores"')
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self.blocks = blocks_per_rank(multiprocessors, heap.ranks if heap.on_one_gpu else 1, shape.scheduler)
        if blocks is not None:
            if not LEAST_BLOCKS[shape.scheduler] <= blocks <= self.blocks:
                raise UsageError(
                    f"{blocks} blocks were asked for, expected {LEAST_BLOCKS[shape.scheduler]} to {self.blocks} with "
                    f"scheduler={shape.scheduler!r}"
                )
            self.blocks = blocks
        self.in_heap, heap_bytes = heap_regions(shape, max_tokens)
        if heap.size < heap_bytes:
            raise UsageError(
                f"the symmetric heap has {heap.size} bytes, this layer needs {heap_bytes}; lower max_tokens"
            )
        self.in_workspace, size = workspace_regions(shape, max_tokens, self.blocks)
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        self.record = torch.zeros(8, dtype=torch.int32, pin_memory=True)
        words: Any = self.record.numpy()
        self._reported = memoryview(words)
        # one call's events: read_timeline clears them, so trace one call at a time
        self.trace = torch.zeros(trace_words(self.blocks) if shape.trace else 16, dtype=torch.int64, device=device)
        self.rows = buffer_rows(shape, max_tokens)
        self.counter_words = counter_words(shape, max_tokens, self.blocks)
        self.calls = 0
        self._tables: dict[Placement, Tensor] = {}
        self._last_tables: tuple[Placement, Tensor] | None = None
        self._spare, self._device = self.workspace.data_ptr(), device
        self._placed, self._drops = shape.placed, shape.drops
        self.function = compiler.load(shape)
        if shape.put and heap.ranks > 1:
            heap.link(self.function, compiler.nvshmem_of(shape))
        self._call = Call(self.function, self._fixed_arguments())

    def address(self, name: str) -> int:
        """Address of a workspace region."""
        return self.workspace.data_ptr() + self.in_workspace[name].offset

    def _fixed_arguments(self) -> dict[str, int]:
        at = {f"{name}_at": region.offset for name, region in self.in_heap.items()}
        names = (
            "expert weight index send histogram row_shift list_start plan tile_slot tile_rows arrived_target "
            "back_target counters control hidden shared_hidden shared_rows quota_end list_shift tile_at where"
        )
        at |= {name: self.address(name) for name in names.split()}
        return at | {
            "grid": self.blocks,
            "peers": self.heap.peers.data_ptr(),
            "heap": self.heap.base,
            "record": self.record.data_ptr(),
            "trace": self.trace.data_ptr(),
            "max_tokens": self.max_tokens,
            "rows": self.rows,
            "rank": self.heap.rank,
            "counter_words": self.counter_words,
            "token_tiles": ceil_div(max(self.max_tokens, 1), 32),
            "slot_capacity": self.shape.slot_capacity(self.max_tokens),
        }

    def launch(
        self,
        x_SH: Tensor,
        router_EH: Tensor,
        first_XUH: Tensor,
        second_XHD: Tensor,
        *,
        selection_bias_E: Tensor | None = None,
        router_bias_E: Tensor | None = None,
        first_bias_XU: Tensor | None = None,
        second_bias_XH: Tensor | None = None,
        shared_first_VH: Tensor | None = None,
        shared_second_HW: Tensor | None = None,
        shared_gate_1H: Tensor | None = None,
        expert_SK: Tensor | None = None,
        weight_SK: Tensor | None = None,
        placement: Placement | None = None,
        quota_PED: Tensor | None = None,
        out: Tensor | None = None,
        together: list[Callable[[int], None]] | None = None,
    ) -> Tensor:
        """Enqueue one forward on the current stream; one kernel, nothing else. Returns y [S, H].

        All tensors are contiguous and of the shape's dtype, but selection_bias fp32, and a router of fp32 (that of a
        float32 layer, too) as `router_parts` makes it. Biases and the shared expert's weights (of width W) are for
        shapes that have them. expert_SK int64 and weight_SK fp32 hand the routing in. placement: which slot holds what,
        for shapes with replicas; its first launch copies its tables to the device. quota_PED: int32 on the device, the
        same on every rank: a plan instead of the kernel's own; it must stay as it is until the call has ended.
        together: instead of enqueuing the kernel append a function that does it, given a stream's handle: of ranks on
        one GPU none may be launched before all can be, see `local_ranks.side_by_side`.

        Raises:
            UsageError: S over max_tokens, or a placement or plan that isn't of the shape's sizes.
            MegakernelError: an earlier call failed.
        """
        self.raise_if_failed()
        tokens = x_SH.size(0)
        if tokens > self.max_tokens:
            raise UsageError(f"S is {tokens} tokens, but the buffers were sized for max_tokens={self.max_tokens}")
        y_SH = torch.empty_like(x_SH) if out is None else out
        at, planned, quota = 0, 0, 0
        if self._placed or placement is not None or quota_PED is not None:
            at, planned, quota = self._replica_arguments(placement, quota_PED)
        spare = self._spare
        values = (
            x_SH.data_ptr() if tokens else spare,
            y_SH.data_ptr() if tokens else spare,
            tokens,
            0 if expert_SK is None else 1,
            spare if expert_SK is None else expert_SK.data_ptr(),
            spare if weight_SK is None else weight_SK.data_ptr(),
            router_EH.data_ptr(),
            # a rank without experts describes memory that nothing will read
            first_XUH.data_ptr() or spare,
            second_XHD.data_ptr() or spare,
            first_XUH.size(0) or 1,
            spare if selection_bias_E is None else selection_bias_E.data_ptr(),
            spare if router_bias_E is None else router_bias_E.data_ptr(),
            spare if first_bias_XU is None else first_bias_XU.data_ptr(),
            spare if second_bias_XH is None else second_bias_XH.data_ptr(),
            spare if shared_first_VH is None else shared_first_VH.data_ptr(),
            spare if shared_second_HW is None else shared_second_HW.data_ptr(),
            spare if shared_gate_1H is None else shared_gate_1H.data_ptr(),
            int(self.deadline_s * 1e9),
            at,
            planned,
            quota,
            self.shape.capacity(tokens) if self._drops else 0,
        )
        if together is None:
            self._call(current_stream(self._device), values)
            self.calls += 1
        else:
            tensors = (
                x_SH, router_EH, first_XUH, second_XHD, selection_bias_E, router_bias_E, first_bias_XU, second_bias_XH,
                shared_first_VH, shared_second_HW, shared_gate_1H, expert_SK, weight_SK, quota_PED,
            )  # fmt: skip
            together.append(partial(self._start, tensors, values))
        return y_SH

    def _start(self, _tensors: tuple[Tensor | None, ...], values: tuple[int, ...], stream: int) -> None:
        """Enqueue the kernel, whose tensors nobody may free and allocate anew before."""
        self._call(stream, values)
        self.calls += 1

    def tables(self, placement: Placement) -> Tensor:
        """The kernel's tables of a placement on the device, int32: rank [E, D], then what each slot holds, [P, X]."""
        if self._last_tables is not None and self._last_tables[0] is placement:
            return self._last_tables[1]
        shape = self.shape
        if placement not in self._tables:
            sizes = (placement.num_experts, placement.num_ranks)
            if sizes != (shape.experts, shape.ranks):
                raise UsageError(
                    f"the placement is for {sizes[0]} experts on {sizes[1]} ranks, the kernel for {shape.experts} on "
                    f"{shape.ranks}"
                )
            if placement.max_replicas > shape.replicas or placement.slots > shape.slots:
                raise UsageError(
                    f"the placement has up to {placement.max_replicas} replicas and {placement.slots} slots, the "
                    f"kernel was compiled for {shape.replicas} and {shape.slots}"
                )
            # kept for good: a captured graph may read them, and they are small
            flat = placement_tables(placement, shape.replicas, shape.slots)
            self._tables[placement] = torch.from_numpy(flat).to(self.heap.device)
        # a placement's hash goes through all experts
        self._last_tables = (placement, self._tables[placement])
        return self._last_tables[1]

    def _replica_arguments(self, placement: Placement | None, quota_PED: Tensor | None) -> tuple[int, int, int]:
        """Arguments of a launch that only shapes with replicas have: address of the tables, whether there is a plan,
        its address."""
        shape = self.shape
        if not shape.placed:
            raise UsageError(
                "this kernel was compiled for experts in blocks; a placement or a plan needs a KernelShape that "
                "from_config made for that placement"
            )
        if placement is None:
            raise UsageError("a kernel with replicas needs placement=..., which rank and slot holds which expert")
        at = self.tables(placement).data_ptr()
        if quota_PED is None:
            return at, 0, 0
        want = (shape.ranks, shape.experts, shape.replicas)
        if tuple(quota_PED.shape) != want or quota_PED.dtype != torch.int32 or not quota_PED.is_contiguous():
            raise UsageError(
                f"quota_PED is {quota_PED.dtype} {list(quota_PED.shape)}, expected contiguous int32 {list(want)}"
            )
        return at, 1, quota_PED.data_ptr()

    # --- failures -----------------------------------------------------------------------------------------------

    def raise_if_failed(self) -> None:
        """Look at the error record, which the kernel writes into host memory: no synchronisation, no device call.

        Raises:
            MegakernelTimeout, MegakernelInputError: what a call that has ended reported.
        """
        if self._reported[0] or self._reported[7]:
            error = self.failure()
            if error is not None:
                raise error

    @property
    def reported(self) -> bool:
        """Whether the error record holds anything."""
        return bool(self._reported[0] or self._reported[7])

    def waited(self) -> str | None:
        """Who waited for what, and how far that was, if a wait ran past the deadline."""
        from moe_fast.kernel.signals import ROLES, WAITS

        code, rank, role, wait, index, seen, expected, _ = self.record.tolist()
        if not code:
            return None
        return (
            f"rank {rank}, {ROLES[role]}: waited more than {self.deadline_s:g} s for {WAITS[wait]} {index}, "
            f"saw {seen}, expected {expected}"
        )

    def failure(self) -> MegakernelError | None:
        """What a call that has ended reported, as an error; wrong input is told once."""
        if not self.reported:
            return None
        waited = self.waited()
        if waited:
            return MegakernelTimeout(
                f"{waited}; every rank must make the call, within MOE_REF_DEADLINE_S of the first; to go on, call "
                "Engine.recover() on every rank"
            )
        status = int(self.record[7])
        what = [
            text
            for bit, text in (
                (Status.NONFINITE, "a logit of the gate is not finite: look for NaN and infinity in x and the router"),
                (Status.BAD_EXPERT, "an expert id is outside [-1, E): -1 masks a route"),
                (
                    Status.OVERFLOW,
                    "more rows for one rank than the buffers hold, as with an expert twice in a token's choices: make "
                    "the choices differ or raise max_tokens",
                ),
                (Status.BAD_PLAN, "the plan's quotas don't add up to the counts of this batch: plan each batch anew"),
            )
            if status & bit
        ]
        # the kernel's state is sound after wrong input, so the next call may come
        self.record.zero_()
        return MegakernelInputError(f"on some rank: {'; '.join(what)}")

    def check(self) -> None:
        """Wait for the current stream, then raise what the kernel reported."""
        torch.cuda.current_stream(self.heap.device).synchronize()
        self.raise_if_failed()

    def recover(self) -> None:
        """Make the next call possible after a timeout; collective: every rank must call it.

        Zeroes counters and targets and sets the epoch, the same on every rank, between two barriers.
        """
        torch.cuda.synchronize(self.heap.device)
        self.heap.barrier()
        for name in ("arrived", "back", "counts", "counts_flag", "wire"):
            region = self.in_heap[name]
            self.heap.memory[region.offset : region.offset + region.size].zero_()
        for name in ("plan", "arrived_target", "back_target", "counters", "control"):
            region = self.in_workspace[name]
            self.workspace[region.offset : region.offset + region.size].zero_()
        self.record.zero_()
        torch.cuda.synchronize(self.heap.device)
        self.heap.barrier()

    # --- looking inside -----------------------------------------------------------------------------------------

    def poison(self) -> None:
        """Fill every data buffer with NaN: what a call reads must be what it wrote. Between calls only."""
        torch.cuda.synchronize(self.heap.device)
        self.heap.barrier()
        dtype = getattr(torch, self.shape.dtype)
        for memory, region in (
            *((self.heap.memory, self.in_heap[n]) for n in ("rows", "returned", "results")),
            *(((self.heap.memory, self.in_heap["wire"]),) if self.shape.put else ()),
            *((self.workspace, self.in_workspace[name]) for name in ("hidden", "shared_hidden", "shared_rows")),
        ):
            memory[region.offset : region.offset + region.size].view(dtype).fill_(float("nan"))
        for memory, region in (
            (self.heap.memory, self.in_heap["home"]),
            *((self.workspace, self.in_workspace[n]) for n in ("expert", "index", "send", "histogram", "tile_slot")),
            *((self.workspace, self.in_workspace[n]) for n in ("tile_rows", "row_shift", "list_start")),
            *((self.workspace, self.in_workspace[n]) for n in ("quota_end", "list_shift", "tile_at", "where")),
        ):
            memory[region.offset : region.offset + region.size].fill_(0x7F)
        if self.shape.by_token:
            # all but the flags, which hold the number of a call and are looked at before they are written
            flags, words = wire_flags(self.shape, self.max_tokens), wire_words(self.shape, self.max_tokens)
            self.view(self.heap.memory, self.in_heap["wire"], torch.int32)[flags:words].fill_(0x7F7F7F7F)
        weight = self.in_workspace["weight"]
        self.workspace[weight.offset : weight.offset + weight.size].view(torch.float32).fill_(float("nan"))
        torch.cuda.synchronize(self.heap.device)
        self.heap.barrier()

    def view(self, memory: Tensor, region: Region, dtype: torch.dtype) -> Tensor:
        """A region as a flat tensor."""
        return memory[region.offset : region.offset + region.size].view(dtype)

    @property
    def epoch(self) -> int:
        """Calls that have ended; waits for the device."""
        return int(self.view(self.workspace, self.in_workspace["control"], torch.int32)[0])

    def expert_ids(self, tokens: int) -> tuple[Tensor, Tensor]:
        """(what the last call's gate chose, the same without what the capacity dropped), int64 [S, K], -1 for none.

        Enqueued on the current stream, waits for nothing.
        """
        if self._ids is None or self._ids.shape[0] != tokens:
            flat = self.view(self.workspace, self.in_workspace["expert"], torch.int32)
            self._ids = flat[: tokens * self.shape.top_k].view(tokens, self.shape.top_k)
        ids_SK = self._ids.long()
        if not self.shape.drops:
            return ids_SK, ids_SK
        return torch.where(ids_SK < -1, dropped(ids_SK), ids_SK), ids_SK.clamp_min(-1)

    def stretches(self, quota_PX: np.ndarray) -> list[tuple[int, int, int]]:
        """(first row of the dispatch buffer, first hidden row, rows) of every stretch, in the order of the row tiles.

        quota_PX: rows of each source for each slot of this rank. Waits for the device (to know the side).
        """
        out, hidden = [], 0
        side, capacity = (self.epoch - 1) & 1, self.shape.slot_capacity(self.max_tokens)
        for slot in range(quota_PX.shape[1]):
            parts = quota_PX[:, slot].tolist() if self.shape.fixed else [int(quota_PX[:, slot].sum())]
            for source, rows in enumerate(parts):
                place = fixed_row(source, 0, side, slot, 0, self.shape.slots, capacity) if self.shape.fixed else hidden
                out.append((place, hidden, rows))
                hidden += ceil_div(rows, TILE_ROWS) * TILE_ROWS
        return out

    @property
    def sent_rows(self) -> int:
        """Rows that this rank's kernel stored into peers, over all calls (traced variants); waits for the device."""
        from moe_fast.kernel.signals import SENT_ROWS

        return int(self.view(self.workspace, self.in_workspace["control"], torch.int32)[SENT_ROWS])

    @property
    def put_rows(self) -> tuple[int, int]:
        """(rows, results) that this rank's kernel sent by put-with-signal, over all calls; waits for the device."""
        from moe_fast.kernel.signals import PUT_RESULTS, PUT_ROWS

        control = self.view(self.workspace, self.in_workspace["control"], torch.int32).tolist()
        return control[PUT_ROWS], control[PUT_RESULTS]

    def buffers(self, tokens: int) -> Buffers:
        """Views of what the last call of S = `tokens` left behind; waits for the device."""
        shape, dtype = self.shape, getattr(torch, self.shape.dtype)
        side = (self.epoch - 1) & 1
        routes = tokens * shape.top_k
        heap, ws = self.in_heap, self.in_workspace

        def half(name: str, kind: torch.dtype) -> Tensor:
            flat = self.view(self.heap.memory, heap[name], kind)
            return flat.view(2, -1)[side]

        gathered = half("counts", torch.int32).view(shape.ranks, shape.counts_stride)
        before = gathered[:, shape.experts + 2 :][:, : shape.experts] if shape.drops else gathered[:, : shape.experts]
        if shape.fixed:
            flat = self.view(self.heap.memory, heap["rows"], dtype)
            rows = flat.view(-1, shape.row_pitch // shape.element_size)[:, : shape.hidden]
            where, twist = self._where(routes, side * self.rows)
            block = self.shape.slot_capacity(self.max_tokens)
            returned = self._from_lines(flat, block, shape.row_pitch, where, twist) if shape.put else rows[where]
        else:
            rows = half("rows", dtype).view(self.rows, -1)[:, : shape.hidden]
            returned = None if shape.by_token else half("returned", dtype).view(-1, shape.hidden)[:routes]
            if shape.by_place:
                whole = half("returned", dtype)
                row_bytes = shape.hidden * shape.element_size
                block = whole.numel() // shape.hidden
                returned = self._from_lines(whole, block, row_bytes, *self._where(routes, 0))
        more = {}
        if shape.by_token:
            back = half("returned", dtype).view(shape.ranks - 1, -1, shape.hidden)[:, :tokens]
            more = {
                "results_RH": self.view(self.heap.memory, heap["results"], dtype).view(-1, shape.hidden),
                "partial_NH": self._partials(back),
                "sent_PG": self._sent_tokens(),
            }
        plan = self.view(self.workspace, ws["plan"], torch.int32)
        chosen_SK, expert_SK = self.expert_ids(tokens)
        return Buffers(
            expert_SK,
            self.view(self.workspace, ws["weight"], torch.float32)[:routes].view(tokens, shape.top_k),
            gathered[:, : shape.experts],
            gathered[:, shape.experts + 1],
            rows,
            self.view(self.workspace, ws["hidden"], dtype).view(-1, shape.intermediate),
            returned,
            int(plan[PlanWord.ROW_TILES]),
            before,
            chosen_SK,
            self.view(self.workspace, ws["shared_rows"], dtype).view(-1, shape.hidden)[:tokens]
            if shape.shared_intermediate
            else None,
            **more,
        )

    def _where(self, routes: int, first: int) -> tuple[Tensor, Tensor]:
        """Rows, from row `first` on, to which the results of this rank's routes have come back, 0 for masked ones; and
        with puts how the pieces of their lines lie, 0 to 7."""
        where = self.view(self.workspace, self.in_workspace["where"], torch.int32)[:routes].long()
        expert = self.view(self.workspace, self.in_workspace["expert"], torch.int32)[:routes]
        where, twist = torch.where(expert >= 0, where, 0), where % 8
        if self.shape.by_place:
            where, twist = where % (1 << HOME_BITS), where >> HOME_BITS
        return torch.where(expert >= 0, where + first, 0), twist

    def _from_lines(self, flat: Tensor, rows: int, pitch: int, where_N: Tensor, twist_N: Tensor) -> Tensor:
        """Rows `where_N` of a buffer whose blocks of `rows` times `pitch` bytes hold rows line by line of 128 bytes, as
        puts leave results: [N, H]. twist_N: 16-byte piece p of a row's lines lies at p ^ twist."""
        shape = self.shape
        block = rows * pitch // shape.element_size
        lines = flat.view(-1, block)[:, : rows * shape.hidden].view(-1, shape.hidden // shape.line, rows, shape.line)
        found = lines[where_N // rows, :, where_N % rows]
        piece = 16 // shape.element_size
        order = torch.arange(8, device=flat.device) ^ twist_N[:, None]
        pieces = found.view(len(where_N), -1, 8, piece)
        order = order[:, None, :, None].expand_as(pieces)
        return pieces.gather(2, order).reshape(len(where_N), shape.hidden)

    def _partials(self, back_GSH: Tensor) -> Tensor:
        """Partial sums as the reference keeps them, [S * P, H], from what the other ranks stored."""
        own, tokens = self.heap.rank, back_GSH.shape[1]
        where = self.view(self.workspace, self.in_workspace["where"], torch.int32)[: tokens * self.shape.top_k]
        out_SPH = back_GSH.new_zeros(tokens, self.shape.ranks, back_GSH.shape[2])
        for g in range(self.shape.ranks):
            if g != own:
                used_S = (where.view(tokens, self.shape.top_k) == -2 - g).any(dim=1)
                out_SPH[used_S, g] = back_GSH[g - (g > own), used_S]
        return out_SPH.view(-1, back_GSH.shape[2])

    def _sent_tokens(self) -> Tensor:
        """Tokens from every rank to every rank in the last call, int32 [P, P]."""
        ranks, rows = self.shape.ranks, self.rows
        first = wire_flags(self.shape, self.max_tokens) + rows
        flat = self.view(self.heap.memory, self.in_heap["wire"], torch.int32)
        return flat[first : first + ranks * ranks].view(ranks, ranks)
