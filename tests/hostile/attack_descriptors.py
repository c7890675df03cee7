"""``attack_descriptors.py UID MOUNT``: passes TCP sockets whose close lingers for an hour, in every way there is.

Each has unsent data and a peer that never reads, and the passed descriptor is its last. The attack uses the next way at
each word, and ends its connections at the one after that. In the end it says how many of the sockets are still open.
"""

from __future__ import annotations

import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from attacker_kit import (
    ADD_FILE,
    ADD_IOV,
    DROP_FILE,
    HELLO,
    MESSAGE,
    OPEN_NAMESPACE,
    Attacker,
    become,
    say,
    wait_for_word,
)

LINGER_S = 3600
CONNECTIONS = 8
"""as many as the test lets a user have"""
ESTABLISHED = "01"
"""in /proc/net/tcp: nobody closed it"""

ways: list[str] = []
peers: list[socket.socket] = []
ports: dict[tuple[int, int], str] = {}
"""(own, peer's) of the passed sockets: the way that they were passed"""


def lingering() -> socket.socket:
    """Whoever closes it waits for its peer, which never reads."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        sender = socket.socket()
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        sender.connect(listener.getsockname())
        peers.append(listener.accept()[0])
    sender.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            sender.send(bytes(65536))
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
    ports[sender.getsockname()[1], sender.getpeername()[1]] = ways[-1]
    return sender


def pass_one(client: Attacker, data: bytes, count: int = 1) -> bool:
    """False where the kernel refuses, or the daemon has hung up."""
    with lingering() as last:
        try:
            client.send(data, [last.fileno()] * count)
        except (PermissionError, BrokenPipeError, ConnectionResetError):
            return False
    return True


def request(kind: int, value: int = 1) -> bytes:
    return MESSAGE.pack(kind, 7, 0, value, *[0] * 5)


def still_open() -> list[str]:
    """How the sockets were passed that somebody still has."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    used = [tuple(int(end.split(":")[1], 16) for end in row[1:3]) for row in rows if row[3] == ESTABLISHED]
    return [ports[pair] for pair in used if pair in ports]


def with_hello(mount: str) -> list[Attacker]:
    client = Attacker(mount, hello=False)
    pass_one(client, request(HELLO))
    return [client]


def behind_garbage(mount: str) -> list[Attacker]:
    client = Attacker(mount)
    pass_one(client, b"garbage")
    return [client]


def where_none_belongs(mount: str) -> list[Attacker]:
    client = Attacker(mount)
    pass_one(client, request(DROP_FILE))
    client.answer()
    return [client]


def instead_of_others(mount: str) -> list[Attacker]:
    client = Attacker(mount)
    for kind in (ADD_FILE, ADD_IOV, OPEN_NAMESPACE):
        pass_one(client, request(kind))
        client.answer()
    return [client]


def in_great_numbers(mount: str) -> list[Attacker]:
    client = Attacker(mount)
    pass_one(client, request(ADD_FILE), 253)
    client.answer()
    return [client]


def in_empty_messages(mount: str) -> list[Attacker]:
    client = Attacker(mount)
    client.send(b"")
    pass_one(client, b"")
    pass_one(client, request(HELLO))
    return [client]


def left_in_the_queue(mount: str) -> list[Attacker]:
    """The daemon hangs up at the first message, or finds the client gone."""
    for first in (b"garbage", request(HELLO)):
        client = Attacker(mount)
        client.send(first)
        for _ in range(6):
            pass_one(client, request(ADD_FILE))
        client.close()
    return []


def in_sockets_in_sockets(mount: str) -> list[Attacker]:
    client = Attacker(mount)
    for _ in range(3):
        one, other = socket.socketpair()
        with lingering() as last, one, other:
            socket.send_fds(one, [b"x"], [last.fileno()])
            client.send(request(ADD_FILE), [other.fileno()])
        client.answer()
    return [client]


def by_clients_that_are_turned_away(mount: str) -> list[Attacker]:
    clients = [Attacker(mount) for _ in range(CONNECTIONS)]
    for _ in range(CONNECTIONS):
        refused = Attacker(mount, hello=False)
        pass_one(refused, request(HELLO))
        clients.append(refused)
    return clients


def all_at_once(mount: str) -> list[Attacker]:
    clients = [Attacker(mount) for _ in range(CONNECTIONS)]
    for number in range(10 * CONNECTIONS):
        client = clients[number % CONNECTIONS]
        pass_one(client, request((ADD_FILE, ADD_IOV, DROP_FILE)[number % 3]))
    for client in clients:
        for _ in range(10):
            client.answer()
    return clients


WAYS: tuple[Callable[[str], list[Attacker]], ...] = (
    with_hello,
    behind_garbage,
    where_none_belongs,
    instead_of_others,
    in_great_numbers,
    in_empty_messages,
    left_in_the_queue,
    in_sockets_in_sockets,
    by_clients_that_are_turned_away,
    all_at_once,
)


def main() -> None:
    uid, mount = int(sys.argv[1]), sys.argv[2]
    become(uid)
    signal.signal(signal.SIGALRM, lambda *_: None)  # it ends the attack's own wait, where it closes a socket last
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    for way in WAYS:
        wait_for_word()
        ways.append(way.__name__)
        clients = way(mount)
        say(way=way.__name__)
        wait_for_word()
        for client in clients:
            client.close()
    while wait_for_word():
        say(passed=len(ports), still_open=still_open())


if __name__ == "__main__":
    main()
