# %% [markdown]
# # 5. Breaking it: lost signals, stale flags, reused buffers
#
# **Question.** A protocol without barriers works in a thousand runs. How do we know that it works in the run after that?
#
# **Time** 20 minutes to read. **Needs** a CPU; tutorial 4.
#
# Every message of the runtime can be delayed: a payload, its signal, the end of a task, the launch of the next call. On a
# GPU chance picks the order. Here we let an *adversary* pick it, search all orders of a small case, and break the rules one
# by one to see whether the search notices.
#
# !!! question "Predict first"
#     Two ranks, two tokens each, two calls in a row.
#
#     1. How many distinct states can the two ranks and the messages in flight be in: dozens, thousands, millions?
#     2. Which of these bugs would you find by running the program a thousand times: a signal that overtakes its data; one
#        staging buffer instead of two; flags that are reset between calls; a task total that is one too large?

# %%
import numpy as np

from moe_ref.placement import Placement
from moe_ref.runtime.callplan import make_call
from moe_ref.runtime.checker import random_order
from moe_ref.runtime.explorer import Explorer
from moe_ref.runtime.messages import ProtocolViolation, Rules
from moe_ref.runtime.tasks import TileShape

shape = TileShape(hidden=8, intermediate=8, top_k=2, tile_rows=2, tile_columns=4, token_rows=2)


def make_calls(*routings):
    """Calls of two ranks with one expert each; a routing is expert ids [S, K] per rank."""
    return [
        make_call(list(map(np.array, ids)), Placement.contiguous(2, 2), shape, epoch=i)
        for i, ids in enumerate(routings)
    ]


# In the first call rank 0 keeps all its rows, so it can run ahead of rank 1.
first = [[[0, 0], [0, 0]], [[1, 1], [1, -1]]]
second = [[[0, 1], [1, 0]], [[0, 1], [1, 1]]]
calls = make_calls(first, second)
print("tasks per rank in call 0 and 1:", [[len(call.tasks(rank)) for rank in (0, 1)] for call in calls])

# %% [markdown]
# ## What is checked
#
# Instead of tensors, every memory cell carries a stamp: which call wrote it, with what, and how often it must still be
# read ([`moe_ref.runtime.stamps`][moe_ref.runtime.stamps]). In every step:
#
# - a read sees the call it is for (else *stale* or *unwritten*),
# - a write destroys nothing that is still to be read (else *overwritten*),
# - every task runs exactly once, and results are right,
# - something can always move until both calls have ended (else *deadlock*).
#
# ## Right rules, every order

# %%
found = Explorer(calls, processors=1).run()
print(f"{found.states:,} distinct states, {found.transitions:,} deliveries, all seen: {found.complete}")
print("violation:", found.violation, "- final states:", found.finals)

# %% [markdown]
# All orders end in *one* final state: whatever the network does, the result is the same. That is the deterministic
# claim of this project, proven for this case and no larger one.
#
# ## Wrong rules
#
# The rules are a dataclass ([`Rules`][moe_ref.runtime.messages.Rules]) whose defaults are right. Every other value is a bug.

# %%
bugs = {
    "the signal overtakes its payload": Rules(payload_first=False),
    "one staging side": Rules(sides=1, row_sides=1),
    "counters are reset at each call": Rules(keep_counters=False),
    "a wake-up is lost": Rules(recheck=False),
    "one task too few is expected": Rules(extra_tasks=-1),
    "one task too many is expected": Rules(extra_tasks=1),
}
searches = {name: Explorer(calls, processors=1, rules=rules).run() for name, rules in bugs.items()}
for name, search in searches.items():
    print(f"{name}: {search.violation.rule}, after {search.states:,} states, in {len(search.path)} deliveries")
    print(f"    {search.violation.text}")

# %% [markdown]
# ## Read a counterexample
#
# A violation comes with the deliveries that lead to it. The adversary's way to the one-side bug:

# %%
for step, delivery in enumerate(searches["one staging side"].path, 1):
    print(f"{step:3d}. {delivery}")
print("=>", searches["one staging side"].violation)

