"""Recorded results (docs/results/*.json) in pages: numbers, tables and the provenance of each file.

Pages speak of them by placeholders, so a number on the site can't differ from the file it comes from:

    {{ value NAME PATH [FORMAT] }}      one number: {{ value balance_8x32 solvers.flow.median_us .0f }}
    {{ table NAME PATH [KEY,KEY] }}     a list of objects (or an object of objects) as a table
    {{ provenance NAME }}               command, date, device and versions, folded

A name or path that does not exist is an error. Files without a page of their own get one with all they hold.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
PROVENANCE_KEYS = ("date", "commit", "device", "driver", "packages", "command")

MISSING = "\N{EN DASH}"
"""Stands in a table where nothing was recorded."""

WIDE = 9
"""Objects with more keys than this, all of a list together, are shown one by one instead of as lines of a table."""

LONG_LIST = 24
"""Lists of numbers longer than this are shown by their length and range."""


class ResultMissing(ValueError):
    """A page asks for a result that is not there."""


def names() -> list[str]:
    """All recorded results."""
    return sorted(path.stem for path in RESULTS.glob("*.json"))


def load(name: str) -> dict[str, Any]:
    """One recorded result.

    Raises:
        ResultMissing: no such file, or it lacks a key of its provenance.
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise ResultMissing(f"no result {name!r} in docs/results; there are {', '.join(names())}")
    values = json.loads(path.read_text())
    missing = [key for key in PROVENANCE_KEYS if key not in values]
    if missing:
        raise ResultMissing(f"docs/results/{name}.json lacks the provenance keys {missing}")
    return values


def find(values: Any, path: str, name: str = "") -> Any:
    """Value at a dotted path; list items by index (`rows.0.ms`) or by values (`rows.layer=a&tokens=1024.ms`)."""
    at = values
    for part in re.findall(r"[^.=]+=[-\d.]*\d|[^.]+", path):
        try:
            if isinstance(at, list) and "=" in part:
                wanted = dict(condition.split("=", 1) for condition in part.split("&"))
                at = next(item for item in at if all(str(item[key]) == value for key, value in wanted.items()))
            else:
                at = at[int(part)] if isinstance(at, list) else at[part]
        except (KeyError, IndexError, ValueError, TypeError, StopIteration) as error:
            have = ", ".join(map(str, at)) if isinstance(at, dict) else type(at).__name__
            raise ResultMissing(f"result {name!r} has nothing at {part!r} of {path!r} (there: {have[:300]})") from error
    return at


def number(value: Any, form: str = "") -> str:
    """A value for a reader: integers with thousands separators, floats with four significant digits."""
    if form:
        return format(value, form)
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        if len(value) > LONG_LIST and all(isinstance(v, (int, float)) for v in value):
            return f"{len(value)} values, {number(min(value))} to {number(max(value))}"
        if len(value) > LONG_LIST:
            return f"{len(value)} entries"
        return ", ".join(number(v) for v in value) or MISSING
    if isinstance(value, dict):
        return "; ".join(f"{k} {number(v)}" for k, v in value.items())
    return str(value).replace("|", "\\|")


def _headed(rows: list[list[str]], columns: list[str]) -> str:
    numeric = [all(re.fullmatch(rf"[-{MISSING}\d.,e+%]+|", row[i]) for row in rows) for i in range(len(columns))]
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join("---:" if n else "---" for n in numeric) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def table(items: Any, keys: list[str] | None = None) -> str:
    """A list of objects, or an object of objects, as a Markdown table; `keys` chooses and orders columns (dotted)."""
    if isinstance(items, dict):
        items = [{"": name, **value} for name, value in items.items()]
        keys = keys and ["", *keys]
    if keys is None:
        keys = []
        for item in items:
            keys += [key for key in _leaves(item) if key not in keys]
    rows = []
    for item in items:
        row = []
        for key in keys:
            try:
                row.append(_cell(find(item, key) if "." in key and key not in item else item.get(key)))
            except ResultMissing:
                row.append(MISSING)
        rows.append(row)
    return _headed(rows, [_column(key) for key in keys])


def _cell(value: Any) -> str:
    """A value in a table; short names with a hyphen, such as those of layers, stay in one line."""
    text = number(value)
    if isinstance(value, str) and re.fullmatch(r"[a-z]\w*-[\w-]{1,20}", value):
        return f'<span class="name">{text}</span>'
    return text


