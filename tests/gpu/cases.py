"""The differential matrix: a pairwise covering of its axes, small enough to run in a minute.

Axes that decide the compiled kernel (activation, dtype, K, E, gate flavour, scheduler, expert form, replicas, layout,
transport) make SHAPES; every shape then runs all S with a routing each, so that over the shapes each S meets each
routing. Nothing of that recompiles.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from importlib.util import find_spec

from harness import ROUTINGS, Case

from moe_ref.compat.families import FAMILIES, config_of
from moe_ref.config import MoEConfig
from moe_ref.train.job import TrainJob

ACTIVATIONS = (("relu", False), ("gelu", False), ("silu", True), ("gelu", True), ("relu", True), ("silu", False))
DTYPES = ("bfloat16", "float16", "float32")
TOP_K = (1, 2, 4, 8)
EXPERTS = (8, 60, 64, 128, 256)
SCHEDULERS = ("spare_warps", "os_block", "tickets")
GATES = (
    ("softmax", True, 1.0, False, {}),
    ("sigmoid", True, 2.5, True, {"num_groups": 4, "group_score": "top2_sum"}),
    ("softmax", False, 1.0, False, {"router_bias": True, "top_k_order": "before_scores"}),
    ("softmax", False, 16.0, False, {"num_groups": 4}),
    ("sigmoid", True, 2.5, True, {}),
    ("sigmoid", False, 1.0, True, {"router_bias": True, "top_k_order": "before_scores", "num_groups": 2}),
)
"""Scoring, renormalised, factor, selection bias, and what else the config says; with groups the router is of fp32."""
CLAMPED = {"activation": "clamped_swiglu", "gated": True, "clamp_limit": 1.0}
FORMS = (
    {},
    {"expert_bias": True},
    {**CLAMPED, "expert_bias": True, "interleaved": True},
    {"shared_intermediate": 320},
    {"shared_intermediate": 576, "shared_gate": True},
    {**CLAMPED, "expert_bias": True, "shared_intermediate": 64},
)
"""Expert forms; a clamped one has its own activation."""
SIZES = ((512, 256), (1024, 384), (256, 512))
REPLICAS = ("none", "two", "mixed")
LAYOUTS = (("compact", None), ("fixed", 1.0), ("compact", 0.5))
"""Layout and capacity factor; the fixed layout without one, whose buffers grow with E, is a scenario of its own."""
TRANSPORTS = ("stores", "put_signal")
"""Without peers both are stores: see `Case.shape`."""
TOKENS = (0, 1, 45, 127, 128, 129, 1000, 4096)
TRAINED = tuple(TrainJob(backend="fused", dtype=dtype, balance=0.0).model.moe for dtype in ("bfloat16", "float16"))
"""MoE layers of a training run with its default sizes."""
SCHEDULED = TrainJob(steps=15, sequences=12, interval=0, balance=0.0, z=0.0, dtype="bfloat16")
"""A training run with two replicas of every expert, scheduled batch by batch; nothing moves."""


def scheduled_shape(ranks: int):
    """Kernel of the layers of such a run."""
    from moe_fast.kernel.shapes import KernelShape
    from moe_ref.train.balancing import make_placement

    placement = make_placement(SCHEDULED.balancing, ranks, SCHEDULED.experts, SCHEDULED.replicas)
    return KernelShape.from_config(SCHEDULED.model.moe, ranks, "spare_warps", placement=placement)


def covering(axes: list[tuple], threes: tuple[int, ...] = ()) -> list[tuple]:
    """Rows that contain every pair of values of every two axes, and every triple of any three of the axes `threes`.

    Greedy and deterministic: a row begins with the first combination that is missing, then takes axis by axis the value
    that brings the most missing ones.
    """
    groups = [*itertools.combinations(threes, 3), *itertools.combinations(range(len(axes)), 2)]
    missing = {
        tuple(zip(group, values, strict=True))
        for group in groups
        for values in itertools.product(*(range(len(axes[i])) for i in group))
    }

    def brings(row: dict[int, int], axis: int) -> int:
        known = (group for group in groups if axis in group and all(i in row for i in group))
        return sum(tuple((i, row[i]) for i in group) in missing for group in known)

    rows = []
    while missing:
        row = dict(min(missing, key=lambda one: (-len(one), one)))
        for axis in sorted(range(len(axes)), key=lambda axis: -len(axes[axis])):
            if axis not in row:
                # ties take turns
                values = [(len(rows) + i) % len(axes[axis]) for i in range(len(axes[axis]))]
                gains = [brings({**row, axis: value}, axis) for value in values]
                row[axis] = values[gains.index(max(gains))]
        missing -= {tuple((i, row[i]) for i in group) for group in groups}
        rows.append(tuple(axis[row[i]] for i, axis in enumerate(axes)))
    return rows


AXES = [
    ACTIVATIONS, DTYPES, TOP_K, EXPERTS, GATES, SIZES, SCHEDULERS, FORMS, REPLICAS, LAYOUTS, TRANSPORTS,
]  # fmt: skip
THREES = (6, 7, 8, 9, 10)
"""Axes that decide who sends which rows where, and who computes them: every three values meet."""
SHAPES = covering(AXES, THREES)


def cases_of(number: int) -> list[Case]:
    """Every S of shape `number`, each with a routing, and a different S on the second rank."""
    (activation, gated), dtype, top_k, experts, gate, (hidden, intermediate), *rest = SHAPES[number]
    scheduler, form, replicas, (layout, capacity_factor), transport = rest
    scoring, renormalize, scale, bias, more = gate
    groups = more.get("num_groups", 1)
    # half of the groups, where they hold K experts
    form = (
        {**more, **form, "top_groups": groups // 2 if top_k <= experts // 2 else groups}
        if groups > 1
        else {**more, **form}
    )
    activation, gated = form.pop("activation", activation), form.pop("gated", gated)
    out = []
    for i, tokens in enumerate(TOKENS):
        other = TOKENS[(i + number) % len(TOKENS)]
        out.append(
            Case(
                hidden, intermediate, experts, top_k, activation, gated, dtype, (tokens, other),
                ROUTINGS[(i + number) % len(ROUTINGS)], scheduler, scoring, renormalize, scale, bias, form=form,
                fp32_router=groups > 1 and dtype != "float32", replicas=replicas,
                layout=layout, capacity_factor=capacity_factor, transport=transport,
            )
        )  # fmt: skip
    return out


SMALL = Case(512, 256, 8, 2, "silu", True, "bfloat16", (1000, 129), scheduler="spare_warps")
QWEN3 = Case(2048, 768, 128, 8, "silu", True, "bfloat16", (1000, 4096), scheduler="spare_warps")
TINY = Case(128, 64, 32, 4, "silu", True, "bfloat16", (300, 77), scheduler="spare_warps")
FULL = Case(512, 256, 8, 8, "silu", True, "bfloat16", (256,), "uniform", scheduler="spare_warps", max_tokens=256)
SPECIAL = [SMALL, QWEN3, TINY]
GPT_OSS = Case(
    2880, 2880, 32, 4, "clamped_swiglu", True, "bfloat16", (1000, 129), scheduler="spare_warps", renormalize=False,
    form={"expert_bias": True, "router_bias": True, "interleaved": True, "top_k_order": "before_scores"},
)  # fmt: skip
QWEN2 = Case(
    2048, 1408, 60, 4, "silu", True, "bfloat16", (1000, 300), scheduler="spare_warps", renormalize=False,
    form={"shared_intermediate": 5632, "shared_gate": True},
)  # fmt: skip
DEEPSEEK = Case(
    1024, 512, 256, 8, "silu", True, "bfloat16", (1000, 45), scheduler="spare_warps", scoring="sigmoid",
    routed_scaling=2.5, selection_bias=True, fp32_router=True,
    form={"num_groups": 8, "top_groups": 4, "group_score": "top2_sum", "shared_intermediate": 512},
)  # fmt: skip
FAMILY_SIZES = [GPT_OSS, QWEN2, DEEPSEEK]
"""True sizes of gpt-oss-20b and Qwen1.5-MoE; DeepSeek-V3's gate on smaller experts."""
SHARED = Case(
    512, 256, 8, 2, "silu", True, "bfloat16", (1000, 129), scheduler="spare_warps",
    form={"shared_intermediate": 320, "shared_gate": True, "expert_bias": True},
)  # fmt: skip
LAYERS = (
    {},
    {"hidden": 128, "intermediate": 64, "experts": 32, "top_k": 4},
    {"gated": False, "dtype": "float16"},
    # not many values at the limit: the backward's chain, which rounds earlier, may take another side of it there
    {**CLAMPED, "clamp_limit": 7.0, "expert_bias": True, "router_bias": True, "interleaved": True,
     "top_k_order": "before_scores", "renormalize": False},
    {"shared_intermediate": 320, "shared_gate": True, "num_groups": 4, "top_groups": 2, "routed_scaling": 2.5},
    {"dtype": "float32", "shared_intermediate": 96, "expert_bias": True},
)  # fmt: skip
"""Layers of the tests that go through MoELayer: what they change of H = 512, D = 256, E = 8, K = 2, bf16."""
LAYER = {"hidden": 512, "intermediate": 256, "experts": 8, "top_k": 2, "dtype": "bfloat16", "max_tokens": 4096}
PLACED = [
    replace(SMALL, replicas="two"),
    replace(QWEN3, replicas="mixed", scheduler="os_block"),
    replace(TINY, replicas="mixed", scheduler="tickets"),
]
LAYOUTS_ALONE = [
    replace(SMALL, layout="fixed"),
    replace(QWEN3, layout="fixed", capacity_factor=1.0, scheduler="os_block"),
    replace(TINY, layout="fixed", capacity_factor=0.3, scheduler="tickets", replicas="two"),
    replace(SHARED, capacity_factor=0.5, replicas="mixed"),
]
PUTS = [
    replace(case, transport="put_signal")
    for case in (SHARED, replace(QWEN3, scheduler="os_block"), replace(TINY, scheduler="tickets", replicas="mixed"))
] + [replace(SMALL, transport="put_signal", layout="fixed", replicas="two")]
MANY_ROWS = {"tokens": (6000, 9001), "max_tokens": 16384}
MANY = [replace(SMALL, scheduler=scheduler, **MANY_ROWS) for scheduler in SCHEDULERS]
MANY += [replace(case, **MANY_ROWS) for case in (SHARED, LAYOUTS_ALONE[0], LAYOUTS_ALONE[3])]
MANY_PLACED = [replace(case, **MANY_ROWS) for case in (PLACED[0], PUTS[0], PUTS[3])]
"""So many tokens that every block pushes the first rows of its own: `dispatch.pushes_own`."""
TOKENS_ON_WIRE = {"wire_format": "tokens"}
WIRE = [
    replace(case, form={**case.form, **TOKENS_ON_WIRE})
    for case in (
        QWEN3,
        replace(QWEN3, scheduler="os_block", replicas="mixed"),
        replace(TINY, scheduler="tickets"),
        replace(SHARED, top_k=4),
        Case(512, 256, 8, 4, "relu", False, "bfloat16", (1000, 129), scheduler="spare_warps"),
        Case(1024, 384, 60, 8, "gelu", False, "float16", (1000, 129), scheduler="tickets", capacity_factor=0.5),
        Case(256, 512, 61, 5, "silu", True, "float32", (300, 129), scheduler="spare_warps"),
        Case(512, 256, 8, 1, "silu", True, "bfloat16", (45, 129), scheduler="os_block", replicas="two"),
    )
]
"""A token once to each rank, partial sums back: schedulers, dtypes, K from 1 to 8, replicas, a capacity, a shared
expert with its gate and biases."""
WIRE_LAYER = {"experts": 16, "top_k": 6, "shared_intermediate": 320, **TOKENS_ON_WIRE}
PLACED_LAYERS = ({"layout": "fixed", "capacity_factor": 1.0}, {"capacity_factor": 0.5, "shared_intermediate": 320})
"""What layers with replicas and a capacity change of LAYER."""
UNEVEN = [
    Case(512, 256, 5, 2, "silu", True, "bfloat16", (1000, 1), scheduler="spare_warps"),
    Case(256, 512, 61, 4, "gelu", False, "float16", (45, 129), scheduler="os_block"),
    Case(1024, 384, 127, 8, "relu", False, "bfloat16", (3, 700), scheduler="tickets"),
    Case(512, 256, 3, 1, "silu", True, "bfloat16", (129, 0), scheduler="spare_warps"),
]
"""E is no multiple of two ranks, and smaller or larger than S."""
CARRIED = [replace(SMALL, scheduler=scheduler, tokens=(1100,), routing="remainders") for scheduler in SCHEDULERS]
CARRIED += [
    Case(256, 512, 8, 2, "gelu", False, "float16", (1100,), "remainders"),
    Case(2048, 2048, 8, 2, "relu", False, "bfloat16", (1100,), "remainders", scheduler="spare_warps"),
    # three column tiles of both products
    Case(768, 384, 8, 2, "silu", True, "bfloat16", (1100,), "remainders", scheduler="spare_warps"),
]
CARRIED = [replace(case, paired=True) for case in CARRIED if case.scheduler != "os_block"]
"""Row tiles that go along with the tile pair before, and those that just don't: only pairs of blocks carry."""
CARRIED_TOKENS = replace(WIRE[4], tokens=(1100,), routing="remainders")
"""The same where followers are gathered from their leaders' rows, one column tile of the first product, two of the
second."""

