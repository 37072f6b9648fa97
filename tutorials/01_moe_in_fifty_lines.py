# %% [markdown]
# # 1. A Mixture-of-Experts layer in fifty lines
#
# **Question.** What does a Mixture-of-Experts (MoE) layer compute, and how can a program that computes it be checked?
#
# **Time** 12 minutes to read. **Needs** a CPU, nothing else.
#
# A feed-forward network (FFN) of a transformer spends the same weights on every token. An MoE layer owns \(E\) such
# networks, the *experts*, and sends each token to \(K\) of them. A small linear map, the *gate*, chooses. So the number
# of weights grows with \(E\), and the arithmetic per token grows with \(K\) only.
#
# Letters, as everywhere in this project: S tokens, H hidden width, D intermediate width, E experts, K choices per token.
# A tensor's name ends with its dimensions: `x_SH` is tokens times hidden width.
#
# !!! question "Predict first"
#     1. With \(E = 8\), \(K = 2\), which share of the arithmetic of "all experts on all tokens" is left?
#     2. The gate was trained on text. Of 32 experts with 4 choices per token, how much busier than the mean is the
#        busiest expert: 1.2 times, 2 times, 5 times?
#     3. Two correct programs sum in different orders. By how much, relatively, do their fp32 results differ?

# %%
import torch
import torch.nn.functional as F

torch.manual_seed(0)
S, H, D, E, K = 512, 64, 96, 8, 2
x_SH = torch.randn(S, H)
router_EH = torch.randn(E, H) / H**0.5
gate_up_EUH = torch.randn(E, 2 * D, H) / H**0.5  # U = 2D: gate rows, then up rows
down_EHD = torch.randn(E, H, D) / D**0.5

# %% [markdown]
# ## The gate
#
# Scores are a softmax over the experts; the best \(K\) are kept and their scores divided by their sum, so a token's
# weights add up to one:
#
# \[ p = \mathrm{softmax}(x W^\top), \qquad w_{s,k} = \frac{p_{s,e_k}}{\sum_{j} p_{s,e_j}} \]


# %%
def gate(x_SH, router_EH, k):
    scores_SE = F.linear(x_SH, router_EH).softmax(dim=-1)
    weight_SK, expert_SK = scores_SE.topk(k)
    return expert_SK, weight_SK / weight_SK.sum(dim=-1, keepdim=True)


expert_SK, weight_SK = gate(x_SH, router_EH, K)
print("token 0 goes to experts", expert_SK[0].tolist(), "with weights", [f"{w:.3f}" for w in weight_SK[0]])

# %% [markdown]
# ## The experts
#
# Each expert is a gated FFN: \(\mathrm{FFN}(x) = (\mathrm{silu}(x W_g^\top) \odot x W_u^\top)\, W_d^\top\).


# %%
def ffn(x_NH, gate_up_UH, down_HD):
    gate_ND, up_ND = F.linear(x_NH, gate_up_UH).chunk(2, dim=-1)
    return F.linear(F.silu(gate_ND) * up_ND, down_HD)


# %% [markdown]
# ## The layer
#
# Sort the S·K routes by expert. The rows of one expert are then consecutive and its FFN is one matrix product. Results
# go back to row (token, choice), and only there are they weighted and summed. Every route has a row of its own: nobody
# adds to a row that somebody else adds to, so the order of the sum is fixed.


