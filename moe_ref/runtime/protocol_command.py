"""`moe-ref protocol`: deliver the messages of a small case in every order, with the rules as they are or one broken.

What a counterexample looks like is best seen with a broken rule: the command prints the deliveries that lead to it and
ends with exit code 1, as a check that failed.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from moe_ref.console import err, out, print_json
from moe_ref.errors import CheckFailed, UsageError
from moe_ref.limits import check_seed
from moe_ref.runtime.cases import BROKEN, CASES, small_case
from moe_ref.runtime.checker import random_order
from moe_ref.runtime.explorer import Explorer
from moe_ref.runtime.messages import ProtocolViolation, Rules


def protocol(
    case: Annotated[str, typer.Option("--case", help=f"Small case, {' or '.join(CASES)}; see above.")] = "uneven",
    layout: Annotated[str, typer.Option("--layout", help="compact or fixed.")] = "compact",
    bug: Annotated[str, typer.Option("--break", help=f"Break a rule: {', '.join(BROKEN)}; none.")] = "none",
    processors: Annotated[int, typer.Option("--processors", help="Processors per rank.")] = 2,
    inside: Annotated[
        bool, typer.Option("--inside", help="Also leave the order of messages inside a rank free (many more states).")
    ] = False,
    orders: Annotated[int, typer.Option("--random", help="Random orders to try as well.")] = 200,
    seed: Annotated[int, typer.Option("--seed", help="Of the random orders.")] = 0,
    limit: Annotated[int, typer.Option("--limit", help="Give up after this many distinct states.")] = 5_000_000,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Search all message orders of a small case for a violation of the runtime's protocol.

    Both cases have 2 ranks, 2 experts, 2 tokens per rank with 2 choices, and two calls one after the other. full: every
    token goes to both experts, so both ranks have as much to do in either call. uneven: in the first call each rank's
    rows stay at home and one route is masked, so that a rank can run ahead into the second call, where one expert gets
    more rows than the other; every broken rule shows in it.
    """
    if bug != "none" and bug not in BROKEN:
        raise UsageError(f"--break is {bug!r}, expected none or one of {', '.join(BROKEN)}")
    check_seed(seed, "--seed")
    if not 1 <= processors <= 8 or limit < 1 or orders < 0:
        raise UsageError("expected --processors from 1 to 8, --limit of at least 1 and --random of at least 0")
    calls, rules = small_case(case, layout), BROKEN.get(bug, Rules())
    found = Explorer(calls, processors, rules, inside).run(limit)
    failed = 0
    for number in range(orders):
        try:
            random_order(calls, seed + number, processors, rules)
        except ProtocolViolation:
            failed += 1
    report = {
        "case": case,
        "layout": layout,
        "broken_rule": None if bug == "none" else bug,
        "states": found.states,
        "deliveries": found.transitions,
        "complete": found.complete,
        "violation": None if found.violation is None else str(found.violation),
        "path": found.path,
        "random_orders": orders,
        "random_orders_failed": failed,
    }
    if json_:
        print_json(report)
    else:
        end = "every order was seen" if found.complete else "the search stopped there"
        out.print(f"{found.states} distinct states, {found.transitions} deliveries; {end}")
        for step, delivery in enumerate(found.path, 1):
            out.print(f"{step:4d}. {escape(delivery)}", soft_wrap=True, highlight=False)
        out.print(f"{failed} of {orders} random orders failed")
        if bug != "none" and found.violation is None:
            out.print(f"rule broken: {bug}; this case has no order in which that shows, --case uneven has one")
    if found.violation is not None:
        raise CheckFailed(str(found.violation))
    if failed:
        raise CheckFailed(f"{failed} of {orders} random orders failed, although the search found nothing")
    if not found.complete:
        err.print(f"note: stopped at {found.states} states; raise --limit to see all")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("protocol")(protocol)
