"""`tfdist bench`: its words, what it refuses, and one tiny run of every subject. Nothing here is timed."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require
from tfdist import bench, cli, cost, resources
from tfdist.bench import allreduce, comm, engines, fit, latency, report, start
from tfdist.bench.worlds import ContenderError
from tfdist.errors import TfdistError


def test_help_lists_the_subjects(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--help"]) == 0
    words = capsys.readouterr().out
    assert all(
        f"\n  {subject} " in words
        for subject in ("fit", "allreduce", "comm", "asynchronous", "latency", "memory", "start")
    )


def test_no_subject_and_unknown_subject_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 2
    assert bench.main(["speed"]) == 2
    assert "there is no subject 'speed'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["fit", "-np", "1"],
        ["fit", "--steps", "0"],
        ["fit", "--rounds", "many"],
        ["fit", "--model", "gpt"],
        ["fit", "--only", "torch"],
        ["fit", "--only", "desync-check", "--steps", "30"],
        ["allreduce", "-np", "1"],
        ["allreduce", "--sizes", "1.5MB"],
        ["allreduce", "--only", "nccl"],
        ["comm", "-np", "1"],
        ["asynchronous", "--workers", "1"],
        ["comm", "--engine", "nccl"],
        ["latency", "--repeat", "-3"],
        ["start", "--timeout", "0"],
        ["start", "--fast"],
    ],
)
def test_impossible_options(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(words)
    assert ended.value.code == 2
    assert f"usage: tfdist bench {words[0]}" in capsys.readouterr().err


def test_what_is_missing_is_named_with_its_command_and_the_rest_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _hide(monkeypatch, "tf_keras")
    monkeypatch.setattr(fit, "installed_horovod", lambda: None)
    chosen, missing = fit.choose(list(fit.CONTENDERS))
    of_tfdist = ["tfdist-tf", "multi_worker_mirrored", "servers-tf", "mirrored", "central_storage"]
    assert chosen == ["alone", *of_tfdist]
    assert set(missing) == {"Horovod", "tf_keras"}
    assert fit.CONTENDERS["mwms-legacy"].label in missing["tf_keras"]
    assert fit.CONTENDERS["by-hand"].label in missing["Horovod"]


def test_everything_missing_for_what_was_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _hide(monkeypatch, "tf_keras")
    assert cli.main(["bench", "fit", "--only", "mwms-legacy"]) == 1
    captured = capsys.readouterr()
    assert "pip install --no-deps tf_keras" in captured.out
    assert "Nothing is left to measure" in captured.err


def test_plot_without_matplotlib_is_refused_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    _hide(monkeypatch, "matplotlib")
    monkeypatch.setattr(allreduce, "available_engines", lambda: pytest.fail("measured first"))
    with pytest.raises(TfdistError, match=r"pip install 'tfdist\[plot\]'"):
        allreduce.main(["--plot", "figure.png"])


def _hide(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == module else real(name, *rest)
    )


def test_engine_that_is_not_here() -> None:
    tf = engines.EngineWorld("tf", "tf")
    assert engines.select([tf], ["tf", "horovod"]) == [tf]
    with pytest.raises(TfdistError, match="only tf"):
        engines.select([tf], ["horovod+mpi"])


def test_too_little_memory_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "free_memory", lambda: 10**9)
    monkeypatch.setattr(engines.EngineWorld, "start", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(
        TfdistError, match=r"4 ranks need some 9\.4 GB for tensors of 256 MB, and 1\.0 GB are"
    ):
        allreduce.main(["-np", "4", "--only", "tf"])


@pytest.mark.parametrize(("gigabytes", "together"), [(60, [2]), (7, [1, 1]), (0, [2])])
def test_engines_share_the_memory_or_take_it_in_turn(
    monkeypatch: pytest.MonkeyPatch, gigabytes: int, together: list[int]
) -> None:
    """0 stands for unknown."""
    asked: list[int] = []

    def measure(engines: list[engines.EngineWorld], *_: object) -> dict[str, dict[int, list[float]]]:
        asked.append(len(engines))
        return {engine.label: {1 << 28: [1.0]} for engine in engines}

    monkeypatch.setattr(allreduce, "_measure_together", measure)
    monkeypatch.setattr(resources, "free_memory", lambda: gigabytes * 10**9)
    monkeypatch.setattr(allreduce, "tcp_bandwidth", lambda: 1e9)
    monkeypatch.setattr(allreduce, "copy_bandwidth", lambda: 1e9)
    both = [engines.EngineWorld("tf", "one"), engines.EngineWorld("horovod", "other")]
    monkeypatch.setattr(allreduce, "available_engines", lambda: (both, []))
    assert allreduce.main(["-np", "2", "--sizes", "256MB"]) == 0
    assert asked == together


def test_contender_that_does_not_train_is_refused() -> None:
    same = [{"weights": "a"}, {"weights": "a"}]
    moved = [{"weights": "b"}, {"weights": "b"}]
    fit.check_trained("ok", [same, moved])
    with pytest.raises(ContenderError, match="drift: the ranks' weights differ"):
        fit.check_trained("drift", [same, [{"weights": "b"}, {"weights": "c"}]])
    with pytest.raises(ContenderError, match="idle: the weights did not change"):
        fit.check_trained("idle", [same, same])


def test_ratios_need_both_sides() -> None:
    assert fit.ratios_of({"tfdist-tf": [1.0], "alone": [1.0]}) == {}
    [ratio] = fit.ratios_of({"tfdist-tf": [1.0, 1.0], "mwms-legacy": [2.0, 4.0]}).values()
    assert (ratio.median, ratio.target, ratio.met) == (0.375, 1.0, True)


def test_threads_are_divided_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "usable_cores", lambda: 8)
    assert report.thread_share(4)["TF_NUM_INTRAOP_THREADS"] == "2"


def test_bandwidth_table() -> None:
    bandwidths = allreduce.bandwidths_of({"x": {1 << 30: [1.5, 1.0, 9.0]}, "y": {1 << 30: [2.0]}}, ranks=4)
    lines = allreduce.bandwidth_table(bandwidths).splitlines()
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == ["1 GB", "1.61", "0.805"]


def test_latency_table() -> None:
    lines = latency.latency_table({"x": {"eager": [0.002, 0.001, 0.5], "graph": [0.0001]}}).splitlines()
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == ["x", "2.00", "0.10"]


def test_added_table() -> None:
    lines = start.added_table({"it": [0.3, 0.6, 0.4]}, {"it": 0.35}).splitlines()
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == [
        "it", "400.0", "300.0", "600.0", "<= 350", "missed",
    ]  # fmt: skip


# Two ranks and four, 1 and 16 MB, by a link of 1 ms and 1 GB/s that all share; one server takes twice as long.
_LINK = cost.Link(1e-3, 1e9, shared=True)
_UPDATES: comm.Figures = {
    ranks: {
        strategy: {
            size << 20: (1 + (strategy == comm.ONE)) * cost.ring(ranks, size << 20, _LINK).seconds
            for size in (0, 1, 16)
        }
        for strategy in (comm.RING, comm.ONE, comm.ALL)
    }
    for ranks in (2, 4)
}


def test_link_is_fitted_to_the_ring_of_the_fewest() -> None:
    link = comm.fit_link(_UPDATES, smallest=0, largest=16 << 20)
    assert link.shared
    assert (link.latency, link.bandwidth) == (pytest.approx(1e-3), pytest.approx(1e9))


def test_updates_stand_beside_the_model() -> None:
    sent = {
        ranks: {
            strategy: {1 << 20: comm.predicted(strategy, ranks, 1 << 20, _LINK).sent}
            for strategy in strategies
        }
        for ranks, strategies in _UPDATES.items()
    }
    lines = comm.comm_table(sent, _UPDATES, 1 << 20, _LINK).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["2, ring", "1.00", "1.00", "1.000", "4.10", "4.10"]
    assert cells[4] == ["4, parameter_server(servers=1)", "3.00", "3.00", "1.000", "24.58", "12.29"]
    assert cells[5][:2] == ["4, parameter_server(servers=N)", "1.50"]


def test_plot_shows_measured_and_model(tmp_path: Path) -> None:
    mpl = pytest.importorskip("matplotlib")
    from tfdist.bench.comm_plot import draw

    file = tmp_path / "plot.svg"
    with mpl.rc_context({"svg.fonttype": "none"}):
        draw(_UPDATES, 16 << 20, _LINK, cost.Link(5e-5, 1.25e9), file)
    words = file.read_text()
    for text in ("ring, measured", "parameter_server(servers=N)", "16.0 MB", "1024", "1.25 GB/s"):
        assert text in words, text


def test_plot_shows_every_engine_and_limit(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tfdist.bench.allreduce_plot import draw

    sizes = [1 << power for power in range(10, 29, 2)]
    bandwidths = {
        ranks: {name: {size: 1e6 + size * 5 for size in sizes} for name in ("first engine", "second engine")}
        for ranks in (2, 4)
    }
    file = tmp_path / "plot.svg"
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        draw(bandwidths, {"one TCP stream": 3e9, "memory copy": 6e9}, file)
    words = file.read_text()
    for text in (
        "first engine",
        "second engine",
        "2 ranks",
        "4 ranks",
        "one TCP stream",
        "memory copy",
        "GB/s",
    ):
        assert text in words, text


# --- one tiny run each ---


def _run(tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    assert bench.main([*words, "--json", str(file)]) == 0
    content: dict[str, Any] = json.loads(file.read_text())
    assert content["machine"]["cores"] >= 1
    assert content["machine"]["CPU"]
    return content["figures"]  # type: ignore[no-any-return]


def _positive(values: list[float], *, count: int) -> bool:
    return len(values) == count and all(math.isfinite(value) and value > 0 for value in values)


def test_fit_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require("horovod")
    words = ["--only", "by-hand", "tfdist-horovod", "--steps", "2", "--rounds", "2", "--model", "convnet"]
    figures = _run(tmp_path, "fit", *words)
    assert set(figures["milliseconds_per_step"]) == {"by-hand", "tfdist-horovod"}
    assert all(_positive(rounds, count=2) for rounds in figures["milliseconds_per_step"].values())
    [(name, ratio)] = figures["ratios"].items()
    assert name == "tfdist on Horovod, fit() / Horovod ops in a hand-written loop"
    assert ratio["median"] > 0
    assert ratio["target"] == 1.03
    assert f"| {name}" in capsys.readouterr().out


def test_allreduce_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["1KB", "64KB"]
    figures = _run(
        tmp_path, "allreduce", "-np", "2", "--only", "tf", "--rounds", "1", "--sizes", *sizes
    )  # fmt: skip
    [(engine, seconds)] = figures["seconds"]["2"].items()
    assert set(seconds) == {"1024", "65536"}
    assert all(_positive(rounds, count=1) for rounds in seconds.values())
    assert figures["bandwidths"]["2"][engine]["1024"] == pytest.approx(1024 / seconds["1024"][0])
    assert _positive(figures["tcp"], count=2)
    assert _positive(figures["copy"], count=2)
    assert "| 64 KB |" in capsys.readouterr().out


@pytest.mark.thorough
def test_comm_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-np", "2", "--engine", "tf", "--rounds", "1", "--sizes", "1MB"]
    figures = _run(tmp_path, "comm", *words)
    for by_size in figures["sent"]["2"].values():
        assert by_size[str(22 * 48 << 10)] == pytest.approx(22 * 48 << 10, rel=0.03)
    assert set(figures["seconds"]["2"]) == {comm.RING, comm.ONE, comm.ALL}
    assert "| 2, parameter_server(servers=N) |" in capsys.readouterr().out


def test_asynchronous_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--steps", "4", "--rounds", "1", "--pace", "5", "--batch", "8"]
    figures = _run(tmp_path, "asynchronous", *words)
    assert set(figures["rates"]) == {
        f"{who}{slow}" for who in ("ring", "fit", "loop") for slow in ("", ", one slow")
    }
    assert all(_positive(rounds, count=1) for rounds in figures["rates"].values())
    assert "fit / ring, one slow: " in capsys.readouterr().out


def test_latency_smoke(tmp_path: Path) -> None:
    figures = _run(tmp_path, "latency", "--only", "tf", "--rounds", "1", "--repeat", "3")
    [by_mode] = figures["seconds"].values()
    assert set(by_mode) == {"eager", "graph"}
    assert all(_positive(rounds, count=1) for rounds in by_mode.values())


def test_start_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = _run(tmp_path, "start", "--rounds", "1", "--programs", "1")
    assert set(figures["imports"]) == {"keras", "tfdist", "first name"}
    assert all(_positive(times, count=1) for times in figures["imports"].values())
    assert all(_positive(figures["programs"][name], count=1) for name in ("python", "run"))
    assert "| tfdist run -np 1 |" in capsys.readouterr().out
