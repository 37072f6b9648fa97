"""The command `balance`: one JSON object, figures that hold, one line for bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_ref import cli
from moe_ref.balance.loads import LoadModel
from moe_ref.balance.lp import LinearProgram


def run(arguments: str, capfd: pytest.CaptureFixture) -> tuple[object, str, str]:
    """Exit code, stdout and stderr of a command line in this process."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments.split())
    out, err = capfd.readouterr()
    return stopped.value.code, out, err


def result(arguments: str, capfd: pytest.CaptureFixture) -> dict:
    code, out, _ = run(arguments + " --json", capfd)
    assert code == 0
    assert out.count("\n") == 1
    return json.loads(out)


def test_all_solvers_are_exact_and_in_time(capfd: pytest.CaptureFixture) -> None:
    """The times are a multiple of what is claimed, since test machines are busy; the ratios are not."""
    values = result("balance --ranks 64 --experts 256 --replicas 2 --zipf 0.5 --steps 12 --solver all", capfd)
    solvers = values["solvers"]
    assert set(solvers) == {"flow", "flow_compiled", "lp_warm", "lp_cold"}
    for timed in solvers.values():
        assert {"median_us", "p95_us", "quota_median_us", "max_over_mean", "exact"} <= set(timed)
        assert timed["exact"] is True
        assert timed["max_over_mean"] == solvers["flow"]["max_over_mean"]
    assert solvers["flow_compiled"]["median_us"] <= 5 * 100
    assert solvers["flow_compiled"]["quota_median_us"] <= 5 * 300
    assert solvers["flow"]["median_us"] <= 5 * 3000
    assert solvers["flow_compiled"]["median_us"] < solvers["flow"]["median_us"] / 3
    assert values["exact_share"] == 1.0
    assert values["after"]["mean"] < values["before"]["mean"]


def test_defaults_reach_perfect_balance_and_keep_a_quarter_local(capfd: pytest.CaptureFixture) -> None:
    values = result("balance", capfd)
    assert (values["ranks"], values["experts"], values["placement"]) == (8, 32, "symmetric")
    assert values["perfect_share"] == 1.0
    assert values["local_share"] >= 0.24
    assert values["slots_per_rank"] == [8] * 8
    assert result("balance", capfd)["after"] == values["after"]
    assert result("balance", capfd)["before"] == values["before"]
    assert result("balance --seed 1", capfd)["before"] != values["before"]


def test_trade_off(capfd: pytest.CaptureFixture, tmp_path: Path) -> None:
    values = result(f"balance --nodes 2 --steps 2 --plot {tmp_path / 't.png'}", capfd)
    curve = values["trade_off"]
    assert [point["alpha"] for point in curve] == sorted(point["alpha"] for point in curve)
    assert curve[0]["compute"] == pytest.approx(values["after"]["ratio_per_step"][0], abs=2e-4)
    assert curve[-1]["compute"] > curve[0]["compute"]
    assert curve[-1]["communication"] < curve[0]["communication"]
    code, out, _ = run("balance --nodes 4 --steps 2", capfd)
    assert code == 0
    assert "Balance against communication" in out


def test_no_rows_at_all_are_perfectly_balanced(capfd: pytest.CaptureFixture) -> None:
    values = result("balance --rows 0 --steps 2 --nodes 2 --sweep --overlap --solver all", capfd)
    assert values["perfect_share"] == values["exact_share"] == values["local_share"] == 1.0
    assert all(entry["mean"] == 1.0 for row in values["sweep"] for entry in row.values() if isinstance(entry, dict))


def test_overlap(capfd: pytest.CaptureFixture) -> None:
    values = result("balance --ranks 16 --experts 64 --overlap --steps 30", capfd)
    assert values["visible_us"] == values["overlap"]["overlapped"]["visible_us"]
    assert values["visible_us"] <= 5 * 400
    assert values["overlap"]["pipelined"]["visible_us"] <= 5 * 400
    assert values["overlap"]["permutation_us"] > 0