# %%
def moe(x_SH, expert_SK, weight_SK, gate_up_EUH, down_EHD):
    S, K = expert_SK.shape
    route_N = expert_SK.flatten().argsort(stable=True)  # route = token * K + choice, expert-major
    counts_E = expert_SK.flatten().bincount(minlength=len(down_EHD))
    rows_NH = x_SH[route_N // K]  # dispatch
    out_NH = torch.empty_like(rows_NH)
    start = 0
    for e, count in enumerate(counts_E.tolist()):
        block = slice(start, start + count)
        out_NH[block] = ffn(rows_NH[block], gate_up_EUH[e], down_EHD[e])
        start += count
    returned_NH = torch.empty_like(out_NH)
    returned_NH[route_N] = out_NH  # return: row token * K + choice
    y_SH = torch.zeros_like(x_SH)
    for k in range(K):  # combine, in choice order
        y_SH += weight_SK[:, k : k + 1] * returned_NH.view(S, K, -1)[:, k]
    return y_SH


y_SH = moe(x_SH, expert_SK, weight_SK, gate_up_EUH, down_EHD)
print("y", tuple(y_SH.shape), "norm", f"{y_SH.norm():.2f}")

# %% [markdown]
# ## The definition
#
# How do we know that this is right? By a second program that is slow and obvious. Run every expert on every token and
# weigh with a matrix \(c_{s,e}\) that is zero where token \(s\) did not choose expert \(e\):
#
# \[ y_s = \sum_e c_{s,e}\, \mathrm{FFN}_e(x_s) \]
#
# In float64 the order of summation does not show, so this is what all else is held against.


# %%
def definition(x_SH, expert_SK, weight_SK, gate_up_EUH, down_EHD):
    combine_SE = torch.zeros(len(x_SH), len(down_EHD), dtype=x_SH.dtype)
    combine_SE.scatter_add_(1, expert_SK, weight_SK)
    up_SEU = torch.einsum("sh,euh->seu", x_SH, gate_up_EUH)
    gate_SED, up_SED = up_SEU.chunk(2, dim=-1)
    out_SEH = torch.einsum("sed,ehd->seh", F.silu(gate_SED) * up_SED, down_EHD)
    return torch.einsum("se,seh->sh", combine_SE, out_SEH)


def relative_error(y, exact):
    return float((y.double() - exact).norm() / exact.norm())


exact_SH = definition(x_SH.double(), expert_SK, weight_SK.double(), gate_up_EUH.double(), down_EHD.double())
print(f"relative error against the definition: {relative_error(y_SH, exact_SH):.1e}")

# %% [markdown]
# That is a few units in the last place of fp32 (2⁻²⁴ ≈ 6·10⁻⁸), the answer to prediction 3. The sort-based layer did
# \(S K\) rows of arithmetic, the definition \(S E\): a share of \(K/E\), here a quarter.
#
# ## The same layer in `moe_ref`
#
# [`MoELayer`][moe_ref.layer.MoELayer] is this program with its edges filed: capacity, biases, shared experts,
# several ranks, other gates. Its parameters have the same shapes, so it can be given ours.

# %%
from moe_ref import MoEConfig, MoELayer

layer = MoELayer(MoEConfig(hidden=H, intermediate=D, experts=E, top_k=K))
layer.load_state_dict({"router.weight": router_EH, "gate_up_proj": gate_up_EUH, "down_proj": down_EHD})
with torch.no_grad():
    theirs_SH, stats = layer(x_SH, return_stats=True)
print(f"moe_ref against the definition: {relative_error(theirs_SH, exact_SH):.1e}")
print(f"moe_ref against ours:           {relative_error(theirs_SH, y_SH.double()):.1e}")
print("rows per expert:", stats.expert_load.tolist())

# %% [markdown]
# ## What a trained gate does
#
# Random weights spread tokens evenly. A trained gate does not. The package ships a small byte-level language model with
# a trained MoE layer (32 experts, 4 choices); here it reads the documentation of Python, as `moe-ref run` does.

# %%
from moe_ref.main_job import trained_layer
from moe_ref.text import load_text
from moe_ref.train.checkpoint import tiny_moe
from moe_ref.train.model import hidden_states

config, state = trained_layer()
trained = MoELayer(config)
trained.load_logical_state_dict(state)
text = load_text("excerpt", 4096).data
with torch.no_grad():
    _, stats = trained(hidden_states(tiny_moe()[0], text, len(text)), return_stats=True)
load_E = stats.expert_load
print(f"{len(text)} tokens x {config.top_k} choices = {load_E.sum()} rows on {config.experts} experts")
print(
    f"busiest expert {load_E.max()} rows, mean {load_E.mean():.0f}: {load_E.max() / load_E.mean():.2f} times the mean"
)

# %%
# figure: Rows per expert, sorted. The dashed line is the mean. Whoever holds the experts on the left works longest.
import matplotlib.pyplot as plt

fig, ax = plt.subplots()
ax.bar(range(config.experts), sorted(load_E, reverse=True))
ax.axhline(load_E.mean(), color="0.3", ls="--", lw=1)
ax.set(xlabel="expert, busiest first", ylabel="rows", title="A trained gate on 4096 bytes of text")
plt.show()

# %% [markdown]
# Read it aloud: if every expert lived on a processor of its own, all would wait for the leftmost one. Balancing without
# touching the gate is the subject of tutorials 7 and 8.
#
# ## Check

# %%
assert relative_error(y_SH, exact_SH) < 1e-6, "the fifty lines are wrong"
assert relative_error(theirs_SH, exact_SH) < 1e-6, "moe_ref is wrong"
assert stats.expert_load.sum() == len(text) * config.top_k, "a row was lost"
assert torch.allclose(weight_SK.sum(dim=1), torch.ones(S)), "weights of a token add up to one"
print("all checks passed")

# %% [markdown]
# !!! abstract "What the real kernel does instead"
#     The megakernel does not sort. It counts the rows per expert, exchanges the counts, and derives from them the address
#     of every row ([`moe_ref.layout`][moe_ref.layout]); rows are then written straight to that address. The gate is
#     `moe_fast/kernel/gate.py`, the two products are `moe_fast/kernel/gemm.py`, the weighted sum in choice order is
#     `moe_fast/kernel/combine.py`. Both sides round at the same two places, so they can be compared number by number.
#
# ## Exercises
#
# 1. Give one token the same expert twice in its choices. What should happen, and what does each program do?
#
# ??? success "Answer"
#     Both contributions count. `definition` uses `scatter_add_`, so the weights of the two routes add up; with
#     `scatter_` the second would overwrite the first. `moe` computes the row twice and adds twice. Programs that mark
#     routes in a Boolean mask lose one of them: this is a bug that was reported in real libraries.
#
# 2. Where may the weight be applied: before the FFN, to the hidden activations, to the output?
#
# ??? success "Answer"
#     To the output, once. Before the FFN is wrong, because `silu` is not linear. On the hidden activations it is right
#     only without an output bias: with \(b_2\) the definition is \(w\,(h W_d^\top + b_2)\).
#
# 3. Predict the relative error in bfloat16, then run `moe` with `.bfloat16()` tensors.
#
# ??? success "Answer"
#     bfloat16 has 8 significant bits, so one rounding costs up to \(2^{-9} \approx 0.2\,\%\), and several happen in a row.
#     Expect a few tenths of a percent. `moe_ref` accumulates in fp32 and rounds the hidden activations and the
#     outputs once each, which is what tensor cores do.
#
# ## In the papers
#
# FlashMoE (arXiv 2506.04667), section 2 defines gate, dispatch, expert and combine; FineMoE (arXiv 2511.16947),
# section 2 describes the imbalance that the last plot shows.
