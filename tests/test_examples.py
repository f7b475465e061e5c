"""Every example runs as a user runs it: under `tfdist run` with two ranks, and the proof also alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 240.0


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Makes tfdist importable in child processes whether or not it is installed."""
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(
        "from tests.source_tree import expose_callbacks\nexpose_callbacks()\n"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TFDIST_")}
    return inherited | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "CUDA_VISIBLE_DEVICES": "-1"}


def run(environment: dict[str, str], *words: str, ranks: int = 2) -> str:
    """Output of an example; the test fails if it does."""
    launcher = ["-m", "tfdist", "run", "-np", str(ranks), "--backend", "tf"] if ranks > 1 else []
    result = subprocess.run(
        [sys.executable, *launcher, f"examples/{words[0]}", *words[1:]],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-6000:]
    return output


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_digits_proves_that_it_equals_one_process(environment: dict[str, str], ranks: int) -> None:
    output = run(environment, "digits.py", "--epochs", "10", ranks=ranks)
    proof = re.search(
        rf"Proof: all {ranks} ranks hold fingerprint ([0-9a-f]{{32}});.* equal to those", output
    )
    assert proof, output[-3000:]
    assert "NOT" not in proof[0]
    accuracy = re.search(r"held-out digits: ([0-9.]+)%", output)
    assert accuracy, output[-3000:]
    assert float(accuracy[1]) >= 95
    assert f"batch {32 * ranks}" in output
    assert "Epoch 10/10" in output
    assert "UserWarning" not in output


def test_digits_on_parameter_servers(environment: dict[str, str]) -> None:
    strategy = {"TFDIST_STRATEGY": "parameter_server(servers=2)"}
    output = run(environment | strategy, "digits.py", "--epochs", "5")
    proof = re.search(r"Proof: all 2 ranks hold fingerprint ([0-9a-f]{32});.* equal to those", output)
    assert proof, output[-3000:]
    assert "NOT" not in proof[0]


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("mirrored(devices=2)", 1),
        pytest.param("central_storage(devices=2)", 1, marks=pytest.mark.thorough),
        ("multi_worker_mirrored", 2),
    ],
)
def test_digits_on_replicas(environment: dict[str, str], strategy: str, ranks: int) -> None:
    output = run(environment | {"TFDIST_STRATEGY": strategy}, "digits.py", "--epochs", "5", ranks=ranks)
    proof = re.search(r"their weights are equal to those of one process with batch 64", output)
    assert proof, output[-3000:]


def test_loss_of_the_whole_batch_on_a_server(environment: dict[str, str]) -> None:
    strategy = {"TFDIST_STRATEGY": "parameter_server(server_loss=True)"}
    accuracy = re.search(
        r"held-out digits: ([0-9.]+)%; all ranks hold", run(environment | strategy, "contrastive.py")
    )
    assert accuracy
    assert float(accuracy[1]) >= 95


def test_mnist_reaches_its_goal(environment: dict[str, str]) -> None:
    accuracy = re.search(r"held-out images: ([0-9.]+)%", run(environment, "mnist.py"))
    assert accuracy
    assert float(accuracy[1]) >= 95


def test_mnist_on_asynchronous_servers(environment: dict[str, str]) -> None:
    """Two of four processes compute, as many samples as the ring's; what it reaches, too, within a point."""
    strategy = {"TFDIST_STRATEGY": "async_parameter_server"}
    accuracy = re.search(r"held-out images: ([0-9.]+)%", run(environment | strategy, "mnist.py", ranks=4))
    assert accuracy
    assert float(accuracy[1]) >= 95


def test_sync_batch_norm_learns_in_sync(environment: dict[str, str]) -> None:
    output = run(environment, "sync_batch_norm.py")
    accuracy = re.search(r"held-out digits: ([0-9.]+)%; all ranks hold", output)
    assert accuracy, output[-3000:]
    assert float(accuracy[1]) >= 95


def test_deep_network_learns_in_less_memory(environment: dict[str, str]) -> None:
    accuracy = re.search(r"held-out digits: ([0-9.]+)%; all ranks hold", run(environment, "memory.py"))
    assert accuracy
    assert float(accuracy[1]) >= 95


def test_network_learns_in_stages(environment: dict[str, str]) -> None:
    output = run(environment, "pipeline.py", ranks=1)
    accuracy = re.search(r"held-out digits: ([0-9.]+)%, in 2 stages", output)
    assert accuracy, output[-3000:]
    assert float(accuracy[1]) >= 95
    assert "4 micro-batches; devices idle" in output


def test_custom_loop_learns_in_sync(environment: dict[str, str]) -> None:
    output = run(environment, "custom_loop.py", "--epochs", "8")
    losses = [float(loss) for loss in re.findall(r"Epoch \d: loss ([0-9.]+)", output)]
    assert len(losses) == 8
    assert losses == sorted(losses, reverse=True)
    assert "all ranks hold" in output


def test_loop_with_unequal_data_learns_in_sync(environment: dict[str, str]) -> None:
    output = run(environment, "uneven_loop.py", "--epochs", "8")
    assert output.count("rank 1 had the most data") == 8
    accuracy = re.search(r"held-out digits: ([0-9.]+)%; all ranks hold", output)
    assert accuracy, output[-3000:]
    assert float(accuracy[1]) >= 90


def test_preempted_training_resumes_on_all_ranks(environment: dict[str, str], tmp_path: Path) -> None:
    words = ["checkpoint.py", "--folder", str(tmp_path), "--epochs", "5"]
    output = run(environment, *words, "--stop-after", "3")
    assert output.count("was preempted after 3 epochs") == 2, output[-3000:]
    resumed = re.search(r"Trained epochs ([0-9, ]+); .* best accuracy ([0-9.]+)%", run(environment, *words))
    assert resumed
    assert resumed[1] == "4, 5"
    assert float(resumed[2]) >= 80
    assert [path.name for path in tmp_path.iterdir()] == ["best.keras"]


def test_predict_equals_one_process(environment: dict[str, str]) -> None:
    output = run(environment, "predict.py")
    assert "1797 digits predicted by 2 processes, equal to one process: True" in output


def test_horovod_script_runs_with_only_the_import_changed(
    environment: dict[str, str], tmp_path: Path
) -> None:
    words = ["--epochs", "3", "--steps", "60", "--checkpoint-dir", str(tmp_path)]
    output = run(environment, "horovod_migration.py", *words)
    assert output.count("learning rate warm-up finished at 0.002") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{n}.keras" for n in (1, 2, 3)]
    plain = (
        "import keras; print(int(keras.models.load_model('checkpoint-3.keras').optimizer.iterations.numpy()))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", plain], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert loaded.stdout.split()[-1:] == ["90"], loaded.stderr[-3000:]


def test_horovod_script_differs_by_its_import_alone() -> None:
    lines = (ROOT / "examples" / "horovod_migration.py").read_text().splitlines()
    code = [
        line
        for line in lines
        if "tfdist" in line and not line.startswith(("import tfdist as hvd", "    tfdist run"))
    ]
    assert code == []