def test_sweep_and_plot(capfd: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    values = result(f"balance --sweep --steps 8 --plot {path}", capfd)
    assert [row["zipf"] for row in values["sweep"]] == sorted(row["zipf"] for row in values["sweep"])
    assert all(row["asymmetric"]["mean"] <= 1.005 for row in values["sweep"])
    assert path.read_bytes().startswith(b"\x89PNG")
    code, out, _ = run(f"balance --sweep --steps 4 --solver all --overlap --plot {tmp_path / 'f.svg'}", capfd)
    assert code == 0
    assert "eplb-style, stale" in out
    assert "dispatch waits" in out


@pytest.fixture
def real(tmp_path: Path) -> Path:
    series = [
        [
            np.stack([c.sum(axis=0) for c in LoadModel(4, 16, 0.6, rows_per_rank=64, seed=s).batches(6)])
            for s in (a, a + 9)
        ]
        for a in (0, 1)
    ]
    path = tmp_path / "loads.npz"
    np.savez(path, loads=np.array(series).astype(np.uint16), domains=np.array(["law", "code"]))
    return path


def test_real_loads(real: Path, capfd: pytest.CaptureFixture) -> None:
    values = result(f"balance --loads {real} --ranks 4 --interval 5", capfd)
    assert (values["experts"], values["series"], values["steps"], values["batches"]) == (16, 4, 6, 24)
    assert values["exact_share"] == 1.0
    assert values["perfect_batches"] == round(values["perfect_share"] * 24)
    assert len(values["across_domains"]["pairs"]) == 2
    assert values["every_interval"]["moves"] > 0
    assert values["adaptive"]["decisions"]
    code, out, _ = run(f"balance --loads {real} --ranks 4 --interval 5 --placement merged", capfd)
    assert code == 0
    assert "planned on one domain" in out
    assert "adaptive manager" in out
    code, out, _ = run(f"balance --loads {real} --ranks 4 --interval 50", capfd)
    assert code == 0
    assert "adaptive manager: not checked, every 50 steps is too rare for 12" in out
    assert "0 moves" not in out


def test_a_placement_from_a_file_brings_its_sizes(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    path = tmp_path / "p.json"
    assert run(f"place --ranks 6 --experts 12 --replicas 3 --save {path}", capfd)[0] == 0
    values = result(f"balance --placement {path} --steps 3", capfd)
    assert (values["ranks"], values["experts"]) == (6, 12)
    code, _, err = run(f"balance --placement {path} --ranks 5", capfd)
    assert code == 2
    assert "is a placement for 6 ranks, but 5 are asked for" in err.replace("\n", " ")


BAD = [
    ("--ranks 0", "ranks is 0"),
    ("--ranks -2", "ranks is -2"),
    ("--experts 0", "experts is 0"),
    ("--replicas 0", "replicas is 0"),
    ("--replicas 9", "use 1 to 8 replicas"),
    ("--zipf nan", "--zipf is nan"),
    ("--zipf -1", "--zipf is -1"),
    ("--noise inf", "--noise is inf"),
    ("--steps 0", "--steps is 0"),
    ("--rows -1", "--rows is -1"),
    ("--nodes 3", "--nodes is 3, expected a divisor of 8 ranks"),
    ("--nodes 0", "--nodes is 0"),
    ("--interval 0", "--interval is 0"),
    ("--seed -1", "--seed is -1"),
    ("--solver simplex", "unknown --solver 'simplex', expected one of flow, flow_compiled, lp_warm, lp_cold, all"),
    ("--formulation dual", "unknown --formulation 'dual'"),
    ("--placement nowhere.json", "--placement nowhere.json is no file, and none of symmetric"),
    ("--placement torus", "use 24 or 36 experts"),
    ("--loads /nowhere/x.npz", "No such file"),
    ("--loads /nowhere/x.txt", "suffix '.txt'"),
    ("--plot /nowhere/x.png", "no folder /nowhere"),
    ("--experts 33 --sweep --steps 2", "33 experts x 2 replicas is no multiple of 8 ranks"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[a for a, _ in BAD])
def test_bad_input_is_one_line(arguments: str, message: str, capfd: pytest.CaptureFixture) -> None:
    code, out, err = run(f"balance {arguments} --json", capfd)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert message in err


def test_experts_of_a_file_are_not_overruled(real: Path, capfd: pytest.CaptureFixture) -> None:
    code, out, err = run(f"balance --loads {real} --ranks 4 --experts 32", capfd)
    assert (code, out) == (2, "")
    assert "has loads of 16 experts; leave it out" in err.replace("\n", " ")


def test_a_solver_that_misses_the_optimum_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Exit code 1, and the report says which solver it was."""
    honest = LinearProgram.solve

    def worse(self, load):
        answer = honest(self, load)
        return replace(answer, max_load=answer.max_load + 1)

    monkeypatch.setattr(LinearProgram, "solve", worse)
    code, out, err = run("balance --steps 2 --solver all --json", capfd)
    assert code == 1
    exact = {name: timed["exact"] for name, timed in json.loads(out)["solvers"].items()}
    assert exact == {"flow": True, "flow_compiled": True, "lp_warm": False, "lp_cold": False}
    assert "above the proven bound: lp_warm, lp_cold" in err.replace("\n", " ")
