"""What all tests share: a printed seed, a mounted volume, and the choice of where the POSIX tests run."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import rings
import trio
from alone import Turns
from bucket_lab import bucket_server, rados_gateway
from cli_lab import Place, a_place
from cluster_lab import RunServers, ceph_cluster, etcd_cluster
from engine_pairs import BLOCKS, EVERYWHERE, PAIRS, TEST_WORDS, Engines
from fsck_tree import Tree
from mounting import KvfuseMount
from ring_calls import SIZE
from volume_lab import Chaos, Disk, check

from kvfuse.native import fusewire as fusewire  # before pyfuse3, which a module of tests may import
from kvfuse.options.config import Options
from kvfuse.usrbio.client import Client, connect
from kvfuse.volume.content import writer
from kvfuse_cluster.ceph import CephServers
from kvfuse_cluster.etcd import EtcdServers
from kvfuse_cluster.rados_gateway import RadosGateway
from kvfuse_cluster.seaweed import SeaweedServer

SEED = int(os.environ.get("KVFUSE_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
os.environ["KVFUSE_TEST_SEED"] = str(SEED)  # the processes of 'pytest -n' have the same

TURNS = pytest.StashKey[Turns]()
SERVERS = pytest.StashKey[RunServers]()
MEMORY_MAX = 1 << 30
"""bytes that a process of tests has before it looks for what has ended"""
RUN_FOLDER = "KVFUSE_TEST_RUN"
"""variable with the folder by which the processes of one run take turns and find servers"""

hypothesis.settings.register_profile("kvfuse", deadline=None, print_blob=True)
hypothesis.settings.load_profile("kvfuse")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--folder",
        type=Path,
        help="run the POSIX tests in this folder of another file system (tmpfs, ext4), to check the tests themselves",
    )
    parser.addoption(
        "--killer",
        action="store_true",
        help="kill the daemon below the POSIX tests at random moments: their mounts outlive it (tests/posix)",
    )
    parser.addoption(
        "--kinds",
        help="have C answer these kinds of requests of blocks alone below the POSIX tests (tests/labs/kinds_daemon.py)",
    )
    parser.addoption(
        "--rings", default="1,2,3", help="run the tests of these rings only: 1,2 or 3 (see tests/labs/rings.py)"
    )
    parser.addoption("--slice", default="0/1", help="K/N: of each file every N-th test, from the K-th on")
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write what files of tests took into tests/durations.toml: of those rings that run, in whole files",
    )


def pytest_configure(config: pytest.Config) -> None:
    is_first = RUN_FOLDER not in os.environ  # else this is one of the processes that another one began
    if is_first:
        folder = tempfile.TemporaryDirectory(prefix="kvfuse-run-")
        os.environ[RUN_FOLDER] = folder.name
        config.add_cleanup(folder.cleanup)
    turns = config.stash[TURNS] = Turns(Path(os.environ[RUN_FOLDER]))
    config.add_cleanup(turns.close)
    servers = config.stash[SERVERS] = RunServers(Path(os.environ[RUN_FOLDER]))
    if is_first:
        config.add_cleanup(servers.stop)
    if config.getoption("--record-durations") and is_first:
        config.pluginmanager.register(rings.Durations())
    config.addinivalue_line("markers", "ring(number): in this ring, whatever the folder's is")
    config.addinivalue_line("markers", "needs(*names): in ring 3, as it needs this (tests/labs/rings.py: NEEDED)")
    config.addinivalue_line("markers", "kvfuse_only: says what this project promises beyond POSIX")
    config.addinivalue_line("markers", "root: needs to be root")
    config.addinivalue_line("markers", "engines(*names): runs on these pairs of engines only, which suffice for it")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of a mount run on every pair of engines; on one where the mount is not what they run in."""
    if "engines" not in metafunc.fixturenames:
        return
    chosen = metafunc.definition.get_closest_marker("engines")
    names = list(chosen.args) if chosen else list(EVERYWHERE)
    if "top" in metafunc.fixturenames and not chosen:
        names.insert(1, BLOCKS)
    if metafunc.config.getoption("--folder") is not None:
        names = names[:1]
    metafunc.parametrize("engines", names, indirect=True, scope="session")


def pytest_report_header() -> str:
    return f"seed: KVFUSE_TEST_SEED={SEED}"


@pytest.hookimpl(trylast=True)  # after pytest's own order, in which 'pytest -n' gives files to processes
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rings.collected[:] = items
    _choose_rings(config, items)
    _order_files(items)
    elsewhere = config.getoption("--folder") is not None
    for item in items:
        if elsewhere and item.get_closest_marker("kvfuse_only"):
            item.add_marker(pytest.mark.skip(reason="about kvfuse alone"))
        if os.geteuid() != 0 and item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))


