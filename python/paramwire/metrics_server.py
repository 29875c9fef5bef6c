"""An HTTP endpoint that Prometheus scrapes."""

from __future__ import annotations

import http.server
import socket
import threading
from typing import TYPE_CHECKING

from paramwire.telemetry import prometheus_text

if TYPE_CHECKING:
    from paramwire._core import Client, Server

# A scraper sends a short request at once. One that does not loses its connection, and with it its thread.
_REQUEST_SECONDS = 10.0


class MetricsServer:
    """Answers GET /metrics for one server or client, in threads of its own, until close()."""

    def __init__(self, source: Server | Client, host: str, port: int) -> None:
        """Listen. errors: OSError."""

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = _REQUEST_SECONDS

            def do_GET(self) -> None:
                if self.path.split("?", 1)[0] != "/metrics":
                    self.send_error(404, "only /metrics is here")
                    return
                body = prometheus_text(source).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Silent: a scrape is no event."""

        class Listener(http.server.ThreadingHTTPServer):
            daemon_threads = True  # a scraper that stands still must not keep the process
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        self._server = Listener((host, port), Handler)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="pw-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Again is fine."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
