"""What a KvfuseVolume's spec becomes: mount.conf, and what pods need. No cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvfuse.options import config
from kvfuse.options.options import Options
from kvfuse_kubernetes.operator.volume_plan import VolumePlan, WrongSpec, read_volume

GIB = 1 << 30


def loaded(plan: VolumePlan) -> Options:
    """Its mount.conf, as kvfuse reads it."""
    return config.load(Path("/etc/kvfuse/mount.conf"), text=plan.mount_conf).options


def test_a_spec_that_says_nothing_is_a_volume_in_a_folder_of_the_node() -> None:
    plan = read_volume("kv", {})
    options = loaded(plan)
    assert options.volume.path == Path("/var/lib/kvfuse/volumes/kv/volume")
    assert options.mount.allow_other
    assert (plan.is_shared, plan.secrets, plan.host_paths) == (False, (), ())


def test_sizes_are_those_of_kubernetes_or_of_kvfuse() -> None:
    for text in ("64Gi", "64GiB", str(64 * GIB)):
        plan = read_volume("kv", {"capacity": text, "blockSizes": ["2Mi", "1536KiB"]})
        assert plan.capacity == 64 * GIB
        assert loaded(plan).volume.exact_sizes == (2 << 20, 1536 << 10)
        assert loaded(plan).volume.capacity == 64 * GIB


def test_etcd_by_endpoints_or_service_with_secrets_as_files() -> None:
    etcd: dict[str, Any] = {
        "service": {"name": "etcd-client", "namespace": "db", "port": 2379, "scheme": "https"},
        "user": "kvfuse",
        "passwordSecret": {"name": "etcd", "key": "pass"},
        "tlsSecret": {"name": "etcd-tls", "clientCertificate": True},
    }
    plan = read_volume("kv", {"records": {"etcd": etcd}, "segments": {"path": "/mnt/shared/kv"}})
    records = loaded(plan).records
    assert plan.is_shared
    assert "https://etcd-client.db.svc:2379" in plan.mount_conf
    assert str(getattr(records, "password_file", "")) == "/etc/kvfuse/secrets/etcd/pass"
    assert str(getattr(records, "key_file", "")) == "/etc/kvfuse/secrets/etcd-tls/tls.key"
    assert plan.secrets == ("etcd", "etcd-tls")
    assert plan.host_paths == ("/mnt/shared/kv",), "the daemon's container needs the shared folder"
    assert loaded(plan).volume.name == "kv"


def test_ceph_by_rook_or_by_configuration() -> None:
    etcd = {"etcd": {"endpoints": ["http://10.0.0.1:2379"]}}
    plan = read_volume("kv", {"records": etcd, "segments": {"rook": {"pool": "kvfuse", "client": "kv"}}})
    assert plan.rook is not None
    assert (plan.rook.namespace, plan.secrets) == ("rook-ceph", ("kv-rook",))
    assert str(getattr(loaded(plan).segments, "keyring", "")) == "/etc/kvfuse/secrets/kv-rook/keyring"
    ceph = {"pool": "kvfuse", "configMap": "ceph", "secret": "ceph-key"}
    plan = read_volume("kv", {"records": etcd, "segments": {"ceph": ceph}})
    assert (plan.secrets, plan.config_maps) == (("ceph-key",), ("ceph",))
    with pytest.raises(WrongSpec, match=r"needs spec\.records\.etcd"):
        read_volume("kv", {"segments": {"ceph": ceph}})


def test_devices_make_the_daemon_privileged() -> None:
    etcd = {"etcd": {"endpoints": ["http://10.0.0.1:2379"]}}
    plan = read_volume("kv", {"records": etcd, "segments": {"devices": ["/dev/disk/by-id/nvme-uuid.1"]}})
    assert plan.has_devices
    assert not read_volume("kv", {}).has_devices


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"capacty": "1Gi"}, r"spec\.capacty is unknown; did you mean 'capacity'"),
        ({"capacity": "much"}, r"spec\.capacity: 'much' is no size"),
        ({"config": {"cache": {"staging": "1GiB"}}}, r"staging"),
        ({"config": {"cashe": {}}}, r"cashe"),
        ({"records": {"etcd": {}}}, r"name its endpoints, or a service"),
        ({"segments": {"path": "/a", "devices": ["/dev/sdb"]}}, r"only one of path, devices"),
        ({"growth": {"step": "1Gi", "maximum": "2Gi"}, "capacity": "3Gi"}, r"growth\.maximum is less"),
        ({"hostPaths": ["relative"]}, r"whole path"),
    ],
)
def test_what_is_wrong_is_refused_with_what_is_right(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(WrongSpec, match=said):
        read_volume("kv", spec)


def test_names_have_room_for_those_of_other_objects() -> None:
    for name in ("Kv", "kv.a", "a" * 41, "-kv"):
        with pytest.raises(WrongSpec, match="at most 40"):
            read_volume(name, {})


def test_capacity_alone_restarts_no_daemon() -> None:
    one, other = (read_volume("kv", {"capacity": size}) for size in ("1Gi", "2Gi"))
    assert one.mount_conf != other.mount_conf
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint != read_volume("kv", {"config": {"mount": {"readers": 4}}}).fingerprint
