"""The page "What goes wrong in practice": a table whose tests are held against reality."""

from __future__ import annotations

from typing import NamedTuple

GPU = "tests/gpu/test_scenarios.py::"
"""Each of these tests runs one function of tests/gpu/scenarios.py, which is named in brackets."""


class Row(NamedTuple):
    """One kind of trouble: what happened elsewhere, what is right, and the tests that hold it (path::name prefix)."""

    case: str
    where: str
    right: str
    tests: tuple[str, ...]


ROWS = (
    Row("A rank has no tokens, or ranks have very different numbers of them", "DeepEP 374, sglang 25137",
        "takes part in every signal and collective, returns an empty result, never hangs, launches no empty grid",
        ("tests/test_edge_cases.py::test_01", "tests/test_distributed.py::test_real_ranks_equal_simulated_ones")),
    Row("The number of tokens is no multiple of the tile", "Liger-Kernel 1361",
        "every valid row is written, no row beyond them is touched",
        ("tests/test_edge_cases.py::test_02",)),
    Row("An expert gets no token", "torchtitan 1166, MSLK 158", "skipped; its weight gradient is exactly zero",
        ("tests/test_edge_cases.py::test_03",)),
    Row("NaN or garbage in padding and unused workspace", "transformers 48205, vllm 20167",
        "never reaches a valid output",
        ("tests/test_edge_cases.py::test_04",)),
    Row("The same expert twice in one token's choices", "flashinfer 3011", "both contributions are summed",
        ("tests/test_edge_cases.py::test_05",)),
    Row("All tokens to one expert, or to one rank", "flashinfer 4637, TransformerEngine 3116",
        "correct, no livelock; buffers hold min(K, local experts) · S · P rows",
        ("tests/test_edge_cases.py::test_06", "tests/balance/test_exactness.py::test_one_expert_with_everything")),
    Row("Sizes beyond 2³¹ elements", "Liger-Kernel 1296, megablocks 185", "64-bit offsets, in the kernel too",
        ("tests/test_layout.py::test_offsets_beyond_32_bits",)),
    Row("Sums in 16 bits, atomics in order of arrival", "flashinfer 3976, transformers 43362",
        "one row per (token, choice), summed in choice order in fp32, rounded once; two runs agree in every bit",
        ("tests/test_edge_cases.py::test_08", "tests/test_layer.py::test_same_inputs_same_bits")),
    Row("A captured graph is replayed and sees stale flags", "DeepGEMM 451, vllm 25906",
        "the epoch lives in device memory; nothing is reset by the host between calls",
        ("tests/runtime/test_checker.py::test_broken_rules_are_found_by_search_and_by_chance",
         GPU + "test_several_gpus[graph]")),
    Row("Back-to-back calls while a slow peer still reads", "DeepGEMM 389, DeepEP 513",
        "a call never overwrites what a peer may still read",
        ("tests/runtime/test_checker.py::test_every_order_between_ranks_is_right", GPU + "test_several_gpus[repeat]")),
    Row("Stream semantics", "DeepEP 589", "all work on the caller's current stream", (GPU + "test_one_gpu[graph]",)),
    Row("The persistent grid is not resident as a whole, or a peer died", "sglang 36657",
        "grid no larger than what is resident; every wait has a deadline and names who waited for what",
        (GPU + "test_one_gpu[timeout]", GPU + "test_several_gpus[timeout]")),
    Row("Expert id \N{MINUS SIGN}1, a masked route", "transformers 40545",
        "contributes nothing, never aliases expert 0",
        ("tests/test_edge_cases.py::test_13",)),
    Row("K = 1, and renormalisation", "sglang 35160, vllm 43694, axolotl 3411",
        "an explicit flag; the weight is applied exactly once; 0/0 is guarded",
        ("tests/test_edge_cases.py::test_14", "tests/test_gate.py::test_zero_scores_stay_zero")),
    Row("Biases of experts", "Automodel 2591, maxtext 3699", "weighted like the rest, and not on padding",
        ("tests/test_edge_cases.py::test_15",)),
    Row("Capacity overflow", "FlashMoE's default, DeepSpeed 7986",
        "dropless by default; with a capacity a fixed priority (token order), and the count is reported",
        ("tests/test_edge_cases.py::test_16", "tests/test_gate.py::test_capacity_drops_in_token_order")),
    Row("E is no multiple of P", "vllm 57465, sglang 8253",
        "works through the placement, or a clear error names legal values",
        ("tests/test_edge_cases.py::test_17",)),
    Row("Shared experts", "DeepGEMM 377, sglang 20089", "an optional expert that is always on, weight 1",
        ("tests/test_edge_cases.py::test_18",)),
    Row("More tokens than the buffers hold", "sglang 30756", "checked on the host, clear error, nothing lost",
        ("tests/test_edge_cases.py::test_19",)),
    Row("Kernels are built at different speed on different ranks", "sglang 23185",
        "a barrier after compiling, before the first wait", (GPU + "test_several_gpus[layer]",)),
    Row("A peer's memory cannot be reached directly", "sglang 36303",
        "tested at start; another transport, or a clear error",
        ("tests/fast/test_heap.py::test_a_peer_out_of_reach_is_named",)),
    Row("Two copies of an expert on one GPU", "EPLB 22", "the placement refuses it",
        ("tests/placement/test_placement.py::test_bad_placements_are_refused",)),
    Row("Same input, other build, other plan", "EPLB 8", "integer loads, ties by id, no unstable sort",
        ("tests/balance/test_purity.py::test_ties_are_broken_by_id",
         "tests/balance/test_purity.py::test_other_processes_make_the_same_plan")),
    Row("Each rank picks replicas from its own view", "sglang 32962 (accuracy fell silently)",
        "the plan is the same on all ranks; a debug mode compares its hash",
        ("tests/balance/test_purity.py::test_each_rank_planning_from_its_own_view_is_found_out",)),
    Row("Loads are counted per rank only", "sglang 5524, vllm 22167",
        "gathered; asserted that the total is tokens · K over all ranks",
        ("tests/test_edge_cases.py::test_25", "tests/balance/test_bad_input.py::test_counts_of_one_rank_only")),
    Row("Logical and physical expert ids are mixed up", "sglang 25285",
        "one place converts; the two kinds have different names",
        ("tests/test_edge_cases.py::test_26", "tests/placement/test_placement.py::test_logical_and_physical_ids")),
    Row("Garbled output after re-placement", "sglang 17162, vllm 28377",
        "outputs are bit-identical before and after; moments and masters move too",
        ("tests/test_layer.py::test_replicas_change_no_bit",)),
    Row("The environment is not right and fails cryptically", "DeepEP 486, Triton-distributed 114",
        "`moe-ref doctor`: what was found, what is missing, what to do",
        ("tests/test_cli.py::test_missing_environment_is_named",
         "tests/test_cli.py::test_broken_environment_is_named")),
    Row("Routing is invisible", "Tutel 312, torchtitan 3433",
        "loads before and after capacity and per rank are part of what a run reports",
        ("tests/test_edge_cases.py::test_29",)),
    Row("A benchmark against a chain that pays for its launches", "DeepGEMM 323 (a fused kernel at 0.36x)",
        "the same chain captured as a CUDA graph is in the table, too",
        ("moe_fast/bench/contestants.py::bench_cell",
         "tests/runtime/test_simulator.py::test_a_captured_chain_is_faster_but_does_the_same_operations")),
)  # fmt: skip


def _breakable(name: str) -> str:
    """A long name that may be broken where a reader would."""
    return name.replace("/", "/<wbr>").replace("::", "::<wbr>").replace("_", "_<wbr>")


def table() -> str:
    """The rows as a Markdown table."""
    lines = ["| # | what happened | reported in | what is right | held by |", "|---:|---|---|---|---|"]
    for number, row in enumerate(ROWS, 1):
        tests = "<br>".join(f"<code>{_breakable(test)}</code>" for test in row.tests)
        lines.append(f"| {number} | {row.case} | {row.where} | {row.right} | {tests} |")
    return "\n".join(lines) + "\n"
