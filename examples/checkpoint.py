"""Training that survives: the best model, and a backup to resume from, in Keras's own callbacks.

tfdist run -np 2 examples/checkpoint.py --folder runs/digits

Kill it and start it again: all processes resume after the last epoch that was backed up, from the first process's
file, which the others need not see. `--stop-after 3` ends a run early, as a preemption does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import keras
from sklearn.datasets import load_digits

import tfdist


class Preempted(Exception):
    """This run ends here; the next one resumes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the model and the backup")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--stop-after", type=int, default=0, help="epochs after which this run is preempted")
    arguments = parser.parse_args()

    tfdist.init()
    keras.utils.set_random_seed(7)
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16
    train, held_out = (images[:1436], labels[:1436]), (images[1436:], labels[1436:])

    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    )
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.Adam(1e-3 * tfdist.size())),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

    class Preemption(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            if arguments.stop_after and epoch == arguments.stop_after:
                raise Preempted(f"preempted after {epoch} epochs")

    # Each is given on all processes; the first one writes, and a file is always whole.
    callbacks = [
        tfdist.callbacks.BroadcastGlobalVariablesCallback(0),
        keras.callbacks.BackupAndRestore(arguments.folder / "backup"),
        tfdist.callbacks.BestModelCheckpoint(arguments.folder / "best.keras", monitor="val_accuracy"),
        Preemption(),
    ]
    try:
        history = model.fit(
            tfdist.shard(train, batch_size=32),
            validation_data=held_out,
            epochs=arguments.epochs,
            callbacks=callbacks,
            verbose=0,
        )
    except Preempted as error:
        print(f"Process {tfdist.rank()} was {error}; start again to resume")
        return 0
    fingerprint = tfdist.check_in_sync(model)
    if tfdist.rank() == 0:
        trained = ", ".join(str(epoch + 1) for epoch in history.epoch)
        best = keras.models.load_model(arguments.folder / "best.keras").evaluate(*held_out, verbose=0)[1]
        print(f"Trained epochs {trained}; all ranks hold {fingerprint}; best accuracy {best:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
