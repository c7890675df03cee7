"""The HTTP door of a mount: what it changes is seen through the kernel at once, and the other way round."""

from __future__ import annotations

import http.client
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_lab import kvfuse
from http_lab import WebClient, client_of, serve, web_server
from killer import serving_of
from mounting import KvfuseMount, temporary_mount, wait_until

from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.process import free_ports


@pytest.fixture(scope="module")
def mounted() -> Iterator[tuple[KvfuseMount, int]]:
    (port,) = free_ports(1)
    words = ["capacity=256MiB", f"http.listen=127.0.0.1:{port}", "http.anonymous=0:0"]
    with temporary_mount(words) as mount:
        yield mount, port


@pytest.fixture
def client(mounted: tuple[KvfuseMount, int]) -> Iterator[WebClient]:
    with client_of(mounted[1]) as client:
        yield client


@pytest.fixture
def point(mounted: tuple[KvfuseMount, int]) -> Path:
    return mounted[0].point


def test_the_kernel_sees_each_change_at_once(point: Path, client: WebClient) -> None:
    """The kernel may keep names for a minute: it is told."""
    folder, file = point / "seen", point / "seen" / "file"
    assert not folder.exists()
    client.ask("PUT", "/v1/folders/seen")
    assert folder.is_dir()
    for number in range(20):
        assert not file.exists()
        client.ask("PUT", "/v1/files/seen/file?mode=0600", b"first %d" % number)
        assert file.read_bytes() == b"first %d" % number
        assert file.stat().st_mode & 0o777 == 0o600
        client.ask("PUT", "/v1/files/seen/file", b"second, longer")
        assert file.read_bytes() == b"second, longer"
        client.ask("PATCH", "/v1/files/seen/file?offset=0", b"SECOND")
        assert file.read_bytes() == b"SECOND, longer"
        client.ask("PATCH", "/v1/attributes/seen/file", b'{"size": 3, "mode": 420}')
        assert (file.stat().st_size, file.stat().st_mode & 0o777) == (3, 0o644)
        client.ask("PUT", "/v1/xattrs/seen/file?name=user.x", b"%d" % number)
        assert os.getxattr(file, "user.x") == b"%d" % number
        client.ask("POST", "/v1/rename/seen/file?to=/seen/other")
        assert sorted(os.listdir(folder)) == ["other"]
        assert not file.exists()
        client.ask("DELETE", "/v1/files/seen/other")
        assert os.listdir(folder) == []
        assert not (folder / "other").exists()
    client.ask("DELETE", "/v1/folders/seen")
    assert not folder.exists()


def test_changes_through_the_kernel_are_seen(point: Path, client: WebClient) -> None:
    (point / "kernel").mkdir()
    file = point / "kernel" / "file"
    for number in range(20):
        file.write_bytes(b"x" * number)
        assert client.ask("GET", "/v1/files/kernel/file").body == b"x" * number
        file.rename(file.with_name("moved"))
        assert client.ask("GET", "/v1/files/kernel/file").status == 404
        (point / "kernel" / "moved").unlink()
        assert client.ask("GET", "/v1/folders/kernel").json["entries"] == []


def test_mapped_bytes_are_those_of_a_patch(point: Path, client: WebClient) -> None:
    client.ask("PUT", "/v1/files/mapped", bytes(10_000))
    with (point / "mapped").open("rb") as file:
        assert file.read() == bytes(10_000)
        client.ask("PATCH", "/v1/files/mapped?offset=5000", b"new")
        assert os.pread(file.fileno(), 3, 5000) == b"new"


def test_blocks_of_rings_http_and_files_are_the_same(point: Path, client: WebClient) -> None:
    assert client.ask("PUT", "/v1/namespaces/blocks", b'{"kind": "blocks", "capacity": 67108864}').status == 201
    data = {b"by-%d" % number: os.urandom(100_000 + number) for number in range(20)}
    with BlockStore(point, "blocks") as store:
        assert store.put_many(list(data), list(data.values())).all()
        assert client.get_blocks("blocks", list(data)) == list(data.values())
        other = {key + b"-http": value[::-1] for key, value in data.items()}
        assert client.put_blocks("blocks", list(other), list(other.values())) == [0] * 20
        for key, value in other.items():
            target = bytearray(len(value))
            assert store.get_into(key, target) == len(value)
            assert bytes(target) == value
            assert (point / "blocks" / key.decode()).read_bytes() == value
        assert client.ask("DELETE", "/v1/blocks/blocks/by-0").status == 204
        assert store.exists([b"by-0", b"by-1"]).tolist() == [False, True]
        assert not (point / "blocks" / "by-0").exists()


