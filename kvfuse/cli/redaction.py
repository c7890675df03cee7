"""Removes secrets from text that leaves the machine, and names of files where these are not wanted. Pure.

Two nets: texts that are known to be secret (what password files and key files hold) go wherever they stand; and what
looks like a secret goes: values of keys such as ``password``, user parts and keys of URLs, cephx keys, private keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

REMOVED = "(removed)"
HIDDEN = "(name)"
KNOWN_SIZE_MIN = 4
"""characters of a known secret: shorter ones would be found in every other word"""
SYSTEM_FOLDERS = ("/dev", "/etc", "/lib", "/opt", "/proc", "/run", "/sys", "/usr", "/var/log")
"""paths below these say something of the machine, and name no file of a mount"""

_WORDS = (
    r"(?:pass(?:word|wd|phrase)|secret|token|credential|api[-_]?key|access[-_]?key|private[-_]?key|authorization|cookie"
    r"|signature)"
)
_VALUE = re.compile(
    rf"(?P<key>[\"']?[\w.-]*{_WORDS}[\w.-]*[\"']?\s*[:=]\s*)"
    r"(?P<value>\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[^\s,;}\]&]+)",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(r"_(?:file|path|size)[\"']?\s*[:=]\s*$", re.IGNORECASE)
_PLAIN_VALUES = frozenset({"none", "set", "null", "true", "false"})
_NUMBER = re.compile(r"-?[\d.]+$")
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), REMOVED),
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}"), rf"\1 {REMOVED}"),
    (re.compile(r"\beyJ[\w-]{5,}\.[\w-]+\.[\w-]+"), REMOVED),
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@\"']+@", re.IGNORECASE), rf"\1{REMOVED}@"),
    (re.compile(r"([?&][^=&\s\"']*(?:key|sig|pass|pwd)[^=&\s\"']*=)[^&\s\"']+", re.IGNORECASE), rf"\1{REMOVED}"),
    (re.compile(r"(?<![\w+/])[A-Za-z0-9+/]{38}==(?![\w+/=])"), REMOVED),  # a key of cephx
)
_BYTES = re.compile(r"""\bb(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")
_PATH = re.compile(r"(?<![\w:/)])/[^\s'\",;:()\[\]{}]+")


class Redaction:
    """``known``: texts that are secret. ``places``: paths that stay, as of mount points and volumes; what is below
    a place of ``points`` is a name of a file. ``names``: names stay."""

    def __init__(
        self,
        known: Iterable[str] = (),
        places: Iterable[Path] = (),
        points: Iterable[Path] = (),
        *,
        names: bool = False,
    ) -> None:
        texts = sorted({text for text in known if len(text) >= KNOWN_SIZE_MIN}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._points = sorted(map(str, points), key=len, reverse=True)
        self._places = (*self._points, *map(str, places), *SYSTEM_FOLDERS)
        self.names = names

    def clean(self, text: str) -> str:
        """The text without secrets, and without names where they are not wanted."""
        if self._known is not None:
            text = self._known.sub(REMOVED, text)
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        text = _VALUE.sub(_clean_value, text)
        return text if self.names else self._hide_names(text)

    def _hide_names(self, text: str) -> str:
        """Log messages have names as bytes literals, or as paths: of the host, or from the root of the volume."""
        return _PATH.sub(self._clean_path, _BYTES.sub(f"b'{HIDDEN}'", text))

    def _clean_path(self, found: re.Match[str]) -> str:
        path = found[0]
        for point in self._points:
            if path.startswith(f"{point}/") and not path.startswith(f"{point}/.kvfuse"):
                return f"{point}/{HIDDEN}"
        is_place = any(path == place or path.startswith(f"{place}/") for place in self._places)
        return path if is_place else f"/{HIDDEN}"


def _clean_value(found: re.Match[str]) -> str:
    key, value = found["key"], found["value"]
    is_json = key.lstrip().startswith('"')
    if _NO_SECRET.search(key) or value.strip("\"'").lower() in _PLAIN_VALUES or (is_json and _NUMBER.match(value)):
        return key + value
    return f'{key}"{REMOVED}"' if value[0] == '"' else key + REMOVED


def secrets_of(read: Callable[[Path], str], files: Iterable[Path]) -> Iterable[str]:
    """What files of passwords, keyrings and private keys hold: each line, and each value after "key =".

    ``read``: returns "" where a file cannot be read.
    """
    for file in files:
        for line in read(file).splitlines():
            yield line.strip()
            yield line.partition("=")[2].strip()
