"""Stands between a client and an HTTP server and misbehaves on demand: refuses, hangs, answers 500, truncates, forgets.

The server behind it is a real one: what is forwarded really happens, and signatures stay valid because nothing is rewritten.

Example:
    with FaultyProxy(server.port) as proxy:
        proxy.next_faults = [Fault.LOSE_ANSWER]      # of the next request; the server has done what it asked
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
    DISCONNECT = "disconnect"
    """The connection is closed before the request is forwarded."""
    LOSE_ANSWER = "lose_answer"
    """The request is carried out, the answer is not delivered."""
    TRUNCATE = "truncate"
    """The connection is closed in the middle of the answer."""
    HANG = "hang"
    """Nothing is answered for as long as the proxy lives."""
    SLOW = "slow"
    """Everything takes another quarter of a second."""
    ERROR_500 = "error_500"
    SLOW_DOWN = "slow_down"
    EXPIRED_TOKEN = "expired_token"
    ACCEPT_ANYWAY = "accept_anyway"
    """A refused conditional write is answered as if it had been done, as servers do that ignore the condition."""


ERRORS = {
    Fault.ERROR_500: (500, "InternalError"),
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.EXPIRED_TOKEN: (400, "ExpiredToken"),
}


class FaultyProxy:
    def __init__(self, server_port: int):
        self.server_port = server_port
        self.next_faults: list[Fault] = []
        """Used up by the next requests, one each."""
        self.fault_of: Callable[[str, str], Fault | None] = lambda method, path: None
        """Decides by method and path once `next_faults` is empty."""
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        """Method, path and headers of everything that was asked."""
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
                self._hang_up()
                return
            case Fault.HANG:
                proxy.closed.wait()
                self._hang_up()
                return
            case Fault.ERROR_500 | Fault.SLOW_DOWN | Fault.EXPIRED_TOKEN:
                self._answer_error(*ERRORS[fault])
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
                if name.lower() != "expect":  # answered here
                    server.putheader(name, value)
            server.endheaders(body)
            answer = server.getresponse()
            data = answer.read()
        except OSError:
            self._hang_up()
            return
        finally:
            server.close()
        if fault is Fault.LOSE_ANSWER:
            self._hang_up()
            return
        if fault is Fault.ACCEPT_ANYWAY and answer.status == 412:
            self.send_response_only(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in {"transfer-encoding", "connection", "content-length"}:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        if length is not None and answer.status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        if fault is Fault.TRUNCATE:
            self.wfile.write(data[: len(data) // 2])
            self._hang_up()
            return
        with contextlib.suppress(ConnectionError):  # whoever asked has gone
            self.wfile.write(data)

    def _answer_error(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>{code}, said the proxy</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        """Silence: what was asked is in `requests`."""
