"""Processes of an inference engine's own Python, for tests of connectors.

`EngineHost` starts one process, which imports the engine once (seconds) and forks for each `Engine`. It runs a driver:
a file of tests/labs with a class ``Engine``, whose methods a test calls from outside. The driver calls `serve`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from engine_python import engine_python

ROOT = Path(__file__).parents[2]
LABS = Path(__file__).parent
DEADLINE_S = 60.0
"""of calls to a mount where a test is about something else: what users have by default passes on a busy machine, and
blocks that come late are dropped as they should be"""


def serve(make_engine: Callable[[], Any]) -> None:
    """In the engine's process: a child for each connection, which answers calls until that is closed."""
    with Listener(sys.argv[1], "AF_UNIX") as listener:
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            connection = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(connection, make_engine())
                os._exit(0)
            connection.close()


def _answer(connection: Connection, engine: Any) -> None:
    with suppress(EOFError, ConnectionError):
        while True:
            name, arguments, options = connection.recv()
            try:
                connection.send((True, getattr(engine, name)(*arguments, **options)))
            except (Exception, SystemExit) as error:
                connection.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class EngineError(Exception):
    """A call raised in the engine's process."""


class Engine(AbstractContextManager["Engine"]):
    """One process of the engine. Every method is one of the driver's class."""

    def __init__(self, address: str) -> None:
        self._connection = Client(address, "AF_UNIX")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        self._connection.send((name, arguments, options))
        is_answer, value = self._connection.recv()
        if not is_answer:
            raise EngineError(value)
        return value

    def __exit__(self, *_: object) -> None:
        self._connection.close()


class EngineHost(AbstractContextManager["EngineHost"]):
    """The process that has imported the engine. ``driver``: a file of tests/labs."""

    def __init__(self, engine: str, driver: str) -> None:
        python = engine_python(engine)
        self._folder = tempfile.TemporaryDirectory(prefix="kvfuse-engine-")
        self._address = os.path.join(self._folder.name, "calls")
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{LABS}", "PYTHONWARNINGS": "ignore"}
        self._log = open(os.path.join(self._folder.name, "log"), "wb")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(LABS / driver), self._address],
            env=environment, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        if not any(line == b"ready\n" for line in self._process.stdout):
            self.__exit__()
            raise AssertionError(f"{driver} ended:\n{self.log()}")

    def engine(self) -> Engine:
        """A new process."""
        return Engine(self._address)

    def log(self) -> str:
        """What all processes said so far."""
        return Path(self._log.name).read_text(errors="replace") if os.path.exists(self._log.name) else ""

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
        self._folder.cleanup()
