"""Facts that are known only when chunks come: compared with those that the namespace's blocks were stored with."""

from __future__ import annotations

import threading

from lmcache.logging import init_logger

from kvfuse.connectors.lmcache.identity import digest
from kvfuse.connectors.steady_store import DescriptorMismatch, SteadyStore

log = init_logger(__name__)

NAME_SIZE = 16


class Layouts:
    """Descriptors of empty namespaces in a folder ``NAMESPACE.layouts``, one for each kind of chunks.

    A kind is a model's chunks of a rank, say. As long as there is no daemon nothing is known, and nothing allowed.
    """

    def __init__(self, mount: str, namespace: str, deadline: float, token: str | None) -> None:
        self._mount, self._folder = mount, f"{namespace}.layouts"
        self._deadline, self._token = deadline / 2, token  # it comes on top of that of a task
        self._known: dict[tuple[str, str], bool] = {}
        self._checks: dict[tuple[str, str], SteadyStore] = {}
        self._lock = threading.Lock()

    def allows(self, kind: str, form: str) -> bool:
        """Whether blocks of this ``kind`` are of this ``form``; the first one says it for all that follow."""
        known = self._known.get((kind, form))
        return known if known is not None else self._check(kind, form)

    def require(self, kind: str, form: str) -> None:
        """DescriptorMismatch where blocks of the kind are of another form."""
        with self._lock:
            self._ask(kind, form)

    def close(self) -> None:
        with self._lock:
            while self._checks:
                self._checks.popitem()[1].close()

    def _check(self, kind: str, form: str) -> bool:
        with self._lock:
            try:
                return self._ask(kind, form)
            except DescriptorMismatch as error:
                log.error("kvfuse: chunks of %s are neither found nor stored: %s", kind, error)
                self._known[kind, form] = False
                return False

    def _ask(self, kind: str, form: str) -> bool:
        key = (kind, form)
        if key not in self._known:
            store = self._checks.pop(key, None)
            if store is None:
                name = digest(kind)[:NAME_SIZE].decode()
                descriptor = {"engine": "lmcache, layout", "kind": kind[:200], "form": form}
                store = SteadyStore(
                    self._mount, f"{self._folder}/{name}", descriptor=descriptor, deadline=self._deadline,
                    token=self._token,
                )  # fmt: skip
            if not store.is_up:
                if store.mismatch is not None:
                    store.close()
                    raise store.mismatch
                self._checks[key] = store
                return False
            store.close()
            self._known[key] = True
        return self._known[key]
