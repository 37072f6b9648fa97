"""What is refused before any work: sizes that no machine holds, files that never end, seeds that no generator takes.

Linux promises memory that it does not have and ends the process that uses it, without a word; so what a job needs at
least is compared with what the machine has, beforehand.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from moe_ref.errors import UsageError

MAX_SEED = 2**53 - 1
"""Largest seed: an integer that JSON keeps exactly; several streams are made of one seed without leaving 64 bits."""

MAX_SIMULATED_RANKS = 4096
"""Most ranks of a simulated world: its tables are ranks x ranks."""


def check_seed(seed: int, name: str = "seed") -> None:
    """Raise UsageError unless `seed` is 0 to MAX_SEED."""
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"{name} is {seed}, expected 0 to {MAX_SEED}")


def check_simulated_ranks(ranks: int | None) -> None:
    """Raise UsageError for more ranks than one process simulates; too few are the world's to refuse."""
    if ranks is not None and ranks > MAX_SIMULATED_RANKS:
        raise UsageError(f"--ranks is {ranks}, expected at most {MAX_SIMULATED_RANKS} simulated ranks")


def machine_memory() -> int | None:
    """Bytes of this machine's memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def check_memory(needed: int, what: str, remedy: str) -> None:
    """Raise UsageError if `needed` bytes are more than this machine has: `what` needs them, `remedy` needs fewer."""
    memory = machine_memory()
    if memory is not None and needed > memory:
        raise UsageError(
            f"{what} need at least {_gigabytes(needed)} of memory, this machine has {_gigabytes(memory)}; {remedy}"
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size < 10**12 else f"{size // 10**9:,} GB"


def regular_file_size(path: Path, expected: str) -> int:
    """Bytes of a file as its entry states them; opening a device or a pipe might wait or never end.

    Args:
        expected: what should be there, for the messages.

    Raises:
        UsageError: there is no such file, it can't be looked at, or it is a folder, a device, a pipe or a socket.
    """
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise UsageError(f"no file {path}; expected {expected}") from error
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}; expected {expected}") from error
    if stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{path} is a folder, expected {expected}")
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path} is no regular file (a device, a pipe or a socket), expected {expected}")
    return found.st_size


def printable(text: str) -> str:
    r"""`text` with everything a terminal or a font can't show written as an escape.

    >>> print(printable("a\tb\udcff\u00e9"))
    a\tb\udcffé
    """
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode("ascii") for ch in text)


def check_plot_path(path: Path, option: str = "--plot") -> None:
    """Raise UsageError unless `plot_report` could write there: known before a long computation, not after."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise UsageError(f"{option} {path} ends in {path.suffix!r}, expected one of {', '.join(sorted(formats))}")
    check_output_path(option, path)


def check_output_path(option: str, path: Path) -> None:
    """Raise UsageError unless a file can be written there: known before a long computation, not after."""
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: no folder {path.parent}; make it, or name another")
    try:
        is_new = not path.exists()
        if not is_new and not path.is_file():
            raise UsageError(
                f"{option} {path} is {'a folder' if path.is_dir() else 'no regular file'}, expected a file"
            )
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{option} {path} can't be written: {error.strerror}; name another file") from error
