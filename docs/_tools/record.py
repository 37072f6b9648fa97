"""Record what a command prints as JSON, with its provenance, as docs/results/NAME.json.

    python -m docs._tools.record balance_8x32 --title "..." -- moe-ref balance --sweep --json

The command must print one JSON object as its last line on stdout; running it again is how the record is checked.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys

from docs._tools.results import PROVENANCE_KEYS, RESULTS
from moe_ref.results import provenance, write_results


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code of the recorded command."""
    parser = argparse.ArgumentParser(prog="python -m docs._tools.record", description=__doc__)
    parser.add_argument("name", help="of the file in docs/results")
    parser.add_argument("--title", required=True, help="heading of its page")
    parser.add_argument("--description", default="", help="one sentence under the heading")
    parser.add_argument("--packages", default="highspy,numba", help="distributions whose versions matter")
    parser.add_argument("--drop", default="", help="keys of the result that say nothing elsewhere (folders)")
    parser.add_argument("command", nargs="+", help="after --: what to run")
    arguments = parser.parse_args(argv)
    done = subprocess.run(arguments.command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"the command ended with {done.returncode}; nothing was recorded", file=sys.stderr)
        return done.returncode
    values = json.loads(done.stdout.strip().splitlines()[-1])
    for key in filter(None, arguments.drop.split(",")):
        del values[key]
    taken = {"title", "description", *PROVENANCE_KEYS} & set(values)
    if taken:
        print(f"the command's own keys {sorted(taken)} clash with those of the record", file=sys.stderr)
        return 1
    head = {"title": arguments.title, "description": arguments.description}
    made = provenance(shlex.join(arguments.command), tuple(filter(None, arguments.packages.split(","))))
    write_results(RESULTS / f"{arguments.name}.json", {**head, **made, **values})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
