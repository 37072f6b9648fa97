"""The built site: strict and offline, its links, and what a browser without network makes of it."""

from __future__ import annotations

import asyncio
import functools
import html.parser
import http.server
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import pytest
from docs_support import ROOT, mkdocs_build, needs_docs
from optional import do_without

pytestmark = [needs_docs, pytest.mark.slow]


# --- builds that must fail -----------------------------------------------------------------------------------------

PLANTED = {
    "nothing": ("# Home\n\nText with [a name][tiny.one].\n", "", ""),
    "dead reference": ("# Home\n\n[gone][moe_ref.gate.NoSuchName]\n", "", "moe_ref.gate.NoSuchName"),
    "dead link": ("# Home\n\n[gone](nowhere.md)\n", "", "nowhere.md"),
    "missing result": ("# Home\n\n{{ value gone a.b }}\n", "", "no result 'gone'"),
    "failing cell": ("# Home\n", "# %%\nassert 1 == 2, 'planted failure'\n", "planted failure"),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of one page and one module with this project's mkdocs.yml and tools."""
    config = (ROOT / "mkdocs.yml").read_text()
    nav = "nav:\n  - Home: index.md\n  - Tutorials: []\n  - Results: []\n  - API: []\n"
    (tmp_path / "mkdocs.yml").write_text(config[: config.index("\nnav:")] + "\n" + nav)
    for folder in ("docs/_tools", "docs/assets"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for folder in ("docs/results", "docs/tutorials", "tutorials", "moe_ref", "moe_fast"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs" / "tutorials" / "index.md").write_text("# Tutorials\n")
    (tmp_path / "moe_ref" / "__init__.py").write_text("")
    (tmp_path / "moe_ref" / "tiny.py").write_text(
        '"""A module."""\n\n\ndef one() -> int:\n    """One."""\n    return 1\n'
    )
    return tmp_path


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_fail_the_build(name: str, project: Path, tmp_path_factory) -> None:
    page, tutorial, message = PLANTED[name]
    (project / "docs" / "index.md").write_text(page.replace("[tiny.one]", "[moe_ref.tiny.one]"))
    if tutorial:
        (project / "tutorials" / "01_planted.py").write_text("# %% [markdown]\n# # 1. Planted\n\n" + tutorial)
    done = mkdocs_build(project, tmp_path_factory.mktemp("planted"))
    said = done.stdout + done.stderr
    assert message in said, said[-2000:]
    assert (done.returncode == 0) == (name == "nothing"), said[-2000:]


def _bytes(site: Path) -> dict[str, bytes]:
    """Content of every file, without the archive of the site map: its header holds the time."""
    files = [path for path in site.rglob("*") if path.is_file() and path.suffix != ".gz"]
    return {str(path.relative_to(site)): path.read_bytes() for path in files}


def test_what_is_kept_is_used_and_only_while_its_sources_are_the_same(project: Path, tmp_path_factory) -> None:
    def build() -> dict[str, bytes]:
        site = tmp_path_factory.mktemp("kept")
        done = mkdocs_build(project, site)
        assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
        return _bytes(site)

    module, home = project / "moe_ref" / "tiny.py", project / "docs" / "index.md"
    home.write_text("# Home\n\nText with [a name][moe_ref.tiny.one].\n")
    first = build()
    assert b"One." in first["api/other.html"]
    assert b'href="api/other.html#moe_ref.tiny.one"' in first["index.html"]
    assert build() == first

    # What a build takes from the cache and is marked there, is marked on the site.
    for name, text in (("api", "One."), ("search", "Text with")):
        path = project / ".cache" / "site" / f"{name}.json"
        assert text in path.read_text()
        path.write_text(path.read_text().replace(text, f"Kept. {text}"))
    marked = build()
    assert b"Kept. One." in marked["api/other.html"]
    assert b"Kept. One." in marked["search/search_index.json"]  # its HTML has changed, so the page was read anew
    assert b"Kept. Text with" in marked["search/search_index.json"]

    module.write_text(module.read_text().replace("One.", "Two.") + "\n\nLIMIT = 3\n" + '"""A limit."""\n')
    home.write_text("# Home\n\nOther text with [a name][moe_ref.tiny.LIMIT].\n")
    changed = build()
    assert b"Two." in changed["api/other.html"]
    assert b"Kept" not in changed["api/other.html"] + changed["search/search_index.json"]
    assert b'href="api/other.html#moe_ref.tiny.LIMIT"' in changed["index.html"]
    assert b"Other text" in changed["search/search_index.json"]
    assert b"LIMIT" in changed["search/search_index.json"]


def test_a_mistake_in_a_docstring_fails_every_build(project: Path, tmp_path_factory) -> None:
    (project / "docs" / "index.md").write_text("# Home\n")
    module = project / "moe_ref" / "tiny.py"
    module.write_text(module.read_text().replace("One.", "One, as [there](../gone.md)."))
    for arguments in ((), (), ("--quiet",)):
        done = mkdocs_build(project, tmp_path_factory.mktemp("mistake"), *arguments)
        assert done.returncode != 0, arguments
        assert "gone.md" in done.stdout + done.stderr, arguments


# --- the site as files ---------------------------------------------------------------------------------------------


class _Links(html.parser.HTMLParser):
    """Everything that a page refers to, and every place that can be referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            self.ids.add(str(values["id"]))
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))
        if tag in ("script", "img", "iframe", "source") and values.get("src"):
            self.loaded.append(str(values["src"]))
        if tag == "link" and values.get("href") and values.get("rel") not in ("canonical", "edit", "next", "prev"):
            self.loaded.append(str(values["href"]))


def _parsed(site: Path) -> dict[Path, _Links]:
    out = {}
    for path in sorted(site.rglob("*.html")):
        if path.name == "404.html":  # served from any depth: absolute links
            continue
        out[path] = _Links()
        out[path].feed(path.read_text())
    return out


def test_links_and_anchors_lead_somewhere(site: Path) -> None:
    pages = _parsed(site)
    assert len(pages) > 40
    dead = []
    for path, page in pages.items():
        for link in page.links + page.loaded:
            target, _, anchor = link.partition("#")
            if urllib.parse.urlparse(target).scheme or target.startswith("//"):
                continue
            file = (path.parent / urllib.parse.unquote(target)).resolve() if target else path
            if file.is_dir():
                file = file / "index.html"
            if not file.exists():
                dead.append(f"{path.relative_to(site)}: {link}")
            elif anchor and file in pages and urllib.parse.unquote(anchor) not in pages[file].ids:
                dead.append(f"{path.relative_to(site)}: {link} (no such anchor)")
    assert not dead, "\n".join(dead[:20])


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path, page in _parsed(site).items():
        outside = [url for url in page.loaded if re.match(r"(https?:)?//", url)]
        assert not outside, f"{path.name} loads {outside}"


def test_notebooks_and_scripts_lie_beside_the_tutorials(site: Path) -> None:
    pages = sorted((site / "tutorials").glob("[0-9]*.html"))
    assert len(pages) == 10
    for page in pages:
        assert page.with_suffix(".ipynb").exists()
        assert page.with_suffix(".py").read_text() == (ROOT / "tutorials" / page.with_suffix(".py").name).read_text()


def test_the_source_of_the_site_without_mkdocs(site: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "docs._tools.pages", "--out", str(tmp_path / "src")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    pages = {str(path.relative_to(tmp_path / "src")) for path in (tmp_path / "src").rglob("*.md")}
    built = {str(path.relative_to(site).with_suffix(".md")) for path in site.rglob("*.html") if path.name != "404.html"}
    assert built <= pages
    assert not [name for name in pages if "{{ " in (tmp_path / "src" / name).read_text()]


def test_the_site_stays_small(site: Path) -> None:
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    assert size < 40e6, f"{size / 1e6:.0f} MB"
    assert sum(p.stat().st_size for p in (ROOT / "docs" / "assets").rglob("*") if p.is_file()) < 6e6


# --- in a browser --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["http", "file"])
def address(request: pytest.FixtureRequest, site: Path):
    """Address of the site's folder, without a slash at the end."""
    if request.param == "file":
        yield site.as_uri()
        return
    handler = functools.partial(_Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


SEARCHES = {"certificate": "tutorials/", "MoELayer": "api/", "대칭 힙": "start/korean"}
"""What is searched for: a term of a tutorial, a name, a Korean word; and a part of an address that must be found."""


async def _visit(address: str, uris: list[str]) -> tuple[dict[str, int], list[str]]:
    """Open every page; returns counts of what was drawn, and what went wrong."""
    import chrome

    drawn, wrong = {"formulas": 0, "diagrams": 0, "images": 0, "widgets": 0}, []
    async with chrome.Browser() as page:
        for uri in uris:
            page.errors.clear()
            await page.open(f"{address}/{uri}")
            found = await page.run(
                """({
                    formulas: document.querySelectorAll('.katex').length,
                    raw: document.querySelectorAll('.katex-error, pre.diagram').length,
                    diagrams: [...document.querySelectorAll('.diagram-drawn svg')].filter(s => s.clientWidth).length,
                    images: [...document.images].filter(i => i.complete && i.naturalWidth > 100).length,
                    broken: [...document.images].filter(i => i.complete && i.naturalWidth === 0).map(i => i.src),
                    widgets: document.querySelectorAll('.widget svg rect').length,
                    wide: document.documentElement.scrollWidth - window.innerWidth,
                })"""
            )
            for name in drawn:
                drawn[name] += found[name]
            wrong += [f"{uri}: {error}" for error in page.errors]
            wrong += [f"{uri}: image {url} is broken" for url in found["broken"]]
            wrong += [f"{uri}: {found['raw']} formulas or diagrams were not drawn"] if found["raw"] else []
        outside = [u for u in page.requests if not u.startswith((address, "data:", "blob:", "about:"))]
        wrong += [f"request outside the site: {url}" for url in outside]
    return drawn, wrong


async def _search(address: str) -> dict[str, list[str]]:
    """Addresses that the search box offers for each term."""
    import chrome

    found = {}
    async with chrome.Browser() as page:
        for term in SEARCHES:
            await page.open(f"{address}/index.html")
            await page.run("document.querySelector('label.md-header__button[for=__search]').click()")
            await page.run(
                f"""(() => {{ const box = document.querySelector('.md-search__input'); box.focus();
                box.value = {term!r}; box.dispatchEvent(new Event('input', {{bubbles: true}}));
                box.dispatchEvent(new KeyboardEvent('keyup', {{bubbles: true}})); }})()"""
            )
            await page.until("document.querySelectorAll('.md-search-result__item a').length > 0")
            found[term] = await page.run("[...document.querySelectorAll('.md-search-result__item a')].map(a => a.href)")
            assert not page.errors, page.errors
    return found


async def _narrow(address: str, uris: list[str]) -> list[str]:
    """Pages that are wider than a telephone's screen."""
    import chrome

    wide = []
    async with chrome.Browser() as page:
        await page.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        for uri in uris:
            await page.open(f"{address}/{uri}")
            over = await page.run("document.documentElement.scrollWidth - 390")
            if over > 2:
                wide.append(f"{uri} is {over} pixels too wide")
    return wide


async def _keyboard(address: str) -> tuple[str, str]:
    """Use both interactive figures by keys alone; returns what they say then."""
    import chrome

    async def press(key: str) -> None:
        code = {"Enter": 13, "ArrowRight": 39}[key]
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    async with chrome.Browser() as page:
        await page.open(f"{address}/tutorials/03_symmetric_heap.html")
        await page.run("document.querySelectorAll('[data-widget=heap] button')[1].focus()")
        for _ in range(8):
            await press("Enter")
        heap = await page.run("document.querySelector('[data-widget=heap] .said').textContent")
        await page.open(f"{address}/start/first-experiment.html")
        await page.run("document.querySelector('[data-widget=skew] input').focus()")
        for _ in range(6):
            await press("ArrowRight")
        skew = await page.run("document.querySelector('[data-widget=skew] output').textContent")
        assert not page.errors, page.errors
    return heap, skew


def _needs_browser() -> None:
    import chrome

    if chrome.find() is None:
        do_without("there is no chromium on the PATH; apt-get install chromium")


def _uris(site: Path) -> list[str]:
    return [str(path.relative_to(site)) for path in sorted(site.rglob("*.html")) if path.name != "404.html"]


def test_every_page_in_a_browser_without_network(address: str, site: Path) -> None:
    _needs_browser()
    uris = _uris(site)
    drawn, wrong = asyncio.run(_visit(address, uris))
    print(f"{len(uris)} pages over {address.partition(':')[0]}: {drawn}")
    assert not wrong, "\n".join(wrong[:20])
    assert drawn["formulas"] > 20
    assert drawn["diagrams"] >= 4
    assert drawn["images"] >= 11
    assert drawn["widgets"] > 10


def test_search_finds_a_term_a_name_and_a_korean_word(address: str) -> None:
    _needs_browser()
    found = asyncio.run(_search(address))
    for term, part in SEARCHES.items():
        assert any(part in url for url in found[term]), f"{term}: {found[term][:5]}"


def test_pages_fit_a_telephone(site: Path) -> None:
    _needs_browser()
    uris = [uri for uri in _uris(site) if not uri.startswith("api/")]
    wide = asyncio.run(_narrow(site.as_uri(), uris))
    assert not wide, "\n".join(wide)


def test_interactive_figures_work_by_keyboard(site: Path) -> None:
    _needs_browser()
    heap, skew = asyncio.run(_keyboard(site.as_uri()))
    assert heap.startswith("Step 8")
    assert "no row was written twice" in heap
    assert skew == "s = 2"
