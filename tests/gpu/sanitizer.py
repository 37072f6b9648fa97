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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moe_fast.bench import PACKAGES
from moe_ref.results import provenance, write_results

OUT = Path("docs/results/megakernel_sanitizer.json")
SMALL_CALL = ("python", "tests/gpu/scenarios.py", "small")
RACECHECK_SAYS = (
    "The task word in shared memory: written by the dispatcher, read by loader, storer and consumer warps. Ordered "
    "both ways by mbarriers: readers wait on word_full before the load; after it a warp synchronises and one elected "
    "lane arrives on word_empty, on which the dispatcher waits before it writes again. The tool does not carry the "
    "order from the reading lanes to the elected lane's arrival."
)
"""Why the one report that racecheck is known to make is no race; another number of reports gets no explanation."""


def tool_path() -> str:
    """compute-sanitizer, on the PATH or in CUDA's folder."""
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"])
    found = shutil.which("compute-sanitizer", path=places)
    if found is None:
        raise SystemExit("compute-sanitizer is neither on the PATH nor in /usr/local/cuda; it comes with CUDA")
    return found


def sanitize(tool: str) -> dict[str, Any]:
    """What one tool counts and reports."""
    done = subprocess.run(
        [tool_path(), "--tool", tool, sys.executable, *SMALL_CALL[1:]], capture_output=True, text=True, timeout=600
    )
    text = done.stdout + done.stderr
    if '"ok": true' not in text:
        raise SystemExit(f"the call under {tool} did not end well: {text[-3000:]}")
    if tool == "memcheck":
        (errors,) = re.findall(r"ERROR SUMMARY: (\d+) error", text)
        return {"errors": int(errors)}
    return read_racecheck(text)


def read_racecheck(text: str) -> dict[str, Any]:
    """Counts of racecheck's summary, and which accesses each report names (offsets into the kernel's machine code)."""
    ((reported, errors, warnings),) = re.findall(
        r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)", text
    )
    lines = [line.lstrip("= ") for line in text.splitlines() if re.search(r"(Read|Write) access (by|at)", line)]
    # the mangled name of the kernel is a paragraph of its own
    accesses = [re.sub(r"\S*(\+0x[0-9a-f]+)", r"kernel\1", line) for line in lines]
    found = {"reported": int(reported), "errors": int(errors), "warnings": int(warnings), "accesses": accesses}
    return {**found, "explanation": RACECHECK_SAYS} if found["reported"] == 1 else found


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


if __name__ == "__main__":
    main()
