"""GET /metrics: what is answered to whom, and that no client keeps others from it."""

from __future__ import annotations

import os
import random
import socket
import struct
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
from kvfuse.metrics import server
from kvfuse.metrics.server import OPEN_METRICS
from kvfuse.options.options import MetricsOptions, Options, VolumeOptions
from kvfuse.volume.opening.formatting import format_volume
from kvfuse.volume.running import open_volume
from kvfuse_cluster.etcd import EtcdServers


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
        assert value(scrape(port), "kvfuse_written_bytes_total", cache="/") == 100_000


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


def test_a_head_has_no_body(mounted: tuple[KvfuseMount, int]) -> None:
    port = mounted[1]
    for path, status in (("/metrics", 200), ("/", 404)):
        asked = f"HEAD {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
        head, end, body = exchange(port, asked).partition(b"\r\n\r\n")
        assert (head.split()[1], end, body) == (b"%d" % status, b"\r\n\r\n", b""), path
        assert b"content-length: 0" not in head.lower()
    assert ask(port)[0] == 200


def test_an_answer_arrives_though_more_was_sent_than_is_read(mounted: tuple[KvfuseMount, int]) -> None:
    body = bytes(30_000)
    asked = b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert exchange(mounted[1], asked + body).startswith(b"HTTP/1.1 405")


def exchange(port: int, sent: bytes) -> bytes:
    """All that is answered to ``sent``."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(sent)
        return b"".join(iter(partial(client.recv, 4096), b""))


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\n"])
def test_slow_connections_keep_no_scraper_out(mounted: tuple[KvfuseMount, int], sent: bytes) -> None:
    """Of the scraper's own address, and more than there are places, again and again."""
    port = mounted[1]
    with ExitStack() as stack:
        for _ in range(10):
            for _ in range(server.CLIENTS_MAX + 2):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
                client.sendall(sent)
            assert ask(port)[0] == 200


def test_a_slow_request_is_refused_in_time(mounted: tuple[KvfuseMount, int]) -> None:
    assert exchange(mounted[1], b"GET /metrics HTTP/1.1\r\n").startswith(b"HTTP/1.1 408")


def test_no_bytes_end_the_door(mounted: tuple[KvfuseMount, int]) -> None:
    """Requests of all methods, mutated, cut, reset."""
    mount, port = mounted
    seed = int(os.environ.get("KVFUSE_TEST_SEED") or random.randrange(1 << 32))
    print("seed", seed)
    draw = random.Random(seed)
    methods = "GET", "HEAD", "POST", "PUT", "OPTIONS", "CONNECT", "TRACE", "PRI", "get", ""
    targets = "/metrics", "/", "*", "a:1", "/metrics?\xff", "http://a/metrics", "//", ""
    extras = "Expect: 100-continue", "Transfer-Encoding: chunked", "Content-Length: 5", "Content-Length: -1"
    extras += (
        "Connection: Upgrade\r\nUpgrade: h2c",
        "Accept: \xff;;q=",
        "Host: b",
        "Content-Length: 1\r\nContent-Length: 2",
    )
    for _ in range(300):
        lines = [
            f"{draw.choice(methods)} {draw.choice(targets)} HTTP/{draw.choice(('1.1', '1.0', '2.0', '1'))}",
            "Host: a",
        ]
        lines += draw.sample(extras, draw.randrange(3))
        sent = bytearray("\r\n".join([*lines, "", ""]).encode("latin-1") + draw.choice((b"", b"hello", b"zz\r\n")))
        for _ in range(draw.choice((0, 0, 1, 3))):
            sent[draw.randrange(len(sent))] = draw.randrange(256)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(sent[: draw.choice((len(sent), draw.randrange(len(sent))))])
            if draw.random() < 0.3:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif draw.random() < 0.5:
                client.shutdown(socket.SHUT_WR)
    assert ask(port)[0] == 200
    assert (mount.point / "file").write_bytes(b"x") == 1
    assert "a request for metrics failed" not in mount.log.read_text()


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
        found = {sample.labels["cache"]: sample.value for sample in parse(body)["kvfuse_used_bytes"].samples}
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
