"""The tables of messages, compared with the code that Kubernetes' own source has of the same protocols."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kube_lab import SOURCE

from kvfuse_kubernetes.csi.csi_messages import CSI, REGISTRATION, Table, messages

CSI_CODE = SOURCE / "vendor/github.com/container-storage-interface/spec/lib/go/csi/csi.pb.go"
REGISTRATION_CODE = SOURCE / "staging/src/k8s.io/kubelet/pkg/apis/pluginregistration/v1/api.pb.go"
OTHER_NAMES = {
    "BlockVolume": "VolumeCapability_BlockVolume",
    "MountVolume": "VolumeCapability_MountVolume",
    "AccessMode": "VolumeCapability_AccessMode",
    "NodeServiceCall": "NodeServiceCapability_RPC",
    "BoolValue": None,  # google.protobuf's
}
"""what generated code calls messages that are inside others"""
LATER = {"volume_condition", "VolumeCondition"}
"""of CSI 1.3, which this source lacks"""
FIELD = re.compile(r'`protobuf:"(\w+),(\d+),(opt|rep),name=(\w+)')


def fields_of(code: str, name: str) -> dict[str, tuple[int, str, str]]:
    """Field -> (number, form on the wire, single or repeated), with those that exclude each other."""
    bodies = re.findall(rf"^type {name}(?:_[A-Z]\w+)? struct {{\n(.*?)^}}", code, re.S | re.M)
    return {field[3]: (int(field[1]), field[0], field[2]) for body in bodies for field in FIELD.findall(body)}


@pytest.mark.parametrize(("table", "path"), [(CSI, CSI_CODE), (REGISTRATION, REGISTRATION_CODE)], ids=["csi", "plugin"])
@pytest.mark.needs("kubernetes")
def test_numbers_are_those_of_kubernetes(table: Table, path: Path) -> None:
    if not path.exists():
        pytest.skip("no source of Kubernetes; type: scripts/kube-lab build")
    code, compared = path.read_text(), 0
    for name, fields in table.items():
        if (other := OTHER_NAMES.get(name, name)) is None or name in LATER:
            continue
        assert re.search(rf"^type {other} struct", code, re.M), name
        known = fields_of(code, other)
        for field, said in ((field, said) for field, said in fields.items() if field not in LATER):
            number, kind = said.split()
            form = "varint" if kind in ("int32", "int64", "bool") else "bytes"
            assert known[field] == (int(number), form, "rep" if kind == "map" or kind[0] == "*" else "opt"), (
                name,
                field,
            )
            compared += 1
    assert compared == sum(
        len(fields.keys() - LATER) for name, fields in table.items() if name not in ("BoolValue", *LATER)
    )


def test_messages_go_over_the_wire() -> None:
    sent = messages.NodePublishVolumeRequest(volume_id="a", volume_context={"b": "c"}, readonly=True)
    sent.volume_capability.mount.mount_flags.append("ro")
    data = sent.SerializeToString()
    assert messages.NodePublishVolumeRequest.FromString(data) == sent
    assert data.startswith(b"\x0a\x01a"), "field 1, one byte"
    assert not sent.volume_capability.HasField("block")
    unknown = messages.NodeGetVolumeStatsRequest.FromString(b"\x1a\x01z\x0a\x01v")
    assert unknown.volume_id == "v", "fields of later versions are passed over"
