"""A mount lets go of what started it: no process that serves it has anything of that one, also after a kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from cli_lab import CAPACITY, Place, daemons_of, kvfuse
from mounting import KVFUSE, PATIENCE_S, wait_until
from places import ROOT

CONTENT = bytes(range(256)) * 1000
PYTHON_IGNORES = {signal.SIGPIPE, signal.SIGXFSZ}
ALL_KINDS = pytest.mark.parametrize("words", [[], ["outlive=false"], ["standby"]], ids=["held", "alone", "standby"])


def status_of(pid: int) -> dict[str, str]:
    return dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())


def signals(mask: str) -> set[int]:
    bits = int(mask, 16)
    return {number for number in range(1, 65) if bits >> (number - 1) & 1}


def processes_of(place: Place) -> list[int]:
    """Those of the mount: all in the session of the daemon or its holder, and what they started."""
    session = os.getsid(daemons_of(place.volume)[0])
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == session or session == int(status_of(int(folder.name))["PPid"]):
                found.append(int(folder.name))
        except (ProcessLookupError, FileNotFoundError):
            continue
    return found


def start(place: Place, words: Sequence[str], folder: Path) -> None:
    """As a script does that has a lock, a terminal, a umask, signals that it ignores, and secrets."""
    ours, theirs = os.openpty()
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    os.set_inheritable(lock, True)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD})
    former = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGTERM, 17, 40)}
    options = [text for word in (CAPACITY, *words) for text in ("-o", word)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AWS_SECRET_ACCESS_KEY": "secret", "NOTIFY_SOCKET": "@x"}
    command = ["setsid", "--ctty", "--wait", *KVFUSE, "mount", str(place.volume), str(place.point), *options]
    try:
        process = subprocess.Popen(
            command, cwd=folder, umask=0o077, env=environment, stdin=theirs, stdout=theirs, stderr=theirs,
            close_fds=False, restore_signals=False,
        )  # fmt: skip
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(lock)
        os.close(theirs)
    output = b""
    try:
        while part := os.read(ours, 1 << 16):
            output += part
    except OSError:  # EIO: nobody has the other end any more
        pass
    os.close(ours)
    assert process.wait(PATIENCE_S) == 0, output


def is_closed_on_exec(process: Path, number: str) -> bool:
    """What is not, somebody before this process had opened; or it is closed meanwhile."""
    try:
        flags = re.search(r"flags:\s*(\d+)", (process / "fdinfo" / number).read_text())
    except FileNotFoundError:
        return True
    assert flags is not None
    return bool(int(flags[1], 8) & os.O_CLOEXEC)


def check_all(place: Place, folder: Path, words: list[str]) -> None:
    for pid in processes_of(place):
        process = Path(f"/proc/{pid}")
        name = (process / "comm").read_text().strip()
        opened = {number: os.readlink(process / "fd" / number) for number in os.listdir(process / "fd")}
        assert not [target for target in opened.values() if str(folder) in target or "/pts/" in target], (name, opened)
        pipes = [number for number, target in opened.items() if target.startswith("pipe:")]
        inherited = [number for number in pipes if not is_closed_on_exec(process, number)]
        assert not inherited, (name, inherited, opened)
        assert os.readlink(process / "cwd") == "/", name
        fields = status_of(pid)
        ignored = {signal.SIGINT} if name == "kvfuse-standby" else set()
        assert signals(fields["SigIgn"]) <= PYTHON_IGNORES | ignored, name
        blocked = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1} if name == "kvfuse-guard" else set()
        assert signals(fields["SigBlk"]) <= blocked, name
        assert (process / "stat").read_text().rpartition(")")[2].split()[4] == "0", f"{name} has a terminal"
        variables = (process / "environ").read_bytes() if words != ["outlive=false"] else b""  # it is of the exec
        assert b"secret" not in variables, name
        assert b"NOTIFY_SOCKET" not in variables, name


@ALL_KINDS
def test_nothing_of_the_starter_is_left(place: Place, tmp_path: Path, words: list[str]) -> None:
    folder = tmp_path / "starter"
    folder.mkdir()
    start(place, words, folder)
    check_all(place, folder, words)
    os.mkdir(place.point / "folder", 0o755)
    (place.point / "file").write_bytes(b"x")
    assert (place.point / "folder").stat().st_mode & 0o777 == 0o755, "the daemon's umask is nobody's"
    if words != ["outlive=false"]:
        former = place.pid
        os.kill(former, signal.SIGKILL)
        assert sorted(os.listdir(place.point)) == ["file", "folder"], "the next daemon answers"
        assert place.pid != former
        check_all(place, folder, words)
    held = daemons_of(place.volume)
    assert kvfuse("umount", place.point).returncode == 0, "a signal that the starter ignored ends it"
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in held), "the end of all")


def test_sigterm_that_the_starter_ignored_ends_it(place: Place, tmp_path: Path) -> None:
    start(place, [], tmp_path)
    (holder,) = {int(status_of(pid)["PPid"]) for pid in [place.pid]}
    os.kill(holder, signal.SIGTERM)
    wait_until(lambda: not place.is_mounted, "the end of the mount")


def test_paths_of_words_are_those_of_the_folder_it_was_begun_in(place: Place, tmp_path: Path) -> None:
    """Also for the next daemon, when that folder has another name."""
    begun = tmp_path / "begun"
    begun.mkdir()
    words = ["-o", "segments.path=bytes,log.file=here.log", "-o", CAPACITY]
    done = kvfuse("mount", place.volume, place.point, *words, cwd=begun)
    assert done.returncode == 0, done.stderr
    with (place.point / "file").open("wb") as file:
        file.write(CONTENT)
        os.fsync(file.fileno())
    assert list((begun / "bytes").iterdir())
    former = place.pid
    os.kill(former, signal.SIGKILL)
    assert (place.point / "file").read_bytes() == CONTENT
    assert place.pid != former
    assert str(former) in (begun / "here.log").read_text()
    assert not Path("/bytes").exists()
    assert kvfuse("umount", place.point).returncode == 0
    comma = tmp_path / "a,b"
    comma.mkdir()
    done = kvfuse("mount", place.volume, place.point, *words, cwd=comma)
    assert (done.returncode, "name it in mount.conf" in done.stderr) == (2, True)
