"""scripts/quickstart as a stranger runs it, but for the installation: a second run, an unmount, bad arguments."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_lab import kvfuse
from mounting import wait_until
from places import SCRIPTS

from kvfuse.cli import mounts

PROJECTS = "pyproject.toml", "tools/cluster/pyproject.toml", "benchmarks/pyproject.toml"
STAMPED = *PROJECTS, "kvfuse/native/_fusewire.c", "kvfuse/native/_native.c"
"""files of which scripts/lib.sh takes a checksum"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables under which the scripts take this python for their finished virtual environment."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    read = b"".join((SCRIPTS.parent / name).read_bytes() for name in STAMPED)
    checksum = subprocess.run(["cksum"], input=read, capture_output=True, check=True).stdout.split()[0].decode()
    (venv / f".kvfuse-{checksum}").touch()
    return {**os.environ, "KVFUSE_VENV": str(venv), "PYTHONPATH": str(SCRIPTS.parent)}


def quickstart(
    environment: dict[str, str], *arguments: str, script: Path = SCRIPTS / "quickstart", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False, cwd=cwd)


@pytest.mark.ring(3)
def test_it_mounts_and_replays_and_runs_again(tmp_path: Path, environment: dict[str, str]) -> None:
    volume, point, trace = tmp_path / "a volume", tmp_path / "a mount", tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    places = ("--volume", str(volume), "--mountpoint", str(point), "--capacity", "512MiB")
    try:
        first = quickstart(environment, *places, "--duration", "2")
        assert first.returncode == 0, first.stdout + first.stderr
        assert os.path.ismount(point), "it stays mounted"
        assert "GB/s on this machine" in (tmp_path / "kvfuse-replay.html").read_text()
        assert "of a cache that starts empty" in first.stdout
        assert "umount " + str(point).replace(" ", "\\ ") in first.stderr
        assert json.loads(kvfuse("namespace", "show", point, "--json").stdout)["settings"]["kind"] == "blocks"
        again = quickstart(environment, *places, "--trace", str(trace), "--duration", "2")
        assert again.returncode == 0, again.stdout + again.stderr
        assert "Using the mount" in again.stderr
        status = json.loads(kvfuse("status", point, "--json").stdout)[0]
        os.kill(status["holder"]["holder"] if status["holder"] else status["pid"], signal.SIGKILL)
        wait_until(lambda: mounts.is_dead(point), "the end of the daemon")
        revived = quickstart(environment, *places, "--trace", str(trace), "--duration", "2")
        assert revived.returncode == 0, revived.stdout + revived.stderr
        assert "Mounted at" in revived.stderr
    finally:
        if os.path.ismount(point):
            last = quickstart(environment, *places, "--duration", "1", "--umount")
            assert last.returncode == 0, last.stderr
    assert not os.path.ismount(point)
    assert "Using the volume" in quickstart(environment, *places, "--duration", "1", "--umount").stderr
    assert not os.path.ismount(point)


def test_it_works_from_any_folder(tmp_path: Path, environment: dict[str, str]) -> None:
    """Below relative paths with spaces, through a link, beside what has the names of modules, whatever CDPATH says."""
    folder = tmp_path / "any folder"
    for name in ("kvfuse/cli", "scripts", "..here"):
        (folder / name).mkdir(parents=True)
    for name in ("kvfuse/__init__.py", "kvfuse/cli/__init__.py", "trio.py", "json.py", "rich.py"):
        (folder / name).write_text("raise SystemExit('not this one')\n")
    (folder / "quick start").symlink_to(SCRIPTS / "quickstart")
    (folder / "my trace.jsonl").write_text(
        '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n'
    )
    places = ("--volume", "a volume", "--mountpoint", "..here/a mount", "--capacity", "512MiB")
    variables = {
        **environment,
        "CDPATH": str(folder),
        "KVFUSE_VENV": os.path.relpath(environment["KVFUSE_VENV"], folder),
    }
    done = quickstart(
        variables, *places, "--trace", "my trace.jsonl", "--duration", "60", script=folder / "quick start", cwd=folder
    )
    point = folder / "..here" / "a mount"
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        assert os.path.ismount(point)
        shown = next(line for line in done.stderr.splitlines() if "unmount:" in line)
        assert shlex.split(shown)[-1] == str(point)
        assert "Replaying my trace.jsonl" in done.stderr
    finally:
        if os.path.ismount(point):
            assert kvfuse("umount", point).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "/nowhere/trace"], "the trace /nowhere/trace cannot be read"),
        (["--volume"], "--volume needs a value"),
        (["--frobnicate"], "unknown argument: --frobnicate"),
    ],
)
def test_bad_arguments_change_nothing(environment: dict[str, str], arguments: list[str], message: str) -> None:
    done = quickstart(environment, *arguments)
    assert done.returncode != 0
    assert message in done.stderr


def test_help_names_every_option(environment: dict[str, str]) -> None:
    done = quickstart(environment, "--help")
    assert done.returncode == 0
    for option in ("--trace", "--volume", "--mountpoint", "--capacity", "--duration", "--umount", "--keep"):
        assert option in done.stdout
