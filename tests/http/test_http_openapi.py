"""openapi.json: schemathesis makes requests of it, and what is answered is what it says."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from http_lab import client_of, make_users, web_server
from places import ROOT

LABS = Path(__file__).parents[1] / "labs"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,ignored_auth,"
    "response_headers_conformance"
)
SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")


def test_each_route_is_described(tmp_path: Path) -> None:
    with web_server(tmp_path, at="socket") as server, client_of(server.address) as client:
        found = client.ask("GET", "/openapi.json").json
    assert found["openapi"].startswith("3.1")
    operations = [(path, method, one) for path, methods in found["paths"].items() for method, one in methods.items()]
    assert len(operations) > 30
    assert len({one["operationId"] for _, _, one in operations}) == len(operations)
    assert all(one["summary"] and one["responses"].keys() > {"default"} for _, _, one in operations)
    assert found["paths"].keys() >= {"/v1/files/{path}", "/v1/batch/longest_prefix/{path}", "/healthz", "/openapi.json"}


@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="schemathesis is not installed")
def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    """No answer is a failure of the server, nor of another shape than said; no user is another."""
    seed = int(os.environ.get("KVFUSE_TEST_SEED", random.randrange(1 << 32)))
    file, headers = make_users(tmp_path, tester=(0, 0))
    with web_server(tmp_path, f"http.users={file}") as server:
        with client_of(server.address, headers["tester"]) as client:
            client.ask("PUT", "/v1/folders/folder")
            client.ask("PUT", "/v1/files/folder/file", b"content")
            client.ask("PUT", "/v1/namespaces/blocks", b'{"kind": "blocks", "capacity": 33554432}')
            client.ask("PUT", "/v1/blocks/blocks/key", b"block")
        command = [str(SCHEMATHESIS), "run", f"http://localhost:{server.address}/openapi.json"]
        command += ["--checks", CHECKS, "--max-examples", "40", "--seed", str(seed), "--request-timeout", "5"]
        command += ["--exclude-path", "/v1/events/{path}", "--phases", "examples,coverage,fuzzing", "--no-color"]
        command += ["--header", f"Authorization: {headers['tester']['Authorization']}", "--workers", "1"]
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "http_hooks", "PYTHONPATH": f"{LABS}:{ROOT}"}
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False, env=environment
        )
        assert server.process.poll() is None
        assert "Traceback" not in server.log.read_text()
    print("seed", seed)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