def test_many_writers_at_both_doors(point: Path, mounted: tuple[KvfuseMount, int]) -> None:
    """Each file is at any time one that somebody wrote, whole."""
    (point / "both").mkdir()
    names, failures = [f"n{number}" for number in range(4)], list[str]()

    def check(content: bytes) -> None:
        if len(set(content)) > 1 or len(content) not in (0, 50_000):
            failures.append(f"{len(content)} bytes, of {set(content)}")

    def by_http() -> None:
        with client_of(mounted[1]) as client:
            for number in range(100):
                name = names[number % 4]
                answer = client.ask("PUT", f"/v1/files/both/{name}", bytes([number]) * 50_000)
                if answer.status not in (201, 204):
                    failures.append(str(answer))
                check(client.ask("GET", f"/v1/files/both/{names[(number + 1) % 4]}").body)

    def by_kernel() -> None:
        for number in range(100):
            draft = point / "both" / f"draft-{threading.get_ident()}"
            draft.write_bytes(bytes([100 + number]) * 50_000)
            draft.rename(point / "both" / names[number % 4])
            try:
                check((point / "both" / names[(number + 2) % 4]).read_bytes())
            except FileNotFoundError:
                continue

    threads = [threading.Thread(target=work) for work in (by_http, by_http, by_kernel)]
    for name in names:
        (point / "both" / name).write_bytes(bytes(50_000))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(os.listdir(point / "both")) == names


def test_the_volume_of_a_mount_is_not_served_beside_it(mounted: tuple[KvfuseMount, int]) -> None:
    mount, _ = mounted
    done = kvfuse("serve-http", mount.volume, "-o", "http.anonymous=0:0", "--listen", "127.0.0.1:1")
    assert done.returncode == 4, done.stderr
    assert str(mount.point) in done.stderr
    assert "http.listen" in done.stderr


def test_what_the_door_does_is_counted(client: WebClient, point: Path) -> None:
    before = kvfuse("stats", point, "--json").stdout
    client.ask("GET", "/healthz")
    assert '"http"' in before


def is_answering(port: int) -> bool:
    try:
        with client_of(port) as client:
            return client.ask("GET", "/healthz").status == 200
    except (OSError, http.client.HTTPException):
        return False


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount outlives its daemon where root holds it")
def test_the_next_daemon_answers_and_has_what_was_answered() -> None:
    """After a kill as after an upgrade: also what nobody had synced."""
    (port,) = free_ports(1)
    words = ["outlive", "capacity=256MiB", f"http.listen=127.0.0.1:{port}", "http.anonymous=0:0"]
    with temporary_mount(words) as mount:
        with client_of(port) as client:
            client.ask("PUT", "/v1/namespaces/blocks", b'{"kind": "blocks", "capacity": 67108864}')
        for number in range(2):
            with client_of(port) as client:
                assert client.ask("PUT", f"/v1/files/file-{number}", b"x" * 70_000).status == 201
                assert client.ask("POST", f"/v1/rename/file-{number}?to=/kept-{number}").status == 204
                assert client.ask("PUT", f"/v1/blocks/blocks/{number}", b"y" * 70_000).status == 204
            if number % 2:
                daemon = serving_of(mount.pid)
                assert daemon is not None
                os.kill(daemon, signal.SIGKILL)
                wait_until(lambda former=daemon: not Path(f"/proc/{former}").exists(), "the end of the daemon")
            else:
                done = kvfuse("upgrade", mount.point)
                assert done.returncode == 0, done.stderr
            wait_until(lambda: is_answering(port), "the next daemon")
            with client_of(port) as client:
                for past in range(number + 1):
                    assert client.ask("GET", f"/v1/files/kept-{past}").body == b"x" * 70_000
                    assert client.ask("GET", f"/v1/blocks/blocks/{past}").body == b"y" * 70_000
                    assert (mount.point / f"kept-{past}").read_bytes() == b"x" * 70_000


def test_sigterm_lets_requests_end(tmp_path: Path) -> None:
    """A body that is on its way when the signal comes is stored whole, and answered."""
    with (
        web_server(tmp_path, "http.anonymous=0:0") as server,
        client_of(server.address) as client,
        client_of(server.address) as other,
    ):

        def body() -> Iterator[bytes]:
            yield b"before "
            wait_until(lambda: other.ask("GET", "/v1/folders/").json["entries"] != [], "the unfinished file")
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: b"flushing" in server.log.read_bytes(), "the signal")
            yield b"after"

        answer = client.ask("PUT", "/v1/files/file", body())
        assert (answer.status, answer.headers["Connection"]) == (201, "close")
        assert server.process.wait(60) == 0
        again = serve(tmp_path, "http.anonymous=0:0", source=server.volume)
        try:
            with client_of(again.address) as client:
                assert client.ask("GET", "/v1/files/file").body == b"before after"
        finally:
            again.stop()


def test_what_was_synced_survives_a_kill(tmp_path: Path) -> None:
    with web_server(tmp_path, "http.anonymous=0:0") as server, client_of(server.address) as client:
        client.ask("PUT", "/v1/namespaces/blocks", b'{"kind": "blocks", "capacity": 67108864}')
        assert client.ask("PUT", "/v1/files/synced?fsync", b"x" * 100_000).status == 201
        client.ask("PUT", "/v1/files/cut", b"former")
        client.ask("POST", "/v1/sync/")
        with client_of(server.address) as cut:
            cut.connection.putrequest("PUT", "/v1/files/cut")
            cut.connection.putheader("Content-Length", "1000000")
            cut.connection.endheaders()
            cut.connection.send(b"y" * 1000)
            server.process.kill()
            server.process.wait()
        again = serve(tmp_path, "http.anonymous=0:0", source=server.volume)
        with client_of(again.address) as client:
            assert client.ask("GET", "/v1/files/synced").body == b"x" * 100_000
            assert client.ask("GET", "/v1/files/cut").body == b"former"
        again.stop()
