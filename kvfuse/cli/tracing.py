"""Spans of OpenTelemetry for the requests of a daemon, sent by OTLP over HTTP. Off, nothing is imported or wrapped.

A span for each request that Python answers (files: ``fuse KIND``, rings: ``ring call``), and below it one for each call
of the record store, the index, the segments and other hosts that the request waits for. What C answers has none. No
span has a name of a file. Calls that commits and write-behind make for many requests are spans of their own.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import random
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import kvfuse
from kvfuse.errors import ConfigError
from kvfuse.options.options import Options
from kvfuse.serving import SERVED

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

FLUSH_SECONDS = 0.5
"""for the last spans at the end: nobody waits longer for a collector that is away"""
EXPORT_SECONDS = 5.0
REMEDY = "type, in the environment of kvfuse: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"


Method = Callable[..., Awaitable[Any]]
TRACED: ContextVar[bool] = ContextVar("traced", default=False)
"""the request that is served is traced"""


class TracedClass(NamedTuple):
    """Methods of a class that get a span each time."""

    place: str
    """module:class"""
    span: str
    methods: tuple[str, ...]
    is_request: bool = False


def _traced_classes(options: Options) -> Iterator[TracedClass]:
    """Those that a daemon with these options has: others are not imported."""
    yield TracedClass("kvfuse.usrbio.daemon.loop_calls:Calls", "ring", ("_do_call",), is_request=True)
    records = {"lmdb": "lmdb.store:LmdbRecords", "etcd": "etcd.store:EtcdRecords"}[options.records.engine]
    yield TracedClass(f"kvfuse.remote.records.{records}", "records", ("get", "scan", "commit"))
    segments = {
        "file": "file.store:FileSegments",
        "block": "block.store:BlockSegments",
        "rados": "rados.store:RadosSegments",
    }
    place = segments[options.segments.engine]
    yield TracedClass(f"kvfuse.remote.segments.{place}", "segments", ("read", "write", "sync"))
    if options.is_shared:
        yield TracedClass("kvfuse.remote.index.engine:IndexEngine", "index", ("find", "put", "drop"))
        yield TracedClass("kvfuse.peer.service:Peers", "peers", ("read", "read_blocks"))


@contextmanager
def tracing(options: Options, point: Path) -> Iterator[None]:
    """Spans are made and sent in the body, where ``trace.endpoint`` says whereto. ConfigError: a package is missing."""
    if options.trace.endpoint is None:
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"trace.endpoint needs the Python package '{error.name}'; {REMEDY}") from error
    facts = {"service.name": "kvfuse", "service.version": kvfuse.__version__, "kvfuse.mount": str(point)}
    provider = TracerProvider(resource=Resource.create(facts))
    exporter = OTLPSpanExporter(endpoint=options.trace.endpoint, timeout=EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    wrap_all(provider.get_tracer("kvfuse", kvfuse.__version__), options)
    try:
        yield
    finally:
        flushing = threading.Thread(target=provider.force_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)


def wrap_all(tracer: Tracer, options: Options) -> None:
    """Have the classes of this process make spans. It is a daemon's: nobody else uses them."""
    from kvfuse.fs.ops import KvfuseOperations

    ratio = options.trace.ratio
    for name, handler in inspect.getmembers(KvfuseOperations, inspect.iscoroutinefunction):
        if hasattr(handler, "__wrapped__"):  # of `answer_request`
            setattr(KvfuseOperations, name, _drawn(handler, _spanned(tracer, f"fuse {name}", handler), ratio))
    for one in _traced_classes(options):
        module, _, name = one.place.partition(":")
        traced = getattr(importlib.import_module(module), name)
        for method in one.methods:
            span, inner = f"{one.span} {method.removeprefix('_do_')}", getattr(traced, method)
            wrap = _drawn if one.is_request else _followed
            setattr(traced, method, wrap(inner, _spanned(tracer, span, inner), ratio))


def _drawn(method: Method, spanned: Method, ratio: float) -> Method:
    """A request: a share of them is traced. The choice is made here, as making a span that is not kept costs as much as
    a small request."""

    @functools.wraps(method)
    async def call(*arguments: Any, **keywords: Any) -> Any:
        if random.random() >= ratio:
            return await method(*arguments, **keywords)
        token = TRACED.set(True)
        try:
            return await spanned(*arguments, **keywords)
        finally:
            TRACED.reset(token)

    return call


def _followed(method: Method, spanned: Method, ratio: float) -> Method:
    """A call that a traced request makes; of those beside requests, a share is traced."""

    @functools.wraps(method)
    async def call(*arguments: Any, **keywords: Any) -> Any:
        is_traced = TRACED.get() or (SERVED.get() is None and random.random() < ratio)
        return await (spanned if is_traced else method)(*arguments, **keywords)

    return call


def _spanned(tracer: Tracer, name: str, method: Method) -> Method:
    @functools.wraps(method)
    async def call(*arguments: Any, **keywords: Any) -> Any:
        with tracer.start_as_current_span(name, record_exception=False) as span:
            if len(arguments) > 1 and isinstance(arguments[1], Sequence | dict) and not isinstance(arguments[1], bytes):
                span.set_attribute("kvfuse.items", len(arguments[1]))
            try:
                return await method(*arguments, **keywords)
            finally:
                if (served := SERVED.get()) is not None:
                    span.set_attribute("kvfuse.request", f"{served[0]} {served[1]}")

    return call
