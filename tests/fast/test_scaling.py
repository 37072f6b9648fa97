"""Scaling runs without a GPU: cells, resuming, figures, aims, report, command line; what measures is played."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from scaling_rows import CONDITIONS, a_run, measured, median

from moe_fast.bench import balanced
from moe_fast.bench.layers import LAYERS, layer_config
from moe_fast.bench.scaling import Cell, Store, aims, cells, figures, plan, read, report, run, shapes, symmetric_bytes
from moe_fast.bench.scaling import measuring as measuring_module
from moe_fast.bench.scaling import plot as drawing
from moe_fast.bench.scaling.command import agreement
from moe_fast.bench.variants import popularity
from moe_fast.kernel.regions import heap_regions
from moe_fast.kernel.shapes import KernelShape
from moe_fast.timeline import Timeline
from moe_ref import cli
from moe_ref.errors import UsageError
from moe_ref.runtime.simulator import Interval

HEAD = {**CONDITIONS, "gpus": 8, "repetitions": 15, "scheduler": "spare_warps", "cells": 3}
THREE = plan(8).cells[:3]


class Killed(BaseException):
    """What no `except Exception` catches: the process is gone."""


def measuring(seen: list[str], stop_at: str | None = None):
    """A measuring function that notes its cells, and ends the run in one of them."""

    def measure(cell):
        seen.append(cell.key)
        if cell.key == stop_at:
            raise Killed
        return measured(cell)

    return measure


def command(arguments, capfd) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `moe-ref bench scaling`."""
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "scaling", *map(str, arguments)])
    return (end.value.code or 0, *capfd.readouterr())


# --- cells ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_figure_is_planned(ranks, quick):
    """Each cell once, none left out, what was aimed at before the rest."""
    planned = plan(ranks, quick)
    keys = [cell.key for cell in planned.cells]
    assert len(set(keys)) == len(keys)
    assert not planned.left_out
    assert {cell.figure for cell in planned.cells} == set(cells.FIGURES)
    aimed = [cell.aimed for cell in planned.cells]
    assert aimed == sorted(aimed, reverse=True)
    if not quick:
        assert sum(aimed) == len(cells.AIMED) + len(cells.SKEWS)


def test_the_papers_ranges_are_there():
    """1K to 16K tokens and 8 to 128 experts in bf16 and TF32, skew 0 to 2, both real layers in both wire formats."""
    every = plan(8).cells
    latency = {(c.layer, c.dtype, c.tokens) for c in every if c.figure == "latency"}
    for dtype in ("bfloat16", "float32"):
        assert {s for layer, d, s in latency if (layer, d) == ("paper-e32", dtype)} == {1024, 2048, 4096, 8192, 16384}
        experts = {
            layer_config(layer).experts for layer, d, s in latency if d == dtype and s == 16384 and "paper" in layer
        }
        assert experts == {8, 16, 32, 64, 128}
    assert {(c.layer, c.tokens) for c in every if c.figure == "wire"} == {
        (layer, s) for layer, _, s in latency if layer in ("qwen3", "mixtral")
    }
    assert [c.skew for c in every if c.figure == "balance"] == [0.0, 0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    ("ranks", "figure", "why"),
    [(1, "wire", "sends nothing"), (1, "balance", "multiple of 2 ranks"), (3, "training", "multiple of 2 ranks"),
     (16, "latency", "every rank needs an expert"), (10, "balance", "don't fill 10 ranks")],
)  # fmt: skip
def test_what_so_many_ranks_cannot_run_is_left_out_with_its_reason(ranks, figure, why):
    planned = plan(ranks)
    assert any(key.startswith(figure) and why in reason for key, reason in planned.left_out)
    assert not {cell.key for cell in planned.cells} & {key for key, _ in planned.left_out}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_kernels_and_memory_of_a_run(ranks):
    """Every kernel is one that the tiles can do, and what a cell has open at one time fits into NVSHMEM's heap."""
    planned = plan(ranks)
    every = shapes(planned, ranks)
    assert len(set(every)) == len(every)
    assert {shape.ranks for shape in every} == {ranks}
    room = symmetric_bytes(planned, ranks)
    assert room < 40 << 30
    for cell in planned.cells:
        if cell.figure == "latency":
            shape = KernelShape.from_config(layer_config(cell.layer).replace(dtype=cell.dtype), ranks, "spare_warps")
            assert shape in every, cell.key
            assert heap_regions(shape, cell.most)[1] < room
            assert cell.most >= cell.tokens
    if ranks > 1:
        config = layer_config("qwen3")
        both = [
            KernelShape.from_config(config.replace(wire_format=w), ranks, "spare_warps") for w in ("routes", "tokens")
        ]
        assert set(both) <= set(every)
        assert sum(heap_regions(shape, 16384)[1] for shape in both) < room
        placed = [shape for shape in every if shape.placed and shape.hidden == 2048]
        assert {shape.trace for shape in placed} == {False, True}


