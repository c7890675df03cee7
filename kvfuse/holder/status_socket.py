"""Answers commands that ask the holder of a mount, and notifies systemd. Standard library only, as all of `main`.

The socket's path is open to root and the holder's user alone: /run/kvfuse/holder-MAJOR-MINOR.sock, for other users
below $XDG_RUNTIME_DIR or /run/user/UID; the numbers are the mount's. It answers in any state of the daemon. A request
is one datagram of JSON, ``{"do": "status"}`` or ``{"do": "upgrade", "python": PATH, "seconds": N}``, and so the answer.

    request    allowed for                                    effect
    status     uid 0, the holder's user                       nothing
    upgrade    the same, if `rights.check_caller`             PATH runs as the holder does, if `check_program`
"""

from __future__ import annotations

import glob
import json
import os
import re
import socket
import time
from contextlib import suppress

from kvfuse.holder.child import CAUSES, Child
from kvfuse.holder.rights import Refused, check_caller, get_peer

STANDING_BY, LEAVING, BEGINNING, GOING_BACK = "standing by", "leaving", "beginning", "going back"
"""phases of an upgrade"""
REQUEST_SECONDS = 1.0
"""timeout of a connected client's request: the client is root, or a user that could kill the holder"""
ANSWER_SIZE_MAX = 1 << 16
UPGRADE_SECONDS_MAX = 3600.0


def list_folders(uid: int) -> list[str]:
    """List folders that a holder of this user may have its socket in; the best one first."""
    if uid == 0:
        return ["/run/kvfuse"]
    own = os.environ.get("XDG_RUNTIME_DIR") if uid == os.geteuid() else None
    return [f"{folder}/kvfuse" for folder in (own, f"/run/user/{uid}") if folder]


def make_path(folder: str, device: str) -> str:
    """Make the socket's path. ``device``: MAJOR:MINOR of the mount."""
    return f"{folder}/holder-{device.replace(':', '-')}.sock"


def find_device(point: str) -> str | None:
    """Find MAJOR:MINOR of the top mount at this path, which must have no links. Sends the mount no request."""
    found = None
    with open("/proc/self/mountinfo", "rb") as table:
        for row in table:
            fields = row.split(b" ", 5)
            place = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), fields[4])
            if os.fsdecode(place) == point:
                found = fields[2].decode()
    return found


def read_pid_namespace() -> str:
    """Read which pid namespace this process is of. "": /proc does not say."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def listen_at(path: str) -> socket.socket:
    """Open a socket for this user alone, in place of what has its path. OSError."""
    made = f"{path}.{os.getpid()}"  # renamed once it listens: other holders would remove it as a dead one's
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    former = os.umask(0o177)
    try:
        with suppress(FileNotFoundError):  # of a process of another container with the same pid
            os.unlink(made)
        listener.bind(made)
        listener.listen(8)
        os.rename(made, path)
    except BaseException:
        listener.close()
        with suppress(OSError):
            os.unlink(made)
        raise
    finally:
        os.umask(former)
    return listener


def _remove_dead_sockets(folder: str) -> None:
    """Remove sockets of killed holders."""
    for path in glob.glob(f"{folder}/holder-*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as stream:
            try:
                stream.connect(path)
            except ConnectionRefusedError:
                with suppress(OSError):
                    os.unlink(path)
            except OSError:
                pass  # another user's, or of a busy holder


class StatusCaller:
    """A client with an allowed request, which waits for one answer."""

    def __init__(self, stream: socket.socket) -> None:
        """Read the request. Refused: it is not allowed, or malformed; OSError: none arrived."""
        self._stream = stream
        self.program: str | None = None
        """the new version's Python, checked by the process that executes it; None: a request for the status"""
        self.seconds = 0.0
        stream.settimeout(REQUEST_SECONDS)
        said = stream.recv(ANSWER_SIZE_MAX)  # first, as a client that is refused before its send would get no answer
        if get_peer(stream)[1] not in (0, os.geteuid()):
            raise Refused("only root, and the user who mounted, may ask for that")
        try:
            request = json.loads(said)
        except (ValueError, RecursionError):
            request = None
        what = request.get("do") if isinstance(request, dict) else None
        if what == "upgrade":
            check_caller(stream)
            self.program, self.seconds = _parse_upgrade(request)
        elif what != "status":
            raise Refused("the holder does not know this request: it answers 'status' and 'upgrade'")

    def answer(self, **content: object) -> None:
        with suppress(OSError):
            self._stream.send(json.dumps(content).encode()[:ANSWER_SIZE_MAX])
        self._stream.close()


