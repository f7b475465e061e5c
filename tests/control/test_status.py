from __future__ import annotations

import threading
import time

from tests.control.worlds import open_world, wait_for
from tfdist.control import ControlPlane
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
    with open_world(1, rendezvous) as (plane,):
        with plane.section("long"):
            thread = threading.Thread(target=lambda: plane.section("short").__enter__() and None)
            with plane.section("short"):
                pass
            assert plane.status()[0].section == "long"
        del thread


def test_section_is_left_by_an_exception(rendezvous: str) -> None:
    with open_world(1, rendezvous) as (plane,):
        try:
            with plane.section("broken"):
                raise RuntimeError
        except RuntimeError:
            pass
        assert plane.status()[0].inside == ()


def test_diagnose_names_those_who_are_elsewhere(rendezvous: str) -> None:
    with open_world(3, rendezvous) as planes:
        with planes[0].section("step 7"), planes[2].section("step 7"), planes[1].section("save"):
            text = planes[0].diagnose("step 7")
            assert "rank 1 did not arrive at 'step 7'; 2 of 3 ranks are there (ranks 0, 2)" in text
            assert "it entered 'save'" in text
            assert "no rank did not" not in planes[0].diagnose("step 7", ranks=[0, 2])


def test_exchange_is_a_section(rendezvous: str) -> None:
    with open_world(2, rendezvous) as planes:

        def wait() -> None:
            try:
                planes[1].exchange("key", None, timeout=1, describe="vote")
            except CollectiveTimeoutError:
                pass

        thread = threading.Thread(target=wait)
        thread.start()
        wait_for(lambda: planes[0].status()[1].inside == ("vote",))
        thread.join()


def test_diagnosis_without_a_server_still_answers(rendezvous: str) -> None:
    with open_world(2, rendezvous) as planes:
        planes[0].close()
        time.sleep(0.2)
        assert "unknown" in planes[1].diagnose("anything")


def test_sections_cost_no_message(rendezvous: str) -> None:
    with open_world(1, rendezvous) as (plane,):
        sent: list[object] = []
        send = plane._client._line.send
        plane._client._line.send = lambda header, parts=(): (sent.append(header["type"]), send(header, parts))[1]  # type: ignore[method-assign]
        for _ in range(1000):
            with plane.section("hot"):
                pass
        assert len([kind for kind in sent if kind != "heartbeat"]) == 0
        assert isinstance(plane, ControlPlane)
