"""The mkdocs hook: hands mkdocs what `docs._tools.pages` makes, and turns its errors into failed builds."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs._tools.pages import Pages  # the folder of the project is on the path only from here on
from docs._tools.render import TutorialFailed
from docs._tools.results import ResultMissing
from docs._tools.site_cache import SiteCache

_made: list[Pages] = []
_kept: list[SiteCache] = []


def on_config(config):
    """Render everything first: the navigation needs the titles."""
    if config.strict:
        # With --quiet mkdocs drops warnings before strict mode has counted them.
        logger = logging.getLogger("mkdocs")
        logger.setLevel(min(logger.level, logging.WARNING))
    try:
        _made[:] = [Pages.make()]
        navigation = _made[0].navigation()
    except (TutorialFailed, ResultMissing) as error:
        raise PluginError(str(error)) from error
    for section, entries in navigation.items():
        if not entries:
            continue
        item = next((item for item in config.nav if section in item), None)
        if item is None:
            raise PluginError(f"mkdocs.yml has no section {section!r} in its nav")
        known = {_uri(entry) for entry in item[section]}
        item[section] += [entry for entry in entries if _uri(entry) not in known]
    return config


def _uri(entry: str | dict[str, str]) -> str:
    return entry if isinstance(entry, str) else next(iter(entry.values()))


def on_files(files: Files, config) -> Files:
    """Add what is made."""
    for uri, content in _made[0].files().items():
        files.append(File.generated(config, uri, content=content))
    _kept[:] = [SiteCache(config, (file.src_uri for file in files))]
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Fill the placeholders."""
    try:
        return _made[0].fill(markdown, page.file.src_uri)
    except ResultMissing as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error


def on_post_build(config) -> None:
    """Keep what the next build can use."""
    _kept.pop().close()
