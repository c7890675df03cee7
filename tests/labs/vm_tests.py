"""Tests that run in the virtual machine of scripts/rdma-vm, as one test of this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from places import LABS, ROOT
from rings import require_lab

# Without plugins and fixtures that these tests do not need: to import them takes long there.
WORDS = (
    "--noconftest",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-p",
    "no:hypothesispytest",
    "--timeout=0",
    "-v",
    "-s",
    "--color=no",
)


def reason_against() -> str | None:
    if shutil.which("qemu-system-x86_64") is None:
        return "qemu is not installed (scripts/lib.sh: RDMA_VM_PACKAGES)"
    if not list(Path("/usr/lib/python3/dist-packages/pyverbs").glob(f"device.{sys.implementation.cache_tag}*.so")):
        return "Debian's pyverbs is not installed, or not for this Python"
    return None


def run_in_machine(limit: float, *files: str, plugins: Sequence[str] = (), chosen: str = "") -> None:
    """Run test files there, named from the repository's root, within ``limit`` seconds, and fail where they do.

    ``plugins``: modules of tests/labs in which pytest finds fixtures. ``chosen``: which tests, as ``-k`` takes it.
    """
    require_lab("qemu")
    if reason := reason_against():
        pytest.skip(reason)
    words = [word for plugin in plugins for word in ("-p", plugin)]
    command = ["scripts/rdma-vm", "--limit", f"{limit:g}", "env", f"PYTHONPATH={LABS}"]
    command += [sys.executable, "-m", "pytest", *WORDS, *words, "-k", chosen, *files]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    assert done.returncode == 0, "the report above says what failed there"