# %% [markdown]
# From the command line: `moe-ref protocol --break one-side`.
#
# A fast rank starts its next call while a slow one still has something of this call to read. With two sides it would have to
# be two calls ahead; it cannot be, because the call between them needs the slow rank's counts.
#
# ## How often would chance have found it?
#
# Run each bug 300 times, with a random order of deliveries each time.


# %%
def share_found(rules, runs=300):
    hits = 0
    for seed in range(runs):
        try:
            random_order(calls, seed, rules=rules)
        except ProtocolViolation:
            hits += 1
    return hits / runs


chance = {name: share_found(rules) for name, rules in bugs.items()}
right = share_found(Rules())

# %%
# figure: Share of 300 random orders that show the bug. A bug that shows in one of five runs is found at once; one that needs a rare order waits for production. The search finds all of them.
import matplotlib.pyplot as plt

fig, ax = plt.subplots()
names = list(bugs)
ax.barh(names, [chance[n] * 100 for n in names])
for y, name in enumerate(names):
    ax.text(chance[name] * 100 + 1, y, f"{chance[name]:.0%}", va="center")
ax.set(xlabel="random orders that show the bug, %", xlim=(0, 112))
ax.invert_yaxis()
plt.show()

# %% [markdown]
# The random orders here are cruel: every message may be delayed for ever so long. Real networks are kinder, so real runs
# find less. That the rarest case is one of memory reuse is no accident; it needs one rank to be a whole call ahead.
#
# ## When a peer dies
#
# No rule is broken, but a message never comes. Every wait has a deadline, and what is raised says who waited for what:

# %%
from moe_ref.runtime.machine import machine
from moe_ref.runtime.messages import MegakernelTimeout
from moe_ref.runtime.simulator import Simulator

try:
    Simulator(calls, machine("h200-2"), experts=2, deadline_us=500, dead_ranks=frozenset({1})).run()
except MegakernelTimeout as error:
    timeout = error
    print(type(error).__name__ + ":", error)

# %% [markdown]
# ## Check

# %%
assert found.complete
assert found.violation is None
assert found.finals == 1
assert right == 0, "the right rules failed in a random order"
for name, search in searches.items():
    assert search.violation is not None, f"the search missed: {name}"
    assert search.path, "a violation without a way to it"
assert searches["counters are reset at each call"].violation.rule == "deadlock"
assert any("rank 1" in str(wait) for wait in timeout.waits)
print("all checks passed")

# %% [markdown]
# !!! abstract "What the real kernel does instead"
#     Counters in device memory that only grow, a call number that lives there too, two staging sides
#     (`moe_fast/kernel/signals.py`). Every spin loop reads a clock; on expiry it writes the same record (rank, role, what,
#     seen, expected) and raises a flag that all roles poll, the kernel ends, and the host raises `MegakernelTimeout`.
#     What the checker cannot see is *memory ordering* inside the GPU: whether a store is visible when the signal is. The
#     rules for that are in [memory ordering](../concepts/memory-ordering.md), and they are tested on the device with
#     poisoned buffers.
#
# ## Exercises
#
# 1. `Rules(row_sides=1)` with these calls is *not* a bug. Why? (It is one in the paper's layout.)
#
# ??? success "Answer"
#     In the compact layout rows wait for the counts of all ranks. A peer's counts of call n+1 say that it has ended
#     call n, so all its reads are done. In the fixed layout rows are sent before that is known.
#     `tests/runtime/test_checker.py` shows both.
#
# 2. Why is "one task too many" a deadlock and not a wrong result?
#
# ??? success "Answer"
#     The scheduler waits for a task that will never become ready. Termination by exact totals is free, but the totals
#     must be exact.
#
# 3. Set `inside=True` in `Explorer`. What becomes free, and what happens to the number of states?
#
# ??? success "Answer"
#     Also the messages inside a rank (ready, mail, idle) are delivered in any order. The states grow by an order of
#     magnitude; on a GPU those messages are stores of other warps, and their order is free indeed.
#
# ## In the papers
#
# FlashMoE, section 3.2 (one-sided communication, temporal buffering); its shipped code resets flags from the host.
