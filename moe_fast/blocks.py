"""Thread blocks of a launch: how many a rank's kernel has, and how many a scheduler needs."""

from __future__ import annotations

from moe_ref.errors import UsageError

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


def whole_pairs(blocks: int, scheduler: str) -> int:
    """The largest even number of blocks that is no larger than `blocks`, for processors of two blocks.

    Raises:
        UsageError: that is too few for the scheduler.
    """
    even, least = blocks - blocks % 2, LEAST_BLOCKS[scheduler] + LEAST_BLOCKS[scheduler] % 2
    if even < least:
        raise UsageError(
            f"{blocks} block{'s' * (blocks != 1)}: scheduler={scheduler!r} with pairs of blocks needs at least {least}"
        )
    return even
