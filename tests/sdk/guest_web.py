"""A small web server that tests put into a guest: plain answers, a slow stream and a WebSocket echo. Standard library.

/            who asked: path and the Host and token headers, as JSON
/stream      "first", and "second" only after somebody asked for /go; then nothing, with the response left open
/ws          echoes text frames (RFC 6455, no fragments, up to 125 bytes)
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GO = threading.Event()
ACCEPT_SUFFIX = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
TEXT, CLOSE = 1, 8


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/stream":
            self.stream()
        elif path == "/ws":
            self.echo()
        else:
            if path == "/go":
                GO.set()
            seen = {"path": self.path, "host": self.headers["Host"], "token": self.headers["e2b-traffic-access-token"]}
            self.answer(json.dumps(seen).encode())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\r\nfirst\r\n")
        GO.wait()
        self.wfile.write(b"6\r\nsecond\r\n")
        threading.Event().wait()

    def echo(self) -> None:
        key = self.headers["Sec-WebSocket-Key"].encode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key + ACCEPT_SUFFIX).digest()).decode())
        self.end_headers()
        self.close_connection = True
        while True:
            first, second = self.rfile.read(2)
            mask = self.rfile.read(4)
            payload = bytes(byte ^ mask[at % 4] for at, byte in enumerate(self.rfile.read(second & 0x7F)))
            if first & 0xF == CLOSE:
                self.wfile.write(bytes([0x80 | CLOSE, len(payload)]) + payload)
                return
            self.wfile.write(bytes([0x80 | TEXT, len(payload)]) + payload)

    def log_message(self, *_: object) -> None:
        """Nothing: a test reads what it asked for."""


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Handler).serve_forever()
