"""Callers that may have a holder run a program, and the programs: a real holder, callers with less than root has."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mounting import PATIENCE_S, KvfuseMount, temporary_mount
from test_outlive import OUTLIVE, daemon_of
from upgrading import upgrade

from kvfuse.holder import rights as holder_rights
from kvfuse.holder import status_socket
from kvfuse.holder.rights import Refused, check_program

ASK = """
import socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream:
    stream.settimeout(60)
    stream.connect(sys.argv[1])
    stream.send(sys.argv[2].encode())
    print(stream.recv(1 << 16).decode())
"""
SOMEBODY = 1234
pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(OUTLIVE) as mounted:
        yield mounted


def socket_of(mount: KvfuseMount) -> Path:
    device = mount.point.stat().st_dev
    return Path(status_socket.make_path("/run/kvfuse", f"{os.major(device)}:{os.minor(device)}"))


def ask(mount: KvfuseMount, request: str, words: Sequence[str] = ()) -> dict[str, Any]:
    """What the holder answers to a process that ``words`` start. {}: nothing."""
    command = [*words, sys.executable, "-I", "-S", "-c", ASK, str(socket_of(mount)), request]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    found = json.loads(done.stdout or "{}")
    assert isinstance(found, dict)
    return found


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """It leaves a trace of having run."""
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\ngrep CapEff /proc/self/status > {tmp_path}/has-run\nexit 3\n")
    path.chmod(0o755)
    return path


CALLERS = {
    "no capability": (["setpriv", "--bounding-set=-all", "--inh-caps=-all"], "lacks CAP_CHOWN, .* more"),
    "one capability less": (["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all"], "lacks CAP_SYS_ADMIN, which"),
    "one without a name here": (
        ["setpriv", "--bounding-set=-net_raw", "--inh-caps=-all"],
        "lacks capability 13, which",
    ),
    "root of a user namespace": (["unshare", "--user", "--map-root-user"], "in another user namespace"),
}


@pytest.mark.parametrize("who", CALLERS)
def test_uid_0_is_not_enough_for_an_upgrade(mount: KvfuseMount, program: Path, who: str) -> None:
    words, why = CALLERS[who]
    former = daemon_of(mount)
    for asked in (str(program), sys.executable):
        answer = ask(mount, json.dumps({"do": "upgrade", "python": asked, "seconds": 5}), words)
        assert list(answer) == ["error"]
        assert re.search(why, answer["error"])
        assert "ask as root, with the capabilities of the holder" in answer["error"]
    assert not (program.parent / "has-run").exists()
    assert daemon_of(mount) == former
    assert ask(mount, '{"do": "status"}', words)["pid"] == former, "what changes nothing is answered"


def test_another_user_is_told_nothing(mount: KvfuseMount, program: Path) -> None:
    path = socket_of(mount)
    requests = ({"do": "status"}, {"do": "upgrade", "python": str(program), "seconds": 5})
    with pytest.raises(PermissionError):
        answers_to(SOMEBODY, path, requests)
    path.chmod(0o666)  # as if it had been passed a connection
    try:
        answers = answers_to(SOMEBODY, path, requests)
    finally:
        path.chmod(0o600)
    assert answers == 2 * [{"error": "only root, and the user who mounted, may ask for that"}]
    assert not (program.parent / "has-run").exists()


def answers_to(uid: int, path: Path, requests: Sequence[dict[str, object]]) -> list[object]:
    """Answers to this process, as another user's when it connects."""
    answers: list[object] = []
    os.seteuid(uid)
    try:
        for request in requests:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream:
                stream.settimeout(PATIENCE_S)
                stream.connect(os.fspath(path))
                stream.send(json.dumps(request).encode())
                answers.append(json.loads(stream.recv(1 << 16)))
    finally:
        os.seteuid(0)
    return answers