def test_layers_by_name():
    assert layer_config("paper-e128") == LAYERS["paper-e128"]
    assert layer_config("paper-e16") == LAYERS["paper-e8"].replace(experts=16)
    with pytest.raises(UsageError, match="gpt5"):
        layer_config("gpt5")


# --- one file, many runs ---------------------------------------------------------------------------------------------


def test_each_cell_is_written_at_once_and_a_run_goes_on(tmp_path):
    """A run that is killed loses its running cell, which comes last the next time."""
    path, seen = tmp_path / "r.json", []
    with pytest.raises(Killed):
        run(THREE, measuring(seen, THREE[1].key), Store.open(path, HEAD))
    assert [row["cell"] for row in read(path)["latency"]] == [THREE[0].key]
    again: list[str] = []
    outcome = run(THREE, measuring(again), Store.open(path, HEAD))
    assert again == [THREE[2].key, THREE[1].key]
    assert (outcome.measured, outcome.left, outcome.given_up) == (2, (), ())
    found = read(path)
    assert {row["cell"]: {k: v for k, v in row.items() if k != "cell"} for row in found["latency"]} == {
        cell.key: measured(cell) for cell in THREE
    }
    assert "interrupted" not in found
    third: list[str] = []
    assert run(THREE, measuring(third), Store.open(path, HEAD)).measured == 0
    assert third == []


def test_a_cell_that_ended_two_runs_is_passed_over(tmp_path):
    path, bad = tmp_path / "r.json", THREE[0].key
    for _ in range(2):
        with pytest.raises(Killed):
            run(THREE, measuring([], bad), Store.open(path, HEAD))
    assert read(path)["interrupted"] == {bad: 2}
    seen: list[str] = []
    outcome = run(THREE, measuring(seen), Store.open(path, HEAD))
    assert (seen, outcome.given_up) == ([], (bad,))  # the others came before its second attempt
    store = Store.open(path, HEAD)
    store.put(interrupted={})
    assert run(THREE, measuring(seen), store).given_up == ()
    assert seen == [bad]


def test_a_file_that_is_being_written_when_the_run_is_killed_stays_whole(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    run(THREE[:1], measuring([]), Store.open(path, HEAD))
    before = path.read_text()

    def half(target, values):
        target.write_text('{"half":')
        raise Killed

    monkeypatch.setattr("moe_fast.bench.scaling.runner.write_results", half)
    with pytest.raises(Killed):
        run(THREE, measuring([]), Store.open(path, HEAD))
    assert path.read_text() == before


def test_the_budget_begins_no_cell_that_would_not_fit():
    """Cells of ten seconds and a budget of 32: after the second one a third would end at 30, but may take half more."""
    now = [0.0]

    def measure(cell):
        now[0] += 10.0
        return measured(cell)

    said: list[str] = []
    outcome = run(THREE, measure, Store.open(None, HEAD), 32.0, say=said.append, clock=lambda: now[0])
    assert (outcome.measured, outcome.left) == (2, (THREE[2].key,))
    assert "1 cells left" in said[-1]
    assert said[0].startswith(f"[1/3] {THREE[0].key}: fused 1.080, floor 0.864, eager 4.320, graph 2.160 ms")
    now[0] = 0.0
    assert run(THREE, measure, Store.open(None, HEAD), 35.0, clock=lambda: now[0]).left == ()


@pytest.mark.parametrize("key", ["gpus", "repetitions", "scheduler", "commit", "device"])
def test_runs_under_other_conditions_are_not_mixed(tmp_path, key):
    path = tmp_path / "r.json"
    run(THREE[:1], measuring([]), Store.open(path, HEAD))
    other = {**HEAD, key: "another"}
    with pytest.raises(UsageError, match=f"{key} .*now 'another'.*--anew"):
        Store.open(path, other)
    assert Store.open(path, other, anew=True).done == set()


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("", "can't be read as JSON"), ("[]", "no scaling run"), ('{"gpus": 2}', "no scaling run"),
     (json.dumps({**HEAD, "latency": [1]}), "no list of measured cells")],
)  # fmt: skip
def test_a_file_of_something_else_is_refused(tmp_path, text, wrong):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=wrong):
        Store.open(path, HEAD)


