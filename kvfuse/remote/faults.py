"""When engines are made to fail, for tests: one seeded plan, used by the ``Faulty`` decorator of either store."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field


class Fault(enum.Enum):
    NONE = enum.auto()
    ERROR_BEFORE = enum.auto()
    """fail, with nothing done"""
    ERROR_AFTER = enum.auto()
    """do it, then fail: the caller cannot know"""
    TORN = enum.auto()
    """do a part of a segment write, then fail; for anything else as ERROR_BEFORE"""


@dataclass
class FaultPlan:
    """Probabilities (0..1) for each call, drawn from ``seed``: the same calls meet the same faults."""

    seed: int
    error_before: float = 0.0
    error_after: float = 0.0
    torn: float = 0.0
    delay: float = 0.0
    delay_seconds: float = 0.001
    random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def draw(self) -> Fault:
        """The fate of one call."""
        (fault,) = self.random.choices(
            [Fault.ERROR_BEFORE, Fault.ERROR_AFTER, Fault.TORN, Fault.NONE],
            [self.error_before, self.error_after, self.torn, 1 - self.error_before - self.error_after - self.torn],
        )
        return fault

    def draw_delay(self) -> float:
        """Seconds that one call is held up after it was done."""
        return self.delay_seconds if self.random.random() < self.delay else 0.0
