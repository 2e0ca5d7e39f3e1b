"""Fetches one object of S3 into a file with another library, as its own documentation has it, and says what it took.

python s3_peer.py s3fs|boto3 ENDPOINT BUCKET KEY TARGET
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

CREDENTIALS = {"aws_access_key_id": "any", "aws_secret_access_key": "any", "region_name": "us-east-1"}


def main() -> None:
    """Fetch, and print JSON."""
    library, endpoint, bucket, key, target = sys.argv[1:]
    fetch = fetch_with_s3fs if library == "s3fs" else fetch_with_boto3
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    seconds = fetch(endpoint, bucket, key, target) - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"bytes": Path(target).stat().st_size, "seconds": seconds, "cpu": cpu}))


def fetch_with_s3fs(endpoint: str, bucket: str, key: str, target: str) -> float:
    """fsspec's file system, told to copy the object here; when it had."""
    import s3fs

    files = s3fs.S3FileSystem(
        key="any", secret="any", endpoint_url=endpoint, client_kwargs={"region_name": "us-east-1"}
    )
    files.get_file(f"{bucket}/{key}", target)
    return time.monotonic()


def fetch_with_boto3(endpoint: str, bucket: str, key: str, target: str) -> float:
    """One request whose body is written as it comes: what people write first; when it had."""
    import boto3

    client = boto3.client("s3", endpoint_url=endpoint, **CREDENTIALS)
    body = client.get_object(Bucket=bucket, Key=key)["Body"]
    with Path(target).open("wb") as file:
        file.writelines(body.iter_chunks(1024 * 1024))
    return time.monotonic()


if __name__ == "__main__":
    main()
