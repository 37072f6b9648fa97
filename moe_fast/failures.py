"""What a kernel reports when something went wrong: its error record, and the exceptions that it becomes."""

from __future__ import annotations

from typing import Any

import torch

from moe_fast.kernel.constants import Status

WORDS = ("code", "rank", "role", "wait", "index", "seen", "expected", "status")
"""The error record, one int32 each: the `signals.RECORD_WORDS` that the kernel writes, whose module needs the DSL."""
CODE, STATUS = WORDS.index("code"), WORDS.index("status")


class MegakernelError(RuntimeError):
    """The kernel reported a failure."""


class MegakernelTimeout(MegakernelError):
    """A wait inside the kernel ran past its deadline: names rank, role, what it waited for and how far that was.

    Later calls are refused until `Engine.recover` was called on every rank.
    """


class MegakernelInputError(MegakernelError, ValueError):
    """Input that only the device could see to be wrong: a logit that isn't finite, an expert id out of range."""


class ErrorRecord:
    """`WORDS` in host memory, which the kernel writes when a wait ran past its deadline or input was wrong: looking at
    them needs no synchronisation and no device call.

    Messages name the deadline, which the engine hands in: it passes one with every launch.
    """

    def __init__(self) -> None:
        self.words = torch.zeros(len(WORDS), dtype=torch.int32, pin_memory=True)
        words: Any = self.words.numpy()
        self._seen = memoryview(words)

    @property
    def address(self) -> int:
        """Where the kernel writes."""
        return self.words.data_ptr()

    def raise_if_failed(self, deadline_s: float) -> None:
        """Look at the record.

        Raises:
            MegakernelTimeout, MegakernelInputError: what a call that has ended reported.
        """
        if self._seen[CODE] or self._seen[STATUS]:
            error = self.failure(deadline_s)
            if error is not None:
                raise error

    @property
    def reported(self) -> bool:
        """Whether it holds anything."""
        return bool(self._seen[CODE] or self._seen[STATUS])

    def waited(self, deadline_s: float) -> str | None:
        """Who waited for what, and how far that was, if a wait ran past the deadline."""
        from moe_fast.kernel.signals import ROLES, WAITS

        code, rank, role, wait, index, seen, expected, _ = self.words.tolist()
        if not code:
            return None
        return (
            f"rank {rank}, {ROLES[role]}: waited more than {deadline_s:g} s for {WAITS[wait]} {index}, "
            f"saw {seen}, expected {expected}"
        )

    def failure(self, deadline_s: float) -> MegakernelError | None:
        """What a call that has ended reported, as an error; wrong input is told once."""
        if not self.reported:
            return None
        waited = self.waited(deadline_s)
        if waited:
            return MegakernelTimeout(
                f"{waited}; every rank must make the call, within MOE_REF_DEADLINE_S of the first; to go on, call "
                "Engine.recover() on every rank"
            )
        status = int(self.words[STATUS])
        what = [
            text
            for bit, text in (
                (Status.NONFINITE, "a logit of the gate is not finite: look for NaN and infinity in x and the router"),
                (Status.BAD_EXPERT, "an expert id is outside [-1, E): -1 masks a route"),
                (
                    Status.OVERFLOW,
                    "more rows for one rank than the buffers hold, as with an expert twice in a token's choices: make "
                    "the choices differ or raise max_tokens",
                ),
                (Status.BAD_PLAN, "the plan's quotas don't add up to the counts of this batch: plan each batch anew"),
            )
            if status & bit
        ]
        # the kernel's state is sound after wrong input, so the next call may come
        self.clear()
        return MegakernelInputError(f"on some rank: {'; '.join(what)}")

    def clear(self) -> None:
        """Forget what was reported."""
        self.words.zero_()
