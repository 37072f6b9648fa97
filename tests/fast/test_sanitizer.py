"""What is kept of compute-sanitizer's text."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

NAME = "kernel_cutlass_kernel_moe_fastkernelmegakernelMegaKernel_object_at__Args_CopyAtom"
TEXT = f"""
========= COMPUTE-SANITIZER
{{"scenario": "small", "rank": 0, "ok": true}}
========= Error: Race reported between Write access at {NAME}+0xeae0
=========     and Read access at {NAME}+0x6980 [24 hazards]
=========     and Read access at {NAME}+0x16ee0 [64 hazards]
=========
========= Error: Race reported between Write access at {NAME}+0x78e0
=========     and Read access at {NAME}+0xd8f0 [40 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
CODE = {
    0xEAE0: "STS.64 [R21+0xf8], R2",
    0x6980: "LDS.64 R6, [R9+0xf8]",
    0x16EE0: "LDS.64 R8, [UR9+0xf8]",
    0x78E0: "STS [UR5+0xe8], R0",
    0xD8F0: "LDS R3, [UR5+0xe8]",
}


@pytest.fixture(scope="module")
def sanitizer():
    path = Path(__file__).parents[1] / "gpu" / "sanitizer.py"
    spec = importlib.util.spec_from_file_location("sanitizer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reports_name_their_accesses_and_are_explained(sanitizer):
    found = sanitizer.read_racecheck(TEXT, CODE)
    assert (found["reported"], found["errors"], found["warnings"]) == (2, 2, 0)
    first, second = found["reports"]
    assert first["accesses"] == ["Write " + CODE[0xEAE0], "Read " + CODE[0x6980], "Read " + CODE[0x16EE0]]
    assert (first["word"], second["word"]) == ("task word", "end flag")
    assert "mbarriers" in first["explanation"]
    assert "relaxed" in second["explanation"]


def test_pairs_of_blocks_write_task_words_at_two_places(sanitizer):
    read, first, second = "Read LDS.64 R6, [R9+0x100]", "Write STS.64 [R35+0x100], R14", "Write STS.64 [R21+0x100], R12"
    assert sanitizer.word_of([read, first, second]) == "task word"
    assert sanitizer.word_of([first, second]) is None
    assert sanitizer.word_of([read, "Write STS.64 [R35+0x108], R14"]) is None


@pytest.mark.parametrize(
    "changed",
    [
        {0xD8F0: "LDS R3, [UR5+0xec]"},
        {0xD8F0: "LDS.64 R3, [UR5+0xe8]"},
        {0x78E0: "ST.E [R4+0xe8], R0"},
        {0xD8F0: None},
    ],
    ids=["another word", "another width", "global memory", "no code at the offset"],
)
def test_other_accesses_get_no_explanation(sanitizer, changed):
    code = {at: what for at, what in {**CODE, **changed}.items() if what}
    first, second = sanitizer.read_racecheck(TEXT, code)["reports"]
    assert first["word"] == "task word"
    assert second["word"] is None
    assert second["explanation"] is None
