# %% [markdown]
# # 6. Reading the megakernel, role by role
#
# **Question.** One kernel does gate, exchange, dispatch, two matrix products, return and combine, on all GPUs, without a
# barrier between them. How is such a program organised, and what makes it fast?
#
# **Time** 30 minutes to read. **Needs** a CPU; tutorials 3 and 4. With the extra `fused` installed it compiles the kernel
# for a GPU that this machine need not have; without it, it shows the recorded result.
#
# !!! question "Predict first"
#     1. A block has 384 threads, 12 warps. How many of the warps multiply matrices?
#     2. A tensor-core instruction of Hopper (`wgmma`) multiplies 64×16 by 16×256. How many `HGMMA` instructions stand in
#        the machine code of a kernel that executes millions: tens, thousands, millions?
#     3. Which gives most: more processors, launches in a graph, overlap in chunks, or one kernel?

# %%
import ast
from pathlib import Path

kernel = Path("moe_fast/kernel")


def show(file, name):
    """Source of one function of the kernel, read from its file: this works without a GPU and without its compiler."""
    text = (kernel / file).read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            print(ast.get_source_segment(text, node))


print(ast.get_docstring(ast.parse((kernel / "megakernel.py").read_text())))

# %% [markdown]
# Of 12 warps, eight multiply. The other four keep them busy: one brings operands, one finds the next task, one stores
# results and tells others, one pushes token rows. The two warpgroups of consumers never wait on global memory; they wait
# for a barrier in shared memory that the loader fulfils.
#
# ```mermaid
# flowchart LR
#   d["dispatcher<br/>next task word"] --> l["loader<br/>TMA"]
#   l -- "4 stages in shared memory" --> c["2 x 4 consumer warps<br/>wgmma"]
#   c -- "epilogue buffers" --> s["storer<br/>TMA store, counters"]
#   s -- "arrival counters" --> peers["this GPU and peers"]
#   peers --> d
# ```
#
# ## The loader
#
# For each step of depth 64 it waits until the stage is empty, announces how many bytes will come, and starts three bulk
# copies: 128 rows, and two halves of the weight tile. It never sees the data.

# %%
show("gemm.py", "load_product")

# %% [markdown]
# ## The consumers
#
# A warpgroup multiplies its 64 rows. One product stays in flight while the next stage is awaited, and only then the stage
# before is given back. That is all of the inner loop; the rest of the kernel exists so that this loop is never idle.

# %%
show("gemm.py", "multiply")

# %% [markdown]
# ## The subscribers
#
# Ninety-six lanes look at arrival counters that peers increase. `reached` is a function of the reference
# ([`moe_ref.runtime.encoding.reached`][moe_ref.runtime.encoding.reached]), traced here with GPU integers: the
# simulator of tutorial 4 and the kernel share it.

# %%
show("subscriber.py", "subscribe")

# %% [markdown]
# Note the third branch: a loop that looks at a clock. If a peer dies, the lane records who waited for what, raises a flag
# that everybody polls, and the kernel ends.
#
# ## What is shared with the reference
#
# Offsets, addresses, task words, epochs: the kernel imports them. A difference between the two backends is then one of
# execution, never of arithmetic.

# %%
for file in sorted(kernel.glob("*.py")):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in ("moe_ref.layout", "moe_ref.runtime.encoding"):
            print(f"{file.name:15} {node.module}: {', '.join(alias.name for alias in node.names)}")

# %% [markdown]
# ## Compile it here
#
# The compiler needs no GPU. What it makes can be taken apart: `HGMMA` is wgmma, `UTMALDG` and `UTMASTG` are TMA loads and
# stores, `LDL` and `STL` would be spilled registers.

# %%
import importlib.util
import json
import subprocess
import tempfile

from moe_ref import MoEConfig

layer = MoEConfig(512, 512, experts=8, top_k=2, activation="relu", gated=False, dtype="bfloat16")


def compile_here(folder):
    """(what is in the kernel, its disassembly), compiled for two ranks."""
    from moe_fast.compiler import compile_to_file, cubin_of, find_nvdisasm, inspect_file
    from moe_fast.kernel.shapes import KernelShape

    path = compile_to_file(KernelShape.from_config(layer, 2, "spare_warps"), folder)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(cubin_of(path.read_bytes()))
    tool = find_nvdisasm()
    text = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout if tool else ""
    return inspect_file(path), text.splitlines()


# %%
if importlib.util.find_spec("cutlass") and importlib.util.find_spec("nvshmem"):
    with tempfile.TemporaryDirectory() as folder:
        found, listing = compile_here(Path(folder))
    print("compiled on this machine:")
else:
    recorded = json.loads(Path("docs/results/megakernel_code.json").read_text())
    found, listing = recorded["kernels"][0], []
    print(f"recorded on {recorded['date'][:10]} by {recorded['command']!r}; pip install -e '.[fused]' to compile here:")
print(found)

# %% [markdown]
# No stack frame and no spills although each consumer thread holds a 64×256 fp32 accumulator slice: warps trade registers
# (`setmaxregister`, 88 for the four helpers, 208 for the consumers). The tensor-core instructions are few, because they
# stand in a loop. Around the first of them:

# %%
if listing:
    first = next(i for i, line in enumerate(listing) if "HGMMA" in line)
    for line in listing[first : first + 12]:
        print(line.split(";")[0].strip()[:100])
else:
    print("(no disassembly here: needs nvdisasm, pip install nvidia-cuda-nvdisasm)")

