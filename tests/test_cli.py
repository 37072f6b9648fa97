"""Wrong use: one line that says what was wrong, exit code 2, a traceback only with --debug."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moe_ref import cli
from moe_ref.errors import CheckFailed

# Small products: a second thread costs more than it gives, above all on a busy machine.
pytestmark = pytest.mark.usefixtures("one_thread")

BAD = [
    ("run --ranks 0", "0 ranks", "at least 1"),
    ("run --ranks -3", "-3 ranks", "at least 1"),
    ("run --ranks two", "--ranks", "integer"),
    ("run --tokens -1", "tokens is -1", "at least 0"),
    ("run --tokens 1.5", "--tokens", "integer"),
    ("run --experts 0 --tokens 8", "experts is 0", "at least 1"),
    ("run --top-k 0 --tokens 8", "top_k is 0", "at least 1"),
    ("run --top-k 33 --tokens 8", "top_k is 33", "at most experts = 32"),
    ("run --experts 3 --tokens 8", "top_k is 4", "at most experts = 3"),
    ("run --layout round --tokens 8", "layout is 'round'", "compact, fixed"),
    ("run --backend warp --tokens 8", "unknown backend 'warp'", "ref"),
    ("run --capacity-factor -1 --tokens 8", "capacity_factor is -1", "a positive number"),
    ("run --capacity-factor nan --tokens 8", "capacity_factor is nan", "a positive number"),
    ("run --dtype int8 --tokens 8", "dtype is 'int8'", "float64, float32, bfloat16, float16"),
    ("run --text /nowhere/gone.txt --tokens 8", "no file /nowhere/gone.txt", "prose, code, excerpt"),
    ("run --text / --tokens 8", "/ is a folder", "expected a file"),
    ("run --plot /nowhere/x.png --tokens 8", "no folder /nowhere", "make it"),
    ("run --plot x.doc --tokens 8", "'.doc'", "png"),
    ("run --bogus", "No such option: --bogus", "moe-ref run --help"),
    ("run extra", "extra", "moe-ref run --help"),
    ("walk", "No such command 'walk'", "moe-ref --help"),
    ("info --ranks 0", "--ranks is 0", "at least 1"),
    ("info --config /nowhere/c.json", "--config /nowhere/c.json can't be read", "No such file"),
    ("info --top-k 99", "top_k is 99", "at most experts = 32"),
]


def run(arguments: str, capfd: pytest.CaptureFixture) -> tuple[object, str, str]:
    """Exit code, stdout and stderr of a command line in this process."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments.split())
    out, err = capfd.readouterr()
    return stopped.value.code, out, err


@pytest.mark.parametrize(("arguments", "wrong", "expected"), BAD, ids=[case[0] for case in BAD])
def test_bad_input_is_one_line(arguments: str, wrong: str, expected: str, capfd: pytest.CaptureFixture) -> None:
    for more in ("", " --json") if arguments.startswith(("run --", "info")) else ("",):
        code, out, err = run(arguments + more, capfd)
        assert code == 2
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("error: ")
        assert wrong in err
        assert expected in err


@pytest.mark.parametrize("arguments", ["run --text /nowhere/gone.txt --tokens 8 --debug", "--debug run --ranks 0"])
def test_debug_shows_the_traceback(arguments: str) -> None:
    with pytest.raises(ValueError, match=r"no file|0 ranks") as error:
        cli.main(arguments.split())
    assert "commands.py" in "".join(str(entry.path) for entry in error.traceback)


def test_bad_config_files(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    path = tmp_path / "c.json"
    for content, wrong in (
        ("{", "can't be read as JSON"),
        ("[1]", "holds a list, expected an object"),
        ('{"hidden": 8}', "does not make a config"),
        ('{"width": 8}', "unknown config fields ['width']"),
        (json.dumps({"hidden": 8, "intermediate": 8, "experts": 2, "top_k": "1"}), "top_k is '1'"),
    ):
        path.write_text(content)
        code, out, err = run(f"info --config {path}", capfd)
        assert (code, out) == (2, "")
        assert wrong in err.replace("\n", " ")
        assert err.count("\n") == 1
    path.write_bytes(b"\xff\xfe")
    assert run(f"info --config {path}", capfd)[0] == 2


def test_empty_file_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    path = tmp_path / "empty.txt"
    path.touch()
    code, _, err = run(f"run --tokens 8 --text {path}", capfd)
    assert code == 2
    assert "is empty; expected a file of at least one byte" in err


def test_torchrun_world_and_ranks_must_agree(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, _, err = run("run --ranks 3", capfd)
    assert code == 2
    assert "--ranks is 3, but torchrun started 4 processes" in err


def test_missing_environment_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    code, _, err = run("run", capfd)
    assert code == 2
    assert "RANK" in err
    assert "torchrun" in err


def test_failed_check_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("moe_ref.main_job.TOLERANCE", {"float32": 1e-12})
    code, out, err = run("run --tokens 16 --json", capfd)
    assert code == 1
    assert json.loads(out)["relative_error"] > 1e-12
    assert "expected at most 1e-12" in err
    with pytest.raises(CheckFailed):
        cli.main(["run", "--tokens", "16", "--debug"])


def test_help_version_and_nothing(capfd: pytest.CaptureFixture) -> None:
    code, out, _ = run("--version", capfd)
    assert code == 0
    assert out.startswith("moe-ref 0.")
    for arguments in ("", "--help", "-h"):
        code, out, err = run(arguments, capfd)
        assert (code, err) == (0, "")
        assert {"run", "info", "diff", "doctor"} <= set(out.replace("│", " ").split())
    code, out, _ = run("run --help", capfd)
    assert code == 0
    assert "--capacity-factor" in out


def test_other_ranks_print_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """A rank that is not 0 computes and stays silent (here: a simulated world that believes to be rank 1)."""
    monkeypatch.setenv("RANK", "1")
    assert os.environ.get("WORLD_SIZE") is None
    for arguments in ("run --tokens 8 --json", "run --tokens 8"):
        code, out, _ = run(arguments, capfd)
        assert (code, out) == (0, "")