def _two_ranks(rank: int, path: str) -> tuple[list[str], int]:
    """Rank 0 has a file with one cell; both measure the same ones."""
    seen: list[str] = []
    store = Store.open(None, HEAD) if rank == 0 else None
    if store:
        store.add(THREE[1], measured(THREE[1]))
    outcome = run(THREE, measuring(seen), store, 1e9, agreement())
    return seen, outcome.measured


def test_ranks_measure_what_rank_0_says():
    found = run_ranks(_two_ranks, 2, "")
    assert found == [([THREE[0].key, THREE[2].key], 2)] * 2


def test_runs_of_several_figures_add_up(tmp_path):
    """A file knows how many cells it is to have, whichever were asked for first."""
    path = tmp_path / "r.json"
    every = 0
    for chosen in (("wire",), ("balance",), ("wire",)):
        values, planned = a_run(8, path, chosen), plan(8, figures=chosen)
        every = max(every, len(values.get("wire", [])) + len(values.get("balance", [])))
        assert values["cells"] == every
        assert figures.missing(values) == 0
        assert len(values[chosen[0]]) == len(planned.cells)
    part = Store.open(path, {**HEAD})
    part.expect(plan(8))
    assert figures.missing(part.values) == len(plan(8).cells) - every


def test_a_layer_is_set_up_once_for_neighbouring_cells(monkeypatch):
    """And closed before a cell that has buffers of its own."""
    log: list[str] = []

    class Setup:
        def __init__(self, name: str) -> None:
            self.engine = self.heap = self
            self.name = name

        def close(self) -> None:
            log.append(f"close {self.name}")

    def set_up(config, most, scheduler):
        log.append(f"set up {config.experts} {most}")
        return Setup(f"{config.experts} {most}")

    monkeypatch.setattr(measuring_module, "set_up", set_up)
    monkeypatch.setattr(measuring_module, "bench_cell", lambda setup, s, repetitions, chains: {"fused": median(s)})
    monkeypatch.setattr(measuring_module, "run_costs", lambda setup, s: {"bytes": {}})
    monkeypatch.setattr(measuring_module, "run_trace", lambda layer, s, scheduler, path: {"utilisation": 0.5})
    measure = measuring_module.Measuring("spare_warps", 3)
    chosen = [Cell("latency", "paper-e8", 64, most=128), Cell("latency", "paper-e8", 128, most=128),
              Cell("costs", "paper-e16", 64, most=64), Cell("timeline", "paper-e8", 64, most=64)]  # fmt: skip
    rows = [measure(cell) for cell in chosen]
    measure.close()
    assert log == ["set up 8 128", "close 8 128", "set up 16 64", "close 16 64"]
    assert [row.get("tokens") for row in rows] == [64, 128, 64, None]
    assert rows[0]["ms"] == {"fused": median(64)}


# --- figures ---------------------------------------------------------------------------------------------------------


def test_throughput_rates_and_overlap_efficiency():
    """By hand, for 8 ranks of 16384 tokens at 1.08 ms, after 1.02 ms on two."""
    results = figures.ordered([a_run(8), a_run(2)])
    rows = figures.speed(results)
    row = next(
        r for r in rows if (r["gpus"], r["layer"], r["dtype"], r["tokens"]) == (8, "paper-e128", "bfloat16", 16384)
    )
    assert row["fused_over_floor"] == 1.25
    assert (row["eager_over_fused"], row["graph_over_fused"]) == (4.0, 2.0)
    assert row["million_tokens_per_s"] == pytest.approx(8 * 16384 / 1.08e-3 / 1e6, abs=0.01)
    assert row["tflops_per_gpu"] == pytest.approx(2 * 16384 * 2 * 2048 * 4096 / 1.08e-3 / 1e12, abs=0.1)
    assert row["overlap_efficiency"] == {"fused": 0.944, "eager": 0.944, "graph": 0.944}
    gated = next(r for r in rows if r["layer"] == "qwen3" and r["tokens"] == 8192 and r["gpus"] == 8)
    assert gated["tflops_per_gpu"] == pytest.approx(2 * 8192 * 8 * 2048 * 3 * 768 / 0.54e-3 / 1e12, abs=0.1)
    for alone in (figures.speed([a_run(8)]), figures.speed([a_run(2)])):
        assert all(value is None for r in alone for value in r["overlap_efficiency"].values())
    single = next(r for r in rows if r["dtype"] == "float32")
    assert single["graph_over_fused"] is None


