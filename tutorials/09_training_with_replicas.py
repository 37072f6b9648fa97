# %% [markdown]
# # 9. Training with replicas
#
# **Question.** In training, every replica of an expert sees other tokens, and the loads drift while the gate learns. How
# do replicas stay identical, and does the placement keep up?
#
# **Time** 20 minutes to read. **Needs** a CPU; tutorials 7 and 8. It trains a small language model on bytes of the Python
# documentation, on 8 simulated ranks, without any balancing loss: the worst case for balance.
#
# !!! question "Predict first"
#     1. Two replicas of an expert got 90 and 10 of its rows. To get the gradient of the whole batch: add the two weight
#        gradients, take their mean, or weigh them 9 to 1?
#     2. A gate that was just initialised is nearly even. What happens to the busiest rank in the first fifty steps?
#     3. After moving experts to other ranks, how much may the output of the layer change?

# %%
import numpy as np
import torch

from moe_ref import MoEConfig, MoELayer, SimulatedWorld
from moe_ref.placement import by_name, symmetric

torch.set_num_threads(1)

# %% [markdown]
# ## Sum, never mean
#
# Let the loss be a sum over tokens, divided at the end by the number of tokens of the *whole* batch. An expert's weight
# gradient is then a sum over its rows, wherever they were computed. Here one expert's 100 rows are split 90 to 10:

# %%
config = MoEConfig(hidden=32, intermediate=48, experts=1, top_k=1, dtype="float64")
torch.manual_seed(0)
x_SH, goal_SH = torch.randn(2, 100, 32, dtype=torch.float64)


def gradient(tokens):
    """Weight gradient of the expert from some of the tokens, as its replica computes it."""
    layer = MoELayer(config)
    loss = ((layer(x_SH[tokens]) - goal_SH[tokens]) ** 2).sum() / len(x_SH)
    loss.backward()
    return layer.down_proj.grad


whole = gradient(slice(0, 100))
one, other = gradient(slice(0, 90)), gradient(slice(90, 100))
errors = {}
for name, value in {"sum": one + other, "mean": (one + other) / 2, "9 to 1": 0.9 * one + 0.1 * other}.items():
    errors[name] = float((value - whole).norm() / whole.norm())
    print(f"{name:7} relative error {errors[name]:.1e}")

# %% [markdown]
# The denominator belongs to the batch, not to the replica set. With the mean, an expert with two replicas learns at half
# the rate, one with eight at an eighth, and nothing crashes. The same care is due in the norm for clipping (an expert
# counts once, however many replicas it has) and for an expert without tokens: its gradient is zero, not missing, or the
# ranks' collectives do not match.
#
# ## A training run
#
# [`train`][moe_ref.train.job.train] is a loop to copy: forward with a plan per micro-batch, backward with the *same*
# plan, gradients summed over replica sets, optimiser step, and now and then a look at the placement.

# %%
from moe_ref.train.job import TrainJob, train

job = TrainJob(steps=45, experts=16, top_k=2, replicas=2, interval=15, balance=0.0, text="excerpt")
outcome, training = train(job, SimulatedWorld(8))
print(
    f"{sum(p.numel() for p in training.parameters()):,} parameters, {len(training.layers)} MoE layers of {job.experts} experts"
)
print(f"bits per byte: {outcome.losses[0]:.2f} -> {outcome.losses[-1]:.2f} in {job.steps} steps")

# %% [markdown]
# With real processes: `moe-ref train --ranks 4 --balance-loss 0`; see [how to](../howto/train.md).
#
# ## Loads over time

# %%
# figure: Above: rows of the 16 experts of the second MoE layer, step by step; bright is busy. Below: busiest rank in units of the mean. Dashed: plain expert parallelism on the same loads. Dotted lines: the manager's checks.
import matplotlib.pyplot as plt

load_TE = np.array(outcome.load_TLE)[:, 1]
plain_T, scheduled_T = np.array(outcome.plain_TL)[:, 1], np.array(outcome.scheduled_TL)[:, 1]
fig, axes = plt.subplots(2, 1, figsize=(7.2, 5.0), sharex=True)
axes[0].imshow(
    load_TE.T, aspect="auto", cmap="viridis", interpolation="nearest", extent=(0.5, job.steps + 0.5, 15.5, -0.5)
)
axes[0].set(ylabel="expert", title="A gate that learns, without a balancing loss")
axes[0].grid(False)
steps = np.arange(1, job.steps + 1)
axes[1].plot(steps, plain_T, "--", label="no replicas")
axes[1].plot(steps, scheduled_T, label="two replicas on average, scheduled, re-placed")
for step in range(job.interval, job.steps, job.interval):
    axes[1].axvline(step + 0.5, color="0.4", ls=":")
