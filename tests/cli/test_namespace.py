"""kvfuse namespace, format --cache and mount -o cache, as a user has them."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_lab import CAPACITY, NO_HOLDER, Place, assert_fails, kvfuse, wait_for_end
from mounting import PATIENCE_S, wait_until

from kvfuse.cli import namespace
from kvfuse.usrbio.client.block_store import BlockStore
from kvfuse.volume.namespaces.settings import Settings
from kvfuse.volume.tenancy import namespace_attributes

AS_NOBODY = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
os.setxattr(sys.argv[1], sys.argv[2], sys.argv[3].encode())
"""


def run(*arguments: str | Path) -> str:
    done = kvfuse("namespace", *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def settings_of(path: Path) -> dict[str, Any]:
    found = json.loads(run("show", path, "--json"))
    assert found["path"] == str(path)
    assert isinstance(found["settings"], dict)
    return found["settings"]


def rows_of(place: Place) -> dict[str, Any]:
    return {row["path"]: row for row in json.loads(run("list", place.point, "--json"))}


def test_it_knows_the_settings_that_the_volume_has() -> None:
    assert tuple(namespace.MEANINGS) == tuple(Settings().shown)
    assert namespace.NAMESPACE.encode() == namespace_attributes.NAMESPACE
    assert namespace.REFUSED.encode() == namespace_attributes.REFUSED
    assert namespace.CLEAR.encode() == namespace_attributes.CLEAR


def test_clear_empties_a_cache_for_the_kernel_and_for_rings(place: Place) -> None:
    """Also what the kernel has in its caches, and a file that is open stays readable."""
    place.mount()
    llama = place.point / "llama"
    run("create", llama)
    paths = [llama / f"{number:04d}" for number in range(200)]
    for path in paths:
        path.write_bytes(path.name.encode() * 1024)
    assert all(path.read_bytes() == path.name.encode() * 1024 for path in paths)
    with BlockStore(place.point, llama) as store, paths[0].open("rb") as opened:
        assert store.exists([path.name for path in paths]).all()
        assert store.get(paths[1].name) is not None
        assert run("clear", llama) == ""
        assert not store.exists([path.name for path in paths]).any()
        assert store.get(paths[1].name) is None
        assert [path for path in paths if path.exists()] == [], "the kernel has forgotten names and attributes"
        for path in paths:
            with pytest.raises(FileNotFoundError):
                path.open("rb")
        assert list(llama.iterdir()) == []
        assert opened.read() == paths[0].name.encode() * 1024
        store.put("0001", b"new")
        assert paths[1].read_bytes() == b"new"
    wait_until(lambda: rows_of(place)[str(llama)]["used"]["files"] == 1, "what was cleared is removed")
    weights = place.point / "weights"
    run("create", weights, "--kind", "files")
    assert_fails(kvfuse("namespace", "clear", weights), 1, "is no cache, and loses no file")


def test_a_namespace_from_create_to_delete(place: Place) -> None:
    place.mount()
    llama, weights = place.point / "llama", place.point / "weights"
    assert run("create", llama, "--kind", "blocks", "--capacity", "48MiB", "--eviction", "lru") == ""
    weights.mkdir()
    run("create", weights, "--kind", "files", "--blocks", "1000")
    wanted = Settings(kind="blocks", capacity=48 << 20, eviction="lru").shown
    assert settings_of(llama) == wanted
    run("set", llama, "ttl=3600", "capacity=32MiB")
    assert settings_of(llama) == {**wanted, "ttl": 3600, "capacity": 32 << 20}
    run("set", llama, "--ttl", "1800", "--soft-pin", "true", "blocks=5000")
    assert settings_of(llama) == {**wanted, "ttl": 1800, "capacity": 32 << 20, "soft_pin": True, "blocks": 5000}
    assert "nothing to change" in kvfuse("namespace", "set", llama).stderr
    text = run("show", llama)
    assert "32MiB" in text
    assert "5000" in text

    rows = rows_of(place)
    assert rows.keys() == {str(place.point), str(llama), str(weights)}
    assert (rows[str(llama)]["settings"]["kind"], rows[str(weights)]["cache"]) == ("blocks", None)
    assert rows[str(llama)]["capacity"] == 32 << 20
    assert 32 << 20 < rows[str(place.point)]["capacity"] <= 64 << 20
    table = run("list", place.point)
    assert "hit ratio" in table
    assert "lru, adaptive" in table
    assert json.loads(run("usage", llama, "--json"))["number"] == llama.stat().st_ino
    assert "found in dram" in run("usage", llama)
    assert "files" in run("usage", place.point)

    (llama / "a").touch()
    with pytest.raises(OSError, match="cross-device") as caught:
        (llama / "a").rename(place.point / "a")
    assert caught.value.errno == errno.EXDEV
    assert_fails(kvfuse("namespace", "delete", llama), 1, r"llama: the folder is not empty: .* remove that first")
    (llama / "a").unlink()
    run("delete", llama)
    assert_fails(kvfuse("namespace", "show", llama), 1, "is no namespace; 'kvfuse namespace create' makes one")
    weights.rmdir()
    assert rows_of(place).keys() == {str(place.point)}


@pytest.mark.parametrize("killed", [False, True], ids=["unmounted", "killed"])
def test_settings_survive_the_daemon(place: Place, killed: bool) -> None:
    pid = place.mount(*NO_HOLDER)
    llama = place.point / "models" / "llama"
    llama.parent.mkdir()
    run("create", llama, "--ttl", "60")
    run("set", place.point, "eviction=arc")
    run("set", llama, "capacity=1MiB")
    if killed:
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
    else:
        assert kvfuse("umount", place.point).returncode == 0
    place.mount()
    assert (settings_of(llama)["ttl"], settings_of(llama)["capacity"]) == (60, 1 << 20)
    assert settings_of(place.point)["eviction"] == "arc"
    assert str(llama) in rows_of(place)
    assert kvfuse("umount", place.point).returncode == 0
    assert kvfuse("fsck", place.volume, "--verify").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity", "1GiB"], "capacity 1GiB is more than the volume has: at most 64MiB"),
        (["--eviction", "lru,arc"], "eviction is one of .*lru"),
        (["--ttl", "-1"], "ttl is a number of seconds, 0 or more"),
        (["--low-water", "0.99"], "low_water 0.99 is above high_water 0.98"),
    ],
)
def test_bad_settings_say_what_is_allowed(place: Place, arguments: list[str], message: str) -> None:
    place.mount()
    new, other = place.point / "new", place.point / "other"
    assert_fails(kvfuse("namespace", "create", new, *arguments), 1, f"{new}: {message}")
    assert not new.exists(), "a folder that was made for it is removed again"
    run("create", other)
    option, value = arguments
    word = f"{option.removeprefix('--').replace('-', '_')}={value}"
    assert_fails(kvfuse("namespace", "set", other, word), 1, f"{other}: {message}")


