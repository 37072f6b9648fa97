"""The command `place`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from moe_ref import cli
from moe_ref.placement import by_name
from moe_ref.placement.names import load


def run(arguments: str, capfd: pytest.CaptureFixture) -> tuple[object, str, str]:
    """Exit code, stdout and stderr of a command line in this process."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments.split())
    out, err = capfd.readouterr()
    return stopped.value.code, out, err


def test_what_it_prints(capfd: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    code, out, _ = run(f"place --ranks 8 --experts 32 --replicas 2 --save {path} --json", capfd)
    assert code == 0
    assert out.count("\n") == 1
    values = json.loads(out)
    assert values["recipe"] == "complete graph + perfect matching"
    assert values["density"] == 1.0
    assert values["witness"] == list(range(8))
    assert values["slots_per_rank"] == 8
    assert 0.6 <= values["perfect_up_to_zipf"] <= values["zipf_limit"] == 1.0
    assert load(path) == by_name("symmetric", 8, 32, 2).placement
    code, out, _ = run("place --zipf 1.5", capfd)
    assert code == 0
    assert "complete graph" in out


def test_a_witness_proves_a_density_above_one(capfd: pytest.CaptureFixture) -> None:
    values = json.loads(run("place --zipf 1.5 --json", capfd)[1])
    assert values["density"] > 1.5
    hot = values["witness"]
    assert hot in [sorted(ranks) for ranks in values["ranks_of_expert"]]
    known = json.loads(run("place --zipf 1.5 --placement asymmetric --json", capfd)[1])
    assert known["density"] <= 1.001
    assert isinstance(known["replicas"], list)


def test_the_largest_size_takes_less_than_two_seconds(capfd: pytest.CaptureFixture) -> None:
    run("place --ranks 8 --experts 32 --json", capfd)  # imports and compiled code, but no placement of this size
    start = time.process_time()
    assert run("place --ranks 64 --experts 256 --replicas 2 --json", capfd)[0] == 0
    assert time.process_time() - start < 5 * 2, "2 s on a quiet core, see tests/benchmarks"


@pytest.mark.parametrize("arguments", ["", "--replicas 3 --placement symmetric", "--placement asymmetric --zipf 2"])
def test_drawings(arguments: str, capfd: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "graph.png"
    assert run(f"place {arguments} --plot {path}", capfd)[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


BAD = [
    ("--ranks 4 --replicas 5", "use 1 to 4 replicas"),
    ("--ranks 64 --experts 8", "use at least 8 replicas"),
    ("--experts 0", "--experts is 0"),
    ("--ranks 0", "ranks is 0"),
    ("--zipf -0.1", "--zipf is -0.1"),
    ("--orders 0", "--orders is 0"),
    ("--placement somewhere", "--placement somewhere is no file"),
    ("--placement merged --replicas 3", "use a divisor of 8"),
    ("--save /nowhere/p.json", "--save /nowhere/p.json: no folder /nowhere"),
    ("--save /proc/p.json", "--save /proc/p.json can't be written"),
    ("--plot x.doc", "'.doc'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[a for a, _ in BAD])
def test_bad_input_is_one_line(arguments: str, message: str, capfd: pytest.CaptureFixture) -> None:
    code, out, err = run(f"place {arguments} --json", capfd)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
