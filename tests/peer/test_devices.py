"""Which RDMA devices there are, by a folder that looks like sysfs."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from types import ModuleType

import pytest

from kvfuse.peer import verbs
from kvfuse.peer.devices import ANYWHERE, DeviceInfo, choose_gid, find_devices, nearest, node_of

V1, V2 = "IB/RoCE v1", "RoCE v2"
LINK_LOCAL, GLOBAL = "fe80:0000:0000:0000:0000:0000:0000:0001", "2001:0db8:0000:0000:0000:0000:0000:0001"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a09:0001"
UNUSED = "0000:0000:0000:0000:0000:0000:0000:0000"


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def add_device(
    sysfs: Path,
    name: str,
    *,
    node: int | None = None,
    state: str = "4: ACTIVE",
    link_layer: str = "Ethernet",
    gids: list[tuple[str, str]] | None = None,
    port: int = 1,
) -> None:
    folder = sysfs / "class/infiniband" / name
    if node is not None:
        put(folder / "device/numa_node", node)
    put(folder / f"ports/{port}/state", state)
    put(folder / f"ports/{port}/link_layer", link_layer)
    for number, (gid, kind) in enumerate(gids or []):
        put(folder / f"ports/{port}/gids/{number}", gid)
        put(folder / f"ports/{port}/gid_attrs/types/{number}", kind)


def add_nodes(sysfs: Path, distances: list[str]) -> None:
    for node, words in enumerate(distances):
        put(sysfs / f"devices/system/node/node{node}/distance", words)


def named(devices: list[DeviceInfo]) -> list[str]:
    return [str(device) for device in devices]


def test_a_host_without_devices(tmp_path: Path) -> None:
    assert find_devices(tmp_path) == []


def test_each_port_is_found(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_1", node=1, link_layer="InfiniBand")
    add_device(tmp_path, "mlx5_0", node=0)
    add_device(tmp_path, "mlx5_0", port=2, state="1: DOWN")
    add_device(tmp_path, "rxe0")
    found = find_devices(tmp_path)
    assert named(found) == ["mlx5_0", "mlx5_0:2", "mlx5_1", "rxe0"]
    assert [device.is_active for device in found] == [True, False, True, True]
    assert [device.node for device in found] == [0, 0, 1, ANYWHERE]
    assert [device.link_layer for device in found] == ["Ethernet", "Ethernet", "InfiniBand", "Ethernet"]


@pytest.mark.parametrize(
    ("gids", "chosen"),
    [
        ([(LINK_LOCAL, V1), (LINK_LOCAL, V2), (IPV4, V1), (IPV4, V2)], 3),
        ([(LINK_LOCAL, V2), (GLOBAL, V2), (UNUSED, "")], 1),
        ([(LINK_LOCAL, V1), (LINK_LOCAL, V2)], 1),
        ([(LINK_LOCAL, V1), (UNUSED, "")], None),
    ],
)
def test_the_address_on_ethernet_can_be_routed(tmp_path: Path, gids: list[tuple[str, str]], chosen: int | None) -> None:
    add_device(tmp_path, "rxe0", gids=gids)
    gid = choose_gid(find_devices(tmp_path)[0], tmp_path)
    assert (gid and gid.number) == chosen
    assert gid is None or gid.octets == bytes.fromhex(gids[gid.number][0].replace(":", ""))


def test_the_address_on_infiniband_is_the_first(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_0", link_layer="InfiniBand", gids=[(LINK_LOCAL, V1), (GLOBAL, V1)])
    gid = choose_gid(find_devices(tmp_path)[0], tmp_path)
    assert gid is not None
    assert gid.number == 0


def test_nearest_devices(tmp_path: Path) -> None:
    add_nodes(tmp_path, ["10 16 32 32", "16 10 32 32", "32 32 10 16", "32 32 16 10"])
    for name, node in (("a0", 0), ("a1", 0), ("b0", 1), ("d0", 3)):
        add_device(tmp_path, name, node=node)
    devices = find_devices(tmp_path)
    assert named(nearest(devices, 0, sysfs=tmp_path)) == ["a0", "a1"]
    assert named(nearest(devices, 1, sysfs=tmp_path)) == ["b0"]
    assert named(nearest(devices, 2, sysfs=tmp_path)) == ["d0"]
    assert named(nearest(devices, ANYWHERE, sysfs=tmp_path)) == ["a0", "a1", "b0", "d0"]


def test_a_table_goes_before_distances(tmp_path: Path) -> None:
    add_nodes(tmp_path, ["10 20", "20 10"])
    add_device(tmp_path, "a", node=0)
    add_device(tmp_path, "b", node=1)
    devices = find_devices(tmp_path)
    assert named(nearest(devices, 0, {0: ["b"]}, tmp_path)) == ["b"]
    assert named(nearest(devices, 1, {0: ["b"]}, tmp_path)) == ["b"]
    assert named(nearest(devices, 0, {0: ["gone"]}, tmp_path)) == ["a"], "a table of devices that are not there"


def test_a_host_without_nodes_uses_all_devices(tmp_path: Path) -> None:
    add_device(tmp_path, "a")
    add_device(tmp_path, "b")
    assert named(nearest(find_devices(tmp_path), 0, sysfs=tmp_path)) == ["a", "b"]


def test_the_node_of_a_processor(tmp_path: Path) -> None:
    (tmp_path / "devices/system/cpu/cpu5/node1").mkdir(parents=True)
    assert node_of(5, tmp_path) == 1
    assert node_of(6, tmp_path) == ANYWHERE


def test_constants_of_both_layouts() -> None:
    old, new = ModuleType("pyverbs.enums"), ModuleType("pyverbs.libibverbs_enums")
    vars(old).update(IBV_WC_SUCCESS=0, IBV_QPT_RC=2)
    vars(new).update(
        ibv_wc_status=IntEnum("ibv_wc_status", {"IBV_WC_SUCCESS": 0}), other=IntEnum("other", {"IBV_QPT_RC": 2})
    )

    def load_new(name: str) -> ModuleType:
        if name != new.__name__:
            raise ImportError(name)
        return new

    for load in (lambda _: old, load_new):
        constants = verbs.load_constants(load)
        assert (constants["IBV_WC_SUCCESS"], constants["IBV_QPT_RC"]) == (0, 2)


@pytest.mark.parametrize("missing", ["pyverbs", "device"])
def test_what_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def load(name: str) -> ModuleType:
        if missing == "pyverbs":
            raise ImportError(f"No module named {name!r}")
        return ModuleType(name)

    verbs.pyverbs.cache_clear()
    monkeypatch.setattr(verbs.importlib, "import_module", load)
    monkeypatch.setattr(verbs, "load_constants", dict)
    monkeypatch.setattr(verbs, "find_devices", list)
    with pytest.raises(verbs.NoDevice, match="python3-pyverbs" if missing == "pyverbs" else "no RDMA device") as caught:
        verbs.open_device()
    assert "\n" not in str(caught.value)
    verbs.pyverbs.cache_clear()


def test_no_device_of_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_0", state="1: DOWN")
    monkeypatch.setattr(verbs, "pyverbs", lambda: None)
    monkeypatch.setattr(verbs, "find_devices", lambda: find_devices(tmp_path))
    with pytest.raises(verbs.NoDevice, match="no RDMA device mlx5_7; there are: mlx5_0"):
        verbs.open_device("mlx5_7")
    with pytest.raises(verbs.NoDevice, match="no port of an RDMA device is active: mlx5_0 is DOWN"):
        verbs.open_device()
