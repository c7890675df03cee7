"""Files over HTTP: bytes, ranges, names, attributes, as the calls of POSIX do."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from contextlib import closing

import pytest
from http_lab import WebClient, client_of, web_server
from mounting import wait_until


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebClient]:
    with (
        web_server(tmp_path_factory.mktemp("http"), at="socket") as server,
        client_of(server.address) as client,
    ):
        yield client


@pytest.fixture
def folder(client: WebClient, request: pytest.FixtureRequest) -> str:
    """A new one, for one test."""
    name = request.node.name.partition("[")[0]
    assert client.ask("PUT", f"/v1/folders/{name}").status == 201
    return name


def names_in(client: WebClient, folder: str, limit: int = 1000) -> list[str]:
    """All names, page by page."""
    found, page = list[str](), client.ask("GET", f"/v1/folders/{folder}?limit={limit}").json
    while True:
        assert len(page["entries"]) <= limit
        found += [row["name"] for row in page["entries"]]
        if "next" not in page:
            return found
        page = client.ask("GET", f"/v1/folders/{folder}?limit={limit}&after={page['next']}").json


def test_a_file_is_stored_and_read_in_ranges(client: WebClient, folder: str) -> None:
    data, file = os.urandom(5_000_001), f"/v1/files/{folder}/file"
    assert client.ask("PUT", file, data).status == 201
    whole = client.ask("GET", file)
    assert (whole.status, whole.body) == (200, data)
    for wanted, part in {
        "bytes=0-0": data[:1],
        "bytes=4999990-": data[4999990:],
        "bytes=-7": data[-7:],
        "bytes=1000000-2999999": data[1_000_000:3_000_000],
        "bytes=5000000-9999999": data[5_000_000:],
    }.items():
        answer = client.ask("GET", file, headers={"Range": wanted})
        assert (answer.status, answer.body) == (206, part)
        assert answer.headers["Content-Range"].endswith("/5000001")
    assert client.ask("GET", file, headers={"Range": "bytes=5000001-"}).status == 416
    assert client.ask("GET", file, headers={"Range": "lines=1-2"}).body == data
    assert client.ask("GET", file, headers={"If-None-Match": whole.headers["ETag"]}).status == 304
    assert client.ask("GET", file, headers={"Range": "bytes=0-0", "If-Range": '"other"'}).status == 200
    head = client.ask("HEAD", file)
    assert (head.headers["Content-Length"], head.headers["ETag"]) == ("5000001", whole.headers["ETag"])


def test_a_put_takes_the_place_of_the_former_file(client: WebClient, folder: str) -> None:
    file = f"/v1/files/{folder}/file"
    assert client.ask("PUT", f"{file}?mode=0600", b"first").status == 201
    assert client.ask("PUT", file, b"second", {"If-None-Match": "*"}).status == 412
    assert client.ask("PUT", f"{file}?fsync", b"third").status == 204
    assert client.ask("GET", file).body == b"third"
    assert client.ask("GET", f"/v1/attributes/{folder}/file").json["mode"] == 0o600
    assert names_in(client, folder) == ["file"]


def test_a_file_is_changed_only_in_the_state_that_is_named(client: WebClient, folder: str) -> None:
    file = f"/v1/files/{folder}/file"
    assert client.ask("PUT", file, b"first", {"If-Match": "*"}).status == 412
    assert client.ask("GET", file).status == 404
    first = client.ask("PUT", file, b"first").headers["ETag"]
    second = client.ask("PUT", file, b"second", {"If-Match": f'"other", {first}'}).headers["ETag"]
    assert first != second
    for method, target in (("PUT", file), ("PATCH", f"{file}?offset=0"), ("DELETE", file)):
        refused = client.ask(method, target, b"third", {"If-Match": first})
        assert (refused.status, second in refused.json["title"]) == (412, True), method
    assert client.ask("GET", file).body == b"second"
    assert client.ask("PATCH", f"{file}?offset=0", b"S", {"If-Match": second}).status == 204
    assert client.ask("DELETE", file, headers={"If-Match": "*"}).status == 204


def test_a_put_looks_once_more_before_it_replaces_a_file(client: WebClient, folder: str) -> None:
    file, other = f"/v1/files/{folder}/file", WebClient(client.address)
    tag = client.ask("PUT", file, b"first").headers["ETag"]

    def pieces() -> Iterator[bytes]:
        yield b"late, "
        wait_until(lambda: len(names_in(other, folder)) == 2, "the begin of the first PUT")
        assert other.ask("PUT", file, b"second").status == 204
        yield b"and longer"

    with closing(other):
        assert client.ask("PUT", file, pieces(), {"If-Match": tag}).status == 412
    assert client.ask("GET", file).body == b"second"
    assert names_in(client, folder) == ["file"]


def test_a_chunked_body_of_unknown_length(client: WebClient, folder: str) -> None:
    pieces = [os.urandom(100_000) for _ in range(30)]
    assert client.ask("PUT", f"/v1/files/{folder}/file", iter(pieces)).status == 201
    assert client.ask("GET", f"/v1/files/{folder}/file").body == b"".join(pieces)


def test_writes_in_place_at_the_end_and_cuts(client: WebClient, folder: str) -> None:
    file, model = f"/v1/files/{folder}/file", bytearray(b"0123456789")
    client.ask("PUT", file, bytes(model))
    assert client.ask("PATCH", f"{file}?offset=3", b"abc").status == 204
    model[3:6] = b"abc"
    assert client.ask("PATCH", file, b"XY", {"Content-Range": "bytes 8-9/*"}).status == 204
    model[8:10] = b"XY"
    assert client.ask("PATCH", f"{file}?offset=end", b"more").status == 204
    model += b"more"
    assert client.ask("PATCH", f"{file}?offset=20&fsync", b"far").status == 204
    model += bytes(20 - len(model)) + b"far"
    assert client.ask("GET", file).body == bytes(model)
    cut = client.ask("PATCH", f"/v1/attributes/{folder}/file", b'{"size": 5}')
    assert cut.json["size"] == 5
    assert client.ask("GET", file).body == bytes(model[:5])
    assert client.ask("PATCH", file, b"XY", {"Content-Range": "bytes 8-10/*"}).status == 400
    assert client.ask("PATCH", file, b"XY").status == 400


def test_folders_are_listed_in_pages(client: WebClient, folder: str) -> None:
    names = sorted(f"name-{number:03}" for number in range(300))
    for name in names:
        assert client.ask("PUT", f"/v1/files/{folder}/{name}", b"").status == 201
    assert sorted(names_in(client, folder, 7)) == names
    assert sorted(names_in(client, folder)) == names
    assert client.ask("DELETE", f"/v1/folders/{folder}").json["errno"] == "ENOTEMPTY"


def test_names_of_any_bytes(client: WebClient, folder: str) -> None:
    assert client.ask("PUT", f"/v1/files/{folder}/%FF%20%25", b"odd").status == 201
    (row,) = client.ask("GET", f"/v1/folders/{folder}").json["entries"]
    assert row["href"] == "%FF%20%25"
    assert client.ask("GET", f"/v1/files/{folder}/{row['href']}").body == b"odd"


def test_names_change(client: WebClient, folder: str) -> None:
    for name in ("a", "b", "c"):
        client.ask("PUT", f"/v1/files/{folder}/{name}", name.encode())
    assert client.ask("POST", f"/v1/rename/{folder}/a?to=/{folder}/b").status == 204
    assert client.ask("GET", f"/v1/files/{folder}/b").body == b"a"
    assert client.ask("POST", f"/v1/rename/{folder}/b?to=/{folder}/c&how=new").json["errno"] == "EEXIST"
    assert client.ask("POST", f"/v1/rename/{folder}/b?to=/{folder}/c&how=exchange").status == 204
    assert [client.ask("GET", f"/v1/files/{folder}/{name}").body for name in "bc"] == [b"c", b"a"]
    assert client.ask("POST", f"/v1/link/{folder}/b?to=/{folder}/d").status == 201
    assert client.ask("GET", f"/v1/attributes/{folder}/d").json["nlink"] == 2
    assert client.ask("DELETE", f"/v1/files/{folder}/b").status == 204
    assert client.ask("GET", f"/v1/files/{folder}/d").body == b"c"
    assert client.ask("DELETE", f"/v1/files/{folder}/b").json["errno"] == "ENOENT"


def test_symbolic_links_lead_within_the_volume(client: WebClient, folder: str) -> None:
    client.ask("PUT", f"/v1/folders/{folder}/deep")
    client.ask("PUT", f"/v1/files/{folder}/target", b"found")
    assert client.ask("PUT", f"/v1/symlinks/{folder}/deep/link", b"../target").status == 201
    assert client.ask("GET", f"/v1/files/{folder}/deep/link").body == b"found"
    assert client.ask("GET", f"/v1/attributes/{folder}/deep/link?nofollow").json["target"] == "../target"
    for name, target in {"out": b"/etc/passwd", "circle": b"circle", "above": b"../../../../etc/passwd"}.items():
        client.ask("PUT", f"/v1/symlinks/{folder}/deep/{name}", target)
        assert client.ask("GET", f"/v1/files/{folder}/deep/{name}").status in (404, 409)


def test_attributes_are_set(client: WebClient, folder: str) -> None:
    client.ask("PUT", f"/v1/files/{folder}/file", b"x")
    body = b'{"mode": 416, "mtime": 1000000000000000000, "uid": 7, "gid": 8}'
    assert client.ask("PATCH", f"/v1/attributes/{folder}/file", body).status == 200
    found = client.ask("GET", f"/v1/attributes/{folder}/file").json
    assert (found["mode"], found["mtime"], found["uid"], found["gid"]) == (0o640, 10**18, 7, 8)
    assert "'mode'" in client.ask("PATCH", f"/v1/attributes/{folder}/file", b'{"mod": 1}').json["remedy"]
    assert client.ask("PATCH", f"/v1/attributes/{folder}/file", b'{"mode": true}').status == 400
    assert client.ask("PATCH", f"/v1/attributes/{folder}/file", b"[" * 60_000).status == 400


def test_extended_attributes(client: WebClient, folder: str) -> None:
    client.ask("PUT", f"/v1/files/{folder}/file", b"x")
    assert client.ask("PUT", f"/v1/xattrs/{folder}/file?name=user.colour", b"\x00red").status == 204
    assert client.ask("GET", f"/v1/xattrs/{folder}/file?name=user.colour").body == b"\x00red"
    assert client.ask("GET", f"/v1/xattrs/{folder}/file").json == {"user.colour": base64.b64encode(b"\x00red").decode()}
    assert client.ask("DELETE", f"/v1/xattrs/{folder}/file?name=user.colour").status == 204
    assert client.ask("GET", f"/v1/xattrs/{folder}/file?name=user.colour").json["errno"] == "ENODATA"
    assert client.ask("PUT", f"/v1/xattrs/{folder}/file?name=security.capability", b"x").status == 405


@pytest.mark.parametrize("path", ["..", "a/../b", "%2e%2e/x", "a//b", "a%00b", "%zz", "%"])
def test_paths_that_no_file_has_are_refused(client: WebClient, path: str) -> None:
    assert client.ask("GET", f"/v1/files/{path}").status == 400


def test_the_daemons_own_name_is_refused(client: WebClient) -> None:
    assert client.ask("PUT", "/v1/files/.kvfuse", b"x").status == 403
    assert client.ask("PUT", "/v1/folders/.kvfuse").status == 403


def test_words_that_are_not_known_are_refused(client: WebClient, folder: str) -> None:
    answer = client.ask("PUT", f"/v1/files/{folder}/x?mod=0600", b"")
    assert (answer.status, "'mode'" in answer.json["remedy"]) == (400, True)
    assert client.ask("POST", f"/v1/files/{folder}/x", b"").headers["Allow"] == "DELETE, GET, HEAD, PATCH, PUT"
    assert client.ask("GET", "/v2/files/x").status == 404
    assert client.ask("PUT", f"/v1/files/{folder}/x?mode=8", b"").status == 400


def test_a_target_may_be_a_whole_url(client: WebClient, folder: str) -> None:
    client.ask("PUT", f"/v1/files/{folder}/file", b"x")
    assert client.ask("GET", f"http://localhost/v1/files/{folder}/file").body == b"x"


def test_a_file_syncs(client: WebClient, folder: str) -> None:
    client.ask("PUT", f"/v1/files/{folder}/file", b"x")
    assert client.ask("POST", f"/v1/sync/{folder}/file").status == 204
    assert client.ask("POST", f"/v1/sync/{folder}").status == 204
