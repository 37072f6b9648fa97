"""A picture of a placement: ranks on a circle, an edge where two ranks share experts; and which rank holds what.

With many replicas every rank shares experts with every other and the graph is complete: the second picture still tells
placements apart.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path

import networkx as nx
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moe_ref.replicas import Placement


def shared_experts(placement: Placement) -> nx.Graph:
    """Ranks as nodes, edges weighted by the number of experts that both ranks hold.

    A simple graph, so repeated edges become weights; experts with one replica don't show.
    """
    shared = Counter(pair for ranks in placement.ranks_of_expert for pair in combinations(sorted(ranks), 2))
    graph = nx.Graph()
    graph.add_nodes_from(range(placement.num_ranks))
    graph.add_weighted_edges_from((a, b, count) for (a, b), count in shared.items())
    return graph


def plot_placement(placement: Placement, path: Path, title: str, witness: frozenset[int] = frozenset()) -> None:
    """Draw the graph and the table of slots; ranks of the witness (unless it is all of them) are filled."""
    graph = shared_experts(placement)
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes, table = figure.subplots(1, 2)
    weights = [graph.edges[edge]["weight"] for edge in graph.edges]
    most = max(weights, default=1)
    thickest = min(2.5, 40 / placement.num_ranks)
    proper = len(witness) < placement.num_ranks
    nx.draw_networkx(
        graph,
        nx.circular_layout(graph),
        ax=axes,
        node_size=max(60, 3000 // max(placement.num_ranks, 8)),
        font_size=8 if placement.num_ranks <= 32 else 5,
        node_color=["tab:orange" if proper and rank in witness else "lightsteelblue" for rank in graph.nodes],
        width=[thickest * (0.3 + 0.7 * weight / most) for weight in weights],
        edge_color="gray",
    )
    axes.set_title(f"{placement.num_ranks} ranks, {placement.num_experts} experts\n{title}", fontsize=10)
    axes.set_axis_off()
    held = np.zeros((placement.num_ranks, placement.num_experts))
    for expert, ranks in enumerate(placement.ranks_of_expert):
        for rank in ranks:
            held[rank, expert] = 2 if proper and rank in witness else 1
    table.imshow(held, cmap=ListedColormap(["white", "lightsteelblue", "tab:orange"]), vmin=0, vmax=2, aspect="auto")
    table.set(xlabel="expert", ylabel="rank", title="which rank holds which expert")
    table.set_xticks(np.arange(placement.num_experts + 1) - 0.5, minor=True)
    table.set_yticks(np.arange(placement.num_ranks + 1) - 0.5, minor=True)
    table.xaxis.set_major_locator(MaxNLocator(integer=True))
    table.yaxis.set_major_locator(MaxNLocator(integer=True))
    if placement.num_experts <= 64:
        table.grid(which="minor", color="0.85", linewidth=0.5)
    table.tick_params(which="minor", length=0)
    figure.savefig(path, dpi=130)
