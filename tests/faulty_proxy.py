"""HTTP proxy that injects faults between a client and a real server: refusals, hangs, error 500, truncated or lost replies.

Forwarded requests reach the real server unchanged, so that S3 signatures stay valid. Tests of the store and the chaos tool
use it.

Example:
    with FaultyProxy(server.port) as proxy:
        proxy.next_faults = [Fault.LOSE_RESPONSE]    # the server handles the next request; the client gets no response
        proxy.fault_of = lambda method, path: Fault.HANG if method == "PUT" else None
"""

import contextlib
import http.client
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class Fault(StrEnum):
    """Fault of one request."""

    DISCONNECT = "disconnect"
    """Close the connection before the request is forwarded."""
    LOSE_RESPONSE = "lose_response"
    """Forward the request, but close the connection instead of returning the response."""
    TRUNCATE = "truncate"
    """Close the connection in the middle of the response."""
    HANG = "hang"
    """Neither forward nor respond until the proxy is closed."""
    SLOW = "slow"
    """Forward after a quarter of a second."""
    ERROR_500 = "error_500"
    """Return S3's InternalError."""
    SLOW_DOWN = "slow_down"
    """Return S3's SlowDown (503)."""
    EXPIRED_TOKEN = "expired_token"
    """Return S3's ExpiredToken (400)."""
    ACCESS_DENIED = "access_denied"
    """Return S3's AccessDenied (403)."""
    TIME_SKEWED = "time_skewed"
    """Return S3's RequestTimeTooSkewed (403)."""
    NO_BUCKET = "no_bucket"
    """Return S3's NoSuchBucket (404)."""
    ACCEPT_ANYWAY = "accept_anyway"
    """Return 200 for a refused conditional write (412), as a server does that ignores the condition."""


ERRORS = {
    Fault.ERROR_500: (500, "InternalError"),
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.EXPIRED_TOKEN: (400, "ExpiredToken"),
    Fault.ACCESS_DENIED: (403, "AccessDenied"),
    Fault.TIME_SKEWED: (403, "RequestTimeTooSkewed"),
    Fault.NO_BUCKET: (404, "NoSuchBucket"),
}
"""Status and S3 error code of faults that are error responses."""


class FaultyProxy:
    """Proxy on a free port of 127.0.0.1 to a server on another; runs as a context manager."""

    def __init__(self, server_port: int):
        self.server_port = server_port
        self.next_faults: list[Fault] = []
        """Faults of the next requests, one each; then `fault_of` decides."""
        self.fault_of: Callable[[str, str], Fault | None] = lambda method, path: None
        """Function from method and path of a request to its fault, or None."""
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        """Method, path and headers of every request so far."""
        self.closed = threading.Event()
        self._http = _Server(self)

    @property
    def port(self) -> int:
        return self._http.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()
        self._http.shutdown()
        self._http.server_close()

    def take_fault(self, method: str, path: str) -> Fault | None:
        """Return the fault of a request; remove it from `next_faults` if it came from there."""
        return self.next_faults.pop(0) if self.next_faults else self.fault_of(method, path)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, proxy: FaultyProxy):
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        proxy.requests.append((self.command, self.path, dict(self.headers)))
        fault = proxy.take_fault(self.command, self.path)
        match fault:
            case Fault.DISCONNECT:
                self._disconnect()
                return
            case Fault.HANG:
                proxy.closed.wait()
                self._disconnect()
                return
            case fault if fault in ERRORS:
                self._return_error(*ERRORS[fault])
                return
            case Fault.SLOW:
                time.sleep(0.25)
        self._forward(body, fault)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def _forward(self, body: bytes, fault: Fault | None) -> None:
        server = http.client.HTTPConnection("127.0.0.1", self.server.proxy.server_port, timeout=60)
        try:
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "expect":  # the handler's base class has responded to it
                    server.putheader(name, value)
            server.endheaders(body)
            response = server.getresponse()
            data = response.read()
        except OSError:
            self._disconnect()
            return
        finally:
            server.close()
        if fault is Fault.LOSE_RESPONSE:
            self._disconnect()
            return
        if fault is Fault.ACCEPT_ANYWAY and response.status == 412:
            self.send_response_only(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in {"transfer-encoding", "connection", "content-length"}:
                self.send_header(name, value)
        length = response.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        if length is not None and response.status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        if fault is Fault.TRUNCATE:
            self.wfile.write(data[: len(data) // 2])
            self._disconnect()
            return
        with contextlib.suppress(ConnectionError):  # the client has disconnected
            self.wfile.write(data)

    def _return_error(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>{code}, said the proxy</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _disconnect(self) -> None:
        self.close_connection = True
        self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the proxy keeps all requests in `requests`."""
