"""compute-sanitizer over one small call of the megakernel: python tests/gpu/sanitizer.py [OUT]

Writes what memcheck and racecheck report as a result file; default docs/results/megakernel_sanitizer.json.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moe_fast.bench import PACKAGES
from moe_ref.results import provenance, write_results

OUT = Path("docs/results/megakernel_sanitizer.json")
SMALL_CALL = ("python", "tests/gpu/scenarios.py", "small")
EXPLANATIONS = {
    "task word": "Written by the dispatcher, read by loader, storer and consumer warps. Ordered both ways by "
    "mbarriers: readers wait on word_full before the load; after it a warp synchronises and one elected lane arrives "
    "on word_empty, on which the dispatcher waits before it writes again. The tool does not carry the order from the "
    "reading lanes to the elected lane's arrival.",
    "end flag": "Set by the storer when its block has no more products, polled by the spare warp between two tokens, "
    "both by relaxed accesses of block scope. Which of them it sees a round late decides who combines a token, not "
    "what comes out.",
}
"""Words of shared memory for which racecheck is known to report a race, and why it is none."""


def tool_path(tool_name: str) -> str:
    """A tool of CUDA, on the PATH or in CUDA's folder."""
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"])
    found = shutil.which(tool_name, path=places)
    if found is None:
        raise SystemExit(f"{tool_name} is neither on the PATH nor in /usr/local/cuda; it comes with CUDA")
    return found


def sanitize(tool: str) -> dict[str, Any]:
    """What one tool counts and reports."""
    done = subprocess.run(
        [tool_path("compute-sanitizer"), "--tool", tool, sys.executable, *SMALL_CALL[1:]],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    text = done.stdout + done.stderr
    if '"ok": true' not in text:
        raise SystemExit(f"the call under {tool} did not end well: {text[-3000:]}")
    if tool == "memcheck":
        (errors,) = re.findall(r"ERROR SUMMARY: (\d+) error", text)
        return {"errors": int(errors)}
    return read_racecheck(text, disassemble())


def disassemble() -> dict[int, str]:
    """Instructions of the small call's kernel by their offset."""
    import cases

    from moe_fast.compiler import cubin_of, object_path

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin_of(object_path(cases.SMALL.shape(1)).read_bytes()))
        file.flush()
        command = [tool_path("nvdisasm"), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {int(at, 16): what for at, what in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", text)}


def read_racecheck(text: str, instructions: dict[int, str]) -> dict[str, Any]:
    """Counts of racecheck's summary, and for each report its accesses and, where it is known, the word they meet in."""
    ((reported, errors, warnings),) = re.findall(
        r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)", text
    )
    reports: list[dict[str, Any]] = []
    access = r"(Race reported between )?(Read|Write) access (?:by|at).*?\+0x([0-9a-f]+)"
    for first, kind, offset in re.findall(access, text):
        if first or not reports:
            reports.append({"accesses": []})
        reports[-1]["accesses"].append(f"{kind} {instructions.get(int(offset, 16), f'unknown at 0x{offset}')}")
    for report in reports:
        report["word"] = word_of(report["accesses"])
        report["explanation"] = EXPLANATIONS.get(report["word"])
    return {"reported": int(reported), "errors": int(errors), "warnings": int(warnings), "reports": reports}


def word_of(accesses: list[str]) -> str | None:
    """The word that all accesses of a report meet in, if it is a known one: stores and loads at the same offset.

    The task words are the only ones of 64 bits that are written after the start (where two blocks are a pair, at two
    places, by either block's dispatcher), the end flag is the only one of 32 bits that is read and written at a fixed
    offset.
    """
    shared = r"(?:Write (?:@!?U?P\d+ )?STS|Read (?:@!?U?P\d+ )?LDS)(\.64)? .*?\[U?R\d+\+(0x[0-9a-f]+)\].*"
    found = [re.fullmatch(shared, one) for one in accesses]
    places = {one.groups() if one else None for one in found}
    if len(places) != 1 or None in places or {one.split()[0] for one in accesses} != {"Read", "Write"}:
        return None
    ((wide, _),) = places
    return "task word" if wide else "end flag"


def main() -> None:
    tools = ("memcheck", "racecheck")
    with ThreadPoolExecutor(len(tools)) as pool:
        found = dict(zip(tools, pool.map(sanitize, tools), strict=True))
    line = "; ".join(f"compute-sanitizer --tool {tool} {shlex.join(SMALL_CALL)}" for tool in tools)
    about = {
        "title": "The megakernel under compute-sanitizer",
        "description": "One small call with memcheck and with racecheck.",
    }
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    write_results(out, {**about, **provenance(line, PACKAGES), **found})
    print(json.dumps(found))
    unknown = [report for report in found["racecheck"]["reports"] if report["explanation"] is None]
    if found["memcheck"]["errors"] or unknown:
        raise SystemExit(f"not explained: {found['memcheck']['errors']} errors of memcheck, {unknown} of racecheck")


if __name__ == "__main__":
    main()
