"""What torchrun (or SLURM, Kubernetes, Ray through it) says in the environment about this process.

WORLD_SIZE decides whether there is a launched world at all; RANK and LOCAL_RANK left over from something else say
nothing without it.
"""

from __future__ import annotations

import os

from moe_ref.errors import UsageError


def world_size_from_environment() -> int | None:
    """Number of processes; None outside torchrun.

    Raises:
        UsageError: WORLD_SIZE is no integer of at least 1.
    """
    return _integer("WORLD_SIZE", 1)


def rank_from_environment() -> int:
    """This process' rank; 0 outside torchrun.

    Raises:
        UsageError: WORLD_SIZE or RANK is no integer in its range.
    """
    size = world_size_from_environment()
    if size is None:
        return 0
    rank = _integer("RANK", 0) or 0
    if rank >= size:
        raise UsageError(f"RANK is {rank}, expected less than WORLD_SIZE = {size}; start with torchrun, or unset both")
    return rank


def local_rank_from_environment() -> int:
    """Number of this process among those of its machine; 0 outside torchrun.

    Raises:
        UsageError: WORLD_SIZE or LOCAL_RANK is no integer in its range.
    """
    return 0 if world_size_from_environment() is None else _integer("LOCAL_RANK", 0) or 0


def local_world_size_from_environment() -> int:
    """Number of processes of this machine; all of them where the launcher does not say; 1 outside torchrun.

    Raises:
        UsageError: WORLD_SIZE or LOCAL_WORLD_SIZE is no integer of at least 1.
    """
    size = world_size_from_environment()
    return 1 if size is None else _integer("LOCAL_WORLD_SIZE", 1) or size


def _integer(name: str, least: int) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    # Not int() alone: it takes "1_0" and the digits of any script.
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if value < least:
        raise UsageError(
            f"{name} is {text!r} in the environment, expected an integer of at least {least}, as torchrun sets it; "
            "without torchrun unset it"
        )
    return value
