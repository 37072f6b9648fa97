"""What a test may need beyond the extra [test]: without it the test is skipped, or fails where everything must run.

`.ci/run` installs all of it and sets MOE_REF_TEST_ALL=1, so there nothing of this is left out in silence. GPUs are
another matter: tests that need them carry the markers `gpu` and `multigpu`.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

import pytest

from moe_fast import compiler
from moe_ref.errors import BackendUnavailable


def do_without(what: str) -> NoReturn:
    """Skip the test, or the module that is being imported; fail if MOE_REF_TEST_ALL=1."""
    if os.environ.get("MOE_REF_TEST_ALL") == "1":
        pytest.fail(f"MOE_REF_TEST_ALL=1, but {what}", pytrace=False)
    pytest.skip(what, allow_module_level=True)


def cutlass_dsl() -> Any:
    """The CuTe DSL's module `cute`."""
    try:
        return compiler.import_cutlass()
    except BackendUnavailable as error:
        without_dsl(error)


def without_dsl(error: BackendUnavailable) -> NoReturn:
    """`do_without` the CuTe DSL; error: of importing it."""
    do_without(f"the CuTe DSL (extra [fused]) is not installed: {error}")


def counted(found: dict[str, Any]) -> dict[str, Any]:
    """A kernel's instructions as `compiler.instructions` counts them, if there is a disassembler."""
    if found["wgmma"] is None:
        do_without("there is no nvdisasm: resources were checked, instructions not counted")
    return found
