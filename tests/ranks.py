"""Run a function on P real processes that talk through gloo, and bring back what each returned."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _worker(
    rank: int, ranks: int, store: str, queue: Any, function: Callable, arguments: tuple, together: bool
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
        )
        queue.put((rank, function(rank, *arguments), None))
        if together:
            dist.barrier()
            dist.destroy_process_group()
    except Exception:
        queue.put((rank, None, traceback.format_exc()))


def run_ranks(
    function: Callable, ranks: int, *arguments: Any, timeout_s: float = 120.0, lost: tuple[int, ...] = ()
) -> list[Any]:
    """[function(rank, *arguments) for each rank], each in a process of its own, one thread each.

    `function` must be importable (defined at module level); results must pickle (turn tensors into numpy arrays).
    The ranks in `lost` are expected to die on the way; their results are None.
    A rank's exception fails the test with that rank's traceback; a hang fails it after the time-out.
    """
    # Every process starts as a fork of one that has imported torch: imports are most of a small test's time.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "moe_ref", "moe_ref.layer", "moe_ref.train.job"])
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=_worker, args=(r, ranks, store, queue, function, arguments, not lost))
            for r in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            results: dict[int, Any] = dict.fromkeys(lost)
            for _ in range(ranks - len(lost)):
                rank, value, error = queue.get(timeout=timeout_s)
                if error is not None:
                    raise AssertionError(f"rank {rank} failed:\n{error}")
                results[rank] = value
            return [results[rank] for rank in range(ranks)]
        finally:
            for process in processes:
                process.join(timeout=10)
                if process.is_alive():
                    process.kill()
