# %% [markdown]
# # 2. Expert parallelism: what crosses the wire
#
# **Question.** The experts no longer fit on one device and live on P ranks. Which data moves, how much of it, and does
# the result change?
#
# **Time** 12 minutes to read. **Needs** a CPU; tutorial 1.
#
# In *expert parallelism* (EP) every rank holds \(E/P\) experts and brings its own tokens. A row travels to the rank that
# holds its expert (dispatch), is computed there, and its result travels home (combine).
#
# !!! question "Predict first"
#     4 ranks, 512 tokens each, 8 experts, K = 2, an untrained gate.
#
#     1. Which share of the rows leaves its rank?
#     2. H = 64 in fp32. How many bytes cross, there and back?
#     3. Does the output change when the same tokens are computed on 1, 2 or 4 ranks? In no bit, in the last bits, or
#        visibly?

# %%
import torch

from moe_ref import MoEConfig, MoELayer

torch.set_num_threads(1)
P = 4
config = MoEConfig(hidden=64, intermediate=96, experts=8, top_k=2)
layer = MoELayer(config, world=P)  # P ranks, simulated in this process
x_SH = torch.randn(P * 512, config.hidden, generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    y_SH, stats = layer(x_SH, return_stats=True)
print("experts of each rank:", layer.placement.experts_of_rank)
print("rows that each rank computes:", stats.rank_load.tolist())

# %% [markdown]
# ## Counts first
#
# Before any row moves, every rank tells all others how many rows it has for each expert: P × E integers. After this small
# all-gather each rank knows everything that is needed to compute where every row goes.

# %%
record = stats.record
print("counts_PE, rows of rank p (line) for expert e (column):")
print(record.counts_PE)
rows_PG = record.plan.quota_by_slot().sum(axis=2)
print("rows from rank p (line) to rank g (column):")
print(rows_PG)

# %% [markdown]
# The diagonal stays at home. With P ranks and an even gate a share of \(1 - 1/P\) leaves: here three quarters. Each row
# is \(H\) elements and travels twice.

# %%
leaves = rows_PG.sum() - rows_PG.trace()
print(f"{leaves} of {rows_PG.sum()} rows leave their rank: {leaves / rows_PG.sum():.1%}")
print(f"bytes out: {leaves * config.row_bytes:,} (the layer counted {stats.bytes_remote:,}), and as many home")
counts_bytes = record.counts_PE.size * 8
print(f"the counts exchange: {counts_bytes} bytes per rank received")

# %% [markdown]
# ## Follow one row
#
# Rank 2's token 5: its two choices, the ranks that hold these experts, and the heap row at which the sender writes. The
# address is arithmetic on the counts ([`compact_row`][moe_ref.layout.compact_row]); nobody is asked.

# %%
source, token = 2, 5
routing = record.routing[source]
for k, expert in enumerate(routing.expert_SK[token].tolist()):
    rank, slot = layer.placement.rank_ED[expert, 0], layer.placement.slot_ED[expert, 0]
    before = int((routing.expert_SK.flatten()[: token * 2 + k] == expert).sum())  # its own earlier rows
    row = record.layout.first_row(source, rank, slot) + before
    weight = float(routing.weight_SK[token, k])
    print(f"choice {k}: expert {expert} = slot {slot} of rank {rank}, heap row {row}, weight {weight:.3f}")

# %% [markdown]
# ## Does the number of ranks change the result?
#
# A matrix product of 3 rows and one of 300 rows may run through different code in a BLAS library, and then a row's last
# bits depend on its companions. The reference pads every product to full tiles of 16 rows, so they do not.

# %%
with torch.no_grad():
    outputs = {p: MoELayer(config, world=p)(x_SH) for p in (1, 2, 4, 8)}
for p, y in outputs.items():
    print(f"{p} ranks: identical to 1 rank in every bit: {torch.equal(y, outputs[1])}")

# %% [markdown]
# The same holds for real processes. `torchrun --nproc-per-node 4 -m moe_ref run` prints the digest of all outputs that
# `moe-ref run` prints for 4 simulated ranks. In code: `MoELayer(config, world=DistributedWorld())` after
# `torch.distributed.init_process_group`.
#
# ## How much crosses as P grows
#
# A token whose K experts are spread over the ranks is sent K times. Sending it once per *rank* and spreading it there
# would be cheaper. By how much depends on K and P.

# %%
import numpy as np


def rows_out(ranks, top_k, experts=64, tokens=2000):
    """Rows that leave per token: (one per choice, one per destination rank)."""
    rng = np.random.default_rng(0)
    ids = rng.random((tokens, experts)).argpartition(top_k, axis=1)[:, :top_k]
    rank_of = ids // (experts // ranks)
    remote = rank_of != 0  # tokens of rank 0
    once = np.array([len(set(r[r != 0])) for r in rank_of])
    return remote.sum(axis=1).mean(), once.mean()


ranks = (1, 2, 4, 8, 16, 32, 64)
sent = {k: np.array([rows_out(p, k) for p in ranks]) for k in (2, 8)}
for k, values in sent.items():
    print(f"K={k}, 2 ranks: {values[1, 0]:.2f} rows per token, once per rank {values[1, 1]:.2f}")

# %%
# figure: Rows that leave a rank per token. Solid: one per choice, as here. Dashed: one per destination rank.
import matplotlib.pyplot as plt

fig, ax = plt.subplots()
for k, color in ((2, "C0"), (8, "C1")):
    ax.plot(ranks, sent[k][:, 0], "o-", color=color, label=f"K = {k}, one per choice")
    ax.plot(ranks, sent[k][:, 1], "o--", color=color, label=f"K = {k}, one per rank")
ax.set(xscale="log", xlabel="ranks", ylabel="rows sent per token", xticks=ranks, xticklabels=ranks)
ax.minorticks_off()
ax.legend(ncols=2)
plt.show()

# %% [markdown]
# For K = 8 on 2 ranks half of eight choices are remote: four rows, or one. With many ranks the choices of a token rarely
# share a rank, and the two curves meet.
#
# ## Check

# %%
from moe_ref.doctor import rows_are_invariant

same = torch.equal if rows_are_invariant() else torch.allclose  # a property of this machine's BLAS, so it is measured
assert all(same(y, outputs[1]) for y in outputs.values()), "the number of ranks changed the result"
assert stats.bytes_remote == leaves * config.row_bytes
assert record.counts_PE.sum() == P * 512 * config.top_k, "a row was lost"
assert (rows_PG.sum(axis=0) == stats.rank_load).all(), "a rank computes what it receives"
assert abs(leaves / rows_PG.sum() - (1 - 1 / P)) < 0.05
print("all checks passed")

# %% [markdown]
# !!! abstract "What the real kernel does instead"
#     There is no all-gather call and no all-to-all. Each rank puts its E counts into every peer's heap, with a signal
#     (`moe_fast/kernel/signals.py`), derives all offsets (`moe_fast/kernel/plan.py`), and then writes rows straight to their
#     place on the peer (`moe_fast/kernel/dispatch.py`). A receiver starts on a tile when that tile's rows have come; the
#     other stages of other tiles go on meanwhile. The baseline that it replaces, with NCCL all-to-all between the stages,
#     is `moe_fast/unfused.py`.
#
# ## Exercises
#
# 1. Give rank 1 no tokens: `layer([x0, x1[:0], x2, x3])`. What must it still do?
#
# ??? success "Answer"
#     It takes part in the counts exchange and in both row exchanges, computes the rows that others send to its experts,
#     and returns an empty output. A rank that skips a collective because it has nothing to say hangs all others.
#
# 2. What happens with `experts=10` on 4 ranks?
#
# ??? success "Answer"
#     The placement gives the first two ranks three experts and the others two
#     ([`Placement.contiguous`][moe_ref.replicas.Placement]). Slots are counted per fullest rank; an empty slot
#     simply never gets a row.
#
# 3. The counts exchange costs a round trip. Which layout does without it, and at which price?
#
# ??? success "Answer"
#     The fixed layout of the FlashMoE paper: every (source, expert) has C slots of its own, so a sender needs no counts
#     but its own. The price is C slots of memory whether used or not, and dropped rows or an error beyond C. That is
#     tutorial 3.
#
# ## In the papers
#
# FlashMoE, section 2 and figure 2(c); its "payload-efficient" communication is what the last plot is about. FineMoE,
# section 2, on expert parallelism and its two all-to-alls.
