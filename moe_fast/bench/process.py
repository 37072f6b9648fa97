"""What every command does before and after measuring: join the process group, say how to repeat it, write and print."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_fast.bench.measure import place
from moe_ref.environment import local_rank_from_environment, rank_from_environment, world_size_from_environment
from moe_ref.errors import UsageError
from moe_ref.limits import check_output_path
from moe_ref.results import provenance, write_results

PACKAGES = ("nvidia-cutlass-dsl", "nvshmem4py-cu13", "nvidia-nvshmem-cu13")


def join(out: Path | None = None) -> None:
    """Enter torchrun's process group, if there is one.

    out: where the results will be written.

    Raises:
        UsageError: there is no GPU, or nothing can be written there: before the measurement, not after.
    """
    if out is not None and rank_from_environment() == 0:
        check_output_path("--out", out)
    if not torch.cuda.is_available():
        raise UsageError("the benchmark needs a CUDA device of compute capability 9.0; none is visible")
    if world_size_from_environment() is not None and not dist.is_initialized():
        local = local_rank_from_environment()
        torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local))


def command_line() -> str:
    """The command line that repeats this run."""
    _, ranks = place()
    start = "python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}"
    arguments = sys.argv[1:]
    while arguments and arguments[0] in ("bench",):
        arguments = arguments[1:]
    return f"{start} -m moe_fast.bench {shlex.join(arguments)}"


def with_provenance(title: str, description: str, body: dict[str, Any]) -> dict[str, Any]:
    """A result of this command as files hold it."""
    return {"title": title, "description": description, **provenance(command_line(), PACKAGES), **body}


def finish(title: str, description: str, body: dict[str, Any], out: Path | None, text: str | None = None) -> None:
    """Rank 0 writes the results, where there is a file to write, and prints the text; without one, the results as JSON.

    text: "" for nothing, where a command has printed what it found as it went.
    """
    if place()[0] != 0:
        return
    results = with_provenance(title, description, body)
    # printed first: what was measured is to be seen even where it can't be written
    if text != "":
        print(json.dumps(results) if text is None else text, flush=True)
    if out is not None:
        write_results(out, results)
