# %% [markdown]
# # 4. Tiles, tasks and actors: where barriers waste time
#
# **Question.** The arithmetic of an MoE layer takes a fraction of a millisecond on a large GPU. Why does a chain of good
# kernels take several times as long, and what changes if tiles start as soon as their own rows are there?
#
# **Time** 20 minutes to read. **Needs** a CPU; tutorial 3. Times on this page are *simulated*: a cost model fitted to
# runs recorded on two H200 GPUs ([`moe_ref.runtime.machine`][moe_ref.runtime.machine] says how well it fits).
#
# !!! question "Predict first"
#     Two H200, 2048 tokens each, 16 experts, K = 2, H = D = 2048, bfloat16.
#
#     1. The products alone need about 0.1 ms per GPU. How long does gate, all-to-all, products, all-to-all, combine take
#        as separate launches: 0.2 ms, 0.5 ms, 2 ms?
#     2. How much of that is saved by recording the launches in a CUDA graph?
#     3. Three kinds of actors share the work: some compute, one hands out tasks, some watch for arrivals. How many of
#        132 multiprocessors should not compute?

# %%
from collections import Counter

from moe_ref.runtime.machine import machine
from moe_ref.runtime.models import compare
from moe_ref.runtime.workload import Workload

work = Workload(ranks=2, tokens=2048, experts=16, top_k=2, hidden=2048, intermediate=2048)
h200 = machine("h200-2")
floor_us = work.flops_per_rank / h200.flops(work.element_size) * 1e6
print(f"arithmetic of one rank: {work.flops_per_rank / 1e9:.0f} GFLOP, at the sustained rate {floor_us:.0f} us")

# %% [markdown]
# ## Tiles
#
# The rows of an expert are cut into tiles of 128, the columns of its weights into tiles of 256. One tile product is a
# *task*. There are three kinds for the processors, and the puts that bring rows.

# %%
call = work.call()
print("tasks of rank 0:", dict(Counter(type(task).__name__ for task in call.tasks(0))))
task = call.gemm1_task(0, row_tile=2, column=3)
print(task)
print("released by:", task.dependency)
print("costs:", task.cost(work.shape))

# %% [markdown]
# A task fits into 48 bits, so the scheduler can hand it over in one store. The functions that pack and unpack it are traced
# by the megakernel, too ([`moe_ref.runtime.encoding`][moe_ref.runtime.encoding]):

# %%
from moe_ref.runtime import encoding as enc

word = task.word
print(f"word {word:#014x}: kind {enc.KIND_NAMES[enc.task_kind(word)]}, slot {enc.task_slot(word)}", end=", ")
print(f"row tile {enc.task_row_tile(word)}, column tile {enc.task_column_tile(word)}")

# %% [markdown]
# ## Actors
#
# ```mermaid
# flowchart LR
#   peer["peer GPU"] -- "rows + signal" --> heap[("symmetric heap<br/>arrival counters")]
#   heap --> sub["Subscriber"]
#   sub -- ready --> sched["Scheduler"]
#   sched -- mail --> proc["Processors"]
#   proc -- idle --> sched
#   proc -- "GEMM0 done" --> sched
#   proc -- "results + signal" --> peer
# ```
#
# The *Subscriber* sees a counter reach what the counts promised and reports the tile. The *Scheduler* gives ready tasks
# to idle *Processors*. Nobody waits for a stage; everybody waits for his own tile. Termination needs no message either:
# the counts say exactly how many tasks there are.
#
# The actors really run here. Given tensors, they compute the layer, with the reference's own functions as tile products:

# %%
import torch

from moe_ref import MoEConfig, MoELayer
from moe_ref.runtime.machine import Noise
from moe_ref.runtime.numbers import plan_call, run_layer

torch.set_num_threads(1)
small = MoELayer(MoEConfig(hidden=64, intermediate=96, experts=8, top_k=2), world=2)
x_SH = [torch.randn(90, 64), torch.randn(33, 64)]
with torch.no_grad():
    y_SH = small(x_SH)
runs = {}
for seed in (1, 2):
    noise = Noise(jitter=0.5, launch_jitter_us=200, seed=seed)  # every duration varies, ranks start apart
    made_SH, run = run_layer(small, [plan_call(small, x_SH, tile_columns=32)], h200, noise, processors=3)
    runs[seed] = made_SH[0]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(made_SH[0], y_SH, strict=True)]
    print(f"noise {seed}: {run.tasks} tasks in {run.events} events, relative difference {max(errors):.1e}")
print("the two runs agree in every bit:", all(torch.equal(a, b) for a, b in zip(runs[1], runs[2], strict=True)))

# %% [markdown]
# The order of events differs from run to run, the result does not: every result row has its own place, and the sum over a
# token's choices runs in a fixed order.
#
# ## Three ways to run the same tiles

# %%
results = compare(work, h200, record=True)
graph = compare(work, h200, captured=True)
print(f"{'':12}{'launches':>9}{'latency':>10}{'as a graph':>12}{'SM time used':>14}")
for name, r in results.items():
    print(f"{name:12}{r.gpu_ops:9d}{r.latency_us:8.0f} us{graph[name].latency_us:9.0f} us{r.utilisation:14.0%}")

# %% [markdown]
# `bulk` is a stage after the other with all-to-alls between them; `chunked` overlaps parts of the batch; `megakernel` is one
# launch. A graph removes the launches' cost for the host, not the gaps, the barriers and the reading back of sizes.
#
# ## The same layer as a Gantt chart

