"""From what a volume says of itself (``Volume.stats``) to metric families with the names of ``docs/metrics.md``.

Labels have few values: namespaces, tiers, results, operations, reasons. No file, client or user has a series of its
own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

import kvfuse

Stats = Mapping[str, Any]
Rows = Sequence[tuple[Sequence[str], Any]]
"""(label values, value)"""

CACHE = "cache"
"""the label of namespaces; Kubernetes gives every scraped series a label ``namespace`` of its own"""
DEGRADED = "commit", "write", "sync"
"""reasons for which a volume is: see `volume.views.health`"""
REASONS = "room", "expired", "cleared"
COLD_BYTES = {"capacity": "capacity", "used": "used_bytes", "blocks": "block_bytes", "leaving": "leaving_bytes"}
COLD_EVENTS = {
    **{event: event for event in ("demoted", "promoted", "surrendered", "refused")},
    "damaged": "damaged_blocks",
    "dead": "killed_blocks",
    "repacked": "repacked_blocks",
}
DISK_EVENTS = {
    "hit": "hits",
    "miss": "misses",
    "adopted": "adopted",
    "written": "written",
    "skipped": "skipped",
    "refused": "refused",
    "evicted": "evicted",
    "dropped": "dropped",
    "damaged": "damaged",
    "late": "late",
    "error": "errors",
}
"""event of the disk tier -> its figure"""
LEASE_SECONDS = {"granted": "seconds", "left": "left"}
LEASE_EVENTS = {"late": "late_renewals", "lost": "losses"}
"""label -> its figure"""
PEER_READ_RESULTS = ("right", "absent", "moved", "busy", "wrong", "lost", "late")
RDMA_EVENTS = {"read": "reads", "batch": "batches", "completion": "completions", "pair": "pairs"}
PEER_ANSWERS = ("here", "absent", "moved", "elsewhere", "busy")
CAUSES_OF_DEATH = "killed", "exception", "silent", "crash", "exit"
"""as the holder of a mount has them"""
NO_TIER = "none"
"""of a request that no tier answered"""


def families(stats: Stats, space: Stats) -> Iterator[Metric]:
    """All families of one volume. ``space``: of ``Volume.space``."""
    yield InfoMetricFamily("kvfuse", "The program, and its volume.", value=_info(stats))
    yield from _volume(stats, space)
    yield from _engines(stats)
    rows = [(label, row) for label, row in zip(_labels(stats["namespaces"]), stats["namespaces"], strict=True)]
    yield from _namespaces(rows)
    yield from _caches([(label, row["cache"]) for label, row in rows if row["cache"] is not None])


def _info(stats: Stats) -> dict[str, str]:
    return {"version": kvfuse.__version__, "volume": stats["volume"]}


def _labels(namespaces: Sequence[Stats]) -> Iterator[str]:
    """A label for each namespace: its path, in UTF-8. Where that is another one's too, its number stands behind it."""
    seen = set()
    for row in namespaces:
        label = row["path"].encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        if label in seen:
            label = f"{label}#{row['number']}"
        seen.add(label)
        yield label


