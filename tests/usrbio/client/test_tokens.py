"""A namespace with a token: whom it lets in, through every door, and what all others learn of it: nothing."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from cli_lab import assert_fails, kvfuse
from mounting import KvfuseMount, temporary_mount
from posix_calls import GROUP, USER, as_user, fails, opened, permissions

from kvfuse.errors import Disconnected
from kvfuse.usrbio.client import BlockStore, Follower, NewsKind, connect
from kvfuse.usrbio.protocol.wire import Access, Request

pytestmark = pytest.mark.root

OWNER = 12000
TOKEN = "correct-horse-battery-staple"
OTHER = "another-horse-battery-staple"
BLOCK = os.urandom(64 << 10)
SETTINGS = "user.kvfuse.namespace"


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(["capacity=96MiB,kind=blocks,admission=all,allow_other,cache.tier_size=16MiB"]) as mount:
        yield mount


@pytest.fixture
def tenant(mount: KvfuseMount, tmp_path: Path) -> Path:
    """The namespace of user OWNER, with a token and a block "a"."""
    path = mount.point / tmp_path.name
    path.mkdir()
    os.setxattr(path, SETTINGS, b"kind=blocks")
    os.chown(path, OWNER, OWNER)
    set_token(path, TOKEN)
    with BlockStore(mount.point, path) as store:
        store.put("a", BLOCK)
    return path


def set_token(path: Path, token: str) -> None:
    os.setxattr(path, f"{SETTINGS}.token", token.encode())


def store_of(folder: Path, token: str | os.PathLike[str] | None = None) -> BlockStore:
    return BlockStore(folder.parent, folder, token=token, create=False)


def found_by(store: BlockStore) -> list[Any]:
    """What each way of asking for the block "a" says."""
    view = store.get("a")
    content = bytearray(len(BLOCK))
    return [
        store.exists(["a", "b"]).tolist(),
        store.longest_prefix(["a", "b"]),
        bytes(view) if view is not None else None,
        store.get_into("a", content),
        store.prefetch(["a"]).tolist(),
    ]


ALL_OF_IT = [[True, False], 1, BLOCK, len(BLOCK), [True]]
NOTHING = [[False, False], 0, None, None, [False]]


def test_who_has_the_token_may_all_through_rings(mount: KvfuseMount, tenant: Path) -> None:
    with as_user(), store_of(tenant, TOKEN) as store:
        assert found_by(store) == ALL_OF_IT
        store.put("b", b"mine")
        assert store.delete("a")
        assert store.exists(["a", "b"]).tolist() == [False, True]
        with fails(errno.EACCES):
            os.stat(tenant / "b")
    assert (tenant / "b").read_bytes() == b"mine"
    assert (tenant / "b").stat().st_uid == USER, "the tenant is who the socket says"


def test_the_owner_and_root_need_none(mount: KvfuseMount, tenant: Path) -> None:
    with store_of(tenant) as store:
        assert found_by(store) == ALL_OF_IT
    with as_user(OWNER, OWNER), store_of(tenant) as store:
        assert found_by(store) == ALL_OF_IT
        assert (tenant / "a").read_bytes() == BLOCK
        store.put("b", b"owner's")


@pytest.mark.parametrize("token", [None, OTHER, TOKEN[:-1], TOKEN + "e"], ids=["none", "another", "short", "long"])
def test_others_learn_nothing_from_rings(mount: KvfuseMount, tenant: Path, token: str | None) -> None:
    with opened(tenant, os.O_PATH) as folder, opened(tenant / "a") as file, as_user():
        with connect(mount.point, token=token) as client:
            for request, argument, descriptor in (
                (Request.OPEN_NAMESPACE, 0o644, folder),
                (Request.ADD_FILE, Access.READ | Access.WRITE, file),
            ):
                with pytest.raises(OSError, match=f"inode {os.fstat(descriptor).st_ino} was removed") as caught:
                    client.session.request(request, argument, descriptors=[descriptor])
                assert caught.value.errno == errno.ESTALE
        expected = FileNotFoundError if token else PermissionError  # which the kernel says of the folder
        with pytest.raises(expected):
            store_of(tenant, token)
        with pytest.raises(expected):
            Follower(tenant, token=token)
    rows = json.loads((mount.point / ".kvfuse" / "stats").read_text())["namespaces"]
    (failures,) = [row["measures"]["failures"] for row in rows if row["path"] == f"/{tenant.name}"]
    assert failures["token"] >= 2


def test_others_learn_nothing_from_files(tenant: Path) -> None:
    assert permissions(tenant) == 0o700
    asks: list[Callable[[Path], object]] = [
        os.stat, os.listdir, os.unlink, os.rmdir, lambda path: os.open(path, os.O_RDONLY),
        lambda path: os.open(path, os.O_CREAT | os.O_WRONLY), lambda path: os.getxattr(path, SETTINGS),
        lambda path: os.link(path, tenant.parent / "link"),
    ]  # fmt: skip
    with as_user():
        for name in ("a", "absent", "absent/a"):
            for ask in asks:
                with fails(errno.EACCES):
                    ask(tenant / name)
        with fails(errno.EACCES):
            os.listdir(tenant)
        with fails(errno.EACCES):
            os.getxattr(tenant, SETTINGS)


def test_the_folder_stays_closed(tenant: Path) -> None:
    """Its owner may let in a group, through both doors, but not everybody."""
    with as_user(OWNER, OWNER):
        for mode in (0o701, 0o707, 0o777, 0o1770 | 0o004):
            with fails(errno.EPERM):
                tenant.chmod(mode)
    os.chown(tenant, OWNER, GROUP)
    with as_user(), fails(errno.EACCES):
        os.stat(tenant / "a")
    tenant.chmod(0o750)
    with as_user(), store_of(tenant) as store:
        assert os.listdir(tenant) == ["a"]
        assert store.exists(["a"]).all()
        with pytest.raises(PermissionError):
            store.put("b", b"")
    set_token(tenant, "")
    tenant.chmod(0o755)
    with as_user(12345, 12345), store_of(tenant) as store:
        assert found_by(store) == ALL_OF_IT


def test_a_folder_that_gets_a_token_is_closed_at_once(mount: KvfuseMount, tenant: Path) -> None:
    """Also for whom the kernel, or a ring, let in before; but who has the new one goes on."""
    set_token(tenant, "")
    tenant.chmod(0o777)
    with as_user():
        others, friend = store_of(tenant), store_of(tenant, OTHER)
        os.stat(tenant / "a")
    with others, friend, Follower(tenant) as follower:
        assert found_by(others) == found_by(friend) == ALL_OF_IT
        set_token(tenant, OTHER)
        assert found_by(friend) == ALL_OF_IT
        assert found_by(others) == NOTHING
        assert others.delete_many(["a", "b"]).tolist() == [False, False]
        with fails(errno.ESTALE):
            others.put("a", b"x")
        assert found_by(friend) == ALL_OF_IT
        with as_user(), fails(errno.EACCES):
            os.stat(tenant / "a")
        assert next(iter(follower)).names == [b"a"], "root follows"
        set_token(tenant, TOKEN)
        assert found_by(friend) == NOTHING, "the token was changed"


def test_a_former_owner_is_out(mount: KvfuseMount, tenant: Path) -> None:
    with as_user(OWNER, OWNER):
        former = store_of(tenant)
    with former:
        assert found_by(former) == ALL_OF_IT
        os.chown(tenant, OWNER + 1, OWNER + 1)
        assert found_by(former) == NOTHING
        os.chown(tenant, OWNER, OWNER)
        assert found_by(former) == ALL_OF_IT


def test_a_follower_without_the_token_hears_no_more(mount: KvfuseMount, tenant: Path) -> None:
    with as_user(), Follower(tenant, token=TOKEN) as follower:
        news = iter(follower)
        assert (next(news), next(news).kind) == ((NewsKind.PRESENT, [b"a"]), NewsKind.READY)
        os.seteuid(0)
        set_token(tenant, OTHER)
        (tenant / "secret").write_bytes(BLOCK)
        with pytest.raises(Disconnected):
            next(news)


def test_the_nearest_token_above_holds(mount: KvfuseMount, tenant: Path) -> None:
    inner, own, plain = tenant / "inner", tenant / "own", tenant / "plain"
    for path in (inner, own, plain):
        path.mkdir()
    os.setxattr(inner, SETTINGS, b"kind=blocks")
    os.setxattr(own, SETTINGS, f"kind=blocks token={OTHER}".encode())
    expected = {(inner, TOKEN): True, (own, OTHER): True, (plain, TOKEN): True}
    for path in (inner, own, plain):
        with opened(path, os.O_RDONLY) as descriptor:
            for token in (TOKEN, OTHER):
                with as_user(), connect(mount.point, token=token) as client:
                    is_let_in = expected.get((path, token), False)
                    with nullcontext() if is_let_in else fails(errno.ESTALE):
                        client.session.request(Request.OPEN_NAMESPACE, 0, descriptors=[descriptor])
    set_token(tenant, "")
    with opened(inner, os.O_RDONLY) as descriptor, as_user(), connect(mount.point) as client:
        client.session.request(Request.OPEN_NAMESPACE, 0, descriptors=[descriptor])


def test_a_connection_shows_a_few_tokens(mount: KvfuseMount, tenant: Path) -> None:
    with connect(mount.point) as client:
        for number in range(16):
            client.show_token(f"{number:016}")
        with pytest.raises(ValueError, match="does not take the token"):
            client.show_token(TOKEN)
    for token in ("short", "with a space in it", "ümläute-sind-zu-fein", "x" * 300):
        with pytest.raises(ValueError, match="does not take the token"):
            connect(mount.point, token=token)
        with fails(errno.EINVAL):
            set_token(tenant, token)
        assert token not in os.getxattr(tenant, f"{SETTINGS}.refused").decode()


def test_tokens_come_from_where_the_client_says(
    mount: KvfuseMount, tenant: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = mount.point / "token"
    file.write_text(f"{OTHER}\n{TOKEN}\n")
    given: list[tuple[str | Path | None, dict[str, str]]] = [
        (TOKEN, {}), (file, {}), (None, {"KVFUSE_TOKEN": f"{OTHER} {TOKEN}"}), (None, {"KVFUSE_TOKEN_FILE": str(file)}),
    ]  # fmt: skip
    for token, variables in given:
        with monkeypatch.context() as patch, as_user():
            for name, value in variables.items():
                patch.setenv(name, value)
            with store_of(tenant, token) as store, connect(mount.point) as client:
                assert found_by(store) == ALL_OF_IT
                if variables:
                    BlockStore(client, tenant, create=False).close()
                else:
                    BlockStore(client, tenant, create=False, token=token).close()
    with pytest.raises(FileNotFoundError):
        connect(mount.point, token=tmp_path / "absent")


def test_a_client_shows_its_token_again_after_a_remount() -> None:
    with temporary_mount(["capacity=64MiB,kind=blocks,allow_other"]) as mount:
        folder = mount.point / "tenant"
        folder.mkdir()
        os.setxattr(folder, SETTINGS, f"kind=blocks token={TOKEN}".encode())
        with as_user():
            store = store_of(folder, TOKEN)
        with store:
            store.put("a", BLOCK)
            mount.terminate()
            mount.mount()
            assert permissions(folder) == 0o700
            with as_user():
                store.client.reconnect()
                assert found_by(store) == ALL_OF_IT
                with pytest.raises(FileNotFoundError):
                    store_of(folder, OTHER)


def test_nobody_is_shown_a_token(mount: KvfuseMount, tenant: Path) -> None:
    said = kvfuse("namespace", "set", tenant, "token=generate", "ttl=60")
    token = said.stdout.strip()
    assert (said.returncode, said.stderr, len(token)) == (0, "", 22)
    with as_user(), store_of(tenant, token) as store:
        assert store.exists(["a"]).all()
    shown = [
        os.getxattr(tenant, SETTINGS).decode(),
        os.getxattr(tenant, f"{SETTINGS}.token").decode(),
        *[kvfuse("namespace", *words).stdout for words in (("show", tenant), ("list", mount.point, "--json"))],
        *[(mount.point / ".kvfuse" / name).read_text() for name in ("stats", "config")],
        mount.log.read_text(),
    ]
    assert "token=set" in shown[0].split()
    assert shown[1] == "set"
    text = "".join(shown)
    assert token not in text
    assert TOKEN not in text
    assert "b1." not in text, "nor its lock"
    row = next(row for row in json.loads(shown[3]) if row["path"] == str(tenant))
    assert row["settings"]["token"] == "set"


def test_the_command_takes_tokens(mount: KvfuseMount, tenant: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(OTHER + "\n")
    said = kvfuse("namespace", "set", tenant, f"token=@{file}")
    assert (said.stdout, said.stderr) == ("", "")
    with as_user(), store_of(tenant, OTHER) as store:
        assert store.exists(["a"]).all()
    made = kvfuse("namespace", "create", tenant / "inner", "--token", "generate").stdout.strip()
    assert len(made) == 22
    assert permissions(tenant / "inner") == 0o700
    assert_fails(kvfuse("namespace", "set", tenant, "token=short"), 1, "a token is 16 to 256 printable characters")
    assert_fails(kvfuse("namespace", "set", tenant, "token=@/absent"), 1, "no token is read from /absent")
    assert_fails(kvfuse("namespace", "set", mount.point, f"token={TOKEN}"), 1, "the root of a volume has no token")
    kvfuse("namespace", "set", tenant, "token=")
    assert os.getxattr(tenant, f"{SETTINGS}.token") == b"none"
