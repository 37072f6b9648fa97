"""Wrong use: one line that says what was wrong, exit code 2, a traceback only with --debug."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ref import cli, doctor

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
    ("run --text= --tokens 8", "name of the text is empty", "expected a file"),
    ("run --text /dev/zero --tokens 8", "/dev/zero is no regular file", "expected a file"),
    ("run --tokens 10000000000000", "4 ranks x 10000000000000 tokens need at least", "lower --tokens or --ranks"),
    ("run --experts 1000000000 --tokens 8", "1000000000 experts need at least", "lower --experts"),
    ("run --ranks 1000000000 --tokens 1", "--ranks is 1000000000", "at most 4096"),
    ("run --seed -1 --tokens 8", "--seed is -1", "0 to 9007199254740991"),
    ("run --seed 99999999999999999999999 --tokens 8", "--seed is 99999999999999999999999", "0 to 9007199254740991"),
    ("run --plot /nowhere/x.png --tokens 8", "no folder /nowhere", "make it"),
    ("run --plot x.doc --tokens 8", "'.doc'", "png"),
    ("run --plot /proc/x.png --tokens 8", "--plot /proc/x.png can't be written", "another file"),
    ("run --bogus", "No such option: --bogus", "moe-ref run --help"),
    ("run extra", "extra", "moe-ref run --help"),
    ("walk", "No such command 'walk'", "moe-ref --help"),
    ("info --ranks 0", "--ranks is 0", "at least 1"),
    ("info --config /nowhere/c.json", "no file /nowhere/c.json", "a JSON file of config fields"),
    ("info --config /dev/zero", "/dev/zero is no regular file", "a JSON file of config fields"),
    ("diff --seed 99999999999999999999999", "--seed is 99999999999999999999999", "0 to 9007199254740991"),
    ("diff --seed -1", "--seed is -1", "0 to 9007199254740991"),
    ("diff --tile-rows 0", "--tile-rows is 0", "at least 1"),
    ("diff --tile-rows -5", "--tile-rows is -5", "at least 1"),
    ("diff --tokens 10000000000000", "2 ranks x 10000000000000 tokens need", "lower --tokens or --ranks"),
    ("diff --hidden 10000000000000", "8 experts need at least", "lower --experts, --hidden"),
    ("diff --ranks 100000", "--ranks is 100000", "at most 4096"),
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


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ("run --text /nowhere/gone.txt --tokens 8 --debug", "UsageError"),
        ("--debug run --ranks 0", "UsageError"),
        ("run --bogus --debug", "NoSuchOption"),
    ],
)
def test_debug_shows_the_traceback_and_keeps_the_code(arguments: str, kind: str, capfd: pytest.CaptureFixture) -> None:
    code, out, err = run(arguments, capfd)
    assert (code, out) == (2, "")
    assert "Traceback (most recent call last)" in err
    assert kind in err
    assert err.splitlines()[-1].startswith("error: ")


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


def test_ctrl_c_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_ref.commands.run_job", interrupted)
    code, out, err = run("run --tokens 8", capfd)
    assert (code, out, err.strip()) == (130, "", "interrupted")


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
    code, _, err = run("run --tokens 16 --json --debug", capfd)
    assert code == 1
    assert "CheckFailed" in err


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


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (MemoryError(), 2, "not enough memory; lower --tokens"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nC++ stack"), 2, "not enough memory"),
        (OverflowError("int too large to convert to float"), 2, "a number is too large to compute with; lower"),
        (RuntimeError("Overflow when unpacking long long\nmore"), 2, "a number is too large"),
        (RecursionError("deep"), 2, "a number is too large"),
        (OSError(28, "No space left on device"), 2, "No space left"),
        (KeyError("x"), 1, "'x'"),
        (SystemExit("a message"), 1, "a message"),
        (ValueError("a\x1b[31mb\udcff"), 2, "a\\x1b[31mb\\udcff"),
    ],
)
def test_any_exception_is_one_line(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("moe_ref.commands.trained_layer", fail)
    found, out, err = run("info", capfd)
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1


class Plugin:
    """An entry point whose distribution is broken."""

    name, value = "mine", "mine.commands:register"

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def load(self) -> object:
        raise self.error


@pytest.mark.parametrize("error", [ImportError("no x"), OSError("lib.so"), AttributeError("old"), SystemExit(3)])
def test_broken_plugin_is_a_note(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("moe_ref.cli.entry_points", lambda group: [Plugin(error)])
    code, out, err = run("info --json", capfd)
    assert code == 0
    assert json.loads(out)
    assert err.startswith(f"note: commands of mine (mine.commands:register) are not available: {type(error).__name__}")
    assert err.count("\n") == 1
    assert "Traceback" in run("info --json --debug", capfd)[2]


def test_broken_checks_of_others_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strings(Plugin):
        def load(self) -> object:
            return lambda: ["not a check"]

    monkeypatch.setattr(doctor, "entry_points", lambda group: [Plugin(OSError("lib.so")), Strings(OSError())])
    monkeypatch.setattr(doctor, "reference_checks", list)
    found = doctor.run_checks()
    assert found[0].name == "checks of mine (mine.commands:register)"
    assert found[0].found == "not available: OSError: lib.so"
    assert "something else than a list of Check" in found[1].found


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "2", "RANK": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK is 'x'"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK is 2"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "-1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "LOCAL_RANK is '-1'",
        ),
    ],
)
def test_broken_environment_is_named(
    values: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    code, out, err = run("run --tokens 8 --json", capfd)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("rank", ["1", "x", ""])
def test_rank_without_a_world_says_nothing(
    rank: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for arguments in ("run --tokens 8 --json", "info --json"):
        code, out, err = run(arguments, capfd)
        assert (code, err) == (0, "")
        assert json.loads(out)


def test_other_ranks_print_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """What is printed as JSON comes from rank 0 only."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run("info --json", capfd)[:2] == (0, "")
    monkeypatch.setenv("RANK", "0")
    assert json.loads(run("info --json", capfd)[1])


