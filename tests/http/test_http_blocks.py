"""Blocks over HTTP: what is stored is read, by one or many, and what is no body of blocks is refused."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator

import pytest
from http_lab import PACKED, WebClient, client_of, web_server

from kvfuse.http.block_bodies import build_body

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebClient]:
    folder = tmp_path_factory.mktemp("http")
    with (
        web_server(folder, "kind=blocks", "http.anonymous=0:0") as server,
        client_of(server.address) as client,
    ):
        yield client


def test_many_blocks_are_stored_found_and_removed(client: WebClient) -> None:
    keys = [b"many-%d" % number for number in range(50)] + [b"with/slash", b"%percent", b"\xff\x00binary"]
    blocks = [os.urandom(1 + number * 997) for number in range(len(keys))]
    assert client.put_blocks("", keys, blocks) == [0] * len(keys)
    assert client.get_blocks("", [*keys, b"absent"]) == [*blocks, None]
    found = client.ask("POST", "/v1/batch/exists/", build_body([b"absent", keys[-1], keys[0]]), PACKED)
    assert found.statuses == [errno.ENOENT, 0, 0]
    assert client.ask("POST", "/v1/batch/prefetch/", build_body(keys), PACKED).statuses == [0] * len(keys)
    gone = client.ask("POST", "/v1/batch/delete/", build_body([*keys[:10], b"absent"]), PACKED)
    assert gone.statuses == [0] * 10 + [errno.ENOENT]
    assert client.get_blocks("", keys) == [None] * 10 + blocks[10:]


def test_keys_may_be_json(client: WebClient) -> None:
    client.put_blocks("", [b"chain-0", b"chain-1", b"chain-3"], [b"a", b"b", b"c"])
    keys = '{"keys": ["chain-0", "chain-1", "chain-2", "chain-3"]}'
    assert client.ask("POST", "/v1/batch/longest_prefix/", keys, JSON).json == {"count": 2}
    assert client.ask("POST", "/v1/batch/exists/", keys, JSON).json == {"exists": [True, True, False, True]}


def test_one_block(client: WebClient) -> None:
    block = random.Random(7).randbytes(3 << 20)
    assert client.ask("PUT", "/v1/blocks/one", block).status == 204
    assert client.ask("GET", "/v1/blocks/one").body == block
    head = client.ask("HEAD", "/v1/blocks/one")
    assert (head.status, head.headers["Content-Length"]) == (200, str(len(block)))
    assert client.ask("GET", "/v1/files/one", headers={"Range": "bytes=5-9"}).body == block[5:10]
    assert client.ask("DELETE", "/v1/blocks/one").status == 204
    missing = client.ask("GET", "/v1/blocks/one")
    assert (missing.status, missing.json["errno"]) == (404, "ENOENT")
    assert missing.headers["Content-Type"] == "application/problem+json"


def test_a_block_is_replaced_by_another_size(client: WebClient) -> None:
    for size in (10, 200_000, 3):
        assert client.ask("PUT", "/v1/blocks/sizes", b"x" * size).status == 204
        assert client.ask("GET", "/v1/blocks/sizes").body == b"x" * size


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"KVB1",
        build_body([b"key"])[:-1],
        build_body([b"key"]) + b"x",
        b"KVB2" + build_body([b"key"])[4:],
        build_body([b"key"]).replace(b"\x01\0\0\0", b"\xff\xff\xff\xff"),
        build_body([b""]),
        build_body([b"k" * 256]),
        build_body([b"key"])[:16] + b"\xff" * 16 + b"key",
    ],
    ids=["empty", "short", "cut", "longer", "magic", "count", "no key", "long key", "sizes"],
)
@pytest.mark.parametrize("operation", ["exists", "get", "put", "delete"])
def test_what_is_no_body_is_refused(client: WebClient, operation: str, body: bytes) -> None:
    answer = client.ask("POST", f"/v1/batch/{operation}/", body, PACKED)
    assert answer.status == 400, answer
    assert answer.json["title"]


def test_more_than_one_answer_may_have_is_refused(client: WebClient) -> None:
    keys = [b"large-%d" % number for number in range(5)]
    for key in keys:
        assert client.put_blocks("", [key], [b"l" * (15 << 20)]) == [0]
    answer = client.ask("POST", "/v1/batch/get/", build_body(keys), PACKED)
    assert (answer.status, "67108864" in answer.json["title"]) == (413, True)
    assert client.get_blocks("", keys[:2]) == [b"l" * (15 << 20)] * 2
