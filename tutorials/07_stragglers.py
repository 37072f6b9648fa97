# %% [markdown]
# # 7. Stragglers: move tokens, not experts
#
# **Question.** A gate sends more tokens to some experts than to others, and all ranks wait for the busiest. How equal can
# the ranks' work be made without touching the gate and without moving a weight?
#
# **Time** 20 minutes to read. **Needs** a CPU; tutorial 2.
#
# Suppose every expert exists twice, on two different ranks. The two *replicas* are identical, so each of its rows may be
# computed on either. That is a freedom of whole rows, decided anew for every micro-batch. This tutorial finds the best
# decision, proves that it is the best, and shows how it can go wrong silently.
#
# !!! question "Predict first"
#     8 ranks, 32 experts with two replicas each, popularity by Zipf's law with exponent 0.75.
#
#     1. How busy is the busiest rank in units of the mean, without replicas?
#     2. With replicas: two equal copies of the same 4-rank layout, or overlapping sets of ranks. Does it matter which?
#     3. Two ranks solve the same linear program on the same loads. Can they get different answers?

# %%
import numpy as np

from moe_ref.balance import schedule
from moe_ref.balance.loads import LoadModel
from moe_ref.placement import Placement, by_name, symmetric

G, E, d = 8, 32, 2
model = LoadModel(num_ranks=G, num_experts=E, skew=0.75, seed=1)
batches = list(model.batches(40))  # counts_PE of 40 micro-batches
plain = Placement.contiguous(E, G)


def ratio(counts_PE, placement):
    """Load of the busiest rank in units of the mean, under the best plan that the placement allows."""
    plan = schedule(counts_PE, placement)
    return plan.max_load / (counts_PE.sum() / G)


print(f"no replicas: busiest rank {np.mean([ratio(b, plain) for b in batches]):.2f} times the mean")

# %% [markdown]
# ## A case for pen and paper
#
# Four experts on four ranks, loads 12, 4, 8, 8. Replicas in *equal* sets (experts 0 and 1 on ranks 0, 1; experts 2 and 3
# on ranks 2, 3) or in *overlapping* ones (each expert on its rank and the next).

# %%
load = [12, 4, 8, 8]
counts = np.array([load, [0] * 4, [0] * 4, [0] * 4])  # rank 0 has all tokens; for the maximum that does not matter
sets = {
    "no replicas": [[0], [1], [2], [3]],
    "equal sets": [[0, 1], [0, 1], [2, 3], [2, 3]],
    "overlapping": [[0, 1], [1, 2], [2, 3], [3, 0]],
}
for name, ranks_of_expert in sets.items():
    plan = schedule(counts, Placement.from_replicas(ranks_of_expert, 4))
    print(f"{name:12} loads {plan.rank_loads.tolist()}")
print("now expert 0 and expert 1 are both hot, 14 and 10 of 32 rows:")
hot = np.array([[14, 10, 4, 4], [0] * 4, [0] * 4, [0] * 4])
for name, ranks_of_expert in list(sets.items())[1:]:
    plan = schedule(hot, Placement.from_replicas(ranks_of_expert, 4))
    print(f"{name:12} loads {plan.rank_loads.tolist()}")

# %% [markdown]
# Equal sets balance inside a set only: 24 rows stay on two ranks. With overlapping sets the surplus is handed on, from
# rank 0 to rank 1 to rank 2, until everyone has the mean.
#
# ## The linear program
#
# With \(x_{e,g}\) rows of expert \(e\) on rank \(g\):
#
# \[ \text{minimise } m \quad\text{with}\quad \sum_{g \in R(e)} x_{e,g} = \mathrm{load}_e, \qquad
#    \sum_e x_{e,g} \le m, \qquad x \ge 0 \]
#
# In a general solver (HiGHS) this is a dozen lines:


# %%
from moe_ref.balance.lp import quiet_highs


