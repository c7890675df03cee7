"""The CSI node plug-in over its socket, as a kubelet calls it, and a real mount."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from csi_lab import VOLUME, PluginNode, names_in, plugin_node
from mounting import stopped, wait_until

from kvfuse import __version__
from kvfuse.cli.namespace import read_settings
from kvfuse.usrbio.client.block_store import BlockStore
from kvfuse_kubernetes.csi.csi_messages import messages

pytestmark = pytest.mark.root
LLAMA = f"{VOLUME}/llama"
FILE_SIZE = 64 << 10
"""a multiple of the slots, so that files of it fill a quota to the last"""


@pytest.fixture
def node() -> Iterator[PluginNode]:
    with plugin_node() as node:
        yield node


def code_of(error: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    code = error.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


def fill(folder: Path) -> int:
    """Files that fit, each of FILE_SIZE."""
    for number in range(10_000):
        try:
            (folder / f"{number}").write_bytes(bytes(FILE_SIZE))
        except OSError as error:
            assert error.errno == errno.EDQUOT
            (folder / f"{number}").unlink(missing_ok=True)
            return number
    raise AssertionError("there is no end")


def test_who_it_is(node: PluginNode) -> None:
    found = node.call("GetPluginInfo")
    assert (found.name, found.vendor_version) == ("csi.kvfuse", __version__)
    assert node.call("Probe").ready.value
    assert node.call("NodeGetInfo").node_id == "node-1"
    assert [row.rpc.type for row in node.call("NodeGetCapabilities").capabilities] == [2, 4]
    said = node.call("GetInfo", node.registration)
    assert (said.type, said.name, said.endpoint) == ("CSIPlugin", "csi.kvfuse", str(node.endpoint))
    assert "1.0.0" in said.supported_versions
    assert {path.stat().st_mode & 0o777 for path in (node.endpoint, node.registration)} == {0o600}


def test_it_ends_where_the_kubelet_refuses_it(node: PluginNode) -> None:
    """A DaemonSet starts it again."""
    node.call("NotifyRegistrationStatus", node.registration, plugin_registered=True)
    node.call("NotifyRegistrationStatus", node.registration, plugin_registered=False, error="no such version")
    assert node.wait_for_end() == 1
    assert "no such version" in node.log.read_text()
    node.start()


def test_a_persistent_volume_is_a_namespace(node: PluginNode) -> None:
    first = node.publish("pod-1", LLAMA, {"capacity": "16Mi", "mode": "0750"})
    assert node.publish("pod-1", LLAMA, {"capacity": "16Mi"}) == first, "again, as a kubelet may"
    second = node.publish("pod-2", LLAMA, read_only=True)
    assert node.binds() == [str(first), str(second)], "one each"
    (first / "a").write_bytes(b"hello")
    assert (node.mount.point / "llama" / "a").read_bytes() == (second / "a").read_bytes() == b"hello"
    with pytest.raises(OSError, match="Read-only"):
        (second / "b").touch()
    settings = read_settings(node.mount.point / "llama")
    assert settings is not None
    assert (settings["capacity"], settings["kind"]) == (str(16 << 20), "files")
    assert first.stat().st_mode & 0o777 == 0o750
    for _ in range(2):
        node.unpublish("pod-1", LLAMA)
        assert not first.exists()
    assert node.binds() == [str(second)]
    node.unpublish("pod-2", LLAMA)
    assert (node.mount.point / "llama" / "a").read_bytes() == b"hello", "it stays"
    again = node.publish("pod-3", LLAMA, {"capacity": "8Mi"})
    assert (again / "a").read_bytes() == b"hello"
    assert (read_settings(again) or {})["capacity"] == str(8 << 20), "what the volume says now"


def test_binds_have_the_flags_of_the_mount(node: PluginNode) -> None:
    first = node.publish("pod-1", LLAMA)
    subprocess.run(["mount", "-o", "remount,bind,noexec", node.mount.point], check=True)
    second = node.publish("pod-2", LLAMA)
    always = os.ST_NOSUID | os.ST_NODEV
    shown = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_RDONLY
    assert os.statvfs(first).f_flag & shown == always
    assert os.statvfs(second).f_flag & shown == always | os.ST_NOEXEC
    subprocess.run(["mount", "-o", "remount,bind,exec", node.mount.point], check=True)
    third = node.publish("pod-3", LLAMA, read_only=True, flags=["noexec"])
    assert os.statvfs(third).f_flag & shown == shown


def test_a_pods_own_volume_ends_with_it(node: PluginNode) -> None:
    own = node.publish_own("pod-1", "csi-1", capacity="4Mi")
    other = node.publish_own("pod-2", "csi-2")
    (own / "folder").mkdir()
    (own / "folder" / "a").write_bytes(b"mine")
    (own / "link").symlink_to("/etc")
    (other / "b").write_bytes(b"theirs")
    assert (names_in(own), names_in(other)) == ({"folder", "link"}, {"b"}), "neither sees the other"
    assert names_in(node.mount.point / "ephemeral") == {"csi-1", "csi-2"}
    node.unpublish("pod-1", "csi-1")
    assert names_in(node.mount.point / "ephemeral") == {"csi-2"}
    assert (other / "b").read_bytes() == b"theirs"
    assert Path("/etc/passwd").exists()


def test_a_volume_holds_its_capacity_and_not_a_slot_more(node: PluginNode) -> None:
    size = 16 << 20
    free = os.statvfs(node.mount.point).f_bfree
    own = node.publish_own("pod-1", "csi-1", capacity="16Mi")
    count = fill(own)
    assert count == size // FILE_SIZE, "all of it, and nothing more"
    room = node.stats("pod-1", "csi-1").usage[0]
    assert (room.total, room.used, room.available, room.unit) == (size, size, 0, 1)
    (own / "0").unlink()
    wait_until(lambda: node.stats("pod-1", "csi-1").usage[0].available == FILE_SIZE, "the room of a file")
    node.unpublish("pod-1", "csi-1")
    wait_until(lambda: os.statvfs(node.mount.point).f_bfree >= free, "all of the room")


def test_a_cache_makes_room(node: PluginNode) -> None:
    """Of kind blocks: nobody gets an error, and there is never more than the capacity."""
    own = node.publish_own("pod-1", "csi-1", capacity="8Mi", kind="blocks")
    for number in range(300):
        (own / f"{number}").write_bytes(bytes(FILE_SIZE))
        assert number % 50 or node.stats("pod-1", "csi-1").usage[0].used <= 8 << 20
    assert (own / "299").stat().st_size == FILE_SIZE


def test_a_volume_that_is_not_mounted_is_waited_for(node: PluginNode) -> None:
    with pytest.raises(grpc.RpcError, match=r"no kvfuse mount at .*/volumes/other/mnt") as caught:
        node.publish("pod-1", "other/llama")
    assert code_of(caught) == grpc.StatusCode.UNAVAILABLE
    node.mount.unmount()
    with pytest.raises(grpc.RpcError, match=f"no kvfuse mount at {node.mount.point}") as caught:
        node.publish("pod-1", LLAMA)
    assert code_of(caught) == grpc.StatusCode.UNAVAILABLE
    assert node.binds() == []
    node.mount.mount()
    (node.publish("pod-1", LLAMA) / "a").touch()


def test_pods_keep_their_files_when_the_plugin_is_killed(node: PluginNode) -> None:
    own, shared = node.publish_own("pod-1", "csi-1"), node.publish("pod-2", LLAMA)
    with (own / "a").open("wb") as opened:
        opened.write(b"before ")
        assert node.end(signal.SIGKILL) == -signal.SIGKILL
        (shared / "b").write_bytes(b"while there is none")
        opened.write(b"and after")
        opened.flush()
        node.start()
        assert (own / "a").read_bytes() == b"before and after"
    assert node.publish("pod-2", LLAMA) == shared
    node.unpublish("pod-1", "csi-1")
    node.unpublish("pod-2", LLAMA)
    assert node.binds() == []
    assert names_in(node.mount.point / "ephemeral") == set()


def test_a_dead_mount_lets_pods_end(node: PluginNode) -> None:
    """The namespace of a pod that ended meanwhile is removed when its volume is there again."""
    node.publish_own("pod-1", "csi-1")
    other = node.publish("pod-2", LLAMA)
    node.mount.kill()
    with pytest.raises(grpc.RpcError) as caught:
        node.publish("pod-3", LLAMA)
    assert code_of(caught) == grpc.StatusCode.UNAVAILABLE
    said = node.stats("pod-2", LLAMA).volume_condition
    assert said.abnormal
    assert "not mounted on this node any more" in said.message
    node.unpublish("pod-1", "csi-1")
    assert node.binds() == [str(other)]
    assert names_in(node.left) == {"csi-1"}
    node.mount.mount()
    assert names_in(node.mount.point / "ephemeral") == {"csi-1"}
    with pytest.raises(OSError, match=r"not connected|abort"):
        names_in(other)
    assert node.publish("pod-2", LLAMA) == other, "the bind of the dead mount is replaced"
    (other / "a").touch()
    node.publish_own("pod-4", "csi-4")
    node.unpublish("pod-4", "csi-4")
    assert names_in(node.left) == names_in(node.mount.point / "ephemeral") == set()


def test_a_mount_that_hangs_holds_nobody_up(node: PluginNode) -> None:
    """Calls for it fail within their deadline, one at a time; pods end."""
    node.publish("pod-1", LLAMA)
    own = node.publish_own("pod-2", "csi-2")
    assert node.end() == 0
    node.start("--deadline", "2")
    with stopped(node.mount.pid):
        with pytest.raises(grpc.RpcError, match="no answer within 2 s") as caught:
            node.publish("pod-3", LLAMA)
        assert code_of(caught) == grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.RpcError, match="an earlier call for volume kv/llama has not ended") as caught:
            node.publish("pod-3", LLAMA)
        assert code_of(caught) == grpc.StatusCode.ABORTED
        assert node.stats("pod-2", "csi-2").volume_condition.abnormal
        node.unpublish("pod-2", "csi-2")
        assert not own.exists()
        assert names_in(node.left) == {"csi-2"}
    wait_until(lambda: does_publish(node), "the call that hung to end")
    node.publish_own("pod-4", "csi-4")
    wait_until(lambda: names_in(node.mount.point / "ephemeral") == {"csi-4"}, "what was left to be removed")
    node.unpublish("pod-4", "csi-4")
    assert names_in(node.left) == set()


def does_publish(node: PluginNode) -> bool:
    try:
        node.publish("pod-3", LLAMA)
    except grpc.RpcError as error:
        assert "has not ended" in str(error)
        return False
    return True


def test_paths_lead_nowhere_else(node: PluginNode) -> None:
    """Targets are below the kubelet's pods, and neither they nor namespaces go through links."""
    elsewhere = node.base / "elsewhere"
    elsewhere.mkdir()
    (node.kubelet / "pods" / "linked").symlink_to(elsewhere)
    (elsewhere / "volumes/kubernetes.io~csi/data").mkdir(parents=True)
    before = sorted(elsewhere.rglob("*"))
    mode = messages.VolumeCapability(access_mode=messages.AccessMode(mode=5))
    pods = node.kubelet / "pods"
    targets = [pods / "linked/volumes/kubernetes.io~csi/data/mount", elsewhere, pods / "../plugins/x", pods]
    for target in (*targets, "relative/mount", f"{pods}/a//mount", f"{pods}/a/./mount"):
        with pytest.raises(grpc.RpcError) as caught:
            node.call("NodePublishVolume", volume_id=LLAMA, target_path=str(target), volume_capability=mode)
        assert code_of(caught) == grpc.StatusCode.INVALID_ARGUMENT, target
    (node.mount.point / "trap").symlink_to("/etc")
    (node.mount.point / "llama" / "link").symlink_to("../..")
    for name in ("trap", "trap/apt", "llama/link/volumes", "llama/link"):
        with pytest.raises(grpc.RpcError) as caught:
            node.publish("pod-1", f"{VOLUME}/{name}")
        assert code_of(caught) in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL), name
    assert node.binds() == []
    assert sorted(elsewhere.rglob("*")) == before
    assert not (elsewhere / "volumes/kubernetes.io~csi/data/mount").exists()


