"""The commands `run` and `info`: the layer on real input, and what its configuration comes to.

`diff` and `doctor` live beside what they drive and are registered from here.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
import typer
from rich.table import Table

from moe_ref import diff_command, doctor
from moe_ref.backends import default_dtype
from moe_ref.compat.checkpoint import Checkpoint
from moe_ref.compat.run_checkpoint import HfJob, print_checkpoint_report, run_checkpoint
from moe_ref.config import MoEConfig
from moe_ref.console import out, print_json, rank_from_environment
from moe_ref.environment import world_size_from_environment
from moe_ref.errors import CheckFailed, UsageError
from moe_ref.limits import check_plot_path, check_seed, check_simulated_ranks, regular_file_size
from moe_ref.main_job import Job, run_job, trained_layer
from moe_ref.report import plot_report, print_report
from moe_ref.world import world_for

MAX_CONFIG_BYTES = 2**20
"""Largest file that is read as a config."""


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command()(run)
    app.command()(info)
    diff_command.register(app)
    doctor.register(app)


def run(
    ranks: int | None = typer.Option(None, help="Ranks to simulate (default 4); under torchrun its world size."),
    tokens: int = typer.Option(2048, help="Tokens per rank; a token is a byte of text."),
    experts: int | None = typer.Option(
        None, help="Experts; another number than the checkpoint's makes a fresh layer with an untrained gate."
    ),
    top_k: int | None = typer.Option(None, help="Experts per token (default: the checkpoint's)."),
    layout: str = typer.Option("compact", help="Where rows lie in the symmetric heap: compact or fixed."),
    wire_format: str = typer.Option(
        "routes", help="What crosses: a row for each route, or (tokens) one for each token and rank, and sums back."
    ),
    backend: str = typer.Option("ref", help="Who computes: ref, unfused, fused, or another that is installed."),
    capacity_factor: float | None = typer.Option(
        None, help="Rows per (rank, expert) as a multiple of the mean; beyond it routes are dropped. Default: dropless."
    ),
    dtype: str | None = typer.Option(
        None,
        help="float64, float32, bfloat16 or float16. Default: the backend's own, or as stored (--hf).",
    ),
    text: str = typer.Option("prose", help="Input: prose, code, excerpt, or a file of any bytes."),
    hf: Path | None = typer.Option(
        None, help="Instead run every MoE layer of a local Hugging Face checkpoint: its directory (safetensors only)."
    ),
    seed: int = typer.Option(0, help="Seed of the weights of a fresh layer (see --experts)."),
    plot: Path | None = typer.Option(None, help="Also draw the report into this file (png, svg, pdf)."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as one JSON object on one line."),
) -> None:
    """Send real text through the MoE layer of a trained model on several ranks, and report what happened.

    bytes_local and bytes_remote count the rows of the dispatch; the results travel back the same way. rows_remote says
    how many rows cross in either wire format.
    """
    check_seed(seed, "--seed")
    if hf is not None:
        other = None if wire_format == "routes" else wire_format
        given = {"--experts": experts, "--top-k": top_k, "--capacity-factor": capacity_factor, "--plot": plot}
        given["--wire-format"] = other
        _run_hf(hf, HfJob(tokens, layout, backend, dtype, text), ranks, given, as_json)
        return
    kind = dtype or default_dtype(backend)
    job = Job(tokens, experts, top_k, layout, backend, capacity_factor, kind, text, seed, wire_format)
    if plot is not None:
        check_plot_path(plot)
    if world_size_from_environment() is None:
        check_simulated_ranks(ranks)
    world, device = world_for(ranks, default=4)
    try:
        report = run_job(job, world, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if rank_from_environment() == 0:
        if plot is not None:
            plot_report(report, plot)
        if as_json:
            print_json(report.values)
        else:
            print_report(report, out)
    if not report.correct:
        raise CheckFailed(
            f"relative error {report.values['relative_error']:.3g} from the float64 definition, expected at most "
            f"{report.tolerance:g}; find the stage with moe-ref diff"
        )


def _run_hf(path: Path, job: HfJob, ranks: int | None, given: dict[str, Any], as_json: bool) -> None:
    """`run --hf`: a checkpoint says itself what its layers are."""
    unused = [name for name, value in given.items() if value is not None]
    if unused:
        raise UsageError(f"{', '.join(unused)} has no meaning with --hf; the checkpoint's config says it: leave it out")
    if world_size_from_environment() is None:
        check_simulated_ranks(ranks)
    checkpoint = Checkpoint(path)
    world, device = world_for(ranks, default=4)
    try:
        values = run_checkpoint(checkpoint, job, world, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if rank_from_environment() == 0:
        if as_json:
            print_json(values)
        else:
            print_checkpoint_report(values, out)
    if not values["correct"]:
        raise CheckFailed(f"a layer is {values['relative_error']:.3g} (relative) from the float64 definition")


def info(
    ranks: int = typer.Option(4, help="Ranks that the sizes are for."),
    tokens: int = typer.Option(2048, help="Tokens per rank that the sizes are for."),
    config: Path | None = typer.Option(None, help="JSON file of config fields; default: the shipped model's layer."),
    experts: int | None = typer.Option(None, help="Overrides the config's."),
    top_k: int | None = typer.Option(None, help="Overrides the config's."),
    layout: str | None = typer.Option(None, help="Overrides the config's: compact or fixed."),
    capacity_factor: float | None = typer.Option(None, help="Overrides the config's."),
    dtype: str | None = typer.Option(None, help="Overrides the config's."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object on one line."),
) -> None:
    """Show a layer's configuration with every derived size and its formula."""
    if ranks < 1 or tokens < 0:
        raise UsageError(f"--ranks is {ranks} and --tokens {tokens}, expected at least 1 and 0")
    given = {
        "experts": experts,
        "top_k": top_k,
        "layout": layout,
        "capacity_factor": capacity_factor,
        "dtype": dtype,
    }
    chosen = trained_layer()[0] if config is None else read_config(config)
    chosen = chosen.replace(**{name: value for name, value in given.items() if value is not None})
    derived = derived_sizes(chosen, ranks, tokens)
    if as_json:
        print_json(
            {
                "config": chosen.to_dict(),
                "ranks": ranks,
                "tokens": tokens,
                "derived": {name: value for name, value, _ in derived},
                "formulas": {name: formula for name, _, formula in derived},
            }
        )
        return
    table = Table(box=None, pad_edge=False, title="Configuration", title_justify="left", title_style="bold")
    table.add_column("field", overflow="fold")
    table.add_column("value", overflow="fold")
    for name, value in chosen.to_dict().items():
        table.add_row(name, str(value))
    out.print(table)
    out.print()
    title = f"Derived sizes for {ranks} ranks, {tokens} tokens each"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("size", overflow="fold")
    table.add_column("value", justify="right", overflow="fold")
    table.add_column("formula", overflow="fold")
    for name, value, formula in derived:
        table.add_row(name, "none" if value is None else f"{value:,}", formula)
    out.print(table)