def linear_program(load_E, placement):
    solver = quiet_highs()
    m = solver.addVariable(lb=0, obj=1)
    on_rank = [[] for _ in range(placement.num_ranks)]
    for e, ranks in enumerate(placement.ranks_of_expert):
        x = [solver.addVariable(lb=0) for _ in ranks]
        solver.addConstr(sum(x[1:], x[0]) == float(load_E[e]))
        for variable, rank in zip(x, ranks, strict=True):
            on_rank[rank].append(variable)
    for variables in on_rank:
        solver.addConstr(sum(variables[1:], variables[0]) <= m)
    solver.run()
    return solver.getInfo().objective_function_value


overlapping = symmetric(G, E, d).placement
load_E = batches[0].sum(axis=0)
optimum = linear_program(load_E, overlapping)
print(f"mean load {load_E.sum() / G:.2f}, optimum of the linear program {optimum:.2f}")

# %% [markdown]
# ## The exact flow
#
# The program above speaks of real numbers and needs a solver. The default here speaks of whole rows and needs thirty
# lines ([`moe_ref.balance.flow`][moe_ref.balance.flow]): start from any division, look for a chain of replicas that leads
# from a rank above the target to one below it, push rows along it, repeat. When no chain is left, the ranks reached form a
# *certificate*: every expert with rows on them has all its replicas among them, so nobody could do better.

# %%
plan = schedule(batches[0], overlapping)
print("rows per rank:", plan.rank_loads.tolist())
print("proven optimal:", plan.is_optimal, "- certificate: ranks", sorted(plan.certificate))
trapped = schedule([[14, 10, 4, 4], [0] * 4, [0] * 4, [0] * 4], Placement.from_replicas(sets["equal sets"], 4))
print("equal sets, both hot:", trapped.rank_loads.tolist(), "- certificate: ranks", sorted(trapped.certificate))

# %% [markdown]
# The certificate of the second plan reads: 24 rows belong to experts that live on ranks 0 and 1 only, so one of the two
# computes at least 12. Optimum of the program and maximum of the flow agree on every batch, up to whole rows:

# %%
ceilings = [int(np.ceil(linear_program(b.sum(axis=0), overlapping) - 1e-6)) for b in batches[:10]]
flows = [schedule(b, overlapping).max_load for b in batches[:10]]
print("linear program, rounded up:", ceilings)
print("exact flow:                ", flows)

# %% [markdown]
# ## Why a warm start must not decide
#
# Between micro-batches only the loads change, so a solver can start from its last answer. That is faster, and wrong here:
# the optimum is not unique, and which of the optima comes out then depends on the past. Two ranks that solve alone, one
# of them restarted yesterday, get different plans from the same counts:

# %%
from moe_ref.balance.lp import LinearProgram

veteran = LinearProgram(overlapping, "paper", warm=True)
for batch in batches[:20]:
    veteran.solve(batch.sum(axis=0))
newcomer = LinearProgram(overlapping, "paper", warm=True)
loads = batches[20].sum(axis=0)
one, other = veteran.solve(loads), newcomer.solve(loads)
apart = int(np.abs(one.rows_ED - other.rows_ED).max())
print(f"same maximum: {one.max_load} and {other.max_load}; largest difference on one replica: {apart} rows")
again = schedule(batches[20], overlapping)
print(
    "the flow, asked twice:",
    "same plan" if again.digest() == schedule(batches[20], overlapping).digest() else "differs",
)

# %% [markdown]
# A rank that expects 900 rows of a replica and gets 1500 does not crash. It waits for rows that never come, or reads some
# that are not there. So plans here are pure functions of (counts, placement), and
# [`check_same_plan`][moe_ref.balance.agreement.check_same_plan] compares a hash of them across ranks.
#
# ## Local first
#
# Quotas say how many rows a replica computes, not whose. A rank's own rows fill its own replica first, because they need
# not travel:

