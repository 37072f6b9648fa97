"""Commands of this package: `moe-ref compile`, `moe-ref bench`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import typer
from rich.progress import MofNCompleteColumn, Progress

from moe_ref.config import MoEConfig
from moe_ref.errors import UsageError
from moe_ref.placement import names
from moe_ref.replicas import Placement


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("compile")(compile_kernels)
    # --help belongs to the inner app: `bench run --help` must say what `run` takes.
    inner = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command("bench", context_settings=inner)(bench)


def compile_kernels(
    config: Path | None = typer.Option(None, help="JSON file: a MoEConfig's fields, or a list of them."),
    ranks: str | None = typer.Option(
        None, help="Numbers of ranks, separated by commas; else 1,2, or those of the placement (2 of one by name)."
    ),
    scheduler: str = typer.Option("spare_warps", help="spare_warps, os_block or tickets; several by commas."),
    transport: str = typer.Option("stores", help="stores or put_signal; both by commas."),
    placement: str | None = typer.Option(
        None, help=f"For expert replicas: {', '.join(names.NAMES)}, or a file that `moe-ref place --save` wrote."
    ),
    replicas: int | None = typer.Option(None, help="Replicas of every expert in a placement that is named; else 2."),
    fp32_router: bool = typer.Option(False, help="For routers kept in fp32, as DeepSeek's."),
    jobs: int = typer.Option(1, help="Kernels that are compiled at a time, each by a process of its own."),
    out: Path | None = typer.Option(None, help="Folder; default: the cache that the fused backend loads from."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Compile megakernels ahead of time; needs no GPU. Without --config: the layers of the benchmark.

    A kernel whose file is there already is not compiled again. Of a placement only the number of replicas and of slots
    are compiled in: kernels for one serve every other of the same numbers.
    """
    from moe_fast.compiler import NVDISASM_PACKAGE, cache_folder, check_compiler, compile_all, inspect_file

    check_compiler()
    from moe_fast.kernel.constants import SCHEDULERS, TRANSPORTS
    from moe_fast.kernel.shapes import KernelShape
    from moe_ref.console import err
    from moe_ref.console import out as console

    if jobs < 1:
        raise UsageError(f"--jobs is {jobs}, expected at least 1")
    if replicas is not None and placement not in names.NAMES:
        raise UsageError(f"--replicas {replicas} says how a placement by name is made; add --placement symmetric, say")
    if out is not None and out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file, expected a folder")
    for option, text, known in (("--scheduler", scheduler, SCHEDULERS), ("--transport", transport, TRANSPORTS)):
        if unknown := [word for word in text.split(",") if word not in known]:
            raise UsageError(f"{option} has {unknown[0]!r}, expected some of {', '.join(known)}")
    counts = _rank_counts(_default_ranks(placement) if ranks is None else ranks)
    copies = 2 if replicas is None else replicas
    wanted = [
        KernelShape.from_config(
            one, count, name, fp32_router=fp32_router, placement=_placement(placement, count, one, copies),
            transport=way,
        )
        for one in _configs(config)
        for count in counts
        for name in scheduler.split(",")
        for way in transport.split(",")
    ]  # fmt: skip
    shapes, kernels = list(dict.fromkeys(wanted)), []
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=err, transient=True) as progress:
        task = progress.add_task("compiling", total=len(shapes))
        for shape, path in zip(shapes, compile_all(shapes, out, jobs), strict=True):
            kernels.append({"name": shape.name, **inspect_file(path), "file": path.name})
            progress.advance(task)
            if not as_json:
                k = kernels[-1]
                counted = "wgmma unknown" if k["wgmma"] is None else f"{k['wgmma']} wgmma"
                console.print(
                    f"{k['name']}: stack {k['stack_bytes']} B, shared {k['shared_bytes']} B, {counted}", soft_wrap=True
                )
    if any(k["wgmma"] is None for k in kernels):
        err.print(
            f"instructions are counted by nvdisasm, which is not installed: pip install {NVDISASM_PACKAGE}",
            soft_wrap=True,
        )
    if as_json:
        print(json.dumps({"folder": str(out or cache_folder()), "kernels": kernels}))


def _configs(path: Path | None) -> list[MoEConfig]:
    if path is None:
        from moe_fast.bench import LAYERS

        return list(LAYERS.values())
    from moe_ref.commands import read_configs

    return read_configs(path)


def _placement(name: str | None, ranks: int, config: MoEConfig, replicas: int) -> Placement | None:
    """By name or from a file, for a layer's experts; None is experts in blocks."""
    if name is None:
        return None
    if name in names.NAMES:
        return names.by_name(name, ranks, config.experts, replicas, np.ones(config.experts, dtype=np.int64)).placement
    if not Path(name).is_file():
        raise UsageError(f"--placement {name!r} is no file, and none of {', '.join(names.NAMES)}")
    loaded = names.load(name)
    if (loaded.num_ranks, loaded.num_experts) != (ranks, config.experts):
        raise UsageError(
            f"{name} places {loaded.num_experts} experts on {loaded.num_ranks} ranks, the layer has {config.experts} "
            f"and --ranks {ranks}"
        )
    return loaded


def _default_ranks(placement: str | None) -> str:
    """What --ranks is for where it isn't given: a rank alone holds no replicas, and a file is for one number."""
    if placement is None:
        return "1,2"
    return str(names.load(placement).num_ranks) if Path(placement).is_file() else "2"


def _rank_counts(text: str) -> list[int]:
    counts = []
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            raise UsageError(f"--ranks has {word!r}, expected numbers of at least 1, separated by commas")
        counts.append(int(word))
    return counts


def bench(context: typer.Context) -> None:
    """Time the fused kernel against the unfused chain and the dense floor: run, scaling, table, ... (see --help)."""
    from moe_fast.bench import app

    app(context.args or ["--help"], prog_name="moe-ref bench", standalone_mode=False)
