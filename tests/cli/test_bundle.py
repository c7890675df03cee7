"""kvfuse doctor --bundle: what the archive has, and that planted secrets and names of files are not in it."""

from __future__ import annotations

import json
import os
import random
import stat
import string
import tarfile
from pathlib import Path

import pytest
from cli_lab import Place, assert_fails, kvfuse

from kvfuse.cli.redaction import HIDDEN, REMOVED, Redaction, secrets_of

CEPHX = "AQDcXYZnAAAAABAAq3W7k0bY5Tq1Kc2bY7mPpQxZ1A=="[:38] + "=="
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJrdiJ9.c2lnbmF0dXJl"
PASSWORD = "correct-horse/battery"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA7\nplanted\n-----END RSA PRIVATE KEY-----"
PLANTED = {
    "hunter2": "password = hunter2",
    "hunter3": "redis password: 'hunter3', tried again",
    "hunter4": '{"etcd_password": "hunter4", "level": "info"}',
    "hunter5": "http://kv:hunter5@10.0.0.1:2379/v3 does not answer",
    "hunter6": "GET https://s3.example/b?X-Amz-Signature=hunter6&x=1",
    "hunter7": "GET https://s3.example/b?apiKey=hunter7",
    "hunter8": "Authorization: Bearer hunter8hunter8",
    "hunter9": "KVFUSE_TOKEN=hunter9 was set",
    CEPHX: f"key = {CEPHX}",
    CEPHX[:30]: f"cephx: {CEPHX} refused",
    JWT: f"token {JWT}",
    "MIIEpAIBAAKCAQEA7": PEM,
    PASSWORD: f"refused: {PASSWORD} is no user's",
}
"""secret -> a text with it"""
HARMLESS = (
    "the lease was not renewed: no answer in time",
    '"token": "none", "token_size": 163840',
    "records.password_file = /etc/kvfuse/password",
    '"token": 17, "descriptor": 0',
    "10.0.0.1:2379 answers in 3 ms",
)


@pytest.mark.parametrize("secret", PLANTED)
def test_a_secret_goes_and_the_rest_stays(secret: str) -> None:
    redaction = Redaction(known=[PASSWORD], names=True)
    text = redaction.clean(f"before it\n{PLANTED[secret]}\nafter it")
    assert secret not in text
    assert REMOVED in text
    assert text.startswith("before it\n")
    assert text.endswith("\nafter it")


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redaction(names=True).clean(text) == text


def test_secrets_of_any_form_in_many_texts_go(seed: int) -> None:
    rng = random.Random(seed)
    letters = string.ascii_letters + string.digits + "-_.~!$*"
    for _ in range(500):
        secret = "".join(rng.choices(letters, k=rng.randrange(8, 30)))
        key = rng.choice(["password", "db_password", "Secret", "api_key", "auth-token", "PASSPHRASE", "access_key"])
        form = rng.choice(["{0} = {1}", '{0}: "{1}"', '"{0}": "{1}"', "{0}='{1}'", "{0}={1} x", "u://a:{1}@h/p"])
        text = Redaction().clean("line " + form.format(key, secret))
        assert secret not in text, text


def test_names_are_hidden_and_places_are_not() -> None:
    redaction = Redaction(places=[Path("/var/kv")], points=[Path("/mnt/kv")])
    for name in ("/mnt/kv/llama/block 1.kv", "/mnt/kv/x", "/llama/layer/x.kv", "b'x.kv' in directory 3", 'b"it\'s"'):
        text = redaction.clean(f"reading {name} failed")
        assert HIDDEN in text
        assert not any(word in text for word in ("llama", "layer", "x.kv", "it's")), text
    for text in (
        "/mnt/kv is mounted",
        "/mnt/kv/.kvfuse/stats",
        "/var/kv/segments/00000000.seg: full",
        "/dev/nvme0n1 is away",
    ):
        assert redaction.clean(text) == text
    assert Redaction(points=[Path("/mnt/kv")], names=True).clean("/mnt/kv/x b'y'") == "/mnt/kv/x b'y'"


def test_known_secrets_are_what_files_of_secrets_hold(tmp_path: Path) -> None:
    (tmp_path / "keyring").write_text(f"[client.kv]\n\tkey = {CEPHX}\n")
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    found = set(secrets_of(Path.read_text, tmp_path.iterdir()))
    assert {CEPHX, PASSWORD} <= found


