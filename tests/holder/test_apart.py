"""A mount that `kvfuse hold` keeps and `kvfuse serve` serves, in containers of their own: either may end."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from apart_lab import ApartMount, Container, apart_mount
from mixed_workers import loaded
from mounting import KVFUSE, wait_until
from places import LABS

from kvfuse.credentials import Capability, process_status
from kvfuse.usrbio.client import connect

pytestmark = [pytest.mark.ring(2), pytest.mark.skipif(os.geteuid() != 0, reason="namespaces take root")]

USER = 12345
WORDS = ("capacity=1GiB", "segment_size=64MiB")
STALL_SECONDS = 1.0
"""that a call may wait where another container stands by"""
KINDS = ("stores", "appends", "pages", "names", "rings", "clients")


@pytest.fixture
def mount() -> Iterator[ApartMount]:
    with apart_mount(WORDS) as made:
        yield made


def answers(mount: ApartMount) -> float:
    """Seconds until the mount answers."""
    began = time.monotonic()
    os.statvfs(mount.point)
    return time.monotonic() - began


def test_calls_wait_for_the_first_daemon(mount: ApartMount) -> None:
    mount.hold()
    reader = subprocess.Popen(["stat", "-f", mount.point], stdout=subprocess.DEVNULL)
    mount.serve()
    assert reader.wait(60) == 0
    (mount.point / "file").write_bytes(b"x" * 100_000)
    assert (mount.point / "file").read_bytes() == b"x" * 100_000


def test_the_daemons_container_has_no_right_to_mount(mount: ApartMount) -> None:
    mount.hold()
    container = mount.serve()
    mount.wait_until_served()
    status = process_status(container.pid)
    assert not int(status["CapEff"], 16) >> Capability.SYS_ADMIN & 1
    assert (mount.point / ".kvfuse" / "control.sock").is_socket(), "the holder bound it"
    assert "map no memory of this daemon" not in mount.log.read_text(), "the holder made the folders of the memory"


@pytest.mark.parametrize("keeper", ["the first holder", "another holder"])
def test_clients_of_another_user_read_in_place(keeper: str) -> None:
    """The daemon may not mount, so the folders of memory that it can take back are the holder's."""
    with apart_mount((*WORDS, "allow_other")) as mount:
        hold = mount.hold()
        mount.serve()
        mount.wait_until_served()
        if keeper == "another holder":
            hold.kill()
            mount.hold()
            wait_until(lambda: "goes on, with" in mount.log.read_text(), "the daemon to find the next holder")
        (mount.point / "own").mkdir()
        os.chown(mount.point / "own", USER, USER)
        (mount.point / "secret").write_bytes(b"root's")
        (mount.point / "secret").chmod(0o600)
        command = [sys.executable, LABS / "ring_guest.py", "/", mount.point, str(USER)]
        seen = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
        assert (seen["is_read"], seen["is_viewed"], seen["is_shared"], seen["owner"]) == (True, True, True, USER)
        assert seen["secret"] == errno.EACCES


