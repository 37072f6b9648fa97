"""Symmetric memory: one allocation that every rank maps, carved up by `moe_fast.kernel.regions.heap_regions`.

One process needs no NVSHMEM: its heap is ordinary device memory, and so are the heaps of several ranks that it runs
side by side on one GPU. Several processes take theirs from NVSHMEM's symmetric heap through nvshmem4py, started from
the torch.distributed process group: rank 0 makes a unique id, its bytes are broadcast, everyone joins. On one host
every peer's heap is mapped, so the kernel stores into it directly.

NVSHMEM's symmetric heap has a size of its own, fixed at start-up (NVSHMEM_SYMMETRIC_SIZE): it is set from the layer's
formula before the first start, and a layer that doesn't fit is refused with both numbers.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ref.errors import BackendUnavailable, UsageError
from moe_ref.layout import align_up

MINIMUM_NVSHMEM = (3, 6)
"""Host library that this package's device bindings were tested with, at least."""
DEFAULT_HEAP_BYTES = 4 << 30
SPARE_HEAP_BYTES = 256 << 20
"""What NVSHMEM's heap has beyond the first layer's need."""
ALIGNMENT = 1024
"""Bytes: what a heap begins on a multiple of, as each of its regions does within it (`regions.regions`)."""


@dataclass(eq=False)
class Heap:
    """Memory of this rank that its peers can write.

    Attributes:
        memory: uint8, zeroed.
        peers: int64 [P] on the device: where each rank's heap is mapped in this process.
        rank, ranks: place in the group.
        on_one_gpu: whether the heaps of all ranks are this process', on this GPU.
    """

    memory: Tensor
    peers: Tensor
    rank: int = 0
    ranks: int = 1
    group: Any = None
    keep: list[Any] = field(default_factory=list)
    linked: list[Any] = field(default_factory=list)
    on_one_gpu: bool = False

    @property
    def base(self) -> int:
        """Address of this rank's heap."""
        return self.memory.data_ptr()

    @property
    def size(self) -> int:
        """Bytes."""
        return self.memory.numel()

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def barrier(self) -> None:
        """Host barrier of all ranks; those of one process need none."""
        if self.ranks > 1 and not self.on_one_gpu:
            dist.barrier(self.group)

    def link(self, function: Any, version: Sequence[int] | None) -> None:
        """Give a kernel that calls NVSHMEM the state of this process' NVSHMEM; before its first launch, collective.

        version: of NVSHMEM's device code in the kernel.

        Raises:
            BackendUnavailable: on every rank, if this process' host library can't serve it on any.
        """
        import nvshmem.core as nvshmem

        problems: list[Any] = [None] * self.ranks
        mine = device_problem(nvshmem.get_version(), version, "the kernel's device code")
        dist.all_gather_object(problems, mine, group=self.group)
        for rank, problem in enumerate(problems):
            if problem:
                raise BackendUnavailable(f"rank {rank}: {problem}")
        library = nvshmem.NvshmemKernelObject.from_handle(int(function.library))
        nvshmem.library_init(library)
        self.linked.append(library)

    def close(self) -> None:
        """Give the memory back; collective."""
        if self.ranks > 1 and not self.on_one_gpu:
            import nvshmem.core as nvshmem

            torch.cuda.synchronize(self.device)
            self.barrier()
            for library in self.linked:
                nvshmem.library_finalize(library)
            self.linked.clear()
            # the views of the peers' heaps go first, the allocation last
            *views, own = self.keep
            for view in views:
                nvshmem.free_tensor(view)
            nvshmem.free_tensor(own)
            self.keep.clear()
            _heaps.remove(self)


def local_heap(size: int, device: torch.device) -> Heap:
    """Heap of a single rank: ordinary device memory."""
    return local_heaps(size, device, 1)[0]


