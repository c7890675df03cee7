"""Which RDMA devices this host has, and which are near a processor: from sysfs alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

SYSFS = Path("/sys")
ANYWHERE = -1
"""the node of devices that are near no processor more than others, as sysfs has it"""
UNUSED_MAX = 64
"""places of a table of addresses that are unused one behind the other: the rest, of up to 1024, are unused, too"""
REMOTE_DISTANCE = 255
"""between nodes of which sysfs says nothing"""


class DeviceInfo(NamedTuple):
    """A port of a device."""

    name: str
    port: int
    node: int
    """the NUMA node, or `ANYWHERE`"""
    state: str
    """ACTIVE, DOWN, ..."""
    link_layer: str
    """InfiniBand or Ethernet"""

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"

    def __str__(self) -> str:
        return self.name if self.port == 1 else f"{self.name}:{self.port}"


class Gid(NamedTuple):
    """An address of a port, and its number in the port's table."""

    number: int
    octets: bytes


def find_devices(sysfs: Path = SYSFS) -> list[DeviceInfo]:
    """All ports of all devices, by name."""
    found = []
    for device in sorted((sysfs / "class/infiniband").glob("*")):
        node = _read(device / "device/numa_node")
        for port in sorted((device / "ports").glob("*"), key=lambda path: int(path.name)):
            state = _read(port / "state").partition(": ")[2] or "unknown"
            found.append(
                DeviceInfo(device.name, int(port.name), int(node or ANYWHERE), state, _read(port / "link_layer"))
            )
    return found


def choose_gid(info: DeviceInfo, sysfs: Path = SYSFS) -> Gid | None:
    """The address to read by: on Ethernet one of RoCE v2, best of IPv4, then of IPv6, then one of the link alone.

    On InfiniBand the first one. None: there is none.
    """
    port = sysfs / "class/infiniband" / info.name / "ports" / str(info.port)
    found: list[tuple[int, Gid]] = []
    unused = 0
    for path in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
        octets = bytes.fromhex(_read(path).replace(":", ""))
        if len(octets) != 16 or not any(octets):
            unused += 1
            if unused == UNUSED_MAX:
                break
            continue
        unused = 0
        gid = Gid(int(path.name), octets)
        if info.link_layer != "Ethernet":
            return gid
        if _read(port / "gid_attrs/types" / path.name) == "RoCE v2":
            found.append((_preference(octets), gid))
    return min(found)[1] if found else None


def _preference(octets: bytes) -> int:
    if octets.startswith(bytes(10) + b"\xff\xff"):
        return 0
    return 2 if octets.startswith(b"\xfe\x80") else 1


def nearest(
    devices: Sequence[DeviceInfo], node: int, table: Mapping[int, Sequence[str]] | None = None, sysfs: Path = SYSFS
) -> list[DeviceInfo]:
    """The devices to use for memory and threads of this NUMA node: all that are nearest, for connections to be spread.

    ``table``: node -> names of devices, which go before what sysfs says. A device that is near no node is as far from
    each as its neighbours are.
    """
    if table is not None and node in table:
        named = [device for device in devices if str(device) in table[node] or device.name in table[node]]
        if named:
            return named
    distances = _distances(node, sysfs)

    def distance(device: DeviceInfo) -> int:
        if device.node == ANYWHERE or node == ANYWHERE:
            return min((one for other, one in distances.items() if other != node), default=REMOTE_DISTANCE)
        return distances.get(device.node, REMOTE_DISTANCE)

    least = min(map(distance, devices), default=0)
    return [device for device in devices if distance(device) == least]


def node_of(processor: int, sysfs: Path = SYSFS) -> int:
    """The NUMA node of a processor, or `ANYWHERE`."""
    for path in (sysfs / f"devices/system/cpu/cpu{processor}").glob("node[0-9]*"):
        return int(path.name.removeprefix("node"))
    return ANYWHERE


def _distances(node: int, sysfs: Path) -> dict[int, int]:
    """node -> how far it is from this one; 10: the same."""
    words = _read(sysfs / f"devices/system/node/node{node}/distance").split()
    numbers = sorted(int(path.name.removeprefix("node")) for path in (sysfs / "devices/system/node").glob("node[0-9]*"))
    return dict(zip(numbers, map(int, words), strict=False))


def _read(path: Path) -> str:
    """What is in a file of sysfs; nothing where it cannot be read, as unused places of a table cannot."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
