"""What a request says of a volume: names that lead nowhere else, sizes in Kubernetes' words, errors that help."""

from __future__ import annotations

import re
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfuse.sizes import parse_size
from kvfuse_kubernetes.csi.csi_messages import messages
from kvfuse_kubernetes.csi.volume_words import WantedVolume, WrongRequest, read_publish, read_quantity

EPHEMERAL = {"csi.storage.k8s.io/ephemeral": "true"}
WORDS = st.text(alphabet=string.ascii_letters + "./-_ \n\0ä", max_size=12)


def request(volume_id: str, context: dict[str, str], **capability: Any) -> Any:
    mount = messages.MountVolume(**capability.pop("mount", {}))
    said = messages.VolumeCapability(mount=mount, access_mode=messages.AccessMode(mode=capability.pop("mode", 5)))
    return messages.NodePublishVolumeRequest(
        volume_id=volume_id, volume_context=context, volume_capability=said, **capability
    )


def wanted(volume_id: str, context: dict[str, str], **capability: Any) -> WantedVolume:
    return read_publish(request(volume_id, context, **capability))


def test_a_persistent_volume_is_named_by_its_handle() -> None:
    found = wanted("kv/tenants/llama", {"capacity": "64Gi", "kind": "blocks", "csi.storage.k8s.io/pod.name": "p"})
    assert (found.volume, found.namespace) == ("kv", "tenants/llama")
    assert found.settings == {"capacity": "64GiB", "kind": "blocks"}
    assert (found.is_ephemeral, found.is_read_only, found.has_rings, found.mode) == (False, False, False, 0o777)


def test_a_pods_own_volume_is_named_by_its_id() -> None:
    found = wanted("csi-1234", {"volume": "kv", "rings": "true", "mode": "0700", **EPHEMERAL})
    assert (found.volume, found.namespace, found.is_ephemeral) == ("kv", "ephemeral/csi-1234", True)
    assert (found.has_rings, found.mode) == (True, 0o700)


@pytest.mark.parametrize(
    "how",
    [{"readonly": True}, {"mode": 2}, {"mode": 3}, {"mount": {"mount_flags": ["ro"]}}],
    ids=["request", "one-reader", "many-readers", "option"],
)
def test_each_way_to_ask_for_a_read_only_volume(how: dict[str, Any]) -> None:
    assert wanted("kv/a", {}, **how).is_read_only
    assert not wanted("kv/a", {}).is_read_only
    assert wanted("kv/a", {"readOnly": "true"}).is_read_only


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1Gi", 1 << 30), ("1.5Gi", 3 << 29), ("1G", 10**9), ("20k", 20_000), ("512Ki", 512 << 10), ("1GiB", 1 << 30),
        ("4096", 4096), ("3T", 3 * 10**12),
    ],
)  # fmt: skip
def test_sizes_in_the_words_of_kubernetes(text: str, size: int) -> None:
    assert parse_size(read_quantity(text)) == size


@pytest.mark.parametrize(
    ("volume_id", "context", "message"),
    [
        ("kv", {}, "must be VOLUME/NAMESPACE"),
        ("kv/", {}, "must be VOLUME/NAMESPACE"),
        ("kv/../etc", {}, r"namespace '\.\.': a name has letters"),
        ("kv//a", {}, "namespace '': a name"),
        ("kv/.kvfuse", {}, "begins with a letter or digit"),
        ("../kv/a", {}, r"namespace 'kv/a'|volume '\.\.'"),
        ("kv/ephemeral/csi-1", {}, "has the volumes of pods alone"),
        ("kv/a", {"namespace": "b"}, "volumeHandle 'kv/a' and volume attribute namespace = 'b' contradict"),
        ("kv/a", {"capactiy": "1Gi"}, "'capactiy' is unknown; did you mean 'capacity'"),
        ("kv/a", {"token": "generate"}, "'token' is unknown"),
        ("kv/a", {"capacity": "much"}, "volume attribute capacity: 'much' is no size"),
        ("kv/a", {"eviction": "lru kind=files"}, "one word is wanted"),
        ("kv/a", {"mode": "rwx"}, "in octal"),
        ("kv/a", {"rings": "yes"}, '"true" or "false"'),
        ("csi-1", {**EPHEMERAL}, "'volume' is missing"),
        ("csi-1", {"volume": "kv", "namespace": "llama", **EPHEMERAL}, "make a PersistentVolume of it"),
        ("a/b", {"volume": "kv", **EPHEMERAL}, "letters, digits"),
    ],
)
def test_what_is_wrong_is_said(volume_id: str, context: dict[str, str], message: str) -> None:
    with pytest.raises(WrongRequest, match=message):
        wanted(volume_id, context)


def test_a_block_device_and_strange_options_are_refused() -> None:
    block = request("kv/a", {})
    block.volume_capability.block.SetInParent()
    with pytest.raises(WrongRequest, match="kvfuse volumes are file systems"):
        read_publish(block)
    with pytest.raises(WrongRequest, match="leave fsType out"):
        wanted("kv/a", {}, mount={"fs_type": "ext4"})
    with pytest.raises(WrongRequest, match="mount option 'dev' is unknown"):
        wanted("kv/a", {}, mount={"mount_flags": ["dev"]})


@given(WORDS, WORDS, st.booleans())
def test_no_words_lead_out_of_a_volume(volume_id: str, volume: str, is_ephemeral: bool) -> None:
    """Whatever a pod or a PersistentVolume says: each name is a plain one, or the request is wrong."""
    context = {"volume": volume, **(EPHEMERAL if is_ephemeral else {})}
    try:
        found = wanted(volume_id, context)
    except WrongRequest:
        return
    for part in (found.volume, *found.namespace.split("/")):
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", part)
    assert (found.namespace.split("/")[0] == "ephemeral") == is_ephemeral
