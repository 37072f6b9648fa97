"""The benchmark's command line and what its committed results claim."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_fast.bench import LAYERS, TARGETS, TOKENS, app, growth, library_blocks, prediction, variants, with_targets
from moe_fast.bench.process import finish
from moe_fast.engine_choice import deadline_s
from moe_ref import cli
from moe_ref.errors import UsageError

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize("gpus", [1, 2])
def test_table_of_committed_results(gpus):
    """Every cell is there, with the ratios that its times give."""
    path = RESULTS / f"megakernel_bench_{gpus}gpu.json"
    run = CliRunner().invoke(app, ["table", str(path), "--json"])
    assert run.exit_code == 0, run.output
    rows = json.loads(run.output)["rows"]
    assert [(r["layer"], r["tokens"]) for r in rows] == [(name, s) for name in LAYERS for s in TOKENS[name]]
    for row in rows:
        fused = row["ms"]["fused"]["median"]
        assert row["gpus"] == gpus
        assert row["fused_over_floor"] == pytest.approx(fused / row["ms"]["floor"]["median"], abs=2e-3)
        assert row["graph_over_fused"] == pytest.approx(row["ms"]["graph"]["median"] / fused, abs=2e-3)
    text = CliRunner().invoke(app, ["table", str(path)])
    assert len(text.output.splitlines()) == len(rows) + 2


@pytest.mark.parametrize("gpus", [1, 2])
def test_never_slower_than_the_tuned_chain(gpus):
    """In no cell of the committed results."""
    rows = json.loads((RESULTS / f"megakernel_bench_{gpus}gpu.json").read_text())["rows"]
    slower = [(r["layer"], r["tokens"], r["graph_over_fused"]) for r in rows if r["graph_over_fused"] < 1]
    assert not slower


def test_twice_as_fast_as_the_eager_chain_on_two_gpus():
    rows = json.loads((RESULTS / "megakernel_bench_2gpu.json").read_text())["rows"]
    ratio = {(r["layer"], r["tokens"]): r["eager_over_fused"] for r in rows}
    assert ratio["paper-e32", 8192] >= 2
    assert ratio["qwen3", 8192] >= 2


def test_unknown_layers_are_refused():
    result = CliRunner().invoke(app, ["run", "--layers", "gpt5"])
    assert isinstance(result.exception, UsageError)
    assert "gpt5" in str(result.exception)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "1e9"])
def test_a_bad_deadline_is_refused(monkeypatch, text):
    monkeypatch.setenv("MOE_REF_DEADLINE_S", text)
    with pytest.raises(UsageError, match="MOE_REF_DEADLINE_S"):
        deadline_s()


def test_targets_stand_beside_ratios():
    """Every cell that something was aimed at says what, and whether it is met."""
    rows = json.loads((RESULTS / "megakernel_bench_2gpu.json").read_text())["rows"]
    found = {(r["layer"], r["tokens"]): r for r in with_targets({"rows": rows})["rows"]}
    wanted = {(layer, s): aim for (layer, gpus), cells in TARGETS.items() if gpus == 2 for s, aim in cells.items()}
    assert {cell: r["target"] for cell, r in found.items() if r["target"] is not None} == wanted
    for cell, aim in wanted.items():
        assert found[cell]["met"] == (found[cell]["fused_over_floor"] <= aim)


def test_growth_finds_a_planted_cliff():
    def cell(tokens: int, ms: float, bound: float) -> dict:
        return {"tokens": tokens, "ms": ms, "bounds_ms": {"arithmetic": bound, "memory": bound / 2, "link": 0.0}}

    smooth = growth.with_growth([cell(32, 1.0, 0.5), cell(64, 1.9, 1.0), cell(128, 4.0, 2.0)])
    assert [r["growth"] for r in smooth] == [None, 1.9, 2.105]
    assert growth.cliffs(smooth) == []
    steep = growth.with_growth([cell(32, 1.0, 0.5), cell(64, 1.9, 1.0), cell(128, 6.0, 2.0)])
    assert [r["tokens"] for r in growth.cliffs(steep)] == [128]


def test_growth_bounds():
    """All experts' weights once; half of the rows go to the other of two ranks, and as many results come back to it."""
    config = growth.layer_of(32)
    one, two = growth.bounds(config, 16384, 1), growth.bounds(config, 16384, 2)
    assert one["memory"] == pytest.approx(1e3 * 32 * 2 * 2048 * 2048 * 2 / growth.MEMORY_BYTES_PER_S)
    assert two["memory"] == pytest.approx(one["memory"] / 2)
    assert one["link"] == 0
    assert two["link"] == pytest.approx(1e3 * 2 * 16384 * 2048 * 2 / growth.LINK_BYTES_PER_S)
    assert growth.bounds(config, 1, 1)["memory"] == pytest.approx(one["memory"] * 2 / 32)


