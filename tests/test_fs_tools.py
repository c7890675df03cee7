"""Outside exercisers on the mount: fio verifies every block it wrote, stress-ng its own stressors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")

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


@pytest.mark.parametrize("name", FIO_JOBS)
def test_fio_reads_what_it_wrote(folder: Path, name: str, seed: int) -> None:
    arguments = [*COMMON, *FIO_JOBS[name], f"--directory={folder}", f"--randseed={seed}", "--fallocate=none"]
    done = subprocess.run(["fio", *arguments], capture_output=True, text=True, check=False, cwd=folder, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    assert all(job["error"] == 0 for job in jobs)
    assert all(job["write"]["io_bytes"] and job["read"]["io_bytes"] for job in jobs), "nothing was verified"


STRESSORS = {
    "access": 50,
    "chdir": 20,
    "chmod": 100,
    "chown": 100,
    "copy-file": 20,
    "dentry": 500,
    "dir": 200,
    "dirdeep": 200,
    "dirmany": 200,
    "dup": 200,
    "fcntl": 200,
    "fiemap": 50,
    "file-ioctl": 50,
    "filename": 300,
    "flock": 200,
    "fpunch": 5,
    "fsize": 20,
    "fstat": 500,
    "getdent": 100,
    "handle": 50,
    "hdd": 20,
    "inode-flags": 20,
    "iomix": 20,
    "lease": 50,
    "link": 20,
    "locka": 50,
    "lockf": 100,
    "lockofd": 50,
    "metamix": 10,
    "mknod": 50,
    "open": 200,
    "pwritev": 0,
    "readahead": 50,
    "rename": 500,
    "revio": 20,
    "seek": 100,
    "sendfile": 50,
    "splice": 50,
    "symlink": 20,
    "sync-file": 10,
    "touch": 200,
    "utime": 500,
    "xattr": 20,
}
"""stressor -> operations ("bogo ops") to do"""