def test_two_results_of_one_number_of_gpus_are_refused():
    with pytest.raises(UsageError, match="two results"):
        figures.ordered([a_run(2), a_run(2)])


def test_what_was_aimed_at_stands_beside_what_was_reached():
    results = figures.ordered([a_run(2), a_run(8)])
    rows = aims.aims(results)
    assert [row["met"] for row in rows] == [True] * len(aims.AIMS)
    assert [row["reached"] for row in rows][:3] == [1.25, 4.0, 0.944]
    # a skew at which the asymmetric placement is 4 % off, and a slow layer
    broken = json.loads(json.dumps(results))
    broken[1]["balance"][2]["over_balanced"]["asymmetric"] = 1.04
    slow = next(r for r in broken[1]["latency"] if r["cell"] == "latency paper-e128 bfloat16 S=16384")
    slow["ms"]["fused"]["median"] *= 1.5
    assert [row["met"] for row in aims.aims(broken)] == [False, False, False, True, True, False]
    alone = aims.aims([a_run(4)])
    assert all(row["reached"] is None and row["met"] is None for row in alone)
    assert [row["on 4 GPUs"] for row in alone][:3] == [1.25, 4.0, None]
    assert [row["on 2 GPUs"] for row in rows][1] == 4.0


def test_the_papers_figures_stand_beside_the_largest_run():
    rows = {row["figure"]: row["here"] for row in aims.papers(figures.ordered([a_run(2), a_run(8)]))}
    assert rows["million tokens a second"] == "121.36"
    assert rows["GPU operations of a layer"] == "1"
    assert rows["SM utilisation"] == "90.0%"
    assert rows["what scheduling adds to dispatch, us"] == "4"
    assert all(row["here"] is None for row in aims.papers([]))


def test_the_report_has_every_figure():
    text = report.render(figures.ordered([a_run(2), a_run(8)]))
    for title, _ in figures.FIGURES.values():
        assert title in text
    assert "not measured:" not in text
    assert "Beside the papers, here on 8 GPUs" in text
    part = a_run(8, figures=("balance",))
    part["cells"] = 57
    assert "not measured: 8 GPUs: 52 of 57 cells" in report.render([part])


def test_inner_objects_become_dotted_keys():
    """A time of "tokens" is not the number of tokens."""
    row = {"layer": "a", "tokens": 8, "ms": {"tokens": {"median": 1.5, "min": 1}, "floor": 2.0}, "bytes": {"heap": 3}}
    assert report.flat(row) == {"layer": "a", "tokens": 8, "ms.tokens": 1.5, "ms.floor": 2.0, "bytes.heap": 3}
    assert report.flat({"ms": 4.0}) == {"ms": 4.0}


@pytest.mark.parametrize("gpus", [(2,), (2, 4, 8)])
def test_every_value_has_its_column_and_no_table_is_too_wide_for_a_page(gpus):
    """Every value of a figure stands in one of its tables, under a heading of its own; the layer tells its experts."""
    results = [a_run(count) for count in gpus]
    for figure, (_, rows) in figures.FIGURES.items():
        keys = {key for row in rows(results) for key, value in report.flat(row).items() if value is not None}
        shown = {*report.ABOUT, *(column.key for _, columns in report.TABLES[figure] for column in columns)}
        assert keys - shown <= {"experts"}
        for one in report.tables(figure, results):
            assert one.rows
            assert len(one.rows[0]) <= 11, (figure, list(one.rows[0]))
            assert all(row.keys() == one.rows[0].keys() for row in one.rows)
            assert ("GPUs" in one.rows[0]) == (len(gpus) > 1)
            assert ("2 GPUs" in one.caption) == (len(gpus) == 1)
            for heading in one.rows[0]:
                assert any(row[heading] is not None for row in one.rows), f"{figure}: nothing under {heading!r}"


