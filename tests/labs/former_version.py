"""A version of kvfuse from before, out of the project's own history: a tree with compiled modules, and its Python."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

import kvfuse

ROOT = Path(kvfuse.__file__).parents[1]
FORMER = "a6f9e43c8066"
"""the commit: the last one that changed what is kept; an upgrade may begin with it, and be undone to it"""
VERSION = "0.0.9"
"""that it says it has"""
INCLUDES = "/usr/include/fuse3", "/usr/local/include/fuse3", sysconfig.get_path("include")


def python_of(tree: Path, python: Path) -> str:
    """Make a program ``python`` that finds kvfuse in a tree, whatever its caller's environment says."""
    python.write_text(f'#!/bin/sh\nPYTHONSAFEPATH=1 PYTHONPATH={tree} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def former_tree(folder: Path) -> Path:
    """Skips where there is no history, as in an archive of the sources."""
    tree = folder / "former"
    command = ["git", "-C", str(ROOT), "archive", FORMER, "kvfuse"]
    try:
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no history to make a former version of: {getattr(error, 'stderr', error)!r}")
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(tree, filter="data")
    for source in (tree / "kvfuse").rglob("_*.c"):
        _build(source)
    init = tree / "kvfuse" / "__init__.py"
    init.write_text(re.sub(r'__version__ = ".*"', f'__version__ = "{VERSION}"', init.read_text()))
    return tree


def _build(source: Path) -> None:
    """The module of a source in C: the present one if that is the same, else a new one."""
    name = source.with_suffix(sysconfig.get_config_var("EXT_SUFFIX")).name
    ours = ROOT / "kvfuse" / "native" / name
    if ours.exists() and ours.with_name(source.name).read_bytes() == source.read_bytes():
        shutil.copy(ours, source.parent)
        return
    flags = ["-shared", "-fPIC", "-O2", "-std=c11", *(f"-I{path}" for path in INCLUDES)]
    subprocess.run(["gcc", *flags, "-o", source.with_name(name), source], check=True)
