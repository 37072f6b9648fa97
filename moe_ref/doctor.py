"""`moe-ref doctor`: what was found, what is missing, what to do about it.

Other packages add checks of their own through the entry-point group `moe_ref.checks`: each entry is a function without
arguments that returns a list of `Check`.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Literal

import torch
import torch.distributed as dist
import typer
from rich.markup import escape
from rich.table import Table

from moe_ref import backends
from moe_ref.console import err, out, print_json
from moe_ref.experts import tiled_linear

State = Literal["ok", "optional", "problem"]


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was looked at.
        state: "ok"; "optional" for what is missing but not needed by the reference; "problem" for what is.
        found: what is there.
        remedy: what to do, empty if nothing.
    """

    name: str
    state: State
    found: str
    remedy: str = ""


def rows_are_invariant(dtype: torch.dtype = torch.float32, threads: int | None = 1) -> bool:
    """True if this machine's BLAS gives a row the same bits however many rows come with it, in tiles of 16 rows.

    Claims of bit identity between worlds of different size rest on it. It is a property of the BLAS and the number of
    threads, so it is measured: products of several shapes, cut at several places, on `threads` threads.
    """
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(0)
        for inner, outputs in ((16, 8), (64, 192), (128, 16), (512, 2048), (1024, 512)):
            x_NI = torch.randn(512, inner, generator=generator).to(dtype)
            weight_OI = torch.randn(outputs, inner, generator=generator).to(dtype)
            whole_NO = tiled_linear(x_NI, weight_OI, None, 16)
            for first, rows in ((0, 1), (5, 17), (16, 48), (33, 128), (64, 250)):
                part_NO = tiled_linear(x_NI[first : first + rows].contiguous(), weight_OI, None, 16)
                if not torch.equal(part_NO, whole_NO[first : first + rows]):
                    return False
        return True
    finally:
        torch.set_num_threads(before)


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _at_least(found: str, wanted: tuple[int, ...]) -> bool:
    numbers = []
    for part in found.split("+")[0].split("."):
        digits = "".join(ch for ch in part if ch.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers) >= wanted


def _package(name: str, minimum: tuple[int, ...], why: str, extra: str | None = None) -> Check:
    found = _version_of(name)
    wanted = ".".join(map(str, minimum))
    install = f"pip install -e '.[{extra}]'" if extra else f"pip install '{name}>={wanted}'"
    if found is None:
        return Check(name, "optional" if extra else "problem", f"not installed; {why}", install)
    if not _at_least(found, minimum):
        return Check(name, "optional" if extra else "problem", f"{found}, need {wanted}: {why}", install)
    return Check(name, "ok", found)


def _cuda() -> Check:
    if not torch.cuda.is_available():
        built = "this torch is a CPU build" if torch.version.cuda is None else "no device or no driver is visible"
        remedy = "nothing to do for the reference; the fused backend needs a Hopper GPU and a CUDA build of torch"
        return Check("CUDA devices", "optional", f"none ({built})", remedy)
    names = []
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        names.append(f"{torch.cuda.get_device_name(i)} (compute capability {major}.{minor})")
    return Check("CUDA devices", "ok", "; ".join(names))


def _assets() -> Check:
    from moe_ref import main_job, text

    try:
        size = len(text.excerpt())
        config, weights = main_job.trained_layer()
    except (OSError, ValueError) as error:
        return Check("package data", "problem", str(error), "reinstall moe-ref; its package data is incomplete")
    found = f"excerpt of {size} bytes, trained layer of {config.experts} experts ({len(weights)} tensors)"
    return Check("package data", "ok", found)


def reference_checks() -> list[Check]:
    """What the reference layer needs, and what this machine's arithmetic promises."""
    checks = [
        Check("Python", "ok" if sys.version_info >= (3, 11) else "problem", platform.python_version(), ""),
        _package("torch", (2, 9), "tensors"),
        _package("numpy", (1, 26), "integer plans"),
        _package("highspy", (1, 13), "the linear program (changeRowsBounds is missing before 1.13)"),
        _package("networkx", (3, 2), "placement graphs"),
        _package("numba", (0, 60), "the compiled flow solver"),
        _package("safetensors", (0, 4), "checkpoints"),
        _package("transformers", (5, 0), "Hugging Face blocks in and out", extra="hf"),
        Check("threads", "ok", f"{torch.get_num_threads()} for tensor products, {os.cpu_count()} logical cores"),
    ]
    checks.append(_assets())
    transports = [name for name in ("gloo", "nccl", "mpi") if dist.is_available() and _has_transport(name)]
    checks.append(
        Check(
            "torch.distributed",
            "ok" if "gloo" in transports else "optional",
            ", ".join(transports) or "not built in",
            "" if "gloo" in transports else "install a torch build with gloo to run real ranks on a CPU",
        )
    )
    invariant = rows_are_invariant()
    checks.append(
        Check(
            "row invariance",
            "ok" if invariant else "optional",
            "bits of a row don't depend on the batch (1 thread)"
            if invariant
            else "the BLAS mixes rows' orders of sums",
            "" if invariant else "results of different rank counts then agree to 1e-6 instead of bit for bit",
        )
    )
    checks.append(_cuda())
    return checks


def _has_transport(name: str) -> bool:
    return bool(getattr(dist, f"is_{name}_available")())


def backend_checks() -> list[Check]:
    """One line per known backend."""
    return [
        Check(f"backend {name}", "ok" if reason is None else "optional", "ready" if reason is None else reason)
        for name, reason in backends.available().items()
    ]


def run_checks() -> list[Check]:
    """All checks, those of other packages included; a check that raises is itself a finding."""
    sources: list[tuple[str, Callable[[], list[Check]]]] = [("reference", reference_checks)]
    checks: list[Check] = []
    for entry in entry_points(group="moe_ref.checks"):
        try:
            sources.append((entry.name, entry.load()))
        except (Exception, SystemExit) as error:  # whatever another's code does at its import
            found = f"not available: {type(error).__name__}: {error}"
            remedy = f"reinstall the package that has {entry.value.split(':')[0]}, or its extra"
            checks.append(Check(f"checks of {entry.name} ({entry.value})", "optional", found, remedy))
    sources.append(("backends", backend_checks))
    for name, source in sources:
        try:
            found = source()
            if not all(isinstance(check, Check) for check in found):
                raise TypeError("returned something else than a list of Check")
            checks += found
        except Exception as error:  # a doctor that falls over on a broken installation helps nobody
            checks.append(Check(f"checks of {name}", "problem", f"{type(error).__name__}: {error}", "see --debug"))
    return checks


def register(app: typer.Typer) -> None:
    """Add `doctor` to the command line."""

    @app.command()
    def doctor(json: bool = typer.Option(False, "--json", help="Print one JSON object.")) -> None:
        """What this machine has, what is missing, and what to do about it."""
        with err.status("looking around ..."):
            checks = run_checks()
        good = all(check.state != "problem" for check in checks)
        if json:
            print_json({"ok": good, "checks": [asdict(check) for check in checks]})
        else:
            table = Table(show_edge=False, header_style="bold")
            for column in ("", "check", "found", "what to do"):
                table.add_column(column, overflow="fold")
            marks = {"ok": "[green]ok[/]", "optional": "[yellow]-[/]", "problem": "[red]![/]"}
            for check in checks:
                table.add_row(marks[check.state], escape(check.name), escape(check.found), escape(check.remedy))
            out.print(table)
            out.print("The reference is ready." if good else "[red]The reference can't run; see the lines marked ![/]")
        if not good:
            raise typer.Exit(2)
