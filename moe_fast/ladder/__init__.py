"""A ladder of kernels: from a plain tile loop to the megakernel, one idea a level, for reading and for measuring.

Every level computes the same: y = relu(x W1^T) W2^T for rows grouped by expert, bfloat16 in and out, sums in fp32.

    0  plain       tiles through shared memory, multiplied by ordinary instructions      one launch per product
    1  wgmma       the same loop on tensor cores; all threads copy, then all multiply
    2  tma         the copies by the TMA unit: one thread asks for a tile
    3  pipeline    four stages; a warp that only loads, two warpgroups that only multiply
    4  persistent  one block per multiprocessor walks a list of tiles in a chosen order
    5  fused       both products in one launch: counters instead of the boundary between launches
    6  megakernel  on one GPU: gate, dispatch, return and combine as well (`moe_fast.kernel`)
    7  megakernel  on two GPUs

Levels 0 to 5 are one file each and stand alone apart from `tiles`; they are written to be read, take sizes that divide
evenly, and leave out what the real kernel does about the rest. Run and record them all with

    python -m moe_fast.ladder --out docs/results/ladder_h200.json                      levels 0 to 6, on one GPU
    torchrun --nproc-per-node 2 -m moe_fast.ladder --out docs/results/ladder_h200.json   level 7 as well
"""
