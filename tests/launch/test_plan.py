"""Plans are data, so every decision of the launcher can be tested without starting anything."""

from __future__ import annotations

import pytest

from tfdist.errors import LauncherError
from tfdist.launch.plan import (
    LocalPlan,
    Request,
    describe,
    is_local,
    parse_hosts,
    plan_handover,
    plan_local,
    world_size,
)

PROGRAM = ("python", "train.py", "--rate", "0.1 0.2")


def local(request: Request, environ: dict[str, str] | None = None, *, cores: int = 8) -> LocalPlan:
    return plan_local(request, environ or {}, job="run-1", secret="ab12", folder="/tmp/run-1", cores=cores)


def test_each_rank_knows_its_place() -> None:
    plan = local(Request(PROGRAM, size=3))
    assert [command.rank for command in plan.ranks] == [0, 1, 2]
    assert {command.argv for command in plan.ranks} == {PROGRAM}
    variables = plan.ranks[2].variables
    assert {name: value for name, value in variables.items() if name.startswith("TFDIST_")} == {
        "TFDIST_RANK": "2",
        "TFDIST_SIZE": "3",
        "TFDIST_LOCAL_RANK": "2",
        "TFDIST_LOCAL_SIZE": "3",
        "TFDIST_CROSS_RANK": "0",
        "TFDIST_CROSS_SIZE": "1",
        "TFDIST_JOB": "run-1",
        "TFDIST_RENDEZVOUS": "file:///tmp/run-1/rendezvous",
        "TFDIST_SECRET": "ab12",
    }


def test_options_reach_the_script_only_when_given() -> None:
    request = Request(PROGRAM, size=1, backend="tf", strategy="mirrored", timeout=12.5, verbose=True)
    variables = local(request).ranks[0].variables
    names = ("BACKEND", "STRATEGY", "TIMEOUT", "VERBOSE")
    assert [variables[f"TFDIST_{name}"] for name in names] == ["tf", "mirrored", "12.5", "1"]
    assert not {f"TFDIST_{name}" for name in names} & set(local(Request(PROGRAM, size=1)).ranks[0].variables)


@pytest.mark.parametrize(
    ("size", "cores", "share", "between"),
    [(2, 8, "4", "4"), (2, 2, "1", "2"), (8, 2, "1", "2"), (3, 8, "2", "2")],
)
def test_cores_are_divided(size: int, cores: int, share: str, between: str) -> None:
    variables = local(Request(PROGRAM, size=size), cores=cores).ranks[0].variables
    assert variables["OMP_NUM_THREADS"] == variables["TF_NUM_INTRAOP_THREADS"] == share
    assert variables["TF_NUM_INTEROP_THREADS"] == between


def test_one_rank_keeps_all_cores() -> None:
    assert "OMP_NUM_THREADS" not in local(Request(PROGRAM, size=1)).ranks[0].variables


def test_what_the_user_set_stays() -> None:
    mine = {"OMP_NUM_THREADS": "7", "TF_CPP_MIN_LOG_LEVEL": "0", "PYTHONUNBUFFERED": ""}
    plan = local(Request(PROGRAM, size=2), mine)
    assert not set(mine) & set(plan.ranks[0].variables)
    assert not plan.quiet  # level 0 asks for information messages


def test_tensorflow_is_quiet_unless_verbose() -> None:
    quiet, loud = (local(Request(PROGRAM, size=2, verbose=verbose)) for verbose in (False, True))
    assert quiet.quiet
    assert quiet.ranks[0].variables["TF_CPP_MIN_LOG_LEVEL"] == "2"
    assert not loud.quiet
    assert "TF_CPP_MIN_LOG_LEVEL" not in loud.ranks[0].variables


