"""Calls of the cluster's API: objects as dictionaries, and commands in containers."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import kr8s
import kr8s.asyncio

MANAGER = "kvfuse-operator"
"""who the cluster says has set a field"""
KINDS = {
    "ConfigMap": ("v1", "configmaps"),
    "DaemonSet": ("apps/v1", "daemonsets"),
    "KvfuseNamespace": ("kvfuse.io/v1alpha1", "kvfusenamespaces"),
    "KvfuseVolume": ("kvfuse.io/v1alpha1", "kvfusevolumes"),
    "Node": ("v1", "nodes"),
    "PersistentVolume": ("v1", "persistentvolumes"),
    "PersistentVolumeClaim": ("v1", "persistentvolumeclaims"),
    "Pod": ("v1", "pods"),
    "Secret": ("v1", "secrets"),
    "StorageClass": ("storage.k8s.io/v1", "storageclasses"),
}
"""kind -> version and name of its objects in URLs"""
EXEC_SECONDS = 60.0
_PROTOCOL = "v4.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _STATUS = range(4)

Object = dict[str, Any]


class CommandFailed(Exception):
    """A command in a container failed: the text is what it said."""


@dataclass(frozen=True)
class Place:
    """A container of a pod."""

    namespace: str
    pod: str
    container: str
    node: str = ""


class ClusterApi:
    """``namespace``: the operator's own, where all is that it makes."""

    def __init__(self, api: Any, namespace: str) -> None:
        self._api = api
        self.namespace = namespace

    @classmethod
    async def connect(cls, namespace: str) -> Self:
        """By KUBECONFIG, or the service account of this pod."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of versions that kr8s is not tested with
            return cls(await kr8s.asyncio.api(), namespace)

    async def _call(self, method: str, kind: str, name: str, namespace: str | None, **words: Any) -> Any:
        version, plural = KINDS[kind]
        url = f"{plural}/{name}" if name else plural
        async with self._api.call_api(method, version=version, url=url, namespace=namespace, **words) as answer:
            return answer.json()

    async def get(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """An object; None: it is absent. kr8s.ServerError."""
        try:
            return cast(Object, await self._call("GET", kind, name, namespace))
        except kr8s.ServerError as error:
            if is_absent(error):
                return None
            raise

    async def list(self, kind: str, namespace: str | None = None, **labels: str) -> list[Object]:
        """Objects with these labels; in a label's name "__" is "/", "_" is "-". kr8s.ServerError."""
        selector = ",".join(f"{_label(name)}={value}" for name, value in labels.items())
        found = await self._call("GET", kind, "", namespace, params={"labelSelector": selector} if selector else {})
        return [{"kind": kind, **row} for row in found["items"]]

    async def apply(self, body: Object) -> Object:
        """Make an object, or set the fields that it has here; others keep theirs. kr8s.ServerError."""
        meta = body["metadata"]
        return cast(
            Object,
            await self._call(
                "PATCH",
                body["kind"],
                meta["name"],
                meta.get("namespace"),
                params={"fieldManager": MANAGER, "force": "true"},
                headers={"Content-Type": "application/apply-patch+yaml"},
                content=json.dumps(body),
            ),
        )

    async def patch(self, kind: str, name: str, body: Object, namespace: str | None = None, part: str = "") -> Object:
        """Change fields of an object, or of its ``part``, as "status". kr8s.ServerError."""
        headers = {"Content-Type": "application/merge-patch+json"}
        if kind == "Pod":
            headers = {"Content-Type": "application/strategic-merge-patch+json"}
        path = f"{name}/{part}" if part else name
        return cast(Object, await self._call("PATCH", kind, path, namespace, headers=headers, content=json.dumps(body)))

    async def delete(self, kind: str, name: str, namespace: str | None = None) -> None:
        """Delete an object, which may be absent. kr8s.ServerError."""
        try:
            await self._call("DELETE", kind, name, namespace)
        except kr8s.ServerError as error:
            if not is_absent(error):
                raise

    async def execute(
        self, place: Place, command: Sequence[str], stdin: bytes = b"", seconds: float = EXEC_SECONDS
    ) -> str:
        """Standard output of a command in a container. CommandFailed; also where it takes longer than ``seconds``.

        ``stdin`` is sent, but never ends: the command has to know its length. Nothing of it is in logs of the cluster.
        """
        params = {"command": list(command), "container": place.container, "stdout": "true", "stderr": "true"}
        params["stdin"] = "true" if stdin else "false"
        try:
            async with (
                asyncio.timeout(seconds),
                self._api.open_websocket(
                    url=f"pods/{place.pod}/exec", namespace=place.namespace, subprotocols=(_PROTOCOL,), params=params
                ) as stream,
            ):
                if stdin:
                    await stream.send_bytes(bytes([_STDIN]) + stdin)
                answer = await _read_answer(stream)
        except TimeoutError:
            raise CommandFailed(f"{place.pod}: {command[0]} takes longer than {seconds:g} s") from None
        except Exception as error:  # of the connection: the pod has ended, the node does not answer
            raise CommandFailed(f"{place.pod}: {_reason(error)}") from error
        return answer.output()


@dataclass
class _Answer:
    said: bytes = b""
    complaint: bytes = b""
    failure: str | None = None
    """the cluster's word for it; None: it succeeded"""

    def output(self) -> str:
        """What it said. CommandFailed."""
        if self.failure is None:
            return self.said.decode(errors="replace")
        text = (self.complaint or self.said).decode(errors="replace").strip()
        raise CommandFailed(text.removeprefix("Error: ") or self.failure)


async def _read_answer(stream: Any) -> _Answer:
    answer = _Answer()
    while True:
        message = await stream.receive_bytes()
        channel, content = message[0], message[1:]
        if channel == _STDOUT:
            answer.said += content
        elif channel == _STDERR:
            answer.complaint += content
        elif channel == _STATUS:
            status = json.loads(content)
            if status["status"] != "Success":
                causes = status.get("details", {}).get("causes", [])
                codes = [row["message"] for row in causes if row.get("reason") == "ExitCode"]
                answer.failure = f"exit status {codes[0]}" if codes else str(status.get("message", "it failed"))
            return answer


def _reason(error: BaseException) -> str:
    """Of a group the first error: the library has tasks of its own."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__} {error}".strip()


def is_absent(error: kr8s.ServerError) -> bool:
    """The API says that the object is not there."""
    return error.response is not None and error.response.status_code == 404


def _label(name: str) -> str:
    return name.replace("__", "/").replace("_", "-")
