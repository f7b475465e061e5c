"""`ControlPlane`: what the rest of tfdist sees of the control channel."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist import errors
from tfdist.cluster import ClusterSpec
from tfdist.control.client import ControlClient
from tfdist.control.diagnosis import RankStatus, explain_missing, guess_missing, name_ranks
from tfdist.control.dialing import dial
from tfdist.control.frames import Part
from tfdist.control.hosting import Host
from tfdist.control.membership import PROTOCOL
from tfdist.control.payloads import decode_payload, encode_payload
from tfdist.control.rendezvous import parse_rendezvous

_STATUS_BOUND = 5.0


class ControlPlane:
    """One authenticated TCP connection per rank to a small server inside rank 0's process.

    All methods may be called from any thread. Every wait is bounded. Made by `connect`.

    Attributes:
        spec: place of this process.
        roster: every rank's `hello`, in rank order.

    Example:
        >>> import tempfile
        >>> from tfdist.cluster import ClusterSpec
        >>> control = ControlPlane.connect(ClusterSpec(), hello={"host": "a"}, timeout=10)
        >>> control.roster
        [{'host': 'a'}]
        >>> with control.section("greeting"):
        ...     control.exchange("greeting", "hello")
        ['hello']
        >>> control.allocate("first"), control.allocate("second", 3), control.allocate("third")
        (1, 2, 5)
        >>> control.close()
    """

    spec: ClusterSpec
    roster: list[dict[str, Any]]

    def __init__(
        self, spec: ClusterSpec, client: ControlClient, *, server: Host | None, timeout: float, silence: float
    ) -> None:
        """Use `connect`."""
        self.spec = spec
        self.roster = []
        self._client = client
        self._server = server
        self._timeout = timeout
        self._silence = silence
        self._allocated: dict[tuple[str, int], int] = {}

    @classmethod
    def connect(
        cls,
        spec: ClusterSpec,
        *,
        hello: dict[str, Any],
        timeout: float,
        secret: bytes | None = None,
        host: str | None = None,
        silence: float | None = None,
        grace: float = 5.0,
        expendable: bool = False,
    ) -> ControlPlane:
        """Start-up barrier: returns once all `spec.size` ranks are there. Every rank must call it.

        With a `file://` rendezvous and no secret, the key of the channel is random, in a file that only the
        user who started the job can read. With `tcp://` and no secret it is derived from `spec.job`: that
        keeps other jobs and accidental traffic out, but not somebody who knows or guesses the job's name, so
        give a secret where others can reach the port. Messages are authenticated, not encrypted.

        A port named by `tcp://` is free again when this returns on rank 0.

        Args:
            spec: place of this process; `spec.rendezvous` says where ranks meet.
            hello: what all ranks shall know of this one; JSON values and bytes.
            timeout: bound in seconds of the start, and of each `exchange` that names no other.
            secret: key that the launcher gave to all ranks.
            host: address at which rank 0 listens, if not the default: loopback for a one-host job, otherwise
                the host of the tcp rendezvous, otherwise the address of the host's own name.
            silence: after how many seconds without a sign of life an open connection counts as lost; by
                default `max(15, min(timeout, 60))`, for tracing or user code may hold Python's interpreter
                lock that long.
            grace: for how many seconds announcements may differ.
            expendable: whether the others go on, once started, when this rank is lost; see `lost`.

        Raises:
            CollectiveTimeoutError: a rank did not come; names the missing ones.
            LauncherError: two processes claim one rank, or ranks differ in size, job or version; on all
                involved. Once the world has started, only the newcomer is refused.
            PeerLostError: a rank died during the start.
        """
        _require_bound("connect", timeout)
        secret = secret or None  # an empty one protects nothing
        if silence is None:
            silence = max(15.0, min(timeout, 60.0))
        deadline = time.monotonic() + timeout
        rendezvous = parse_rendezvous(spec)
        greeting = {
            "type": "hello",
            "protocol": PROTOCOL,
            "rank": spec.rank,
            "size": spec.size,
            "job": spec.job,
            "instance": secrets.token_hex(16),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "expendable": expendable,
        }
        payload = Part.of(encode_payload(hello))
        with contextlib.ExitStack() as undo:
            server = None
            if spec.rank == 0:
                server = Host(
                    spec,
                    rendezvous,
                    hello=greeting,
                    secret=secret,
                    host=host,
                    timeout=timeout,
                    silence=silence,
                    grace=grace,
                )
                undo.callback(server.close)
            line, who = dial(
                spec,
                rendezvous,
                hello=greeting,
                payload=payload,
                secret=secret,
                known=server.address if server else None,
                deadline=deadline,
                timeout=timeout,
            )
            client = ControlClient(line, server=who, rank=spec.rank, silence=silence)
            plane = cls(spec, client, server=server, timeout=timeout, silence=silence)
            try:
                plane._await_start(deadline, rendezvous.url)
            except errors.CollectiveTimeoutError:
                client.close(None)
                raise
            except BaseException as error:
                client.close(f"{type(error).__name__} during the start: {error}")
                raise
            undo.pop_all()
        plane.roster = client.roster
        return plane

    def _await_start(self, deadline: float, where: str) -> None:
        # Rank 0's server gives up at rank 0's bound, with a fuller message; let it be the first there.
        slack = 0.0 if self._server is None else 1.0
        while not self._client.started.wait(0.5):
            if self._server is not None:
                self._server.require_entry()
            if time.monotonic() > deadline + slack:
                arrived = {*self._client.arrived, self.spec.rank}
                missing = [rank for rank in range(self.spec.size) if rank not in arrived]
                raise errors.CollectiveTimeoutError(
                    f"{name_ranks(missing)} did not start within {self._timeout:g} s: {len(arrived)} of "
                    f"{self.spec.size} ranks arrived at {where}. Usual causes: a process failed or hangs "
                    "before `tfdist.init()` (look at its output), it was started with another rendezvous, or "
                    "it is only slow: raise `tfdist.init(timeout=...)`."
                )
        self._client.raise_failure()

    def close(self, *, error: str | None = None, linger: float = 0.0, dismiss: bool = False) -> None:
        """Orderly goodbye: peers do not take this rank's end for a failure. Idempotent.

        It takes about 5 s at most, beside `linger`. Rank 0 goes on serving until the others said goodbye too,
        for at most 3 s.

        Args:
            error: why this rank ends early; the other ranks then fail at once with a PeerLostError that says
                so.
            linger: how many seconds to wait until every rank has said goodbye, or one has failed.
            dismiss: on rank 0, whether to send the others away at once; it ends their `wait_for_end`.
        """
        self._client.close(error, linger=linger)
        server, self._server = self._server, None
        if server is not None:
            server.close(dismiss=dismiss and error is None)

    def wait_for_end(self) -> None:
        """Blocks a rank that only serves until rank 0 has left the world in order.

        It has no bound: the job may take weeks. Heartbeats go on meanwhile.

        Raises:
            TfdistError: the world has failed.
        """
        self._client.wait_for_end()
        if self.failure is not None:
            raise self.failure

    @property
    def lost(self) -> dict[int, str]:
        """Expendable ranks that are gone, and what is known about each."""
        return dict(self._client.lost)

    # Agreement.

    def exchange(
        self,
        key: str,
        payload: Any,
        *,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
        check: Any = None,
        describe: str | None = None,
    ) -> list[Any]:
        """Blocks until every rank of `ranks` called with this `key`; returns their payloads in that order.

        Every rank of `ranks` must call it. A key may be used again: a rank's k-th call meets the k-th calls
        of the others. Each payload moves once to rank 0 and from there to every other rank of the group.

        Args:
            key: identifies the meeting.
            payload: JSON values and bytes, at most 256 MiB; tuples arrive as lists.
            ranks: ascending world ranks, equal on all of them; all ranks by default.
            timeout: bound in seconds; that of `connect` by default. The first rank whose bound passes ends
                the wait of the others, too; a rank that comes later gets the same error.
            check: must be equal on all ranks; best a readable string, for the error shows it.
            describe: the operation's name in errors and diagnoses; `exchange 'key'` by default.

        Raises:
            CollectiveTimeoutError: a rank did not come; names it and tells what it does.
            CollectiveMismatchError: `check` differs; on every rank of the group. Later exchanges work.
            PeerLostError: a rank of the world is gone, or one of the group has ended.
        """
        operation = describe or f"exchange {key!r}"
        bound = self._timeout if timeout is None else timeout
        _require_bound(operation, bound)
        group = None if ranks is None else list(ranks)
        self._require_group(operation, group)
        own = Part.of(encode_payload(payload))
        header = {
            "type": "exchange",
            "key": key,
            "ranks": group,
            "timeout": bound,
            "check": None if check is None else _canonical(check),
            "operation": operation,
        }
        with self.section(operation):
            answer = self._client.request(header, [own], bound=bound, operation=operation)
        payloads = [decode_payload(part.data) for part in answer.parts]
        place = self.spec.rank if group is None else group.index(self.spec.rank)
        payloads.insert(place, decode_payload(own.data))
        return payloads

    def _require_group(self, operation: str, group: list[int] | None) -> None:
        size, rank = self.spec.size, self.spec.rank
        if group is None:
            return
        if rank not in group or sorted(set(group)) != group or group[0] < 0 or group[-1] >= size:
            raise ValueError(
                f"{operation} on rank {rank}: ranks must be ascending, without repetition, within "
                f"0..{size - 1}, and contain the calling rank; got {group}."
            )

    def announce(self, key: str, payload: Any) -> None:
        """Posts without waiting; when two ranks announce different payloads for `key`, all ranks fail.

        Each rank's distinct payloads under a key form a list; a repeated one is no news. The i-th of any two
        ranks must be equal. Since ranks may trace their functions in another order, a difference counts only
        if the two lists have not become equal sets (up to some length) within the grace period of `connect`,
        5 s by default. Then `failure` is a CollectiveMismatchError on all ranks that says who announced what.
        A rank that has announced less than another is no mismatch: it may not have come that far.

        Args:
            key: identifies what is announced.
            payload: JSON value; best a readable string, for the error shows it.

        Raises:
            TfdistError: the world has failed already.
        """
        self._client.raise_failure()
        self._client.send({"type": "announce", "key": key, "signature": _canonical(payload)})

    def allocate(self, key: str, count: int = 1) -> int:
        """First of `count` consecutive integers reserved for `key`, equal on all ranks.

        Integers start at 1 and belong to one key only. Never waits for peers; the first call asks rank 0's
        process, later ones remember.

        Args:
            key: identifies the reservation.
            count: how many integers, equal on all ranks.

        Raises:
            CollectiveMismatchError: a different count was reserved under this key before.
        """
        if count < 1:
            raise ValueError(
                f"allocate({key!r}) on rank {self.spec.rank}: count must be at least 1, got {count}."
            )
        first = self._allocated.get((key, count))
        if first is None:
            header = {"type": "allocate", "key": key, "count": count}
            answer = self._client.request(header, bound=self._silence, operation=f"allocate {key!r}")
            first = self._allocated[key, count] = int(answer.header["first"])
        return first

    # What ranks do.

    @contextlib.contextmanager
    def section(self, what: str) -> Iterator[None]:
        """Marks what this rank is in, for the diagnosis that peers print; costs no message."""
        number = self._client.enter(what)
        try:
            yield
        finally:
            self._client.leave(number)

    def status(self) -> list[RankStatus]:
        """What every rank does now, in rank order; one that does not answer within 0.5 s shows older news."""
        answer = self._client.request({"type": "inquire"}, bound=_STATUS_BOUND, operation="status")
        return [RankStatus.from_json(record) for record in answer.header["ranks"]]

    def diagnose(self, waiting_for: str, ranks: Sequence[int] | None = None) -> str:
        """Text: which ranks are missing from `waiting_for`, and what each entered last, when and where.

        Args:
            waiting_for: name of a `section`.
            ranks: who should be in it; all ranks by default.
        """
        group = list(range(self.spec.size)) if ranks is None else list(ranks)
        if self.failure is not None:
            return str(self.failure)
        try:
            statuses = self.status()
        except errors.TfdistError as error:
            return f"waiting for {waiting_for!r}; what the other ranks do is unknown: {error}"
        missing = guess_missing(statuses, waiting_for, group)
        return explain_missing(statuses, waiting_for=waiting_for, ranks=group, missing=missing)

    # Failure.

    def on_failure(self, callback: Callable[[Exception], None]) -> None:
        """Registers what is called once, in the control thread, when a peer is lost or announcements differ.

        If the world has failed already, `callback` is called at once, in the calling thread.
        """
        self._client.on_failure(callback)

    @property
    def failure(self) -> Exception | None:
        """The first failure seen, if any."""
        return self._client.failure


def _canonical(value: Any) -> str:
    """Text of a value that ranks compare; strings are shown as they are."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _require_bound(operation: str, bound: float) -> None:
    if not 0 < bound < math.inf:
        raise ValueError(
            f"{operation}: every wait needs a bound, a finite number of seconds above 0, got {bound}."
        )
