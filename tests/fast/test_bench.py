"""The benchmark's command line and what its committed results claim."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_fast.backend import deadline_s
from moe_fast.bench import LAYERS, TOKENS, app
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
