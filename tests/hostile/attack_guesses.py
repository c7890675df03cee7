"""``attack_guesses.py UID MOUNT TENANT OWN COUNT TOKEN``: guesses keys of a namespace that it may not use any more.

It had a handle when it still had the token. It says what each way of asking answers, and how long that takes, in
microseconds, for keys that are there, for keys that are not, and for absent keys of a folder of its own: one after the
other, in an order that chance gives.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from attacker_kit import EXISTS, GET, OPEN_NAMESPACE, Attacker, Ring, become, memfd, say, sqe, wait_for_word

CAPACITY = 4096


class Guesser:
    """One ring, and a handle for each namespace."""

    def __init__(self, mount: str) -> None:
        self.client = Attacker(mount)
        self.ring: Ring = self.client.ring(64, CAPACITY)
        self.iov = self.client.iov(memfd(CAPACITY), CAPACITY)

    def open(self, folder: Path) -> int:
        descriptor = os.open(folder, os.O_PATH)
        try:
            return self.client.ask(OPEN_NAMESPACE, 0o600, descriptors=[descriptor])[0]
        finally:
            os.close(descriptor)

    def guess(self, op: int, handle: int, key: bytes) -> tuple[int, int]:
        """(result, the byte of the key's answer)"""
        aux, packed = self.ring.aux, len(key).to_bytes(2, "little") + key if op == EXISTS else key
        self.ring.map[aux : aux + len(packed)] = packed
        self.ring.map[aux + 1024] = 7
        fields = {"length": 1, "offset": 1024} if op == EXISTS else {"iov": self.iov, "length": CAPACITY}
        self.ring.push(sqe(op, handle=handle, key_offset=0, key_length=len(packed), **fields))
        return self.ring.wait()[0][1], self.ring.map[aux + 1024]


def look(path: Path) -> tuple[int, int]:
    try:
        os.stat(path)
    except OSError as error:
        return -(error.errno or 0), 0
    return 0, 0


def measure(asks: dict[str, Callable[[bytes], tuple[int, int]]], count: int) -> dict[str, list[list[float]]]:
    """kind of key -> [what is answered, microseconds], of ``count`` keys of each kind."""
    names = list(asks)
    answers: dict[str, set[tuple[int, int]]] = {name: set() for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(count):
        random.shuffle(names)
        for name in names:
            key = b"key-%06d" % number if name == "present" else b"non-%06d" % number
            began = time.perf_counter_ns()
            answers[name].add(asks[name](key))
            times[name].append((time.perf_counter_ns() - began) / 1000)
    return {name: [sorted(map(list, answers[name])), times[name]] for name in names}


def main() -> None:
    (mount, *folders), count, token = sys.argv[2:5], int(sys.argv[5]), sys.argv[6]
    tenant, own = map(Path, folders)
    become(int(sys.argv[1]))
    guesser = Guesser(mount)
    guesser.client.show(token)
    forbidden, allowed = guesser.open(tenant), guesser.open(own)
    say(exists=guesser.guess(EXISTS, forbidden, b"key-000000"), got=guesser.guess(GET, forbidden, b"key-000000"))
    wait_for_word()
    found: dict[str, dict[str, list[list[float]]]] = {}
    for name, op in (("exists", EXISTS), ("get", GET)):
        found[name] = measure(
            {
                "present": lambda key, op=op: guesser.guess(op, forbidden, key),
                "absent": lambda key, op=op: guesser.guess(op, forbidden, key),
                "own": lambda key, op=op: guesser.guess(op, allowed, key),
            },
            count,
        )
    found["stat"] = measure({name: lambda key: look(tenant / key.decode()) for name in ("present", "absent")}, count)
    say(**found)


if __name__ == "__main__":
    main()
