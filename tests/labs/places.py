"""Where things of the repository lie, for tests."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
TESTS = ROOT / "tests"
GOLDEN = TESTS / "golden"
LABS = TESTS / "labs"
"""programs that tests start, and what they share"""
