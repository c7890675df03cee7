"""The messages of CSI 1.x and of the kubelet's plug-in registration v1, as far as the plug-in uses them.

The tables have the numbers that both protocols fix. A field is "NUMBER TYPE": a scalar of protobuf, ``map`` (string to
string) or a message of the same table; ``*`` before the type: repeated. Enumerations are int32, which is the same on
the wire; fields that are absent here are ignored in requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Table = Mapping[str, Mapping[str, str]]

CSI: Table = {
    "GetPluginInfoRequest": {},
    "GetPluginInfoResponse": {"name": "1 string", "vendor_version": "2 string", "manifest": "3 map"},
    "GetPluginCapabilitiesRequest": {},
    "GetPluginCapabilitiesResponse": {},
    "ProbeRequest": {},
    "ProbeResponse": {"ready": "1 BoolValue"},
    "BoolValue": {"value": "1 bool"},
    "NodeGetInfoRequest": {},
    "NodeGetInfoResponse": {"node_id": "1 string", "max_volumes_per_node": "2 int64"},
    "NodeGetCapabilitiesRequest": {},
    "NodeGetCapabilitiesResponse": {"capabilities": "1 *NodeServiceCapability"},
    "NodeServiceCapability": {"rpc": "1 NodeServiceCall"},
    "NodeServiceCall": {"type": "1 int32"},
    "NodePublishVolumeRequest": {
        "volume_id": "1 string",
        "publish_context": "2 map",
        "staging_target_path": "3 string",
        "target_path": "4 string",
        "volume_capability": "5 VolumeCapability",
        "readonly": "6 bool",
        "secrets": "7 map",
        "volume_context": "8 map",
    },
    "NodePublishVolumeResponse": {},
    "VolumeCapability": {"block": "1 BlockVolume", "mount": "2 MountVolume", "access_mode": "3 AccessMode"},
    "BlockVolume": {},
    "MountVolume": {"fs_type": "1 string", "mount_flags": "2 *string"},
    "AccessMode": {"mode": "1 int32"},
    "NodeUnpublishVolumeRequest": {"volume_id": "1 string", "target_path": "2 string"},
    "NodeUnpublishVolumeResponse": {},
    "NodeGetVolumeStatsRequest": {"volume_id": "1 string", "volume_path": "2 string"},
    "NodeGetVolumeStatsResponse": {"usage": "1 *VolumeUsage", "volume_condition": "2 VolumeCondition"},
    "VolumeUsage": {"available": "1 int64", "total": "2 int64", "used": "3 int64", "unit": "4 int32"},
    "VolumeCondition": {"abnormal": "1 bool", "message": "2 string"},
}
"""package csi.v1"""

REGISTRATION: Table = {
    "InfoRequest": {},
    "PluginInfo": {
        "type": "1 string",
        "name": "2 string",
        "endpoint": "3 string",
        "supported_versions": "4 *string",
    },
    "RegistrationStatus": {"plugin_registered": "1 bool", "error": "2 string"},
    "RegistrationStatusResponse": {},
}
"""package pluginregistration"""

_OF_CSI = {
    "csi.v1.Identity": ("GetPluginInfo", "GetPluginCapabilities", "Probe"),
    "csi.v1.Node": (
        "NodeGetInfo",
        "NodeGetCapabilities",
        "NodePublishVolume",
        "NodeUnpublishVolume",
        "NodeGetVolumeStats",
    ),
}
SERVICES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    **{service: {name: (f"{name}Request", f"{name}Response") for name in names} for service, names in _OF_CSI.items()},
    "pluginregistration.Registration": {
        "GetInfo": ("InfoRequest", "PluginInfo"),
        "NotifyRegistrationStatus": ("RegistrationStatus", "RegistrationStatusResponse"),
    },
}
"""service -> method -> (request, response)"""

GET_VOLUME_STATS, VOLUME_CONDITION = 2, 4
"""NodeServiceCapability.RPC.Type"""
SINGLE_NODE_READER_ONLY, MULTI_NODE_READER_ONLY = 2, 3
"""VolumeCapability.AccessMode.Mode"""
BYTES, INODES = 1, 2
"""VolumeUsage.Unit"""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
}


def _add_map(message: Any, field: Any, package: str) -> None:
    """A map is a repeated message of a key and a value, which carries an option."""
    entry = message.nested_type.add(name="".join(word.title() for word in field.name.split("_")) + "Entry")
    entry.options.map_entry = True
    for number, name in enumerate(("key", "value"), 1):
        entry.field.add(name=name, number=number, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
    field.label, field.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
    field.type_name = f".{package}.{message.name}.{entry.name}"


def _describe(package: str, table: Table) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name=f"kvfuse/{package}.proto", package=package, syntax="proto3")
    for name, fields in table.items():
        message = file.message_type.add(name=name)
        for field_name, said in fields.items():
            number, kind = said.split()
            field = message.field.add(name=field_name, number=int(number))
            field.label = _Field.LABEL_REPEATED if kind.startswith("*") else _Field.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            if kind == "map":
                _add_map(message, field, package)
            elif kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".{package}.{kind}"
    return file


def _classes(pool: descriptor_pool.DescriptorPool, package: str, table: Table) -> Iterator[tuple[str, Any]]:
    pool.Add(_describe(package, table))
    for name in table:
        yield name, message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))


_pool = descriptor_pool.DescriptorPool()
messages: Any = SimpleNamespace(
    **dict(_classes(_pool, "csi.v1", CSI)), **dict(_classes(_pool, "pluginregistration", REGISTRATION))
)
"""the classes of both tables, by name"""
