"""An NVMe-oF target and its hosts in one kernel, that of the virtual machine of scripts/rdma-vm.

One namespace, over TCP and over RDMA. Each host is an identity (host id and NQN) with a block device of its own, in a
folder of its own: other names of a device are removed from /dev, as no host finds those of another. The disk behind the
namespace is a ramdisk. A second way to it may be held up: what is written there is inside the target until then.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mounting import wait_until

from kvfuse.remote.segments.block import fabrics

ADDRESS = "10.9.0.1"
SERVICES = {"tcp": 4420, "rdma": 4421}
CONFIG = Path("/sys/kernel/config/nvmet")
PREFIX = "nqn.2026-01.test:"
NAMESPACE = uuid.UUID("6b766675-7365-4000-8000-000000000001")
"""in which identities of hosts and disks are made of their names"""
DISK = Path("/dev/ram0")
SLOW_DISK = "slow"
TIMEOUTS = {"fast_io_fail_tmo": 3, "ctrl_loss_tmo": 3600, "keep_alive_tmo": 10, "reconnect_delay": 1}
"""seconds"""
PATIENT = {"fast_io_fail_tmo": 300, "keep_alive_tmo": 300}
"""where nothing fails, and a busy machine may give this one no turn for long"""
_PARAMETERS = {"nvme_core": ["multipath=N"], "brd": ["rd_nr=1", "rd_size={kib}"]}
"""without the first all hosts of one kernel are paths of one device"""


@dataclass
class Host:
    """One identity, connected."""

    name: str
    controller: str
    """as the kernel calls it"""
    device: Path
    """its name of the namespace when it connected"""

    @property
    def attributes(self) -> Path:
        return fabrics.CONTROLLERS / self.controller

    @property
    def state(self) -> str:
        return (self.attributes / "state").read_text().strip()

    def disconnect(self) -> None:
        (self.attributes / "delete_controller").write_text("1")


@dataclass
class Target:
    """See the module. Made by ``target``."""

    folder: Path
    hosts: dict[str, Host] = field(default_factory=dict)

    def add_subsystem(self, name: str, disk: Path) -> None:
        """One way to the disk. One kernel takes no two of the same UUID."""
        subsystem = _subsystem(name)
        subsystem.mkdir()
        (subsystem / "attr_allow_any_host").write_text("1")
        namespace = subsystem / "namespaces/1"
        namespace.mkdir()
        (namespace / "device_path").write_text(str(disk))
        (namespace / "device_uuid").write_text(str(uuid.uuid5(NAMESPACE, name)))
        (namespace / "enable").write_text("1")

    def open_port(self, kind: str, name: str = "disk") -> None:
        """Let hosts come to a subsystem by TCP or RDMA. The first one of a port begins to listen."""
        port = CONFIG / "ports" / str(SERVICES[kind])
        if not port.is_dir():
            port.mkdir()
            values = {"trtype": kind, "adrfam": "ipv4", "traddr": ADDRESS, "trsvcid": str(SERVICES[kind])}
            for key, value in values.items():
                (port / f"addr_{key}").write_text(value)
        (port / "subsystems" / (PREFIX + name)).symlink_to(_subsystem(name))

    def close_port(self, kind: str, name: str = "disk") -> None:
        """Sessions of hosts there end at once, and none begins."""
        (CONFIG / "ports" / str(SERVICES[kind]) / "subsystems" / (PREFIX + name)).unlink()

    def switch(self, *, on: bool, name: str = "disk") -> None:
        """Give the namespace, or take it away from all hosts, once no command is inside the target."""
        (_subsystem(name) / "namespaces/1/enable").write_text("1" if on else "0")

    def add_slow_way(self) -> None:
        """A subsystem "slow", which may be held up."""
        disk = Path("/sys/class/block", DISK.name)
        sectors, number = [(disk / name).read_text().strip() for name in ("size", "dev")]
        _dmsetup("create", SLOW_DISK, "--table", f"0 {sectors} linear {number} 0")
        (device,) = Path("/dev").glob("dm-*")
        self.add_subsystem("slow", device.rename(self.folder / "slow"))

    def hold_up(self) -> None:
        """What comes the slow way from now on stays in the target."""
        _dmsetup("suspend", SLOW_DISK, "--noflush", "--nolockfs")

    def go_on(self) -> None:
        """And happens now: it has when this returns."""
        _dmsetup("resume", SLOW_DISK)
        (counts,) = Path("/sys/class/block").glob("dm-*/inflight")
        wait_until(lambda: counts.read_text().split() == ["0", "0"], "what was held up")

    def connect(self, name: str, kind: str, subsystem: str = "disk", **timeouts: int | None) -> Host:
        """Be one more host; its name is new. ``timeouts`` win over `TIMEOUTS`; None: the kernel's own."""
        identity = uuid.uuid5(NAMESPACE, name)
        options = {
            "nqn": PREFIX + subsystem,
            "transport": kind,
            "traddr": ADDRESS,
            "trsvcid": SERVICES[kind],
            "nr_io_queues": 1,
            "hostid": identity,
            "hostnqn": f"nqn.2014-08.org.nvmexpress:uuid:{identity}",
            **TIMEOUTS,
            **timeouts,
        }
        descriptor = os.open("/dev/nvme-fabrics", os.O_RDWR)
        try:
            line = ",".join(f"{key}={value}" for key, value in options.items() if value is not None)
            os.write(descriptor, line.encode())
            instance = os.read(descriptor, 100).decode().split(",")[0]
        finally:
            os.close(descriptor)
        controller = f"nvme{instance.removeprefix('instance=')}"
        host = Host(name, controller, self.folder / name)
        wait_until(lambda: bool(nodes_of(controller)), f"the namespace of {controller}")
        (node,) = nodes_of(controller)
        node.rename(host.device)
        self.hosts[name] = host
        return host

    def patient_host(self, name: str, kind: str) -> Host:
        """The one of that name, connected now if it was not."""
        return self.hosts.get(name) or self.connect(name, kind, **PATIENT)


