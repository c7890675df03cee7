"""Runs the tests of RDMA, ``rdma_*.py`` of this folder, in a virtual machine that has devices for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = 500
"""seconds; it takes a fifth of that where nothing else runs"""


def reason_against() -> str | None:
    if shutil.which("qemu-system-x86_64") is None:
        return "qemu is not installed (scripts/lib.sh: RDMA_VM_PACKAGES)"
    if not list(Path("/usr/lib/python3/dist-packages/pyverbs").glob(f"device.{sys.implementation.cache_tag}*.so")):
        return "Debian's pyverbs is not installed, or not for this Python"
    return None


@pytest.mark.root
@pytest.mark.timeout(LIMIT + 20)
def test_rdma_in_a_virtual_machine() -> None:
    if reason := reason_against():
        pytest.skip(reason)
    files = sorted(str(path.relative_to(ROOT)) for path in HERE.glob("rdma_*.py"))
    # Without plugins and fixtures that these tests do not need: to import them takes long there.
    words = [
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:hypothesispytest",
        "-v",
        "-s",
        "--color=no",
    ]
    command = ["scripts/rdma-vm", "--limit", str(LIMIT), sys.executable, "-m", "pytest", *words, *files]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    assert done.returncode == 0, "the report above says what failed there"
