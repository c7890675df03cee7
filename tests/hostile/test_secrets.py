"""What the daemon tells of itself: others learn neither where anything lies nor what their neighbours do."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from hostile_lab import ATTACKER, attacker
from mounting import KvfuseMount, temporary_mount
from ring_lab import stats, wait_for_rings

pytestmark = pytest.mark.root

WORDS = ("allow_other", "volume.capacity=256MiB", "volume.segment_size=64MiB", "cache.tier_size=32MiB")


def check_public(said: dict[str, Any], mount: KvfuseMount) -> None:
    text = json.dumps(said)
    assert str(mount.volume) not in text
    assert not re.search(r"endpoints|password|keyring|key_file|\"path\"|http://", text)
    assert said["config"].keys() == {"volume", "publish", "mount", "cache", "usrbio"}
    assert said["stats"].keys() == {
        "pid", "degraded", "space", "volume", "uptime", "rings", "ring_users", "metadata", "capacity", "slab_size",
    }  # fmt: skip


def test_others_see_what_is_theirs() -> None:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        with (
            attacker("attack_secrets.py", mount, uid=ATTACKER) as one,
            attacker("attack_secrets.py", mount, uid=ATTACKER - 1) as two,
            attacker("attack_secrets.py", mount, "bare", uid=0) as container,
        ):
            for attack in (one, two, container):
                said = attack.hear()
                check_public(said, mount)
                assert said["stats"]["rings"]["iovs"] == said["stats"]["rings"]["connections"] == 1
                assert said["stats"]["ring_users"].keys() <= {str(said["uid"])}
                assert said["stats"]["capacity"] == 256 << 20
            assert stats(mount)["rings"]["iovs"] == 3
            assert stats(mount)["segments"]["writes"] >= 0
        shown = json.loads((mount.point / ".kvfuse" / "config").read_text())
        assert str(mount.volume) in shown["volume"]["path"]


def test_a_log_is_its_owners_alone(tmp_path: Path) -> None:
    log = tmp_path / "kvfuse.log"
    before = os.umask(0)
    try:
        with temporary_mount((f"log.file={log}",)) as mount:
            (mount.point / "file").touch()
            assert stat.S_IMODE(log.stat().st_mode) == 0o600
    finally:
        os.umask(before)