def test_rows_of_a_table_are_in_order_and_tokens_stay_tokens():
    (one,) = report.tables("wire", [a_run(2)])
    assert [(row["layer"], row["tokens of a GPU"]) for row in one.rows][:4] == [
        ("mixtral", 1024), ("mixtral", 4096), ("mixtral", 8192), ("qwen3", 1024)]  # fmt: skip
    assert one.rows[3]["ms, tokens"] == pytest.approx(0.7 * 1024 / 16384 * 1.02, abs=1e-4)
    first = report.tables("speed", [a_run(2)])[0].rows
    assert [row["layer"] for row in first if row["tokens of a GPU"] == 16384 and row["dtype"] == "bfloat16"] == [
        "paper-e8", "paper-e16", "paper-e32", "paper-e64", "paper-e128", "qwen3"]  # fmt: skip


def test_too_few_cells_calibrate_nothing():
    rows = [row for row in a_run(2)["latency"] if row["dtype"] == "bfloat16"]
    assert figures.predicted({"gpus": 2, "latency": rows[:5]}) is None


def test_the_figure_is_drawn(tmp_path):
    results = figures.ordered([a_run(2), a_run(8)])
    drawing.plot(results, tmp_path / "s.svg")
    assert "<svg" in (tmp_path / "s.svg").read_text()
    drawing.plot([a_run(4, figures=("latency",))], tmp_path / "s.png")
    drawing.plot([a_run(4, figures=("balance",))], tmp_path / "b.png")
    with pytest.raises(UsageError, match="nothing to plot"):
        drawing.plot([a_run(8, figures=("costs",))], tmp_path / "t.svg")


# --- balance ---------------------------------------------------------------------------------------------------------


