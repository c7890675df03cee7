"""The python of an engine: a virtual environment of its own with the engine's newest package."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def engine_python(engine: str) -> str:
    """Made when it is not there yet, which takes minutes: see scripts/engine-env."""
    made = subprocess.run([ROOT / "scripts" / "engine-env", engine], stdout=subprocess.PIPE, text=True, check=True)
    return made.stdout.strip()
