"""`tfdist bench memory`: its tables, its networks, and one tiny run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import keras
import pytest

from tfdist.bench import memory
from tfdist.bench.memory_networks import NETWORKS
from tfdist.bench.memory_trial import prepared


def figures(peak: int, seconds: float) -> dict[str, Any]:
    return {"peak": peak, "seconds": [seconds] * 3, "cpu": [seconds * 2] * 3}


def test_table_compares_with_plain_training() -> None:
    measured = {
        "plain": figures(1_000_000_000, 2.0),
        "remat": {"error": "no"},
        "sqrt": figures(310_000_000, 2.6),
        "both": figures(90_000_000, 2.0),
    }
    rows = memory.memory_table(measured, jit=False).splitlines()
    assert "fails" in rows[3]
    assert [word.strip() for word in rows[4].split("|")[2:7]] == [
        "310",
        "0.31",
        "1.30",
        "1.30",
        "<= 0.3, missed",
    ]
    assert "<= 0.1, met" in rows[5]
    assert "<= 0.35, met" in memory.memory_table(measured, jit=True)


def test_growth_is_the_slope() -> None:
    growth = {"plain": {16: 160, 64: 640}, "sqrt": {16: 40, 64: 80}}
    text = memory.growth_table(growth)
    assert [word.strip() for word in text.splitlines()[-1].split("|")[2:4]] == ["1.00", "0.50"]
    assert math.isnan(memory.exponent({16: 1}))


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_train_in_every_way(network: str) -> None:
    make, batch = NETWORKS[network]
    x, y = batch(3)
    for contender in ("each", "both"):
        model = prepared(make(2, False), contender)
        model.compile("sgd", "mse", run_eagerly=True)
        assert math.isfinite(model.train_on_batch(x, y))
    keras.utils.clear_session(free_memory=False)


def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plot = tmp_path / "figures.json", tmp_path / "figures.png"
    words = ["--networks", "mlp", "--jit", "false", "--only", "plain", "--rows", "64", "--depth", "2"]
    assert memory.main([*words, "--steps", "1", "--json", str(file), "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    assert "mlp, jit_compile=False" in said
    measured = json.loads(file.read_text())["figures"]["steps"]["mlp, jit_compile=False"]
    assert measured["plain"]["peak"] > 0
    assert len(measured["plain"]["seconds"]) == 1
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", [["--jit", "maybe"], ["--only", "magic"], ["--depths", "0"]])
def test_wrong_words(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        memory.main(words)
