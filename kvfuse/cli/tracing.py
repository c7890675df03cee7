"""Spans of OpenTelemetry for the requests of a daemon, sent by OTLP over HTTP. Off, nothing is imported or wrapped.

A span for each request that Python answers (files: ``fuse KIND``, rings: ``ring call``), and below it one for each call
of the record store, the index, the segments and other hosts that the request waits for. What C answers has none. No
span has a name of a file. Calls that commits and write-behind make for many requests are spans of their own.

A request of a ring is a child of the span that its client names, whatever ``trace.ratio`` says, and has a span also
where the ring's thread answers it at once, together with those beside it (``ring batch``). A question of another host
is a child of that host's span, or has none. The kernel names no parents.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import random
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import kvfuse
from kvfuse.errors import ConfigError
from kvfuse.options.options import Options
from kvfuse.serving import SERVED
from kvfuse.traceparent import HEARD, RING_CLIENT, SPAN, TRACES, SpanPlace
from kvfuse.volume.views.neighbours import WantedBlocks

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

    from kvfuse.usrbio.daemon.call import Call

FLUSH_SECONDS = 0.5
"""for the last spans at the end: nobody waits longer for a collector that is away"""
EXPORT_SECONDS = 5.0
REMEDY = "type, in the environment of kvfuse: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"


Method = Callable[..., Awaitable[Any]]
TRACED: ContextVar[bool] = ContextVar("traced", default=False)
"""the request that is served is traced"""


FindParent = Callable[..., SpanPlace | None]
"""the parent of a request, by the arguments of the method that answers it"""


def _of_ring(_: object, call: Call) -> SpanPlace | None:
    """That a ring's client names."""
    if not call.entry.parent:
        return None
    return TRACES.parse(call.ring.completions.read_parent(call.entry.parent), RING_CLIENT)


def _of_host(*_: object) -> SpanPlace | None:
    """That another host names."""
    return TRACES.parse(HEARD.get(), "another host")


class TracedClass(NamedTuple):
    """Methods of a class that get a span each time.

    ``find_parent``: of methods that answer requests. ``ratio``: share of those without a parent that are traced; None:
    that of the options.
    """

    place: str
    """module:class"""
    span: str
    methods: tuple[str, ...]
    find_parent: FindParent | None = None
    ratio: float | None = None


def _traced_classes(options: Options) -> Iterator[TracedClass]:
    """Those that a daemon with these options has: others are not imported."""
    yield TracedClass("kvfuse.usrbio.daemon.loop_calls:Calls", "ring", ("_do_call",), _of_ring)
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
        yield TracedClass("kvfuse.peer.peer_listener:Listener", "peer", ("_answer",), _of_host, 0.0)
        yield TracedClass("kvfuse.volume.hosts.neighbourhood:Neighbourhood", "disk", ("stored",))


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
    facts["host.name"] = socket.gethostname()
    provider = TracerProvider(resource=Resource.create(facts))
    exporter = OTLPSpanExporter(endpoint=options.trace.endpoint, timeout=EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("kvfuse", kvfuse.__version__)
    wrap_all(tracer, options)
    TRACES.begin(functools.partial(_note_span, tracer))
    try:
        yield
    finally:
        TRACES.end()
        flushing = threading.Thread(target=provider.force_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)


def wrap_all(tracer: Tracer, options: Options) -> None:
    """Have the classes of this process make spans. It is a daemon's: nobody else uses them."""
    from kvfuse.fs.ops import KvfuseOperations

    ratio = options.trace.ratio
    for name, handler in inspect.getmembers(KvfuseOperations, inspect.iscoroutinefunction):
        if hasattr(handler, "__wrapped__"):  # of `answer_request`
            setattr(
                KvfuseOperations,
                name,
                _drawn(handler, _spanned(tracer, f"fuse {name}", handler, is_request=True), ratio),
            )
    for one in _traced_classes(options):
        module, _, name = one.place.partition(":")
        traced = getattr(importlib.import_module(module), name)
        for method in one.methods:
            span, inner = f"{one.span} {method.removeprefix('_do').lstrip('_')}", getattr(traced, method)
            wrapped = _spanned(tracer, span, inner, is_request=one.find_parent is not None)
            if one.find_parent is None:
                setattr(traced, method, _followed(inner, wrapped, ratio))
            else:
                own = ratio if one.ratio is None else one.ratio
                setattr(traced, method, _drawn(inner, wrapped, own, one.find_parent))


def _drawn(
    method: Method, spanned: Method, ratio: float, find_parent: FindParent = lambda *_, **__: None
) -> Method:  # fmt: skip
    """A request: those with a parent are traced, and a share of the others. The choice is made here, as making a span
    that is not kept costs as much as a small request."""

    @functools.wraps(method)
    async def call(*arguments: Any, **keywords: Any) -> Any:
        parent = find_parent(*arguments, **keywords)
        if parent is None and random.random() >= ratio:
            return await method(*arguments, **keywords)
        token = TRACED.set(True)
        try:
            with _below(parent) if parent is not None else nullcontext():
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


def _context_of(parent: SpanPlace) -> Context:
    """In which spans are children of one that was made elsewhere."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    place = SpanContext(*parent, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(place))


@contextmanager
def _below(parent: SpanPlace) -> Iterator[None]:
    """Spans of the body are children of that one."""
    from opentelemetry.context import attach, detach

    token = attach(_context_of(parent))
    try:
        yield
    finally:
        detach(token)


def _note_span(
    tracer: Tracer, name: str, parent: SpanPlace, begin_ns: int, end_ns: int, facts: Mapping[str, int | str]
) -> None:
    """`Traces.note`."""
    from opentelemetry.trace import SpanKind

    made = tracer.start_span(name, _context_of(parent), SpanKind.SERVER, dict(facts), start_time=begin_ns)
    made.end(end_ns)


def _count_items(argument: object) -> int | None:
    """How many things a call is about; None: it is about one."""
    if isinstance(argument, WantedBlocks):
        return len(argument.lengths)
    return len(argument) if isinstance(argument, Sequence | dict) and not isinstance(argument, bytes) else None


def _spanned(tracer: Tracer, name: str, method: Method, *, is_request: bool) -> Method:
    from opentelemetry.trace import SpanKind

    kind = SpanKind.SERVER if is_request else SpanKind.CLIENT

    @functools.wraps(method)
    async def call(*arguments: Any, **keywords: Any) -> Any:
        with tracer.start_as_current_span(name, kind=kind, record_exception=False) as span:
            place = span.get_span_context()
            token = SPAN.set(SpanPlace(place.trace_id, place.span_id).pack())
            if len(arguments) > 1 and (items := _count_items(arguments[1])) is not None:
                span.set_attribute("kvfuse.items", items)
            try:
                return await method(*arguments, **keywords)
            finally:
                SPAN.reset(token)
                if (served := SERVED.get()) is not None:
                    span.set_attribute("kvfuse.request", f"{served[0]} {served[1]}")

    return call
