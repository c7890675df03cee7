"""Files with secrets: nobody but their owner may read them."""

from __future__ import annotations

import stat
from pathlib import Path

from kvfuse.errors import ConfigError


def check_private(file: Path, key: str) -> None:
    """ConfigError where more users than its owner may read or replace a secret; the group, too, of a file of root's.

    A file that is not there, or cannot be looked at, is whoever's who reads it.
    """
    try:
        status = file.stat()
    except OSError:
        return
    allowed, remedy = (0o640, "o=,g-wx") if status.st_uid == 0 else (0o600, "go=")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077 & ~allowed:
        raise ConfigError(
            f"{key}: others may read {file} (mode {mode:03o}), which has a secret: type: chmod {remedy} {file}"
        )


def identity_of(path: Path) -> object:
    """What is another one when the file was changed or replaced; the errno where it cannot be looked at."""
    try:
        status = path.stat()
    except OSError as error:
        return error.errno
    return status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode
