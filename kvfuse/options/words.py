"""``-o`` words that say the same in whichever folder they are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvfuse.errors import ConfigError
from kvfuse.options import config


def with_whole_paths(texts: Sequence[str]) -> list[str]:
    """Texts of ``-o`` with paths that begin at the root. ConfigError where such a path cannot be written there."""
    return [",".join(map(_whole, text.split(","))) for text in texts]


def _whole(word: str) -> str:
    name, equals, text = word.strip().partition("=")
    key = config.NAMES.get(name)
    if not equals or key is None or config.KEYS[key] not in (Path, Path | None):
        return word
    path = str(Path.cwd() / Path(text).expanduser())
    if "," in path:
        raise ConfigError(f"-o {word}: commas separate words, and {path} has one: name it in mount.conf")
    return f"{name}={path}"
