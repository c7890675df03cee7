"""Programs of benchmarks in processes of their own: each takes a JSON request a line, and answers it with one line."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any

from kvfuse.errors import KvfuseError
from kvfuse_cluster.process import signals_later

END_SECONDS_MAX = 20.0


class WorkerProcess:
    """``python -m MODULE WORDS...``. ``name``: what errors call it."""

    def __init__(self, stack: contextlib.ExitStack, name: str, module: str, *words: str) -> None:
        """It is ended with ``stack``."""
        self._name = name
        with signals_later():
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.callback(self._end)

    def ask(self, request: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer will not come either
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """The next one. KvfuseError: it ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise KvfuseError(f"{self._name} ended")
        return json.loads(line)

    def _end(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
