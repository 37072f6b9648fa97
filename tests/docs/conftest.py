"""The site is built once for all tests of this folder, from the same cache of executed tutorials that they fill."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs_support import MISSING, ROOT, mkdocs_build
from optional import do_without


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the built site."""
    if MISSING:
        do_without(f"{', '.join(MISSING)} not installed; pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = mkdocs_build(ROOT, folder)
    assert done.returncode == 0, "\n".join(x for x in done.stderr.splitlines() if not x.startswith("INFO"))[-4000:]
    return folder