def _parse_upgrade(request: dict[str, object]) -> tuple[str, float]:
    """Parse (program, seconds) of a request. Refused."""
    program, seconds = request.get("python"), request.get("seconds")
    if isinstance(program, str) and isinstance(seconds, int | float) and 0 < seconds <= UPGRADE_SECONDS_MAX:
        return program, float(seconds)
    raise Refused(f"an upgrade is asked for with a program and at most {UPGRADE_SECONDS_MAX:.0f} seconds")


class DaemonFacts:
    """Facts about the daemons of a mount; `kvfuse status` shows them by these names."""

    def __init__(self) -> None:
        self.deaths = self.upgrades = 0
        self.last_death: str | None = None
        """a signal, an exit status, or an error of its own"""
        self.causes = dict.fromkeys(CAUSES, 0)
        """cause -> deaths"""
        self.last_stall: float | None = None
        """seconds for which calls waited for the last daemon"""
        self.longest_stall: float | None = None
        self.last_change: int | None = None
        """seconds of the epoch: when that daemon was ready"""

    def count_death(self, how: str, cause: str) -> None:
        self.deaths += 1
        self.causes[cause] += 1
        self.last_death = how

    def count_stall(self, stall: float) -> None:
        """Note that another daemon serves, after a stall of ``stall`` seconds."""
        self.last_stall = round(stall, 3)
        self.longest_stall = max(self.longest_stall or 0.0, self.last_stall)
        self.last_change = int(time.time())


class Upgrade:
    """An upgrade in progress. ``next`` shall serve, or ``back`` if that fails. None: that process is dead."""

    def __init__(self, client: StatusCaller, next: Child, back: Child, command: list[str], seconds: float) -> None:
        self.client, self.command, self.seconds = client, command, seconds
        self.next: Child | None = next
        self.back: Child | None = back
        self.began = 0.0
        """when the holder asked the serving daemon to leave; 0: not yet"""
        self.failure = ""
        """reason why ``next`` does not serve"""
        self.enter_phase(STANDING_BY, seconds)

    def enter_phase(self, phase: str, seconds: float) -> None:
        self.phase, self.deadline = phase, time.monotonic() + seconds

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def answer_client(self, **content: object) -> None:
        waited = round(time.monotonic() - self.began, 3) if self.began else 0.0
        self.client.answer(**content, waited=waited)


class StatusSocket:
    """The socket of one holder, from `open_socket` to `close`."""

    def __init__(self) -> None:
        self._notify = os.environ.pop("NOTIFY_SOCKET", None)  # daemons do not inherit it: systemd follows one process
        self._listener: socket.socket | None = None
        self._path = ""
        self._device: str | None = None
        self.problem = ""
        """reason why the socket could not be opened"""

    def open_socket(self, point: str) -> None:
        """Open the socket once the mount answers, unless it is open."""
        if self._listener is not None:
            return
        self._device = find_device(point)
        self.problem = "no folder for it: XDG_RUNTIME_DIR is not set"
        for folder in list_folders(os.geteuid()):
            try:
                self._listen_in(folder, self._device or "")
            except (OSError, ValueError) as error:
                self.problem = f"{folder}: {error}"
            else:
                self.problem = ""
                return

    def is_on_top(self, point: str) -> bool:
        """The mount is the top one at its path."""
        return self._device is not None and find_device(point) == self._device

    def _listen_in(self, folder: str, device: str) -> None:
        if not device:
            raise ValueError("the mount is not in the mount table")
        os.makedirs(folder, 0o755, exist_ok=True)
        path = make_path(folder, device)
        _remove_dead_sockets(folder)
        self._listener, self._path = listen_at(path), path

    def fileno(self) -> int:
        """-1: it is closed."""
        return self._listener.fileno() if self._listener is not None else -1

    def accept_caller(self) -> StatusCaller | None:
        """Accept a client and read its request. None: it was refused, and answered, or has gone."""
        assert self._listener is not None
        try:
            stream, _ = self._listener.accept()
        except OSError:
            return None
        try:
            return StatusCaller(stream)
        except Refused as refusal:
            with suppress(OSError):
                stream.send(json.dumps({"error": str(refusal)}).encode())
        except OSError:
            pass
        stream.close()
        return None

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            with suppress(OSError):
                os.unlink(self._path)

    def tell_systemd(self, *words: str) -> None:
        """Send systemd these words, as sd_notify(3) does."""
        if not self._notify:
            return
        name = "\0" + self._notify[1:] if self._notify.startswith("@") else self._notify
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as speaker, suppress(OSError):
            speaker.sendto(os.fsencode("\n".join(words)), name)
