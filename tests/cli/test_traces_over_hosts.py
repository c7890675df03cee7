"""One trace over two mounts that read from each other: spans of the application, its host, and the other."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mounting import KvfuseMount, temporary_mount, wait_until
from peer_lab import asked, listening, mounted, stats, wait_for_peers
from redis_lab import redis_server
from trace_lab import Collector, attributes, collecting

from kvfuse.connectors.steady_store import SteadyStore
from kvfuse.connectors.vllm.transfers import Transfers
from kvfuse.traceparent import SIZE
from kvfuse.usrbio.client import BlockStore, connect
from kvfuse.usrbio.client.parent_spans import current_span
from kvfuse.usrbio.protocol.wire import PARENTS_MAX, PARENTS_OFFSET, SQE_STRUCT, Op, Word
from kvfuse_cluster.etcd import EtcdServers

sdk = pytest.importorskip("opentelemetry.sdk.trace")

BLOCKS, BLOCK_SIZE = 3, 100_000
STRICT = ('publish.mode = "strict"', 'cache.tier_size = "128MiB"')
RELAXED = ('publish.mode = "relaxed"', 'cache.tier_size = "128MiB"')
SMALL_TIER = ('publish.mode = "relaxed"', 'cache.tier_size = "16MiB"')


@pytest.fixture
def tracer() -> Any:
    return sdk.TracerProvider().get_tracer("application")


def words(collector: Collector | None) -> tuple[str, ...]:
    """Of a mount without traces of its own: only what clients and hosts name is traced."""
    own = () if collector is None else (f"trace.endpoint={collector.endpoint}", "trace.ratio=0")
    return (*listening(), *own)


@contextmanager
def traced_pair(
    etcd: EtcdServers, lines: Sequence[str], own: Callable[[Collector], Sequence[str]] = words
) -> Iterator[tuple[list[KvfuseMount], list[Collector]]]:
    """Two mounts, each with a collector of its own."""
    with ExitStack() as stack:
        collectors = [stack.enter_context(collecting()) for _ in range(2)]
        mounts = stack.enter_context(mounted(etcd, [own(one) for one in collectors], lines))
        wait_for_peers(mounts)
        yield mounts, collectors


def blocks(count: int) -> dict[bytes, bytes]:
    first = secrets.token_hex(4).encode()
    return {b"%s-%d" % (first, number): secrets.token_bytes(BLOCK_SIZE) for number in range(count)}


def put(store: BlockStore, data: dict[bytes, bytes]) -> None:
    assert store.put_many(list(data), list(data.values())).all()


def got(store: BlockStore, keys: Sequence[bytes]) -> list[bytes]:
    return [bytes(found or b"") for found in store.get_many(list(keys))]


def came(collector: Collector, trace_id: int, name: str, count: int = 1) -> list[Any]:
    """So many spans of a name, once they have come."""

    def found() -> list[Any]:
        return [span for span in collector.of(trace_id) if span.name == name]

    wait_until(lambda: len(found()) >= count, f"{name} of the trace")
    return found()


@pytest.fixture(params=["etcd", "redis"])
def index_lines(request: pytest.FixtureRequest) -> Iterator[tuple[str, ...]]:
    """Which index a volume has."""
    if request.param == "etcd":
        yield ('index.engine = "etcd"',)
        return
    with redis_server() as server:
        yield ('index.engine = "redis"', f'index.url = "{server.url}"')


def summed(collector: Collector, trace_id: int, name: str, attribute: str, wanted: int) -> list[Any]:
    """Spans of a name, once an attribute of all of them together is as much."""

    def found() -> list[Any]:
        return [span for span in collector.of(trace_id) if span.name == name]

    wait_until(lambda: sum(attributes(span)[attribute] for span in found()) == wanted, f"{attribute} of {name}")
    return found()


def test_a_put_and_a_get_are_one_trace_over_two_hosts(
    etcd: EtcdServers, tracer: Any, index_lines: tuple[str, ...]
) -> None:
    def put_and_get(one: KvfuseMount, two: KvfuseMount) -> Any:
        """Put blocks on one host, get them on the other: the span of that; None: some came from the segments."""
        data, before = blocks(BLOCKS), asked(two)["right"]
        with (
            BlockStore(one.point, "blocks") as store,
            BlockStore(two.point, "blocks") as reader,
            tracer.start_as_current_span("request") as span,
        ):
            put(store, data)
            assert got(reader, list(data)) == list(data.values())
        return span.get_span_context() if asked(two)["right"] - before == BLOCKS else None

    with traced_pair(etcd, (*STRICT, *index_lines)) as ((one, two), (first, second)):
        top = next(filter(None, (put_and_get(one, two) for _ in range(20))))  # a busy machine may be late
        calls = came(first, top.trace_id, "ring call", BLOCKS)
        found = summed(first, top.trace_id, "peer answer_blocks", "kvfuse.found", BLOCKS)
        sent = summed(first, top.trace_id, "peer answer_blocks", "kvfuse.bytes", BLOCKS * BLOCK_SIZE)
        items = summed(second, top.trace_id, "peers read_blocks", "kvfuse.items", BLOCKS)
        gets = came(second, top.trace_id, "ring call", len(items))
        finds = came(second, top.trace_id, "index find")
    assert [attributes(call)["kvfuse.request"].rpartition(" ")[0] for call in calls] == ["ring put"] * BLOCKS
    assert {call.parent_span_id for call in [*calls, *gets]} == {top.span_id.to_bytes(8, "big")}
    get_ids, questions = {span.span_id for span in gets}, {span.span_id: span for span in items}
    assert {span.parent_span_id for span in finds} <= get_ids
    assert {span.parent_span_id for span in items} <= get_ids
    assert {answer.parent_span_id for answer in found} == set(questions)
    assert found == sent
    for answer in found:  # of two processes of one machine, which have one clock
        question = questions[answer.parent_span_id]
        assert question.start_time_unix_nano <= answer.start_time_unix_nano <= answer.end_time_unix_nano
        assert answer.start_time_unix_nano <= question.end_time_unix_nano
    for collector, mount in ((first, one), (second, two)):
        assert collector.facts["kvfuse.mount"] == str(mount.point)
        assert collector.facts["host.name"]


def test_what_a_host_stores_for_many_requests_has_spans_of_its_own(
    etcd: EtcdServers, tracer: Any, index_lines: tuple[str, ...]
) -> None:
    def own(collector: Collector) -> Sequence[str]:
        return (*listening(), f"trace.endpoint={collector.endpoint}", "trace.ratio=1")

    data = blocks(3)
    with traced_pair(etcd, (*STRICT, *index_lines), own) as ((one, _), (first, _)):
        with BlockStore(one.point, "blocks") as store, tracer.start_as_current_span("request") as span:
            top = span.get_span_context()
            put(store, data)
        calls = came(first, top.trace_id, "ring call", len(data))
        assert len(calls) == len(data)
        wait_until(lambda: bool(first.named("index put") and first.named("records commit")), "spans of stores")
        assert sum(attributes(span)["kvfuse.items"] for span in first.named("index put")) >= len(data)
        assert not any(name in str(first.spans) for name in ("blocks", "namespace")), "no names of files"


def test_the_threads_of_an_adapter_have_the_span_of_who_submits(tracer: Any) -> None:
    row_size, count = 4096, 8
    with collecting() as collector:
        with temporary_mount([f"capacity=64MiB,trace.endpoint={collector.endpoint},trace.ratio=0"]) as mount:
            store = SteadyStore(mount.point, "blocks", descriptor={"model": "some"}, deadline=20.0)
            memory = np.full(row_size * count, 7, np.uint8)
            transfers = Transfers(store, store.register(memory), row_size, deadline=20.0, backlog=1 << 20, threads=2)
            keys = [b"%d" % number for number in range(count)]
            with tracer.start_as_current_span("request") as span:
                top = span.get_span_context()
                transfers.submit(1, keys, range(count), is_load=False)
            transfers.drain()
            transfers.submit(2, keys, range(count), is_load=False)
            transfers.drain()
            assert [outcome.moved.all() for outcome in transfers.take_outcomes()] == [True] * 2
            transfers.close()
            store.close()
            wait_until(lambda: bool(collector.of(top.trace_id)), "the first job's spans")
            (mount.point / "file").touch()
        found = collector.of(top.trace_id)
        assert {span.name for span in found} <= {"ring batch", "ring call", "records get"}
        assert {one.parent_span_id for one in found if one.name.startswith("ring")} == {top.span_id.to_bytes(8, "big")}
        assert len(found) == len(collector.spans), "the second job had no span"


def test_blocks_that_the_rings_thread_answers_have_one_span_together(etcd: EtcdServers, tracer: Any) -> None:
    data = blocks(20)
    with (
        traced_pair(etcd, RELAXED) as ((one, two), (first, second)),
        BlockStore(one.point, "blocks") as store,
        BlockStore(two.point, "blocks") as reader,
    ):
        with tracer.start_as_current_span("request") as span:
            top = span.get_span_context()
            put(store, data)
        wait_until(lambda: bool(reader.exists(list(data)).all()), "the names")
        with tracer.start_as_current_span("other") as span:
            other = span.get_span_context()
            assert got(reader, list(data)) == list(data.values())
        batches = came(first, top.trace_id, "ring batch")
        assert {attributes(batch)["kvfuse.operation"] for batch in batches} == {"ring put"}
        together = sum(attributes(batch)["kvfuse.items"] for batch in batches)
        wait_until(lambda: together + len(first.named("ring call")) == len(data), "spans of all blocks")
        assert together > len(data) / 2
        assert {span.parent_span_id for span in first.of(top.trace_id)} == {top.span_id.to_bytes(8, "big")}
        answers = came(first, other.trace_id, "peer answer_blocks")
        asked = came(second, other.trace_id, "peers read_blocks")
        assert {answer.parent_span_id for answer in answers} <= {span.span_id for span in asked}


def are_below(collector: Collector, trace: int, name: str, above: Collector, parent: str) -> bool:
    """All spans that have come of this name are below one of that: a collector gets them in parts, in any order."""
    asked = {span.span_id for span in above.of(trace) if span.name == parent}
    return {span.parent_span_id for span in collector.of(trace) if span.name == name} <= asked


def test_files_of_another_host_and_its_disk_are_in_the_trace(etcd: EtcdServers, tracer: Any, tmp_path: Path) -> None:
    def own(collector: Collector) -> Sequence[str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        disk = (f"cache.disk_path={folder}", "cache.disk_size=256MiB", "cache.disk_keep=all")
        return (*words(collector), *disk)

    with traced_pair(etcd, SMALL_TIER, own) as ((one, two), (first, second)):
        content = secrets.token_bytes(8 << 20)
        names = [f"file{number}" for number in range(6)]
        for name in names:
            with (one.point / name).open("wb") as file:
                file.write(content)
                os.fsync(file.fileno())
        wait_until(lambda: all((two.point / name).exists() for name in names), "the names on the other host")
        with (
            connect(two.point) as client,
            client.ring(8) as ring,
            client.iov(len(content)) as iov,
            tracer.start_as_current_span("request") as span,
        ):
            top = span.get_span_context()
            for name in names:
                with client.file(two.point / name) as file:
                    ring.prep_read(iov, 0, file, 0, len(content))
                    ring.submit()
                    (row,) = ring.wait(1, 20.0)
                assert row["result"] == len(content)
                assert iov.array.tobytes() == content
        for name, collector, above in (("peer answer", second, "peers read"), ("disk stored", first, "peer answer")):
            came(first, top.trace_id, name)
            wait_until(lambda: are_below(first, top.trace_id, name, collector, above), f"parents of {name!r}")  # noqa: B023


def test_a_host_without_traces_is_sent_none(etcd: EtcdServers, tracer: Any) -> None:
    """As one of an older version: it would cut off who does."""
    data = blocks(3)
    with collecting() as collector, mounted(etcd, [words(None), words(collector)], RELAXED) as (one, two):
        wait_for_peers([one, two])
        with BlockStore(one.point, "blocks") as store, BlockStore(two.point, "blocks") as reader:
            with tracer.start_as_current_span("request") as span:
                top = span.get_span_context()
                put(store, data)
            wait_until(lambda: bool(reader.exists(list(data)).all()), "the names")
            with tracer.start_as_current_span("other") as span:
                other = span.get_span_context()
                assert got(reader, list(data)) == list(data.values())
        came(collector, other.trace_id, "peers read_blocks")
        assert collector.of(top.trace_id) == []
        assert stats(one)["peers"]["served"]["malformed"] == 0
        assert stats(two)["peers"]["asked"]["lost"] == 0


def test_only_spans_that_are_kept_are_named(tracer: Any) -> None:
    from opentelemetry.trace import INVALID_SPAN, use_span

    assert current_span() == b""
    with use_span(INVALID_SPAN):
        assert current_span() == b""
    sampler = pytest.importorskip("opentelemetry.sdk.trace.sampling")
    with sdk.TracerProvider(sampler=sampler.ALWAYS_OFF).get_tracer("application").start_as_current_span("request"):
        assert current_span() == b""
    with tracer.start_as_current_span("request") as span:
        assert len(current_span()) == SIZE
        span.end()
        assert len(current_span()) == SIZE, "what it began goes on"


def test_parents_that_are_malformed_are_ignored(tracer: Any) -> None:
    with collecting() as collector:
        endpoint = f"trace.endpoint={collector.endpoint},trace.ratio=0"
        with temporary_mount([f"capacity=64MiB,{endpoint}"]) as mount:
            with (
                connect(mount.point) as client,
                client.ring(8) as ring,
                client.file(mount.point / "file", "rw") as file,
            ):
                attached = ring.attached
                words = attached._words
                assert words[Word.DAEMON_TRACES] == words[Word.DAEMON_EPOCH] > 0
                for row in (bytes(SIZE), secrets.token_bytes(SIZE), bytes(16) + b"\1" * 9 + bytes(7), b"\xff" * SIZE):
                    words.obj[PARENTS_OFFSET : PARENTS_OFFSET + SIZE] = row
                    assert submit_naming(ring, file, 1) == 0
                assert submit_naming(ring, file, PARENTS_MAX + 1) < 0
                with tracer.start_as_current_span("request") as span:
                    top = span.get_span_context()
                    ring.prep_fsync(file)
                    ring.submit()
                    assert ring.wait(1, 20.0)["result"].tolist() == [0]
            came(collector, top.trace_id, "ring call")
            assert len(collector.of(top.trace_id)) == len(collector.spans)
            log = mount.log.read_text()
    assert log.count("names a parent span that is malformed") == 1


def submit_naming(ring: Any, file: Any, number: int) -> int:
    """The result of an entry that names that parent."""
    attached = ring.attached
    place = attached._sq.position % attached._shape.places * SQE_STRUCT.size
    ring.prep_fsync(file)
    assert attached._sq_bytes[place] == Op.FSYNC
    attached._sq_bytes[place + 60 : place + 64] = number.to_bytes(4, "little")
    ring.submit()
    (row,) = ring.wait(1, 20.0)
    return int(row["result"])
