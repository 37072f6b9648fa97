# %% [markdown]
# # 3. The symmetric heap: one-sided writes that cannot collide
#
# **Question.** If every rank writes into every other rank's memory whenever it likes, why do two writes never meet? And
# what does it cost to be that careless?
#
# **Time** 15 minutes to read. **Needs** a CPU; tutorial 2.
#
# A *symmetric heap* is a buffer that every rank allocates in the same shape. A sender can then compute an address on a
# peer without asking. What remains is to give each row an address that no other row has. There are two ways.
#
# | | fixed (the FlashMoE paper) | compact (default here) |
# |---|---|---|
# | address | L[source, round, side, slot, index] | expert-major, then source rank, then token |
# | what a sender must know | its own counts | the counts of all ranks |
# | room | C rows for every (source, slot) | exactly what is needed, whole tiles per slot |
#
# !!! question "Predict first"
#     8 ranks, 64 experts, 1024 tokens each, K = 2, tiles of 128 rows, an even gate.
#
#     1. How many rows does one source send to one expert, on average?
#     2. A 128-row tile in the fixed layout holds rows of one source only. Which share of its rows is padding?
#     3. And in the compact layout?
#
# Step through a small case with the keyboard (Tab, then Enter) or the mouse: two ranks write into rank 0.
#
# <div class="widget" data-widget="heap"></div>

# %%
import numpy as np

from moe_ref import layout
from moe_ref.balance import Plan
from moe_ref.placement import Placement

P, E, S, K, T = 8, 64, 1024, 2, 128
X = E // P  # expert slots of a rank
rng = np.random.default_rng(0)
counts_PE = rng.multinomial(S * K, np.full(E, 1 / E), size=P)
print(f"rows of one source for one expert: mean {counts_PE.mean():.0f}, largest {counts_PE.max()}")

# %% [markdown]
# ## Fixed: five coordinates
#
# `R` = 2 rounds (rows out, results home), `B` = 2 staging sides that alternate from call to call. The address is a number
# in a mixed base, nothing else:

# %%
import inspect

print(inspect.getsource(layout.fixed_row))

# %% [markdown]
# Different coordinates are different numbers, so writers cannot meet: not two sources, not two rounds, not this call and
# the next one. "Cannot" can be enumerated:

# %%
C = int(layout.align_up(counts_PE.max(), T))
addresses = [
    layout.fixed_row(p, r, b, x, i, X, C)
    for p in range(P)
    for r in (0, 1)
    for b in (0, 1)
    for x in range(X)
    for i in (0, C - 1)
]
print(
    f"{len(addresses)} corner coordinates, {len(set(addresses))} different addresses, heap of {P * 2 * 2 * X * C} rows"
)

# %% [markdown]
# ## Compact: three numbers
#
# Once the counts of all ranks are known, rows can lie close together. The start of an expert slot is rounded up to a
# whole tile; within it, source 0's rows come first, then source 1's, and so on.

# %%
print(inspect.getsource(layout.compact_row))
placement = Placement.contiguous(E, P)
plan = Plan.plain(counts_PE, placement)
compact = layout.CompactLayout.from_plan(plan, T)
for source in range(3):
    print(f"rank {source} writes its rows for slot 1 of rank 0 from heap row {compact.first_row(source, 0, 1)} on")
rows = compact.receive_rows(0)
print(
    f"rank 0 receives {len(rows)} rows at {len(set(rows.tolist()))} different addresses, heap of {compact.heap_rows(0)}"
)

# %% [markdown]
# Both functions are called by the reference with Python integers and traced by the megakernel's compiler with GPU
# integers: one definition, two uses. That is why they contain only `+ - * //`.
#
# ## What padding costs
#
# Matrix products work in tiles of T rows, so a tile with 30 rows costs as much as a full one. In the fixed layout a tile
# belongs to one source; in the compact one only the last tile of an expert can be partial.


