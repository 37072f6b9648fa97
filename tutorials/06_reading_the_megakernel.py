# %% [markdown]
# # 6. Reading the megakernel, role by role
#
# **Question.** One kernel does gate, exchange, dispatch, two matrix products, return and combine, on all GPUs, without a
# barrier between them. How is such a program organised, and what makes it fast?
#
# **Time** 40 minutes to read. **Needs** a CPU; tutorials 3 and 4. With the extra `fused` installed it compiles the kernel
# for a GPU that this machine need not have; without it, it shows the recorded result.
#
# !!! question "Predict first"
#     1. A block has 384 threads, 12 warps. How many of the warps multiply matrices?
#     2. A tensor-core instruction of Hopper (`wgmma`) multiplies 64×16 by 16×256. How many `HGMMA` instructions stand in
#        the machine code of a kernel that executes millions: tens, thousands, millions?
#     3. From a plain tile loop to the full kernel, which step gives most: tensor cores, a unit that copies, a pipeline of
#        stages, blocks that stay, or one launch instead of two? Does one of them cost something?
#     4. A task computes a tile of 128 rows. An expert has 140. What would a task for its last 12 rows cost, in parts of a
#        full one: a tenth, a half, nearly all of it?

# %%
import ast
from pathlib import Path

kernel = Path("moe_fast/kernel")


def show(file, name, kind=ast.FunctionDef):
    """Source of one function of the kernel, read from its file: this works without a GPU and without its compiler."""
    text = (kernel / file).read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            inner = next(n for n in ast.walk(node) if isinstance(n, kind))
            print(ast.get_source_segment(text, inner, padded=True))


print(ast.get_docstring(ast.parse((kernel / "megakernel.py").read_text())))

# %% [markdown]
# Of 12 warps, eight multiply. The other four keep them busy: one brings operands, one finds the next task, one stores
# results and tells others, one pushes token rows (on several GPUs in every second block; in a few it schedules). The two
# warpgroups of consumers never wait on global memory; they wait for a barrier in shared memory that the loader fulfils.
#
# ```mermaid
# flowchart LR
#   d["dispatcher<br/>next task word"] --> l["loader<br/>TMA, gathered rows"]
#   l -- "4 stages in shared memory" --> c["2 x 4 consumer warps<br/>wgmma"]
#   c -- "epilogue buffers" --> s["storer<br/>TMA store, counters"]
#   s -- "arrival counters" --> peers["this GPU and peers"]
#   peers --> d
# ```
#
# ## The loader
#
# For each step of depth 64 it waits until the stage is empty, announces how many bytes will come, and starts bulk copies:
# the rows, and the two halves of the weight tile (`load_weights`, [below](#two-blocks-one-load-of-the-weights)). It never
# sees the data. What its lanes arrive for (`arrive_lanes`), comes with [rows that stay](#rows-that-stay).

# %%
show("loads.py", "load_product")

# %% [markdown]
# ## The consumers
#
# A warpgroup multiplies its 64 rows. One product stays in flight while the next stage is awaited, and only then the stage
# before is given back. That is all of the inner loop; the rest of the kernel exists so that this loop is never idle.

# %%
show("gemm.py", "multiply")

# %% [markdown]
# ## Two blocks, one load of the weights
#
# Each step draws 16 KiB of rows and 32 KiB of weights out of the L2 cache, and the block next door is often at the same
# weights. So two neighbouring blocks are one processor. It takes a *tile pair*: two row tiles of one expert, one for each
# block, in the same columns. Each block loads half of the weights, and TMA writes this half into the shared memory of both
# (*multicast*).

# %%
show("loads.py", "load_weights")

