"""The core of the block store does what a plain model does, whatever is killed or loses power."""

from __future__ import annotations

from blocks_lab import play


def test_as_the_model(seed: int) -> None:
    counts = play(seed, 2500)
    assert counts["kills"] > 5
    assert counts["cuts"] > 5
