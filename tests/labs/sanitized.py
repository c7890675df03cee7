"""C modules that end at the first byte outside of their memory, and at what C does not define; programs with them.

As a program, ``sanitized.py FOLDER PROGRAM WORD...`` runs another one, with the modules of a folder in place of ours.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

PACKAGE = "kvfuse.native."
SOURCES = {"_blocks": "blocks.c", "_fusewire": "_fusewire.c", "_peers": "_peers.c"}
FLAGS = (
    "-O1", "-g", "-std=c11", "-D_GNU_SOURCE", "-fPIC", "-shared", "-pthread", "-I/usr/include/fuse3",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer",
)  # fmt: skip


def reason_against() -> str | None:
    return "no gcc" if shutil.which("gcc") is None else None


def build(folder: Path, names: Sequence[str] = tuple(SOURCES)) -> str | None:
    """Build modules into a folder. What is missing for that, if anything."""
    import kvfuse.native

    sources = Path(str(kvfuse.native.__file__)).parent
    for name in names:
        words = [*FLAGS, f"-I{sysconfig.get_path('include')}", str(sources / SOURCES[name])]
        command = ["gcc", *words, "-o", str(folder / f"{name}.so")]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            assert "cannot find" in built.stderr, built.stderr  # the libraries of sanitizers are packages of their own
            return "gcc has no sanitizers"
    return None


def settings(folder: Path) -> dict[str, str]:
    """The environment of programs with these modules. Reports are files of the folder: `reports`."""
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    said = f"exitcode=66:log_path={folder}/report"
    return {
        "LD_PRELOAD": library.stdout.strip(),
        "ASAN_OPTIONS": f"detect_leaks=0:abort_on_error=0:{said}",  # killed daemons leak on purpose
        "UBSAN_OPTIONS": f"print_stacktrace=1:{said}",
        "PYTHONMALLOC": "malloc",  # buffers of Python have ends, too
    }


def command(folder: Path, program: Path, *words: str) -> tuple[str, ...]:
    """Of a program of the labs, with the modules that `build` made."""
    variables = [f"{name}={value}" for name, value in settings(folder).items()]
    return ("env", *variables, sys.executable, __file__, str(folder), str(program), *words)


def reports(folder: Path) -> str:
    """All that was found."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("report.*")))


class Finder:
    """Finds the modules of a folder."""

    def __init__(self, folder: Path) -> None:
        self.modules = {PACKAGE + path.stem: path for path in folder.glob("*.so")}

    def find_spec(self, name: str, _path: object, _target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        loader = importlib.machinery.ExtensionFileLoader(name, str(self.modules[name]))
        return importlib.util.spec_from_loader(name, loader)


def main() -> None:
    folder, program, *words = sys.argv[1:]
    sys.meta_path.insert(0, Finder(Path(folder)))  # type: ignore[arg-type]
    sys.argv = [program, *words]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
