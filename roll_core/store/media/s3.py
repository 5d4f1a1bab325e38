"""Medium of objects in an S3 bucket (s3://), through s3fs. Endpoint, credentials and region are the ordinary AWS settings.

`S3Medium._request` sends every request and retries transient failures with backoff. Retries of s3fs and botocore are off, so
that `store.retry_seconds` is the total. One retry below remains: aiohttp sends a PUT again when a kept-alive connection
turns out to be closed. Conditional creates and multipart uploads therefore store their id as metadata, so that a repeat
recognises itself.
"""

import itertools
import logging
import os
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from functools import partial
from typing import Any

import aiohttp
import s3fs
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError, SSLError
from botocore.exceptions import ConnectionError as NotConnected
from botocore.parsers import ResponseParserError
from fsspec.asyn import sync

from roll_core.errors import StoreRefused, StoreUnavailable, UserError
from roll_core.store.media.medium import PART_SIZE, PARTS_IN_FLIGHT, AlreadyExists, ListedObject, map_in_order, part_size

SHORTEST_ATTEMPT_SECONDS, ATTEMPT_SECONDS = 2.0, 60.0
"""Bounds on the timeout of one attempt, which is a fifth of `store.retry_seconds`. 60 s carry a 16 MiB part at 280 kB/s."""
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.1, 10.0
"""Exponential backoff between attempts: its first and its longest delay."""
CONNECTIONS = 32
"""Size of the connection pool: several files with several parts each, and a few small requests beside them."""
TRANSIENT_CODES = {"RequestTimeout", "SlowDown", "Throttling", "OperationAborted", "ConditionalRequestConflict", "BadDigest"}
"""S3 error codes below status 500 that a retry can cure: they blame the moment or the transmission, not the request."""
EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "400"}
"""S3 error codes after which credentials are loaded again before the retry, because they may have been renewed. "400" stands
for the reply to a HEAD, which carries a status and no code."""
REFUSED_STATUSES, NO_BUCKET = {401, 403}, "NoSuchBucket"
"""HTTP statuses and S3 error code of a refusal. It may pass if the store has granted the same right before: while keys are
rotated, a clock is set, or a bucket moves to another server."""
NO_RESPONSE = (
    *(NotConnected, HTTPClientError, ResponseParserError, IncompleteReadError),
    *(aiohttp.ClientError, ConnectionError, TimeoutError),
)
"""Exceptions for a request that got no response, or half of one."""
LARGEST_COPY = 5 * 2**30
"""Bytes of the largest object that S3 copies in one request."""
WRITER = "roll-writer"
"""Metadata key of an object: the id of the write that created it."""

Request = Callable[[Any], Awaitable[Any]]
"""Call on an s3fs filesystem that makes one S3 request."""

log = logging.getLogger(__name__)


class Right(StrEnum):
    """Right that a request needs. Policies of buckets grant each by itself."""

    READ = "read"
    WRITE = "write"
    DELETE = "delete"


_GRANTED: set[tuple[str, Right]] = set()
"""Addresses of stores, each with a right that it has granted to this process."""


