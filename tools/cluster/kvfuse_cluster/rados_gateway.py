"""A server with S3 on this machine whose objects are in a Ceph cluster: its RADOS Gateway (Debian: radosgw)."""

from __future__ import annotations

import http.client
import secrets
import shutil
import urllib.request
from contextlib import suppress
from datetime import timedelta

from kvfuse.errors import ClusterError
from kvfuse_cluster.ceph import CephServers, run_program
from kvfuse_cluster.process import START_SECONDS, Server, free_ports
from kvfuse_cluster.seaweed import write_credentials

SIGNED_SECONDS = 60


class RadosGateway(Server):
    """It has one bucket, and a user of its own. Several may run for one cluster."""

    def __init__(self, servers: CephServers, bucket: str) -> None:
        if shutil.which("radosgw") is None:
            raise ClusterError("radosgw not found: apt-get install radosgw")
        self.bucket = bucket
        (self.port,) = free_ports(1)
        self._conf_file = servers.conf_file
        self._user, self._secret = f"kvfuse-{secrets.token_hex(8)}", secrets.token_hex(20)
        name = f"client.rgw.{self._user}"
        servers.add_user(name, mon="allow rw", osd="allow rwx")
        folder = servers.folder / self._user
        folder.mkdir()
        self.credentials_file = write_credentials(folder, self._user, self._secret)
        listen = f"beast endpoint=127.0.0.1:{self.port} tcp_nodelay=1"
        super().__init__(
            folder, "gateway", ["radosgw", "-f", "-c", self._conf_file, "-n", name, "--rgw-frontends", listen]
        )

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def begin(self) -> None:
        """Start it; returns when its bucket is there. ClusterError."""
        self.start(self._answers, 4 * START_SECONDS)
        words = ["user", "create", f"--uid={self._user}", f"--display-name={self._user}"]
        keys = [f"--access-key={self._user}", f"--secret-key={self._secret}"]
        run_program(["radosgw-admin", "-c", str(self._conf_file), *words, *keys])
        self._make_bucket()

    def _answers(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            try:
                connection.request("GET", "/")
                return connection.getresponse().status < 500
            finally:
                connection.close()
        return False

    def _make_bucket(self) -> None:
        import obstore
        from obstore.store import S3Store

        store = S3Store(
            self.bucket,
            endpoint=self.endpoint,
            access_key_id=self._user,
            secret_access_key=self._secret,
            region="us-east-1",
            client_options={"allow_http": True},
        )
        target = obstore.sign(store, "PUT", "", timedelta(seconds=SIGNED_SECONDS))
        with urllib.request.urlopen(urllib.request.Request(target, b"", method="PUT"), timeout=SIGNED_SECONDS):
            pass