def test_what_is_no_namespace(place: Place) -> None:
    place.mount()
    plain, file = place.point / "plain", place.point / "file"
    plain.mkdir()
    file.touch()
    for path in (plain, file):
        for command in (["show", path], ["usage", path], ["delete", path], ["set", path, "ttl=1"]):
            assert_fails(kvfuse("namespace", *command), 1, f"{path} is no namespace")
    assert_fails(kvfuse("namespace", "create", place.point), 1, "is a namespace already")
    assert_fails(kvfuse("namespace", "create", plain / "a" / "b"), 1, "No such file or directory")
    assert_fails(kvfuse("namespace", "show", place.base), 5, "is not in a kvfuse mount")
    assert_fails(kvfuse("namespace", "list", plain), 5, "is not a mount point")
    (plain / "a").touch()
    assert_fails(kvfuse("namespace", "create", plain), 1, "not empty: a namespace begins with an empty folder")


def test_others_may_not_change_it(place: Place) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be somebody else")
    place.base.chmod(0o755)
    place.mount("-o", "allow_other")
    llama = place.point / "llama"
    run("create", llama)
    llama.chmod(0o777)

    def as_nobody(path: Path) -> str:
        command = [sys.executable, "-c", AS_NOBODY, str(path), namespace.NAMESPACE, "kind=files"]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False).stderr

    assert "PermissionError: [Errno 1]" in as_nobody(llama)
    assert settings_of(llama)["kind"] == "blocks"
    os.chown(llama, 65534, 65534)
    assert as_nobody(llama) == ""
    assert settings_of(llama)["kind"] == "files"


# -- the root -----------------------------------------------------------------------------------------


def kind_of_root(place: Place) -> str:
    return str(settings_of(place.point)["kind"])


def test_a_volume_that_mount_makes_keeps_that_it_is_a_cache(place: Place) -> None:
    place.mount("-o", "cache,eviction=lru")
    assert os.listxattr(place.point) == [namespace.NAMESPACE]
    assert kvfuse("umount", place.point).returncode == 0
    place.mount()
    assert (kind_of_root(place), settings_of(place.point)["eviction"]) == ("blocks", "lru")


def test_format_makes_a_cache(place: Place) -> None:
    assert kvfuse("format", place.volume, "--capacity", "64MiB", "--cache").returncode == 0
    place.mount()
    assert kind_of_root(place) == "blocks"


def test_what_a_mount_makes_a_cache_stays_one(place: Place) -> None:
    """Its files are blocks from then on, and a mount that wants files is refused."""
    place.mount()
    (place.point / "folder").mkdir()
    (place.point / "folder" / "a").write_bytes(b"a" * 5000)
    (place.point / "empty").touch()
    assert kvfuse("umount", place.point).returncode == 0
    place.mount("-o", "cache")
    assert kind_of_root(place) == "blocks"
    found = json.loads(kvfuse("stats", place.point, "--json").stdout)["conversion"]
    assert (found["kept"] + found["copied"], found["files"], found["evicted"]) == (1, 1, 0)
    assert (place.point / "folder" / "a").read_bytes() == b"a" * 5000
    assert kvfuse("umount", place.point).returncode == 0
    done = kvfuse("mount", place.volume, place.point, "-o", "kind=files")
    assert_fails(done, 2, "the root of .* has blocks, which do not become files")
    place.mount()
    assert kind_of_root(place) == "blocks"
    assert (place.point / "folder" / "a").read_bytes() == b"a" * 5000
    assert kvfuse("umount", place.point).returncode == 0
    assert kvfuse("fsck", place.volume, "--verify").returncode == 0


def test_an_option_of_a_mount_holds_for_it_alone(place: Place) -> None:
    place.mount()
    assert (kind_of_root(place), os.listxattr(place.point)) == ("files", [])
    assert_fails(kvfuse("namespace", "set", place.point, "kind=cache"), 1, "mount -o cache'")
    assert kvfuse("umount", place.point).returncode == 0
    place.mount("-o", "ttl=60")
    assert settings_of(place.point)["ttl"] == 60
    assert kvfuse("umount", place.point).returncode == 0
    place.mount()
    assert settings_of(place.point)["ttl"] == 0
    assert kvfuse("umount", place.point).returncode == 0
    done = kvfuse("mount", place.volume, place.point, "-o", f"{CAPACITY},high_water=0.5")
    assert_fails(done, 2, "the root's namespace, .* low_water 0.96 is above high_water 0.5")
