"""Reads images from registries that speak the distribution protocol (Docker v2, OCI), by way of mirrors.

Owns what is asked and of whom; how is `_http`'s, long bodies are `_download`'s. Everything that is asked for by digest
is verified here, so a mirror can be late or broken but never wrong.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

import httpx

from agentenv.clock import Clock, RealClock
from agentenv.errors import ImageError, ImageNotFound, RegistryError
from agentenv.images import media
from agentenv.images._download import BlobDownload, OnBytes
from agentenv.images._http import RegistryHttp, Request
from agentenv.images._retry import RetryPolicy, Sleep
from agentenv.images.endpoints import Endpoint, RegistrySettings, endpoints_of
from agentenv.images.manifest import MANIFEST_BYTES_MAX, Descriptor, Index, Manifest, digest_of, parse_manifest
from agentenv.images.reference import RegistryReference

log = logging.getLogger(__name__)
T = TypeVar("T")

DOWNLOADS_MAX: Final = 4
# A mirror that failed is left alone for a while, or each layer would wait for its time-out again.
MIRROR_REST_S: Final = 60.0
REFERRERS_PAGES_MAX: Final = 20
_ACCEPT: Final = ", ".join(media.ACCEPTED_MANIFESTS)


class RegistryClient:
    """A client of all registries. For one event loop; close it."""

    def __init__(
        self,
        settings: RegistrySettings,
        *,
        clock: Clock | None = None,
        retry: RetryPolicy | None = None,
        sleep: Sleep = asyncio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`clock`, `sleep` and `transport` are the world, which tests replace."""
        self._settings = settings
        self._http = RegistryHttp(clock or RealClock(), retry or RetryPolicy(), sleep, transport)
        self._downloads = asyncio.Semaphore(DOWNLOADS_MAX)
        self._resting: dict[str, float] = {}

    @property
    def settings(self) -> RegistrySettings:
        return self._settings

    async def aclose(self) -> None:
        await self._http.aclose()

    async def manifest(self, reference: RegistryReference) -> Manifest | Index:
        """What the reference's digest or tag means. Raises `ImageNotFound`, `RegistryError`, `Unsupported`, and
        `ImageError` for a document that is none."""

        async def ask(endpoint: Endpoint) -> Manifest | Index:
            rest = f"manifests/{quote(reference.target, safe=':')}"
            request = self._request(endpoint, reference, rest, _ACCEPT)
            document = await self._http.document(request, MANIFEST_BYTES_MAX)
            found = digest_of(document.body)
            # A tag's digest is only what the registry says; one that does not fit tells of a broken body.
            promised = reference.digest or document.headers.get("docker-content-digest") or found
            if promised.startswith("sha256:") and promised != found:
                raise RegistryError(f"{request.what}: the manifest has the digest {found}, not {promised}")
            return parse_manifest(document.body, document.headers.get("content-type", ""), str(reference))

        return await self._anywhere(reference, ask)

    async def small_blob(self, reference: RegistryReference, blob: Descriptor, bytes_max: int) -> bytes:
        """A blob that fits in memory (a configuration), verified. Raises as `manifest`."""
        if blob.size_bytes > bytes_max:
            raise ImageError(f"{reference}: {blob.digest} has {blob.size_bytes} bytes; the limit is {bytes_max}")

        async def ask(endpoint: Endpoint) -> bytes:
            request = self._request(endpoint, reference, f"blobs/{blob.digest}", "*/*")
            body = (await self._http.document(request, bytes_max)).body
            if digest_of(body) != blob.digest:
                raise RegistryError(f"{request.what}: the content has another digest")
            return body

        return await self._anywhere(reference, ask)

    async def blob(self, reference: RegistryReference, blob: Descriptor, into: Path, on_bytes: OnBytes) -> None:
        """Download a blob, verified, going on behind what is in `into` already; at most four at a time.

        Raises `ImageNotFound`, `RegistryError`, `StorageFull`. A cancel leaves a partial file, which the next call for
        the same file goes on with.
        """
        download = BlobDownload(self._http, blob, into, on_bytes)

        async def ask(endpoint: Endpoint) -> None:
            await download.fetch(self._request(endpoint, reference, f"blobs/{blob.digest}", "*/*"))

        async with self._downloads:
            try:
                await download.open()
                await self._anywhere(reference, ask)
            finally:
                await download.close()

    async def range(self, reference: RegistryReference, blob: Descriptor, offset: int, length: int) -> bytes:
        """Some bytes of a blob, which cannot be verified by themselves. Raises as `manifest`."""

        async def ask(endpoint: Endpoint) -> bytes:
            plain = self._request(endpoint, reference, f"blobs/{blob.digest}", "*/*")
            headers = {**plain.headers, "Range": f"bytes={offset}-{offset + length - 1}"}
            request = Request(endpoint, plain.repository, plain.url, headers)
            body = (await self._http.document(request, length)).body
            if len(body) != length:
                raise RegistryError(f"{request.what}: {len(body)} bytes of a range of {length}")
            return body

        return await self._anywhere(reference, ask)

    async def referrers(self, reference: RegistryReference, digest: str) -> list[Descriptor]:
        """All documents that name `digest` as their subject: by the referrers API, else by its tag.

        An empty list means that the registry said so. Whatever it did not say (an error, a time-out) is raised: who
        takes that for "none" converts an image that is there to be used.
        """

        async def ask(endpoint: Endpoint) -> list[Descriptor]:
            try:
                return await self._referrer_pages(endpoint, reference, digest)
            except ImageNotFound:
                # Registries from before version 1.1 of the specification.
                return await self._referrer_tag(endpoint, reference, digest)

        return await self._anywhere(reference, ask)

    async def _referrer_pages(self, endpoint: Endpoint, reference: RegistryReference, digest: str) -> list[Descriptor]:
        request = self._request(endpoint, reference, f"referrers/{digest}", media.OCI_INDEX)
        found: list[Descriptor] = []
        for _ in range(REFERRERS_PAGES_MAX):
            document = await self._http.document(request, MANIFEST_BYTES_MAX)
            found += _index(document.body, request.what)
            following = httpx.Response(200, headers=document.headers).links.get("next", {}).get("url")
            if following is None:
                return found
            url = httpx.URL(request.url).join(following)
            if url.host != httpx.URL(request.url).host:
                raise RegistryError(f"{request.what}: the next page is on another host")
            request = Request(endpoint, request.repository, str(url), request.headers)
        raise RegistryError(f"{request.what}: more than {REFERRERS_PAGES_MAX} pages of referrers")

    async def _referrer_tag(self, endpoint: Endpoint, reference: RegistryReference, digest: str) -> list[Descriptor]:
        request = self._request(endpoint, reference, f"manifests/{digest.replace(':', '-')}", media.OCI_INDEX)
        try:
            document = await self._http.document(request, MANIFEST_BYTES_MAX)
        except ImageNotFound:
            return []
        return _index(document.body, request.what)

    def _request(self, endpoint: Endpoint, reference: RegistryReference, rest: str, accept: str) -> Request:
        return Request(endpoint, reference.repository, endpoint.url(reference.repository, rest), {"Accept": accept})

    async def _anywhere(self, reference: RegistryReference, ask: Callable[[Endpoint], Awaitable[T]]) -> T:
        """The first place that can answer. Only the registry itself can say that something is not there."""
        failed: list[str] = []
        for endpoint in await asyncio.to_thread(endpoints_of, reference, self._settings):
            if endpoint.is_mirror and self._resting.get(endpoint.base, 0.0) > self._http.clock.monotonic():
                continue
            try:
                return await ask(endpoint)
            except (ImageError, ImageNotFound) as error:
                if not endpoint.is_mirror:
                    if failed:
                        error.add_note(f"mirrors before it: {'; '.join(failed)}")
                    raise
                if isinstance(error, RegistryError):
                    self._resting[endpoint.base] = self._http.clock.monotonic() + MIRROR_REST_S
                failed.append(str(error))
                log.warning("mirror %s of %s: %s", endpoint.host, reference.registry, error)
        raise AssertionError("the registry itself is always the last place")


def _index(body: bytes, origin: str) -> list[Descriptor]:
    """The entries of an index of referrers. Something else under that name is an error, not an empty answer."""
    parsed = parse_manifest(body, media.OCI_INDEX, origin)
    if not isinstance(parsed, Index):
        raise RegistryError(f"{origin}: no index of referrers")
    return list(parsed.manifests)
