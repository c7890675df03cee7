"""GET /metrics: what is answered to whom, and that no client keeps others from it."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from cli_lab import Place, assert_fails
from cli_lab import kvfuse as run
from metrics_lab import ask, listen_word, parse, samples, scrape, value
from mounting import KvfuseMount, shared_conf, temporary_mount

import kvfuse
from kvfuse.cluster.etcd import EtcdServers
from kvfuse.metrics import server
from kvfuse.metrics.server import OPEN_METRICS
from kvfuse.options.options import MetricsOptions, Options, VolumeOptions
from kvfuse.volume.opening.format import format_volume
from kvfuse.volume.running import open_volume


@pytest.fixture(scope="module")
def mounted() -> Iterator[tuple[KvfuseMount, int]]:
    word, port = listen_word()
    with temporary_mount([word, "capacity=64MiB"]) as mount:
        yield mount, port


def test_a_mount_answers_with_its_figures(mounted: tuple[KvfuseMount, int]) -> None:
    mount, port = mounted
    before = scrape(port)
    (mount.point / "file").write_bytes(bytes(100_000))
    after = scrape(port)
    assert value(before, "kvfuse_info", version=kvfuse.__version__) == 1
    created = partial(value, name="kvfuse_file_operations_total", operation="creates")
    assert created(after) == created(before) + 1
    assert value(after, "process_cpu_seconds_total") > 0
    assert value(after, "kvfuse_volume_size_bytes") < 64 << 20


def test_a_volume_that_hosts_share_has_the_same_metrics(
    mounted: tuple[KvfuseMount, int], tmp_path: Path, etcd: EtcdServers
) -> None:
    word, port = listen_word()
    with temporary_mount([word], source=shared_conf(tmp_path, etcd)) as mount:
        (mount.point / "file").write_bytes(bytes(100_000))
        assert len((mount.point / "file").read_bytes()) == 100_000
        assert scrape(port).keys() == scrape(mounted[1]).keys()
        assert value(scrape(port), "kvfuse_written_bytes_total", namespace="/") == 100_000


def test_a_client_gets_the_format_that_it_takes(mounted: tuple[KvfuseMount, int]) -> None:
    port = mounted[1]
    for accept, content_type, end in (
        (OPEN_METRICS, "application/openmetrics-text", "# EOF\n"),
        (f"{OPEN_METRICS};q=0.8,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "application/openmetrics-text", "# EOF\n"),
        ("*/*", "text/plain", "\n"),
        ("application/openmetrics-text; version=bogus", "application/openmetrics-text", "# EOF\n"),
    ):
        status, found, body = ask(port, accept=accept)
        assert (status, found.partition(";")[0]) == (200, content_type), accept
        assert body.endswith(end), accept


def test_there_is_nothing_else(mounted: tuple[KvfuseMount, int]) -> None:
    port = mounted[1]
    assert ask(port, "/")[0] == 404
    assert ask(port, "/metrics/x")[0] == 404
    assert ask(port, "/metrics?name=a")[0] == 200
    assert ask(port, method="POST")[0] == 405


@pytest.mark.parametrize("sent", [b"\0\1\2\r\n\r\n", b"GET /metrics HTTPS\r\n\r\n", b"GET " + b"x" * 20_000])
def test_what_is_no_request_is_refused(mounted: tuple[KvfuseMount, int], sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", mounted[1]), timeout=10) as client:
        client.sendall(sent)
        assert client.recv(100).startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))


def test_clients_that_say_nothing_keep_nobody_out_for_long(mounted: tuple[KvfuseMount, int]) -> None:
    port = mounted[1]
    with ExitStack() as stack:
        idle = []
        for _ in range(server.CLIENTS_MAX):
            client = socket.create_connection(("127.0.0.1", port), timeout=2 * server.CLIENT_SECONDS)
            idle.append(stack.enter_context(client))
        with socket.create_connection(("127.0.0.1", port), timeout=server.CLIENT_SECONDS / 2) as late:
            assert late.recv(1) == b"", "one too many is turned away at once"
        assert [client.recv(1) for client in idle] == [b""] * len(idle)
    assert ask(port)[0] == 200


def test_a_mount_whose_address_is_taken_says_so(place: Place) -> None:
    assert run("format", place.volume, "--capacity", "64MiB").returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("mount", place.volume, place.point, "-o", f"metrics.listen=127.0.0.1:{port}")
    assert_fails(done, 5, rf"metrics.listen: nobody can listen at 127.0.0.1:{port}: Address already in use")
    assert not place.is_mounted


def test_metrics_are_off_unless_wanted(place: Place) -> None:
    place.mount()
    listening = Path(f"/proc/{place.pid}/net/tcp").read_text().splitlines()[1:]
    inodes = {row.split()[9] for row in listening if row.split()[3] == "0A"}
    descriptors = {str(link.readlink()) for link in Path(f"/proc/{place.pid}/fd").iterdir()}
    assert not {f"socket:[{inode}]" for inode in inodes} & descriptors


async def served(tmp_path: Path, use: Callable[[Any, int], Awaitable[None]]) -> None:
    """``use`` a volume in this process, and the port of its metrics."""
    options = Options(volume=VolumeOptions(path=tmp_path / "volume", capacity=64 << 20))
    await format_volume(options)
    word, port = listen_word()
    listening = MetricsOptions(listen=word.partition("=")[2])
    async with open_volume(options) as volume, trio.open_nursery() as nursery:
        await nursery.start(partial(server.serve_metrics, volume, options=listening))
        await use(volume, port)
        nursery.cancel_scope.cancel()


async def test_paths_of_any_bytes_are_labels(tmp_path: Path) -> None:
    """Two namespaces never have one label, and what no UTF-8 has is shown otherwise."""

    async def use(volume: Any, port: int) -> None:
        stats = volume.stats()
        (root,) = stats["namespaces"]
        paths = ['/a"b\\c\nd', "/\udcff", "/\udcfe", "/\u00e9"]
        stats["namespaces"] = [{**root, "number": 2000 + number, "path": path} for number, path in enumerate(paths)]
        for row in stats["namespaces"]:
            row["used"] = {"bytes": row["number"]}
        volume.stats = lambda: stats
        _, _, body = await trio.to_thread.run_sync(ask, port)
        found = {sample.labels["namespace"]: sample.value for sample in parse(body)["kvfuse_used_bytes"].samples}
        assert found == {'/a"b\\c\nd': 2000, "/\ufffd": 2001, "/\ufffd#2002": 2002, "/\u00e9": 2003}

    await served(tmp_path, use)


async def test_a_failure_ends_one_answer_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def use(volume: Any, port: int) -> None:
        stats, volume.stats = volume.stats, dict
        status, _, _ = await trio.to_thread.run_sync(ask, port)
        assert status == 500
        volume.stats = stats
        families = parse((await trio.to_thread.run_sync(ask, port))[2])
        assert all(sample.name.startswith(("kvfuse_", "process_")) for sample in samples(families))

    await served(tmp_path, use)
    assert "a request for metrics failed" in caplog.text
