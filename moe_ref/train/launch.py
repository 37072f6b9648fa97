"""P processes on this machine for `moe-ref train --ranks P`, and what happens when one of them is lost.

Under torchrun (SLURM, Kubernetes, Ray) the ranks are there already and this module only names their errors. Otherwise
it starts one process per rank, waits for all, and ends them all if one fails: whoever waits for a lost rank gets an
error from the connection at once or, if that rank merely hangs, after the time-out.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from rich.markup import escape

from moe_ref.console import err
from moe_ref.errors import CheckFailed, UsageError
from moe_ref.world import DistributedWorld, World

GRACE_S = 10.0
"""How long the others may take to end by themselves after one process has failed."""

_SIGNS = (
    "gloo",
    "nccl",
    "connection",
    "peer",
    "timed out",
    "timeout",
    "broken pipe",
    "socket",
    "tcpstore",
    "rendezvous",
)


class WorkerLost(CheckFailed):
    """Another rank is gone or does not answer (exit code 1)."""


@contextmanager
def naming_lost_ranks(world: World, what: str) -> Iterator[None]:
    """Turn the errors of torch.distributed inside into WorkerLost.

    Raises:
        WorkerLost: another rank is gone, or did not answer within the group's time-out.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        if isinstance(error, (CheckFailed, UsageError)) or not isinstance(world, DistributedWorld):
            raise
        said = " ".join(str(error).split())
        if not isinstance(error, dist.DistError) and not any(sign in said.lower() for sign in _SIGNS):
            raise
        raise WorkerLost(
            f"rank {world.rank} lost another rank during {what}: a process of the run has ended or does not answer "
            f"({said[:160]}); its own message says why. Go on from the last checkpoint with --resume, with any --ranks"
        ) from error


def launch(task: dict[str, Any], ranks: int, debug: bool = False) -> int:
    """Run `python -m moe_ref.train.worker TASK` on `ranks` local processes; returns the exit code of the run.

    Rank 0 has this process' stdout. If a process fails, the others get GRACE_S to end by themselves.

    Args:
        task: JSON values for the worker.
        debug: ranks show the Python traceback of an error.
    """
    environment = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        # Processes that share cores must not also start threads on them.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // ranks, 1))),
    }
    processes = []
    for rank in range(ranks):
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "moe_ref.train.worker", *(["--debug"] if debug else []), json.dumps(task)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=None if rank == 0 else subprocess.DEVNULL,
            )
        )
    try:
        return _wait(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait(processes: list[subprocess.Popen]) -> int:
    deadline = None
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE_S
            code = processes[failed[0]].returncode
            if code < 0:
                err.print(f"[bold red]error:[/] the process of rank {failed[0]} was ended by signal {-code}")
        if deadline is not None and time.monotonic() > deadline:
            still = [rank for rank, process in enumerate(processes) if process.poll() is None]
            err.print(escape(f"ranks {still} did not end by themselves {GRACE_S:g} s after a failure; ending them"))
            break
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    if 2 in codes:
        return 2
    return int(any(codes))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
