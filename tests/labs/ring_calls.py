"""What tests of the rings' client share."""

from __future__ import annotations

from kvfuse.usrbio.client import Ring

PATIENCE_S = 20.0
SIZE = 1 << 20
"""bytes of the files that they read and write"""


def done(ring: Ring, count: int = 1) -> dict[int, int]:
    """Submit, and user_data -> result of ``count`` completions."""
    ring.submit()
    rows = ring.wait(count, PATIENCE_S)
    assert len(rows) == count, f"{len(rows)} of {count} completed"
    return dict(zip(rows["user_data"].tolist(), rows["result"].tolist(), strict=True))
