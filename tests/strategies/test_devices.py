"""How many devices a strategy gets, and what is refused at `init`."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist import runtime
from tfdist.data.plan import RowPlan
from tfdist.errors import BackendUnavailableError, TfdistError
from tfdist.strategies.devices import prepare_devices


def test_a_cpu_is_divided_only_before_the_first_operation() -> None:
    tf.constant(1.0)
    with pytest.raises(TfdistError, match=r"devices=64 divides the CPU .* before the first"):
        prepare_devices(64)


def test_horovod_does_not_run_workers() -> None:
    with pytest.raises(BackendUnavailableError, match='received backend="horovod"'):
        runtime._backend_of_placed("horovod", "multi_worker_mirrored")
    assert runtime._backend_of_placed("auto", "multi_worker_mirrored") == "tf"


@pytest.mark.parametrize("rows", [24, 27, 26, 31])
def test_a_process_reads_what_its_devices_would(rows: int) -> None:
    plan = RowPlan(rows=rows, ranks=4, batch_size=3, remainder="keep")
    for process in (0, 1):
        positions, bounds = plan.joined(process * 2, 2)
        for step in range(plan.steps):
            parts = [
                plan.positions(rank)[plan.bounds(rank)[step] : plan.bounds(rank)[step + 1]]
                for rank in (process * 2, process * 2 + 1)
            ]
            assert all(len(part) for part in parts)
            assert positions[bounds[step] : bounds[step + 1]].tolist() == [*parts[0], *parts[1]]