def nodes_of(controller: str) -> list[Path]:
    """What /dev has of a controller's namespaces; not those that `connect` moved."""
    return sorted(Path("/dev").glob(f"{controller}n*"))


def _subsystem(name: str) -> Path:
    return CONFIG / "subsystems" / (PREFIX + name)


def _dmsetup(*words: str) -> None:
    subprocess.run(["dmsetup", *words, "--noudevsync", "--noudevrules"], check=True, stdin=subprocess.DEVNULL)


def _load_modules(size: int) -> None:
    """scripts/rdma-vm says where they are, in the order in which they are needed."""
    folder = Path(os.environ["KVFUSE_VM_MODULES"])
    for file in (folder / "order").read_text().split():
        name = file.removesuffix(".ko").replace("-", "_")
        if not Path("/sys/module", name).exists():
            parameters = [word.format(kib=size >> 10) for word in _PARAMETERS.get(name, ())]
            subprocess.run(["insmod", str(folder / file), *parameters], check=True)


@contextlib.contextmanager
def target(size: int) -> Iterator[Target]:
    """The namespace has ``size`` bytes of zeros. Both ports are open."""
    Path("/proc/sys/kernel/printk").write_text("1")  # what hosts find wrong with a port that is closed, again and again
    _load_modules(size)
    config = CONFIG.parent
    if not os.path.ismount(config):
        subprocess.run(["mount", "-t", "configfs", "configfs", str(config)], check=True)
    made = Target(Path("/dev/kvfuse-test"))
    made.folder.mkdir()
    made.add_subsystem("disk", DISK.rename(made.folder / "target"))
    for kind in SERVICES:
        made.open_port(kind)
    try:
        yield made
    finally:
        for host in made.hosts.values():
            if host.attributes.exists():
                host.disconnect()
        shutil.rmtree(made.folder)
