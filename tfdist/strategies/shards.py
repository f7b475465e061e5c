"""The messages between ranks and the servers that keep variables: gradients pushed, values pulled.

Both go point to point. A tree broadcast would spare the server and burden the others, and gradients that are
summed on the way would be an all-reduce.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist import operations, world
from tfdist.collectives.base import Group
from tfdist.collectives.sink import Sink
from tfdist.errors import CollectiveError, PeerFailedError
from tfdist.gradients import fill_buckets, sum_duplicate_rows
from tfdist.variables import bytes_of, tensor_of

_GRACE = 1.0  # seconds in which all ranks come to where they save, if they do


class Shards:
    """Sums of gradients at the owners of their variables, and the owners' values at all ranks.

    Implements `tfdist.gradients.Transport`.

    Args:
        owner_of: the world rank that keeps a variable.
        bucket_bytes: most bytes that one message copies.
    """

    def __init__(self, owner_of: Callable[[Any], int], *, bucket_bytes: int) -> None:
        self._owner_of = owner_of
        self._bucket_bytes = bucket_bytes
        self._sink = Sink()
        self._failures = 0  # what did not meet before one is not met after it

    def is_mine(self, variable: Any) -> bool:
        """Whether this rank keeps the variable."""
        return self._owner_of(variable) == world.rank()

    def sum_tensors(
        self, tensors: Sequence[Any], variables: Sequence[Any], *, name: str, group: Group
    ) -> list[Any]:
        """Pushes gradients to the owners of their variables.

        A rank sends the bytes of what it does not own; an owner receives (N-1)·K for K bytes that it owns.

        Args:
            tensors: dense, of static shape.
            variables: what they belong to.
            name: identifies the messages on all ranks.
            group: the ranks that take part.

        Returns:
            Sums over the ranks for variables that this rank owns, None for others.
        """
        sums: list[Any] = [None] * len(tensors)
        for dtype, places in _by_dtype(tensors).items():
            theirs = self._by_owner(places, variables, group)
            mine = theirs[group.position(world.rank())]
            received = world.current().engine.exchange(
                [
                    _flat([tensors[place] for place in owned]) if owned is not mine and owned else None
                    for owned in theirs
                ],
                [
                    0 if rank == world.rank() else sum(_elements(tensors[place]) for place in mine)
                    for rank in group.ranks
                ],
                name=f"{name}/push",
                group=group,
                dtype=dtype,
                after=[tensors[place] for place in places],
            )
            if mine:
                parts = [each for each in received if each is not None]
                total = tf.add_n([_flat([tensors[place] for place in mine]), *parts])
                for place, value in zip(mine, _unpacked(total, [tensors[p] for p in mine]), strict=True):
                    sums[place] = value
        return sums

    def sum_rows(self, rows: tf.IndexedSlices, variable: Any, *, name: str, group: Group) -> Any:
        """Pushes rows of a table to its owner.

        Returns:
            The sum over the ranks, each row once, on the owner; None on others.
        """
        engine = world.current().engine
        owner = self._owner_of(variable)
        count = tf.shape(rows.indices)[0]
        splits = tf.stack([count if rank == owner else tf.zeros_like(count) for rank in group.ranks])
        indices, _ = engine.alltoall(rows.indices, splits, name=f"{name}/indices", group=group)
        values, _ = engine.alltoall(rows.values, splits, name=f"{name}/values", group=group)
        if owner == world.rank():
            return sum_duplicate_rows(tf.IndexedSlices(values, indices, rows.dense_shape))
        self._sink.consume([indices, values])
        return None

    def pull(self, variables: Sequence[Any], *, name: str, group: Group, after: Sequence[Any] = ()) -> None:
        """Gives every rank the owners' values; an owner sends (N-1)·K bytes for K bytes that it owns.

        Args:
            variables: the same on all ranks.
            name: identifies the messages on all ranks.
            group: the ranks that take part.
            after: see `Engine.exchange`.
        """
        here = world.rank()
        sizes = [bytes_of(variable) for variable in variables]
        for number, bucket in enumerate(fill_buckets(sizes, self._bucket_bytes)):
            chosen = [variables[place] for place in bucket]
            for dtype, places in _by_dtype(chosen).items():
                theirs = self._by_owner(places, chosen, group)
                mine = theirs[group.position(here)]
                values = _flat([tensor_of(chosen[place]) for place in mine]) if mine else None
                received = world.current().engine.exchange(
                    [None if rank == here else values for rank in group.ranks],
                    [
                        0 if rank == here else sum(_elements(chosen[place]) for place in owned)
                        for rank, owned in zip(group.ranks, theirs, strict=True)
                    ],
                    name=f"{name}/pull{number}",
                    group=group,
                    dtype=dtype,
                    after=after,
                )
                for owned, packed in zip(theirs, received, strict=True):
                    if packed is None:
                        continue
                    parts = _unpacked(packed, [chosen[place] for place in owned])
                    for place, value in zip(owned, parts, strict=True):
                        chosen[place].assign(value)

    def gather(
        self, variables: Sequence[Any], mine: Sequence[int], *, group: Group, what: str
    ) -> list[tuple[int, Any]]:
        """Gives the first rank of the group what the others keep; every rank of the group calls it, eagerly.

        Args:
            variables: as many on all ranks, but some of another shape where this rank does not keep them.
            mine: places of those that this rank keeps.
            group: the ranks.
            what: what the ranks are doing, for error messages.

        Returns:
            On the first rank the place and value of each variable that another rank keeps; nothing elsewhere.
        """
        first = group.ranks[0]
        kept = self.tell(what, _shapes(variables, mine), group=group)
        routes = {(rank, first): shapes for rank, shapes in kept.items() if rank != first}
        values = {place: tensor_of(variables[place]) for place in mine}
        return self._carry(variables, routes, values, group=group, what=what)

    def spread(
        self, variables: Sequence[Any], mine: Sequence[int], loaded: Mapping[int, Any], root: int, *,
        group: Group, what: str,
    ) -> list[tuple[int, Any]]:  # fmt: skip
        """Gives each rank the values that `root` has loaded for it; every rank of the group calls it, eagerly.

        Args:
            variables: see `gather`.
            mine: see `gather`.
            loaded: values by place, on the root; it has all that others keep, or none.
            root: the rank that has loaded something.
            group: the ranks.
            what: what the ranks are doing, for error messages.

        Returns:
            Place and value of each variable that this rank keeps and the root had; nothing on the root.
        """
        told = self.tell(what, {"keeps": _shapes(variables, mine), "has": bool(loaded)}, group=group)
        routes = {(root, rank): said["keeps"] for rank, said in told.items() if rank != root}
        if not told[root]["has"]:
            return []
        return self._carry(variables, routes, loaded, group=group, what=what)

    def tell(
        self, what: str, mine: Any, *, group: Group, failure: str = "", timeout: float | None = None
    ) -> dict[int, Any]:
        """What each rank of the group says of `what`; all of them call it, and wait for each other.

        Args:
            what: what the ranks are doing, for error messages.
            mine: what this rank says.
            group: the ranks.
            failure: in place of that, why this rank does not take part.
            timeout: bound in seconds; `init`'s by default.

        Raises:
            PeerFailedError: another rank does not take part.
        """
        control = world.current().control
        assert control is not None
        answers = control.exchange(
            f"{what}, after {self._failures} failures, on ranks {group.ranks}",
            {"value": mine, "failure": failure},
            ranks=group.ranks,
            timeout=timeout,
            describe=what,
        )
        told = dict(zip(group.ranks, answers, strict=True))
        failed = [rank for rank, said in told.items() if said["failure"]]
        if failed and not failure:
            raise PeerFailedError(
                f"rank {world.rank()} gives up {what} because rank {failed[0]} failed before, with "
                f"{told[failed[0]]['failure']}. Mend the error on that rank."
            )
        return {rank: said["value"] for rank, said in told.items()}

    def leave(self, what: str, failure: str, *, group: Group) -> bool:
        """Notes that this rank, or another, has failed; all ranks call it.

        Args:
            what: where the others may wait.
            failure: why this rank failed; empty if another did.
            group: the ranks.

        Returns:
            Whether the others were waiting there, and know now.
        """
        told = False
        if failure:
            with contextlib.suppress(CollectiveError):
                self.tell(what, None, group=group, failure=failure, timeout=_GRACE)
                told = True
        self._failures += 1
        return told

    def _carry(
        self,
        variables: Sequence[Any],
        routes: Mapping[tuple[int, int], Mapping[str, Sequence[int]]],
        values: Mapping[int, Any],
        *,
        group: Group,
        what: str,
    ) -> list[tuple[int, Any]]:
        """Sends values from rank to rank: `routes` tells, for (source, target), their places and shapes."""
        here, watchdog = world.rank(), world.current().watchdog
        assert watchdog is not None
        carried = []
        places = {int(place) for shapes in routes.values() for place in shapes}
        for dtype in sorted({tf.as_dtype(variables[place].dtype).name for place in places}):
            chosen = {
                route: [
                    (int(place), shape)
                    for place, shape in shapes.items()
                    if tf.as_dtype(variables[int(place)].dtype).name == dtype
                ]
                for route, shapes in routes.items()
            }
            outgoing = [
                _flat([tf.convert_to_tensor(values[place]) for place, _ in sent]) if sent else None
                for sent in (chosen.get((here, rank), []) for rank in group.ranks)
            ]
            expected = [chosen.get((rank, here), []) for rank in group.ranks]
            try:
                with watchdog.watch(what, group.ranks):
                    received = world.current().engine.exchange(
                        outgoing,
                        [sum(math.prod(shape) for _, shape in parts) for parts in expected],
                        name=f"{what} {dtype}",
                        group=group,
                        dtype=tf.as_dtype(dtype),
                    )
            except Exception as error:
                raise operations.translate(error, waiting_for=what) from error
            for parts, packed in zip(expected, received, strict=True):
                if packed is None:
                    continue
                flat = tf.split(packed, [math.prod(shape) for _, shape in parts])
                carried += [
                    (place, tf.reshape(value, shape))
                    for (place, shape), value in zip(parts, flat, strict=True)
                ]
        return carried

    def _by_owner(self, places: Sequence[int], variables: Sequence[Any], group: Group) -> list[list[int]]:
        owned: list[list[int]] = [[] for _ in group.ranks]
        for place in places:
            owned[group.position(self._owner_of(variables[place]))].append(place)
        return owned


def _shapes(variables: Sequence[Any], places: Sequence[int]) -> dict[str, list[int]]:
    """Shapes by place, for the control channel."""
    return {str(place): list(variables[place].shape) for place in places}


def _by_dtype(tensors: Sequence[Any]) -> dict[Any, list[int]]:
    places: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tf.as_dtype(tensor.dtype), []).append(place)
    return places


def _elements(tensor: Any) -> int:
    return math.prod(tensor.shape)


def _flat(tensors: Sequence[Any]) -> Any:
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, 0)


def _unpacked(packed: Any, like: Sequence[Any]) -> list[Any]:
    parts = tf.split(packed, [_elements(each) for each in like]) if len(like) > 1 else [packed]
    return [tf.reshape(part, tuple(each.shape)) for part, each in zip(parts, like, strict=True)]
