"""The same programs, with a module that ends at the first byte outside of its memory, and at what C does not define."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import blocks_lab
import pytest

import kvfuse.native

pytestmark = pytest.mark.ring(2)

LABS = Path(blocks_lab.__file__).parent
NATIVE = Path(kvfuse.native.__file__).parent
START = """
import importlib.machinery, importlib.util, runpy, sys
import kvfuse.native
path, program, *sys.argv[1:] = sys.argv[1:]
loader = importlib.machinery.ExtensionFileLoader("kvfuse.native._blocks", path)
module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
loader.exec_module(module)
sys.modules[loader.name] = kvfuse.native._blocks = module
sys.argv[0] = program
runpy.run_path(program, run_name="__main__")
"""
"""a program of the labs, with another build of the module"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    target = tmp_path_factory.mktemp("sanitized") / "_blocks.so"
    words = ["-O1", "-g", "-std=c11", "-D_GNU_SOURCE", "-fPIC", "-shared", f"-I{sysconfig.get_path('include')}"]
    words += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
    built = subprocess.run(
        ["gcc", *words, str(NATIVE / "blocks.c"), "-o", str(target)], capture_output=True, text=True, check=False
    )
    if built.returncode:
        assert "cannot find" in built.stderr, built.stderr  # the libraries of sanitizers are packages of their own
        pytest.skip("gcc has no sanitizers")
    return target


@pytest.mark.parametrize(
    ("program", "count"),
    [("blocks_lab", 400), ("blocks_threads", 300), ("blocks_fuzz", 20)],
    ids=lambda word: f"{word}",
)
def test_sanitized(module: Path, seed: int, program: str, count: int) -> None:
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    settings = {
        "LD_PRELOAD": library.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=66",  # killed daemons leak on purpose
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # buffers of Python have ends, too
        "PYTHONPATH": str(LABS),
    }
    words = [seed, count] if program != "blocks_lab" else [seed, seed + 1, count]
    ended = subprocess.run(
        [sys.executable, "-c", START, str(module), str(LABS / f"{program}.py"), *map(str, words)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