def test_another_launchers_place_is_dropped_but_settings_stay() -> None:
    outer = {
        "OMPI_COMM_WORLD_SIZE": "1",
        "PMIX_RANK": "0",
        "PMI_SIZE": "1",
        "TF_CONFIG": "{}",
        "HOROVOD_SIZE": "1",
        "HOROVOD_FUSION_THRESHOLD": "0",
        "OMPI_MCA_btl": "tcp",
        "SLURM_JOB_ID": "8",
    }
    dropped = local(Request(PROGRAM, size=2), outer).dropped
    assert dropped == set(outer) - {"HOROVOD_FUSION_THRESHOLD", "OMPI_MCA_btl", "SLURM_JOB_ID"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [("a:2,b", (("a", 2), ("b", 1))), (" a : 2".replace(" ", ""), (("a", 2),)), ("[::1]:4", (("::1", 4),))],
)
def test_hosts_are_read(text: str, hosts: tuple[tuple[str, int], ...]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a:", "a:x", "a:0", ",", "a:1,a:2", "a:1:2", "a b:1"])
def test_malformed_hosts_are_refused(text: str) -> None:
    with pytest.raises(LauncherError, match="-H"):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(PROGRAM), "Give -np N"),
        (Request(PROGRAM, size=0), "at least 1. Received 0"),
        (Request(PROGRAM, size=-3), "Received -3"),
        (Request(PROGRAM, size=5, hosts=(("a", 2), ("b", 2))), "more than the 4 slots"),
    ],
)
def test_impossible_sizes_are_refused(request_: Request, message: str) -> None:
    with pytest.raises(LauncherError, match=message):
        world_size(request_)


def test_size_defaults_to_all_slots() -> None:
    assert world_size(Request(PROGRAM, hosts=(("a", 2), ("b", 3)))) == 5


@pytest.mark.parametrize(
    ("hosts", "here"),
    [
        ("localhost:4", True),
        ("127.0.0.1:2", True),
        ("node7:2", True),
        ("node8:2", False),
        ("localhost:1,node8:1", False),
    ],
)
def test_local_names_need_no_other_launcher(hosts: str, here: bool) -> None:
    assert is_local(Request(PROGRAM, hosts=parse_hosts(hosts)), hostname="node7.cluster") is here


def test_handover_to_horovodrun_asks_for_gloo_and_tells_no_secret() -> None:
    request = Request(PROGRAM, size=3, hosts=(("a", 2), ("b", 2)), strategy="ring")
    plan = plan_handover(request, {}, horovodrun="/bin/horovodrun", mpirun="/bin/mpirun")
    assert plan.argv == ("/bin/horovodrun", "--gloo", "-np", "3", "-H", "a:2,b:2", *PROGRAM)
    assert plan.variables["TFDIST_STRATEGY"] == "ring"
    assert not {"TFDIST_SECRET", "TFDIST_RANK"} & set(plan.variables)


def test_handover_to_mpirun_exports_variables_by_name() -> None:
    request = Request(PROGRAM, hosts=(("a", 2), ("b", 2)), backend="tf")
    environ = {"PYTHONPATH": "/src", "TFDIST_HOST": "10.0.0.1", "TFDIST_RANK": "0", "SHELL": "/bin/sh"}
    plan = plan_handover(request, environ, horovodrun=None, mpirun="/bin/mpirun")
    assert plan.argv[:5] == ("/bin/mpirun", "-np", "4", "-H", "a:2,b:2")
    exported = {plan.argv[i + 1] for i, word in enumerate(plan.argv) if word == "-x"}
    assert {"PYTHONPATH", "TFDIST_HOST", "TFDIST_BACKEND", "PYTHONUNBUFFERED"} <= exported
    assert not {"TFDIST_RANK", "SHELL"} & exported
    assert plan.argv[-len(PROGRAM) :] == PROGRAM


def test_handover_without_a_launcher_says_what_to_install() -> None:
    with pytest.raises(LauncherError, match="build-horovod"):
        plan_handover(Request(PROGRAM, hosts=(("a", 1),)), {}, horovodrun=None, mpirun=None)


def test_description_can_be_pasted_but_hides_the_secret() -> None:
    lines = describe(local(Request(PROGRAM, size=2)))
    assert [line.partition(":")[0] for line in lines] == ["rank 0", "rank 1"]
    assert all(line.endswith("python train.py --rate '0.1 0.2'") for line in lines)
    assert "ab12" not in "".join(lines)


def test_workers_of_an_asynchronous_strategy_are_expendable() -> None:
    strategy = "async_parameter_server(servers=2)"
    assert local(Request(("script",), 5, strategy=strategy)).expendable == {3, 4}
    assert local(Request(("script",), 5), {"TFDIST_STRATEGY": strategy}).expendable == {3, 4}
    assert not local(Request(("script",), 5, strategy="ring")).expendable
    with pytest.raises(LauncherError, match="needs at least 4 ranks"):
        local(Request(("script",), 3, strategy=strategy))
