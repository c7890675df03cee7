"""``bystander.py UID MOUNT``: another user, who works all the time. Answers each line with how long its calls took.

``waits`` says for how many seconds the present call has not returned.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from attacker_kit import Attacker, become, memfd, say, wait_for_word


class Bystander:
    """``longest``: seconds, by kind of call, since it was looked at last."""

    def __init__(self, mount: str) -> None:
        self._mount = mount
        self._began = time.monotonic()
        self.longest: dict[str, float] = {}

    def run(self) -> None:
        while True:
            self._took("stat", lambda: os.path.exists(f"{self._mount}/absent-{time.monotonic_ns()}"))
            self._took("read", self._read)
            self._took("ring", self._set_up_a_ring)
            time.sleep(0.005)  # a user who works now and then: it measures waits, not throughput

    def _took(self, kind: str, work: Callable[[], object]) -> None:
        self._began = time.monotonic()
        work()
        self.longest[kind] = max(self.longest.get(kind, 0), time.monotonic() - self._began)

    def _read(self) -> None:
        with open(f"{self._mount}/file", "rb") as file:
            assert file.read() == b"content"

    def _set_up_a_ring(self) -> None:
        client = Attacker(self._mount)
        ring = client.ring(8, 0)
        descriptor = memfd(4096)
        client.iov(descriptor, 4096)
        for number in (descriptor, ring.daemon_bell, ring.client_bell):
            os.close(number)
        client.close()

    def waits(self) -> float:
        return time.monotonic() - self._began


def main() -> None:
    become(int(sys.argv[1]))
    bystander = Bystander(sys.argv[2])
    thread = threading.Thread(target=bystander.run, daemon=True)
    thread.start()
    while wait_for_word():
        longest, bystander.longest = bystander.longest, {}
        say(works=thread.is_alive(), waits=bystander.waits(), longest=longest)


if __name__ == "__main__":
    main()
