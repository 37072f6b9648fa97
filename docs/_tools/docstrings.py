"""Docstrings as they stand in the source, made safe for the site: `rows[e][j]` is an index there, not a reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

_INDEX = re.compile(r"(?<![`\w\]])(\w*\[[^\]\n`]+\]\[[^\]\n`]+\])")


def quoted(text: str) -> str:
    """Text with doubly indexed names in backticks; what stands in backticks or in a doctest stays as it is."""
    lines = []
    for line in text.split("\n"):
        if not line.lstrip().startswith((">>>", "...")):
            parts = line.split("`")
            parts[::2] = [_INDEX.sub(r"`\1`", part) for part in parts[::2]]
            line = "`".join(parts)
        lines.append(line)
    return "\n".join(lines)


class QuoteIndices(griffe.Extension):
    """Griffe extension that applies `quoted` to every docstring."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = quoted(obj.docstring.value)
