"""One format for results that go into `docs/results`: a JSON object that says how it came about.

Every file carries `date, commit, device, driver, packages, command`; pages and tables are rendered from these files. A
result whose recorded command does not reproduce it does not go in.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

COMMIT_VARIABLE = "MOE_REF_COMMIT"
"""Environment variable with the hash of the checkout, for whoever runs a copy of it elsewhere; it goes before git."""

PROVENANCE_KEYS = ("date", "commit", "device", "driver", "packages", "command")
"""Keys that every result file has beside its results."""


def _commit() -> str | None:
    """Hash of the checkout that this package runs from, with "-dirty" if tracked files differ.

    COMMIT_VARIABLE goes first: only who made a copy knows of what. None outside git.
    """
    if said := os.environ.get(COMMIT_VARIABLE):
        return said
    folder = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "."],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("-dirty" if changes.stdout.strip() else "")


def _device() -> str:
    """Name of the GPU if torch sees one, else of the processor."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else []
    return f"{torch.get_num_threads()} threads of {names[0] if names else platform.processor() or platform.machine()}"


def _driver() -> str | None:
    """Version of the NVIDIA driver; None on a machine without one."""
    info = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module\D*?\s+([\d.]+)", info.read_text()) if info.is_file() else None
    if found:
        return found.group(1)
    # Containers and virtual machines may lack the file.
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.split("\n")[0].strip() or None


def provenance(command: str, packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """How a result came about, with PROVENANCE_KEYS as keys.

    Args:
        command: the command line that reproduces the result.
        packages: distributions to name with their versions beside python, torch, numpy and moe-ref; one that is not
            installed gets null.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("moe-ref", "torch", "numpy", *packages):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": _commit(),
        "device": _device(),
        "driver": _driver(),
        "packages": versions,
        "command": command,
    }


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write one result file, indented, keys in the order given; what was there stays until all of it is written.

    Raises:
        ValueError: a provenance key is missing, or a number is not finite.
    """
    missing = [key for key in PROVENANCE_KEYS if key not in results]
    if missing:
        raise ValueError(f"{path.name} lacks the provenance keys {missing}; merge in provenance(command)")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, allow_nan=False) + "\n"
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