def test_growth_is_plotted(tmp_path):
    rows = [
        {"tokens": s, "experts": s, "ms": s / 10, "bounds_ms": {"arithmetic": s / 20, "memory": 0.1, "link": 0.0}}
        for s in (8, 16)
    ]
    growth.plot({"tokens": rows, "experts": rows}, tmp_path / "growth.svg")
    assert "<svg" in (tmp_path / "growth.svg").read_text()


def test_prediction_is_of_cells_that_were_not_fitted(tmp_path):
    """Half of the cells are fitted, the others predicted; what is said about the errors is theirs."""
    rows = json.loads((RESULTS / "megakernel_bench_1gpu.json").read_text())["rows"]
    chosen = [r for r in rows if r["layer"].startswith("paper") and r["tokens"] in (1024, 4096)]
    path = tmp_path / "some.json"
    path.write_text(json.dumps({"rows": chosen}))
    found = prediction.predict([path])
    assert [(r["layer"], r["tokens"]) for r in found["rows"]] == [(r["layer"], r["tokens"]) for r in chosen[1::2]]
    errors = sorted(abs(r["error"]) for r in found["rows"])
    assert found["worst_error"] == errors[-1]
    assert found["median_error"] == pytest.approx(errors[len(errors) // 2], abs=1e-4)
    assert all(r["error"] == pytest.approx(r["simulated_ms"] / r["measured_ms"] - 1, abs=1e-3) for r in found["rows"])


def test_the_recorded_cost_has_no_cliff():
    """Against tokens and against experts; every cell says what it grew by."""
    results = json.loads((RESULTS / "megakernel_growth_1gpu.json").read_text())
    for name, values in (("tokens", growth.TOKENS), ("experts", growth.EXPERTS)):
        rows = results[name]
        assert tuple(r[name] for r in rows) == values
        again = growth.with_growth([{k: v for k, v in r.items() if "growth" not in k} for r in rows])
        assert [(r["growth"], r["bound_growth"]) for r in rows] == [(r["growth"], r["bound_growth"]) for r in again]
        assert growth.cliffs(rows) == []


@pytest.mark.parametrize(
    ("text", "wrong"), [("", "can't be read as JSON"), ("[]", "no rows"), ('{"rows": [1]}', "no rows")]
)
def test_a_file_of_something_else_is_no_table(text, wrong, tmp_path, capfd):
    """One line, exit code 2."""
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "table", str(path)])
    err = capfd.readouterr().err
    assert (stopped.value.code, err.count("\n")) == (2, 1)
    assert wrong in err


