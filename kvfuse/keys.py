"""The name of the file that holds the block of a key, and back. Used alike by the client and the daemon.

A key is 1 to 255 bytes, any bytes. Its file is called

1. as the key itself, where that is a legal name that does not begin with "%";
2. else "%" and the key in hex;
3. where that would be longer than 255 bytes, "%~" and the hex of the key's BLAKE2b-256.

**No two keys share a name.** The forms are disjoint: only 2 and 3 begin with "%", and there the second character is
a hex digit in 2 and "~" in 3. Form 1 is the identity and form 2 is hex, so neither maps two keys to one name. Two keys
of form 3 would be a collision of a 256-bit cryptographic hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

KEY_SIZE_MAX = 255
NAME_MAX = 255
ESCAPE = b"%"
HASHED = b"%~"
_HEX_KEY_SIZE_MAX = (NAME_MAX - len(ESCAPE)) // 2


def encode_keys(keys: Sequence[bytes | str]) -> list[bytes]:
    """Text as UTF-8."""
    return [key.encode() if isinstance(key, str) else key for key in keys]


def file_name(key: bytes) -> bytes:
    """The name of the file of ``key``. ValueError for a key that is not 1 to 255 bytes long."""
    if not 1 <= len(key) <= KEY_SIZE_MAX:
        raise ValueError(f"a key has 1 to {KEY_SIZE_MAX} bytes, not {len(key)}")
    if not (key.startswith(ESCAPE) or b"/" in key or b"\0" in key or key in (b".", b"..")):
        return key
    if len(key) <= _HEX_KEY_SIZE_MAX:
        return ESCAPE + key.hex().encode()
    return HASHED + hashlib.blake2b(key, digest_size=32).hexdigest().encode()


def file_names(keys: list[bytes]) -> list[bytes]:
    """`file_name` of many keys of legal length; at once where all are names themselves."""
    text = b"".join(keys)
    if b"/" in text or b"\0" in text or ESCAPE in text or (b"." in text and (b"." in keys or b".." in keys)):
        return [file_name(key) for key in keys]
    return keys


def key_of(name: bytes) -> bytes | None:
    """The key whose file is called ``name``. None where no key has that name, or the name is a hash of it."""
    if not name.startswith(ESCAPE):
        key = name
    else:
        try:
            key = bytes.fromhex(name[len(ESCAPE) :].decode("ascii"))
        except ValueError:
            return None
    return key if 1 <= len(key) <= KEY_SIZE_MAX and file_name(key) == name else None
