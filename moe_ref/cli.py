"""The command line: `moe-ref`, also `python -m moe_ref`.

Commands live beside what they drive, in modules called `commands` with a function `register(app)`; other distributions
add theirs through the entry-point group `moe_ref.commands` (each entry is a function that takes the Typer app). Exit
codes: 0 done, 1 a check or comparison failed, 2 wrong use or missing environment. No Python exception escapes as a
traceback unless --debug is given.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import typer
from rich.markup import escape

import moe_ref
from moe_ref._version import __version__
from moe_ref.console import err, forget
from moe_ref.errors import CheckFailed, UsageError
from moe_ref.limits import printable

# Typer carries its own copy of click in later versions, so the class is found through what both export.
_CLICK_EXCEPTION: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def _version(value: bool) -> None:
    if value:
        typer.echo(f"moe-ref {__version__}")
        raise typer.Exit()


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show the Python traceback of an error."),
) -> None:
    """Options that belong to every command."""


def _new_app() -> typer.Typer:
    """The app without commands, a new one each time: in a shared one the commands of every call would pile up."""
    app = typer.Typer(
        rich_markup_mode="markdown",
        name="moe-ref",
        help="A distributed Mixture-of-Experts layer: run it, compare backends, balance it, look inside.",
        pretty_exceptions_enable=False,
        add_completion=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    return app


_WITHOUT_TORCH = {
    "balance": "moe_ref.balance.commands",
    "place": "moe_ref.placement.commands",
}
"""Commands that need no tensors and where they live: they alone are loaded when they alone are asked for."""


def _command_modules() -> list[str]:
    """moe_ref.commands, then the module `commands` of every subpackage that has one, in the order of their names."""
    packages = sorted(module.name for module in pkgutil.iter_modules(moe_ref.__path__, "moe_ref.") if module.ispkg)
    names = (f"{package}.commands" for package in packages)
    return ["moe_ref.commands", *(name for name in names if importlib.util.find_spec(name) is not None)]


def build_app(debug: bool = False, wanted: str | None = None) -> typer.Typer:
    """A new app with all commands, or with the one that is `wanted` if it can be loaded alone.

    Those that can't be loaded cost a note on stderr (with the traceback if `debug`), not the other commands.
    """
    app = _new_app()
    if wanted in _WITHOUT_TORCH:
        _add(app, _WITHOUT_TORCH[wanted], importlib.import_module(_WITHOUT_TORCH[wanted]).register, debug)
        return app
    for name in _command_modules():
        _add(app, name, lambda app, name=name: importlib.import_module(name).register(app), debug)
    for entry in entry_points(group="moe_ref.commands"):
        _add(app, f"{entry.name} ({entry.value})", lambda app, entry=entry: entry.load()(app), debug)
    return app


def _add(app: typer.Typer, name: str, register: Callable[[typer.Typer], object], debug: bool) -> None:
    try:
        register(app)
    except (Exception, SystemExit) as error:  # whatever another's code does at its import
        if debug:
            traceback.print_exc()
        said = printable(_one_line(f"{type(error).__name__}: {error}"))
        err.print(f"[yellow]note:[/] commands of {escape(name)} are not available: {escape(said)}", soft_wrap=True)


def main(argv: list[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit with the documented code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # --debug is taken anywhere on the line, since people add it at the end of a command that just failed.
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    try:
        if sys.stdout is None:
            raise UsageError("stdout is closed, so there is nowhere to report to; redirect it (>/dev/null) instead")
        # What the terminal's encoding lacks is shown as an escape: no report ends in the middle because of it.
        if callable(reconfigure := getattr(sys.stdout, "reconfigure", None)):
            reconfigure(errors="backslashreplace")
        app = build_app(debug, arguments[0] if arguments else None)
        # Not standalone: usage errors come to us, to be one line like all others. What is returned is an exit code.
        code = app(arguments or ["--help"], prog_name="moe-ref", standalone_mode=False, obj={"debug": debug})
        sys.stdout.flush()
        if code == INTERRUPTED:
            raise KeyboardInterrupt  # Typer swallows it and hands back the code
    except BaseException as error:
        raise SystemExit(exit_code(error, debug)) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def exit_code(error: BaseException, debug: bool) -> int:
    """Say what went wrong, in one line unless `debug`; returns the documented code."""
    if _reader_is_gone(error):
        # `moe-ref ... | head`: nothing is left to say.
        forget(sys.stdout)
        return 0
    if isinstance(error, (typer.Abort, KeyboardInterrupt)):
        err.print("interrupted")
        return INTERRUPTED
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        error = RuntimeError(error.code)
    if debug:
        traceback.print_exception(error)
    if isinstance(error, OSError) and sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:  # a full disk, say: what could not be written now can't at the interpreter's end
            forget(sys.stdout)
    text, code = _explain(error)
    err.print(f"[bold red]error:[/] {escape(printable(_one_line(text)))}", soft_wrap=True)
    return code


def _explain(error: Any) -> tuple[str, int]:
    """Message and exit code."""
    text = str(error) or type(error).__name__
    if isinstance(error, _CLICK_EXCEPTION):
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "moe-ref"
        return f"{error.format_message()} (see {command} --help)", 2
    if isinstance(error, (CheckFailed, UsageError)):
        return text, 1 if isinstance(error, CheckFailed) else 2
    if isinstance(error, MemoryError) or _says(text, *_OUT_OF_MEMORY):
        return f"not enough memory; lower --tokens, --ranks, --experts or the layer's sizes ({_first_line(text)})", 2
    if isinstance(error, (OverflowError, RecursionError)) or _says(text, *_TOO_LARGE):
        return f"a number is too large to compute with; lower the sizes or the seed ({_first_line(text)})", 2
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.strerror:
        return f"{error.filename}: {error.strerror}", 2
    if isinstance(error, (ValueError, TypeError, OSError, ImportError)):
        return text, 2
    return text, 1


_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "Unable to allocate")
_TOO_LARGE = (
    "Overflow when unpacking",
    "without overflow",
    "Storage size calculation overflowed",
    "array is too big",
    "Maximum allowed dimension exceeded",
    "invalid size, overflowed",
    "too large to convert",
    "numel: integer multiplication overflow",
)
"""What torch and numpy say, in errors of general types."""


def _says(text: str, *phrases: str) -> bool:
    return any(phrase in text for phrase in phrases)


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0][:200]


def _reader_is_gone(error: BaseException | None) -> bool:
    """Whether stdout's reader has closed its end. Click and rich turn that into an exit with code 1 of their own."""
    if isinstance(error, SystemExit):
        error = error.__context__ if error.code == 1 else None
    return isinstance(error, OSError) and error.errno == errno.EPIPE


def _one_line(text: str) -> str:
    return " ".join(text.split())
