"""Run a command on the GPUs and write what it found as a result file, with its provenance.

python tests/gpu/record.py run OUT [--title TEXT] [--description TEXT] -- COMMAND ...    its last JSON line, under "run"
python tests/gpu/record.py sanitizer OUT                 compute-sanitizer over one small call of the megakernel
"""

from __future__ import annotations

import argparse
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

SMALL_CALL = ("python", "tests/gpu/scenarios.py", "small")
RACECHECK_SAYS = (
    "Ordered both ways by mbarriers: readers wait on word_full before the load; after it a warp synchronises and one "
    "elected lane arrives on word_empty, on which the dispatcher waits before it writes again. The tool does not carry "
    "the order from the reading lanes to the elected lane's arrival."
)
"""Why what racecheck reports is no race, for reports about the task word; others get no explanation here."""


def started(command: list[str]) -> subprocess.CompletedProcess:
    """Run a command line with this Python in the place of "python" and "torchrun"."""
    if command[0] == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", *command[1:]]
    parts = [sys.executable if part == "python" else part for part in command]
    done = subprocess.run(parts, capture_output=True, text=True)
    sys.stderr.write(done.stderr[-6000:])
    return done


def run(command: list[str]) -> dict[str, Any]:
    """The JSON object that a command prints last."""
    done = started(command)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}: {done.stdout[-2000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


def sanitizer() -> str:
    """Path of compute-sanitizer: on the PATH, or in CUDA's folder."""
    found = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"])
    )
    if found is None:
        raise SystemExit(
            "compute-sanitizer is neither on the PATH nor in /usr/local/cuda; it is part of CUDA's toolkit"
        )
    return found


def sanitize(tool: str) -> dict[str, Any]:
    """One tool's count, and the lines that it reports."""
    done = started([sanitizer(), "--tool", tool, *SMALL_CALL])
    text = done.stdout + done.stderr
    if '"ok": true' not in text:
        raise SystemExit(f"the call under {tool} did not end well: {text[-3000:]}")
    reports = [line.lstrip("= ") for line in text.splitlines() if re.match(r"=========\s+(Error|Warning): ", line)]
    if tool == "memcheck":
        (errors,) = re.findall(r"ERROR SUMMARY: (\d+) error", text)
        return {"errors": int(errors), "reports": reports[:5]}
    ((hazards, errors, warnings),) = re.findall(
        r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)", text
    )
    found = {"reported": int(hazards), "errors": int(errors), "warnings": int(warnings), "reports": reports[:5]}
    return {**found, "explanation": RACECHECK_SAYS} if reports else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "sanitizer"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--title", default="")
    parser.add_argument("--description", default="")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, command = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    if given.what == "run":
        about = {"title": given.title or given.out.stem, "description": given.description}
        found, line = {"run": run(command)}, shlex.join(command)
    else:
        about = {
            "title": "The megakernel under compute-sanitizer",
            "description": "One small call with memcheck and with racecheck.",
        }
        tools = ("memcheck", "racecheck")
        with ThreadPoolExecutor(len(tools)) as pool:
            found = dict(zip(tools, pool.map(sanitize, tools), strict=True))
        line = "; ".join(f"compute-sanitizer --tool {tool} {shlex.join(SMALL_CALL)}" for tool in found)
    write_results(given.out, {**about, **provenance(line, PACKAGES), **found})
    print(json.dumps(found)[:3000])


if __name__ == "__main__":
    main()
