"""The sockets of the plug-in: one for CSI, one by which the kubelet finds it; and which error is which gRPC code."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import grpc

from kvfuse.errors import KvfuseError
from kvfuse_kubernetes.csi.csi_messages import SERVICES, messages
from kvfuse_kubernetes.csi.node_service import NodeService, Pending
from kvfuse_kubernetes.csi.node_volumes import Conflict, NotMounted
from kvfuse_kubernetes.csi.volume_words import WrongRequest

THREADS = 16
"""calls at the same time; more wait"""
STOP_SECONDS = 10.0
"""for calls that run when the plug-in ends"""
SOCKET_PATH_MAX = 107
"""bytes of a socket's path"""
_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (WrongRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (NotMounted, grpc.StatusCode.UNAVAILABLE),
    (Pending, grpc.StatusCode.ABORTED),
    (Conflict, grpc.StatusCode.FAILED_PRECONDITION),
    (click.ClickException, grpc.StatusCode.FAILED_PRECONDITION),
    (KvfuseError, grpc.StatusCode.UNAVAILABLE),
)
"""the first row that fits"""
log = logging.getLogger("kvfuse.csi")


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """The gRPC code and the text of an error."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, error.message if isinstance(error, click.ClickException) else str(error)
    if isinstance(error, OSError):
        return _status_of_os(error)
    log.error("an error that nobody foresaw", exc_info=error)
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"


def _status_of_os(error: OSError) -> tuple[grpc.StatusCode, str]:
    place = error.filename or "a path"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return grpc.StatusCode.RESOURCE_EXHAUSTED, f"the volume has no room for one more namespace: {error.strerror}"
    if error.errno in (errno.ELOOP, errno.EXDEV):
        return grpc.StatusCode.INVALID_ARGUMENT, f"{place}: the path has a symbolic link, or leads out of its folder"
    if error.errno in (errno.EPERM, errno.EACCES):
        return grpc.StatusCode.INTERNAL, f"{place}: {error.strerror}; the plug-in needs root and CAP_SYS_ADMIN"
    return grpc.StatusCode.INTERNAL, f"{place}: {error.strerror or error}"


def _handler(method: Callable[[Any], Any], names: tuple[str, str]) -> Any:
    request, response = (getattr(messages, name) for name in names)

    def answer(message: Any, context: grpc.ServicerContext) -> Any:
        try:
            return method(message)
        except Exception as error:
            code, text = status_of(error)
            log.warning("%s: %s: %s", method.__name__, code.name, text)
            context.abort(code, text)

    return grpc.unary_unary_rpc_method_handler(answer, request.FromString, response.SerializeToString)


@contextmanager
def serving(service: NodeService, sockets: list[Path]) -> Iterator[None]:
    """Answer on these sockets. One that a killed plug-in left is replaced; at the end all are removed."""
    server = grpc.server(ThreadPoolExecutor(THREADS))
    for name, methods in SERVICES.items():
        handlers = {method: _handler(getattr(service, method), names) for method, names in methods.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    for path in sockets:
        if len(bytes(path)) > SOCKET_PATH_MAX:
            raise click.ClickException(f"{path}: the path of a socket has at most {SOCKET_PATH_MAX} bytes")
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{path}")
        path.chmod(0o600)
    server.start()
    try:
        yield
    finally:
        server.stop(STOP_SECONDS).wait()
        for path in sockets:
            path.unlink(missing_ok=True)
