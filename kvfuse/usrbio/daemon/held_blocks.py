"""What clients hold of shared memory: blocks of files in the tier, and blocks that are rows."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Pages(Protocol):
    """Memory of an arena."""

    @property
    def bytes(self) -> npt.NDArray[np.uint8]: ...
    @property
    def resident(self) -> int:
        """Bytes of pages that are there."""


class Home(Hashable, Protocol):
    """An arena."""

    @property
    def memory(self) -> Pages: ...


class HeldBlock(Protocol):
    """A block whose bytes stay where they are as long as somebody has this: `TierBlock`, or of a row."""

    @property
    def home(self) -> Home: ...
    @property
    def arena(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def size(self) -> int: ...
