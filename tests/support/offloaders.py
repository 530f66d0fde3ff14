"""The offloaders of Pulsar, and stores for them: a folder, and an S3 server in this process."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from moto.server import ThreadedMotoServer

from keyshard.testing.devbroker.cache import Announcer, cache_dir, file_lock
from keyshard.testing.devbroker.distribution import Artifact, fetch_artifact
from keyshard.testing.devbroker.process import LOOPBACK

VERSION = "4.0.8"
"""The newest release whose offloaders are in the Maven repository. A broker of 5.0 can write with
them, but cannot read object stores: they need classes that it no longer has."""
_SHA256 = "a73d8c48f578edbc572147351fbca742740b3fe4329f892ce80f3de717adf6c7"
_LOCK_S = 600.0
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


@contextmanager
def s3_server() -> Iterator[str]:
    """Run a server of the S3 protocol with a bucket; yield its URL."""
    server = ThreadedMotoServer(LOOPBACK, port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    try:
        httpx.put(f"{url}/{BUCKET}").raise_for_status()
        yield url
    finally:
        server.stop()


def s3_policies(url: str) -> dict[str, Any]:
    """Return the policies of a namespace that offloads to the S3 server, in blocks of 5 MiB."""
    return {
        "managedLedgerOffloadDriver": "S3",
        "managedLedgerOffloadBucket": BUCKET,
        "managedLedgerOffloadServiceEndpoint": url,
        "managedLedgerOffloadRegion": "us-east-1",
        "managedLedgerOffloadMaxBlockSizeInBytes": 5 * 1024 * 1024,
        "managedLedgerOffloadReadBufferSizeInBytes": 1024 * 1024,
    }


def folder_policies(folder: Path, properties: Mapping[str, str]) -> dict[str, Any]:
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
