"""Stores the memory of the shared-memory tier with systemd while a holder's service restarts.

A service with ``FileDescriptorStoreMax=`` may have systemd keep descriptors (sd_notify(3), FDSTORE), and gets them at
its next start (sd_listen_fds(3)); systemd closes them when the service is stopped for good. A holder that ends leaves
the tier's entries there, once the mount is gone and all is stored; the next holder takes them out before it starts a
daemon. Meanwhile no process uses them. Each descriptor of an entry is stored, or an empty file for an entry without
descriptors, by a name with these fields:

    NAME,NUMBER,COUNT,CONTENT       CONTENT in hexadecimal digits, with the first one

The last one is ``complete,0,1,COUNT``, of all descriptors before it: an incomplete set is dropped. A killed holder
leaves nothing: then the tier is empty after the restart. Standard library only, as all of `main`.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

KEPT_PREFIX = "tier/"
VOLUME = "tier/volume"
"""identifies the blocks' volume; without this entry nothing is stored"""
COMPLETE = "complete"
NAME_SIZE_MAX = 255
FIRST = 3
"""number of the first descriptor that systemd passes"""
SECONDS = 5.0
"""timeout of systemd for one exchange"""

Thing = tuple[bytes, list[int]]
"""content, descriptors"""


class Store:
    """The store of this process's service. Removes its variables from the environment, but for NOTIFY_SOCKET."""

    def __init__(self) -> None:
        said = {name: os.environ.pop(name, "") for name in ("FDSTORE", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
        path = os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        if said["FDSTORE"] == "0":
            self._address = ""
        self._names: list[str] = []
        if said["LISTEN_PID"] == str(os.getpid()) and said["LISTEN_FDS"].isdigit():
            self._names = said["LISTEN_FDNAMES"].split(":")[: int(said["LISTEN_FDS"])]

    def take_things(self) -> dict[str, Thing]:
        """Take the former holder's entries out of systemd's store. {}: the set is incomplete."""
        descriptors = list(range(FIRST, FIRST + len(self._names)))
        names, self._names = self._names, []
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if not names:
            return {}
        is_out = self._notify_systemd([(f"FDSTOREREMOVE=1\nFDNAME={name}", None) for name in dict.fromkeys(names)])
        things = _join_things(names, descriptors) if is_out else {}
        used = {descriptor for _, own in things.values() for descriptor in own}
        for descriptor in set(descriptors) - used:
            os.close(descriptor)
        return things

    def leave_things(self, things: dict[str, Thing]) -> None:
        """Store the tier's entries with systemd. The descriptors stay the caller's."""
        if VOLUME not in things:
            return
        messages: list[tuple[str, int | None]] = []
        empty = os.memfd_create("kvfuse-empty", os.MFD_CLOEXEC)
        carriers = [empty]
        try:
            for name, (content, descriptors) in things.items():
                if not name.startswith(KEPT_PREFIX):
                    continue
                if not descriptors:  # an empty file of its own, as systemd stores each file once
                    descriptors = [os.memfd_create("kvfuse-empty", os.MFD_CLOEXEC)]
                    carriers += descriptors
                for number, descriptor in enumerate(descriptors):
                    word = f"{name},{number},{len(descriptors)},{'' if number else content.hex()}"
                    if len(word) > NAME_SIZE_MAX or ":" in word:
                        return
                    messages.append((f"FDSTORE=1\nFDNAME={word}", descriptor))
            if messages:
                messages.append((f"FDSTORE=1\nFDNAME={COMPLETE},0,1,{len(messages):08x}", empty))
                self._notify_systemd(messages)
        finally:
            for carrier in carriers:
                os.close(carrier)

    def _notify_systemd(self, messages: Sequence[tuple[str, int | None]]) -> bool:
        """Send messages, and wait until systemd has handled them. False: it has not, in time."""
        if not self._address:
            return False
        deadline = time.monotonic() + SECONDS
        mine, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaker:
                speaker.connect(self._address)
                for text, descriptor in (*messages, ("BARRIER=1", theirs)):
                    speaker.settimeout(max(0.001, deadline - time.monotonic()))
                    socket.send_fds(speaker, [text.encode()], [] if descriptor is None else [descriptor])
            os.close(theirs)
            theirs = -1
            poll = select.poll()
            poll.register(mine, 0)
            return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))  # systemd has closed the other end
        except OSError as error:
            with suppress(OSError):
                os.write(2, f"kvfuse: systemd does not keep the tier: {error}\n".encode())
            return False
        finally:
            os.close(mine)
            if theirs >= 0:
                os.close(theirs)


def _join_things(names: Sequence[str], descriptors: Sequence[int]) -> dict[str, Thing]:
    """Join descriptors and their names to entries. {}: the set is incomplete."""
    parts: dict[str, dict[int, int]] = {}
    about: dict[str, tuple[bytes, int]] = {}
    count = total = 0
    for word, descriptor in zip(names, descriptors, strict=True):
        name, *rest = word.split(",")
        try:
            number, size, content = int(rest[0]), int(rest[1]), bytes.fromhex(rest[2])
        except (IndexError, ValueError):
            continue  # not of this store: a socket of a unit, for example
        if name == COMPLETE:
            total = int.from_bytes(content, "big")
        elif name.startswith(KEPT_PREFIX):
            count += 1
            parts.setdefault(name, {})[number] = descriptor
            if not number:
                about[name] = content, size
    are_whole = all(name in about and sorted(parts[name]) == list(range(about[name][1])) for name in parts)
    if not count or count != total or not are_whole:
        return {}
    return {name: (about[name][0], [own[number] for number in sorted(own)]) for name, own in parts.items()}