class S3Medium:
    """Medium of objects in an S3 bucket, under the prefix that its address names.

    Example: S3Medium("s3://my-bucket/roll", retry_seconds=300).create("runs/a/config.json", b"{}")
    """

    def __init__(self, uri: str, retry_seconds: float):
        self._uri, self._retry_seconds = uri, retry_seconds
        self._bucket, _, self._prefix = uri.removeprefix("s3://").partition("/")
        if not self._bucket:
            raise UserError(f"store.uri: {uri} names no bucket: write s3://BUCKET/FOLDER")
        self._filesystems: dict[int, Any] = {}

    def write(self, name: str, parts: Iterator[bytes], size: int) -> None:
        if size > PART_SIZE:
            self._write_multipart(name, parts, size)
            return
        body = b"".join(parts)
        self._request(lambda fs: fs._call_s3("put_object", Body=body, **self._target(name)), right=Right.WRITE)

    def create(self, name: str, data: bytes) -> None:
        """Create the object by a conditional PUT. If the response is lost, the retry finds the name taken by this write."""
        writer, target = uuid.uuid4().hex, self._target(name)
        try:
            self._request(
                lambda fs: fs._call_s3("put_object", Body=data, IfNoneMatch="*", Metadata={WRITER: writer}, **target),
                right=Right.WRITE,
            )
        except AlreadyExists:
            if not self._is_written_by(name, writer):
                raise AlreadyExists(name) from None

    def read(self, name: str) -> bytes:
        return self._request(lambda fs: fs._cat_file(self._path(name), max_concurrency=1))

    def exists(self, name: str) -> bool:
        try:
            self._head(name)
        except FileNotFoundError:
            return False
        return True

    def touch(self, name: str, size: int) -> None:
        """Restart the age by copying the object onto itself within the server. Above 5 GiB, S3 copies only in parts."""
        if size > LARGEST_COPY:
            self._request(lambda fs: fs._copy_managed(self._path(name), self._path(name), size=size), self._retry_seconds)
            return
        target, new = self._target(name), {"Metadata": {WRITER: uuid.uuid4().hex}, "MetadataDirective": "REPLACE"}
        self._request(
            lambda fs: fs._call_s3("copy_object", CopySource=target, **target, **new), attempt_seconds=self._retry_seconds
        )

    def read_parts(self, name: str, expected_size: int) -> Iterator[bytes]:
        if expected_size <= PART_SIZE:
            yield self.read(name)
            return
        size, step = self._head(name)["ContentLength"], part_size(expected_size)
        yield from map_in_order(partial(self._read_range, name, step, size), range(0, size, step), PARTS_IN_FLIGHT)

    def list(self, folder: str) -> list[str]:
        path = self._path(folder)
        try:
            found = self._request(lambda fs: fs._ls(path, refresh=True))
        except FileNotFoundError:
            return []
        names = (entry.removeprefix(f"{path}/").rstrip("/") for entry in found if entry != path)
        return [name for name in names if name]  # some servers list an emptied folder as its own content

    def list_below(self, folder: str) -> Iterator[ListedObject]:
        page: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._key(f"{folder}/")}
        root = len(self._key(""))
        while True:
            response = self._request(partial(_call_request, "list_objects_v2", page))
            now = _response_time(response)
            for entry in response.get("Contents", []):
                age_seconds = (now - entry["LastModified"]).total_seconds()
                written_at = entry["LastModified"].timestamp()
                yield ListedObject(entry["Key"][root:], entry["Size"], max(0.0, age_seconds), written_at)
            if not response.get("IsTruncated"):
                return
            page["ContinuationToken"] = response["NextContinuationToken"]

    def delete(self, name: str) -> None:
        self._request(lambda fs: fs._call_s3("delete_object", **self._target(name)), right=Right.DELETE)

    def delete_unmodified(self, listed: ListedObject) -> bool:
        try:
            last_modified = self._head(listed.name)["LastModified"].timestamp()
        except FileNotFoundError:
            return False
        if int(last_modified) != int(listed.written_at):  # a HEAD has whole seconds, a listing may have fractions
            return False
        self.delete(listed.name)
        return True

    def remove_unfinished(self, older_than_seconds: float) -> int:
        uploads = self._request(lambda fs: fs._list_multipart_uploads(self._bucket), right=Right.DELETE)
        now, prefix = datetime.now(UTC), self._key("")
        stale = [
            upload
            for upload in uploads
            if upload["Key"].startswith(prefix) and (now - upload["Initiated"]).total_seconds() > older_than_seconds
        ]
        for upload in stale:
            self._request(partial(_abort_request, self._bucket, upload["Key"], upload["UploadId"]), right=Right.DELETE)
        return len(stale)

    def _write_multipart(self, name: str, parts: Iterator[bytes], size: int) -> None:
        """Upload parts in parallel. The object appears when all parts are there, and never if one fails."""
        assert size > PART_SIZE
        writer, target = uuid.uuid4().hex, self._target(name)
        begin = partial(_call_request, "create_multipart_upload", target | {"Metadata": {WRITER: writer}})
        begun = self._request(begin, right=Right.WRITE)
        upload = target | {"UploadId": begun["UploadId"]}

        def send(numbered: tuple[int, bytes]) -> dict[str, Any]:
            number, part = numbered
            arguments = upload | {"PartNumber": number, "Body": part}
            sent = self._request(partial(_call_request, "upload_part", arguments), right=Right.WRITE)
            return {"PartNumber": number, "ETag": sent["ETag"]}

        try:
            sent = list(map_in_order(send, enumerate(parts, 1), PARTS_IN_FLIGHT))
            self._complete(name, upload, sent, writer)
        except BaseException:
            self._abort_upload(name, begun["UploadId"])
            raise

    def _complete(self, name: str, upload: dict[str, Any], sent: Sequence[dict[str, Any]], writer: str) -> None:
        """Join the uploaded parts, which may take minutes.

        If the response is lost, the retry finds that the upload is gone and the object exists.
        """
        parts = {"Parts": sent}
        try:
            self._request(
                lambda fs: fs._call_s3("complete_multipart_upload", MultipartUpload=parts, **upload),
                right=Right.WRITE,
                attempt_seconds=self._retry_seconds,
            )
        except FileNotFoundError:
            if not self._is_written_by(name, writer):
                raise StoreRefused(
                    f"store.uri: {self._uri} forgot the parts of {name} before they were joined: "
                    "keep unfinished uploads for a day in the bucket's lifecycle rules"
                ) from None

    def _abort_upload(self, name: str, upload_id: str) -> None:
        """Delete the uploaded parts, in one attempt; if it fails, `remove_unfinished` deletes them later."""
        try:
            self._attempt(partial(_abort_request, self._bucket, self._key(name), upload_id), ATTEMPT_SECONDS / 10)
        except (OSError, BotoCoreError, aiohttp.ClientError) as error:
            log.info("an unfinished upload of %s stays in %s: %s", name, self._uri, error)

    def _read_range(self, name: str, step: int, size: int, start: int) -> bytes:
        return self._request(lambda fs: fs._cat_file(self._path(name), start=start, end=min(start + step, size)))

    def _is_written_by(self, name: str, writer: str) -> bool:
        """True if the object exists and carries this write's id."""
        try:
            found = self._head(name)
        except FileNotFoundError:
            return False
        return found["Metadata"].get(WRITER) == writer

    def _head(self, name: str) -> Any:
        return self._request(lambda fs: fs._call_s3("head_object", **self._target(name)))

    def _request(self, request: Request, attempt_seconds: float | None = None, right: Right = Right.READ) -> Any:
        """Send a request and return its response, retrying transient failures for at most `store.retry_seconds`.

        A refusal is transient if the store has granted the same right before. `attempt_seconds` is the timeout of one
        attempt; None derives it from `store.retry_seconds`.
        """
        deadline = time.monotonic() + self._retry_seconds
        longest = attempt_seconds or min(ATTEMPT_SECONDS, max(SHORTEST_ATTEMPT_SECONDS, self._retry_seconds / 5))
        refusal: Exception | None = None
        for attempt in itertools.count():
            try:
                response = self._attempt(request, min(longest, deadline - time.monotonic()))
                _GRANTED.add((self._uri, right))
                return response
            except (OSError, ValueError, BotoCoreError, aiohttp.ClientError) as error:
                is_refusal = _is_refusal(error) and (self._uri, right) in _GRANTED
                if not is_refusal and not _is_transient(error):
                    raise self._permanent_error(error) from None
                refusal = error if is_refusal else refusal
                delay = random.uniform(0.5, 1.0) * min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2**attempt)
                if time.monotonic() + delay >= deadline:
                    raise (self._unavailable_error(error) if refusal is None else self._permanent_error(refusal)) from None
                if attempt == 0:
                    log.warning("%s does not answer (%s): trying again", self._uri, _reason(error))
                if is_refusal or _code(error) in EXPIRED_CODES:
                    self._filesystem().connect(refresh=True)
            time.sleep(delay)
        raise AssertionError

    def _attempt(self, request: Request, seconds: float) -> Any:
        """Send a request once, within `seconds` in total: aiohttp's read timeout does not run while a body is being sent."""
        fs = self._filesystem()
        return sync(fs.loop, request, fs, timeout=seconds)

    def _filesystem(self) -> Any:
        """Return the s3fs filesystem of this process: s3fs runs a thread, which a fork does not copy.

        A filesystem inherited from the parent process is kept but not used: closing it would wait for the missing thread.
        """
        process = os.getpid()
        if process not in self._filesystems:
            fs = s3fs.S3FileSystem(
                use_listings_cache=False,
                config_kwargs={
                    "retries": {"total_max_attempts": 1, "mode": "standard"},
                    "read_timeout": ATTEMPT_SECONDS,
                    "max_pool_connections": CONNECTIONS,
                    # Readers verify a SHA-256: damage must be reported as damage, not as a failed request.
                    "response_checksum_validation": "when_required",
                },
            )
            fs.retries = 1
            self._filesystems[process] = fs
        return self._filesystems[process]

    def _unavailable_error(self, error: Exception) -> StoreUnavailable:
        """Return the exception to raise when `store.retry_seconds` are over."""
        return StoreUnavailable(
            f"store.uri: {self._uri} did not answer for {self._retry_seconds:g} s (store.retry_seconds; last: "
            f"{_reason(error)}): what is committed is safe, resume the run when the store is back"
        )

    def _permanent_error(self, error: Exception) -> Exception:
        """Return the exception to raise for a failure that no retry can cure."""
        match _status(error), _code(error):
            case _, code if code == NO_BUCKET:
                return StoreRefused(
                    f"store.uri: {self._uri} names a bucket that does not exist: create '{self._bucket}' or point store.uri "
                    "elsewhere"
                )
            case 412, _:
                return AlreadyExists()
            case _ if isinstance(error, FileNotFoundError):
                return error
            case _:
                return StoreRefused(
                    f"store.uri: {self._uri} refuses the request ({_reason(error)}): check the credentials, their rights "
                    "and the endpoint (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, or the profile they come "
                    "from)"
                )

    def _target(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._key(name)}

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _path(self, name: str) -> str:
        return f"{self._bucket}/{self._key(name)}"


