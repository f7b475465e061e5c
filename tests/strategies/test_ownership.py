"""Which server keeps which variable."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tfdist.strategies.ownership import assign_owners


@given(st.lists(st.integers(1, 10**9), max_size=30), st.integers(1, 8))
def test_servers_have_about_the_same(sizes: list[int], servers: int) -> None:
    owners = assign_owners(sizes, servers)
    assert owners == assign_owners(sizes, servers)
    assert len(owners) == len(sizes)
    kept = [[size for size, owner in zip(sizes, owners, strict=True) if owner == k] for k in range(servers)]
    fullest, emptiest = max(kept, key=sum), min(kept, key=sum)
    assert sum(fullest) - sum(emptiest) <= min(fullest, default=0), "its smallest would have gone elsewhere"


def test_one_server_has_all() -> None:
    assert assign_owners([3, 0, 5], servers=1) == [0, 0, 0]