# %%
def filled(counts_PE, tile):
    """Share of useful rows in the tiles of both layouts."""
    fixed = (-(-counts_PE // tile) * tile).sum()
    compact = (-(-counts_PE.sum(axis=0) // tile) * tile).sum()
    return counts_PE.sum() / fixed, counts_PE.sum() / compact


for tokens in (256, 1024, 4096):
    counts = rng.multinomial(tokens * K, np.full(E, 1 / E), size=P)
    fixed_share, compact_share = filled(counts, T)
    print(f"{tokens:5d} tokens per rank: useful rows in tiles {fixed_share:6.1%} fixed, {compact_share:6.1%} compact")

# %%
# figure: Useful rows in all tiles that must be computed. Fine experts and few tokens make the fixed layout pay.
import matplotlib.pyplot as plt

tokens = 2 ** np.arange(7, 15)
shares = np.array([filled(rng.multinomial(t * K, np.full(E, 1 / E), size=P), T) for t in tokens])
fig, ax = plt.subplots()
ax.plot(tokens, shares[:, 0] * 100, "o-", label="fixed: a tile has one source")
ax.plot(tokens, shares[:, 1] * 100, "o-", label="compact: tiles mix sources")
ax.set(
    xscale="log", xlabel="tokens per rank", ylabel="useful rows, %", xticks=tokens, xticklabels=tokens, ylim=(0, 102)
)
ax.minorticks_off()
ax.legend()
plt.show()

# %% [markdown]
# ## What the heap costs
#
# The fixed layout reserves C rows for every (source, round, side, slot). The paper sets C from a capacity factor and drops
# what exceeds it. Without drops C must be the worst case, all tokens of a source to one expert.

# %%
from moe_ref import MoEConfig

base = MoEConfig(hidden=2048, intermediate=2048, experts=E, top_k=K, max_tokens=S, tile_rows=T, dtype="bfloat16")
for name, config in (
    ("fixed, capacity factor 1.0", base.replace(layout="fixed", capacity_factor=1.0)),
    ("fixed, dropless", base.replace(layout="fixed")),
):
    print(f"{name:28} {config.fixed_bytes(P) / 2**20:8.0f} MiB per rank")
print(f"{'compact, dropless':28} {base.compact_bytes(P) / 2**20:8.0f} MiB per rank")

# %% [markdown]
# The compact buffer is sized for the worst case too (every rank sends all it can to one rank), and is still smaller than
# the fixed one without drops: in the fixed layout every *pair* has a worst case, in the compact one only the *sum* has.
#
# ## In-place padding
#
# Neither layout sends padding. Rows that nobody wrote hold whatever was there. The reference fills them with NaN before
# each call, so a program that lets one into a result is caught at once:

# %%
import torch

from moe_ref import MoELayer
from moe_ref.definition import definition, relative_error

small = MoEConfig(hidden=32, intermediate=48, experts=6, top_k=2, dtype="float64")
x_SH = torch.randn(50, 32, dtype=torch.float64)
errors = {}
for name in ("compact", "fixed"):
    layer = MoELayer(small.replace(layout=name), world=3)
    with torch.no_grad():
        y_SH, stats = layer(x_SH, return_stats=True)
        routing = layer.gate(x_SH)
        exact_SH = definition(x_SH, routing, small, layer.gate_up_proj, layer.down_proj)
    errors[name] = relative_error(y_SH, exact_SH)
    print(f"{name:8} heap of rank 0: {stats.record.layout.heap_rows(0):4d} rows, relative error {errors[name]:.1e}")

# %% [markdown]
# ## Check

# %%
every = [
    layout.fixed_row(p, r, b, x, i, 3, 5)
    for p in range(4)
    for r in (0, 1)
    for b in (0, 1)
    for x in range(3)
    for i in range(5)
]
assert sorted(every) == list(range(len(every))), "the fixed layout is a bijection: no gap, no address twice"
for rank in range(P):
    rows = compact.receive_rows(rank)
    assert len(set(rows.tolist())) == len(rows), "two rows met"
    assert rows.max() < compact.heap_rows(rank)
assert max(errors.values()) < 1e-12, "padding reached a result"
assert (np.diff(shares, axis=0) > -0.02).all(), "more tokens fill tiles better"
assert (shares[:, 1] >= shares[:, 0]).all(), "mixing sources never costs tiles"
print("all checks passed")

# %% [markdown]
# !!! abstract "What the real kernel does instead"
#     The heap is allocated through NVSHMEM, once ([`moe_fast.heap`][moe_fast.heap]); peers on the same host see it as
#     mapped memory. A warp copies a row with 16-byte stores to the address that these functions give
#     (`moe_fast/kernel/dispatch.py`), then adds the number of rows to the arrival counter of the tile. A row that stays on
#     its rank keeps its place, but mostly nobody copies it there: its task reads the token itself
#     ([design](../concepts/design.md#where-a-row-is-read)). Staging sides alternate with the call number, which lives in
#     device memory, so a captured CUDA graph can be replayed.
#
# ## Exercises
#
# 1. Leave the side out of the address (B = 1). Which write can now destroy what?
#
# ??? success "Answer"
#     A fast rank's rows of the next call may land on rows of this call that a slow peer has not read yet. With two
#     sides it would have to be two calls ahead, which it cannot be: it needs the slow peer's counts of the call between.
#     [Tutorial 5](05_breaking_it.md) lets the checker find the sequence of messages.
#
# 2. Why is the source rank a coordinate of the fixed layout, although it is not one of the compact?
#
# ??? success "Answer"
#     In the fixed layout a sender does not know how many rows others send, so it needs an area of its own. In the
#     compact layout it knows, and starts where the lower sources end.
#
# 3. E = 128 experts with 1-byte elements and 65,536 tokens per rank on 64 ranks, H = 8192: does a row's byte offset fit in
#    32 bits?
#
# ??? success "Answer"
#     No: the heap holds up to \(\min(K, X) \cdot S \cdot P\) rows of 8192 bytes, \(2 \cdot 65536 \cdot 64 \cdot 8192 =
#     6.9 \cdot 10^{10}\) bytes. Offsets are 64-bit, also in the kernel; 32-bit overflow is among the bugs that users of
#     other kernels reported.
#
# ## In the papers
#
# FlashMoE, section 3 (symmetric tensor layout, temporal buffering, in-place padding) and its memory table.
