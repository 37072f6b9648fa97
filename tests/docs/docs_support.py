"""Shared by the tests of the site: where things are, what is missing, and how to build without a network."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings", "jupytext", "nbclient", "ipykernel")
           if importlib.util.find_spec(name) is None]  # fmt: skip
needs_docs = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed; pip install -e '.[docs]'")


def offline() -> list[str]:
    """Prefix of a command that runs it without any network, where this machine allows that; else empty."""
    if shutil.which("unshare") and subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0:
        return ["unshare", "-rn"]
    return []


def mkdocs_build(folder: Path, site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """mkdocs build --strict without a network."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    command = [*offline(), sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
