"""The ranks of this process: one, or all P of a simulated world, whose kernels run at one time on one GPU.

Every rank's kernel waits for all others, so all blocks of all of them must be on the GPU together. A block takes a
whole SM, so each rank gets SMs // P of them (`blocks.blocks_per_rank`). What else could keep a kernel from beginning,
while the others wait for it:

* A launch behind a wait. Each rank has a stream, which waits for the caller's, and at the end the caller's waits for
  all of them. Streams share hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, 8 by default), and in a queue a launch would
  stay behind another stream's wait for the end of a kernel. So all launches come before the first such wait.
* Work of the host that may wait for the device: memory, copies, loading the function at its first launch. All is done
  before the first launch: `Engine.launch(together=...)` only prepares, and all ranks share one loaded function.
* Another group of ranks, called on another stream: two groups that have each begun in part would wait for each other's
  SMs. On a device a group begins when the group before it has ended. (A captured graph knows only what was captured:
  don't replay it while another one runs.)
* Launches that block. CUDA_LAUNCH_BLOCKING=1 is refused; tools that run one kernel after the other can't be.

Other work on the GPU delays a call, but ends by itself. If all this isn't enough, the deadline of the kernel's waits
ends every rank, and an error says who waited for what.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_fast.engine import Engine
from moe_fast.failures import MegakernelError, MegakernelTimeout
from moe_fast.kernel.shapes import KernelShape
from moe_ref.errors import UsageError
from moe_ref.placement import Placement

_streams: dict[torch.device, list[torch.cuda.Stream]] = {}
_last: dict[torch.device, Any] = {}
"""By device: where the last group of ranks has ended."""
_lock = threading.Lock()
"""Launches of two groups must not mix."""


def side_by_side(starts: Sequence[Callable[[int], None]], device: torch.device) -> None:
    """Launch the kernels of several ranks so that all of them run at one time.

    To the caller it is one operation of the current stream: the kernels begin after what is enqueued there, and what is
    enqueued there later begins after all of them. In a CUDA graph capture they become nodes beside each other.

    Args:
        starts: of each rank, see `Engine.launch(together=...)`; given a stream's handle they launch on it.

    Raises:
        UsageError: launches block in this process.
    """
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        raise UsageError(
            f"CUDA_LAUNCH_BLOCKING={os.environ['CUDA_LAUNCH_BLOCKING']} makes each launch wait for its kernel, and the "
            f"kernels of {len(starts)} ranks on one GPU wait for each other; unset it"
        )
    with _lock:
        caller = torch.cuda.current_stream(device)
        streams = _streams.setdefault(device, [])
        while len(streams) < len(starts):
            streams.append(torch.cuda.Stream(device))
        streams = streams[: len(starts)]
        before = [caller.record_event()]
        capturing = torch.cuda.is_current_stream_capturing()
        if device in _last and not capturing:
            before.append(_last[device])
        for stream in streams:
            for event in before:
                stream.wait_event(event)
        try:
            for start, stream in zip(starts, streams, strict=True):
                start(stream.cuda_stream)
        finally:
            for end in [stream.record_event() for stream in streams]:
                caller.wait_event(end)
            if not capturing:
                _last[device] = caller.record_event()


class LocalRanks:
    """Engines of the ranks in this process, in rank order; they share one compiled function.

    Raises:
        MegakernelError: `raise_if_failed`, `check`: what a call that has ended reported, on any of the ranks.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self.only = self.engines[0] if len(self.engines) == 1 else None
        """The engine, if it is the only one."""
        self._held: dict[Placement, list[slice | torch.Tensor]] = {}

    @property
    def shape(self) -> KernelShape:
        """The variant that all of them run."""
        return self.engines[0].shape

    @property
    def device(self) -> torch.device:
        """The GPU that all of them share."""
        return self.engines[0].heap.device

    @property
    def calls(self) -> int:
        """Calls so far."""
        return self.engines[0].calls

    def start(self, starts: Sequence[Callable[[int], None]]) -> None:
        """Launch what every rank's `Engine.launch(together=...)` has prepared."""
        side_by_side(starts, self.device)

    def held(self, placement: Placement) -> list[slice | torch.Tensor]:
        """Of every rank where its experts are among all E: a slice where they are neighbours, else int64 ids on the
        device, whose first use copies them there."""
        if placement not in self._held:
            self._held[placement] = [where_held(experts, self.device) for experts in placement.experts_of_rank]
        return self._held[placement]

    def raise_if_failed(self) -> None:
        """See `ErrorRecord.raise_if_failed`; a failure of one rank is told together with those of the others."""
        if not any(engine.errors.reported for engine in self.engines):
            return
        if len(self.engines) > 1:
            # what the other ranks report of the same call must not be left for the next one
            torch.cuda.synchronize(self.device)
            waits = [text for one in self.engines if (text := one.errors.waited(one.deadline_s))]
            if waits:
                raise MegakernelTimeout(
                    f"{'; '.join(waits)}. The kernels of {len(self.engines)} ranks on one GPU must run at one time; "
                    "what prevents it is work that keeps SMs for so long, another fused layer on another stream, or a "
                    "tool that runs kernels one after the other; to go on, call recover() of these engines"
                )
        failures: list[MegakernelError] = [
            error for one in self.engines if (error := one.errors.failure(one.deadline_s))
        ]
        if failures:
            raise failures[0]

    def check(self) -> None:
        """Wait for the current stream, then raise what the kernels reported."""
        torch.cuda.current_stream(self.device).synchronize()
        self.raise_if_failed()

    def recover(self) -> None:
        """Make the next call possible after a timeout; on several processes every rank must call it."""
        for engine in self.engines:
            engine.recover()

    def poison(self) -> None:
        """See `Engine.poison`."""
        for engine in self.engines:
            engine.poison()

    def close(self) -> None:
        """Free the heaps; on several processes collective."""
        for engine in self.engines:
            engine.heap.close()


def where_held(experts: Sequence[int], device: torch.device) -> slice | torch.Tensor:
    """A slice for experts that are neighbours in rising order (or none), else their ids, int64."""
    if not experts:
        return slice(0, 0)
    low, high = experts[0], experts[-1] + 1
    if tuple(experts) == tuple(range(low, high)):
        return slice(low, high)
    return torch.tensor(experts, dtype=torch.int64, device=device)
