"""A volume on devices, from the command line: what is on them is shown, and not lost unless somebody says so."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest
from cli_lab import assert_fails, kvfuse
from mounting import KVFUSE, KvfuseMount
from places import ROOT

from kvfuse.remote.segments.block import fabrics

DEVICE_SIZE = 64 << 20


def device(path: Path, content: bytes = b"") -> Path:
    with path.open("wb") as file:
        file.write(content)
        file.truncate(DEVICE_SIZE)
    return path


def conf_of(folder: Path, *devices: Path) -> Path:
    """The mount.conf of a volume of one host."""
    conf = folder / "mount.conf"
    paths = json.dumps([str(path) for path in devices])
    conf.write_text(
        f'[volume]\npath = "{folder / "volume"}"\nsegment_size = "8MiB"\n'
        f'[segments]\nengine = "block"\ndevices = {paths}\n'
    )
    return conf


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A device that somebody else uses."""
    path = device(tmp_path / "full")
    subprocess.run(["mkswap", path], check=True, capture_output=True)
    return path


def test_devices_with_something_are_shown_and_left_alone(tmp_path: Path, full: Path) -> None:
    conf = conf_of(tmp_path, device(tmp_path / "empty"), full)
    before = full.read_bytes()
    done = kvfuse("format", conf)
    assert_fails(done, 1, "nothing was written: 'kvfuse format --force'")
    rows = [line.split(maxsplit=2) for line in done.stdout.splitlines() if str(tmp_path) in line]
    assert [row[0] for row in rows] == [str(tmp_path / "empty"), str(full)]
    assert "nothing" in rows[0][2]
    assert "holds swap" in rows[1][2]
    assert_fails(kvfuse("mount", conf, tmp_path), 5, "not empty")
    (tmp_path / "mnt").mkdir()
    assert_fails(kvfuse("mount", conf, tmp_path / "mnt"), 3, f"{full} holds swap: 'kvfuse format' asks")
    assert full.read_bytes() == before


@pytest.mark.parametrize(("answer", "is_made"), [("n", False), ("y", True)])
def test_a_terminal_is_asked(tmp_path: Path, full: Path, answer: str, is_made: bool) -> None:
    conf = conf_of(tmp_path, full)
    before = full.read_bytes()
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    done = subprocess.run(
        [*KVFUSE, "format", conf],
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    os.close(ours)
    os.close(theirs)
    assert "holds swap" in done.stdout
    assert (done.returncode == 0) == is_made, done.stderr
    assert (full.read_bytes() != before) == is_made


@pytest.mark.root
def test_a_volume_on_two_devices_is_mounted_and_another_ones_are_refused(tmp_path: Path) -> None:
    devices = [device(tmp_path / name, b"x" * 4096) for name in ("one", "two")]
    conf = conf_of(tmp_path, *devices)
    done = kvfuse("format", conf, "--force")
    assert "with a capacity of" in done.stdout, done.stdout + done.stderr
    mount = KvfuseMount(tmp_path, source=conf)
    mount.mount()
    try:
        (mount.point / "file").write_bytes(b"kept" * 500_000)
        mount.unmount()
        mount.mount()
        assert (mount.point / "file").read_bytes() == b"kept" * 500_000
        mount.unmount()
        mount.fsck()
    finally:
        mount.remove()
    rows = {row["name"]: row for row in json.loads(kvfuse("doctor", conf, "--json").stdout)}
    assert [rows[str(path)]["state"] for path in devices] == ["ok", "ok"]
    assert "a device of the volume" in rows[str(devices[0])]["detail"]
    (tmp_path / "other").mkdir()
    other = device(tmp_path / "other" / "device")
    kvfuse("format", conf_of(tmp_path / "other", other))
    theirs = conf_of(tmp_path, other)
    assert_fails(kvfuse("mount", theirs, mount.point), 3, f"{other} is a device of the volume")
    devices[0].rename(tmp_path / "moved")
    missing = rf"has 2 devices, and device \w+ \({devices[0]}\) is not among"
    assert_fails(kvfuse("mount", conf_of(tmp_path, devices[1]), mount.point), 3, missing)


def test_connections_that_hold_up_calls_are_named(tmp_path: Path) -> None:
    for name, transport, fail, loss, alive in (
        ("nvme0", "pcie", "off", "off", "0"),
        ("nvme1", "tcp", "off", "600", "0"),
        ("nvme2", "rdma", "2", "30", "2"),
        ("nvme3", "tcp", "4", "off", "4"),
        ("nvme4", "tcp", "2", "off", "2"),
    ):
        (tmp_path / name).mkdir()
        for file, text in zip(
            ("transport", "fast_io_fail_tmo", "ctrl_loss_tmo", "kato"), (transport, fail, loss, alive), strict=True
        ):
            (tmp_path / name / file).write_text(f"{text}\n")
    found = {row.name: row for row in fabrics.controllers(5.0, tmp_path)}
    assert list(found) == ["nvme1", "nvme2", "nvme3", "nvme4"]
    named = {name: [problem.split()[0] for problem in row.problems] for name, row in found.items()}
    assert named == {
        "nvme1": ["fast_io_fail_tmo", "keep_alive_tmo"],
        "nvme2": ["ctrl_loss_tmo"],
        "nvme3": ["fast_io_fail_tmo"],
        "nvme4": [],
    }
    assert found["nvme1"].remedies[0] == f"echo 3 > {tmp_path}/nvme1/fast_io_fail_tmo"
