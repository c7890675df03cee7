"""A part of the POSIX tests while the daemon of their mount is killed again and again.

All of them by ``pytest tests/posix --killer``. On a volume of one host, so that nothing may be lost; but in folders of
blocks, where files that are open for writing end with their daemon (docs/blocks.md), and their writers get EIO.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ring(3)

POSIX = Path(__file__).parents[1] / "posix"
MODULES = ["create", "rename", "links", "unlink", "kinds", "xattrs", "io", "mmap", "truncate", "times"]
KILLS_MIN = 3
SAME_RUN = "KVFUSE_TEST_RUN"
"""a variable of the processes of one run, of which that one is not: it has one turn already, this test's"""


@pytest.mark.timeout(600)
def test_posix_tests_do_not_notice() -> None:
    files = [str(POSIX / f"test_{name}.py") for name in MODULES]
    words = ["-q", "-s", "--killer", "-k", "lmdb and not blocks", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *words, *files]
    environment = {name: value for name, value in os.environ.items() if name != SAME_RUN and name[:7] != "PYTEST_"}
    root = POSIX.parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=550)
    print(done.stdout[-20_000:], done.stderr)
    assert done.returncode == 0
    kills = re.search(r"(\d+) kills", done.stdout)
    assert kills, "no killer"
    assert int(kills[1]) >= KILLS_MIN
