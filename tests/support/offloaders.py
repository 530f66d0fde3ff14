"""The offloaders of Pulsar, and a broker that offloads to folders and to an S3 server."""

from __future__ import annotations

import hashlib
import os
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import quote

import httpx
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import make_server

from keyshard.core.position.entry import TopicPartition
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.devbroker.cache import Announcer, cache_dir, file_lock
from keyshard.testing.devbroker.distribution import Artifact, fetch_artifact
from keyshard.testing.devbroker.process import LOOPBACK
from tests.helpers import wait_until
from tests.support.deadlines import deadline

VERSION = "4.0.8"
"""The newest release whose offloaders are in the Maven repository. A broker of 5.0 can write with
them, but cannot read object stores: they need classes that it no longer has."""
_SHA256 = "a73d8c48f578edbc572147351fbca742740b3fe4329f892ce80f3de717adf6c7"
_LOCK_S = 600.0
STORES = ("s3", "blocks", "records", "plain")
"""Namespaces of a broker: an object store, and a file system with each way of compression."""
_HADOOP = {
    "blocks": {"io.seqfile.compression.type": "BLOCK", "io.seqfile.compress.blocksize": "100000"},
    "records": {},
    "plain": {"io.seqfile.compression.type": "NONE"},
}
BUCKET = "offloads"
CREDENTIALS = {
    "ACCESS_KEY_ID": "id", "ACCESS_KEY_SECRET": "secret",
    "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip
"""Environment of a broker, and of a reader, that use the S3 server."""


def install_offloaders() -> Path:
    """Return the folder of the offloaders; fetch it once."""
    folder = cache_dir() / "offloaders" / VERSION
    with file_lock(folder.parent / f".lock-{VERSION}", _LOCK_S):
        if folder.exists():
            return folder
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            into, unpacked = Path(temporary, "fetched"), Path(temporary, "offloaders")
            unpacked.mkdir()
            artifact = Artifact(
                "org.apache.pulsar", "pulsar-offloader-distribution", VERSION, "bin", "tar.gz"
            )
            archive = fetch_artifact(artifact, into, Announcer().download)
            assert hashlib.sha256(archive.read_bytes()).hexdigest() == _SHA256
            with tarfile.open(archive) as opened:
                for member in opened:
                    if member.name.endswith(".nar"):
                        content = opened.extractfile(member)
                        assert content is not None
                        (unpacked / Path(member.name).name).write_bytes(content.read())
            unpacked.rename(folder)
    return folder


class _OnlyS3(DomainDispatcherApplication):
    """A server of one service. One of all services takes some bodies for requests to another."""

    def get_backend_for_host(self, host: str | None) -> str:  # noqa: ARG002 - moto's signature
        return "s3"


@contextmanager
def _s3_server() -> Iterator[str]:
    """Run a server of the S3 protocol with a bucket; yield its URL."""
    server = make_server(LOOPBACK, 0, _OnlyS3(create_backend_app), threaded=True)
    thread = threading.Thread(target=server.serve_forever, name="s3-server")
    thread.start()
    url = f"http://{LOOPBACK}:{server.server_port}"
    try:
        httpx.put(f"{url}/{BUCKET}").raise_for_status()
        yield url
    finally:
        S3FileSystem.clear_instance_cache()  # it keeps the URL of this server
        server.shutdown()
        thread.join(deadline(10))
        server.server_close()


def _s3_policies(url: str) -> dict[str, Any]:
    """Return the policies of a namespace that offloads to the S3 server, in blocks of 5 MiB."""
    return {
        "managedLedgerOffloadDriver": "S3",
        "managedLedgerOffloadBucket": BUCKET,
        "managedLedgerOffloadServiceEndpoint": url,
        "managedLedgerOffloadRegion": "us-east-1",
        "managedLedgerOffloadMaxBlockSizeInBytes": 5 * 1024 * 1024,
        "managedLedgerOffloadReadBufferSizeInBytes": 1024 * 1024,
    }


def _folder_policies(folder: Path, properties: Mapping[str, str]) -> dict[str, Any]:
    """Return the policies of a namespace that offloads to a folder.

    Args:
        folder: The folder.
        properties: Configuration of Hadoop.
    """
    folder.mkdir(parents=True, exist_ok=True)
    profile = folder / "profile.xml"
    lines = [
        f"<property><name>{name}</name><value>{value}</value></property>"
        for name, value in {**properties, "hadoop.tmp.dir": str(folder)}.items()
    ]
    profile.write_text(f"<configuration>{''.join(lines)}</configuration>")
    return {
        "managedLedgerOffloadDriver": "filesystem",
        "fileSystemProfilePath": str(profile),
        "fileSystemURI": f"file://{folder}",
    }


class Stores:
    """A broker whose namespaces :data:`STORES` offload.

    Args:
        broker: The broker.
        urls: The store of each namespace.
    """

    def __init__(self, broker: DevBroker, urls: Mapping[str, str]) -> None:
        self.broker = broker
        self.urls = urls
        self.admin = httpx.Client(base_url=f"{broker.admin_url}/admin/v2", timeout=60)

    def offload(self, where: TopicPartition) -> None:
        """Offload all closed ledgers of a topic partition, and wait for it."""
        domain, _, path = where.name.partition("://")
        tenant, namespace, local = path.split("/")
        path = f"/{domain}/{tenant}/{namespace}/{quote(local, safe='')}"
        listed: list[int] = []

        def begins() -> bool:
            stats = self.admin.get(f"{path}/internalStats", follow_redirects=True)
            if not stats.is_success:
                return False  # it is being loaded
            listed[:] = [one["ledgerId"] for one in stats.json()["ledgers"]]
            position = {"ledgerId": listed[-1], "entryId": 0, "partitionIndex": -1}
            answer = self.admin.put(f"{path}/offload", json=position)
            return answer.is_success or answer.status_code == httpx.codes.CONFLICT

        def ended() -> bool:
            answer = self.admin.get(f"{path}/offload")
            found = answer.json() if answer.is_success else {"status": "RUNNING"}
            assert found["status"] != "ERROR", found["lastError"]
            return found["status"] != "RUNNING"

        wait_until(begins, deadline(20))
        wait_until(ended, deadline(60))


@contextmanager
def offloading_broker(folder: Path, *, ledger_entries: int) -> Iterator[Stores]:
    """Run a broker that offloads, and its stores.

    Args:
        folder: A folder for the stores.
        ledger_entries: Most entries of a ledger.
    """
    settings = {
        "narExtractionDirectory": str(folder / "nar"),
        "managedLedgerMaxEntriesPerLedger": str(ledger_entries),
        "managedLedgerMinLedgerRolloverTimeMinutes": "0",
        "transactionCoordinatorEnabled": "true",
        "defaultRetentionTimeInMinutes": "-1",
        "defaultRetentionSizeInMB": "-1",
    }
    offloaders = install_offloaders()
    with (
        _s3_server() as url,
        patch.dict(os.environ, {**CREDENTIALS, "AWS_ENDPOINT_URL": url}),
        DevBroker(VERSION, settings=settings) as broker,
    ):
        urls = {name: str(folder / name) for name in _HADOOP} | {"s3": f"s3://{BUCKET}"}
        found = Stores(broker, urls)
        with closing(found.admin) as admin:
            for name in STORES:
                policies = _s3_policies(url)
                if name != "s3":
                    policies = _folder_policies(folder / name, _HADOOP[name])
                policies["offloadersDirectory"] = str(offloaders)
                policies["managedLedgerOffloadDeletionLagInMillis"] = 0
                path = f"/namespaces/public/{name}"
                admin.put(path).raise_for_status()
                admin.post(f"{path}/offloadPolicies", json=policies).raise_for_status()
            yield found
