"""Hosts that share a volume and read from each other: a mount each, in a network of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvfuse.errors import KvfuseError
from kvfuse.sizes import GIB, MIB, format_size
from kvfuse_bench.daemons import cpu_seconds_of, kvfuse_mount, signals_raised
from kvfuse_bench.peers.clients import Blocks, Client, client_of
from kvfuse_bench.peers.networks import BRIDGE_ADDRESS, Network, host_networks
from kvfuse_cluster.etcd import EtcdServers
from kvfuse_cluster.process import wait_until
from kvfuse_cluster.volumes import SETTINGS, records_conf

CAPACITY = 4 * GIB
TIER_SIZE = 512 * MIB
PORT = 7650
SETTLE_SECONDS_MAX = 60.0


@dataclass
class Host:
    """A mount, its daemon, and the client beside it."""

    network: Network
    point: Path
    pid: int
    client: Client

    def stats(self) -> dict[str, Any]:
        """Of the daemon, for root."""
        return dict(json.loads((self.point / ".kvfuse" / "stats").read_bytes()))

    def processor(self) -> float:
        """Seconds of the daemon so far."""
        return cpu_seconds_of(self.pid)


@dataclass
class Hosts:
    """The first one writes."""

    all: Sequence[Host]

    @property
    def writer(self) -> Host:
        return self.all[0]

    @property
    def readers(self) -> Sequence[Host]:
        return self.all[1:]

    @contextmanager
    def stored(self, blocks: Blocks, readers: Sequence[Host]) -> Iterator[None]:
        """Blocks in the writer's memory, and in the segments, which ``readers`` know of. Gone afterwards."""
        self.writer.client.ask("put", blocks=blocks)
        self._wait(self.writer, lambda stats: not stats["memory"]["staged_bytes"], "has bytes that are not stored")
        for reader in readers:
            reader.client.ask("see", blocks=blocks)
        yield
        self.writer.client.ask("delete", blocks=blocks)
        for host in (self.writer, *readers):
            self._wait(host, lambda stats: not stats["tier"]["blocks"], "keeps blocks that were removed")

    def _wait(self, host: Host, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
        if not wait_until(lambda: condition(host.stats()), SETTLE_SECONDS_MAX):
            raise KvfuseError(f"the host at {host.network.address} {what} after {SETTLE_SECONDS_MAX:.0f} s")

    def wait_for_connections(self) -> None:
        """All hosts can ask each other."""
        connected = ["connected"] * (len(self.all) - 1)
        for host in self.all:
            self._wait(
                host,
                lambda stats: [one["state"] for one in stats["peers"]["hosts"]] == connected,
                "is not connected to all others",
            )


@contextmanager
def peer_hosts(folder: Path, count: int, room: int, progress: Callable[[str], None]) -> Iterator[Hosts]:
    """``count`` hosts on a new volume: an etcd of this machine, segments in ``folder``. KvfuseError.

    They end with the body, also when a signal ends this process.
    """
    with signals_raised(), ExitStack() as stack:
        progress("making networks")
        networks = stack.enter_context(host_networks(count))
        etcd = EtcdServers.start(folder / "etcd", 1, replace(SETTINGS, address=BRIDGE_ADDRESS))
        stack.callback(etcd.stop)
        conf = folder / "peers.conf"
        conf.write_text(
            f"{records_conf('bench-peers', format_size(CAPACITY), etcd)}\n"
            f"[segments]\npath = {json.dumps(str(folder / 'segments'))}\n"
            '[publish]\nmode = "relaxed"\n'
            f'[cache]\ntier_size = "{format_size(TIER_SIZE)}"\n'
        )
        hosts = []
        for number, network in enumerate(networks):
            progress(f"mounting host {number + 1} of {count}")
            point = folder / f"host-{number + 1}"
            words = (f"peer.listen={network.address}:{PORT}",)
            daemon = stack.enter_context(kvfuse_mount(conf, point, *words, within=network.within))
            hosts.append(Host(network, point, daemon.pid, stack.enter_context(client_of(point, room))))
        found = Hosts(hosts)
        found.wait_for_connections()
        yield found
