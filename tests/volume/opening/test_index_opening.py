"""Which engine a volume's index has, and what keeps it from being opened."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from cluster_lab import rados
from mounting import shared_conf
from redis_lab import RedisServer, redis_server

from kvfuse.cli.doctor import check_engines
from kvfuse.errors import ConfigError, EngineError
from kvfuse.options import config
from kvfuse.options.config import Options
from kvfuse.remote.index.api import Entry
from kvfuse.volume.opening import engines
from kvfuse_cluster.ceph import CephServers
from kvfuse_cluster.etcd import EtcdServers

ENTRY = Entry(bytes(16), 1, b"value")
ONE, ANOTHER = b"one" + bytes(13), b"another" + bytes(9)
"""ids of volumes"""


def with_index(conf: Path, lines: str) -> Options:
    conf.write_text(conf.read_text() + f"\n[index]\n{lines}\n")
    return config.load(conf).options


async def engine_of(options: Options) -> str:
    """What the index is that was opened. Volumes of one name that were made one after the other have each their own."""
    for volume_id in (ONE, ANOTHER):
        async with engines.open_index(options, volume_id=volume_id) as index:
            if index is None:
                return "none"
            assert await index.put([ENTRY._replace(sequence=volume_id[0])]) == [None]
    async with engines.open_index(options, volume_id=ONE) as index:
        assert index is not None
        assert await index.find([ENTRY.key]) == [ENTRY._replace(sequence=ONE[0])]
        return type(index).__name__


async def test_records_in_etcd_are_enough(etcd_alone: EtcdServers, tmp_path: Path) -> None:
    conf = shared_conf(tmp_path, etcd_alone)
    assert await engine_of(config.load(conf).options) == "EtcdIndex"
    assert await engine_of(with_index(shared_conf(tmp_path, etcd_alone), "engine = 'etcd'")) == "EtcdIndex"


async def test_no_host_that_watches_records_is_told_of_an_entry(etcd_alone: EtcdServers, tmp_path: Path) -> None:
    options = config.load(shared_conf(tmp_path, etcd_alone)).options
    async with (
        engines.open_records(options) as records,
        engines.open_index(options, volume_id=ONE) as index,
        engines.open_index(options) as nameless,
    ):
        watch = records.watch(b"")
        for engine in (index, nameless):
            assert engine is not None
            await engine.put([ENTRY])
            await engine.put([ENTRY])
            await engine.drop([(ENTRY.key, ENTRY.sequence)])
        await records.commit({b"after": b""})
        with trio.fail_after(30):
            assert (await anext(watch)).key == b"after"
        assert [row.key for row in await records.scan(b"")] == [b"after"]


async def test_a_volume_of_one_host_has_none(tmp_path: Path) -> None:
    assert await engine_of(config.load(tmp_path).options) == "none"


@pytest.mark.needs("ceph")
async def test_segments_in_rados_have_it_beside_them(
    etcd_alone: EtcdServers, ceph: CephServers, tmp_path: Path
) -> None:
    options = config.load(shared_conf(tmp_path, etcd_alone, ceph)).options
    assert await engine_of(options) == "OmapIndex"
    names = rados(ceph, options.volume.name, "ls").split()
    assert {name.rpartition(".")[0] for name in names} == {f"index.{ONE.hex()[:8]}", f"index.{ANOTHER.hex()[:8]}"}
    options = with_index(shared_conf(tmp_path, etcd_alone, ceph), "engine = 'omap'\nshards = 1")
    assert await engine_of(options) == "OmapIndex"
    assert len(rados(ceph, options.volume.name, "ls").split()) == 2


@pytest.mark.needs("ceph")
async def test_a_pool_without_omaps_has_it_in_etcd(etcd_alone: EtcdServers, ceph: CephServers, tmp_path: Path) -> None:
    ceph.command("osd", "erasure-code-profile", "set", "none", "k=2", "m=1", "crush-failure-domain=osd", as_json=False)
    ceph.command("osd", "pool", "create", "no-omaps", "8", "8", "erasure", "none", as_json=False)
    ceph.command("osd", "pool", "set", "no-omaps", "allow_ec_overwrites", "true", as_json=False)
    coded = replace(ceph.settings, pool="no-omaps")
    conf = shared_conf(tmp_path, etcd_alone, ceph)
    conf.write_text(conf.read_text().replace(f'"{ceph.settings.pool}"', f'"{coded.pool}"'))
    assert await engine_of(config.load(conf).options) == "EtcdIndex"
    with pytest.raises(EngineError, match=r"the pool has no omaps: see index\.engine"):
        await engine_of(with_index(conf, "engine = 'omap'"))


@pytest.fixture
def redis() -> RedisServer:
    with redis_server(password="hunter2") as server:
        yield server


async def test_a_redis_server_has_it(etcd_alone: EtcdServers, redis: RedisServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")
    secret.chmod(0o600)
    lines = f"engine = 'redis'\nurl = '{redis.url}'\npassword_file = '{secret}'\ndeadline = 30"
    options = with_index(shared_conf(tmp_path, etcd_alone), lines)
    assert await engine_of(options) == "RedisIndex"
    found = await trio.to_thread.run_sync(lambda: [*check_engines(options)])
    assert "redis: answers in" in {finding.name: finding.detail for finding in found}["index"]
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match=r"index\.password_file: others may read"):
        await engine_of(options)
    secret.chmod(0o600)
    redis.kill()
    async with engines.open_index(options) as index:
        assert index is not None
        with pytest.raises(EngineError, match="refused"):
            await index.find([ENTRY.key])
    found = await trio.to_thread.run_sync(lambda: [*check_engines(options)])
    assert "refused" in {finding.name: finding.detail for finding in found}["index"]


def test_drivers_of_engines_that_are_not_used_are_not_loaded() -> None:
    drivers = {"hiredis", "hpack", "kvfuse.remote.segments.rados.librados"}
    script = f"import sys, kvfuse.volume.opening.engines; print({drivers} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
