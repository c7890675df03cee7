"""kvfuse-operator: the operator as a program."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import click
import kopf
import trustme

from kvfuse import __version__
from kvfuse_kubernetes.operator import pod_webhook
from kvfuse_kubernetes.operator.claim_handlers import ClaimHandlers
from kvfuse_kubernetes.operator.cluster_api import ClusterApi
from kvfuse_kubernetes.operator.namespace_handlers import NamespaceHandlers
from kvfuse_kubernetes.operator.volume_handlers import VolumeHandlers
from kvfuse_kubernetes.operator.volume_objects import Templates

FINALIZER = "kvfuse.io/operator"
WEBHOOK = "kvfuse.io"
"""name of its MutatingWebhookConfiguration"""


def make_registry(
    api: ClusterApi, templates: Templates, look_seconds: float, lost_seconds: float
) -> kopf.OperatorRegistry:
    """All handlers."""
    registry = kopf.OperatorRegistry()
    kopf.on.startup(registry=registry)(_configure)
    kopf.on.login(registry=registry)(_log_in)
    VolumeHandlers(api, templates, look_seconds, lost_seconds).register(registry)
    NamespaceHandlers(api, look_seconds).register(registry)
    ClaimHandlers(api).register(registry)
    return registry


def _log_in(**words: Any) -> kopf.ConnectionInfo | None:
    return kopf.login_with_kubeconfig(**words) or kopf.login_with_service_account(**words)


async def _configure(settings: kopf.OperatorSettings, **_: object) -> None:
    settings.persistence.finalizer = FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix="operator.kvfuse.io")
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix="operator.kvfuse.io", key="last")
    settings.posting.level = logging.WARNING
    settings.networking.request_timeout = 60.0


def _add_webhook(registry: kopf.OperatorRegistry, address: str, folder: str) -> None:
    """Have the API server ask about pods at ``address``, HOST:PORT; the certificate, in ``folder``, is new."""
    host, _, port = address.rpartition(":")
    authority = trustme.CA()
    known = authority.cert_pem.bytes()
    file = os.path.join(folder, "certificate.pem")
    with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as written:
        written.write(authority.issue_cert(host).private_key_and_cert_chain_pem.bytes())

    async def serve(settings: kopf.OperatorSettings, **_: object) -> None:
        settings.admission.server = kopf.WebhookServer(
            addr="0.0.0.0", port=int(port), host=host, certfile=file, pkeyfile=file, cadata=known
        )
        settings.admission.managed = WEBHOOK

    kopf.on.startup(registry=registry)(serve)
    pod_webhook.register(registry)


async def _run(templates: Path, namespace: str, seconds: tuple[float, float], webhook: str | None) -> None:
    api = await ClusterApi.connect(namespace)
    registry = make_registry(api, Templates(templates), *seconds)
    with tempfile.TemporaryDirectory(prefix="kvfuse-operator-") as folder:
        if webhook:
            _add_webhook(registry, webhook, folder)
        await kopf.operator(registry=registry, clusterwide=True, standalone=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kvfuse-operator", message="%(prog)s %(version)s")
@click.option(
    "--templates",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default="/etc/kvfuse/templates",
    show_default=True,
    help="Folder with holder.yaml and daemon.yaml, as the chart makes them.",
)
@click.option(
    "--namespace",
    default=lambda: os.environ.get("POD_NAMESPACE", "default"),
    help="Namespace for what the operator makes.  [default: POD_NAMESPACE]",
)
@click.option(
    "--look-seconds",
    type=click.FloatRange(0.5),
    default=30.0,
    show_default=True,
    help="Seconds between two looks at a volume's use, daemons and nodes.",
)
@click.option(
    "--lost-seconds",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Seconds that a node is silent, as the cluster says it, until volumes do not wait for it any more.",
)
@click.option(
    "--webhook",
    metavar="HOST:PORT",
    help="Answer the API server about pods with the label kvfuse.io/inject there. [nowhere]",
)
def main(templates: Path, namespace: str, look_seconds: float, lost_seconds: float, webhook: str | None) -> None:
    """Make volumes, namespaces and claims of what KvfuseVolume, KvfuseNamespace and PersistentVolumeClaim objects say.

    The cluster is reached by KUBECONFIG, or by the service account of the pod.
    """
    kopf.configure(verbose=False)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(_run(templates, namespace, (look_seconds, lost_seconds), webhook))


if __name__ == "__main__":
    main()