def test_what_the_daemon_refuses_is_passed_on(node: PluginNode) -> None:
    with pytest.raises(grpc.RpcError, match=r"namespace llama of volume kv: .*eviction") as caught:
        node.publish("pod-1", LLAMA, {"eviction": "luck"})
    assert code_of(caught) == grpc.StatusCode.FAILED_PRECONDITION
    assert not (node.mount.point / "llama").exists(), "and nothing is left"
    (node.mount.point / "full").mkdir()
    (node.mount.point / "full" / "a").touch()
    with pytest.raises(grpc.RpcError, match="not empty") as caught:
        node.publish("pod-1", f"{VOLUME}/full")
    assert code_of(caught) == grpc.StatusCode.FAILED_PRECONDITION
    node.publish("pod-1", LLAMA)
    with pytest.raises(grpc.RpcError, match=r"has /llama of .* already, not kv/qwen") as caught:
        node.publish("pod-1", f"{VOLUME}/qwen")
    assert code_of(caught) == grpc.StatusCode.FAILED_PRECONDITION


def test_rings_are_for_pods_that_ask_for_them(node: PluginNode) -> None:
    own = node.publish_own("pod-1", "csi-1", kind="blocks", rings="true")
    node.publish_own("pod-1", "csi-1", kind="blocks", rings="true")
    other = node.publish_own("pod-2", "csi-2", kind="blocks")
    assert len(node.binds()) == 3
    (own / "blocks").mkdir()
    with BlockStore(own, "blocks") as store:
        store.put(b"block-1", b"x" * 1000)
        assert bytes(store.get(b"block-1") or b"") == b"x" * 1000
    assert (node.mount.point / "ephemeral/csi-1/blocks/block-1").read_bytes() == b"x" * 1000
    with pytest.raises(FileNotFoundError), BlockStore(other, "."):
        pass
    node.unpublish("pod-1", "csi-1")
    assert node.binds() == [str(other)]
    assert names_in(node.mount.point / "ephemeral") == {"csi-2"}
