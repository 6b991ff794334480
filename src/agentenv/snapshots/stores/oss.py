"""A store in a bucket of S3 or what speaks its protocol: conditional puts are `If-None-Match: *` and `If-Match`.

Owns settings, deadlines, retries and the translation of the client library's errors. Retries are made here and not by
the library, which does not repeat conditional puts and whose back-off no test can watch. A conditional put that was
repeated may find its own first attempt: it compares the content, as `Store.put` says.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from agentenv.errors import ConfigError, OperationFailed, StoreUnavailable
from agentenv.snapshots.stores.credentials import Credentials
from agentenv.snapshots.stores.interface import (
    OBJECT_BYTES_MAX,
    AccessDenied,
    Entry,
    NoBucket,
    Object,
    ObjectNotFound,
    PreconditionFailed,
    check_folder,
    check_key,
)

# One attempt; then the whole operation with its repeats. A listing of many objects is several requests.
REQUEST_S_MAX: Final = 20.0
OPERATION_S_MAX: Final = 60.0
CONNECT_S_MAX: Final = 5.0
RETRY_S_FIRST: Final = 0.1
RETRY_S_MAX: Final = 5.0
# Requests in flight of one node; what is more waits here instead of being throttled there.
REQUESTS_MAX: Final = 32
SHOWN_CHARS_MAX: Final = 200

if TYPE_CHECKING:
    from obstore.store import S3Credential

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OssSettings:
    """Which bucket, and how it is reached. Raises `ConfigError` naming the key of [snapshot.oss]."""

    bucket: str
    region: str
    # None: the region's own of AWS. Without the bucket's name; a virtual address gets it in front.
    endpoint: str | None = None
    # "path" or "virtual".
    addressing: str = "virtual"
    prefix: str = ""
    allow_http: bool = False
    credentials: Credentials | None = None

    def __post_init__(self) -> None:
        for name in ("bucket", "region"):
            if not getattr(self, name):
                raise ConfigError(f"snapshot.oss.{name} is missing: an S3 repository needs it")
        if self.addressing not in ("path", "virtual"):
            raise ConfigError(f"snapshot.oss.addressing is {self.addressing!r}: use path or virtual")
        if self.endpoint and self.endpoint.startswith("http://") and not self.allow_http:
            raise ConfigError("snapshot.oss.endpoint is not https, and snapshot.oss.allow_http is off")

    @property
    def location(self) -> str:
        """For people."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def worker_entry(self) -> dict[str, Any]:
        """This store in stores.json, for aenv-blockd and aenv-storage: secrets included."""
        keys = self.credentials
        return {
            "kind": "s3",
            "bucket": self.bucket,
            "region": self.region,
            "endpoint": self.endpoint,
            "addressing": self.addressing,
            "prefix": self.prefix,
            "access_key_id": keys.access_key_id if keys else None,
            "secret_access_key": keys.secret_access_key if keys else None,
            "session_token": keys.session_token if keys else None,
            "allow_http": self.allow_http,
        }


@dataclass(frozen=True, slots=True)
class Patience:
    """How long requests and their repeats may take, in seconds."""

    request_s_max: float = REQUEST_S_MAX
    operation_s_max: float = OPERATION_S_MAX
    retry_s_first: float = RETRY_S_FIRST