def unpack(file: Path) -> dict[str, str]:
    found = {}
    with tarfile.open(file) as archive:
        for member in archive:
            stream = archive.extractfile(member)
            assert stream is not None
            found[member.name.removeprefix("kvfuse-bundle/")] = stream.read().decode()
    return found


def folder_of(parts: dict[str, str], point: Path) -> str:
    """Of this mount: others may be on the machine."""
    (found,) = [
        name.partition("/")[0]
        for name, text in parts.items()
        if name.endswith("status.json") and json.loads(text)["mountpoint"] == str(point)
    ]
    return found


def test_the_archive_of_a_mount(place: Place, tmp_path: Path) -> None:
    place.mount()
    content = os.urandom(3000).hex()
    (place.point / "secret-model.kv").write_text(content)
    made = kvfuse("namespace", "create", place.point / "tenant-a", "--capacity", "8MiB")
    assert made.returncode == 0, made.stderr
    with (place.volume / "log").open("a") as log:
        log.write("\n".join(text for text in PLANTED.values()) + "\n")
        log.write(f"reading block b'block-of-x' failed\n{place.point}/secret-model.kv is lost\n")
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    conf = tmp_path / "mount.conf"
    conf.write_text(
        'volume.name = "v"\nrecords.engine = "etcd"\nrecords.endpoints = ["http://127.0.0.1:1"]\nrecords.user = "kv"\n'
        f'records.password_file = "{tmp_path}/password"\nrecords.deadline = 0.2\n# password = "hunter10"\n'
        f'segments.path = "{tmp_path}/segments"\n'
    )
    file = tmp_path / "report.tar.gz"
    done = kvfuse("doctor", conf, "--bundle", file)
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    parts = unpack(file)
    folder = folder_of(parts, place.point)
    wanted = {"CONTENTS.txt", "versions.txt", "machine.txt", "findings.json", "mounts.txt", "dmesg.txt", "mount.conf"}
    names = ("status.json", "stats.json", "config.json", "version.txt", "daemon.txt", "holder.txt", "log.txt")
    wanted |= {f"{folder}/{name}" for name in names}
    assert wanted <= parts.keys()
    for name in parts:
        assert name in done.stdout
        assert name == "CONTENTS.txt" or f"{name}: " in parts["CONTENTS.txt"]
    everything = "\n".join(parts.values())
    for secret in (*PLANTED, "hunter10", content[:40]):
        assert secret not in everything, secret
    for name in ("secret-model", "tenant-a", "block-of-x"):
        assert name not in everything, name
    assert json.loads(parts[f"{folder}/stats.json"])["uptime"] > 0
    assert json.loads(parts[f"{folder}/config.json"])["volume"]["path"] == str(place.volume)
    assert f"{place.volume} is mounted on {place.point}" in parts[f"{folder}/log.txt"]
    assert "VmRSS" in parts[f"{folder}/daemon.txt"]
    assert any(row["name"] == "records" and row["state"] == "missing" for row in json.loads(parts["findings.json"]))


def test_names_where_they_are_wanted(place: Place, tmp_path: Path) -> None:
    place.mount()
    made = kvfuse("namespace", "create", place.point / "tenant-a", "--capacity", "8MiB")
    assert made.returncode == 0, made.stderr
    done = kvfuse("doctor", "--bundle", tmp_path / "report.tar.gz", "--names")
    assert done.returncode == 0, done.stderr
    parts = unpack(tmp_path / "report.tar.gz")
    assert "/tenant-a" in parts[f"{folder_of(parts, place.point)}/stats.json"]


def test_a_daemon_that_is_gone_is_no_obstacle(place: Place, tmp_path: Path) -> None:
    pid = place.mount("-o", "outlive=false")
    os.kill(pid, 9)
    done = kvfuse("doctor", "--bundle", tmp_path / "report.tar.gz")
    assert done.returncode == 0, done.stderr
    parts = unpack(tmp_path / "report.tar.gz")
    folder = folder_of(parts, place.point)
    assert "dead" in json.loads(parts[f"{folder}/status.json"])["problem"]
    assert f"{folder}/stats.json" not in parts
    assert "is mounted on" in parts[f"{folder}/log.txt"]


def test_an_archive_that_exists_is_kept(tmp_path: Path) -> None:
    (tmp_path / "report.tar.gz").write_text("mine")
    assert_fails(kvfuse("doctor", "--bundle", tmp_path / "report.tar.gz"), 1, "exists: name a new file")
    assert (tmp_path / "report.tar.gz").read_text() == "mine"
    assert kvfuse("doctor", "--names").returncode == 2
