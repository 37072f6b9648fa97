"""Commands of this package: `moe-ref compile`, `moe-ref bench`."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer

from moe_ref.errors import BackendUnavailable, UsageError


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("compile")(compile_kernels)
    # --help belongs to the inner app: `bench run --help` must say what `run` takes.
    inner = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command("bench", context_settings=inner)(bench)


def compile_kernels(
    config: Path | None = typer.Option(None, help="JSON file: a MoEConfig's fields, or a list of them."),
    ranks: str = typer.Option("1,2", help="Numbers of ranks, separated by commas."),
    scheduler: str = typer.Option("spare_warps", help="spare_warps, os_block or tickets; several by commas."),
    fp32_router: bool = typer.Option(False, help="For routers kept in fp32, as DeepSeek's."),
    out: Path | None = typer.Option(None, help="Folder; default: the cache that the fused backend loads from."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Compile megakernels ahead of time; needs no GPU. Without --config: the layers of the benchmark."""
    check_compiler()
    from moe_fast.compiler import cache_folder, compile_to_file, inspect_file
    from moe_fast.kernel.shapes import KernelShape
    from moe_ref.console import err
    from moe_ref.console import out as console

    counts = _rank_counts(ranks)
    shapes = [
        KernelShape.from_config(one, count, name, fp32_router=fp32_router)
        for one in _configs(config)
        for count in counts
        for name in scheduler.split(",")
    ]
    kernels = []
    for shape in dict.fromkeys(shapes):
        with err.status(f"compiling {shape.name} ..."):
            path = compile_to_file(shape, out)
            kernels.append({"name": shape.name, **inspect_file(path), "file": path.name})
        if not as_json:
            k = kernels[-1]
            console.print(
                f"{k['name']}: stack {k['stack_bytes']} B, shared {k['shared_bytes']} B, {k['wgmma']} wgmma",
                soft_wrap=True,
            )
    if as_json:
        print(json.dumps({"folder": str(out or cache_folder()), "kernels": kernels}))


def check_compiler() -> None:
    """Raise BackendUnavailable where the CuTe DSL is not installed."""
    try:
        version("nvidia-cutlass-dsl")
    except PackageNotFoundError:
        raise BackendUnavailable(
            "compiling kernels needs the CuTe DSL, which is not installed; pip install -e '.[fused]' in the checkout"
        ) from None


def _configs(path: Path | None) -> list[Any]:
    if path is None:
        from moe_fast.bench import LAYERS

        return list(LAYERS.values())
    from moe_ref.commands import read_configs

    return read_configs(path)


def _rank_counts(text: str) -> list[int]:
    counts = []
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            raise UsageError(f"--ranks has {word!r}, expected numbers of at least 1, separated by commas")
        counts.append(int(word))
    return counts


def bench(context: typer.Context) -> None:
    """Time the fused kernel against the unfused chain and the dense floor: run, trace, table (each has --help)."""
    from moe_fast.bench import app

    app(context.args or ["--help"], prog_name="moe-ref bench", standalone_mode=False)