class OssStore:
    """`Store` in a bucket. One event loop."""

    def __init__(self, settings: OssSettings, patience: Patience | None = None) -> None:
        self._settings = settings
        self._patience = patience or Patience()
        self._client = _client(settings, self._patience)
        self._slots = asyncio.Semaphore(REQUESTS_MAX)

    @property
    def settings(self) -> OssSettings:
        """What it was made with."""
        return self._settings

    async def get(self, key: str) -> Object:
        """See `Store.get`."""
        check_key(key)

        async def attempt() -> Object:
            answer = await obstore.get_async(self._client, key)
            size_bytes = answer.meta["size"]
            if size_bytes > OBJECT_BYTES_MAX:
                raise OperationFailed(f"{self._named(key)} has {size_bytes} bytes: this is no object of the repository")
            content = bytes(await answer.bytes_async())
            return Object(content, answer.meta["e_tag"] or "")

        try:
            return await self._repeated("get", key, attempt)
        except FileNotFoundError:
            raise ObjectNotFound(f"there is no {self._named(key)}") from None

    async def put(self, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        """See `Store.put`."""
        check_key(key)
        mode: Any = "create" if if_absent else "overwrite" if if_match is None else {"e_tag": if_match}

        async def attempt() -> str:
            answer = await obstore.put_async(self._client, key, content, mode=mode, use_multipart=False)
            return answer["e_tag"] or ""

        try:
            return await self._repeated("put", key, attempt)
        except FileNotFoundError as error:
            raise NoBucket(f"{self._settings.location}: there is no such bucket") from error
        except (AlreadyExistsError, PreconditionError) as error:
            return await self._own_put(key, content, error)

    async def list(self, folder: str) -> list[Entry]:
        """See `Store.list`. `modified_s` has whole seconds on most services."""
        check_folder(folder)

        async def attempt() -> list[Entry]:
            found = await obstore.list(self._client, folder).collect_async()
            return sorted((self._entry(dict(meta)) for meta in found), key=lambda entry: entry.key)

        try:
            return await self._repeated("list", folder, attempt)
        except FileNotFoundError as error:
            raise NoBucket(f"{self._settings.location}: there is no such bucket") from error

    async def stat(self, key: str) -> Entry | None:
        """See `Store.stat`."""
        check_key(key)
        try:
            meta = await self._repeated("head", key, lambda: obstore.head_async(self._client, key))
        except FileNotFoundError:
            return None
        return self._entry(dict(meta))

    async def delete(self, key: str) -> None:
        """See `Store.delete`."""
        check_key(key)
        try:
            await self._repeated("delete", key, lambda: obstore.delete_async(self._client, key))
        except FileNotFoundError:
            return

    async def _own_put(self, key: str, content: bytes, refused: Exception) -> str:
        """The etag, if what is there is what was to be put."""
        try:
            there = await self.get(key)
        except ObjectNotFound:
            raise PreconditionFailed(f"{self._named(key)} is not what it was") from refused
        if there.content != content:
            raise PreconditionFailed(f"{self._named(key)} is there with other content") from refused
        return there.etag

    async def _repeated(self, what: str, key: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """`attempt`, again and again while that may help. The only place where the library's errors are met."""
        pause_s = self._patience.retry_s_first
        last: Exception | None = None
        try:
            async with asyncio.timeout(self._patience.operation_s_max), self._slots:
                while True:
                    try:
                        async with asyncio.timeout(self._patience.request_s_max):
                            return await attempt()
                    except (AlreadyExistsError, PreconditionError):
                        raise
                    except (PermissionDeniedError, UnauthenticatedError) as error:
                        raise AccessDenied(f"cannot {what} {self._named(key)}: access is denied") from error
                    except (BaseError, TimeoutError, ConnectionError) as error:
                        # 5xx, throttling, resets, short bodies: the library has one class for all of them.
                        last = error
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                    pause_s = min(pause_s * 2, RETRY_S_MAX)
        except TimeoutError:
            message = f"cannot {what} {self._named(key)}: no answer within {self._patience.operation_s_max:g} s"
            raise StoreUnavailable(f"{message} ({_shown(last)})" if last else message) from last

    def _named(self, key: str) -> str:
        return f"{self._settings.location}/{key}"

    @staticmethod
    def _entry(meta: dict[str, Any]) -> Entry:
        return Entry(meta["path"], meta["size"], meta["last_modified"].timestamp(), meta["size"])


def _shown(error: Exception) -> str:
    """The library's own words, as far as they fit into a sentence; for people only."""
    words = str(error).partition("\n")[0][:SHOWN_CHARS_MAX]
    return words or type(error).__name__


def _client(settings: OssSettings, patience: Patience) -> S3Store:
    config: dict[str, Any] = {
        "region": settings.region,
        "virtual_hosted_style_request": settings.addressing == "virtual",
        # Many services have no bulk deletion.
        "disable_bulk_delete": True,
    }
    if settings.endpoint is not None:
        # The second is what AWS_ENDPOINT_URL_S3 would set, which beats the first.
        config["endpoint"] = config["aws_endpoint_url_s3"] = _endpoint(settings)
    return S3Store(
        settings.bucket,
        prefix=settings.prefix or None,
        config=config,  # type: ignore[arg-type]
        client_options={
            "allow_http": settings.allow_http,
            "connect_timeout": timedelta(seconds=min(CONNECT_S_MAX, patience.request_s_max)),
            "timeout": timedelta(seconds=patience.request_s_max),
        },
        retry_config={"max_retries": 0},
        credential_provider=_provider(settings.credentials) if settings.credentials is not None else None,
    )


def _provider(keys: Credentials) -> Callable[[], S3Credential]:
    """Keys that are given are used alone: as settings they would be mixed with a session token of the environment."""

    def provide() -> S3Credential:
        return {
            "access_key_id": keys.access_key_id,
            "secret_access_key": keys.secret_access_key,
            "token": keys.session_token,
            "expires_at": None,
        }

    return provide


def _endpoint(settings: OssSettings) -> str:
    """The endpoint as the library wants it: with the bucket's name in front where addresses are virtual."""
    assert settings.endpoint is not None
    endpoint = settings.endpoint.rstrip("/")
    if settings.addressing == "path":
        return endpoint
    scheme, _, host = endpoint.partition("://")
    return endpoint if host.startswith(f"{settings.bucket}.") else f"{scheme}://{settings.bucket}.{host}"
