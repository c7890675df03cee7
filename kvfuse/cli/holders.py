"""Asks the holder of a mount: the process that keeps it while daemons come and go (`holder.main`)."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvfuse.errors import MountError
from kvfuse.holder import rights as holder_rights
from kvfuse.holder import status_socket
from kvfuse.mounttable import Mounted

STATUS_SECONDS = 2.0
PROGRAMS = (b"/holder/main.py", b"/fs/holder.py")
"""of holders, the second one of former versions"""
ABSENT = (
    "it has no process that keeps it: it was mounted with outlive=false, or where that cannot be ('kvfuse doctor'), "
    "by an older version, or a former user"
)


def _paths(row: Mounted) -> list[str]:
    """Where the socket may be; root reaches those of all users."""
    found = status_socket.list_folders(os.geteuid())
    if os.geteuid() == 0:
        found += [os.fspath(folder) for folder in Path("/run/user").glob("*/kvfuse")]
    else:
        found += status_socket.list_folders(0)
    return [status_socket.make_path(folder, row.device) for folder in found]


def ask(row: Mounted, patience: float, **request: object) -> dict[str, Any]:
    """What the holder of a mount answers. MountError: there is none, or it does not answer in time, or says "error"."""
    problem = ABSENT
    for path in _paths(row):
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with stream, suppress(FileNotFoundError, ConnectionRefusedError):
            stream.settimeout(patience)
            try:
                stream.connect(path)
                if holder_rights.get_peer(stream)[1] not in (0, row.user):
                    continue  # somebody else's process says it is the holder
                stream.send(json.dumps(request).encode())
                answer = json.loads(stream.recv(status_socket.ANSWER_SIZE_MAX) or b"{}")
            except PermissionError:
                problem = "only root, and who mounted it, may ask for that"
                continue
            except TimeoutError:
                raise MountError(f"{row.point}: its holder does not answer within {patience:g} s") from None
            except (BrokenPipeError, ConnectionResetError, ValueError, RecursionError):
                answer = {}
            if not answer or not isinstance(answer, dict):
                raise MountError(f"{row.point}: its holder has ended meanwhile")
            if "error" in answer:
                raise MountError(f"{row.point}: {answer['error']}")
            return answer
    raise MountError(f"{row.point}: {problem}")


def look_at(row: Mounted) -> dict[str, Any] | None:
    """What the holder says of its daemons; None: there is none to ask."""
    try:
        return ask(row, STATUS_SECONDS, do="status")
    except (MountError, OSError):
        return None


def is_of_another_container(said: dict[str, Any]) -> bool:
    """Whether pids in what `look_at` found are of another pid namespace. Holders of former versions do not say."""
    ours = status_socket.read_pid_namespace()
    return bool(said.get("pids", ours) != ours)


def find_parent(daemon: object) -> int | None:
    """The holder of the daemon with this pid, by its command line: it may not answer yet. None: it is not seen here."""
    try:
        parent = int(Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[1])
        words = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return parent if any(word.endswith(PROGRAMS) for word in words) else None


def described(said: dict[str, Any]) -> str:
    """One line of what `look_at` found."""
    words = f"outlives its daemon, held by process {said.get('holder')}"
    if (hold := said.get("hold")) is not None:
        where = " of another container" if is_of_another_container(said) else ""
        words = f"kept by 'kvfuse hold' ({hold}), served by process {said.get('holder')}{where}"
    if said.get("standby"):
        words += ", one stands by"
    if said.get("waits") is not None:
        words += f"; no daemon has answered for {said['waits']} s"
    elif said.get("upgrade"):
        words += f"; an upgrade is under way ({said['upgrade']})"
    if not said.get("last_change"):
        return words
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(said["last_change"]))
    longest = f", {said['longest_stall']} s at most" if said.get("longest_stall") is not None else ""
    counts = f"{said['deaths']} daemons died{_causes(said)}, {said['upgrades']} upgrades"
    return f"{words}; {counts}; at {when} calls waited {said['last_stall']} s{longest}"


def _causes(said: dict[str, Any]) -> str:
    """Of the deaths of daemons."""
    if not said.get("last_death"):
        return ""
    counts = [f"{count} {cause}" for cause, count in (said.get("causes") or {}).items() if count]
    last = f"the last with {said['last_death']}"
    return f" ({', '.join([*counts, last])})"