@pytest.mark.parametrize("ended", ["daemon", "serve", "hold", "serve by SIGTERM", "hold by SIGTERM"])
def test_either_ends_and_nothing_in_use_notices(mount: ApartMount, ended: str) -> None:
    hold, serve = mount.hold(), mount.serve()
    mount.wait_until_served()
    (mount.point / "file").write_bytes(b"before")
    held = os.open(mount.point / "file", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    client = connect(mount.point)
    namespace = client.namespace("blocks")
    iov, ring = client.iov(1 << 20), client.ring(8)
    iov.array[:] = 7
    ring.prep_put(iov, 0, namespace, b"key", 1 << 20)
    ring.submit()
    assert ring.wait(1, 60)["result"].tolist() == [1 << 20]
    if ended == "daemon":
        mount.kill_daemon()
    elif ended.startswith("serve"):
        if ended == "serve":
            serve.kill()
        else:
            assert serve.terminate() == 0
        mount.serve()
    else:
        if ended == "hold":
            hold.kill()
        else:
            assert hold.terminate() == 0
        assert os.pread(held, 6, 0) == b"before", "the daemon goes on without it"
        mount.hold()
        wait_until(lambda: "goes on, with" in mount.log.read_text(), "the daemon to find the next holder")
    if ended != "hold":
        mount.wait_until_served(1 if "hold" in ended else 2)
    assert os.pread(held, 6, 0) == b"before"
    assert os.pwrite(held, b"after!", 0) == 6
    os.fsync(held)
    other = os.open(mount.point / "file", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    ring.prep_get(iov, 0, namespace, b"key", 1 << 20)
    ring.submit()
    assert ring.wait(1, 60)["result"].tolist() == [1 << 20]
    assert (iov.array == 7).all()
    client.close()
    os.close(held)
    os.close(other)
    assert (mount.point / "file").read_bytes() == b"after!"


def test_after_the_holder_the_daemon_may_go_too(mount: ApartMount) -> None:
    """The next holder has all that the former one had, and what was kept while there was none."""
    hold, serve = mount.hold(), mount.serve()
    mount.wait_until_served()
    hold.kill()
    held = os.open(mount.point / "while there is no holder", os.O_RDWR | os.O_CREAT)
    os.write(held, b"kept")
    client = connect(mount.point)
    mount.kill_daemon()  # the supervisor has everything, too
    assert os.pread(held, 4, 0) == b"kept"
    mount.hold()
    wait_until(lambda: "goes on, with" in mount.log.read_text(), "the daemon to find the next holder")
    serve.kill()
    mount.serve()
    assert os.pread(held, 4, 0) == b"kept"
    assert client.namespace("blocks") is not None
    client.close()
    os.close(held)


def test_a_second_container_stands_by(mount: ApartMount) -> None:
    mount.hold()
    first = mount.serve()
    mount.wait_until_served()
    second = mount.serve()
    wait_until(lambda: mount.log.read_text().count("waits for its turn") == 2, "the second one to wait")
    wait_until(lambda: stands_by(second), "the second one to have imported everything")
    first.kill()
    assert answers(mount) < STALL_SECONDS
    third = mount.serve()
    wait_until(lambda: stands_by(third), "the third one to have imported everything")
    assert second.terminate() == 0
    assert answers(mount) < STALL_SECONDS


def stands_by(container: Container) -> bool:
    """Whether a process of the container has imported all that a daemon needs: it is in a read of its socket."""
    children = f"/proc/{container.pid}/task/{container.pid}/children"
    try:
        found = [int(word) for word in Path(children).read_text().split()]
        return any("recvmsg" in wchan(pid) or "skb_wait" in wchan(pid) for pid in found)
    except FileNotFoundError:
        return False


def wchan(pid: int) -> str:
    return Path(f"/proc/{pid}/wchan").read_text()


def test_both_at_once_end_the_mount_and_the_next_ones_make_another(mount: ApartMount) -> None:
    hold, serve = mount.hold(), mount.serve()
    mount.wait_until_served()
    (mount.point / "file").write_bytes(b"x")
    folder = os.open(mount.point, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    serve.kill()
    hold.kill()
    with pytest.raises(OSError) as raised:
        os.statvfs(mount.point)
    assert raised.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    mount.hold()
    mount.serve()
    assert (mount.point / "file").read_bytes() == b"x"


def test_callers_get_an_error_where_nobody_comes(mount: ApartMount) -> None:
    hold = mount.hold("--wait", "2")
    serve = mount.serve()
    mount.wait_until_served()
    serve.kill()
    with pytest.raises(OSError) as raised:
        os.statvfs(mount.point)
    assert raised.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    assert hold.wait() == 1
    assert "nobody served it for 2 s" in mount.log.read_text()
    mount.detach()


def test_where_both_are_told_to_end_no_dead_mount_is_left(mount: ApartMount) -> None:
    hold, serve = mount.hold("--grace", "4"), mount.serve()
    mount.wait_until_served()
    (mount.point / "file").write_bytes(b"x")
    os.kill(hold.pid, signal.SIGTERM)
    assert serve.terminate() == 0
    assert hold.wait() == 0
    assert not mount.is_mounted


def test_a_holder_whose_mount_goes_before_a_supervisor_has_found_it_ends(mount: ApartMount) -> None:
    hold, serve = mount.hold(), mount.serve()
    mount.wait_until_served()
    hold.kill()
    os.kill(serve.pid, signal.SIGSTOP)
    hold = mount.hold()
    subprocess.run(["umount", "-i", mount.point], check=True)
    assert hold.wait() == 0
    os.kill(serve.pid, signal.SIGCONT)
    assert serve.wait() == 0
    assert "is given up" not in mount.log.read_text()


def test_a_second_holder_is_refused(mount: ApartMount) -> None:
    mount.hold()
    mount.serve()
    mount.wait_until_served()
    done = subprocess.run(
        [*KVFUSE, "hold", mount.volume, mount.point, "--socket", mount.socket], capture_output=True, text=True
    )
    assert done.returncode == 5
    assert "another 'kvfuse hold' keeps this mount" in done.stderr


def test_a_wrong_mount_conf_does_no_harm_to_a_mount_in_use(mount: ApartMount) -> None:
    conf = mount.base / "mount.conf"
    text = f'volume.path = "{mount.volume}"\n'
    conf.write_text(text)
    mount.source = conf
    mount.hold()
    serve = mount.serve()
    mount.wait_until_served()
    (mount.point / "file").write_bytes(b"x")
    serve.kill()
    conf.write_text(f"{text}volume.capacty = 1\n")
    mount.serve()
    assert (mount.point / "file").read_bytes() == b"x"
    assert "a mount that is in use goes on as it was" in mount.log.read_text()
    conf.write_text(text)


def hold_of(mount: ApartMount) -> object:
    """What `kvfuse status` says of the process that keeps the mount."""
    done = subprocess.run([*KVFUSE, "status", mount.point, "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)[0]["holder"]["hold"]


def test_status_says_who_keeps_it(mount: ApartMount) -> None:
    hold = mount.hold()
    mount.serve()
    mount.wait_until_served()
    assert hold_of(mount) == "connected"
    hold.kill()
    wait_until(lambda: hold_of(mount) == "away", "the supervisor to notice")
    mount.hold()


def replace_holder(mount: ApartMount, hold: Container, *, by_signal: bool) -> Container:
    """End the container that keeps the mount; the next one has all entries when this returns."""
    former = mount.log.read_text().count("goes on, with")
    if by_signal:
        assert hold.terminate() == 0
    else:
        hold.kill()
    hold = mount.hold()
    wait_until(lambda: mount.log.read_text().count("goes on, with") > former, "the deposit")
    return hold


@pytest.mark.ring(3)
@pytest.mark.timeout(900)
def test_a_load_notices_no_end_of_any_container(seed: int) -> None:
    """Random ends beside programs that compare every byte."""
    rng = random.Random(seed)
    with apart_mount(("publish=strict", "capacity=1GiB", "segment_size=64MiB")) as mount:
        hold, serves = mount.hold(), [mount.serve(), mount.serve()]
        mount.wait_until_served()
        stalls = []
        with loaded([mount], KINDS, seed, ".") as workers:
            for _ in range(20):
                which = rng.choice(["daemon", "serve", "hold"])
                by_signal = rng.random() < 0.3
                if which == "daemon":
                    mount.kill_daemon()
                elif which == "serve":
                    place = rng.randrange(2)
                    if by_signal:
                        assert serves[place].terminate() == 0
                    else:
                        serves[place].kill()
                    stalls.append(answers(mount))
                    serves[place] = mount.serve()
                else:
                    hold = replace_holder(mount, hold, by_signal=by_signal)
                stalls.append(answers(mount))
            reports = [worker.report() for worker in workers]
        print(f"stalls {[round(stall, 2) for stall in sorted(stalls)]}")
        print({report.kind: (report.calls, report.lost, round(report.longest, 2)) for report in reports})
        assert [error for report in reports for error in report.errors] == []
        assert all(report.calls for report in reports)
