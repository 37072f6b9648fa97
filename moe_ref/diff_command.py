"""`moe-ref diff`: compare two backends on one layer, stage by stage and tile by tile."""

from __future__ import annotations

import typer
from rich.markup import escape

from moe_ref import backends, cases
from moe_ref.config import MoEConfig
from moe_ref.console import err, out, print_json, rank_from_environment
from moe_ref.diff import compare
from moe_ref.environment import world_size_from_environment
from moe_ref.errors import UsageError
from moe_ref.layer import MoELayer
from moe_ref.limits import check_memory, check_seed, check_simulated_ranks
from moe_ref.world import world_for


def register(app: typer.Typer) -> None:
    """Add `diff` to the command line."""

    @app.command()
    def diff(
        backend: str = typer.Option("ref", help="The backend under test."),
        against: str = typer.Option("ref", help="The backend that is right by assumption."),
        ranks: int | None = typer.Option(None, help="Simulated ranks; under torchrun the world decides. [default: 2]"),
        tokens: int = typer.Option(256, help="Tokens per rank."),
        hidden: int = typer.Option(256, help="H"),
        intermediate: int = typer.Option(256, help="D"),
        experts: int = typer.Option(8, help="E"),
        top_k: int = typer.Option(2, help="K"),
        activation: str = typer.Option("silu", help="relu, gelu, silu or clamped_swiglu."),
        gated: bool = typer.Option(True, help="Gated or plain FFN."),
        dtype: str = typer.Option("float32", help="float64, float32, bfloat16 or float16."),
        layout: str = typer.Option("compact", help="compact or fixed."),
        wire_format: str = typer.Option("routes", help="routes or tokens."),
        kind: str = typer.Option(
            "gate", help="'gate' routes with the layer's gate; or one of " + ", ".join(cases.KINDS)
        ),
        start_from: str | None = typer.Option(None, help="Feed this stage the other side's results."),
        stop_after: str = typer.Option("combine", help="Last stage to compare."),
        tile_rows: int = typer.Option(128, help="Height of the tiles in the report."),
        seed: int = typer.Option(0, help="Of weights, tokens and routing."),
        json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    ) -> None:
        """Compare every intermediate of two backends; exit code 1 if they differ by more than the tolerance."""
        if tokens < 0:
            raise UsageError(f"--tokens is {tokens}, expected at least 0")
        if tile_rows < 1:
            raise UsageError(f"--tile-rows is {tile_rows}, expected at least 1")
        check_seed(seed, "--seed")
        for name in (backend, against):
            backends.get(name)
        config = MoEConfig.from_dict(
            {
                "hidden": hidden,
                "intermediate": intermediate,
                "experts": experts,
                "top_k": top_k,
                "activation": activation,
                "gated": gated,
                "dtype": dtype,
                "layout": layout,
                "wire_format": wire_format,
                "max_tokens": max(tokens, 1),
            }
        )
        if world_size_from_environment() is None:
            check_simulated_ranks(ranks)
        world, device = world_for(ranks, default=2)
        # The experts of all ranks; and two backends' rows, there and back, of the ranks in this process.
        weights = experts * config.parameters_per_expert * config.element_size
        check_memory(weights, f"{experts} experts", "lower --experts, --hidden or --intermediate")
        rows = len(world.local_ranks) * tokens * (1 + 2 * top_k) * 2
        check_memory(rows * config.row_bytes, f"{world.num_ranks} ranks x {tokens} tokens", "lower --tokens or --ranks")
        layer = MoELayer(config, world=world, seed=seed, device=device)
        x_SH = [cases.make_tokens(tokens, config, seed * 1000 + rank).to(device) for rank in world.local_ranks]
        routing = None
        if kind != "gate":
            routing = [
                cases.make_routing(kind, tokens, config, seed * 1000 + rank, layer.placement).to(device)
                for rank in world.local_ranks
            ]
        if backend == against:
            err.print(f"note: {escape(backend)} is compared with itself; name another with --backend", soft_wrap=True)
        report = compare(
            backend, against, layer, x_SH, routing, tile_rows=tile_rows, start_from=start_from, stop_after=stop_after
        )
        wrong_ranks = world.gather_flags(not report.ok)
        if json:
            print_json({**report.to_dict(), "ranks": world.num_ranks, "wrong_ranks": wrong_ranks})
        elif rank_from_environment() == 0 or not report.ok:
            out.print(escape(str(report)), highlight=False, soft_wrap=True)
        if wrong_ranks:
            raise typer.Exit(1)
