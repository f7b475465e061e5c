"""What a process may use, by the kernel's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfdist import resources


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 cores and 1,000 kB free, in no container."""
    monkeypatch.setattr(resources, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable:    1000 kB\n")
    return tmp_path


def test_no_container(kernel: Path) -> None:
    assert (resources.usable_cores(), resources.free_memory()) == (8, 1000 * 1024)


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)]
)
def test_quota_of_cores(kernel: Path, quota: str, cores: int) -> None:
    (kernel / "cpu.max").write_text(quota)
    assert resources.usable_cores() == cores


@pytest.mark.parametrize(("limit", "free"), [("max", 1_024_000), ("900000", 600_000), ("200000", 0)])
def test_limit_of_memory(kernel: Path, limit: str, free: int) -> None:
    (kernel / "memory.max").write_text(limit)
    (kernel / "memory.current").write_text("300000")
    assert resources.free_memory() == free


def test_unknown_system(kernel: Path) -> None:
    (kernel / "meminfo").unlink()
    assert resources.free_memory() == 0


def test_this_system() -> None:
    assert 1 <= resources.usable_cores() <= (os.cpu_count() or 1)
