"""What is published: one version in all places, dependencies by machine, what the scripts put into packages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from mounting import in_own_mounts
from places import ROOT, SCRIPTS
from rings import require_lab

import kvfuse
from kvfuse.cli import doctor

NATIVE = ("_native", "_fusewire", "_blocks", "_peers")
VERSIONED = ("kvfuse/__init__.py", "CHANGELOG.md", "benchmarks/pyproject.toml", "tools/cluster/pyproject.toml")
BUILD_SECONDS = 900
MOUNT = """
set -eu
mkdir -p /mnt/kv
mount -t kvfuse /srv/kv /mnt/kv -o cache,capacity=512MiB
echo hello > /mnt/kv/file
cat /mnt/kv/file
! apt-get remove -y kvfuse
umount /mnt/kv
kvfuse fsck --verify /srv/kv
apt-get remove -y kvfuse
test ! -e /opt/kvfuse/bin/kvfuse
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A tree with the files that name the version."""
    tree = tmp_path / "tree"
    beside = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("compat/*/pyproject.toml")]
    for name in (*VERSIONED, *beside, "scripts/version"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    return tree


def version(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tree / "scripts/version", *words], capture_output=True, text=True)


def git(tree: Path, *words: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    subprocess.run(["git", "-C", tree, *identity, *words], check=True, capture_output=True)


def test_all_places_name_one_version() -> None:
    done = version(ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == kvfuse.__version__


def test_a_place_of_another_version_is_named(copy: Path) -> None:
    for name in ("benchmarks/pyproject.toml", "CHANGELOG.md"):
        path = copy / name
        before = path.read_text()
        path.write_text(before.replace(kvfuse.__version__, "9.9.9", 1))
        done = version(copy)
        assert done.returncode == 1
        assert name in done.stderr
        path.write_text(before)
    assert version(copy).returncode == 0


def test_a_version_is_written_to_all_places(copy: Path) -> None:
    assert version(copy, "0.2").returncode == 1
    assert version(copy, "7.2.0rc1").returncode == 0
    assert "CHANGELOG.md begins with" in version(copy).stderr
    path = copy / "CHANGELOG.md"
    path.write_text(path.read_text().replace(f"## {kvfuse.__version__} (", "## 7.2.0rc1 (", 1))
    done = version(copy)
    assert (done.returncode, done.stdout) == (0, "7.2.0rc1\n"), done.stderr
    assert '"kvfuse==7.2.0rc1", "kvfuse-cluster==7.2.0rc1"' in (copy / "benchmarks/pyproject.toml").read_text()


def test_a_tag_of_another_version_is_refused(copy: Path) -> None:
    git(copy, "init", "-q")
    git(copy, "add", "-A")
    git(copy, "commit", "-q", "-m", "one")
    git(copy, "tag", f"v{kvfuse.__version__}")
    assert version(copy).returncode == 0
    git(copy, "tag", "v9.9.9")
    done = version(copy)
    assert done.returncode == 1
    assert "the commit has the tag v9.9.9" in done.stderr


@pytest.mark.parametrize(
    ("marker", "machine", "is_needed"),
    [
        ("", "riscv64", True),
        ('extra == "dev"', "x86_64", False),
        ('platform_machine == "x86_64" or platform_machine == "aarch64"', "aarch64", True),
        ('platform_machine == "x86_64" or platform_machine == "aarch64"', "riscv64", False),
        ("platform_machine != 'x86_64' and platform_machine != 'aarch64'", "x86_64", False),
        ("platform_machine != 'x86_64' and platform_machine != 'aarch64'", "riscv64", True),
    ],
)
def test_packages_of_other_machines_are_not_missed(
    monkeypatch: pytest.MonkeyPatch, marker: str, machine: str, is_needed: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert doctor._is_needed(marker) == is_needed


@pytest.mark.parametrize("name", ["build-dist", "build-deb", "version"])
def test_scripts_say_what_they_do(name: str) -> None:
    done = subprocess.run([SCRIPTS / name, "--help"], capture_output=True, text=True)
    assert f"scripts/{name}" in done.stdout + done.stderr
    assert subprocess.run([SCRIPTS / name, "--frobnicate"], capture_output=True).returncode != 0


@pytest.mark.ring(3)
@pytest.mark.timeout(BUILD_SECONDS)
def test_wheels_and_the_source_distribution(tmp_path: Path) -> None:
    """A manylinux wheel with all parts in C, which runs in a clean environment; sources with tests; a list."""
    dist = tmp_path / "dist"
    (dist / "theirs").mkdir(parents=True)
    done = subprocess.run([SCRIPTS / "build-dist", dist, "--python", sys.executable], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (dist / "theirs").exists(), "what others have there stays"
    [wheel] = dist.glob("kvfuse-*manylinux*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert all(any(f"kvfuse/native/{part}." in name for name in names) for part in NATIVE)
    assert not any(".libs/" in name for name in names), "no library is bundled"
    with tarfile.open(next(dist.glob("kvfuse-*.tar.gz"))) as sources:
        members = {name.partition("/")[2] for name in sources.getnames()}
    assert {"tests/conftest.py", "tests/labs/rings.py", "scripts/test", "kvfuse/native/blockcore.h"} <= members
    listed = json.loads(next(dist.glob("*.cdx.json")).read_text())["components"]
    assert {"pyfuse3", "trio", "lmdb"} <= {one["name"] for one in listed}
    assert all(one.get("licenses") for one in listed if one["name"] in ("pyfuse3", "lmdb"))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "clean"], check=True)
    pip = [tmp_path / "clean/bin/python", "-m", "pip", "install", "-q", "--find-links", dist, "kvfuse", "kvfuse-bench"]
    subprocess.run(pip, check=True)
    shown = subprocess.run([tmp_path / "clean/bin/kvfuse", "version"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith(f"kvfuse {kvfuse.__version__}")
    simulated = [
        tmp_path / "clean/bin/kvfuse",
        "replay",
        "--simulate",
        "--requests",
        "20",
        "--html",
        tmp_path / "a.html",
    ]
    subprocess.run(simulated, check=True, capture_output=True, cwd=tmp_path)
    assert "prefers-color-scheme" in (tmp_path / "a.html").read_text(), "its style was in the wheel"


@pytest.mark.needs("debootstrap")
@pytest.mark.timeout(2 * BUILD_SECONDS)
@pytest.mark.skipif(not shutil.which("debootstrap"), reason="no debootstrap: apt-get install debootstrap")
@pytest.mark.skipif(os.geteuid() != 0, reason="a small Debian of its own needs root")
def test_the_package_of_debian(tmp_path: Path) -> None:
    """Built here, installed in a small Debian of this release: mounts, refuses to go while one is used, and goes."""
    require_lab("debootstrap")
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)', Path("/etc/os-release").read_text(), re.M))["VERSION_CODENAME"]
    built = subprocess.run([SCRIPTS / "build-deb", tmp_path], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    [package] = tmp_path.glob("kvfuse_*.deb")
    root = tmp_path / "root"
    subprocess.run(["debootstrap", "--variant=minbase", release, root], check=True, capture_output=True)
    for name in ("etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(f"/{name}", root / name)
    shutil.copy(package, root / "root")
    inner = f"set -eu; apt-get update; apt-get install -y --no-install-recommends /root/{package.name}; {MOUNT}"
    outer = (
        f"mount --bind {root} {root}; mount -t proc proc {root}/proc; mount --rbind /dev {root}/dev;"
        f' mount -t tmpfs tmpfs {root}/run; exec chroot {root} bash -c "$INNER"'
    )
    command = [*in_own_mounts(tmp_path, "private", "--pid", "--fork"), "bash", "-ec", outer]
    environment = {"PATH": os.environ["PATH"], "INNER": inner, "DEBIAN_FRONTEND": "noninteractive", "HOME": "/root"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "hello" in done.stdout
    assert "end each with 'kvfuse umount MOUNTPOINT'" in done.stderr
