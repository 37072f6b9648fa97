"""What a simulation hands back: times, bytes, and on request everything that every actor did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Interval(NamedTuple):
    """Something that an actor did. Times in us since the first launch; word is the task's, 0 where there is none."""

    rank: int
    actor: str
    name: str
    start_us: float
    duration_us: float
    word: int = 0


@dataclass
class Run:
    """What a simulation found.

    Attributes:
        starts_us, ends_us: per call and rank, when it was launched and when it ended.
        busy_us: per rank, processor time spent in tasks and gate, summed over processors.
        payload_bytes: over links, [dispatch, return], rows only. counts_bytes: counts and signals.
        tasks: run by processors and Dispatch. events: taken from the queue.
        intervals: what every actor did, if recording was asked for.
    """

    starts_us: list[list[float]]
    ends_us: list[list[float]]
    busy_us: list[float]
    payload_bytes: list[int] = field(default_factory=lambda: [0, 0])
    counts_bytes: int = 0
    last_put_us: float = 0.0
    tasks: int = 0
    events: int = 0
    intervals: list[Interval] = field(default_factory=list)

    def latency_us(self, call: int = 0) -> float:
        """From the first rank's launch to the last rank's end of a call."""
        return max(self.ends_us[call]) - min(self.starts_us[call])

    def utilisation(self, sms: int) -> float:
        """Share of all SMs' time that was spent in tasks (or the gate), over all calls and ranks."""
        span = max(self.ends_us[-1]) - min(self.starts_us[0])
        return sum(self.busy_us) / (sms * len(self.busy_us) * span)