def test_expected_loads_are_those_of_draws_without_replacement():
    """K = 2: an expert is chosen first with its share p, or second after another one f, p / (1 - p_f)."""
    config = layer_config("paper-e32")
    share = popularity(32, 1.0)
    second = np.array([sum(share[f] * share[e] / (1 - share[f]) for f in range(32) if f != e) for e in range(32)])
    load = balanced.expected_load(config, 1.0)
    assert load.sum() == 2 * balanced.DRAWS
    assert load / balanced.DRAWS == pytest.approx(share + second, rel=0.05, abs=2e-3)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_contestants_have_the_same_memory_and_lose_no_row(ranks):
    config = layer_config("paper-e32")
    for skew in (0.0, 2.0):
        places = balanced.placements(config, ranks, skew)
        assert {places[name].slots for name in balanced.PLACED} == {32 * 2 // ranks}
        load = balanced.expected_load(config, skew) * 4096 // balanced.DRAWS
        counts = np.stack([np.roll(load, p) if skew == 0 else load for p in range(ranks)])
        divided = balanced.plans(counts, places)
        for name, one in divided.items():
            assert np.array_equal(one.quota_PED.sum(axis=2), counts), name
        if skew:
            mean = counts.sum() / ranks
            assert divided["asymmetric"].max_load <= 1.001 * mean + 1
            assert divided["asymmetric"].max_load <= divided["symmetric"].max_load <= divided["plain"].max_load
    # plain: the rows of a rank stay in its group
    group = ranks // 2
    sent = balanced.plans(counts, places)["plain"].quota_PED
    for expert, holders in enumerate(places["plain"].ranks_of_expert):
        for j, holder in enumerate(holders):
            outside = [p for p in range(ranks) if p // group != holder // group]
            assert not sent[outside, expert, j].any()


def test_stages_are_from_their_first_event_to_their_last():
    events = [("gate", 0.0, 5.0), ("solve", 6.0, 2.0), ("push", 8.0, 4.0), ("push", 10.0, 6.0), ("gemm0", 11.0, 3.0),
              ("gemm1", 20.0, 4.0), ("combine", 24.0, 1.5)]  # fmt: skip
    line = Timeline([Interval(0, "processor 0", n, at, d, 0) for n, at, d in events], 2, 26.0, 0.5, 0.4, 1.6, {}, 0)
    found = balanced.stage_times(line)
    assert found == {
        "gate": 5.0,
        "dispatch": 8.0,
        "compute": 13.0,
        "combine": 1.5,
        "busy": 13.0,
        "solve": 2.0,
        "wall": 26.0,
    }
    assert balanced.stage_times(replace(line, intervals=[]))["dispatch"] == 0.0


def test_the_training_cells_are_jobs_that_the_loop_takes():
    from moe_ref.train.balancing import check_sizes

    for ranks in (2, 4, 8):
        for cell in plan(ranks).cells:
            if cell.figure == "training":
                job = cells.training_job(ranks, cell.layer, cell.dtype, 30)
                check_sizes(job.balancing, ranks, job.experts, job.replicas)
                assert job.sequences * job.context // ranks == 2048


# --- the command -----------------------------------------------------------------------------------------------------


def test_cells_are_named_without_a_gpu(capfd):
    code, out, _ = command(["cells", "--ranks", "8", "--json"], capfd)
    assert code == 0
    found = json.loads(out)
    assert found["cells"] == [cell.key for cell in plan(8).cells]
    assert found["left_out"] == []
    code, out, _ = command(["cells", "--ranks", "3", "--figures", "balance,wire"], capfd)
    assert code == 0
    assert out.count("left out: balance") == len(cells.SKEWS)
    assert "latency" not in out


def test_the_kernels_of_a_run_are_compiled_ahead(tmp_path, monkeypatch, capfd):
    """Exactly those of its cells, by as many processes as were asked for."""
    asked = {}

    def compile_all(every, folder=None, jobs=1):
        asked.update(shapes=list(every), jobs=jobs)
        yield from (tmp_path / f"{number}.o" for number in range(len(asked["shapes"])))

    monkeypatch.setattr("moe_fast.compiler.compile_all", compile_all)
    monkeypatch.setattr("moe_fast.compiler.check_compiler", lambda: None)
    code, out, err = command(["compile", "--ranks", "4", "--jobs", "2", "--json"], capfd)
    assert code == 0, err
    assert asked == {"shapes": shapes(plan(4), 4), "jobs": 2}
    assert len(json.loads(out)["kernels"]) == len(asked["shapes"])


def test_results_are_shown_together(tmp_path, capfd):
    """One JSON object with what was measured and the report; results of other numbers of GPUs beside are found."""
    a_run(2, tmp_path / "scaling_2gpu.json")
    a_run(8, tmp_path / "scaling_8gpu.json")
    path, figure = tmp_path / "scaling_8gpu.json", tmp_path / "f.svg"
    code, out, _ = command(["show", "--out", path, "--json", "--plot", figure], capfd)
    assert code == 0
    found = json.loads(out)
    assert out.count("\n") == 1
    assert {row["gpus"] for row in found["report"]["speed"]} == {2, 8}
    assert [row["met"] for row in found["report"]["aims"]] == [True] * len(aims.AIMS)
    assert figure.exists()
    code, out, _ = command(["show", "--out", path, "--beside", tmp_path / "scaling_2gpu.json"], capfd)
    assert code == 0
    assert "Aimed at on 8 GPUs" in out


def test_the_simulators_error_on_unseen_cells_goes_into_the_file(tmp_path, capfd):
    """Every second bf16 cell is fitted, the others predicted."""
    path = tmp_path / "scaling_2gpu.json"
    values = a_run(2)
    values["latency"] = [r for r in values["latency"] if r["tokens"] <= 2048 and r["layer"].startswith("paper")]
    path.write_text(json.dumps(values))
    code, out, err = command(["predict", "--out", path], capfd)
    assert code == 0, err
    assert "The simulator on 2 GPUs" in out
    cells_there = sorted((r["layer"], r["tokens"]) for r in values["latency"] if r["dtype"] == "bfloat16")
    found = read(path)["prediction"]["rows"]
    assert [(row["layer"], row["tokens"]) for row in found] == cells_there[1::2]


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["calculate"], "'calculate' is no step"),
        (["cells"], "cells needs the number of GPUs: --ranks"),
        (["compile"], "compile needs the number of GPUs: --ranks"),
        (["show"], "show needs the file: --out"),
        (["show", "--out", "/nowhere/s.json"], "no file /nowhere/s.json"),
        (["cells", "--ranks", "0"], "--ranks is 0"),
        (["--figures", "latency,speed"], "--figures has speed"),
        (["--figures", ","], "--figures names none"),
        (["--budget", "0"], "--budget is 0"),
        (["--budget", "nan"], "--budget is nan"),
        (["--repetitions", "-1"], "--repetitions is -1"),
        (["--scheduler", "fifo"], "--scheduler is 'fifo'"),
        (["compile", "--ranks", "8", "--jobs", "0"], "--jobs is 0"),
        (["--plot", "figure.nothing"], "figure.nothing"),
    ],
)
def test_wrong_use_is_one_line(arguments, wrong, capfd):
    code, out, err = command(arguments, capfd)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert wrong in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so it would be measured")
def test_without_a_gpu_nothing_is_measured(tmp_path, capfd):
    code, out, err = command(["--out", tmp_path / "s.json"], capfd)
    assert (code, out) == (2, "")
    assert "needs a CUDA device" in err
    assert not (tmp_path / "s.json").exists()
