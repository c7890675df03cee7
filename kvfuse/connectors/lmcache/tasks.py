"""Work in threads whose ends are told by an eventfd, as LMCache's controllers wait for it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from lmcache.logging import init_logger

log = init_logger(__name__)

T = TypeVar("T")

_numbers = itertools.count()


class Tasks(Generic[T]):
    """Tasks of one kind. Results are kept until they are asked for."""

    def __init__(
        self, name: str, threads: int, notifier: Any, hold: Callable[[Callable[[], None]], None] | None = None
    ) -> None:
        """``notifier``: LMCache's EventNotifier. ``hold`` is given the end of each task, to call it when it may be."""
        self._notifier, self._hold = notifier, hold
        self._threads = ThreadPoolExecutor(threads, f"kvfuse-{name}")
        self._results: dict[int, T] = {}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def descriptor(self) -> int:
        """Readable when a task has ended."""
        descriptor: int = self._notifier.fileno()
        return descriptor

    def submit(self, run: Callable[[], T], failed: T) -> int:
        """The task's number. ``failed``: its result if it raises."""
        number = next(_numbers)

        def work() -> None:
            result = failed
            try:
                result = run()
            except Exception:  # an engine that goes on without its cache is better than one that does not
                log.exception("kvfuse: a task failed")
            finally:
                if self._hold is not None:
                    self._hold(lambda: self._end(number, result))
                else:
                    self._end(number, result)

        try:
            self._threads.submit(copy_context().run, work)  # its span is that of who submits it
        except RuntimeError:  # closed
            self._end(number, failed)
        return number

    def take(self, number: int) -> T | None:
        """The result of one, once; None: it has not ended."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """What ended since the last time."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """After the tasks that have begun."""
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            self._closed = True
        self._notifier.close()

    def _end(self, number: int, result: T) -> None:
        with self._lock:
            self._results[number] = result
            if not self._closed:
                self._notifier.notify()