def test_a_process_that_ended_may_nothing() -> None:
    """Its number may be another one's by then."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        holder_rights.check_caller(ours)  # this process
    path = f"\0kvfuse-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        subprocess.run([sys.executable, "-c", f"import socket; socket.socket(1, 5).connect({path!r})"], check=True)
        stream, _ = listener.accept()
        with stream, pytest.raises(Refused, match="is not known what process"):
            holder_rights.check_caller(stream)


MALFORMED = [
    "{}",
    "[]",
    "nothing",
    "[" * 60_000,
    '{"do": ["upgrade"]}',
    '{"do": "\\ud800"}',
    '{"do": "upgrade"}',
    '{"do": "upgrade", "python": 5, "seconds": 5}',
    '{"do": "upgrade", "python": "/bin/true"}',
    '{"do": "upgrade", "python": "/bin/true", "seconds": "5"}',
    '{"do": "upgrade", "python": "/bin/true", "seconds": NaN}',
    '{"do": "upgrade", "python": "/bin/true", "seconds": 1e300}',
    '{"do": "upgrade", "python": "/bin/true", "seconds": -1}',
    '{"do": "upgrade", "python": "/bin/\\u0000true", "seconds": 5}',
    '{"do": "upgrade", "python": "/bin/\\ud800", "seconds": 5}',
    '{"do": "upgrade", "python": "", "seconds": 5}',
    '{"do": "upgrade", "python": "true", "seconds": 5}',
    '{"do": "upgrade", "python": "/bin", "seconds": 5}',
    '{"do": "upgrade", "python": "/bin/not-here", "seconds": 5}',
]


@pytest.mark.parametrize("request_text", MALFORMED)
def test_what_makes_no_sense_is_refused_and_the_holder_goes_on(mount: KvfuseMount, request_text: str) -> None:
    former = daemon_of(mount)
    answer = ask(mount, request_text)
    assert "error" in answer or not answer
    assert (ask(mount, '{"do": "status"}')["holder"], daemon_of(mount)) == (mount.pid, former)


# -- the program ------------------------------------------------------------------------------------


def foreign(path: Path) -> None:
    os.chown(path, SOMEBODY, -1)


def writable_by_all(path: Path) -> None:
    path.chmod(0o777)


def writable_by_a_group(path: Path) -> None:
    os.chown(path, -1, SOMEBODY)
    path.chmod(0o775)


CHANGES = {foreign: "belongs to user 1234", writable_by_all: "chmod go-w", writable_by_a_group: "chmod go-w"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """``bin/python`` is a link to ``real``, which is one to ``versions/3/bin/python3``."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "versions/3/bin").mkdir(parents=True)
    (tmp_path / "bin/python").symlink_to("../real")
    (tmp_path / "real").symlink_to(tmp_path / "versions/3/bin/python3")
    (tmp_path / "versions/3/bin/python3").write_text("#!/bin/sh\n")
    (tmp_path / "versions/3/bin/python3").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", ["bin", "versions", "versions/3", "versions/3/bin", "versions/3/bin/python3"])
def test_what_others_can_change_is_not_run(tree: Path, place: str, change: Any) -> None:
    check_program(str(tree / "bin/python"))
    change(tree / place)
    with pytest.raises(Refused, match=CHANGES[change]) as refusal:
        check_program(str(tree / "bin/python"))
    assert str(tree / place) in str(refusal.value)


def test_a_link_of_somebody_else_is_not_followed(tree: Path) -> None:
    os.chown(tree / "real", SOMEBODY, -1, follow_symlinks=False)
    with pytest.raises(Refused, match="real belongs to user 1234"):
        check_program(str(tree / "bin/python"))


def test_in_a_sticky_folder_the_owner_counts(tree: Path) -> None:
    """As in /tmp: others may make names there, but not replace root's."""
    (tree / "bin").chmod(0o1777)
    check_program(str(tree / "bin/python"))
    os.chown(tree / "bin/python", SOMEBODY, -1, follow_symlinks=False)
    with pytest.raises(Refused, match="belongs to user 1234"):
        check_program(str(tree / "bin/python"))


def test_links_that_lead_nowhere(tree: Path) -> None:
    (tree / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        check_program(str(tree / "loop"))
    for path in ("bin", "versions/3/bin/python3/more", "nothing"):
        with pytest.raises((Refused, OSError)):
            check_program(str(tree / path))
    check_program(f"{tree}//bin/./../bin/python")


def test_root_upgrades_to_what_is_its_own_alone(mount: KvfuseMount, program: Path) -> None:
    def asked() -> str:
        request = json.dumps({"do": "upgrade", "python": str(program), "seconds": 5})
        return str(ask(mount, request)["error"])

    program.chmod(0o757)
    assert f"other users may write to {program}" in asked()
    program.chmod(0o755)
    os.chown(program, SOMEBODY, -1)
    assert f"{program} belongs to user {SOMEBODY}" in asked()
    assert not (program.parent / "has-run").exists()
    os.chown(program, 0, -1)
    assert "exit status 3" in asked()
    assert (program.parent / "has-run").exists()
    upgrade(mount)
