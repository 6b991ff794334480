"""NDJSON as it may arrive: cut anywhere, too long, without its end, or not NDJSON at all."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from agentenv.client import AenvClient, Progress, errors, progress

IMAGE = {
    "references": ["a"],
    "digest": "sha256:" + "0" * 64,
    "layers": [],
    "sizeBytes": 1,
    "diskSizeMB": 64,
    "createdAt": "2026-01-01T00:00:00Z",
}
LINES = [{"progress": "é"}, {"progress": "x", "doneBytes": 5, "totalBytes": 9}, {"image": IMAGE}]
BODY = b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in LINES)


class Pieces(httpx.AsyncByteStream):
    def __init__(self, data, size):
        self._data = data
        self._size = size
        self.is_closed = False

    async def __aiter__(self):
        for start in range(0, len(self._data), self._size):
            yield self._data[start : start + self._size]

    async def aclose(self):
        self.is_closed = True


def client_of(stream, status=200):
    transport = httpx.MockTransport(lambda request: httpx.Response(status, stream=stream))
    return AenvClient("http://server", "key", http_transport=transport)


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_lines_are_whole_however_they_arrive(size):
    async with client_of(Pieces(BODY, size)) as client:
        events = [event async for event in client.images.pull_events("a")]
    assert events[:2] == [Progress("é", 0, None), Progress("x", 5, 9)]
    assert events[2].raw == IMAGE


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", errors.ConnectionLost),
        (BODY[:-10], errors.ConnectionLost),
        (b'{"progress": "x"}\n', errors.ConnectionLost),
        (b"<html>\n", errors.ProtocolError),
        (b"[]\n", errors.ProtocolError),
        (b"{}\n", errors.ProtocolError),
        (b'{"image": {}}\n', errors.ProtocolError),
        (b'{"error": {"code": 507, "message": "full", "error_code": "storage_full"}}\n', errors.StorageFull),
        (b'{"error": {"code": 404, "message": "no such image"}}\n', errors.NotFound),
        (b'{"error": "x"}\n', errors.ProtocolError),
    ],
)
async def test_what_is_no_result_is_an_error(body, kind):
    async with client_of(Pieces(body, 5)) as client:
        with pytest.raises(kind):
            await client.images.pull("a")


async def test_an_endless_line_is_refused(monkeypatch):
    monkeypatch.setattr(progress, "LINE_BYTES_MAX", 100)
    async with client_of(Pieces(b"x" * 10_000, 50)) as client:
        with pytest.raises(errors.ProtocolError, match="longer than 100 bytes"):
            await client.images.pull("a")


async def test_a_caller_who_fails_leaves_no_stream_open():
    stream = Pieces(BODY, 7)

    def refuse(sign):
        raise ZeroDivisionError

    async with client_of(stream) as client:
        with pytest.raises(ZeroDivisionError):
            await client.images.pull("a", progress=refuse)
    assert stream.is_closed


async def test_a_wrong_key_is_told_from_a_sandboxs_token():
    async with client_of(Pieces(b'{"code": 401, "message": "no"}', 100), 401) as client:
        with pytest.raises(errors.KeyRejected):
            await client.images.pull("a")


async def test_an_archive_that_stands_still_is_given_up(monkeypatch):
    class Stuck(Pieces):
        async def __aiter__(self):
            yield b"begin"
            await asyncio.Event().wait()

    monkeypatch.setattr("agentenv.client.images.EXPORT_IDLE_S_MAX", 0.01)
    async with client_of(Stuck(b"", 1)) as client, client.images.export("base") as pieces:
        assert await anext(pieces) == b"begin"
        with pytest.raises(errors.RequestTimeout, match=r"nothing of the archive for 0\.01 s"):
            await anext(pieces)
