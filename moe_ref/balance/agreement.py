"""Debug mode: do all ranks have the same plan?

Every rank plans alone. If one of them sees other counts, another placement or another build, rows arrive where nobody
waits for them, and nothing crashes: the results are just wrong. Comparing a hash of the plan across ranks costs one
small collective and names who differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from moe_ref.balance.plan import Plan
from moe_ref.errors import CheckFailed


class PlanMismatch(CheckFailed):
    """Ranks hold different plans."""


def check_same_plan(plan: Plan, gather: Callable[[str], Sequence[str]]) -> None:
    """Compare the plan's hash across ranks.

    Args:
        plan: this rank's plan.
        gather: takes this rank's string and returns the strings of all ranks, in rank order (an all-gather); every rank
            must call it, ranks without tokens too.

    Raises:
        PlanMismatch: naming the ranks that differ from the most common plan (ties to the lowest rank's).
    """
    digests = list(gather(plan.digest()))
    common, count = Counter(digests).most_common(1)[0]
    if count != len(digests):
        others = [rank for rank, digest in enumerate(digests) if digest != common]
        raise PlanMismatch(
            f"ranks {others} hold another plan than the other {count} of {len(digests)} ranks; check that all of them "
            "use the same placement, gathered counts (not their own) and a method without memory"
        )