TOKEN_TILES = [replace(SMALL, scheduler=scheduler) for scheduler in SCHEDULERS]
TOKEN_TILES += [QWEN3, FAMILY_SIZES[2], SHARED, LAYOUTS_ALONE[0], LAYOUTS_ALONE[3], WIRE[6]]
TOKEN_TILES_SEVERAL = [PLACED[0], PUTS[0], PUTS[3], WIRE[0], WIRE[3]]
"""Layers of the calls around the number of tokens from which the gate's tiles are twice as high: every scheduler, a
planner's sum in 1 to 32 parts, float32, given places, and what only several ranks have."""


def uneven(ranks: int) -> list[Case]:
    """UNEVEN with at least one expert on every rank and one more on some."""
    return [replace(case, experts=max(case.experts, ranks + 1) if ranks > 2 else case.experts) for case in UNEVEN]


PAIRS = [
    replace(case, paired=True)
    for case in (
        SMALL, replace(SMALL, scheduler="tickets", **MANY_ROWS), replace(QWEN3, tokens=(4096, 1000)),
        replace(TINY, scheduler="tickets"), replace(SMALL, replicas="mixed"), replace(UNEVEN[0], experts=9),
        Case(1024, 384, 60, 8, "gelu", False, "float16", (1, 45), scheduler="spare_warps", capacity_factor=0.5),
        Case(256, 512, 61, 5, "silu", True, "float32", (300, 0), scheduler="spare_warps"),
        Case(512, 8192, 8, 2, "silu", True, "bfloat16", (2200, 2100), "remainders", scheduler="spare_warps"),
    )
]  # fmt: skip
"""Processors of two blocks: many row tiles of an expert and few, an odd number of them, products of one step, and deep
ones, the last of which come in halves."""
SWEPT_PAIRS = [*PAIRS, CARRIED[-1]]
"""Those that meet every S, none on one of two ranks among them: rows that all stay, all come from peers, or both."""


