from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.control.worlds import make_spec
from tfdist.control import rendezvous as meeting
from tfdist.control.rendezvous import Address, NotThereYet
from tfdist.errors import LauncherError

ADDRESS = Address("127.0.0.1", 4711, b"key", "job", "instance")


def test_file_and_folder_are_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    assert meeting.publish(path, ADDRESS, replace=False)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert meeting.read(path) == ADDRESS
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_publish_replaces_only_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "file"
    later = Address("127.0.0.1", 1, b"", "job", "later")
    assert meeting.publish(path, ADDRESS, replace=False)
    assert not meeting.publish(path, later, replace=False)
    assert meeting.read(path) == ADDRESS
    assert meeting.publish(path, later, replace=True)
    assert meeting.read(path) == later


def test_withdraw_removes_only_the_own_entry(tmp_path: Path) -> None:
    path = tmp_path / "file"
    meeting.publish(path, ADDRESS, replace=False)
    meeting.withdraw(path, "other")
    assert path.exists()
    meeting.withdraw(path, "instance")
    assert not path.exists()
    meeting.withdraw(path, "instance")


def test_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(LauncherError, match="mode 0777"):
        meeting.publish(folder / "file", ADDRESS, replace=False)


def test_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(LauncherError, match=f"belongs to user {own}"):
        meeting.publish(tmp_path / "file", ADDRESS, replace=False)


def test_file_that_others_could_have_written_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "file"
    meeting.publish(path, ADDRESS, replace=False)
    path.chmod(0o644)
    with pytest.raises(NotThereYet, match="0644"):
        meeting.read(path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": "a"}', '{"host": "a", "port": "x"}', "\0\xff"])
def test_broken_file_is_not_there_yet(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(NotThereYet):
        meeting.read(path)


@pytest.mark.parametrize(
    "url", ["", "path", "file://host/path", "file:relative", "tcp://host", "tcp://host:x", "http://host:1"]
)
def test_url_rule(url: str) -> None:
    with pytest.raises(LauncherError, match="TFDIST_RENDEZVOUS"):
        meeting.parse_rendezvous(make_spec(1, 2, url))


def test_url_forms() -> None:
    assert meeting.parse_rendezvous(make_spec(0, 2, "file:///a%20b/c")).file == Path("/a b/c")
    ipv6 = meeting.parse_rendezvous(make_spec(0, 2, "tcp://[::1]:7"))
    assert (ipv6.host, ipv6.port) == ("::1", 7)
    assert meeting.parse_rendezvous(make_spec(0, 1, "")).file is None


def test_bind_host_is_loopback_unless_the_job_spans_hosts() -> None:
    url = "tcp://192.0.2.7:5000"
    one_host = make_spec(0, 4, url)
    two_hosts = make_spec(0, 4, url, local_size=2, cross_size=2)
    assert meeting.choose_bind_host(one_host, meeting.parse_rendezvous(one_host), None) == "127.0.0.1"
    assert meeting.choose_bind_host(two_hosts, meeting.parse_rendezvous(two_hosts), None) == "192.0.2.7"
    assert meeting.choose_bind_host(two_hosts, meeting.parse_rendezvous(two_hosts), "h") == "h"


def test_wildcard_cannot_be_published_in_a_file() -> None:
    spec = make_spec(0, 4, "file:///x", local_size=2)
    with pytest.raises(LauncherError, match="TFDIST_HOST"):
        meeting.choose_bind_host(spec, meeting.parse_rendezvous(spec), "0.0.0.0")


def test_keys() -> None:
    spec = make_spec(0, 2, "tcp://h:1")
    assert meeting.derive_key(spec, None) == meeting.derive_key(make_spec(1, 2, "tcp://h:1"), None)
    assert meeting.derive_key(spec, None) != meeting.derive_key(make_spec(0, 2, "tcp://h:1", job="b"), None)
    assert meeting.derive_key(spec, b"s") != meeting.derive_key(spec, None)


def test_taken_and_foreign_addresses_say_what_to_do() -> None:
    listener = meeting.listen("127.0.0.1", 0, backlog=1)
    try:
        with pytest.raises(LauncherError, match="another process that claims rank 0"):
            meeting.listen("127.0.0.1", listener.getsockname()[1], backlog=1)
    finally:
        listener.close()
    with pytest.raises(LauncherError, match="no address of this host"):
        meeting.listen("192.0.2.7", 0, backlog=1)
