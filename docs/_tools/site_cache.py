"""What of a build is kept for the next one, in `.cache/site`: the HTML of the API and each page's search entries.

Rendering docstrings and reading finished pages for the search index are most of a build in which no tutorial runs. Both
are taken from the last build where nothing that they are made of has changed:

    api.json      HTML, headings and aliases of each module, under a digest of all sources of the packages, of the
                  configuration, these tools, the pages' addresses, and the versions of what renders
    search.json   entries of each page, under a digest of its HTML, address and title, and the same versions

A module whose rendering logs a warning is rendered anew each time: a strict build must fail every time, not only the
first. References between pages, links and anchors are no part of this; mkdocs resolves and checks them on every build.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "site"

_RENDERERS = (
    "mkdocs", "mkdocs-material", "mkdocstrings", "mkdocstrings-python", "mkdocs-autorefs", "griffe", "griffelib",
    "markdown", "pymdown-extensions", "pygments", "jinja2", "ruff", "black", "jieba",
)  # fmt: skip


class Module(NamedTuple):
    """One module of the API as the handler of mkdocstrings renders it.

    Attributes:
        html: its HTML, with references still to be resolved.
        headings: (tag, attributes, text) of each heading in it, for the table of contents and the references.
        aliases: the names that lead to a heading, by the heading's id.
    """

    html: str
    headings: list[tuple[str, dict[str, str], str | None]]
    aliases: dict[str, list[str]]


class Store:
    """A dictionary in a JSON file. What a build doesn't use doesn't stay."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._old: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._new: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        """What is kept under a key, or None."""
        if key in self._old:
            self._new[key] = self._old[key]
        return self._new.get(key)

    def put(self, key: str, value: Any) -> None:
        """Keep a value; it must survive JSON."""
        self._new[key] = value

    def write(self) -> None:
        """Replace the file by what was used since it was read."""
        if self._new.keys() == self._old.keys():
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(self._new))
        partial.replace(self._path)


class _Counter(logging.Handler):
    """Number of warnings and errors so far."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.number = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.number += 1


_LOGGER = logging.getLogger("mkdocs")
"""Logger above those of mkdocs, its plugins and griffe; strict mode counts here, too."""

_COUNTER = _Counter()
_LOGGER.addHandler(_COUNTER)


class _Collected(NamedTuple):
    """A module that isn't kept, between the two steps that render it."""

    key: str
    warnings: int
    item: Any


class SiteCache:
    """Stands between mkdocs and its plugins mkdocstrings and search, for one build.

    Args:
        config: configuration of mkdocs, after its plugins have seen it.
        addresses: all source addresses of the site: a docstring may link to a page.
    """

    def __init__(self, config, addresses: Iterable[str]) -> None:
        self._modules, self._entries = Store(CACHE / "api.json"), Store(CACHE / "search.json")
        self._versions = json.dumps([sys.version, *(_version(name) for name in _RENDERERS)])
        # Paths of sources stand in the HTML relative to the working directory.
        self._sources = _digest(
            self._versions, os.path.relpath(ROOT), *sorted(addresses), *_sources(Path(config.config_file_path))
        )
        self._take_modules(config.plugins["mkdocstrings"].get_handler("python"))
        self._take_entries(config.plugins["material/search"].search_index)

    def close(self) -> None:
        """Write what this build used, at its end."""
        self._modules.write()
        self._entries.write()

    def _take_modules(self, handler) -> None:
        """Let the handler collect and render only what isn't kept."""
        collect, render, get_aliases = handler.collect, handler.render, handler.get_aliases
        aliases: dict[str, list[str]] = {}

        def collect_or_take(identifier: str, options) -> Module | _Collected:
            key = _digest(self._sources, identifier, repr(options))
            kept = self._modules.get(key)
            if kept is not None:
                return Module(*kept)
            before = _COUNTER.number
            return _Collected(key, before, collect(identifier, options))

        def render_or_take(data: Module | _Collected, options, locale: str | None = None) -> str:
            if isinstance(data, Module):
                for tag, attributes, text in data.headings:
                    heading = Element(tag, attributes)
                    heading.text = text
                    handler._headings.append(heading)
                aliases.update(data.aliases)
                return data.html
            first = len(handler._headings)
            html = render(data.item, options, locale)
            headings = handler._headings[first:]
            # A heading with markup in it comes from the text of a docstring; as JSON it would not be the same.
            quiet = _COUNTER.number == data.warnings and _LOGGER.isEnabledFor(logging.WARNING)
            if quiet and not any(len(heading) for heading in headings):
                ids = [heading.attrib["id"] for heading in headings]
                plain = [(heading.tag, dict(heading.attrib), heading.text) for heading in headings]
                self._modules.put(data.key, Module(html, plain, {name: list(get_aliases(name)) for name in ids}))
            return html

        handler.collect, handler.render = collect_or_take, render_or_take
        handler.get_aliases = lambda name: tuple(aliases[name]) if name in aliases else get_aliases(name)

    def _take_entries(self, index) -> None:
        """Let the index read only pages that aren't kept."""
        add = index.add_entry_from_context

        def add_or_take(page) -> None:
            key = _digest(self._versions, page.content, page.url, str(page.title), repr(page.meta))
            kept = self._entries.get(key)
            if kept is not None:
                index.entries += kept
                return
            before = len(index.entries)
            add(page)
            self._entries.put(key, index.entries[before:])

        index.add_entry_from_context = add_or_take


def _sources(configuration: Path) -> list[str]:
    """Digests of the files that the HTML of the API is made of."""
    files = [configuration, *sorted(Path(__file__).parent.glob("*.py"))]
    for package in ("moe_ref", "moe_fast"):
        files += sorted((ROOT / package).rglob("*.py"))
    return [f"{os.path.relpath(path, ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
