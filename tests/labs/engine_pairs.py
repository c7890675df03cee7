"""The pairs of engines on which the tests of a mount run: each is one more parameter of the fixture ``engines``.

A further pair joins with a function that says how its volumes are mounted, and a line in ``PAIRS``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from mounting import FOREGROUND, KvfuseMount, shared_conf, temporary_mount

TEST_WORDS = ("allow_other", "volume.capacity=2GiB", "volume.segment_size=64MiB", "entry_timeout=1", "attr_timeout=1")
"""-o words of mounts that tests share"""


@dataclass(frozen=True)
class Engines:
    """How volumes of one pair are mounted."""

    words: tuple[str, ...]
    """-o words"""
    new_conf: Callable[[Path], Path] | None = None
    """writes the mount.conf of a volume that was never there into a folder; None: the volume is a folder itself"""
    kind: str = ""
    """of the namespace of which POSIX tests work in a folder; none: they work in the mount's root"""

    @property
    def is_shared(self) -> bool:
        """Other hosts may mount the same volume."""
        return self.new_conf is not None

    @contextmanager
    def mounted(self, words: Sequence[str], command: Sequence[str] = FOREGROUND) -> Iterator[KvfuseMount]:
        """An empty volume with ``words``, mounted by ``command``. It must be clean at the end."""
        with tempfile.TemporaryDirectory(prefix="kvfuse-conf-") as folder:
            source = self.new_conf(Path(folder)) if self.new_conf else None
            with temporary_mount((*words, *self.words), command, source) as mount:
                yield mount


def _lmdb_file(request: pytest.FixtureRequest) -> Engines:
    return Engines(("records.engine=lmdb", "segments.engine=file"))


def _etcd_rados(request: pytest.FixtureRequest, publish: str) -> Engines:
    etcd, ceph = request.getfixturevalue("etcd_alone"), request.getfixturevalue("ceph")
    return Engines((f"publish={publish}",), lambda folder: shared_conf(folder, etcd, ceph))


def _etcd_block(request: pytest.FixtureRequest) -> Engines:
    """A plain file does for a device here."""
    etcd = request.getfixturevalue("etcd_alone")

    def new_conf(folder: Path) -> Path:
        with (folder / "device").open("wb") as file:
            file.truncate(DEVICE_SIZE)
        return shared_conf(folder, etcd, device=folder / "device")

    return Engines(("publish=strict",), new_conf)


BLOCKS = "lmdb+file+blocks"
"""POSIX tests run on it, too: in a folder of blocks"""
PAIRS: dict[str, Callable[[pytest.FixtureRequest], Engines]] = {
    "lmdb+file": _lmdb_file,
    BLOCKS: lambda request: replace(_lmdb_file(request), kind="blocks"),
    "etcd+rados": partial(_etcd_rados, publish="strict"),
    "etcd+rados-relaxed": partial(_etcd_rados, publish="relaxed"),
    "etcd+block": _etcd_block,
}
"""name of a pair -> what mounts its volumes, on servers that are started when the first test asks for them"""
EVERYWHERE = ("lmdb+file", "etcd+rados", "etcd+rados-relaxed")
"""on which a test of a mount runs that names none: bytes on devices go the same way as in RADOS"""
DEVICE_SIZE = 3 << 30
"""of a sparse file"""
