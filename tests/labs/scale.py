"""How long tests at random go on: long enough to find what is broken now, and longer where there is time to search."""

from __future__ import annotations

import os

SCALE = float(os.environ.get("KVFUSE_TEST_SCALE", "1"))
"""of everything that is `scaled`: 10 for a night"""


def scaled(usual: int) -> int:
    """So many rounds, or seconds; at least one."""
    return max(1, round(usual * SCALE))
