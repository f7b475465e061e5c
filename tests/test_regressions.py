"""One test per bug that reached main, named after what the user saw."""

from __future__ import annotations

import os

from tests.worlds import World, on


def threads_after_collectives(count: int) -> tuple[int, int]:
    import tensorflow as tf

    import tfdist

    reduce = tf.function(lambda value: tfdist.allreduce(value, op=tfdist.Sum, name="threads"))
    value = tf.ones([256])
    reduce(value)
    before = len(os.listdir("/proc/self/task"))
    for _ in range(count):
        value = reduce(value) / tfdist.size()
    assert float(value[0]) == 1.0
    return before, len(os.listdir("/proc/self/task"))


@on(("tf", 2), ("horovod", 2))
def test_threads_do_not_grow_with_collectives(world: World) -> None:
    """TensorFlow's per-collective timeout kept two threads asleep for every collective: 8,000 after a minute."""
    for before, after in world.call(threads_after_collectives, 100):
        assert after < before + 20
