"""Laws of a whole run in an object store: what it publishes is what it publishes on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from apache_beam.io.filesystems import FileSystems
from moto.server import ThreadedMotoServer

from batchgen_beam.pipelines.main import OK, main
from batchgen_beam.pipelines.options import parse_options
from batchgen_beam.storage.files import read_bytes, write_atomically
from batchgen_beam.text.fake_folder import write_fake_folder
from tests.support.jobs import published, questions, run_flags, timeless, write_rows
from tests.support.object_store import bucket
from tests.support.stored import parquet_bytes, stored_rows

pytestmark = pytest.mark.timeout(240)

ROWS = questions(10)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake model."""
    return write_fake_folder(tmp_path_factory.mktemp("model") / "fake")


@pytest.fixture(scope="module")
def on_disk(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a run on the local disk publishes of the same rows."""
    folder = tmp_path_factory.mktemp("disk")
    write_rows(folder / "a.parquet", ROWS)
    assert main(run_flags(folder / "a.parquet", folder / "out", model)) == OK
    return placeless(published(folder / "out"))


def placeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without times and without the place of their input."""
    return [{name: value for name, value in row.items() if name != "shard"} for row in timeless(rows)]


def test_a_run_in_an_object_store(model: Path, on_disk: list[dict[str, Any]]) -> None:
    """Input, journal and output may all be there; run again, the same answers stand."""
    with bucket("store") as store:
        write_atomically(f"{store.uri}/in/a.parquet", parquet_bytes(ROWS))
        flags = run_flags(f"{store.uri}/in/*.parquet", f"{store.uri}/out", model)
        for _ in range(2):
            assert main(flags) == OK
            assert placeless(stored_rows(f"{store.uri}/out")) == on_disk
            assert "out/_SUCCESS" in store.names()
        assert not [name for name in store.names() if name.endswith(".tmp")], "no temporary names: a rename is a copy"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The flags that lead to an S3 service on this machine with a bucket `store`; nothing else is ever asked."""
    for name in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    access = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    try:
        boto3.client("s3", endpoint_url=endpoint, **access).create_bucket(Bucket="store")
        yield [f"--s3_endpoint_url={endpoint}", "--s3_access_key_id=a", "--s3_secret_access_key=b",
               "--s3_region_name=us-east-1"]
    finally:
        server.stop()


def test_a_run_in_s3(model: Path, on_disk: list[dict[str, Any]], s3: list[str]) -> None:
    """Beam's own flags say where the service is, and hold for what is checked before Beam starts, too."""
    FileSystems.set_options(parse_options(s3))
    write_atomically("s3://store/in/a.parquet", parquet_bytes(ROWS))
    FileSystems.set_options(None)
    flags = run_flags("s3://store/in/*.parquet", "s3://store/out", model, "--progress-interval=600", "--lanes=1", *s3)
    assert main(flags) == OK
    assert placeless(stored_rows("s3://store/out")) == on_disk
    assert read_bytes("s3://store/out/_SUCCESS").strip()
