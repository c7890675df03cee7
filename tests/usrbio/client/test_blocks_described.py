"""Descriptors: what the blocks of a namespace are. The first writer pins one, clients with another one are refused."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_lab import assert_fails, kvfuse
from mounting import KvfuseMount, temporary_mount
from posix_calls import as_user, fails

from kvfuse.usrbio.client import BlockStore

LLAMA: dict[str, str | int] = {"model": "Llama 3", "dtype": "bf16", "page_size": 16, "version": 1}
SETTINGS = "user.kvfuse.namespace"


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(["capacity=64MiB,cache,admission=all,allow_other"]) as mount:
        yield mount


@pytest.fixture
def name(tmp_path: Path) -> str:
    """Of a folder that is not there yet."""
    return tmp_path.name


def store_of(mount: KvfuseMount, name: str, descriptor: dict[str, str | int] | None, **more: Any) -> BlockStore:
    return BlockStore(mount.point, name, descriptor=descriptor, **more)


def pinned(mount: KvfuseMount, name: str) -> object:
    text = os.getxattr(mount.point / name, f"{SETTINGS}.descriptor").decode()
    assert " " not in text
    return json.loads(text) if text else None


def failures(mount: KvfuseMount, name: str) -> dict[str, int]:
    rows = json.loads((mount.point / ".kvfuse" / "stats").read_text())["namespaces"]
    found: dict[str, int] = next(row for row in rows if row["path"] == f"/{name}")["measures"]["failures"]
    return found


def test_the_first_writer_pins_it_and_another_one_is_refused(mount: KvfuseMount, name: str) -> None:
    with store_of(mount, name, LLAMA) as store:
        store.put("a", b"bf16")
        assert pinned(mount, name) == LLAMA
        with pytest.raises(FileExistsError, match="dtype is 'bf16', not 'fp8', ranks is absent, not 8"):
            store_of(mount, name, {**LLAMA, "dtype": "fp8", "ranks": 8})
        with pytest.raises(FileExistsError, match="version is 1, not 0"):
            store_of(mount, name, {**LLAMA, "version": 0})
        assert failures(mount, name)["descriptor"] == 2
        with store_of(mount, name, dict(reversed(LLAMA.items()))) as same, store_of(mount, name, None) as unchecked:
            assert same.exists(["a"]).all()
            assert unchecked.exists(["a"]).all()


def test_a_later_version_clears_and_ends_the_former(mount: KvfuseMount, name: str) -> None:
    with store_of(mount, name, LLAMA) as former, store_of(mount, name, {**LLAMA}) as other:
        former.put_many(["a", "b"], [b"old", b"old"])
        assert other.get_many(["a"])[0] == b"old"
        with store_of(mount, name, {**LLAMA, "version": 2}) as later:
            assert not later.exists(["a", "b"]).any()
            assert list((mount.point / name).iterdir()) == []
            later.put("a", b"new")
            for store in (former, other):
                assert store.get("a") is None
                assert not store.exists(["a"]).any()
                with fails(errno.ESTALE):
                    store.put("a", b"old")
            assert later.get("a") == b"new"
    with pytest.raises(FileExistsError, match="version is 2, not 1"):
        store_of(mount, name, LLAMA)


def test_one_of_two_who_are_first_is_refused(mount: KvfuseMount, name: str) -> None:
    os.mkdir(mount.point / name)
    os.setxattr(mount.point / name, SETTINGS, b"kind=cache")
    barrier, won, lost = threading.Barrier(4), list[str](), list[str]()

    def open_one(dtype: str) -> None:
        barrier.wait()
        try:
            store_of(mount, name, {"dtype": dtype}).close()
            won.append(dtype)
        except FileExistsError:
            lost.append(dtype)

    threads = [threading.Thread(target=open_one, args=(f"d{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 3)
    assert pinned(mount, name) == {"dtype": won[0]}


@pytest.mark.root
def test_readers_do_not_pin_and_others_learn_nothing(mount: KvfuseMount, name: str) -> None:
    folder = mount.point / name
    folder.mkdir()
    os.setxattr(folder, SETTINGS, b"kind=cache")
    with as_user(), store_of(mount, name, {"dtype": "fp8"}) as reader:
        assert pinned(mount, name) is None
        os.seteuid(0)
        with store_of(mount, name, LLAMA) as writer:
            writer.put("a", b"bf16")
            assert reader.get("a") is None, "its blocks are others"
            assert writer.get("a") == b"bf16"
    with as_user(), pytest.raises(FileExistsError):
        store_of(mount, name, {**LLAMA, "version": 2})
    os.setxattr(folder, f"{SETTINGS}.token", b"correct-horse-battery-staple")
    with as_user(), pytest.raises(FileNotFoundError) as caught:
        store_of(mount, name, {"dtype": "fp8"}, token="another-horse-battery-staple", create=False)
    assert "bf16" not in str(caught.value)
    with as_user(), store_of(mount, name, LLAMA, token="correct-horse-battery-staple") as store:
        assert store.exists(["a"]).all()


def test_a_part_of_a_namespace_has_none_of_its_own(mount: KvfuseMount, name: str) -> None:
    (mount.point / name).mkdir()
    with pytest.raises(OSError, match="part of a namespace, not one of its own") as caught:
        store_of(mount, name, LLAMA)
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(OSError, match="strings and integers"):
        store_of(mount, f"{name}-other", {"dtype": 1.5})  # type: ignore[dict-item]


def test_the_command_sets_and_clears(mount: KvfuseMount, name: str) -> None:
    folder = mount.point / name
    text = json.dumps(LLAMA)
    assert kvfuse("namespace", "create", folder, "--descriptor", text).returncode == 0
    with store_of(mount, name, LLAMA) as store:
        store.put("a", b"bf16")
    other = json.dumps({**LLAMA, "dtype": "fp8"})
    assert_fails(kvfuse("namespace", "set", folder, f"descriptor={other}"), 1, "dtype is 'bf16', not 'fp8'")
    assert_fails(kvfuse("namespace", "set", folder, "descriptor="), 1, "dtype is 'bf16', not absent")
    assert (folder / "a").exists()
    assert kvfuse("namespace", "set", folder, f"descriptor={other}", "--clear").returncode == 0
    assert not (folder / "a").exists()
    assert "fp8" in kvfuse("namespace", "show", folder).stdout
    assert_fails(kvfuse("namespace", "set", folder, "descriptor=[]"), 1, "a JSON object of strings and integers")
    weights = mount.point / f"{name}-weights"
    kvfuse("namespace", "create", weights, "--kind", "files", "--descriptor", text)
    assert_fails(kvfuse("namespace", "set", weights, f"descriptor={other}", "--clear"), 1, "loses no file")


def test_it_survives_a_remount() -> None:
    with temporary_mount(["capacity=64MiB,cache"]) as mount, store_of(mount, "llama", LLAMA) as store:
        mount.kill()
        mount.mount()
        assert pinned(mount, "llama") == LLAMA
        store.client.reconnect()
        store.put("a", b"bf16")
        with pytest.raises(FileExistsError):
            store_of(mount, "llama", {"dtype": "fp8"})
