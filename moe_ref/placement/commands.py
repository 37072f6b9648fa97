"""The command `place`: make a placement, say how good it is, draw it, save it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.markup import escape

from moe_ref.console import out, print_json
from moe_ref.errors import UsageError
from moe_ref.limits import check_output_path, check_plot_path
from moe_ref.placement import names
from moe_ref.placement.density import max_density
from moe_ref.placement.skew import perfect_up_to_zipf, zipf_limit, zipf_popularity
from moe_ref.placement.symmetric import Construction

ROWS_PER_RANK = 8192


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command()(place)


def place(
    ranks: int = typer.Option(8, help="Ranks (GPUs)."),
    experts: int = typer.Option(32, help="Experts."),
    replicas: int = typer.Option(2, help="Replicas of every expert."),
    placement: str = typer.Option("symmetric", help=f"{', '.join(names.NAMES)}, or a file that `place` wrote."),
    zipf: float = typer.Option(
        0.5, help="Skew of the loads whose density is shown, and that 'asymmetric' is made for."
    ),
    orders: int = typer.Option(20, help="Random orders of popularity that must all be perfect."),
    seed: int = typer.Option(0, help="Of the orders of popularity."),
    save: Path | None = typer.Option(None, help="Write the placement into this JSON file."),
    plot: Path | None = typer.Option(None, help="Draw the graph into this file (png, svg, pdf)."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object on one line."),
) -> None:
    """Make a placement of expert replicas and say up to which skew it balances perfectly.

    density is the maximum induced-subgraph density in units of the mean load: what the busiest rank computes at least,
    with loads of the given skew in one random order. witness is the set of ranks that proves it.
    """
    if not (np.isfinite(zipf) and 0 <= zipf <= 20):
        raise UsageError(f"--zipf is {zipf}, expected a number from 0 to 20")
    if orders < 1 or seed < 0:
        raise UsageError(f"--orders is {orders} and --seed {seed}, expected at least 1 and 0")
    if plot is not None:
        check_plot_path(plot)
    if save is not None:
        check_output_path("--save", save)
    if placement not in names.NAMES and not Path(placement).exists():
        raise UsageError(f"--placement {placement} is no file, and none of {', '.join(names.NAMES)}")
    made = Construction(names.load(placement), f"file {placement}") if placement not in names.NAMES else None
    num_experts = made.placement.num_experts if made else experts
    if num_experts < 1:
        raise UsageError(f"--experts is {experts}, expected at least 1")
    order = np.random.default_rng(seed).permutation(num_experts)
    share_E = zipf_popularity(num_experts, zipf)[order]
    if made is None:
        predicted = np.rint(share_E * 2**30).astype(np.int64)
        made = names.by_name(placement, ranks, experts, replicas, predicted)
    chosen = made.placement
    load_E = np.rint(share_E * ROWS_PER_RANK * chosen.num_ranks).astype(np.int64)
    densest = max_density(load_E, chosen)
    held = [len(experts_held) for experts_held in chosen.experts_of_rank]
    counts = chosen.replica_counts
    values: dict[str, Any] = {
        "ranks": chosen.num_ranks,
        "experts": chosen.num_experts,
        "replicas": int(counts[0]) if (counts == counts[0]).all() else counts.tolist(),
        "placement": placement,
        "recipe": made.recipe,
        "zipf": zipf,
        "density": densest.max_over_mean,
        "witness": sorted(densest.witness),
        "slots_per_rank": held[0] if len(set(held)) == 1 else held,
        "perfect_up_to_zipf": perfect_up_to_zipf(chosen, orders, seed, ROWS_PER_RANK),
        "zipf_limit": zipf_limit(chosen.num_ranks, chosen.num_experts, int(counts.max())),
        "orders": orders,
        "seed": seed,
        "ranks_of_expert": chosen.ranks_of_expert,
    }
    if save is not None:
        names.save(chosen, save)
    if plot is not None:
        from moe_ref.placement.drawing import plot_placement  # matplotlib takes a second to load

        plot_placement(chosen, plot, made.recipe, densest.witness)
    if as_json:
        print_json(values)
        return
    out.print(f"[bold]recipe[/]   {escape(made.recipe)}")
    out.print(f"[bold]slots[/]    {values['slots_per_rank']} per rank")
    out.print(f"[bold]density[/]  {values['density']:.4f} of the mean load at s = {zipf}, on ranks {values['witness']}")
    skew, limit = values["perfect_up_to_zipf"], values["zipf_limit"]
    reached = "not even for equal loads" if skew is None else f"up to s = {skew}"
    out.print(f"[bold]perfect[/]  {reached} in {orders} orders of popularity (the hottest expert fits up to {limit})")
    for rank, experts_held in enumerate(chosen.experts_of_rank):
        out.print(f"rank {rank:3d}: {' '.join(map(str, experts_held))}")