def _column(key: str) -> str:
    """Heading of a column: its path without the parts that all columns share."""
    parts = [part for part in key.split(".") if part not in ("ms", "mean", "median")]
    return " ".join(parts or key.split(".")).replace("_", " ") or " "


def _leaves(item: dict[str, Any]) -> list[str]:
    """Dotted paths of the values of an object, those of inner objects in their place."""
    out = []
    for key, value in item.items():
        inner = _leaves(value) if isinstance(value, dict) else []
        out += [f"{key}.{path}" for path in inner] or [key]
    return out


def provenance(name: str) -> str:
    """Folded block: how the result came about."""
    values = load(name)
    packages = ", ".join(f"{k} {v}" for k, v in values["packages"].items() if v is not None)
    commit = values["commit"] or "not recorded"
    command = " && ".join(values["command"]) if isinstance(values["command"], list) else str(values["command"])
    lines = [
        f'??? info "How this was obtained: {_device(values["device"])}, {str(values["date"])[:10]}"',
        "",
        "    ```text",
        *(f"    {line}" for line in command.splitlines()),
        "    ```",
        "",
        f"    Device: {_device(values['device'])}; driver {values['driver'] or 'none'}; {packages}.",
        f"    Commit `{commit[:12]}{'-dirty' if commit.endswith('-dirty') else ''}`, {values['date']};",
        f"    file `docs/results/{name}.json`.",
        "",
    ]
    return "\n".join(lines)


def _device(device: Any) -> str:
    return device if isinstance(device, str) else number(device)


def _section(key: str, value: Any, level: int) -> list[str]:
    title = f"{'#' * min(level, 5)} {key.replace('_', ' ')}"
    if isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values()):
        flat = all(not isinstance(x, (dict, list)) for v in value.values() for x in v.values())
        if flat:
            return [title, "", table(value), ""]
        out = [title, ""]
        for name, inner in value.items():
            out += _section(str(name), inner, level + 1)
        return out
    if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        if len({name for item in value for name in item}) <= WIDE:
            return [title, "", table(value), ""]
        if all(set(item) == set(value[0]) for item in value):
            return [title, "", table(value), ""]
        out = [title, ""]
        for item in value:
            name, inner = next(iter(item.items()))
            rest = {key: v for key, v in item.items() if key != name}
            out += [f"{'#' * min(level + 1, 6)} {number(inner)}", "", *_object(rest, level + 2)]
        return out
    if isinstance(value, dict):
        return [title, "", *_object(value, level + 1)]
    return [title, "", number(value), ""]


def _object(values: dict[str, Any], level: int) -> list[str]:
    def is_section(value: Any) -> bool:
        nested = isinstance(value, dict) and any(isinstance(v, (dict, list)) for v in value.values())
        return nested or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))

    simple = {k: v for k, v in values.items() if not is_section(v)}
    out = []
    if simple:
        rows = [[k.replace("_", " "), number(v)] for k, v in simple.items()]
        out += [_headed(rows, ["quantity", "value"]), ""]
    for key, value in values.items():
        if is_section(value):
            out += _section(key, value, level)
    return out


def page(name: str) -> str:
    """A whole page for one result file."""
    values = load(name)
    rest = {key: value for key, value in values.items() if key not in PROVENANCE_KEYS}
    title = str(rest.pop("title", name.replace("_", " ").capitalize()))
    intro = str(rest.pop("description", ""))
    note = f"Every number on this page comes from the file named below; {MISSING} stands where nothing was recorded."
    return "\n".join([f"# {title}", "", intro, "", note, "", provenance(name), "", *_object(rest, 2)])


_PLACEHOLDER = re.compile(r"\{\{ *(value|table|provenance) +([^}\s]+)(?: +([^}\s]+))?(?: +([^}\s]+))? *\}\}")


def fill(markdown: str) -> str:
    """Replace all placeholders of a page.

    Raises:
        ResultMissing: a placeholder names a result or a path that is not there.
    """

    def one(match: re.Match[str]) -> str:
        kind, name, path, extra = match.groups()
        if kind == "provenance":
            return provenance(name)
        if path is None:
            raise ResultMissing(f"{match.group(0)} lacks a path")
        found = find(load(name), path, name)
        if kind == "value":
            return number(found, extra or "")
        return table(found, extra.split(",") if extra else None)

    return _PLACEHOLDER.sub(one, markdown)