# %%
import matplotlib.pyplot as plt

colours = {"gemm0": "#0072B2", "gemm1": "#56B4E9", "combine": "#009E73", "rows": "#D55E00", "results": "#E69F00"}
names = {"product 0": "gemm0", "product 1": "gemm1", "weigh and sum": "combine"}
names |= {"all-to-all out": "rows", "all-to-all home": "results"}


def draw(ax, intervals, actors):
    """Bars of rank 0: one line per actor, a colour per kind of work."""
    for i in intervals:
        if i.rank == 0 and i.actor in actors:
            kind = names.get(i.name, i.name.split(" to ")[0])
            ax.barh(actors[i.actor], i.duration_us, left=i.start_us, color=colours.get(kind, "#999999"), height=0.8)


# %%
# figure: Rank 0, one time axis, simulated with the cost model of 2 x H200. Above: the chain as a CUDA graph, one operation after the other. Below: ten of the megakernel's 131 processors and its link; results travel home (orange) while tiles are still computed, then they are combined (green).
chain = compare(work, h200, ("bulk",), record=True, captured=True)["bulk"]
last = max(i for i in results["megakernel"].intervals if i.rank == 0 and i.name == "combine")
shown = [*(f"processor {p}" for p in range(9)), last.actor]  # and one that combined
actors = {name: line for line, name in enumerate([*shown, "link"])}
fig, axes = plt.subplots(2, 1, figsize=(7.2, 4.6), sharex=True, height_ratios=(1, 3))
draw(axes[0], chain.intervals, {"compute stream": 0})
draw(axes[1], results["megakernel"].intervals, actors)
axes[0].set(yticks=[0], yticklabels=["chain"], title="One MoE layer, chain of launches and megakernel")
axes[1].set(yticks=range(11), yticklabels=actors, xlabel="time, us", ylim=(10.6, -0.6))
handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in (*colours.values(), "#999999")]
axes[1].legend(handles, [*colours, "gate, passes"], loc="upper right")
plt.show()

# %% [markdown]
# Read it aloud: above, each colour waits for the one before, and the white gaps and wide orange blocks are time in which no
# product runs. Below, light blue follows dark blue without a gap, and the link works meanwhile. Open a trace of your own in
# [Perfetto](https://ui.perfetto.dev):
#
# ```text
# moe-ref trace --tokens 2048 --experts 16 --out layer.json --plot layer.png
# moe-ref simulate --machine h200-2 --tokens 2048 --experts 16
# ```
#
# ## A slow rank
#
# Without barriers a rank waits only for tiles that it needs. Does a straggler then not matter?

# %%
slow = Noise(straggler=1, slowdown=1.5)
for name, r in compare(work, h200, noise=slow, captured=True).items():
    before = graph[name].latency_us
    print(f"{name:12} {before:6.0f} us -> {r.latency_us:6.0f} us with rank 1 at two thirds of its speed")

# %% [markdown]
# It does: the layer ends when its last rank ends. Fusing hides gaps, not imbalance; that is a matter of who computes
# what ([tutorial 7](07_stragglers.md)).
#
# ## Check

# %%
assert max(errors) < 1e-6, "the actors computed something else"
assert all(torch.equal(a, b) for a, b in zip(runs[1], runs[2], strict=True)), "a result depended on the order of events"
assert enc.task_row_tile(word) == 2
assert enc.task_column_tile(word) == 3
assert results["megakernel"].latency_us < graph["bulk"].latency_us < results["bulk"].latency_us
assert results["megakernel"].latency_us > floor_us, "faster than arithmetic allows"
assert results["megakernel"].gpu_ops == 1
print("all checks passed")

# %% [markdown]
# !!! abstract "What the real kernel does instead"
#     The same protocol with memory in the place of messages: a signal is a counter that grows, "ready" is a bit that a
#     subscriber warp writes, a mail is one 64-bit store into the block's mailbox. Roles: `moe_fast/kernel/subscriber.py`,
#     `moe_fast/kernel/scheduler.py`, `moe_fast/kernel/processor.py`. The scheduler uses relaxed accesses only; a mail is a
#     hint, and the processor itself acquires the counter that its task depends on. With tracing on, the kernel writes
#     the same trace format as the simulator.
#
# ## Exercises
#
# 1. Set `tokens=16384`. By what factor does the megakernel now win over the captured chain, and why less?
#
# ??? success "Answer"
#     The products grow with the tokens; gaps and fixed costs do not. The more arithmetic a launch carries, the less its
#     edges matter.
#
# 2. The scheduler orders tasks so that GEMM1 of a tile follows its GEMM0 with a lag. What would go wrong with "all GEMM0
#    first", and with "GEMM1 at once"?
#
# ??? success "Answer"
#     All GEMM0 first: results start home at the very end, and the return trip is exposed. GEMM1 at once: a processor
#     would take a GEMM1 task whose hidden row tile is not finished by its neighbours, and spin.
#
# 3. `processors=1` with `mailbox` depth 1: predict the shape of the Gantt chart.
#
# ??? success "Answer"
#     One line with a gap of the scheduler's round trip between any two tasks. A second mail in the box hides it, so the
#     preset's depth is 2: the running task and the next one.
#
# ## In the papers
#
# FlashMoE, section 3 (tasks, actors, the OS block), table 1 (operations per layer), figure 9 (utilisation), figure 11
# (overlap efficiency).