PLACES = (
    ("compact", None, {}), ("compact", None, TOKENS_ON_WIRE), ("fixed", 1.0, {}), ("compact", 0.5, {}),
    ("compact", 0.5, TOKENS_ON_WIRE),
)  # fmt: skip
"""Layout, capacity factor and wire format, as far as they go together."""
SEVERAL_AXES = [PLACES, TOP_K, (8, 60, 128, 256), SCHEDULERS, REPLICAS, DTYPES]
SEVERAL = covering(SEVERAL_AXES)
"""Shapes of the matrix of more than two ranks: every pair of what decides who sends what where, while activations,
gates, forms and sizes take turns."""
SEVERAL_TOKENS = (0, 1, 45, 127, 128, 129, 1000)


def several_cases(number: int, ranks: int) -> list[Case]:
    """Cases of shape `number` on `ranks` ranks, each with another routing and another S on every rank."""
    (layout, capacity_factor, wire), top_k, experts, scheduler, replicas, dtype = SEVERAL[number]
    turn, count = number + ranks, 3 if ranks < 8 else 2
    activation, gated = ACTIVATIONS[turn % len(ACTIVATIONS)]
    scoring, renormalize, scale, bias, more = GATES[(turn + number // 6) % len(GATES)]
    hidden, intermediate = SIZES[(turn + number // 3) % len(SIZES)]
    groups = more.get("num_groups", 1)
    form = {**more, **FORMS[(2 * turn + number // 6) % len(FORMS)], **wire}
    if groups > 1:
        form["top_groups"] = groups // 2 if top_k <= experts // 2 else groups
    activation, gated = form.pop("activation", activation), form.pop("gated", gated)
    out = []
    for i in range(count):
        at = number * count + i
        tokens = tuple(SEVERAL_TOKENS[(at + 3 * p) % len(SEVERAL_TOKENS)] for p in range(ranks))
        routing = ROUTINGS[(at + at // len(SEVERAL_TOKENS)) % len(ROUTINGS)]
        out.append(
            Case(
                hidden, intermediate, experts, top_k, activation, gated, dtype, tokens, routing, scheduler, scoring,
                renormalize, scale, bias, max_tokens=1024, form=form, fp32_router=groups > 1 and dtype != "float32",
                replicas=replicas, layout=layout, capacity_factor=capacity_factor,
            )
        )  # fmt: skip
    return out


LARGE = Case(
    4096, 2048, 16, 8, "silu", True, "bfloat16", (131_072,), scheduler="spare_warps", max_tokens=131_072
)  # fmt: skip
"""Rows, hidden activations and returned rows of more than 2^31 elements each, both staging sides apart by more."""


TF32_TIMES = {"paper-e32": 2.3, "qwen3": 2.3}
"""How many times bfloat16's a float32 layer's time may be."""
NARROW = {
    "hidden_size": 256, "intermediate_size": 192, "moe_intermediate_size": 192, "shared_expert_intermediate_size": 320,
    "head_dim": 128,
}  # fmt: skip
# hf_models' cases with sizes that the kernel has tiles for, and some in the sizes of released models
BLOCKS = dict.fromkeys(
    ("mixtral", "mixtral_top_1", "mixtral_all", "mixtral_gelu", "qwen2_moe", "qwen2_moe_renormalized", "qwen3_moe",
     "qwen3_moe_raw", "olmoe", "deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v3_raw", "gpt_oss",
     "gpt_oss_top_1", "gpt_oss_clamped"), NARROW,
) | {
    "qwen2_moe true size": {
        "hidden_size": 2048, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60,
        "num_experts_per_tok": 4,
    },
    "gpt_oss true size": {
        "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
    },
    "deepseek_v3 256 experts in 8 groups": {
        "hidden_size": 1024, "moe_intermediate_size": 512, "n_routed_experts": 256, "n_group": 8, "topk_group": 4,
        "num_experts_per_tok": 8,
    },
}  # fmt: skip
"""Blocks of transformers: a case of tests/hf_models.py and what it changes."""


def heap_bytes(ranks: int) -> int:
    """NVSHMEM's heap for the scenarios: several engines of layers of very different sizes share it."""
    return max(12, 3 * ranks) << 30


def several_shapes(ranks: int) -> list:
    """Every kernel that the tests of several ranks on one GPU need; of two ranks those that two GPUs need, too."""
    from moe_fast.kernel.shapes import KernelShape

    numbers = range(len(SHAPES if ranks == 2 else SEVERAL))
    chosen = [cases_of(n)[0] if ranks == 2 else several_cases(n, ranks)[0] for n in numbers]
    chosen = [case for case in chosen if case.transport == "stores"]
    chosen += [SMALL, TINY, replace(SMALL, replicas="mixed"), WIRE[3], *uneven(ranks)]
    shapes = [case.shape(ranks) for case in chosen]
    configs = [MoEConfig(**{**LAYER, **changes}) for changes in (WIRE_LAYER, {"capacity_factor": 0.7})]
    shapes += [KernelShape.from_config(config, ranks, "spare_warps") for config in (*configs, TRAINED[0])]
    shapes.append(scheduled_shape(ranks))
    return list(dict.fromkeys(shapes))


def all_shapes(ranks: int, trace: bool = True) -> list:
    """Every kernel the GPU tests need, for compiling ahead of time."""
    from moe_fast.kernel.constants import SCHEDULERS
    from moe_fast.kernel.shapes import KernelShape

    cases = [cases_of(n)[0] for n in range(len(SHAPES))]
    cases += [replace(c, scheduler=s) for c in (SMALL, QWEN3) for s in SCHEDULERS] + [TINY, FULL, *uneven(ranks)]
    cases += [*FAMILY_SIZES, SHARED, *LAYOUTS_ALONE, *TOKEN_TILES, *CARRIED, *PAIRS, replace(SMALL, paired=False)]
    cases += [replace(c, paired=False) for c in CARRIED]
    cases += [LARGE] if ranks == 1 else []
    if ranks > 1:
        cases += WIRE + PLACED + PUTS + [replace(case, transport="stores") for case in PUTS]
        cases += [replace(SMALL, replicas="mixed"), *PUTS]
    shapes = [c.shape(ranks) for c in cases]
    layers = [MoEConfig(**{**LAYER, **changes}) for changes in LAYERS]
    shapes += [KernelShape.from_config(c, ranks, "spare_warps") for c in layers]
    shapes += [KernelShape.from_config(layers[4], ranks, "spare_warps", fp32_router=True)]
    some = replace(SMALL, replicas="mixed").placement(ranks)
    for changes in ({}, {"capacity_factor": 0.7}, *PLACED_LAYERS):
        config = MoEConfig(**{**LAYER, **changes})
        placement = None if changes == {"capacity_factor": 0.7} else some
        shapes.append(KernelShape.from_config(config, ranks, "spare_warps", placement=placement))
    if ranks > 1:
        shapes.append(scheduled_shape(ranks))
        wire = MoEConfig(**{**LAYER, **WIRE_LAYER})
        shapes.append(KernelShape.from_config(wire, ranks, "spare_warps"))
        placement = replace(SMALL, replicas="two").placement(ranks)
        shapes.append(KernelShape.from_config(MoEConfig(**LAYER), ranks, "spare_warps", placement=placement))
    shapes += [KernelShape.from_config(config, ranks, "spare_warps") for config in TRAINED]
    if ranks == 1 and find_spec("transformers"):
        from hf_models import make_config

        for name, changes in BLOCKS.items():
            config = make_config(name.split()[0], **changes)
            family = FAMILIES[config.model_type]
            layer = config_of(config.model_type, config.to_dict(), "bfloat16")
            shapes.append(KernelShape.from_config(layer, ranks, "spare_warps", fp32_router=family.fp32_router))
    shapes += [KernelShape.from_config(QWEN3.config, ranks, s, trace=True) for s in SCHEDULERS] if trace else []
    return list(dict.fromkeys(shapes))