# --- what only another process shows: encodings, pipes, a closed stdout -----------------------------------------------


def shell(line: str, **more: str) -> tuple[str, str]:
    """stdout and stderr of a bash line in which `m` is the program."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    program = f'm() {{ {shlex.quote(sys.executable)} -m moe_ref "$@"; }}; '
    done = subprocess.run(
        ["bash", "-c", program + line],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        env={**kept, "OMP_NUM_THREADS": "1", **more},
        timeout=300,
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize("command", ["info", "info --json", "--help", "--version", "run --tokens 8"])
def test_reader_who_leaves_is_no_error(command: str) -> None:
    assert shell(f"m {command} | true; echo ${{PIPESTATUS[0]}}") == ("0\n", "")


def test_first_line_is_enough() -> None:
    out, err = shell("m info | head -1; echo ${PIPESTATUS[0]}")
    assert out.split() == ["Configuration", "0"]
    assert err == ""


@pytest.mark.parametrize("command", ["info", "info --json", "--help"])
def test_closed_or_full_stdout_is_said(command: str) -> None:
    out, err = shell(f"m {command} >&-; echo $? >&2")
    assert out == ""
    assert err.splitlines() == [
        "error: stdout is closed, so there is nowhere to report to; redirect it (>/dev/null) instead",
        "2",
    ]
    if Path("/dev/full").exists():
        _, err = shell(f"m {command} >/dev/full; echo $? >&2")
        assert err.splitlines() == ["error: [Errno 28] No space left on device", "2"]


def test_report_in_ascii(tmp_path: Path) -> None:
    path = tmp_path / "téxt"
    path.write_text("To be, or not to be")
    out, err = shell(
        f"m run --tokens 8 --text {path} && m --help && m doctor", PYTHONIOENCODING="ascii", LC_ALL="C", COLUMNS="200"
    )
    assert err == ""
    assert out.isascii()
    assert "###" in out
    assert "sha256" in out
    assert "t\\xe9xt" in out
    assert "+- Commands" in out


def test_names_of_any_bytes(tmp_path: Path) -> None:
    name = r"$'n\xff$x\\y$.txt'"
    line = rf"echo hello >{name} && m run --tokens 8 --text {name} --plot $'p\xff.png' && ls"
    out, err = shell(f"cd {tmp_path} && {line}")
    assert err == ""
    assert "input  n\\udcff$x\\y$.txt, a byte" in out
    assert out.endswith("p\udcff.png\n")


def test_commands_without_tensors_do_not_load_torch() -> None:
    code = (
        "import sys\nfrom moe_ref.cli import main\n"
        "try:\n    main(['place', '--ranks', '4', '--experts', '8', '--json'])\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_each_early_command_is_where_it_is_looked_for() -> None:
    from importlib import import_module

    import typer

    from moe_ref.cli import _WITHOUT_TORCH

    for name, module in _WITHOUT_TORCH.items():
        app = typer.Typer()
        import_module(module).register(app)
        commands = [command.name or command.callback.__name__ for command in app.registered_commands]
        assert name in commands
