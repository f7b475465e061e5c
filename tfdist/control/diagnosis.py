"""Who is missing, what it did last, and what to do about it: the text a user reads when a job hangs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from tfdist.control.differences import shorten_differing

_MOST_VALUES = 4  # different values that an error shows


@dataclasses.dataclass(frozen=True)
class RankStatus:
    """What is known about one rank.

    Attributes:
        rank: world rank.
        host: name of its host.
        pid: its process.
        alive: False once it said goodbye or was lost.
        section: what it entered last and is still in, otherwise what it left last; empty if nothing yet.
        state: `entered` if it is still in `section`, `left` if not, empty if it never entered any.
        since: seconds since it entered or left `section`.
        heartbeat: seconds since anything came from it.
        inside: every section it is in, outermost first.
    """

    rank: int
    host: str
    pid: int
    alive: bool
    section: str
    state: str
    since: float
    heartbeat: float
    inside: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> RankStatus:
        return cls(**{**record, "inside": tuple(record["inside"])})

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def who(self) -> str:
        return f"rank {self.rank} (host {self.host or 'unknown'}, pid {self.pid or 'unknown'})"

    @property
    def activity(self) -> str:
        # What is known of a rank that has gone may be a second old, and it may have got further since.
        here = "is still in it" if self.alive else "was in it when last heard of"
        after = "and entered nothing since" if self.alive else "when last heard of"
        if self.state == "entered":
            return f"it entered {self.section!r} {self.since:.1f} s ago and {here}"
        if self.state == "left":
            return f"it finished {self.section!r} {self.since:.1f} s ago {after}"
        return "it has not entered any collective yet"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 1`, or `ranks 0, 2`; long lists are cut."""
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:16])) + (f", … ({len(listed)} in all)" if len(listed) > 16 else "")
    return f"rank{'' if len(listed) == 1 else 's'} {shown}" if listed else "no rank"


def guess_missing(statuses: Sequence[RankStatus], waiting_for: str, ranks: Iterable[int]) -> list[int]:
    """Ranks that neither are in `waiting_for` nor just finished it."""
    missing = []
    for rank in ranks:
        status = statuses[rank]
        finished = status.state == "left" and status.section == waiting_for
        if waiting_for not in status.inside and not finished:
            missing.append(rank)
    return missing


def explain_missing(
    statuses: Sequence[RankStatus],
    *,
    waiting_for: str,
    ranks: Sequence[int],
    missing: Sequence[int],
    waited: float | None = None,
    extra: str = "",
) -> str:
    """Names the missing ranks (of `ranks`), what each does, the usual causes, and the fixes."""
    bound = "" if waited is None else f" within {waited:g} s"
    here = [rank for rank in ranks if rank not in missing]
    if not missing:
        first = (
            f"every rank has arrived at {waiting_for!r}, so no rank is missing: it is slow or stuck itself."
        )
    elif not here:
        first = f"no rank is known to be in {waiting_for!r}."
    else:
        first = (
            f"{name_ranks(missing)} did not arrive at {waiting_for!r}{bound}; "
            f"{len(here)} of {len(ranks)} ranks are there ({name_ranks(here)})."
        )
    lines = [first]
    for rank in list(missing or ranks)[:16]:
        status = statuses[rank]
        if status.alive:
            lines.append(f"  {status.who}: {status.activity}; last heard {status.heartbeat:.1f} s ago.")
        else:
            lines.append(f"  {status.who}: it has left the world; {status.activity}.")
    if extra:
        lines.append(extra)
    if not missing:
        return "\n".join(lines)
    lines.append(
        "Usual causes: a rank took another branch (`if rank() == 0:` around a collective), ended its data "
        "early, died, or is only slow."
    )
    lines.append(
        "Fixes: let every rank call the same collectives in the same order; give every rank the same number "
        "of steps (`tfdist.shard` does); look at that rank's output for an error; if it is only slow, raise "
        "`tfdist.init(timeout=...)`."
    )
    return "\n".join(lines)


def explain_mismatch(values: dict[int, str], *, operation: str, missing: Sequence[int] = ()) -> str:
    """Says which ranks sent what, ranks with equal values together; of long lists, only what differs."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    shown = shorten_differing(list(groups)[:_MOST_VALUES])
    pairs = zip(groups.values(), shown, strict=False)
    sent = "; ".join(f"{name_ranks(ranks)} sent {value}" for ranks, value in pairs)
    if len(groups) > len(shown):
        sent += f"; and {len(groups) - len(shown)} other values"
    late = f" ({name_ranks(missing)} had not arrived yet.)" if missing else ""
    return (
        f"Ranks disagree in {operation!r}: {sent}.{late} Every rank must call it with the same arguments; "
        "check for code, shapes or data that depend on the rank."
    )
