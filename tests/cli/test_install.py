"""scripts/install and what it puts into place: the helpers that mount(8) and umount(8) look for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import KVFUSE
from places import ROOT

DATA = ROOT / "kvfuse" / "data"
HELPERS = ("mount.kvfuse", "mount.fuse.kvfuse", "umount.kvfuse", "umount.fuse.kvfuse")
SECONDS_MAX = 240


def install_helper(name: str, folder: Path, program: Path) -> Path:
    """As scripts/install does."""
    helper = folder / name
    helper.write_text((DATA / name.replace(".fuse", "")).read_text().replace("@KVFUSE@", str(program)))
    helper.chmod(0o755)
    return helper


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvfuse-test-") as name:
        yield Path(name)


# -- the helpers alone, with a kvfuse that only says how it was called ------------------------------


@pytest.fixture
def echo(folder: Path) -> Path:
    program = folder / "kvfuse"
    program.write_text('#!/bin/sh\nprintf "<%s>" "$@"\nexit "${STATUS:-0}"\n')
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("name", "arguments", "called"),
    [
        ("mount.kvfuse", "/srv/kv /mnt/kv -o rw,noatime", "<mount><-o><rw,noatime><--></srv/kv></mnt/kv>"),
        ("mount.kvfuse", "/srv/kv /mnt/kv -sn -v -o ro -t kvfuse", "<mount><-o><ro><--></srv/kv></mnt/kv>"),
        ("mount.kvfuse", "/srv/kv /mnt/kv", "<mount><-o><defaults><--></srv/kv></mnt/kv>"),
        ("mount.kvfuse", "/srv/kv /mnt/kv -f -o rw", ""),
        ("umount.fuse.kvfuse", "/mnt/kv", "<umount><--></mnt/kv>"),
        ("umount.fuse.kvfuse", "/mnt/kv -n -v -r -t fuse.kvfuse", "<umount><--></mnt/kv>"),
        ("umount.fuse.kvfuse", "/mnt/kv -l", "<umount><--lazy><--></mnt/kv>"),
    ],
)
def test_what_mount_and_umount_ask_is_passed_on(
    folder: Path, echo: Path, name: str, arguments: str, called: str
) -> None:
    helper = install_helper(name, folder, echo)
    done = subprocess.run([helper, *arguments.split()], capture_output=True, text=True, check=True)
    assert done.stdout == called


@pytest.mark.parametrize(
    ("name", "arguments", "ours", "theirs"),
    [
        ("mount.kvfuse", ["/srv/kv", "/mnt/kv"], 2, 1),
        ("mount.kvfuse", ["/srv/kv", "/mnt/kv"], 3, 32),
        ("mount.kvfuse", ["/srv/kv", "/mnt/kv"], 5, 32),
        ("umount.kvfuse", ["/mnt/kv"], 4, 32),
    ],
)
def test_exit_status_is_what_mount_8_knows(
    folder: Path, echo: Path, name: str, arguments: list[str], ours: int, theirs: int
) -> None:
    helper = install_helper(name, folder, echo)
    environment = {**os.environ, "STATUS": str(ours)}
    done = subprocess.run([helper, *arguments], stdout=subprocess.DEVNULL, env=environment, check=False)
    assert done.returncode == theirs


@pytest.mark.parametrize("name", ["mount.kvfuse", "umount.kvfuse"])
def test_a_wrong_call(folder: Path, echo: Path, name: str) -> None:
    helper = install_helper(name, folder, echo)
    for arguments in ([], ["/srv/kv", "/mnt/kv", "-X"], ["/srv/kv", "/mnt/kv", "-N", "5"]):
        done = subprocess.run([helper, *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr


# -- mount(8) itself --------------------------------------------------------------------------------

IN_OWN_NAMESPACE = """
set -eu
mount --bind "$BASE/sbin" /sbin
cd "$BASE"
mount -t kvfuse volume mnt -o _netdev,nofail,x-systemd.automount,allow_other,noatime,capacity=64MiB
grep " $BASE/mnt .*noatime .*fuse.kvfuse $BASE/volume .*allow_other" /proc/self/mountinfo >&2
echo kept > mnt/file
umount mnt
test ! -e mnt/file
! grep " $BASE/mnt " /proc/self/mountinfo

mount -T fstab -a
mount -T fstab -a  # sees that it is mounted
test "$(grep -c " $BASE/mnt " /proc/self/mountinfo)" = 1
test "$(cat mnt/file)" = kept
umount mnt

mount -t fuse.kvfuse volume mnt -o ro,nodev
if touch mnt/more; then exit 1; fi
exec 9< mnt/file
if umount mnt 9<&-; then exit 1; fi  # so that the shell alone has the file open
umount -l mnt
exec 9<&-