def _counter(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _gauge(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _histogram(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    """Of rows with `measures.Histogram.statistics`."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, value in rows:
        bounds = [*map(str, value["bounds"]), "+Inf"]
        family.add_metric(values, list(zip(bounds, accumulate(value["counts"]), strict=True)), value["sum"])
    return family


# -- the volume ---------------------------------------------------------------------------------------


def _volume(stats: Stats, space: Stats) -> Iterator[Metric]:
    counters, slabs, tier = stats["counters"], stats["slabs"], stats["tier"]
    yield _gauge("kvfuse_uptime_seconds", "Seconds since the volume was mounted.", (), [((), stats["uptime"])])
    deaths: Counter[str] = Counter(stats.get("daemon_deaths"))
    failed = stats.get("service_failures") or {}
    rows: Rows = [((cause,), deaths[cause]) for cause in CAUSES_OF_DEATH]
    yield _counter("kvfuse_daemon_deaths", "Daemons of this mount that died since it was made.", ("cause",), rows)
    rows = [((name,), failed.get(name, 0)) for name in sorted({"metrics", *failed})]
    text = "Failures of what runs beside requests, and is begun anew, in this daemon."
    yield _counter("kvfuse_service_failures", text, ("service",), rows)
    failing = {row["reason"] for row in stats["degraded"]}
    rows = [((reason,), reason in failing) for reason in DEGRADED]
    yield _gauge("kvfuse_degraded", "1: what is new cannot be stored at present, for this reason.", ("reason",), rows)
    yield from _lease(stats.get("lease"))
    yield _gauge("kvfuse_volume_size_bytes", "What df shows as the size.", (), [((), space["size"])])
    yield _gauge("kvfuse_volume_free_bytes", "What df shows as available.", (), [((), space["free"])])
    yield _gauge("kvfuse_files", "Inodes of the volume.", (), [((), space["files"] - space["files_free"])])
    sizes = [(("used",), stats["metadata"]["bytes"]), (("limit",), stats["metadata"]["limit"])]
    yield _gauge("kvfuse_metadata_bytes", "Names, inodes and attributes, and their budget.", ("kind",), sizes)
    operations = ("reads", "writes", "lookups", "absent_lookups", "creates", "renames", "removes")
    rows = [((name,), counters[name]) for name in operations]
    yield _counter("kvfuse_file_operations", "Operations on files in the event loop.", ("operation",), rows)
    failures = counters["checksum_failures"]
    yield _counter("kvfuse_verify_failures", "Reads of bytes that their checksum refuted.", (), [((), failures)])
    rows = [((state,), slabs[f"slabs_{state}"]) for state in ("free", "partial", "full")]
    yield _gauge("kvfuse_slabs", "Slabs by how full they are.", ("state",), rows)
    rows = [((kind,), slabs[f"{kind}_bytes"]) for kind in ("used", "free", "tail", "pending")]
    yield _gauge("kvfuse_slab_bytes", "Bytes of slabs; pending ones are used ones, too.", ("state",), rows)
    staged = stats["memory"]["staged_bytes"]
    yield _gauge("kvfuse_staged_bytes", "Bytes in memory that wait for their slots.", (), [((), staged)])
    rows = [(("capacity",), tier["capacity"]), (("used",), tier["used_bytes"]), (("kept",), tier["kept_bytes"])]
    yield _gauge("kvfuse_tier_bytes", "The shared-memory tier.", ("kind",), rows)
    names = {"hit": "hits", "miss": "misses", "eviction": "evictions", "adopted": "adopted"}
    text = "Look-ups in the shared-memory tier, its evictions, and what a daemon before this one left there."
    yield _counter("kvfuse_tier_events", text, ("event",), [((event,), tier[name]) for event, name in names.items()])
    yield from _reports(stats.get("reports") or Counter())
    yield from _disk_tier(stats.get("disk") or Counter())
    yield from _cold_tier((stats["store"] or {}).get("cold"))
    peers = stats.get("peers") or {"asked": Counter(), "served": Counter(), "hosts": ()}
    yield from _peers(peers)
    yield from _rdma(peers.get("rdma") or Counter(), peers["served"])


def _lease(lease: Stats | None) -> Iterator[Metric]:
    """No series where one host has the volume: 0 s would say that a lease is lost."""
    rows: Rows = [((kind,), lease[key]) for kind, key in LEASE_SECONDS.items()] if lease else []
    yield _gauge("kvfuse_lease_seconds", "This host's lease of the volume, and what is left of it.", ("kind",), rows)
    rows = [((event,), lease[key]) for event, key in LEASE_EVENTS.items()] if lease else []
    yield _counter("kvfuse_lease_events", "Renewals that got no answer, and leases that were lost.", ("event",), rows)


def _reports(reports: Stats) -> Iterator[Metric]:
    """Zeros where one host has the volume."""
    rows: Rows = [((event,), reports[event]) for event in ("sent", "heard", "asked")]
    text = "Reports between hosts: room that they lack, blocks of each other that they use."
    yield _counter("kvfuse_room_reports", text, ("event",), rows)


def _disk_tier(disk: Stats) -> Iterator[Metric]:
    """Zeros where there is none."""
    rows: Rows = [((kind,), disk[f"{kind}_bytes"]) for kind in ("capacity", "used", "kept", "saved", "queued")]
    yield _gauge("kvfuse_disk_tier_bytes", "The disk tier; queued ones are in memory.", ("kind",), rows)
    yield _gauge("kvfuse_disk_tier_up", "1: there is a disk tier, and its disk works.", (), [((), disk["is_on"])])
    rows = [((event,), disk[name]) for event, name in DISK_EVENTS.items()]
    text = "Copies in the disk tier, of up to 256 KiB each, and what became of them."
    yield _counter("kvfuse_disk_tier_events", text, ("event",), rows)
    rows = [(("disk",), disk["hit_bytes"]), (("remote",), disk["engine_bytes"])]
    yield _counter("kvfuse_disk_tier_read_bytes", "Bytes that readers got, by who had them.", ("tier",), rows)
    rows = [(("disk",), disk["read_seconds"]), (("remote",), disk["engine_seconds"])]
    yield _counter("kvfuse_disk_tier_read_seconds", "Seconds that these reads took.", ("tier",), rows)
    seconds = disk["adoption_seconds"]
    text = "Seconds until all copies of before the mount could be found."
    yield _gauge("kvfuse_disk_tier_adoption_seconds", text, (), [((), seconds)])


def _cold_tier(cold: Stats | None) -> Iterator[Metric]:
    """Zeros where there is none."""
    found = Counter(cold or {})
    rows: Rows = [((kind,), found[key]) for kind, key in COLD_BYTES.items()]
    yield _gauge("kvfuse_cold_bytes", "The cold tier in a bucket.", ("kind",), rows)
    is_up = cold is not None and cold["is_loaded"] and cold["failure"] is None
    yield _gauge("kvfuse_cold_up", "1: there is a cold tier, and its bucket answers.", (), [((), is_up)])
    rows = [((event,), found[key]) for event, key in COLD_EVENTS.items()]
    yield _counter("kvfuse_cold_blocks", "Blocks of the cold tier, and what became of them.", ("event",), rows)
    rows = [(("out",), found["demoted_bytes"]), (("back",), found["promoted_bytes"])]
    yield _counter(
        "kvfuse_cold_moved_bytes", "Bytes of blocks that went to the bucket, and back.", ("direction",), rows
    )
    rows = [((what,), found[key]) for what, key in (("put", "failed_puts"), ("read", "failed_reads"))]
    yield _counter("kvfuse_cold_failures", "Requests that the bucket did not answer, or refused.", ("request",), rows)


def _peers(peers: Stats) -> Iterator[Metric]:
    """Zeros where one host has the volume."""
    asked, served, hosts = peers["asked"], peers["served"], peers["hosts"]
    rows: Rows = [((result,), asked[result]) for result in PEER_READ_RESULTS]
    yield _counter("kvfuse_peer_reads", "Reads asked of other hosts, by how they ended.", ("result",), rows)
    rows = [((event,), asked[event]) for event in ("hedged", "overtaken", "named")]
    yield _counter("kvfuse_peer_read_events", "What became of these reads on their way.", ("event",), rows)
    rows = [((result,), served[result]) for result in PEER_ANSWERS]
    yield _counter("kvfuse_peer_answers", "Rows of questions of other hosts, by their answers.", ("result",), rows)
    rows = [(("read",), asked["bytes"]), (("served",), served["bytes"])]
    yield _counter("kvfuse_peer_bytes", "Bytes of blocks between this host and others.", ("direction",), rows)
    rows = [((event,), served[event]) for event in ("refused", "malformed", "given_up")]
    yield _counter("kvfuse_peer_refusals", "Connections of other hosts that were ended here.", ("reason",), rows)
    connected = sum(host["state"] == "connected" for host in hosts)
    yield _gauge("kvfuse_peers", "Other hosts that answer.", ("state",), [
        (("connected",), connected), (("known",), len(hosts))
    ])  # fmt: skip


def _rdma(rdma: Stats, served: Stats) -> Iterator[Metric]:
    """Zeros where there is none."""
    rows: Rows = [((event,), rdma[name]) for event, name in RDMA_EVENTS.items()]
    text = "READs of other hosts' memory; lists of these that were waited for together, and completions; queue pairs."
    yield _counter("kvfuse_rdma_events", text, ("event",), rows)
    rows = [(("read",), rdma["bytes"]), (("lent",), served["placed_bytes"])]
    yield _counter(
        "kvfuse_rdma_bytes", "Bytes that READs asked for, and that others were told to read.", ("direction",), rows
    )
    rows = [((status,), count) for status, count in (rdma["errors"] or {}).items()]
    yield _counter("kvfuse_rdma_errors", "Queue pairs that ended because of a READ, by its status.", ("status",), rows)
    registered = rdma["registered_bytes"]
    yield _gauge("kvfuse_rdma_registered_bytes", "Memory that devices may use, of each device.", (), [((), registered)])
    longest = max((rdma["longest_call_ms"] or {}).values(), default=0)
    text = "The longest call of verbs since the mount, for which the event loop waited."
    yield _gauge("kvfuse_rdma_longest_call_seconds", text, (), [((), longest / 1e3)])


def _engines(stats: Stats) -> Iterator[Metric]:
    journal, records, segments = stats["journal"], stats["records"], stats["segments"]
    yield _counter("kvfuse_commits", "Group commits.", (), [((), journal["commits"])])
    yield _counter("kvfuse_commit_failures", "Group commits that failed.", (), [((), journal["commit_failures"])])
    yield _counter("kvfuse_committed_blocks", "Files whose bytes were committed.", (), [((), journal["blocks"])])
    trips: Rows = [
        *[(("records", name), records[name]) for name in ("gets", "scans", "commits")],
        *[(("segments", name), segments[name]) for name in ("reads", "writes", "syncs")],
    ]
    yield _counter("kvfuse_engine_calls", "Calls of the record store and the segments.", ("engine", "call"), trips)
    kinds = ("read", "read_bytes"), ("written", "written_bytes"), ("viewed", "view_bytes")
    moved: Rows = [((direction,), segments[name]) for direction, name in kinds]
    text = "Changes that servers of segments did not answer in time, so that other slots were tried."
    yield _counter("kvfuse_segment_late_writes", text, (), [((), segments["late_writes"])])
    text = "Slots that were exchanged for others, as their servers did not answer."
    yield _counter("kvfuse_segment_moved_slots", text, (), [((), segments["moved_slots"])])
    yield _counter("kvfuse_segment_bytes", "Bytes that the segments gave and took.", ("direction",), moved)


# -- namespaces ---------------------------------------------------------------------------------------

Pick = Callable[[Stats], Any]


def _of_each(rows: Sequence[tuple[str, Stats]], pick: Pick) -> Rows:
    """One value a namespace, where it has one."""
    return [((label,), value) for label, row in rows if (value := pick(row)) is not None]


def _namespaces(rows: Sequence[tuple[str, Stats]]) -> Iterator[Metric]:
    one = (CACHE,)
    used = _of_each(rows, lambda row: row.get("used", {}).get("bytes"))
    yield _gauge("kvfuse_used_bytes", "Bytes of slots that a namespace holds.", one, used)
    capacity = _of_each(rows, lambda row: row.get("capacity"))
    yield _gauge("kvfuse_capacity_bytes", "Bytes of slots that a namespace may hold.", one, capacity)
    read = _of_each(rows, lambda row: row["measures"]["read_bytes"])
    yield _counter("kvfuse_read_bytes", "Bytes that callers read.", one, read)
    written = _of_each(rows, lambda row: row["measures"]["written_bytes"])
    yield _counter("kvfuse_written_bytes", "Bytes that callers wrote.", one, written)
    throttled = _of_each(rows, lambda row: row["measures"]["throttled_seconds"])
    yield _counter("kvfuse_throttled_seconds", "Seconds that requests waited for limits.", one, throttled)
    tried = _of_each(rows, lambda row: row["compression"]["tried_bytes"])
    text = "Bytes that were compressed, to see whether they take smaller slots."
    yield _counter("kvfuse_compression_tried_bytes", text, one, tried)
    saved = _of_each(rows, lambda row: row["compression"]["saved_bytes"])
    yield _counter("kvfuse_compression_saved_bytes", "Bytes of slots that compression saved.", one, saved)
    failed: Rows = [
        ((label, reason), count) for label, row in rows for reason, count in row["measures"]["failures"].items()
    ]
    yield _counter("kvfuse_requests_failed", "Requests that failed.", (CACHE, "reason"), failed)
    seconds: Rows = [
        ((label, operation), found)
        for label, row in rows
        if any(any(found["counts"]) for found in row["measures"]["seconds"].values())  # else a namespace costs little
        for operation, found in row["measures"]["seconds"].items()
    ]
    text = "Seconds that requests took in the daemon."
    yield _histogram("kvfuse_request_seconds", text, (CACHE, "operation"), seconds)


def _caches(rows: Sequence[tuple[str, Stats]]) -> Iterator[Metric]:
    one = (CACHE,)
    requested: Rows = [
        *[((label, tier, "hit"), count) for label, row in rows for tier, count in row["hits"].items()],
        *[((label, NO_TIER, result), count) for label, row in rows for result, count in row["misses"].items()],
    ]
    text = "Blocks that were asked for. Each is counted once, so the sum over results is all that was asked for."
    yield _counter("kvfuse_blocks_requested", text, (CACHE, "tier", "result"), requested)
    yield _gauge("kvfuse_hit_ratio", "Hits among all requests.", one, _of_each(rows, lambda row: row["hit_ratio"]))
    ratios: Rows = [
        ((label, factor), ratio) for label, row in rows for factor, ratio in row["estimated_hit_ratio"].items()
    ]
    text = "Hit ratio of least recently used eviction with so many times the blocks that the cache has now."
    yield _gauge("kvfuse_estimated_hit_ratio", text, (CACHE, "capacity"), ratios)
    yield _gauge("kvfuse_blocks", "Blocks of a cache.", one, _of_each(rows, lambda row: row["blocks"]))
    yield _counter("kvfuse_blocks_stored", "Blocks stored.", one, _of_each(rows, lambda row: row["stored"]))
    gone: Rows = [((label, reason), row[reason]) for label, row in rows for reason in REASONS]
    yield _counter("kvfuse_evictions", "Blocks that went, by reason.", (CACHE, "reason"), gone)
    refused = _of_each(rows, lambda row: row["refused"])
    yield _counter("kvfuse_admissions_refused", "Blocks that a full cache did not store.", one, refused)
    residence = _of_each(rows, lambda row: row["residence"])
    yield _histogram("kvfuse_residence_seconds", "Seconds from when a block was stored to its end.", one, residence)
    gaps = _of_each(rows, lambda row: row["reuse_gap"])
    yield _histogram("kvfuse_reuse_gap_seconds", "Seconds between two uses of a block, of a sample.", one, gaps)