def local_heaps(size: int, device: torch.device, ranks: int) -> list[Heap]:
    """Heaps of `ranks` ranks that share a GPU and this process, in rank order: one allocation of device memory.

    size: bytes of one heap.

    Raises:
        UsageError: several heaps don't fit into the GPU's memory.
    """
    stride = align_up(size, ALIGNMENT)
    try:
        memory = torch.zeros(ranks, stride, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        if ranks == 1:
            raise
        raise UsageError(
            f"{ranks} ranks on one GPU need {ranks} symmetric heaps of {size} bytes ({' '.join(str(error).split())}); "
            "lower max_tokens or the number of ranks"
        ) from error
    peers = torch.tensor([part.data_ptr() for part in memory], dtype=torch.int64, device=device)
    return [Heap(memory[rank, :size], peers, rank, ranks, on_one_gpu=ranks > 1) for rank in range(ranks)]


_started: dict[str, Any] = {}
_heaps: list[Heap] = []
"""Symmetric heaps that are open, in the order in which all ranks opened them."""


def start(device: torch.device, group: Any = None, heap_bytes: int = DEFAULT_HEAP_BYTES) -> None:
    """Join NVSHMEM from a torch.distributed group; once per process, collective.

    Raises:
        BackendUnavailable: nvshmem4py isn't installed, or the host library is too old.
        UsageError: already started for another device.
    """
    if _started:
        if _started["device"] != device:
            raise UsageError(f"NVSHMEM was started for {_started['device']}, this layer is on {device}")
        return
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(heap_bytes))
    # one host needs no remote transport; multicast is not used
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    try:
        import cuda.core
        import numpy as np
        import nvshmem.core as nvshmem
    except ImportError as error:
        raise BackendUnavailable(
            f"nvshmem4py does not import ({error}); several ranks need it: pip install -e '.[fused]'"
        ) from error
    found = nvshmem.get_version()
    check_version(found)
    torch.cuda.set_device(device)
    core: Any = cuda.core  # its classes come from compiled modules, which no checker reads
    own = core.Device(device.index)
    own.set_current()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    uid = nvshmem.get_unique_id(empty=rank != 0)
    box: list[Any] = [uid._data.tobytes() if rank == 0 else None]
    dist.broadcast_object_list(box, dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    if rank:
        uid._data[:] = np.frombuffer(box[0], dtype=uid._data.dtype)
    nvshmem.init(device=own, uid=uid, rank=rank, nranks=ranks, initializer_method="uid")
    atexit.register(_stop_at_exit)
    _started.update(device=device, version=found, size=int(os.environ["NVSHMEM_SYMMETRIC_SIZE"]))


def host_version(found: Any) -> tuple[str, tuple[int, ...]]:
    """The host library's version as text and as numbers. found: what nvshmem4py says, or the text."""
    text = str(getattr(found, "libnvshmem_version", found))
    return text, tuple(int(part) for part in text.replace("-", ".").split(".") if part.isdigit())


def check_version(found: Any) -> None:
    """Raise BackendUnavailable unless the host library is new enough."""
    text, digits = host_version(found)
    if digits[:2] < MINIMUM_NVSHMEM:
        wanted = ".".join(map(str, MINIMUM_NVSHMEM))
        raise BackendUnavailable(
            f"NVSHMEM's host library is {text}, need {wanted}: torch brings an older one; preload the one of the "
            "package nvidia-nvshmem-cu13 (LD_PRELOAD=.../nvidia/nvshmem/lib/libnvshmem_host.so.3)"
        )


def device_problem(found: Any, version: Sequence[int] | None, what: str) -> str | None:
    """Why a host library can't serve device code of a version, with both and the remedy; None if it can.

    Since NVSHMEM 3.0 a host library serves the device code of its own major version that isn't newer than itself.

    Args:
        found: the host library's version, see `host_version`.
        version: (major, minor, patch) of the device code; None if it has none.
        what: what has that version, for the message.
    """
    text, digits = host_version(found)
    if version is None:
        return (
            f"{what} names no version of NVSHMEM (the host library is {text}); delete the kernel and compile it again"
        )
    if version[0] == digits[0] and version[1] <= digits[1]:
        return None
    device = ".".join(map(str, version))
    return (
        f"{what} is of NVSHMEM {device}, the host library is {text}: it must be of the same major version and not "
        f"older. Preload the libnvshmem_host.so.3 of nvidia-nvshmem-cu13 {device} or later (LD_PRELOAD), or compile "
        f"the kernel again (moe-ref compile) beside nvidia-nvshmem-cu13 {text}"
    )


def all_mapped(device: torch.device, group: Any = None, size: int = 0) -> bool:
    """Whether every rank can reach every other rank's memory directly; collective.

    size: bytes that the first heap will want: NVSHMEM may start here.
    """
    start(device, group, max(DEFAULT_HEAP_BYTES, size + SPARE_HEAP_BYTES))
    import nvshmem.core as nvshmem

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    probe, views, good = nvshmem.tensor((16,), dtype=torch.uint8), [], True
    try:
        views = [nvshmem.get_peer_tensor(probe, peer) for peer in range(ranks) if peer != rank]
    except Exception:  # what nvshmem4py raises for a peer that isn't mapped has no class of its own
        good = False
    box: list[Any] = [None] * ranks
    dist.all_gather_object(box, good, group=group)
    for view in [*views, probe]:
        nvshmem.free_tensor(view)
    return all(box)


def symmetric_heap(size: int, device: torch.device, group: Any = None, mapped: bool = True) -> Heap:
    """Heap of this rank in NVSHMEM's symmetric memory; collective.

    mapped: with every peer's memory mapped, for direct stores; otherwise only this rank's own address is known, and
    nothing but puts can reach a peer.

    Raises:
        UsageError: it doesn't fit into NVSHMEM's heap, or a peer's memory isn't directly reachable.
    """
    start(device, group, max(DEFAULT_HEAP_BYTES, size + SPARE_HEAP_BYTES))
    import nvshmem.core as nvshmem

    if size > _started["size"]:
        raise UsageError(
            f"the layer needs {size} bytes of symmetric memory, NVSHMEM was started with {_started['size']}; "
            "set NVSHMEM_SYMMETRIC_SIZE before the first layer"
        )
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    memory = nvshmem.tensor((size,), dtype=torch.uint8)
    memory.zero_()
    addresses, views = [], []
    for peer in range(ranks):
        if peer == rank or not mapped:
            addresses.append(memory.data_ptr() if peer == rank else 0)
            continue
        try:
            view = nvshmem.get_peer_tensor(memory, peer)
        except Exception as error:
            raise UsageError(
                f"rank {rank} can't reach the memory of rank {peer} directly ({error}); the fused backend stores "
                'directly into peers linked by NVLink or PCIe peer access; transport="put_signal" needs no mapping'
            ) from error
        views.append(view)
        addresses.append(view.data_ptr())
    torch.cuda.synchronize(device)
    dist.barrier(group)
    peers = torch.tensor(addresses, dtype=torch.int64, device=device)
    heap = Heap(memory, peers, rank, ranks, group, [*views, memory])
    _heaps.append(heap)
    return heap


def stop() -> None:
    """Close all heaps and leave NVSHMEM; collective. Runs by itself when the process ends in good order."""
    if not _started:
        return
    import nvshmem.core as nvshmem

    for heap in reversed(_heaps.copy()):
        heap.close()
    nvshmem.finalize()
    _started.clear()


def _stop_at_exit() -> None:
    """At the end of the process: only where the ranks can still meet, since leaving is collective."""
    if dist.is_initialized():
        stop()
