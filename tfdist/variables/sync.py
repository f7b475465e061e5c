"""Proves that ranks are equal: hashes of weights and optimizer state, and what differs if they are not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist import world
from tfdist.errors import OutOfSyncError
from tfdist.operations import broadcast
from tfdist.variables.listing import agree_on_list, array_of, describe, model_state, path_of, tensor_of

MOVING_STATISTICS = ("moving_mean", "moving_variance")
_DIGEST_BYTES = 16
_NAME = "check_in_sync"


def fingerprint(model: Any, *, ignore: Sequence[str] = MOVING_STATISTICS) -> str:
    """Hash of this rank's weights and optimizer state; equal on two ranks if all their bits are.

    Args:
        model: a built `keras.Model`.
        ignore: last path components of variables to leave out, see `check_in_sync`.

    Returns:
        32 hexadecimal digits.
    """
    return _combine(_digests(model_state(model, ignore=ignore)))


def check_in_sync(model: Any, *, ignore: Sequence[str] = MOVING_STATISTICS) -> str:
    """Proves that all ranks hold the same weights and optimizer state; every rank calls it.

    Compared are weights, frozen ones included, optimizer slots, iterations, learning rate and loss scale, bit
    by bit. Random states are left out: they differ by design. So, by default, are the moving statistics of
    BatchNormalization: each rank's follow its own part of the data; the file of the rank that saves has that
    rank's. Pass `ignore=()` to compare them too, as with `SyncBatchNormalization`.

    Hashes travel over the control channel, 16 bytes per variable; only on a difference is one variable moved.

    Args:
        model: a built `keras.Model`.
        ignore: last path components (as in "batch_normalization/moving_mean") of variables to leave out.

    Returns:
        The common fingerprint, 32 hexadecimal digits.

    Raises:
        OutOfSyncError: names the first variable that differs, the ranks, and by how much.
        CollectiveMismatchError: ranks hold different lists of variables.

    Example:
        >>> import keras, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> len(tfdist.check_in_sync(model))
        32
    """
    here = world.current()
    variables = model_state(model, ignore=ignore)
    mine = _digests(variables)
    if here.control is None:
        return _combine(mine)
    agree_on_list([describe(variable) for variable in variables], what=_NAME)
    differing = _compare(mine, list(here.everyone.ranks))
    if differing:
        first, digests = next(iter(differing.items()))
        raise OutOfSyncError(_difference(variables[first], digests, count=(len(differing), len(mine))))
    return _combine(mine)


def differing_variables(variables: Sequence[Any], ranks: Sequence[int]) -> dict[str, list[int]]:
    """Variables that are not equal on all `ranks`, bit by bit; every one of these ranks calls it.

    Args:
        variables: the same list on every rank.
        ranks: ascending world ranks, this one among them.

    Returns:
        For each of them its path, and the ranks whose value is not that of the first rank.
    """
    differing = _compare(_digests(variables), list(ranks)) if len(ranks) > 1 else {}
    return {
        path_of(variables[index]): [
            rank for rank, digest in zip(ranks, digests, strict=True) if digest != digests[0]
        ]
        for index, digests in differing.items()
    }


def _compare(mine: Sequence[bytes], ranks: list[int]) -> dict[int, list[bytes]]:
    """The places at which digests differ between ranks, and each rank's digest there."""
    control = world.current().control
    assert control is not None
    everyones = control.exchange(f"{_NAME} on ranks {ranks}", b"".join(mine), ranks=ranks, describe=_NAME)
    found = {}
    for index in range(len(mine)):
        place = slice(index * _DIGEST_BYTES, (index + 1) * _DIGEST_BYTES)
        digests = [bytes(digests[place]) for digests in everyones]
        if len(set(digests)) > 1:
            found[index] = digests
    return found


def _difference(variable: Any, digests: Sequence[bytes], *, count: tuple[int, int]) -> str:
    here = world.current()
    mine = array_of(variable)
    rank_0s = broadcast(tensor_of(variable), root_rank=0).numpy()
    gap = np.abs(mine.astype(np.float64) - rank_0s.astype(np.float64))
    largest = float(np.max(gap, initial=0.0))
    assert here.control is not None
    gaps = here.control.exchange(_NAME, largest)
    others = [
        f"rank {rank} by up to {gaps[rank]:.3g}"
        for rank in range(len(digests))
        if digests[rank] != digests[0]
    ]
    equal = [str(rank) for rank in range(len(digests)) if digests[rank] == digests[0]]
    return (
        "All ranks must hold the same weights and optimizer state, but they have drifted apart. First of "
        f"{count[0]} differing variables (of {count[1]}): {describe(variable)}. Different from rank 0: "
        f"{', '.join(others)}; equal: rank {', '.join(equal)}. Usual causes: no "
        "`tfdist.callbacks.BroadcastGlobalVariablesCallback(0)` before the first step, weights changed on "
        "one rank only, or an optimizer that is not wrapped by `tfdist.DistributedOptimizer`. State that may "
        "differ by rank goes into `ignore`."
    )


def _digests(variables: Sequence[Any]) -> list[bytes]:
    return [_hash(np.ascontiguousarray(array_of(variable)).tobytes()).digest() for variable in variables]


def _combine(digests: Sequence[bytes]) -> str:
    return _hash(b"".join(digests)).hexdigest()


def _hash(data: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES)
