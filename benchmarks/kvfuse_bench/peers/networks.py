"""Networks of this machine alone: one for each host, and one with the bridge between them. They need root.

A network is held by a descriptor, so the kernel removes it with its devices when this process and those in it have
ended, however they end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from kvfuse.errors import KvfuseError

CLONE_NEWNET = 0x40000000
PREFIX = "10.77.0"
BRIDGE_ADDRESS = f"{PREFIX}.254"
HOSTS_MAX = 64

_libc = ctypes.CDLL(None, use_errno=True)


class Network(NamedTuple):
    """Of one host."""

    address: str
    within: tuple[str, ...]
    """what stands before a command that is to run there"""


@contextmanager
def host_networks(count: int) -> Iterator[list[Network]]:
    """``count`` networks that a bridge connects. What this thread starts is in the bridge's own, at `BRIDGE_ADDRESS`.

    KvfuseError where this user may not make them.
    """
    if os.geteuid() != 0:
        raise KvfuseError("hosts get networks of their own, and only root can make these: run this as root")
    for tool, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            raise KvfuseError(f"{tool} is not installed: apt-get install {package}")
    if not 0 < count <= HOSTS_MAX:
        raise KvfuseError(f"{count} hosts: 1 to {HOSTS_MAX} can be had")
    with ExitStack() as stack:
        own = _descriptor(stack)
        hub, *others = [_new_network(stack) for _ in range(count + 1)]
        _enter(hub)
        stack.callback(_enter, own)
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "bridge0", "type", "bridge")
        _ip("link", "set", "bridge0", "up")
        _ip("address", "add", f"{BRIDGE_ADDRESS}/24", "dev", "bridge0")
        networks = []
        for number, descriptor in enumerate(others, start=1):
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            network = Network(f"{PREFIX}.{number}", ("nsenter", f"--net={path}"))
            _ip("link", "add", f"host{number}", "type", "veth", "peer", "name", "eth0", "netns", path)
            _ip("link", "set", f"host{number}", "master", "bridge0", "up")
            for words in (("link", "set", "lo", "up"), ("link", "set", "eth0", "up")):
                _ip(*words, within=network.within)
            _ip("address", "add", f"{network.address}/24", "dev", "eth0", within=network.within)
            networks.append(network)
        yield networks


def _descriptor(stack: ExitStack) -> int:
    """Of the network of the calling thread."""
    descriptor = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


def _new_network(stack: ExitStack) -> int:
    """A descriptor of it. A thread makes it, as only the thread that does is in it then."""
    found: list[int] = []
    failed: list[int] = []

    def make() -> None:
        if _libc.unshare(CLONE_NEWNET) != 0:
            failed.append(ctypes.get_errno())
        else:
            found.append(_descriptor(stack))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if failed:
        raise KvfuseError(
            f"a network for a host cannot be made: {os.strerror(failed[0])}; this needs root (CAP_SYS_ADMIN)"
        )
    return found[0]


def _enter(descriptor: int) -> None:
    """This thread, and what it starts."""
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise KvfuseError(f"a network cannot be entered: {os.strerror(ctypes.get_errno())}")


def _ip(*words: str, within: Sequence[str] = ()) -> None:
    done = subprocess.run([*within, "ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KvfuseError(f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}")
