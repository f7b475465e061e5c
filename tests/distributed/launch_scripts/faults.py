"""A training script in which something goes wrong on rank 1; prints a JSON line per rank about its error.

Argument: what goes wrong, one of the methods of `Fault` or a mode that `main` names.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import keras

import tfdist
from tests.distributed import models
from tfdist.cluster import from_environment

AT = 3  # the batch after which it goes wrong


class Fault(keras.callbacks.Callback):
    """Goes wrong on rank 1 in the middle of the first epoch."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        if batch == AT and self.mode == "endless":
            print("training", flush=True)
        if batch == AT and tfdist.rank() == 1 and hasattr(self, f"{self.mode}_here"):
            tell(what=f"about to {self.mode}")
            getattr(self, f"{self.mode}_here")()

    def raise_here(self) -> None:
        raise ValueError("my callback broke")

    def kill_here(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop_here(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def sleep_here(self) -> None:
        time.sleep(120)  # the launcher ends it long before

    def exit_here(self) -> None:
        sys.exit(0)


def tell(**record: object) -> None:
    line = json.dumps({"rank": from_environment(os.environ).rank, **record, "at": time.time()})
    os.write(1, (line + "\n").encode())


def train(mode: str) -> None:
    keras.utils.set_random_seed(1)
    model = models.dense()
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.Adam()),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    x, y = models.data("dense")
    epochs = 100_000 if mode == "endless" else 3
    model.fit(x, y, batch_size=8, verbose=0, epochs=epochs, callbacks=[Fault(mode)])


def main(mode: str) -> None:
    try:
        tfdist.init()
        tell(what="started")
        train(mode)
    except BaseException as error:
        tell(kind=type(error).__name__, text=str(error))
        raise
    tell(what="ended")


if __name__ == "__main__":
    main(sys.argv[1])
