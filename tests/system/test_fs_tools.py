"""Outside exercisers on the mount: fio verifies every block it wrote, stress-ng its own; others end at what fails."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from engine_pairs import Engines


def needs(tool: str) -> pytest.MarkDecorator:
    """scripts/test, and so CI, installs all of them: one is missing only where somebody runs pytest by himself."""
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed")


pytestmark = [
    pytest.mark.ring(3),
    pytest.mark.engines("lmdb+file", "etcd+rados"),  # bytes go the same way in both publishing modes
]

FIO_JOBS: dict[str, list[str]] = {
    "random writes, 4 KiB": ["--rw=randwrite", "--bs=4k", "--size=8m", "--ioengine=psync"],
    "random reads and writes, odd sizes": ["--rw=randrw", "--bsrange=512-70k", "--bs_unaligned", "--size=8m"],
    "sequential, 1 MiB": ["--rw=write", "--bs=1m", "--size=64m", "--ioengine=psync"],
    "O_DIRECT": ["--rw=randwrite", "--bs=64k", "--size=32m", "--direct=1", "--ioengine=psync"],
    "vectors": ["--rw=randwrite", "--bs=64k", "--size=32m", "--ioengine=pvsync2"],
    "mmap": ["--rw=randwrite", "--bs=4k", "--size=8m", "--ioengine=mmap"],
    "libaio": ["--rw=randwrite", "--bs=16k", "--size=16m", "--direct=1", "--ioengine=libaio", "--iodepth=16"],
    "libaio, buffered": ["--rw=write", "--bs=256k", "--size=32m", "--ioengine=libaio", "--iodepth=8"],
    "io_uring": ["--rw=randwrite", "--bs=16k", "--size=16m", "--ioengine=io_uring", "--iodepth=16"],
    "io_uring, O_DIRECT": ["--rw=write", "--bs=1m", "--size=64m", "--direct=1", "--ioengine=io_uring", "--iodepth=4"],
    "fsync after each": ["--rw=randwrite", "--bs=4k", "--size=1m", "--fsync=1", "--ioengine=psync"],
    "many files": ["--rw=randwrite", "--bs=4k", "--size=4m", "--nrfiles=64", "--ioengine=psync"],
    "four writers of their own files": ["--rw=randwrite", "--bs=8k", "--size=4m", "--numjobs=4", "--ioengine=psync"],
}

COMMON = ["--name=job", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--output-format=json"]


@needs("fio")
@pytest.mark.parametrize("name", FIO_JOBS)
def test_fio_reads_what_it_wrote(folder: Path, name: str, seed: int) -> None:
    arguments = [*COMMON, *FIO_JOBS[name], f"--directory={folder}", f"--randseed={seed}", "--fallocate=none"]
    done = subprocess.run(["fio", *arguments], capture_output=True, text=True, check=False, cwd=folder, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    assert all(job["error"] == 0 for job in jobs)
    assert all(job["write"]["io_bytes"] and job["read"]["io_bytes"] for job in jobs), "nothing was verified"


STRESSORS = {
    "names": "chdir dentry dir dirdeep dirmany filename link mknod rename symlink touch",
    "attributes": "access chmod chown fstat inode-flags utime xattr handle",
    "bytes": "copy-file hdd iomix readahead revio seek sendfile splice sync-file fpunch",
    "mapped and asynchronous": "mmap msync aio aiol io",
    "descriptors and locks": "dup fcntl flock lease locka lockf lockofd open",
    "ioctl": "file-ioctl",
}
"""what is stressed -> stressors of stress-ng that know what must come out; those of a group run side by side"""

STRESS_S = 2
STRESS_S_OF = {"names": 1, "ioctl": 4}
"""file-ioctl writes its file until the time is over, and then complains of its size where the machine was slow; all
names that were made are removed one by one when the time is over"""


@needs("stress-ng")
@pytest.mark.parametrize("name", STRESSORS)
def test_stress_ng_finds_no_fault(folder: Path, engines: Engines, name: str) -> None:
    stressors = [argument for stressor in STRESSORS[name].split() for argument in (f"--{stressor}", "1")]
    command = [
        "stress-ng",
        *stressors,
        "--verify",
        "--timeout",
        f"{STRESS_S_OF.get(name, STRESS_S)}s",
        "--temp-path",
        str(folder),
    ]
    sizes = ["--hdd-bytes", "16m", "--mmap-bytes", "16m", "--msync-bytes", "16m", "--iomix-bytes", "16m"]
    count = "64" if engines.is_shared else "256"  # they are removed after the time is over
    sizes += ["--dentries", count, "--dir-dirs", count, "--chdir-dirs", count]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, check=False, timeout=240)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "successful run completed" in output
    assert "fail:" not in output, output


POSTMARK = """
set location .
set number 50
set transactions 100
set size 500 200000
run
quit
"""
"""mail and news: small files are made, read, appended to and removed. Names over 80 bytes would overflow a buffer."""


@needs("dbench")
def test_a_file_server_is_served(folder: Path) -> None:
    """dbench does as the clients of one do, and ends at the first answer that is not theirs."""
    done = run("dbench", "-D", folder, "-t", "4", "4")
    assert "Throughput" in done


@needs("fs_mark")
@pytest.mark.parametrize("sync", range(7))
def test_files_are_synced_in_every_way(folder: Path, sync: int) -> None:
    """None; fsync before the close; sync() after all; and in the ways that fs_mark has between them."""
    made = ["one", "two"]  # it takes short paths only, and its workers may draw the same names
    for name in made:
        (folder / name).mkdir()
    folders = [word for name in made for word in ("-d", name)]
    done = run("fs_mark", *folders, "-n", "20", "-s", "20000", "-t", "2", "-S", str(sync), "-k", cwd=folder)
    assert done.splitlines()[-1].split()[1:3] == ["40", "20000"]
    for name in made:
        assert [path.stat().st_size for path in (folder / name).iterdir()] == 20 * [20_000]


@needs("postmark")
def test_a_mail_server_is_served(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(POSTMARK)
    done = run("postmark", tmp_path / "config", cwd=folder)
    assert "seconds total" in done
    assert "Error" not in done
    assert not any(folder.iterdir())


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What a tool that succeeds prints."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=240, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
