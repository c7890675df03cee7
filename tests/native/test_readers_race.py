"""The threads that read the kernel's requests, in a program without an interpreter that tells of races of threads."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from places import LABS

import kvfuse.native

pytestmark = pytest.mark.ring(2)

SOURCE = Path(str(kvfuse.native.__file__)).parent / "_fusewire.c"
# What the program never calls of Python is not there.
LINKING = ("-no-pie", "-fno-pie", "-Wl,--unresolved-symbols=ignore-all", "-Wl,-z,lazy")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_each_request_comes_once_and_no_thread_races_with_another(tmp_path: Path) -> None:
    program, folders = tmp_path / "race", ["-I/usr/include/fuse3", f"-I{sysconfig.get_path('include')}"]
    words = ["-O1", "-g", "-std=c11", "-D_GNU_SOURCE", "-pthread", "-fsanitize=thread", f'-DSOURCE="{SOURCE}"']
    command = ["gcc", *words, *folders, str(LABS / "readers_race.c"), *LINKING, "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        assert "cannot find" in built.stderr, built.stderr
        pytest.skip("gcc has no sanitizer for threads")
    # Where addresses are too random the sanitizer finds no room.
    ended = subprocess.run(["setarch", "-R", program], capture_output=True, text=True, check=False, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "30000 requests\n"