def test_the_recorded_predictions():
    """Every second cell of both benchmark results; what is said about the errors is theirs, and they are small."""
    found = json.loads((RESULTS / "simulator_prediction.json").read_text())
    cells = [(name, gpus, s) for gpus in (1, 2) for name in LAYERS for s in TOKENS[name]]
    assert [(r["layer"], r["gpus"], r["tokens"]) for r in found["rows"]] == cells[1::2]
    errors = sorted(abs(r["error"]) for r in found["rows"])
    assert found["median_error"] == pytest.approx(errors[len(errors) // 2], abs=1e-4)
    assert found["worst_error"] == pytest.approx(errors[-1], abs=1e-4)
    assert found["median_error"] <= 0.15
    # The largest is Mixtral's layer at 128 tokens, bound by its weights: the model lets every task of a wave have its
    # share of the memory, also in the last wave, where few tasks have it all.
    assert found["worst_error"] <= 0.30


def test_the_schedulers_table_names_all_of_them():
    times = {"spare_warps": {"median": 1.0}, "os_block": {"median": 1.25}, "tickets": {"median": 0.5}}
    text = variants.render_in_turn({"rows": [{"layer": "qwen3", "gpus": 2, "tokens": 1024, "ms": times}]})
    head, row = text.splitlines()
    assert head.split() == ["layer", "GPUs", "S", *times]
    assert row.split() == ["qwen3", "2", "1024", "1.000", "1.250", "0.500"]


@pytest.mark.parametrize(
    ("command", "content", "message"),
    [
        ("table", '{"rows": [{"layer": "paper-e8", "gpus": 1, "tokens": 128, "ms": {}}]}', "holds no rows"),
        ("table", "[1, 2]", "holds no rows"),
        ("predict", '{"rows": []}', "holds no rows of `bench run`, expected results that"),
        ("predict", '{"rows": "abc"}', "holds no rows"),
        ("predict", "{bad", "can't be read as JSON"),
        ("plot", '{"rows": []}', "expected results that `bench growth"),
    ],
)
def test_files_that_are_no_results_are_named(command, content, message, tmp_path):
    (tmp_path / "r.json").write_text(content)
    done = CliRunner().invoke(app, [command, str(tmp_path / "r.json")])
    assert isinstance(done.exception, UsageError)
    assert str(tmp_path / "r.json") in str(done.exception)
    assert message in str(done.exception)


@pytest.mark.parametrize("command", ["predict", "plot"])
def test_where_nothing_can_be_written_is_said_first(command, tmp_path):
    done = CliRunner().invoke(app, [command, "--out", str(tmp_path / "none" / "r.svg")])
    assert isinstance(done.exception, UsageError)
    assert "no folder" in str(done.exception)


def test_results_are_shown_even_if_they_cannot_be_kept(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        finish("title", "what", {"rows": [1]}, tmp_path / "file" / "r.json", "the table")
    assert capsys.readouterr().out == "the table\n"


def test_the_blocks_table_shows_one_call_and_calls_in_a_row():
    def times(library: float, fused: float) -> dict:
        return {"library": {"median": library}, "fused": {"median": fused}}

    row = {"family": "mixtral", "tokens": 32, "ms": times(1.5, 0.75), "ms_in_a_row": times(1.25, 0.5)}
    row |= {"library_over_fused": 2.0, "library_over_fused_in_a_row": 2.5}
    line = library_blocks.render({"rows": [row]}).splitlines()[-1]
    assert line.split() == ["mixtral", "32", "1.500", "0.750", "2.00", "1.250", "0.500", "2.50"]


@pytest.mark.parametrize("command", [["run"], ["schedulers"], ["pairs"]])
@pytest.mark.parametrize("sizes", ["1,x", "-1", ","])
def test_sizes_that_are_none_are_refused(command, sizes):
    done = CliRunner().invoke(app, [*command, "--tokens", sizes])
    assert isinstance(done.exception, UsageError)
    assert "--tokens" in str(done.exception)


@pytest.mark.parametrize("command", ["run", "pairs", "schedulers", "transports", "wire", "balance", "dtypes"])
@pytest.mark.parametrize(("option", "value"), [("--layers", ","), ("--repetitions", "0")])
def test_nothing_to_measure_is_refused_before_the_gpu_is_looked_for(command, option, value):
    done = CliRunner().invoke(app, [command, option, value])
    assert option in str(done.exception) or option in done.output
    assert done.exit_code != 0
    assert "CUDA" not in str(done.exception)


@pytest.mark.parametrize("command", ["run", "trace", "pairs", "transports", "wire", "balance", "dtypes", "growth"])
def test_an_unknown_scheduler_is_named_before_the_gpu_is_looked_for(command):
    done = CliRunner().invoke(app, [command, "--scheduler", "nope"])
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == "--scheduler is 'nope', expected one of spare_warps, os_block, tickets"
