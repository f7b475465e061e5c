from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest

from tests.control.worlds import open_world, wait_for
from tfdist.errors import CollectiveTimeoutError


def test_status_is_fresh_at_once(rendezvous: str) -> None:
    with open_world(3, rendezvous) as planes:
        with planes[1].section("outer"), planes[1].section("inner"):
            status = planes[0].status()[1]
            assert (status.section, status.state, status.inside) == ("inner", "entered", ("outer", "inner"))
            assert status.alive
            assert status.since < 5
        status = planes[2].status()[1]
        assert (status.section, status.state, status.inside) == ("outer", "left", ())
        assert planes[0].status()[0].state == ""


def test_section_of_one_thread_does_not_hide_that_of_another(rendezvous: str) -> None:
    with open_world(1, rendezvous) as (plane,), plane.section("long"):

        def pass_through() -> None:
            with plane.section("short"):
                pass

        thread = threading.Thread(target=pass_through)
        thread.start()
        thread.join()
        assert plane.status()[0].section == "long"


def test_section_is_left_by_an_exception(rendezvous: str) -> None:
    with open_world(1, rendezvous) as (plane,):
        with contextlib.suppress(RuntimeError), plane.section("broken"):
            raise RuntimeError
        assert plane.status()[0].inside == ()


def test_status_of_a_rank_that_left_is_its_last(rendezvous: str) -> None:
    with open_world(2, rendezvous) as planes:
        with planes[1].section("step 4"):
            planes[0].status()
        planes[1].close()
        wait_for(lambda: not planes[0].status()[1].alive)
        status = planes[0].status()[1]
        assert (status.section, status.state) == ("step 4", "left")


def test_diagnose_names_those_who_are_elsewhere(rendezvous: str) -> None:
    with open_world(3, rendezvous) as planes, contextlib.ExitStack() as sections:
        for plane, what in zip(planes, ["step 7", "save", "step 7"], strict=True):
            sections.enter_context(plane.section(what))
        text = planes[0].diagnose("step 7")
        assert "rank 1 did not arrive at 'step 7'; 2 of 3 ranks are there (ranks 0, 2)" in text
        assert "it entered 'save'" in text
        text = planes[0].diagnose("step 7", ranks=[0, 2])
        assert "no rank is missing" in text
        assert "another branch" not in text
        assert "no rank is known to be in 'step 8'" in planes[0].diagnose("step 8")


def test_exchange_is_a_section(rendezvous: str) -> None:
    with open_world(2, rendezvous) as planes:

        def wait() -> None:
            with contextlib.suppress(CollectiveTimeoutError):
                planes[1].exchange("key", None, timeout=1, describe="vote")

        thread = threading.Thread(target=wait)
        thread.start()
        wait_for(lambda: planes[0].status()[1].inside == ("vote",))
        thread.join()


def test_diagnosis_without_a_server_still_answers(rendezvous: str) -> None:
    with open_world(2, rendezvous) as planes:
        planes[0].close()
        time.sleep(0.2)
        assert "unknown" in planes[1].diagnose("anything")


def test_sections_cost_no_message(rendezvous: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_world(1, rendezvous) as (plane,):
        sent: list[str] = []
        send = plane._client._line.send

        def record(header: dict[str, Any], parts: Any = ()) -> None:
            sent.append(header["type"])
            send(header, parts)

        monkeypatch.setattr(plane._client._line, "send", record)
        for _ in range(1000):
            with plane.section("hot"):
                pass
        plane.allocate("key")
        assert set(sent) - {"heartbeat"} == {"allocate"}
