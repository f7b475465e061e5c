"""Ranks that are killed at random times while they train and save; run by `test_killed_ranks.py`.

Each run starts a world, trains digits with checkpoints after every epoch, and kills one rank with SIGKILL, be it in
a step, a save or an evaluation. The others must end by themselves, say who is gone, and leave files that load.
By hand, with more kills:

    python -m tests.killed_ranks 200

Each line of the output is a run; the last one is the report.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.worlds import World, WorldError

WORLDS = (("tf", 2), ("horovod", 2), ("tf", 4), ("horovod", 4))
_LONGEST = 8.0  # seconds of training before a kill; the first of them go into tracing
_BOUND = 40.0  # tfdist's own, which a loss must not need
_SOON = 20.0  # seconds from a kill to the end of the others: they take one or two, on a busy machine more
_BATCH = 32


def train(folder: str) -> None:
    """Trains until something ends it."""
    import keras
    from sklearn.datasets import load_digits

    import tfdist

    images, labels = load_digits(return_X_y=True)
    x, y = (images[:512] / 16).astype("float32"), labels[:512]
    model = network()
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.Adam(1e-3)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        tfdist.shard((x, y), batch_size=_BATCH, seed=1),
        validation_data=tfdist.shard((x[:128], y[:128]), batch_size=_BATCH),
        epochs=1_000_000,
        verbose=0,
        callbacks=[
            *tfdist.callbacks.default(),
            keras.callbacks.ModelCheckpoint(f"{folder}/model.keras"),
            keras.callbacks.BackupAndRestore(f"{folder}/backup", save_freq=3),
        ],
    )


def network() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    )


def kill_one(backend: str, size: int, chance: random.Random) -> dict[str, Any]:
    """One run.

    Returns:
        Who was killed and `after` how many seconds of training; `seconds` from then until the last survivor had
        ended; `faults`, empty if all went as promised; and which `files` there were to load.
    """
    victim, after = chance.randrange(size), chance.random() * _LONGEST
    run: dict[str, Any] = {"world": f"{backend} {size}", "victim": victim, "after": round(after, 2)}
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        world = World(backend, size, timeout=_BOUND)
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.monotonic())
            world.kill(victim)

        timer = threading.Timer(after, kill)
        timer.start()
        try:
            outcomes = world.outcomes(train, folder, timeout=after + 2 * _BOUND)
            run["seconds"] = round(time.monotonic() - killed[0], 2)
            if run["seconds"] > _SOON:
                faults.append("the others ended too late")
            for rank, outcome in enumerate(outcomes):
                if rank != victim and not (
                    outcome.kind == "PeerLostError" and f"ank {victim} " in str(outcome.error)
                ):
                    faults.append(f"rank {rank} ended with {outcome.kind}: {outcome.error}")
        except WorldError as error:
            faults.append(str(error))
        finally:
            timer.join()
            world.close()
        run["files"] = [
            path.name for path in (Path(folder), Path(folder, "backup")) for path in path.glob("*.*")
        ]
        faults += _unreadable(Path(folder))
    return {**run, "faults": faults}


def _unreadable(folder: Path) -> list[str]:
    """What is wrong with files of the run."""
    import keras

    faults = []
    loads = {
        "model.keras": keras.models.load_model,
        "backup/latest.weights.h5": lambda path: network().load_weights(path),
    }
    for name, load in loads.items():
        path = folder / name
        if path.exists():
            try:
                load(path)
            except Exception as error:
                faults.append(f"{name} does not load: {error}")
    return faults


def report(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all runs."""
    seconds = [run["seconds"] for run in runs if "seconds" in run]
    return {
        "kills": len(runs),
        "faults": sum(bool(run["faults"]) for run in runs),
        "with a checkpoint": sum("model.keras" in run["files"] for run in runs),
        "median seconds": sorted(seconds)[len(seconds) // 2] if seconds else None,
        "most seconds": max(seconds, default=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    runs = []
    for number in range(options.kills):
        runs.append(kill_one(*WORLDS[number % len(WORLDS)], chance))
        print(json.dumps(runs[-1]), flush=True)
    print(json.dumps(report(runs)))


if __name__ == "__main__":
    main()