def read_config(path: Path) -> MoEConfig:
    """Config from a JSON file of its fields.

    Raises:
        UsageError: the file is missing, no JSON object, or its fields don't make a config.
    """
    return _make_config(path, _read_json(path, "a JSON file of config fields"))


def read_configs(path: Path) -> list[MoEConfig]:
    """Configs from a JSON file: one object of config fields, or a list of such objects.

    Raises:
        UsageError: as `read_config`; the list is empty.
    """
    values = _read_json(path, "a JSON file of config fields, or of a list of them")
    if values == []:
        raise UsageError(f"--config {path} holds an empty list, expected objects of config fields")
    return [_make_config(path, one) for one in (values if isinstance(values, list) else [values])]


def _read_json(path: Path, what: str) -> Any:
    size = regular_file_size(path, what)
    if size > MAX_CONFIG_BYTES:
        raise UsageError(f"--config {path} has {size} bytes, expected a few hundred and at most {MAX_CONFIG_BYTES}")
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--config {path} can't be read as JSON: {error}") from error


def _make_config(path: Path, values: Any) -> MoEConfig:
    if not isinstance(values, dict):
        raise UsageError(f"--config {path} holds a {type(values).__name__}, expected an object of config fields")
    try:
        return MoEConfig.from_dict(values)
    except TypeError as error:
        raise UsageError(f"--config {path} does not make a config: {error}") from error


def derived_sizes(config: MoEConfig, ranks: int, tokens: int) -> list[tuple[str, Any, str]]:
    """(name, value, formula) of everything that `MoEConfig` derives; the formula is the docstring.

    A property depends on the config alone, a method also on `ranks` or `tokens`, as its parameter says.
    """
    given = {"ranks": ranks, "tokens": tokens}
    sizes = []
    for name, member in vars(MoEConfig).items():
        formula = " ".join((inspect.getdoc(member) or "").split())
        if isinstance(member, property):
            sizes.append((name, getattr(config, name), formula))
        elif inspect.isfunction(member) and not name.startswith("_"):
            parameters = list(inspect.signature(member).parameters)[1:]
            if parameters and set(parameters) <= set(given):
                sizes.append((name, member(config, *(given[p] for p in parameters)), formula))
    return sizes