status=0
mount -t kvfuse volume mnt -o bogus || status=$?
test $status = 1
"""


@pytest.mark.ring(3)
@pytest.mark.root
def test_mount_and_umount_find_the_helpers(folder: Path) -> None:
    """With a /sbin of its own, in a mount namespace that ends with the test."""
    (folder / "sbin").mkdir()
    (folder / "mnt").mkdir()
    program = folder / "kvfuse"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {" ".join(KVFUSE)} "$@"\n')
    program.chmod(0o755)
    for name in HELPERS:
        install_helper(name, folder / "sbin", program)
    (folder / "fstab").write_text(
        f"{folder}/volume {folder}/mnt kvfuse nofail,x-systemd.automount,capacity=64MiB 0 0\n"
    )
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "slave", "sh", "-c", IN_OWN_NAMESPACE],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS_MAX,
        env={**os.environ, "BASE": str(folder)},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "is busy: files or folders below it are in use by sh" in done.stderr
    assert "unknown option 'bogus'" in done.stderr


# -- scripts/install --------------------------------------------------------------------------------


def install(base: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    places = [f"--{name}={base / name}" for name in ("prefix", "bin", "sbin", "share")]
    command = [ROOT / "scripts" / "install", *(part for place in places for part in place.split("=")), *arguments]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS_MAX,
        env={**os.environ, "PATH": path},
    )


def is_for_all(program: Path) -> bool:
    """Other users may execute it."""
    real = program.resolve()
    return real.stat().st_mode & 0o005 == 0o005 and all(above.stat().st_mode & 0o001 for above in real.parents)


@pytest.mark.ring(3)
def test_install_and_uninstall(folder: Path) -> None:
    folder.chmod(0o755)
    (folder / "sbin").mkdir()
    foreign = folder / "sbin" / "mount.other"
    foreign.write_text("not ours\n")

    done = install(folder)
    assert done.returncode == 0, done.stderr
    assert "Installed: kvfuse " in done.stderr
    version = subprocess.run(
        [folder / "bin" / "kvfuse", "version"], capture_output=True, text=True, check=True, cwd="/"
    )
    assert "missing" not in version.stdout
    for command in ("bench", "replay", "cluster-dev"):  # of packages beside
        subprocess.run([folder / "bin" / "kvfuse", command, "--help"], capture_output=True, check=True, cwd="/")
    template = subprocess.run([folder / "bin" / "kvfuse", "config", "--template"], capture_output=True, check=True)
    assert template.stdout == (ROOT / "mount.conf").read_bytes(), "data files are installed"
    for name in HELPERS:
        helper = folder / "sbin" / name
        assert os.access(helper, os.X_OK)
        assert f"kvfuse={folder}/prefix/bin/kvfuse\n" in helper.read_text()
        assert "@" not in helper.read_text().replace("$@", "")

    assert "kvfuse COMMAND" in (folder / "share/man/man1/kvfuse.1").read_text().replace("\n", " ").replace(".B ", "")
    assert "complete" in (folder / "share/bash-completion/completions/kvfuse").read_text()

    if os.geteuid() == 0:  # for all users, so not with a Python of root's own, as it was first in PATH
        assert is_for_all(folder / "prefix/bin/python")
    installed, point = folder / "bin/kvfuse", folder / "a mount"
    point.mkdir()
    for words in ([], ["-o", "outlive=false"]):
        command = [installed, "mount", folder / "volume", point, "-o", "capacity=64MiB", *words]
        subprocess.run(command, check=True, timeout=SECONDS_MAX)
        try:
            done = install(folder, "--uninstall")
            assert done.returncode == 1
            assert f"kvfuse umount '{point}'" in done.stderr
            assert (point / ".kvfuse/version").exists(), "the mount goes on"
        finally:
            subprocess.run([installed, "umount", point], check=True, timeout=SECONDS_MAX)
    point.rmdir()
    shutil.rmtree(folder / "volume")

    done = install(folder, "--uninstall")
    assert done.returncode == 0, done.stderr
    left = [path for path in folder.rglob("*") if not path.is_dir()]
    assert left == [foreign]


def test_install_leaves_what_is_not_its_own(folder: Path) -> None:
    precious = folder / "prefix" / "precious"
    precious.parent.mkdir()
    precious.write_text("keep\n")
    done = install(folder)
    assert done.returncode == 1
    assert "was not made by this script" in done.stderr
    assert install(folder, "--uninstall").returncode == 0
    assert precious.read_text() == "keep\n"


FIND = 'source "$0"; _find_python "$1" || echo none'


@pytest.mark.root
def test_a_python_of_ones_own_is_not_for_all(folder: Path) -> None:
    """Neither one in a folder that is closed to others, nor a link to one there, nor one that nobody else may read."""
    own = folder / "own" / "bin"
    own.mkdir(parents=True)
    system = Path("/usr/bin/python3").resolve()
    shutil.copy(system, own / "python3")
    (folder / "links").mkdir()
    (folder / "links/python3").symlink_to(own / "python3")
    folder.chmod(0o755)

    def found(check: str, *places: Path) -> str:
        path = ":".join(map(str, (*places, "/usr/bin", "/bin")))
        command = ["bash", "-c", FIND, str(ROOT / "scripts/lib.sh"), check]
        environment = {**os.environ, "PATH": path}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert found("true", own) == str(own / "python3")
    assert found("_python_is_for_all", own) == str(own / "python3")
    for closed in (folder / "own", own / "python3"):
        closed.chmod(0o700)
        for place in (own, folder / "links"):
            assert found("_python_is_for_all", place) == "/usr/bin/python3"
            assert found("true", place) == str(place / "python3")
        closed.chmod(0o755)


@pytest.mark.parametrize("script", ["install", "check", "test"])
def test_scripts_explain_themselves(script: str) -> None:
    done = subprocess.run([ROOT / "scripts" / script, "--help"], capture_output=True, text=True, check=True)
    assert f"scripts/{script}" in done.stdout


@pytest.mark.parametrize("script", ["install", "check", "test", "lib.sh"])
def test_scripts_are_bash(script: str) -> None:
    bash = shutil.which("bash")
    assert bash
    subprocess.run([bash, "-n", ROOT / "scripts" / script], check=True)