def _choose_rings(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = {int(ring) for ring in config.getoption("--rings").split(",")}
    index, count = map(int, config.getoption("--slice").split("/"))
    seen: dict[Path, int] = {}
    kept, others = [], []
    for item in items:
        is_chosen = rings.ring_of(item) in chosen
        if is_chosen:
            seen[item.path] = seen.get(item.path, -1) + 1
        (kept if is_chosen and seen[item.path] % count == index else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = kept


def _order_files(items: list[pytest.Item]) -> None:
    """Ring after ring, and in each first the files that take longest: the last to be begun would keep one process busy
    while the others have nothing left. Last those whose tests are to be alone, as others would wait for each.

    A process has a whole file, so such tests have files of their own: else all would wait, at the beginning, until the
    longest ones of the others have ended.
    """
    alone = {item.path for item in items if item.get_closest_marker("alone") is not None}
    ring: dict[Path, int] = {}
    for item in items:
        if item.path in alone and item.get_closest_marker("alone") is None:
            raise pytest.UsageError(f"{item.path}: a file has tests that are to be alone, or others, not both")
        ring[item.path] = min(rings.ring_of(item), ring.get(item.path, rings.LAB))
    seconds = rings.durations()

    def rank(item: pytest.Item) -> tuple[bool, int, float]:
        known = seconds["lab" if ring[item.path] == rings.LAB else "rings"]
        return item.path in alone, ring[item.path], -known.get(item.path.stem, 0)

    items.sort(key=rank)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    rings.running = rings.ring_of(item)
    item.user_properties += [("ring", rings.running), ("needs", sorted(rings.needs_of(item)))]


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the test's own time limit begins
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with item.config.stash[TURNS].turn(alone=item.get_closest_marker("alone") is not None):
        answer = yield
    let_memory_go()
    return answer


def let_memory_go() -> None:
    """Give back what volumes have left that ended: each refers to itself, and Python seldom looks for such where
    millions of objects are alive. Four processes of one run had 16 GB."""
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * mmap.PAGESIZE
    if resident > MEMORY_MAX:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Another number for each test, the same for the same KVFUSE_TEST_SEED. Printed when the test fails.

    So are the pauses that the project itself draws, and the order in which trio has tasks go on: what a simulation
    finds it finds again.
    """
    value = random.Random(f"{SEED} {request.node.nodeid}").randrange(1 << 32)
    print(f"seed {value} (KVFUSE_TEST_SEED={SEED})")
    random.seed(value)
    trio._core._run._r.seed(value)  # private, but there is no other way; pytest-trio does it so for hypothesis
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
def etcd(pytestconfig: pytest.Config) -> EtcdServers:
    """Three members on loopback, which all processes of this run use: no test kills or stops one."""
    return pytestconfig.stash[SERVERS].etcd(3)


@pytest.fixture(scope="session")
def etcd_alone(pytestconfig: pytest.Config) -> EtcdServers:
    """One member, for what is not about members: with three, most of the time of two cores is theirs."""
    return pytestconfig.stash[SERVERS].etcd(1)


@pytest.fixture(scope="session")
def ceph(pytestconfig: pytest.Config) -> CephServers:
    """One monitor and three OSDs on loopback, which all processes of this run use: no test kills or stops one."""
    return pytestconfig.stash[SERVERS].ceph()


@pytest.fixture(scope="session")
def own_etcd() -> Iterator[EtcdServers]:
    """Three members that only this process uses: a test may kill or stop them."""
    with etcd_cluster() as servers:
        yield servers


@pytest.fixture(scope="session")
def own_ceph() -> Iterator[CephServers]:
    """One monitor and three OSDs that only this process uses: a test may kill or stop them."""
    with ceph_cluster() as servers:
        yield servers


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedServer]:
    """A server with S3 that this process uses: no test kills or stops it."""
    with bucket_server() as server:
        yield server


@pytest.fixture(scope="session")
def gateway(ceph: CephServers) -> Iterator[RadosGateway]:
    """The same, for the shared cluster's objects."""
    with rados_gateway(ceph) as server:
        yield server


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest) -> Engines:
    """The pair of engines under test: `pytest_generate_tests` says which."""
    return PAIRS[request.param](request)


@pytest.fixture(scope="module")
def elsewhere(request: pytest.FixtureRequest) -> Iterator[Path | None]:
    """A part of --folder; None where that is not given."""
    given: Path | None = request.config.getoption("--folder")
    if given is None:
        yield None
        return
    made = Path(tempfile.mkdtemp(dir=given))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def ground(engines: Engines, elsewhere: Path | None) -> Iterator[KvfuseMount | Path]:
    """What the tests of a module work in: one mount, whose volume must be clean after them; or a part of --folder."""
    if elsewhere is not None:
        yield elsewhere
        return
    with engines.mounted(TEST_WORDS) as mount:
        yield mount


@pytest.fixture(scope="module")
def shared_mount(ground: KvfuseMount | Path) -> KvfuseMount:
    """One mount for all tests of a module, which are about kvfuse alone."""
    assert isinstance(ground, KvfuseMount)
    return ground


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
def mount(engines: Engines) -> Iterator[KvfuseMount]:
    """A mount of the test's own, which it may unmount, kill and mount again."""
    with engines.mounted(TEST_WORDS) as mount:
        yield mount


@pytest.fixture(scope="module")
def top(ground: KvfuseMount | Path, engines: Engines) -> Iterator[Path]:
    """Where POSIX tests work: the mount point, a folder of a namespace there, or a folder below --folder."""
    point = ground.point if isinstance(ground, KvfuseMount) else ground
    if not engines.kind or not isinstance(ground, KvfuseMount):
        yield point
        return
    made = point / engines.kind
    made.mkdir()
    made.chmod(0o755)
    os.setxattr(made, "user.kvfuse.namespace", b"kind=" + engines.kind.encode())
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
async def disk(options: Options, chaos: Chaos) -> AsyncIterator[Disk]:
    """A volume in memory as the test's module has ``options``, of one host. A check finds nothing at the end."""
    disk = Disk.format(options)
    yield disk
    report = await check(disk)
    assert report.clean, report


@pytest.fixture
def small_rewrites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where chunks are small: let them be changed in place all the same."""
    monkeypatch.setattr(writer, "REWRITE_SIZE_MAX", 8192)


@pytest.fixture
def place() -> Iterator[Place]:
    """Where a test of the command line may make a volume and mount it."""
    with a_place() as place:
        yield place
