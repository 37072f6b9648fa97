"""How a person sees the main job's report: on the terminal (rich) or as a picture (matplotlib).

Both show the same: what every expert had to do and on which rank it lives, what that makes for the ranks, what crossed
between them, and where the time went.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from moe_ref.limits import check_plot_path, printable

if TYPE_CHECKING:
    from moe_ref.main_job import Report

RANK_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")
"""Terminal colours of ranks, in turn."""

MOST_BARS = 64
BUSIEST = 32
"""With more than MOST_BARS experts only the BUSIEST of them have a bar of their own."""

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(value: float, largest: float, width: int, ascii_only: bool = False) -> str:
    """A horizontal bar of at most `width` characters, in eighths of one; any value above 0 shows.

    >>> bar(3, 4, 4), bar(0, 4, 4), bar(1, 1000, 4)
    ('███', '', '▏')
    >>> bar(3, 4, 4, ascii_only=True)
    '###'
    """
    if value <= 0 or largest <= 0:
        return ""
    if ascii_only:
        return "#" * max(1, round(value / largest * width))
    eighths = max(1, round(value / largest * width * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def amount(count: float) -> str:
    """Bytes for people, in powers of 1000.

    >>> amount(999), amount(3_150_000)
    ('999 B', '3.15 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def print_report(report: Report, console: Console) -> None:
    """Print the report."""
    v, config = report.values, report.config
    where = "simulated in one process" if v["world"] == "simulated" else "one process each"
    gate = "trained" if v["trained_gate"] else "untrained"
    console.print(
        f"[bold]layer[/]  hidden {config.hidden}, intermediate {config.intermediate}, {config.experts} experts, "
        f"top {config.top_k}, {gate} gate"
    )
    console.print(f"[bold]ranks[/]  {v['ranks']} x {v['tokens']} tokens, {where}")
    console.print(f"[bold]input[/]  {escape(printable(v['text']))}, a byte is a token")
    console.print(f"[bold]how[/]    backend {v['backend']} on {v['device']}, {config.dtype}, {config.layout} layout")
    for note in report.notes:
        console.print(f"[yellow]note:[/] {escape(printable(note))}")
    console.print()
    width = max(4, min(console.width, 110) - 40)
    _print_experts(report, console, width)
    _print_ranks(report, console, width)
    _print_summary(report, console)


def _drawn(value: float, largest: float, width: int, rank: int, console: Console) -> Text:
    """A bar in the colour of a rank, in characters that the console's encoding has."""
    style = RANK_STYLES[rank % len(RANK_STYLES)]
    return Text(bar(value, largest, width, console.options.ascii_only), style=style)


def _print_experts(report: Report, console: Console, width: int) -> None:
    load_E = np.asarray(report.values["expert_load"])
    shown = np.arange(len(load_E))
    if len(load_E) > MOST_BARS:
        shown = np.sort(np.argsort(-load_E, kind="stable")[:BUSIEST])
    table = Table(box=None, pad_edge=False, title="Load per expert", title_justify="left", title_style="bold")
    for name in ("expert", "rank", "rows"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for expert in shown:
        rank, load = int(report.expert_rank[expert]), int(load_E[expert])
        table.add_row(str(expert), str(rank), str(load), _drawn(load, load_E.max(), width, rank, console))
    console.print(table)
    if len(shown) < len(load_E):
        rest = np.delete(load_E, shown)
        console.print(f"  and {len(rest)} others with {int(rest.min())} to {int(rest.max())} rows each")
    console.print()


def _print_ranks(report: Report, console: Console, width: int) -> None:
    v = report.values
    table = Table(box=None, pad_edge=False, title="Load per rank", title_justify="left", title_style="bold")
    for name in ("rank", "tokens", "rows"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for rank, (tokens, rows) in enumerate(zip(v["tokens_per_rank"], v["rows_per_rank"], strict=True)):
        drawn = _drawn(int(rows), max(v["rows_per_rank"]), width, rank, console)
        table.add_row(str(rank), str(tokens), str(rows), drawn)
    console.print(table)
    console.print(f"max/mean over ranks {v['max_over_mean']:.3f}")
    console.print()


def _other_format(used: str, rows: dict[str, int]) -> str:
    """What would cross in the other wire format."""
    other = "tokens" if used == "routes" else "routes"
    return f"{rows[other]} with --wire-format {other}"


def _print_summary(report: Report, console: Console) -> None:
    v = report.values
    routes = int(sum(v["expert_load_before_capacity"]))
    moved = v["bytes_local"] + v["bytes_remote"]
    share = f" ({v['bytes_remote'] / moved:.0%})" if moved else ""
    dropped = f"{v['dropped']} of {routes} routes" + (f" ({v['dropped'] / routes:.2%})" if routes else "")
    verdict = f"[green]within {report.tolerance:g}[/]" if report.correct else f"[bold red]ABOVE {report.tolerance:g}[/]"
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    moves = f"{amount(v['bytes_local'])} stay, {amount(v['bytes_remote'])} cross{share}; results go back the same way"
    table.add_row("bytes", moves)
    rows = v["rows_remote"]
    table.add_row("wire", f"{rows[v['wire_format']]} rows cross each way; {_other_format(v['wire_format'], rows)}")
    table.add_row("dropped", dropped if v["capacity_factor"] is not None else f"{dropped}, no capacity set")
    table.add_row("deviation", f"relative error {v['relative_error']:.2e} from the float64 definition, {verdict}")
    table.add_row("", f"largest difference {v['max_abs_error']:.2e}")
    table.add_row("time", f"{v['seconds'] * 1e3:.1f} ms, the layer's forward on the slowest rank")
    largest = max(v["seconds_per_stage"].values(), default=0.0)
    for stage, seconds in v["seconds_per_stage"].items():
        table.add_row(
            "", f"{stage:<9} {seconds * 1e3:8.2f} ms  {bar(seconds, largest, 24, console.options.ascii_only)}"
        )
    console.print(table)
    # In one piece on a terminal of any width: it is there to be copied and compared.
    console.print(f"[bold]sha256[/]     {v['output_sha256']}", soft_wrap=True, highlight=False)


def plot_report(report: Report, path: Path) -> None:
    """Draw the report into a file; its ending names the format (png, svg, pdf).

    Raises:
        UsageError: the file can't be written, or matplotlib knows no such format.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_plot_path(path)
    v = report.values
    ranks = v["ranks"]
    palette = matplotlib.colormaps["tab10" if ranks <= 10 else "tab20"]
    colors = [palette(rank % palette.N) for rank in range(ranks)]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, height_ratios=(1.15, 1), width_ratios=(1.15, 1.1, 1.05))
    gate = "trained gate" if v["trained_gate"] else "untrained gate"
    figure.suptitle(
        f"{ranks} ranks x {v['tokens']} tokens of {_short_name(v['text'])}, {v['experts']} experts, top {v['top_k']}, "
        f"{gate}  |  relative error {v['relative_error']:.1e}, {v['dropped']} routes dropped",
        fontsize=11,
        parse_math=False,
    )
    _plot_experts(figure.add_subplot(grid[0, :]), report, colors)
    _plot_ranks(figure.add_subplot(grid[1, 0]), report, colors)
    _plot_traffic(figure, figure.add_subplot(grid[1, 1]), report)
    _plot_stages(figure.add_subplot(grid[1, 2]), report)
    figure.savefig(path, dpi=140)


def _short_name(text: str, most: int = 40) -> str:
    """The name of a text's file, which may hold anything, for a title."""
    name = printable(Path(text).name)
    return name if len(name) <= most else name[: most - 3] + "..."


def _plot_experts(axes, report: Report, colors: list) -> None:
    load_E = np.asarray(report.values["expert_load"])
    owners = report.expert_rank
    for rank in sorted(set(owners.tolist())):
        mine = np.flatnonzero(owners == rank)
        axes.bar(mine, load_E[mine], color=colors[rank], width=0.85, label=f"rank {rank}")
    axes.axhline(load_E.mean(), color="black", linewidth=1, linestyle="--", label="mean")
    axes.set(title="Load per expert", xlabel="expert", ylabel="rows", xlim=(-0.7, len(load_E) - 0.3))
    if len(load_E) <= 64:
        axes.set_xticks(range(0, len(load_E), 1 if len(load_E) <= 32 else 4))
    if len(colors) <= 16:
        axes.legend(ncols=min(len(colors) + 1, 9), fontsize=8, frameon=False, loc="upper right")
    axes.set_ylim(top=max(1.0, load_E.max() * 1.15))
    axes.spines[["top", "right"]].set_visible(False)


def _plot_ranks(axes, report: Report, colors: list) -> None:
    rows_P = np.asarray(report.values["rows_per_rank"])
    bars = axes.bar(range(len(rows_P)), rows_P, color=colors)
    axes.axhline(rows_P.mean(), color="black", linewidth=1, linestyle="--")
    if len(rows_P) <= 8:
        axes.bar_label(bars, label_type="center", color="white", fontsize=9 if len(rows_P) <= 4 else 7)
        axes.set_xticks(range(len(rows_P)))
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(title=f"Load per rank: max/mean {report.values['max_over_mean']:.3f}", xlabel="rank", ylabel="rows")
    axes.set_ylim(top=max(1.0, rows_P.max() * 1.12))
    axes.spines[["top", "right"]].set_visible(False)


def _plot_traffic(figure, axes, report: Report) -> None:
    sent_PG = report.rows_PG * report.config.row_bytes / 1e6
    # The scale ends above the largest value, so that an even exchange is not one dark square.
    image = axes.imshow(sent_PG, cmap="Blues", vmin=0, vmax=max(1.5 * sent_PG.max(), 1e-9))
    if len(sent_PG) <= 5:
        for (p, g), value in np.ndenumerate(sent_PG):
            axes.text(g, p, f"{value:#.3g}", ha="center", va="center", fontsize=8)
    axes.set(title="Dispatched, MB (diagonal stays)", xlabel="to rank", ylabel="from rank")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, shrink=0.8)


def _plot_stages(axes, report: Report) -> None:
    stages = report.values["seconds_per_stage"]
    bars = axes.barh(list(stages), [s * 1e3 for s in stages.values()], color="0.55")
    axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
    axes.invert_yaxis()
    axes.set(xlabel="ms, slowest rank")
    axes.set_title(f"Time: {report.values['seconds'] * 1e3:.0f} ms")
    axes.margins(x=0.18)
    axes.spines[["top", "right"]].set_visible(False)
