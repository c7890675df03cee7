"""Which mount a path is on."""

from __future__ import annotations

import os
from pathlib import Path


def mount_of(path: Path) -> Path:
    """The mount point that ``path`` is on."""
    folder = path.resolve()
    while not os.path.ismount(folder):
        folder = folder.parent
    return folder