# %%
rows_step, weights_step = 128 * 128, 256 * 128  # 128 bytes of each row, and of the weights of each column
step = 20.5e-6 / 32  # measured: a main loop over H = 2048
drawn = {"single blocks": rows_step + weights_step, "pairs": rows_step + weights_step // 2}
for name, size in drawn.items():
    rate = 132 * size / step * 1e-12
    print(f"{name:14} {size // 1024} KiB for a block and step, for all 132 {rate:4.1f} TB/s out of L2")

# %% [markdown]
# A third less to draw, at a price: a stage may be filled only when the consumers of *both* blocks have emptied it, so each
# waits for the slower one. When any two neighbouring tiles were a pair, both blocks in step but without multicast took 4 to
# 6 % longer on one H200 with 8 experts and 4096 tokens or more. With multicast, pairs took 2 to 6 % less time than single
# blocks where experts have about 256 rows, elsewhere mostly 0 to 2 %, and in a few cells 1 to 3 % more; the
# [lab notes](../lab/megakernel.md#versions) have all of them. That two blocks which wait for each other at every step never
# wait for ever is argued line by line at the top of [`pairs`][moe_fast.kernel.pairs].
#
# An expert with three tiles has one without a partner. It is *wide*: both blocks have its 128 rows, and each computes every
# other column tile of them, with weights of its own. Two experts with one tile each make a *mixed* pair: there, too, each
# block loads its own weights. Which tile comes where is arithmetic over sums of the experts before, without a branch, so the
# same lines take Python's integers, numpy's, and the GPU's.

# %%
show("tile_pairs.py", "count_pairs")
show("tile_pairs.py", "place_tile")

# %%
from itertools import accumulate

from moe_fast.kernel import tile_pairs as tp


def pairs_of(rows):
    """Of each tile pair, for both blocks: expert, row tile, its rows, which column tiles of it, carried rows."""
    sums = list(accumulate((tp.count_pairs(n, True) for n in rows), initial=0))
    dealt = {}
    for expert, n in enumerate(rows):
        for tile in range(tp.own_tiles(n, True)):
            number, fields = tp.place_tile(tile, n, sums[expert], sums[-1], True)
            filled, wide, few = tp.field_rows(fields), tp.field_wide(fields), tp.field_few(fields)
            for member in range(1 + wide):
                columns = ("even", "odd")[member] if wide else "all"
                dealt[number + member] = (expert, tile, filled, columns, few)
    assert sorted(dealt) == list(range(tp.dealt_tiles(sums[-1])))
    return [(dealt[n], dealt[n + 1]) for n in range(0, len(dealt), 2)]


some = [256, 400, 100, 128 + 20]
print("rows of four experts:", some)
for number, pair in enumerate(pairs_of(some)):
    blocks = [f"expert {e}, tile {t}, {n:3} rows, {which:4} columns, {few:2} carried" for e, t, n, which, few in pair]
    print(f"pair {number}:  " + "   |   ".join(blocks))

# %% [markdown]
# What a block must know of its part stands in the upper bits of its task word. A task of a wide pair is for two column
# tiles, so half of its tasks are enough; the dispatcher drops the others. Of an odd number of column tiles the second
# block has no last one: its word is marked `VOID`, it keeps step, and computes and stores nothing.

# %%
show("tile_pairs.py", "pack_fields")
show("pairs.py", "dropped_column")
show("pairs.py", "pair_words")

# %% [markdown]
# ## Rows that go along
#
# A tile has 128 rows, but an expert has as many as the gate chose for it. If it has 148, its second tile holds 20, and a
# task of 20 rows draws all of the expert's weights through the multiprocessor, like a full one. Measured with 128 experts,
# whose weights come from memory: 25 µs in the main loop instead of 29.
#
# So such rows are *carried*, as in the pairs above: the tile gets no tasks, those of the expert's last tile pair compute
# its rows, too, from the weights that they have in shared memory. Where both blocks have the same weights, each does half of
# the columns; else a block does those that it has the weights of. The tile keeps its place, its arrival counter and its
# results.

# %%
show("tile_pairs.py", "carried_rows")

# %% [markdown]
# `wgmma` multiplies 64 rows at least, so for the few rows the operands change places: 64 rows of *weights* by 32 columns,
# which are the rows that go along (`multiply_carrying` in `gemm.py`). How many tasks does it save?

# %%
import numpy as np

rng = np.random.default_rng(0)
fewer = {}
print("experts  tokens  choices  rows of an expert  row tiles  of which carried")
for experts, tokens, top_k in ((8, 4096, 2), (32, 4096, 2), (128, 4096, 8), (128, 8192, 2), (128, 1024, 2)):
    rows = rng.multinomial(tokens * top_k, np.full(experts, 1 / experts))  # an even gate, by chance
    tiles, carried = -(-rows // 128), tp.carried_rows(rows, True) > 0
    fewer[experts, tokens] = carried.sum() / tiles.sum()
    span = f"{rows.min()} to {rows.max()}"
    print(f"{experts:7} {tokens:7} {top_k:8} {span:>18} {tiles.sum():10} {fewer[experts, tokens]:13.0%}")

# %% [markdown]
# Many where experts have about one tile of rows, none where they have less than one. A third fewer tasks do not make a third
# less time: on an H200, by single blocks, the call with 8192 tokens and 128 experts took 8 % less, the one with 32 experts
# as long as before. A task that carries rows in all of its columns takes 5 to 7 µs longer than a full one, and what it
# replaces were the shorter ones.
#
# ## Rows that stay
#
# A rank routes some rows to its own experts, on two GPUs half of them. They need not move at all: the row is a token of x,
# which lies in this GPU's memory already. But a bulk copy takes a box of rows that are neighbours, and tokens of one expert
# are strewn over x. So for such rows the loader does by hand what TMA does for a box. Before a task it looks up where each of
# its rows lies. A row's *home* says that, the word with its source rank and its route to which its result returns, too.

# %%
show("gather.py", "find_sources")

# %% [markdown]
# Then each step costs two copies of 16 bytes a lane for every eight rows. They are asynchronous (`cp.async`): no lane waits
# for them, they pass through no register. They write what TMA would have written, swizzle included, so that the product
# can't tell the difference. Only the barrier can: it counts one arrival for the bytes of TMA and one for each lane.

# %%
show("gather.py", "load_gathered")
show("gemm.py", "see_gathered")

# %% [markdown]
# Why the consumers need that fence is explained in [memory ordering](../concepts/memory-ordering.md#the-rule), what is saved
# in [the design](../concepts/design.md#where-a-row-is-read). To *push* such a row is to write its home and to count it. The
# spare warps are left with the rows for other ranks, and only half of them send: [more bytes under way would not be
# faster](../concepts/overlap.md#how-much-to-send-at-once).
#
# ## The subscribers
#
# Ninety-six lanes look at arrival counters that peers increase: has a block of row tiles got its rows? `reached` is a
# function of the reference ([`moe_ref.runtime.encoding.reached`][moe_ref.runtime.encoding.reached]), traced here with
# GPU integers: the simulator of tutorial 4 and the kernel share it.

# %%
show("subscriber.py", "all_there")
show("subscriber.py", "subscribe")

# %% [markdown]
# Note the last branch: a loop that looks at a clock. If a peer dies, the lane records who waited for what, raises a flag
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
# stores, `LDGSTS` the copies of gathered rows, `LDL` and `STL` would be spilled registers.

# %%
import importlib.util
import json
import re
import subprocess
import tempfile
from collections import Counter

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
kinds = Counter(re.findall(r"(?:HGMMA|UTMALDG|LDGSTS)\.\S+", "\n".join(listing)))
for kind, number in kinds.most_common():
    print(f"{number:5} {kind}")

# %% [markdown]
# No stack frame and no spills although a consumer warpgroup holds 64×256 fp32 sums, 128 registers of each thread: warps
# trade registers (`setmaxregister`), the helpers have fewer than the consumers. The tensor-core instructions are few, because
# they stand in a loop. Their shapes tell them apart: 64×256 multiplies full tiles, 64×32 the rows that go along, 64×64 is the
# gate's, as wide as the router has experts, rounded up. `MULTICAST` loads weights for both blocks of a pair. Around the
# first product, the gate's:

# %%
source = (kernel / "megakernel.py").read_text().splitlines()
print(next(line for line in source if line.startswith("LOAD_REGISTERS, MATH_REGISTERS")))
if listing:
    first = next(i for i, line in enumerate(listing) if "HGMMA" in line)
    for line in listing[first : first + 12]:
        print(line.split(";")[0].strip()[:100])
else:
    print("(no disassembly here: needs nvdisasm, pip install nvidia-cuda-nvdisasm)")

# %% [markdown]
# ## The ladder
#
# How does one get there? The package [`moe_fast.ladder`][moe_fast.ladder] goes there in levels, one idea each: real
# kernels, a file each, that all compute the two products of the same experts over the same rows.
#
# | level | idea | file |
# |---:|---|---|
# | 0 | a tile loop through shared memory, ordinary multiply-adds | `plain.py` |
# | 1 | tensor cores; all threads copy, then all multiply | `wgmma.py` |
# | 2 | the TMA unit copies; still in turn | `tma.py` |
# | 3 | four stages; one warp loads, two warpgroups multiply | `pipeline.py` |
# | 4 | one block per multiprocessor walks an ordered list of tasks | `persistent.py` |
# | 5 | both products in one launch, counters between them | `fused.py` |
# | 6 | the megakernel on one GPU: gate, dispatch, return and combine as well | `moe_fast/kernel` |
# | 7 | the same on two GPUs, half the experts on each | |
#
# The loop of level 2: ask for a step, wait for it, multiply, wait for that, again.

# %%
show("../ladder/tma.py", "kernel", ast.For)

# %% [markdown]
# ### Predict
#
# The layer of the FlashMoE paper: H = D = 2048, 32 experts, K = 2, bfloat16, 8192 tokens per GPU, so 16,384 rows. A step
# of depth 64 of a 128×256 tile brings 48 KiB and multiplies for as long as the dense rate says. Take 64 bytes per clock
# and multiprocessor for copying, 0.7 µs until the first byte comes, 2 µs for storing a tile of results. Without tensor
# cores: 128 multiply-adds per clock and multiprocessor, half of that because every 16 of them need 8 loads from shared
# memory, which take as many issue slots again.

# %%
ladder = json.loads(Path("docs/results/ladder_h200.json").read_text())
measured = {level["name"]: level["tflops"] for level in ladder["levels"]}
dense, sms, clock = measured["dense"], 132, 1.7e9
real = ladder["rows"] / ladder["padded_rows"]  # experts' last tiles are partly padding

multiply = 2 * 128 * 256 * 64 / (dense * 1e12 / sms) * 1e6  # µs per step
copy = (128 + 256) * 64 * 2 / (64 * clock) * 1e6
latency, epilogue = 0.7, 2.0
busy = 2048 // 64 * multiply  # all steps of a tile
tiles = ladder["padded_rows"] // 128 * (2048 // 256)
waves = tiles / sms / -(-tiles // sms)  # the last wave of tiles is not full
print(f"a step: {multiply:.2f} µs of products, {copy:.2f} µs of copying")
print(f"{1 - real:.0%} of the tiles' rows are padding, waves are {waves:.0%} full")

# %%
predicted = {
    "plain": sms * 128 * 2 * clock / 2 * 1e-12 * real,
    "tma": dense * real * multiply / (multiply + copy + latency),
    "pipeline": dense * real * busy / (busy + latency + copy + epilogue),
    "persistent": dense * real * waves * busy / (busy + epilogue),
}
predicted["wgmma"] = predicted["tma"]  # the same turns
predicted["fused"] = predicted["persistent"]

# %%
# figure: Rate per GPU of each level, measured on H200 in one run with the library beside it (bars), and as predicted above (diamonds).
import matplotlib.pyplot as plt

fig, ax = plt.subplots(figsize=(7, 4.2))
for level in ladder["levels"]:
    number = "library:" if level["level"] is None else level["level"]
    label, guess = f"{number} {level['name']}", predicted.get(level["name"])
    ax.barh(label, level["tflops"], color="0.6" if level["level"] is None else "C0")
    if guess is not None:
        ax.plot(guess, label, "D", color="C1")
    said = f"predicted {guess:4.0f}, " if guess else " " * 16
    print(f"{label:18} {said}measured {level['tflops']:6.1f} TFLOP/s  {level['ms']['median']:7.3f} ms")
ax.set(xlabel="TFLOP/s per GPU, padding not counted")
ax.invert_yaxis()
plt.show()
print(f"recorded on {ladder['date'][:10]}, {ladder['device']}:\n{ladder['command']}")

# %% [markdown]
# Read the figure from above:
#
# - Tensor cores give most, a factor of ten and more. A third of the dense rate is then reached, because copying and
#   multiplying take turns.
# - The TMA unit alone gives little: it saves instructions, and the time was lost in waiting.
# - The pipeline doubles the rate. From here on the tensor cores are busy while a tile lasts.
# - Persistent blocks hide the start of a tile behind the end of the one before: a few per cent.
# - One launch for both products gives nothing on a GPU by itself; the counters even cost a little. What it buys is that
#   there is no boundary any more at which everybody waits: other work fits in between.
# - The megakernel does that other work, gate, dispatch, return and combine, and still takes about as long as the library
#   needs for its grouped products alone. On two GPUs half of the rows cross the wire. It was an early version of the
#   kernel that day: the present one takes about a tenth less than levels 6 and 7 show.
#
# What is missing to the dense products: padding (a tenth of the tiles' rows, the same for every level), the last wave
# that is not full, storing.
#
# The same layer as a chain of library calls, on two GPUs, from the benchmark of the whole layer:

# %%
bench = json.loads(Path("docs/results/megakernel_bench_2gpu.json").read_text())
row = next(r for r in bench["rows"] if (r["layer"], r["tokens"]) == ("paper-e32", 8192))
for name, what in (("eager", "gate, sort, all-to-all, grouped_mm, ... one by one"), ("graph", "in a CUDA graph"),
                   ("fused", "one kernel"), ("floor", "the dense products alone")):  # fmt: skip
    print(f"{row['ms'][name]['median']:7.3f} ms  {what}")

# %% [markdown]
# Compile two of the levels here, and find their ideas in the machine code. On a Hopper GPU `python -m moe_fast.ladder`
# checks all of them against fp32 arithmetic and times them.


# %%
def levels_here(*names):
    """Instructions of the first product's kernel of some levels."""
    from moe_fast.compiler import cubin_of, instructions
    from moe_fast.ladder.problem import compile_level

    return {name: instructions(cubin_of(compile_level(name, 512, 512)[0].dump_to_object("level"))) for name in names}


code = levels_here("plain", "tma") if listing else {}
for name, counts in code.items():
    print(name, counts)
if not code:
    print("(needs the compiler and nvdisasm)")

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
assert not listing or any("MULTICAST" in kind for kind in kinds), "every block loads all of its weights"
assert not listing or any("LDGSTS" in kind for kind in kinds), "no row is gathered"

# %%
for rows in range(1, 1000):
    parts = [part for pair in pairs_of([rows]) for part in pair]
    for columns in ("even", "odd"):
        computed = sum(n for _, _, n, which, _ in parts if which in ("all", columns))
        assert computed + parts[-1][-1] == rows, "a row is computed twice or not at all"
assert fewer[128, 8192] > 0.25
assert fewer[128, 1024] == 0
assert drawn["pairs"] * 3 == drawn["single blocks"] * 2
assert not code or (code["plain"]["wgmma"] == 0 < code["tma"]["wgmma"] and code["tma"]["tma_loads"] > 0)
climb = [measured[name] for name in ("plain", "wgmma", "tma", "pipeline", "persistent")]
assert climb == sorted(climb), "up to level 4 each is faster than the one below"
assert max(measured.values()) == dense, "faster than its own arithmetic"
assert all(abs(predicted[name] / measured[name] - 1) < 0.4 for name in predicted), "the model is no use"
assert all(level["relative_error"] < 4e-3 for level in ladder["levels"] if level["level"] is not None)
shared = [f for f in kernel.glob("*.py") if "moe_ref.runtime.encoding" in f.read_text()]
assert len(shared) >= 3, "kernel and reference no longer share their arithmetic"
print("all checks passed")

# %% [markdown]
# !!! abstract "What the real kernel does instead"
#     This is it. Files in the order in which to read them: [`constants`][moe_fast.kernel.constants],
#     [`limits`][moe_fast.kernel.limits], [`shapes`][moe_fast.kernel.shapes], [`regions`][moe_fast.kernel.regions],
#     [`signals`][moe_fast.kernel.signals], [`scans`][moe_fast.kernel.scans], [`gate`][moe_fast.kernel.gate],
#     [`plan`][moe_fast.kernel.plan], [`exchange`][moe_fast.kernel.exchange], [`tables`][moe_fast.kernel.tables],
#     [`send_list`][moe_fast.kernel.send_list], [`dispatch`][moe_fast.kernel.dispatch],
#     [`subscriber`][moe_fast.kernel.subscriber], [`scheduler`][moe_fast.kernel.scheduler],
#     [`processor`][moe_fast.kernel.processor],
#     [`loads`][moe_fast.kernel.loads], [`gather`][moe_fast.kernel.gather], [`gemm`][moe_fast.kernel.gemm],
#     [`epilogue`][moe_fast.kernel.epilogue], [`tile_pairs`][moe_fast.kernel.tile_pairs],
#     [`loader`][moe_fast.kernel.loader], [`consumer`][moe_fast.kernel.consumer], [`storer`][moe_fast.kernel.storer],
#     [`spare`][moe_fast.kernel.spare], [`combine`][moe_fast.kernel.combine],
#     [`final_combine`][moe_fast.kernel.final_combine], [`staged`][moe_fast.kernel.staged], [`ring`][moe_fast.kernel.ring],
#     [`pairs`][moe_fast.kernel.pairs], [`megakernel`][moe_fast.kernel.megakernel].
#
#     What a layer may do without: [`replicas`][moe_fast.kernel.replicas] and [`solver`][moe_fast.kernel.solver] (rows of an
#     expert divided over its replicas), [`tokens`][moe_fast.kernel.tokens] and [`sums`][moe_fast.kernel.sums] (the wire
#     format "tokens"), [`transport`][moe_fast.kernel.transport] (puts through NVSHMEM: consumers put a tile's results, from
#     shared memory where NVSHMEM reaches a peer by loads and stores, `put_lines`, else staged, `put_results`; the storer
#     waits for them and counts, `count_put`).
#
# ## Exercises
#
# 1. Compile with `scheduler="os_block"` and `"tickets"`. What changes in the machine code, and what in the roles?
#
# ??? success "Answer"
#     The tensor-core instructions are the same. With `os_block` (the paper's form) the last block has no processor: one warp
#     schedules and three subscribe. It would be half of a pair, so blocks work alone, and no load says `MULTICAST`. With
#     `tickets` there is no scheduler; each dispatcher draws the next number of an ordered list. It differs from the
#     default only in where the next task word comes from.
#
# 2. Level 5 waits on counters inside a launch. Why can it not wait for ever, and what would have to change so that it could?
#
# ??? success "Answer"
#     Every block is resident and works through its entries in order, and in the list a second product stands after all
#     first products of its row tile: the first unfinished task can always run. With more blocks than fit at once, or with
#     second products listed first, blocks could hold the multiprocessors while those that they wait for never start.
#
# 3. With 128 experts and 1024 tokens per GPU, which level would the prediction put where, and why is it then no use?
#
# ??? success "Answer"
#     2048 rows over 128 experts are 16 each: every expert fills an eighth of one tile, `real` is 0.125, and so is the best
#     rate of any level. But then time goes with bytes, not with products: all weights are read once, 2 GB at 4.3 TB/s, which
#     no better pipeline changes. Try it on a GPU: `python -m moe_fast.ladder --layer paper-e128 --tokens 1024`.
#
# ## In the papers
#
# FlashMoE, section 3 (actors, the OS block), figure 5 (the fused kernel), table 1 (operations per layer).
