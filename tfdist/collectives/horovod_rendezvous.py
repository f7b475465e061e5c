"""Horovod's rendezvous server in this process, for one start of Horovod over Gloo."""

from __future__ import annotations

import threading


class Rendezvous:
    """A running server; ranks that know its port find each other through it.

    Attributes:
        port: where it listens.
    """

    def __init__(self, host: str) -> None:
        """Starts the server.

        Args:
            host: the only address of this host that it listens on.
        """
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        self._server = RendezvousHTTPServer((host, 0), RendezvousHandler, 0)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="tfdist-horovod-rendezvous",
            daemon=True,
        )  # fmt: skip
        self._thread.start()
        self.port = int(self._server.server_address[1])

    def stop(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)
