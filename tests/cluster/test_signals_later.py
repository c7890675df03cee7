"""A signal that comes while a process begins leaves no process that nobody knows."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfuse_bench.daemons import barefs_mount
from kvfuse_cluster.process import Server, signals_later

SLEEPER = ["sleep", "1000"]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that were started, each with a Ctrl-C before its starter was told its number."""
    found: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            found.append(self)
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(subprocess, "Popen", Popen)
    yield found
    signal.signal(signal.SIGINT, before)
    for process in found:
        process.kill()
        process.wait()


def test_a_server_is_known_when_the_signal_comes(tmp_path: Path, begun: list[subprocess.Popen[bytes]]) -> None:
    server = Server(tmp_path, "sleeper", SLEEPER)
    with pytest.raises(KeyboardInterrupt):
        server.launch()
    assert [server.pid] == [process.pid for process in begun]
    Server(tmp_path, "sleeper").stop()  # by the files alone
    assert server.pid == 0


def test_a_mount_is_ended_when_the_signal_comes(tmp_path: Path, begun: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(KeyboardInterrupt), barefs_mount(tmp_path / "point"):
        raise AssertionError("the body does not run")
    (process,) = begun
    assert process.returncode is not None
    assert not (tmp_path / "point").is_mount()


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler])
def test_handlers_are_as_before(handler: Callable[..., Any] | signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with signals_later():
            assert (signal.getsignal(signal.SIGINT) == handler) == (handler == signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) == handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_leaves_the_handlers_alone() -> None:
    seen: list[Any] = []

    def look() -> None:
        with signals_later():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    before = signal.getsignal(signal.SIGINT)
    thread.start()
    thread.join()
    assert seen == [before]
