"""All pages that are made, and what fills the placeholders of those that are written; without mkdocs.

    python -m docs._tools.pages --out build/docs

writes the whole source of the site as plain Markdown with its assets and a navigation (`nav.json`): input for any
generator of sites, and what to look at when a page does not show what it should.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from docs._tools import api, render, results, scaling, trouble

DOCS = Path(__file__).resolve().parents[1]

_SKEW = re.compile(r"\{\{ *skew +(\S+) *\}\}")
_SCALING = re.compile(r"\{\{ *scaling +(\w+) *\}\}")
_ON_DISK = re.compile(r"\]\((?:\.\./)+(?:(tutorials/\d\d_\w+)\.py|results/(\w+)\.json|moe_ref(?=\)))")
"""Links of written pages to the sources of made ones, as they stand in the checkout: they work there, too."""
_FIGURE = re.compile(r"\{\{ *figure +(\d\d) *\}\}")


@dataclass(frozen=True)
class Pages:
    """Everything that is made, from the tutorials as they were rendered."""

    tutorials: tuple[render.Page, ...]

    @classmethod
    def make(cls) -> Pages:
        """Render all tutorials (or take them from the cache); raises TutorialFailed."""
        return cls(tuple(render.render(path) for path in render.tutorials()))

    def files(self) -> dict[str, str | bytes]:
        """Content of every made page, figure, notebook and script by its address in the source of the site."""
        out: dict[str, str | bytes] = {}
        for page in self.tutorials:
            out[f"tutorials/{page.name}.md"] = page.markdown
            out |= {f"tutorials/{name}": content for name, content in page.files.items()}
        out |= {f"recorded/{name}.md": results.page(name) for name in results.names()}
        out |= scaling.drawing()
        out["api/index.md"] = api.index()
        return out | {uri: text for _, uri, text in api.pages()}

    def navigation(self) -> dict[str, list[str | dict[str, str]]]:
        """Entries that sections of the navigation must have. Notes in docs/lab stand with the results."""
        lab = sorted(DOCS.glob("lab/*.md"))
        recorded = {_title(name): f"recorded/{name}.md" for name in results.names()}
        notes = {_heading(path): f"lab/{path.name}" for path in lab}
        howto = {_heading(path): f"howto/{path.name}" for path in sorted(DOCS.glob("howto/*.md"))}
        return {
            "How to": [{title: uri} for title, uri in howto.items()],
            "Tutorials": ["tutorials/index.md", *({p.title: f"tutorials/{p.name}.md"} for p in self.tutorials)],
            "Results": [{title: uri} for title, uri in (notes | recorded).items()],
            "API": ["api/index.md", *({title: uri} for title, uri, _ in api.pages())],
        }

    def fill(self, markdown: str, uri: str) -> str:
        """Replace all placeholders of the page at `uri`.

        Raises:
            ResultMissing: a placeholder names something that is not there.
        """
        if "{{ tutorials }}" in markdown:
            markdown = markdown.replace("{{ tutorials }}", self._list(uri))
        if "{{ trouble }}" in markdown:
            markdown = markdown.replace("{{ trouble }}", trouble.table())
        markdown = _SCALING.sub(lambda match: scaling.part(match.group(1)), markdown)
        up = "../" * uri.count("/")
        markdown = _ON_DISK.sub(lambda match: f"]({up}{_made(match)}", markdown)
        markdown = _SKEW.sub(lambda match: _skew(match.group(1)), markdown)
        markdown = _FIGURE.sub(lambda match: self._figure(match.group(1)), markdown)
        return results.fill(markdown)

    def _figure(self, number: str) -> str:
        """The last figure of a tutorial, linked to its page; for the landing page."""
        page = next((p for p in self.tutorials if p.name.startswith(number + "_")), None)
        drawn = [name for name in page.files if name.endswith(".png")] if page else []
        if page is None or not drawn:
            raise results.ResultMissing(f"tutorial {number} has no figure")
        block = page.markdown[page.markdown.index(drawn[-1]) :]
        caption = block[block.index("<figcaption>") + 12 : block.index("</figcaption>")]
        link = f"tutorials/{page.name}.md"
        picture = f"[![{caption}](tutorials/{drawn[-1]})]({link})"
        return f"{picture}\n\n<small>{caption} From [tutorial {int(number)}]({link}).</small>"

    def _list(self, uri: str) -> str:
        prefix = "" if uri.startswith("tutorials/") else "tutorials/"
        rows = ["| | tutorial | runs in |", "|---:|---|---:|"]
        for page in self.tutorials:
            number, _, title = page.title.partition(". ")
            rows.append(f"| {number} | [{title}]({prefix}{page.name}.md) | {page.seconds:.0f} s |")
        return "\n".join(rows) + "\n"


def _made(match: re.Match[str]) -> str:
    """Address in the site of the page made of what a link leads to."""
    tutorial, result = match.groups()
    return f"{tutorial}.md" if tutorial else f"recorded/{result}.md" if result else "api/index.md"


def _heading(path: Path) -> str:
    return next(line[2:] for line in path.read_text().splitlines() if line.startswith("# "))


def _title(name: str) -> str:
    return str(results.load(name).get("title", name.replace("_", " ").capitalize()))


def _skew(name: str) -> str:
    """The slider over a recorded skew sweep, with its data: a page opened from a file can't fetch any."""
    data = json.dumps(results.find(results.load(name), "sweep", name))
    return f'<div class="widget" data-widget="skew"><script type="application/json">{data}</script></div>'


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs._tools.pages", description="Write the source of the site.")
    parser.add_argument("--out", type=Path, required=True, help="folder; must not exist yet")
    out = parser.parse_args(argv).out
    pages = Pages.make()
    shutil.copytree(DOCS, out, ignore=shutil.ignore_patterns("_tools", "results", "__pycache__"))
    for uri, content in pages.files().items():
        (out / uri).parent.mkdir(parents=True, exist_ok=True)
        (out / uri).write_bytes(content.encode() if isinstance(content, str) else content)
    for path in out.rglob("*.md"):
        path.write_text(pages.fill(path.read_text(), str(path.relative_to(out))))
    (out / "nav.json").write_text(json.dumps(pages.navigation(), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