# %%
share = np.mean([schedule(b, overlapping).local_share for b in batches])
plain_share = np.mean([schedule(b, plain).local_share for b in batches])
print(
    f"rows that stay on their rank: {share:.1%} with scheduling, {plain_share:.1%} without replicas (1/G = {1 / G:.1%})"
)

# %% [markdown]
# Balance and locality are won together: the search starts from "every rank serves itself" and levels only what is too much.
#
# ## All micro-batches

# %%
# figure: Busiest rank in units of the mean, 40 micro-batches, sorted. 1.0 means that nobody waits.
import matplotlib.pyplot as plt

placements = {
    "no replicas": plain,
    "two replicas, equal sets": by_name("merged", G, E, d).placement,
    "two replicas, overlapping": overlapping,
}
ratios = {name: np.sort([ratio(b, p) for b in batches]) for name, p in placements.items()}
fig, ax = plt.subplots()
for name, values in ratios.items():
    ax.plot(values, ".-", label=f"{name}: mean {values.mean():.3f}")
ax.set(xlabel="micro-batch, sorted", ylabel="busiest rank / mean", title=f"{G} ranks, {E} experts, Zipf 0.75")
ax.legend()
plt.show()

# %% [markdown]
# The distance between the upper curves and 1.0 is time in which ranks wait. Equal sets gain next to nothing; overlapping
# sets gain nearly all. How far that goes, and which sets are best, is [tutorial 8](08_placement.md).
#
# ## Check

# %%
assert flows == ceilings, "flow and linear program disagree"
assert all(schedule(b, overlapping).is_optimal for b in batches)
assert trapped.max_load == 12
assert sorted(trapped.certificate) == [0, 1]
assert one.max_load == other.max_load
assert apart > 0, "the two histories happened to agree; the point still stands"
assert (schedule(batches[0], overlapping).counts_PE == batches[0]).all(), "a row was lost"
assert ratios["two replicas, overlapping"].mean() < 1.02 < ratios["no replicas"].mean()
print("all checks passed")

# %% [markdown]
# !!! abstract "What the real kernel does instead"
#     The counts of all ranks are exchanged inside the kernel anyway, for the addresses
#     ([tutorial 3](03_symmetric_heap.md)), so scheduling needs no message of its own. Between the gate and the first row,
#     the plan is made on the host by the compiled flow ([`flow_compiled`][moe_ref.balance.flow_compiled], the same steps
#     and the same answer) while the GPU sorts, or handed in before the launch. From there on a replica is a slot like any
#     other (`moe_fast/kernel/plan.py`).
#
# ## How long does it take?
#
# {{ table balance_64x256 solvers median_us,p95_us,quota_median_us,exact }}
#
# Microseconds per plan for 64 ranks and 256 experts on one core, through Python; `quota` includes who sends what to whom.
#
# {{ provenance balance_64x256 }}
#
# ## Exercises
#
# 1. Set `skew=1.5` above and run again. Why does the overlapping placement fail, and what does the certificate say?
#
# ??? success "Answer"
#     The hottest expert alone then has more rows than two ranks' fair share. The certificate is its two ranks (perhaps
#     with further experts that live only there). More replicas of that expert are the only way out.
#
# 2. Let three replicas exist (`symmetric(G, E, 3)`). What does it cost, and what does it buy at skew 0.75?
#
# ??? success "Answer"
#     Half as much expert memory again, and nothing at this skew: balance was perfect already. It moves the skew at which
#     the hottest expert stops fitting, from \(p_1 \le 2/G\) to \(p_1 \le 3/G\).
#
# 3. Pass a count of −1, or NaN, to `schedule`. Why is it refused before a solver sees it?
#
# ??? success "Answer"
#     HiGHS refuses a NaN bound with an error code, keeps the old bound, and then reports "optimal" with the plan of the
#     step before. Nothing looks wrong.
#
# ## In the papers
#
# FineMoE (arXiv 2511.16947), section 3 (equal and overlapping groups, figure 3), section 4 (the linear program, routing
# by locality, every rank for itself) and its overhead figures.