axes[1].set(xlabel="step", ylabel="busiest rank / mean", ylim=(0.9, None))
axes[1].legend()
plt.show()

# %% [markdown]
# Within some ten steps a few experts take most of the rows, and plain expert parallelism would wait (dashed). Scheduling
# on the first, symmetric placement helps as far as the hottest expert fits on its two ranks; after the manager has
# re-placed for the loads that it saw, nobody waits.
#
# ## The manager's log
#
# At every check it predicts loads by a moving average, asks the density formula what the present placement makes of them,
# and moves only if what is saved until the next check exceeds the cost of moving weights, masters and both moments.

# %%
for decision in outcome.decisions:
    print(
        f"step {decision['step']:3d} {decision['layer']}: {'moved' if decision['moved'] else 'stayed'}; {decision['reason']}"
    )
print(f"{outcome.moves} experts moved, {outcome.moved_bytes / 1e6:.1f} MB with their optimiser state")

# %% [markdown]
# Costs and savings in that log use nominal rates, so that all ranks decide alike; they are not measurements.
#
# ## Moving changes no bit
#
# A replica is the same numbers elsewhere, and a row's bits do not depend on its companions. So outputs before and after a
# re-placement must agree exactly, and a difference means that something was mixed up.

# %%
small = MoEConfig(hidden=64, intermediate=96, experts=16, top_k=2)
x_SH = torch.randn(200, 64)
skewed = np.arange(1, 17) ** 2
outputs = []
for placement in (symmetric(8, 16, 2).placement, by_name("asymmetric", 8, 16, 2, skewed).placement):
    with torch.no_grad():
        y_SH, stats = MoELayer(small, world=8, placement=placement)(x_SH, return_stats=True)
    outputs.append(y_SH)
    print("replica counts", placement.replica_counts.tolist(), "- rows per rank", stats.rank_load.tolist())
print("same bits:", torch.equal(*outputs))

# %% [markdown]
# ## Check

# %%
from moe_ref.doctor import rows_are_invariant

assert errors["sum"] < 1e-12 < 0.1 < min(errors["mean"], errors["9 to 1"])
assert outcome.losses[-1] < 0.6 * outcome.losses[0], "it did not learn"
late = slice(31, None)
assert plain_T[late].mean() > 1.3, "the loads stayed even; nothing to balance"
assert scheduled_T[late].mean() < 1.1 < plain_T[late].mean()
assert any(decision["moved"] for decision in outcome.decisions)
assert torch.equal(*outputs) if rows_are_invariant() else torch.allclose(*outputs)
print("all checks passed")

# %% [markdown]
# !!! abstract "What the real kernel does instead"
#     The kernel computes the forward; the backward recomputes the unfused chain with the forward's routing. On real ranks
#     the gradients of overlapping replica sets are the difficulty. Every set is a group of its own, a rank belongs to several, and all must walk them in the same order or
#     they wait for each other for ever; see [`moe_ref.train.exchange`][moe_ref.train.exchange]. Sums run in replica order
#     on every rank, so replicas stay equal in every bit.
#
# ## Exercises
#
# 1. Set `balance=0.01` (the usual balancing loss). What happens to the loads, and to the bits per byte?
#
# ??? success "Answer"
#     The dashed line falls towards 1, so there is less to gain. The loss of the model may rise: the gate now serves two
#     masters. Scheduling needs no such compromise, which is the argument of the paper.
#
# 2. Set `interval=1`. Is the manager's caution worth anything?
#
# ??? success "Answer"
#     It checks at every step, predicts from little, and moves more often. Look at `moved_bytes`. Checks become rarer by
#     themselves when nothing has to move.
#
# 3. The backward must use the plan of the forward. What goes wrong if activation recomputation solves again?
#
# ??? success "Answer"
#     With a solver that remembers, the second plan can differ from the first; rows then arrive at other replicas, and
#     gradients go to the wrong rank's weights. [`moe_ref.train.recompute`][moe_ref.train.recompute] keeps the plan.
#
# ## In the papers
#
# FineMoE, section 5.2 (the wrapper and its gradients), section 6.4 (adaptive re-placement), figures 7 and 9. Its end-to-end
# gains were measured on 32 GPUs and are not reproduced here; see [the claims](../recorded/claims.md).
