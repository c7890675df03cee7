"""`kvfuse upgrade` of a real mount, and versions to upgrade to."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mounting import KVFUSE, PATIENCE_S, KvfuseMount, wait_until

import kvfuse

ROOT = Path(kvfuse.__file__).parents[1]


def run_upgrade(mount: KvfuseMount, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*KVFUSE, "upgrade", str(mount.point), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False)


def upgrade(mount: KvfuseMount, *words: str) -> float:
    """Upgrade; returns for how long calls waited, in seconds."""
    wait_until(lambda: holder_says(mount)["serves"] is True, "a daemon that answers to be ready")
    done = run_upgrade(mount, *words)
    assert done.returncode == 0, done.stderr + mount.log.read_text()
    return float(re.search(r"calls waited ([\d.]+) s", done.stdout)[1])


def refused(mount: KvfuseMount, *words: str) -> str:
    """What the command says of an upgrade that does not come about."""
    done = run_upgrade(mount, *words)
    assert done.returncode != 0, done.stdout
    return done.stderr


def holder_says(mount: KvfuseMount) -> dict[str, object]:
    done = subprocess.run([*KVFUSE, "status", mount.point, "--json"], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)[0]["holder"]
    assert isinstance(said, dict)
    return said


def processes_of(mount: KvfuseMount) -> int:
    children = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children += int(fields[1]) == mount.pid and fields[0] != "Z"
    return children


@contextmanager
def other_python(folder: Path, lines: Sequence[str] = (), *, version: str = "99.0", prelude: str = "") -> Iterator[str]:
    """A Python whose kvfuse has another version, and whose ``kvfuse.cli`` begins with these lines."""
    package = folder / "other" / "kvfuse"
    shutil.copytree(ROOT / "kvfuse", package, ignore=shutil.ignore_patterns("__pycache__"))
    init, cli = package / "__init__.py", package / "cli" / "__main__.py"
    init.write_text(re.sub(r'__version__ = ".*"', f'__version__ = "{version}"', init.read_text()))
    cli.write_text("\n".join([*lines, cli.read_text()]))
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\n{prelude}\nPYTHONSAFEPATH=1 PYTHONPATH={package.parent} exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    yield str(python)
    shutil.rmtree(package.parent)
