# %% [markdown]
# # 10. Test your own kernel
#
# **Question.** You have an MoE function of your own: a Triton kernel, a library call, a clever index trick. How do you find
# out whether it is right, and if not, where?
#
# **Time** 15 minutes to read. **Needs** a CPU; tutorial 1.
#
# "Equal to the reference on random input" is a weak test. Kernels of this kind fail at borders: no token, one token, one
# more than a tile; an expert without rows; the same expert twice; a masked route; padding full of garbage.
# [`check`][moe_ref.diff.check] tries those.
#
# !!! question "Predict first"
#     Below are four functions with one planted bug each. Before each run, read the function and say on which kind of
#     routing it will fail first: uniform, skewed, all to one expert, masked, duplicates?

# %%
import torch
import torch.nn.functional as F

from moe_ref import MoEConfig, cases
from moe_ref.diff import check

torch.set_num_threads(1)
for name, meaning in cases.KINDS.items():
    print(f"{name:12} {meaning}")

# %% [markdown]
# ## A function that is right
#
# It takes tokens, the layer's parameters by name, and a routing. It gathers the rows of each expert and adds in the order
# of the choices.


# %%
def rows_of(routing, e):
    """(token, choice) of all routes to expert e."""
    return (routing.expert_SK == e).nonzero(as_tuple=True)


def ffn(rows, weights, e):
    gate, up = F.linear(rows, weights["gate_up_proj"][e]).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, weights["down_proj"][e])


def mine(x, weights, routing):
    S, K = routing.expert_SK.shape
    out = x.new_zeros(S, K, x.shape[1])
    for e in range(len(weights["down_proj"])):
        token, choice = rows_of(routing, e)
        out[token, choice] = ffn(x[token], weights, e)
    return (out * routing.weight_SK[:, :, None]).sum(dim=1)


print(check(mine))

# %% [markdown]
# ## Bug 1: a Boolean mask


# %%
def boolean_mask(x, weights, routing):
    y = torch.zeros_like(x)
    for e in range(len(weights["down_proj"])):
        chosen = (routing.expert_SK == e).any(dim=1)
        weight = torch.where(routing.expert_SK == e, routing.weight_SK, 0).amax(dim=1)
        y[chosen] += weight[chosen, None] * ffn(x[chosen], weights, e)
    return y


report_1 = check(boolean_mask)
print(report_1)

# %% [markdown]
# Right on every ordinary routing. With the same expert twice in a token's choices, `amax` keeps one weight and loses the
# other; only the case `duplicates` shows it.
#
# ## Bug 2: the id −1


# %%
def negative_index(x, weights, routing):
    out = torch.stack(
        [
            torch.stack([ffn(x[s : s + 1], weights, int(e))[0] for e in ids])
            for s, ids in enumerate(routing.expert_SK)
        ]
    ) if len(x) else x.new_zeros(0, routing.expert_SK.shape[1], x.shape[1])  # fmt: skip
    return (out * routing.weight_SK[:, :, None]).sum(dim=1)


report_2 = check(negative_index, sizes=(0, 1, 17))
print(report_2)

# %% [markdown]
# In Python index −1 is the last expert. In a GPU kernel it is an address before the buffer.
#
# ## Bug 3: tiles of 16 rows, the last one forgotten


# %%
def whole_tiles_only(x, weights, routing):
    S, K = routing.expert_SK.shape
    out = x.new_zeros(S, K, x.shape[1])
    for e in range(len(weights["down_proj"])):
        token, choice = rows_of(routing, e)
        tiles = -(-len(token) // 16) if e != 5 else len(token) // 16  # expert 5 rounds down
        for t in range(tiles):
            at = slice(16 * t, 16 * (t + 1))
            out[token[at], choice[at]] = ffn(x[token[at]], weights, e)
    return (out * routing.weight_SK[:, :, None]).sum(dim=1)


report_3 = check(whole_tiles_only)
print(report_3)

# %% [markdown]
# The note says it all: every wrong token, and no right one, was routed to expert 5.
#
# ## Bug 4: a sum in 16 bits


# %%
def sums_in_16_bits(x, weights, routing):
    y = torch.zeros_like(x, dtype=torch.bfloat16)
    for k in range(routing.expert_SK.shape[1]):
        for e in range(len(weights["down_proj"])):
            token = (routing.expert_SK[:, k] == e).nonzero()[:, 0]
            part = routing.weight_SK[token, k, None] * ffn(x[token], weights, e)
            y[token] += part.bfloat16()
    return y.to(x.dtype)


report_4 = check(sums_in_16_bits)
print(report_4)

# %% [markdown]
# ## The whole backend, stage by stage
#
# A function shows only its output. A *backend* ([how to add one](../howto/add-backend.md)) shows its intermediates, and
# then a difference is found where it arises. As an example, take the reference and plant a bug behind GEMM0: one element of
# one hidden tile.

# %%
from moe_ref import MoELayer
from moe_ref.backends import ReferenceBackend
from moe_ref.diff import compare


class Broken(ReferenceBackend):
    name = "broken"

    def forward(self, layer, x_SH, routing, *, keep=False):
        good = super().forward(layer, x_SH, routing, keep=True)
        hidden_ND = [h.clone() for h in good.hidden_ND]
        hidden_ND[1][40, 7] += 0.5  # rank 1, row 40, column 7
        return self.resume(layer, x_SH, good.routing, type(good)(hidden_ND=hidden_ND))


config = MoEConfig(hidden=64, intermediate=96, experts=8, top_k=2)
layer = MoELayer(config, world=2)
xs = [cases.make_tokens(100, config, seed) for seed in (0, 1)]
report_5 = compare(Broken(), "ref", layer, xs)
print(report_5)

# %% [markdown]
# Read it from the top: routing, counts, plan and dispatched rows are equal; GEMM0 differs in one element; everything after
# it differs *because of it*. To test a later stage alone, feed it the reference's input: `compare(..., start_from="gemm1")`.

# %%
# figure: Wrong tiles per stage. One wrong element of a hidden tile becomes a wrong row, and a wrong token at its home rank.
import matplotlib.pyplot as plt

stages = [b.buffer for b in report_5.buffers]
wrong = [b.wrong_elements for b in report_5.buffers]
fig, ax = plt.subplots()
ax.bar(stages, wrong, color=["C0" if w == 0 else "C1" for w in wrong])
for i, count in enumerate(wrong):
    ax.text(i, count + 1, str(count), ha="center")
ax.set(ylabel="wrong elements", title="One planted element, seen at every stage")
ax.tick_params(axis="x", rotation=30)
plt.show()

# %% [markdown]
# On a GPU the same comparison is one command: `moe-ref diff --backend fused --against ref --dtype bfloat16`.
#
# ## Check

# %%
assert check(mine).ok
for report, kind in ((report_1, "duplicates"), (report_2, "masked"), (report_3, "uniform")):
    assert not report.ok
    assert f"case: {kind}" in report.note, report.note
assert "expert 5" in report_3.note
assert not report_4.ok
assert report_5.first.stage == "gemm0"
assert (report_5.first.rank, report_5.first.column) == (1, 7)
assert [b.ok for b in report_5.buffers if b.stage in ("gate", "counts", "plan", "dispatch")] == [True] * 5
print("all checks passed")

# %% [markdown]
# !!! abstract "What the real kernel does instead"
#     `moe_fast` is tested by this harness and nothing else: every named buffer of every rank, workspaces full of NaN, calls
#     in a row with changing sizes, and a second run for equal bits. See `tests/gpu/` and [`moe_ref.cases`][moe_ref.cases].
#
# ## Exercises
#
# 1. Your kernel has the signature `f(x, w1, w2, ids, weights)`. Write the adapter.
#
# ??? success "Answer"
#     `check(lambda x, w, r: f(x, w["gate_up_proj"], w["down_proj"], r.expert_SK, r.weight_SK))`. For a GPU add
#     `device="cuda"` and a config with `dtype="bfloat16"`.
#
# 2. Which tolerance should a bfloat16 kernel be held against, and why not the one of fp32?
#
# ??? success "Answer"
#     [`TOLERANCE`][moe_ref.comparison] has one per dtype. In bfloat16 two correct kernels differ wherever their sums are
#     grouped differently before rounding. If the order of sums is the same, demand equal bits instead.
#
# 3. Plant a bug of your own in `mine` that `check` does *not* find. Which case is missing?
#
# ??? success "Answer"
#     For example a 32-bit offset overflow: no case is large enough. Such a bug needs a test of the address arithmetic
#     alone, as `tests/test_layout.py` has one.
#
# ## In the papers
#
# Neither has a section on testing. The failures that these cases stand for are listed in
# [what goes wrong in practice](../concepts/what-goes-wrong.md).
