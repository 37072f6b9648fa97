"""A picture of a placement: ranks on a circle, an edge where two ranks share experts."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path

import networkx as nx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moe_ref.placement.placement import Placement


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
    """Draw the graph; ranks of the witness (unless it is all of them) are filled."""
    graph = shared_experts(placement)
    figure = Figure(figsize=(7, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
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
    figure.savefig(path, dpi=130)
