"""Shared worlds, and the rule that a test session leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.source_tree import expose_callbacks, search_path
from tests.worlds import USUAL, World

expose_callbacks()
gc.set_threshold(100_000)  # as in `tests.lean`
# A shell starts background jobs with Ctrl-C ignored, nohup ignores the hang-up, and every child inherits it;
# tests of signals need the usual.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

_ALIVE = 1  # worlds kept at once: each rank holds some 400 MB


class _Pool:
    """The worlds that tests share, each started when first needed."""

    def __init__(self) -> None:
        self._worlds: dict[tuple[str, int], World] = {}

    def get(self, backend: str, size: int) -> World:
        key = (backend, size)
        world = self._worlds.pop(key, None)
        if world is not None and (world.broken or world.has_ended):
            world.close()
            world = None
        if world is None:
            while len(self._worlds) >= _ALIVE:
                self._worlds.pop(next(iter(self._worlds))).close()
            world = World(backend, size)
        self._worlds[key] = world
        return world

    def close(self) -> None:
        while self._worlds:
            self._worlds.popitem()[1].close()


@pytest.fixture(scope="session")
def world_pool() -> Iterator[_Pool]:
    """Starts worlds for the fixture `world`."""
    pool = _Pool()
    yield pool
    pool.close()


@pytest.fixture(params=USUAL, ids=[f"{backend}{size}" for backend, size in USUAL])
def world(request: pytest.FixtureRequest, world_pool: _Pool) -> World:
    """A shared world; see `tests.worlds`."""
    backend, size = request.param
    require(backend)
    return world_pool.get(backend, size)


@pytest.fixture
def fresh_world(world_pool: _Pool) -> Iterator[Callable[..., World]]:
    """Starts worlds of a test's own, closed after it."""
    started: list[World] = []

    def start(backend: str, size: int, **options: Any) -> World:
        require(backend)
        world_pool.close()
        started.append(World(backend, size, **options))
        return started[-1]

    yield start
    for world in started:
        world.close()


def require(backend: str) -> None:
    """Skips a test whose backend is not installed; `make test` installs all."""
    if backend == "horovod":
        from tfdist.collectives.horovod_probe import installed_horovod

        build = installed_horovod()
        if build is None or build.problem:
            pytest.skip(f"no usable Horovod: {build.problem if build else 'not installed'}")


def pytest_configure(config: pytest.Config) -> None:
    """Gives processes that tests start a search path, but not those in which xdist runs tests."""
    starts_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not starts_workers:
        os.environ["PYTHONPATH"] = search_path()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run also the tests marked `thorough`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out `thorough` tests that nobody asked for, and groups the others by world.

    Each world starts once, its tests are marked; otherwise the order stays.
    """
    named = "thorough" in config.option.markexpr or any("::" in each for each in config.args)
    asked = config.option.thorough or named
    if not asked:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("thorough")])
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]

    def place(item: pytest.Item) -> tuple[int, str, int]:
        call = getattr(item, "callspec", None)
        key = call.params.get("world") if call is not None else None
        if key is not None:
            return (1, *key)
        return (2 if "fresh_world" in getattr(item, "fixturenames", ()) else 0, "", 0)

    items.sort(key=place)
    for item in items:
        group, _, size = place(item)
        if group > 0:
            item.add_marker("world")
        if group == 2 or size > 1:
            item.add_marker("alone")


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """A test that leaves environment variables behind fails."""
    before = dict(os.environ)
    yield
    after = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    before.pop("PYTEST_CURRENT_TEST", None)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    # Libraries set their own defaults on import.
    libraries = ("TF_", "TF2_", "KMP_", "KERAS_", "XLA_", "ENABLE_", "TPU_", "HDF5_")
    changed = {name for name in changed if not name.startswith(libraries)}
    assert not changed, f"environment variables changed by the test: {sorted(changed)}"


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A session that leaves child processes or threads behind fails. It ends after `world_pool`."""
    threads = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 10.0
    while True:
        children = [
            child
            for child in psutil.Process().children(recursive=True)
            if child.status() != "zombie" and not _ends_with_us(child)
        ]
        left = [
            thread
            for thread in threading.enumerate()
            if thread not in threads and not thread.daemon and thread.is_alive()
        ]
        if (not children and not left) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert not children, f"child processes left behind: {[(c.pid, c.cmdline()) for c in children]}"
    assert not left, f"threads left behind: {left}"


def _ends_with_us(child: psutil.Process) -> bool:
    """Whether it is one of the helpers of `multiprocessing`, which end when this process does.

    Ranks that were forked from a helper carry its command line, but are its children.
    """
    command = " ".join(child.cmdline())
    helps = "multiprocessing.forkserver" in command or "multiprocessing.resource_tracker" in command
    return helps and child.ppid() == os.getpid()
