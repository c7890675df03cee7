"""A mount as its user sees it, from ``kvfuse mount`` to ``kvfuse umount``."""

from __future__ import annotations

import json
import os
import re

import pytest
from cli_lab import Place, is_running, kvfuse

pytestmark = pytest.mark.alone  # it looks at all mounts: umount says that those are busy at this moment


def test_from_mount_to_umount(place: Place) -> None:
    pid = place.mount()
    file = place.point / "a file"
    file.write_bytes(b"x" * 100_000)

    rows = json.loads(kvfuse("status", "--json").stdout)
    row = next(row for row in rows if row["mountpoint"] == str(place.point))
    assert (row["source"], row["problem"], row["read_only"]) == (str(place.volume), None, False)
    assert 32 << 20 < row["space"]["size"] <= 64 << 20
    table = kvfuse("status", place.volume).stdout
    assert re.search(rf"{place.point} +{place.volume} +rw .* {pid} +ok, answers in", table)

    assert json.loads(kvfuse("stats", place.point, "--json").stdout)["pid"] == pid
    assert re.search(rf"pid +{pid}\b", kvfuse("stats", place.point).stdout)
    os.sync()
    assert json.loads(kvfuse("info", file, "--json").stdout)["size"] == 100_000
    assert re.search(r"size +100,000", kvfuse("info", file).stdout)

    done = kvfuse("umount", place.point)
    assert (done.returncode, done.stderr) == (0, "")
    assert not is_running(pid), "umount waits for the daemon"
    assert not place.is_mounted
    assert list(place.point.iterdir()) == []

    place.mount("-o", "ro")
    assert file.read_bytes() == b"x" * 100_000
    with pytest.raises(OSError, match="Read-only file system"):
        file.write_bytes(b"y")
    assert kvfuse("umount", place.point).returncode == 0
    log = (place.volume / "log").read_text()
    assert log.count(f"{place.volume} is mounted on {place.point}") == 2
    assert log.count("is unmounted, everything is written") == 2
