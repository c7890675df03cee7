"""What all tests share: a printed seed, a mounted volume, and the choice of where the POSIX tests run."""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from cluster_lab import ceph_cluster, etcd_cluster
from fsck_tree import Tree
from mounting import KvfuseMount, temporary_mount
from ring_calls import SIZE
from volume_lab import Chaos

from kvfuse.cluster.ceph import CephServers
from kvfuse.cluster.etcd import EtcdServers
from kvfuse.usrbio.client import Client, connect
from kvfuse.volume import content

SEED = int(os.environ.get("KVFUSE_TEST_SEED") or random.SystemRandom().randrange(1 << 32))

ENGINES = {"lmdb+file": ("records.engine=lmdb", "segments.engine=file")}
"""name of an engine pair -> its -o words; every pair runs the same POSIX tests"""

TEST_WORDS = ("allow_other", "volume.capacity=2GiB", "volume.segment_size=64MiB", "entry_timeout=1", "attr_timeout=1")

hypothesis.settings.register_profile("kvfuse", deadline=None, print_blob=True)
hypothesis.settings.load_profile("kvfuse")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--folder",
        type=Path,
        help="run the POSIX tests in this folder of another file system (tmpfs, ext4), to check the tests themselves",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kvfuse_only: says what this project promises beyond POSIX")
    config.addinivalue_line("markers", "root: needs to be root")


def pytest_report_header() -> str:
    return f"seed: KVFUSE_TEST_SEED={SEED}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    elsewhere = config.getoption("--folder") is not None
    for item in items:
        if elsewhere and item.get_closest_marker("kvfuse_only"):
            item.add_marker(pytest.mark.skip(reason="about kvfuse alone"))
        if os.geteuid() != 0 and item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Another number for each test, the same for the same KVFUSE_TEST_SEED. Printed when the test fails."""
    value = random.Random(f"{SEED} {request.node.nodeid}").randrange(1 << 32)
    print(f"seed {value} (KVFUSE_TEST_SEED={SEED})")
    return value


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture
async def tree(tmp_path: Path, rng: random.Random) -> Tree:
    """An unmounted volume on disk with files of many shapes."""
    tree = Tree(tmp_path, rng)
    await tree.make()
    return tree


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdServers]:
    """Three members on loopback, started when the first test asks for them."""
    with etcd_cluster() as servers:
        yield servers


@pytest.fixture(scope="session")
def ceph() -> Iterator[CephServers]:
    """One monitor and three OSDs on loopback, started when the first test asks for them."""
    with ceph_cluster() as servers:
        yield servers


@pytest.fixture(scope="session", params=ENGINES)
def engine_words(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The -o words of the engine pair under test."""
    return ENGINES[request.param]


@pytest.fixture(scope="module")
def shared_mount(engine_words: tuple[str, ...]) -> Iterator[KvfuseMount]:
    """One mount for all tests of a module; the volume must be clean after them."""
    with temporary_mount((*TEST_WORDS, *engine_words)) as mount:
        yield mount


@pytest.fixture
def client(shared_mount: KvfuseMount) -> Iterator[Client]:
    """Of the rings of that mount."""
    with connect(shared_mount.point) as client:
        yield client


@pytest.fixture
def path(shared_mount: KvfuseMount, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A name of the test's own in that mount, for a file."""
    path = shared_mount.point / request.node.name.replace("/", "_")[:200]
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def data(rng: random.Random) -> bytes:
    """What such a file may hold."""
    return rng.randbytes(SIZE)


@pytest.fixture
def mount(engine_words: tuple[str, ...]) -> Iterator[KvfuseMount]:
    """A mount of the test's own, which it may unmount, kill and mount again."""
    with temporary_mount((*TEST_WORDS, *engine_words)) as mount:
        yield mount


@pytest.fixture(scope="module")
def top(request: pytest.FixtureRequest, engine_words: tuple[str, ...]) -> Iterator[Path]:
    """Where POSIX tests work: the mount point, or a folder below --folder."""
    elsewhere: Path | None = request.config.getoption("--folder")
    if elsewhere is None:
        yield request.getfixturevalue("shared_mount").point
        return
    made = Path(tempfile.mkdtemp(dir=elsewhere))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def folder(top: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty folder of the test's own, writable by everybody. Its removal is part of the test."""
    name = re.sub(r"[^\w]", "_", request.node.name)[:60]
    made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=top))
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def chaos(seed: int) -> Chaos:
    """Engines in memory that behave, until a test says otherwise."""
    return Chaos(random.Random(seed))


@pytest.fixture
def small_rewrites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where chunks are small: let them be changed in place all the same."""
    monkeypatch.setattr(content, "REWRITE_SIZE_MAX", 8192)