async def _call_request(operation: str, arguments: dict[str, Any], fs: Any) -> Any:
    return await fs._call_s3(operation, **arguments)


def _response_time(response: dict[str, Any]) -> datetime:
    """Time of a response by the server's clock, in whole seconds; by this machine's clock if it carries no date."""
    date = response["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(date) if date else datetime.now(UTC)


async def _abort_request(bucket: str, key: str, upload_id: str, fs: Any) -> None:
    await fs._abort_mpu(bucket, key, upload_id)


def _is_transient(error: Exception) -> bool:
    """True if a retry may cure the failure: no response, half a response, or an overloaded or broken server."""
    status, code = _status(error), _code(error)
    if status is not None:
        return (status >= 500 and status != 501) or status == 429 or code in TRANSIENT_CODES | EXPIRED_CODES
    return isinstance(error, NO_RESPONSE) and not isinstance(error, SSLError)


def _is_refusal(error: Exception) -> bool:
    """True if the server refused the credentials, their rights or the bucket."""
    return _status(error) in REFUSED_STATUSES or _code(error) == NO_BUCKET


def _response(error: Exception) -> dict[str, Any]:
    """Server response that an error carries, else {}. s3fs raises an OSError and keeps botocore's error as its cause."""
    cause = error if isinstance(error, ClientError) else error.__cause__
    return dict(cause.response) if isinstance(cause, ClientError) else {}


def _status(error: Exception) -> int | None:
    return _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")


def _code(error: Exception) -> str | None:
    return _response(error).get("Error", {}).get("Code")


def _reason(error: Exception) -> str:
    text = str(error.strerror) if isinstance(error, OSError) and error.strerror else str(error)
    return text or f"{type(error).__name__} after waiting"
