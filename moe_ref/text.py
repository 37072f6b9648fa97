"""Input text: what every Python already carries, a frozen excerpt, or a file of the user's.

* prose: the language reference topics of the Python documentation (`pydoc_data.topics`, about 460 kB). They differ
  between Python versions, so numbers computed from them do too.
* code: the source of the standard library's modules that are one file (about 4 MB), for the same price.
* excerpt: the first 64 kB of the prose of Python 3.11.7, shipped in the package (licence: PSF-2.0, see
  `assets/excerpt.NOTICE.txt`). The same bytes everywhere: for tests on exact numbers.

A byte is a token: nothing needs a tokenizer, and any file is legal input.
"""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from moe_ref.errors import UsageError
from moe_ref.limits import regular_file_size

BUILT_IN = ("prose", "code", "excerpt")
"""Names that `load_text` knows; anything else is the path of a file (write ./prose for a file of that name)."""

EXCERPT_BYTES = 65536
"""Size of the frozen excerpt."""


@dataclass(frozen=True)
class Text:
    """A piece of text of exactly the length that was asked for.

    Attributes:
        name: what was asked for, a built-in name or a path.
        data: the bytes.
        available: bytes that the source has.
    """

    name: str
    data: bytes
    available: int

    @property
    def repeated(self) -> bool:
        """Whether the source was shorter than what was asked for, and therefore stands in `data` more than once."""
        return len(self.data) > self.available

    @property
    def note(self) -> str | None:
        """One line about the repetition for a report; None if there is none."""
        if not self.repeated:
            return None
        return f"{self.name} has {self.available} bytes, {len(self.data)} were needed: it was repeated from its start"


@cache
def prose() -> bytes:
    """All topics of the Python documentation in the order of their keys, joined by one line feed, as UTF-8.

    Raises:
        UsageError: this Python comes without `pydoc_data` (some minimal distributions remove it).
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UsageError(
            "this Python has no pydoc_data.topics, which 'prose' is made of; use --text excerpt, or a file of yours"
        ) from error
    return "\n".join(topics[key] for key in sorted(topics)).encode()


@cache
def code() -> bytes:
    """Source of the standard library's public modules that are one .py file, in the order of their names.

    Raises:
        UsageError: this Python comes without source files (a frozen or zipped standard library).
    """
    folder = Path(sysconfig.get_path("stdlib"))
    modules = sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))
    sources = [path.read_bytes() for name in modules if (path := folder / f"{name}.py").is_file()]
    if not sources:
        raise UsageError(f"no source files of the standard library in {folder}; use --text prose, or a file of yours")
    return b"\n".join(sources)


@cache
def excerpt() -> bytes:
    """The frozen excerpt, EXCERPT_BYTES bytes, the same on every machine and Python."""
    return files("moe_ref").joinpath("assets", "excerpt.txt").read_bytes()


def _read_file(name: str, length: int) -> tuple[bytes, int]:
    """The first `length` bytes of a file, or all if it has fewer; and how many it has."""
    expected = f"a file of text (any bytes), or one of {', '.join(BUILT_IN)}"
    if not name:
        raise UsageError(f"the name of the text is empty; expected {expected}")
    path = Path(name)
    size = regular_file_size(path, expected)
    try:
        with path.open("rb") as file:
            data = file.read(max(min(length, size), 1))
    except OSError as error:
        raise UsageError(f"{name} can't be read: {error.strerror}; expected a readable file") from error
    if not data:
        raise UsageError(f"{name} is empty; expected a file of at least one byte")
    # A file that was cut meanwhile, or that states more than it has, as some in /sys do, has what was read.
    return data, size if len(data) >= min(length, size) else len(data)


def load_text(name: str, length: int) -> Text:
    """The first `length` bytes of a built-in text or a file, repeated from its start where it is shorter.

    Args:
        name: "prose", "code", "excerpt", or the path of a file.
        length: bytes wanted, at least 0.

    Raises:
        UsageError: the file is missing, empty, unreadable or no regular file; this Python lacks the built-in text.
        ValueError: length is negative.
    """
    if length < 0:
        raise ValueError(f"length is {length}, expected at least 0")
    built_in = {"prose": prose, "code": code, "excerpt": excerpt}
    if name in built_in:
        source = built_in[name]()
        available = len(source)
    else:
        source, available = _read_file(name, length)
    if len(source) < length:
        source = source * (length // len(source) + 1)
    return Text(name, source[:length], available)
