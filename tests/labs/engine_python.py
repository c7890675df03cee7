"""The python of an engine: a virtual environment of its own with the engine's newest package."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

from rings import require_lab

ROOT = Path(__file__).parents[2]


@functools.cache
def engine_python(engine: str) -> str:
    """Made when it is not there yet, which takes a while: see scripts/engine-env.

    KVFUSE_TEST_VLLM=0.28.0 (and so on) in the environment tests an adapter with an older version.
    """
    require_lab(engine)
    version = os.environ.get("KVFUSE_TEST_" + engine.upper().replace("-", "_"))
    command = [ROOT / "scripts" / "engine-env", engine, *([version] if version else [])]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
