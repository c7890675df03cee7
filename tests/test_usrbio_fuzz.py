"""Hostile clients: the daemon lives, stays small, keeps to the memory it was given, and serves the others."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from mounting import KvfuseMount, temporary_mount
from ring_clients import content
from ring_fuzzer import SECRET
from ring_lab import Process, nothing_left_behind, resident_size, stats, wait_for_rings, witness

from kvfuse.usrbio.client import connect

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
WORDS = (
    "allow_other", "volume.capacity=512MiB", "volume.segment_size=64MiB", "cache.tier_size=64MiB",
    "publish.window=0.05",
)  # fmt: skip
FUZZ_S = float(os.environ.get("KVFUSE_FUZZ_SECONDS", "10"))
GROWTH_MAX = 400 * MIB
"""of the daemon's memory under the fuzzer"""
USER = 65534


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        yield mount


# -- random -----------------------------------------------------------------------------------------


def prepare(mount: KvfuseMount) -> None:
    """What everybody may use, and what the fuzzer may not read."""
    public, private = mount.point / "public", mount.point / "private"
    (public / "sub").mkdir(parents=True)
    private.mkdir()
    for number in range(4):
        (public / f"f{number}").write_bytes(content("f", number, MIB).tobytes())
        (public / f"b{number}").write_bytes(content("b", number, 100_000).tobytes())
    for name in ("secret", "b0", "b1", "b2"):
        path = private / name
        path.write_bytes(SECRET * 5000)
        path.chmod(0o600)
    for path in [public, public / "sub", *public.iterdir()]:
        os.chown(path, USER, USER)


@pytest.mark.root
def test_nothing_that_a_client_does_matters_to_others(seed: int) -> None:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        prepare(mount)
        pid = stats(mount)["pid"]
        with nothing_left_behind(mount):
            with witness(mount, seed % 1000):
                size = resident_size(mount)
                fuzzer = Process("ring_fuzzer.py", mount.point, seed, USER)
                report = fuzzer.ask(seconds=FUZZ_S)
                fuzzer.end()
                growth = resident_size(mount) - size
            with connect(mount.point) as client:  # what is in the tier serves those who may read it
                assert client.namespace("private").inode
        print(report, f"grown by {growth >> 20} MiB")
        assert report["found"] == 0
        assert set(report["done"]) | set(report["refused"]) >= {"do_submit", "do_scribble", "do_ask_anything"}
        assert growth < GROWTH_MAX
        assert stats(mount)["pid"] == pid
        assert all((mount.point / "private" / name).read_bytes() == SECRET * 5000 for name in ("secret", "b0", "b1"))
