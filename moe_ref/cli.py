"""The command line: `moe-ref`, also `python -m moe_ref`.

Commands live beside what they drive, in modules called `commands` with a function `register(app)`; other distributions
add theirs through the entry-point group `moe_ref.commands` (each entry is a function that takes the Typer app). Exit
codes: 0 done, 1 a check or comparison failed, 2 wrong use or missing environment. No Python exception escapes as a
traceback unless --debug is given.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
from importlib.metadata import entry_points
from typing import Any

import typer
from rich.markup import escape

import moe_ref
from moe_ref._version import __version__
from moe_ref.console import err
from moe_ref.errors import CheckFailed

app = typer.Typer(
    name="moe-ref",
    help="A distributed Mixture-of-Experts layer: run it, compare backends, balance it, look inside.",
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Typer carries its own copy of click in later versions, so the class is found through what both export.
_CLICK_EXCEPTION: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"moe-ref {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show the Python traceback of an error."),
) -> None:
    """Options that belong to every command."""


def _command_modules() -> list[str]:
    """moe_ref.commands, then the module `commands` of every subpackage that has one, in the order of their names."""
    packages = sorted(module.name for module in pkgutil.iter_modules(moe_ref.__path__, "moe_ref.") if module.ispkg)
    names = (f"{package}.commands" for package in packages)
    return ["moe_ref.commands", *(name for name in names if importlib.util.find_spec(name) is not None)]


def _register() -> None:
    for name in _command_modules():
        importlib.import_module(name).register(app)
    for entry in entry_points(group="moe_ref.commands"):
        try:
            entry.load()(app)
        except ImportError as error:
            err.print(f"[yellow]note:[/] commands of {escape(entry.value)} are not available: {escape(str(error))}")


def main(argv: list[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit with the documented code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # --debug is taken anywhere on the line, since people add it at the end of a command that just failed.
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    _register()
    try:
        # Not standalone: usage errors come to us, to be one line like all others. What is returned is an exit code.
        code = app(arguments or ["--help"], prog_name="moe-ref", standalone_mode=False)
        raise SystemExit(code if isinstance(code, int) else 0)
    except typer.Abort:
        err.print("interrupted")
        raise SystemExit(130) from None
    except _CLICK_EXCEPTION as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "moe-ref"
        _fail(ValueError(f"{_one_line(error.format_message())} (see {command} --help)"), 2, debug)
    except CheckFailed as error:
        _fail(error, 1, debug)
    except BrokenPipeError:
        # The reader of our output went away (`moe-ref ... | head`); nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except (ValueError, TypeError, OSError, ImportError) as error:
        _fail(error, 2, debug)
    except KeyboardInterrupt:
        err.print("interrupted")
        raise SystemExit(130) from None
    except Exception as error:
        _fail(error, 1, debug)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _fail(error: Exception, code: int, debug: bool) -> None:
    if debug:
        raise error
    text = _one_line(str(error)) or type(error).__name__
    err.print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True)
    raise SystemExit(code) from None
