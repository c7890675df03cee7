"""All POSIX tests in a folder of blocks, with each kind of requests left to Python, with all of them, and with none.

Compared test by test. One of them: ``pytest tests/posix -k lmdb+file+blocks --kinds lookup,getattr``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from engine_pairs import BLOCKS
from places import ROOT
from test_posix_beside_killer import POSIX, SAME_RUN

from kvfuse.volume.blocks.kernel_answers import KINDS

pytestmark = [pytest.mark.ring(3), pytest.mark.root, pytest.mark.timeout(1200)]

CHOICES = {"all": KINDS, **{f"all but {kind}": KINDS - {kind} for kind in sorted(KINDS)}}


def outcomes(kinds: frozenset[str], folder: Path) -> dict[str, str]:
    """What became of each test."""
    report = folder / "report.xml"
    words = ["-q", "-k", BLOCKS, "-p", "no:cacheprovider", f"--junitxml={report}", f"--kinds={','.join(sorted(kinds))}"]
    environment = {name: value for name, value in os.environ.items() if name != SAME_RUN and name[:7] != "PYTEST_"}
    command = [sys.executable, "-m", "pytest", *words, str(POSIX)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=550)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    cases = ElementTree.parse(report).iter("testcase")
    return {
        f"{case.get('classname')} {case.get('name')}": next((part.tag for part in case), "passed") for case in cases
    }


@pytest.fixture(scope="module")
def by_python(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return outcomes(frozenset(), tmp_path_factory.mktemp("python"))


@pytest.mark.parametrize("choice", CHOICES)
def test_nothing_differs(by_python: dict[str, str], choice: str, tmp_path: Path) -> None:
    assert len(by_python) > 500
    assert outcomes(CHOICES[choice], tmp_path) == by_python