# %% [markdown]
# ## The ladder
#
# From a plain tile loop to the full kernel, each level adding one idea. These rates are *simulated* with the cost model of
# two H200 for the paper's layer (H = D = 2048, 32 experts, K = 2, bfloat16, 8192 tokens per GPU); the dense floor is the
# same products at the sustained rate of a library, without routing or communication.

# %%
from moe_ref.runtime.machine import machine
from moe_ref.runtime.models import run_model
from moe_ref.runtime.workload import Workload

h200 = machine("h200-2")
work = Workload(ranks=2, tokens=8192, experts=32, top_k=2, hidden=2048, intermediate=2048)
call = work.call()


def rate(latency_us):
    return work.flops_per_rank / latency_us * 1e-6  # TFLOP/s of one GPU


one_sm = call.total_tasks(0) * h200.gemm_time(work.shape, work.hidden, 8, h200.tile_us)  # tile after tile
ladder = {
    "tile loop on one multiprocessor": rate(one_sm),
    "all of them, a launch per step": rate(run_model("bulk", work, h200, call=call).latency_us),
    "the same in a CUDA graph": rate(run_model("bulk", work, h200, call=call, captured=True).latency_us),
    "chunks that overlap": rate(run_model("chunked", work, h200, call=call, captured=True).latency_us),
    "one kernel, tiles and signals": rate(run_model("megakernel", work, h200, call=call).latency_us),
    "dense products alone": h200.flops(2) / 1e12,
}
for name, value in ladder.items():
    print(f"{value:7.1f} TFLOP/s  {name}")

# %%
# figure: Rate per GPU of each level, simulated (bars). Diamonds, where a benchmark was recorded: measured on GPUs, the same layer and tokens.
import matplotlib.pyplot as plt

measured = {}
for path in sorted(Path("docs/results").glob("*bench*.json")):
    for row in json.loads(path.read_text()).get("rows", []):
        if (row["layer"], row["gpus"], row["tokens"]) == ("paper-e32", 2, 8192):
            levels = {"eager": 1, "graph": 2, "fused": 4, "floor": 5}
            measured |= {levels[k]: rate(v["median"] * 1e3) for k, v in row["ms"].items() if k in levels}
fig, ax = plt.subplots()
ax.barh(list(ladder), list(ladder.values()), color="C0", alpha=0.8)
ax.plot(list(measured.values()), list(measured), "D", color="C1", label="measured")
ax.set(xlabel="TFLOP/s per GPU")
ax.invert_yaxis()
if measured:
    ax.legend()
plt.show()
print(
    "measured:",
    {list(ladder)[k]: round(v) for k, v in sorted(measured.items())} or "no benchmark of this layer is recorded yet",
)

# %% [markdown]
# Why one kernel is not automatically fast:
#
# - **Order.** All row tiles that use a weight tile must run at about the same time, or every tile reads its weights from
#   memory again.
# - **The scheduler must not stall.** It uses relaxed accesses only. A release per mail would make its rounds several times
#   slower; instead the loader acquires the counter that its task depends on.
# - **Completion is somebody else's job.** The storer waits for its bulk store, fences, and adds to counters; the consumers
#   are at the next tile by then.
# - **One writer per row.** Results go straight into the home rank's memory, one row per (token, choice), so there are no
#   atomics on data and the sum has a fixed order.
#
# ## Check

# %%
assert found["stack_bytes"] == 0, "a role keeps its variables in memory"
assert not found["spills"], "registers were spilled"
assert found["wgmma"] is None or found["wgmma"] > 0, "no tensor cores"
values = list(ladder.values())
assert values == sorted(values), "each level is faster than the one below"
assert values[4] < values[5], "faster than its own arithmetic"
shared = [f for f in kernel.glob("*.py") if "moe_ref.runtime.encoding" in f.read_text()]
assert len(shared) >= 3, "kernel and reference no longer share their arithmetic"
print("all checks passed")

# %% [markdown]
# !!! abstract "What the real kernel does instead"
#     This is it. Files in the order in which to read them: [`shapes`][moe_fast.kernel.shapes],
#     [`signals`][moe_fast.kernel.signals], [`gate`][moe_fast.kernel.gate], [`plan`][moe_fast.kernel.plan],
#     [`dispatch`][moe_fast.kernel.dispatch], [`subscriber`][moe_fast.kernel.subscriber],
#     [`scheduler`][moe_fast.kernel.scheduler], [`processor`][moe_fast.kernel.processor],
#     [`gemm`][moe_fast.kernel.gemm], [`combine`][moe_fast.kernel.combine], [`megakernel`][moe_fast.kernel.megakernel].
#
# ## Exercises
#
# 1. Compile with `scheduler="os_block"` and `"tickets"`. What changes in the machine code, and what in the roles?
#
# ??? success "Answer"
#     The tensor-core instructions are the same. With `os_block` (the paper's form) the last block has no processor: one warp
#     schedules and three subscribe. With `tickets` there is no scheduler; each dispatcher draws the next number of an
#     ordered list. They differ only in where the next task word comes from.
#
# 2. A call must not reset counters, and a captured graph must be replayable. How does a counter know what to expect?
#
# ??? success "Answer"
#     It only grows. The owner adds what this call will bring (known from the counts) to the last target, and compares by
#     difference, so a wrap of 32 bits is harmless. See [memory ordering](../concepts/memory-ordering.md).
#
# 3. The layer has 128 experts and 1024 tokens per GPU. Which part of the ladder collapses?
#
# ??? success "Answer"
#     The products. With 16 rows per expert and source most of a 128-row tile is padding, and the time is that of reading all
#     weights once. Run it: `experts=128, tokens=1024`.
#
# ## In the papers
#
# FlashMoE, section 3 (actors, the OS block), figure 5 (the fused kernel), table 1 (operations per layer).
