"""The mkdocs hook: tutorials, API pages and result pages become files of the build; placeholders become numbers.

All of it can be had without mkdocs, too: `python -m docs._tools.render` (tutorials), `docs._tools.api`, and
`docs._tools.results`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs._tools import api, render, results, trouble  # the folder of the project is on the path only from here on

_SKEW = re.compile(r"\{\{ *skew +(\S+) *\}\}")
_FIGURE = re.compile(r"\{\{ *figure +(\d\d) *\}\}")
_pages: list[render.Page] = []


def on_config(config):
    """Render everything first: the navigation needs the titles."""
    _pages.clear()
    for path in render.tutorials():
        try:
            _pages.append(render.render(path))
        except render.TutorialFailed as error:
            raise PluginError(str(error)) from error
    _extend(config.nav, "Tutorials", ["tutorials/index.md", *({p.title: f"tutorials/{p.name}.md"} for p in _pages)])
    # Pages that lie in docs/lab are notes of those who measured; they stand with the results.
    lab = sorted(Path(config.docs_dir).glob("lab/*.md"))
    _extend(config.nav, "Results", [{_heading(path): f"lab/{path.name}"} for path in lab])
    recorded = [{_title(name): f"recorded/{name}.md"} for name in results.names()]
    _extend(config.nav, "Results", recorded)
    _extend(config.nav, "API", ["api/index.md", *({group: uri} for group, uri, _ in api.pages())])
    return config


def _heading(path: Path) -> str:
    return next(line[2:] for line in path.read_text().splitlines() if line.startswith("# "))


def _title(name: str) -> str:
    return str(results.load(name).get("title", name.replace("_", " ").capitalize()))


def _extend(nav: list, section: str, entries: list) -> None:
    for item in nav:
        if section in item:
            known = {str(entry) for entry in item[section]}
            item[section] += [entry for entry in entries if str(entry) not in known]
            return
    raise PluginError(f"mkdocs.yml has no section {section!r} in its nav")


def on_files(files: Files, config) -> Files:
    """Add what is made."""

    def add(uri: str, content: str | bytes) -> None:
        files.append(File.generated(config, uri, content=content))

    for page in _pages:
        add(f"tutorials/{page.name}.md", page.markdown)
        for name, content in page.files.items():
            add(f"tutorials/{name}", content)
    for name in results.names():
        add(f"recorded/{name}.md", results.page(name))
    add("api/index.md", api.index())
    for _, uri, text in api.pages():
        add(uri, text)
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Fill in recorded numbers and the list of tutorials."""
    if "{{ tutorials }}" in markdown:
        markdown = markdown.replace("{{ tutorials }}", _list(page.file.src_uri))
    if "{{ skew " in markdown:
        markdown = _SKEW.sub(lambda match: _skew(match.group(1)), markdown)
    markdown = markdown.replace("{{ trouble }}", trouble.table())
    try:
        markdown = _FIGURE.sub(lambda match: _figure(match.group(1)), markdown)
        return results.fill(markdown)
    except results.ResultMissing as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error


def _figure(number: str) -> str:
    """The last figure of a tutorial, linked to its page."""
    page = next((p for p in _pages if p.name.startswith(number + "_")), None)
    drawn = [name for name in page.files if name.endswith(".png")] if page else []
    if page is None or not drawn:
        raise results.ResultMissing(f"tutorial {number} has no figure")
    block = page.markdown[page.markdown.index(drawn[-1]) :]
    caption = block[block.index("<figcaption>") + 12 : block.index("</figcaption>")]
    link = f"tutorials/{page.name}.md"
    picture = f"[![{caption}](tutorials/{drawn[-1]})]({link})"
    return f"{picture}\n\n<small>{caption} From [tutorial {int(number)}]({link}).</small>"


def _skew(name: str) -> str:
    """The slider over a recorded skew sweep, with its data: a page opened from a file can't fetch any."""
    data = json.dumps(results.find(results.load(name), "sweep", name))
    return f'<div class="widget" data-widget="skew"><script type="application/json">{data}</script></div>'


def _list(uri: str) -> str:
    prefix = "" if uri.startswith("tutorials/") else "tutorials/"
    rows = ["| | tutorial | runs in |", "|---:|---|---:|"]
    for page in _pages:
        number, _, title = page.title.partition(". ")
        rows.append(f"| {number} | [{title}]({prefix}{page.name}.md) | {page.seconds:.0f} s |")
    return "\n".join(rows) + "\n"
