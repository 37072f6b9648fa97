"""What is kept of compute-sanitizer's text."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

NAME = "kernel_cutlass_kernel_moe_fastkernelmegakernelMegaKernel_object_at__Args_CopyAtom"
TEXT = f"""
========= COMPUTE-SANITIZER
{{"scenario": "small", "rank": 0, "ok": true}}
========= Error: Race reported between Write access at {NAME}+0x1f30
=========     and Read access at {NAME}+0x8a20 [32 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.fixture(scope="module")
def sanitizer():
    path = Path(__file__).parents[1] / "gpu" / "sanitizer.py"
    spec = importlib.util.spec_from_file_location("sanitizer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_accesses_are_kept_without_the_kernels_name(sanitizer):
    found = sanitizer.read_racecheck(TEXT)
    assert (found["reported"], found["errors"], found["warnings"]) == (1, 1, 0)
    assert found["accesses"] == [
        "Error: Race reported between Write access at kernel+0x1f30",
        "and Read access at kernel+0x8a20 [32 hazards]",
    ]
    assert "mbarriers" in found["explanation"]


def test_another_number_of_reports_gets_no_explanation(sanitizer):
    found = sanitizer.read_racecheck(TEXT.replace("1 hazard displayed (1 error", "2 hazards displayed (2 errors"))
    assert found["reported"] == 2
    assert "explanation" not in found
