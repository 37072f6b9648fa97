"""A ladder of kernels: from a plain tile loop to the megakernel, one idea a level, for reading and for measuring.

Every level computes the same: y = relu(x W1^T) W2^T for rows grouped by expert, bfloat16 in and out, sums in fp32.

    0  plain       tiles through shared memory, ordinary multiply-adds
    1  wgmma       the same loop on tensor cores; all copy, then all multiply
    2  tma         the TMA unit copies: one thread asks for a tile
    3  pipeline    four stages; a warp only loads, two warpgroups only multiply
    4  persistent  a block per multiprocessor walks an ordered list of tiles
    5  fused       both products in one launch, with counters between them
    6  megakernel  on one GPU: gate, dispatch, return and combine as well
    7  megakernel  on two GPUs

Levels 0 to 4 launch once per product. Levels 0 to 5 are one file each, on top of `tiles` (and of the loops of level 3);
they are written to be read, take sizes that divide evenly, and leave out what the real kernel does about the rest.
Check and time all of them on one GPU, or level 7 as well on two:

    python -m moe_fast.ladder --out results.json
    torchrun --nproc-per-node 2 -m moe_fast.ladder --out results.json
"""
