"""Where a client has the tokens from that it shows to a daemon."""

from __future__ import annotations

import os
from pathlib import Path

TOKEN = "KVFUSE_TOKEN"
"""environment variable with a token, or several with spaces between them"""
TOKEN_FILE = "KVFUSE_TOKEN_FILE"
"""environment variable with the path of a file that has them"""

Token = str | os.PathLike[str] | None
"""a token; the path of a file with one or several; None: what the environment says, if anything"""


def find_tokens(token: Token = None) -> list[str]:
    """The tokens to show. OSError, where a file cannot be read."""
    if isinstance(token, os.PathLike):
        return Path(token).read_text().split()
    if token is not None:
        return [token]
    path = os.environ.get(TOKEN_FILE)
    return os.environ.get(TOKEN, "").split() + (find_tokens(Path(path)) if path else [])
