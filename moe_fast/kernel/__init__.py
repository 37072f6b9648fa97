"""The megakernel, one file per role.

constants   sizes of tiles and stages, fields of words, indices of counters
limits      what the kernel can't do, in words
shapes      compile-time choices and the sizes that follow from them
regions     how the symmetric heap and the workspace are cut up; tables of a placement
signals     waits with a deadline, the abort flag, the error record
gate        logits, scores, top-k, and the place of every route inside its token tile
scans       what the 256 consumer threads of a block do together
plan        from the counts of all ranks to exact offsets
exchange    counts from every rank to every rank
tables      what the plan says of every row tile
send_list   from a token's choices to the rows that they go to
solver      rows of an expert to its replicas, by one warp: the exact plan of `moe_ref.balance`
replicas    the planner's tables where experts have replicas
dispatch    rows to their owners
tokens      the second wire format: a token once to each rank ...
sums        ... and one partial sum back
transport   the second transport: NVSHMEM's puts and signals
scheduler   which task comes next: an ordered list, or the Scheduler with its mailboxes
subscriber  arrivals become ready tasks
loads       operands by TMA into the stages of the pipeline
gemm        the wgmma main loop
epilogue    activation and rounding, and where a product's tile goes
tile_pairs  which row tiles two blocks take together, and which rows go along
processor   what the roles of a processor block say to each other: task words, completion
loader, storer, spare, consumer
            the roles of a processor block: one warp each, and two warpgroups of consumers
pairs       two blocks as one processor, which share weights: its task words, and why nobody waits for ever
combine     the weighted sum of a token's results
megakernel  host entry point (descriptors, launch) and the kernel that hands the warps their roles
"""
