"""`tfdist.shard`: disjoint shards, equal steps, and the same global batches as one process.

The ranks of a world are played one after the other in this process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.played_ranks import as_rank
from tests.worlds import World, on
from tfdist.data import shard
from tfdist.data.plan import RowPlan, pass_order
from tfdist.errors import NotInitializedError, OutOfSyncError


def shards(make: Callable[[], Any], size: int, **arguments: Any) -> list[Any]:
    """What each rank of a world of `size` gets; `make` is called anew per rank, as processes do."""
    result = []
    for rank in range(size):
        random.seed(3)
        with as_rank(rank, size):
            result.append(shard(make(), **arguments))
    return result


def batches(data: Any) -> list[Any]:
    return [np.asarray(element) for element in data]


def rows() -> np.ndarray:
    return np.arange(23, dtype=np.int64)


@pytest.fixture(autouse=True)
def no_global_seed() -> Iterator[None]:
    """With `tf.random.set_seed`, which some tests call, an unseeded shuffle is seeded after all."""
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(None)


# --- the plan -------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 6), st.integers(1, 17), st.sampled_from(["drop", "keep"]))
def test_plan_deals_out_each_row_once(rows: int, ranks: int, batch_size: int, remainder: Any) -> None:
    if rows < ranks:
        with pytest.raises(ValueError, match="at least one row per rank"):
            RowPlan(rows, ranks, batch_size, remainder)
        return
    plan = RowPlan(rows, ranks, batch_size, remainder)
    positions = [plan.positions(rank) for rank in range(ranks)]
    assert sorted(np.concatenate(positions)) == list(range(rows - plan.dropped))
    assert plan.dropped < ranks
    assert plan.dropped == 0 or remainder == "drop"
    for rank in range(ranks):
        bounds = plan.bounds(rank)
        assert len(bounds) == plan.steps + 1
        assert (bounds[0], bounds[-1]) == (0, len(positions[rank]))
        sizes = np.diff(bounds)
        assert (sizes >= 1).all()
        assert (sizes[:-1] == batch_size).all()
        assert sizes[-1] <= batch_size + 1
    if remainder == "drop":
        assert len({len(mine) for mine in positions}) == 1


@given(st.integers(1, 300), st.integers(1, 5), st.integers(1, 17))
def test_plan_makes_the_global_batches_of_one_process(rows: int, ranks: int, batch_size: int) -> None:
    if rows < ranks:
        return
    plan = RowPlan(rows, ranks, batch_size, "drop")
    one = RowPlan(rows - plan.dropped, 1, ranks * batch_size, "drop")
    for step in range(plan.steps):
        together = np.concatenate([step_rows(plan, rank, step) for rank in range(ranks)])
        np.testing.assert_array_equal(np.sort(together), np.sort(step_rows(one, 0, step)))
    assert plan.steps == one.steps


def step_rows(plan: RowPlan, rank: int, step: int) -> np.ndarray:
    bounds = plan.bounds(rank)
    return plan.positions(rank)[bounds[step] : bounds[step + 1]]


def test_pass_order_changes_with_seed_and_pass_only() -> None:
    first = pass_order(50, seed=1, number=0)
    assert sorted(first) == list(range(50))
    tf.random.set_seed(99)
    np.testing.assert_array_equal(first, pass_order(50, seed=1, number=0))
    assert (first != pass_order(50, seed=1, number=1)).any()
    assert (first != pass_order(50, seed=2, number=0)).any()
    np.testing.assert_array_equal(pass_order(5, seed=None, number=7), range(5))


# --- arrays ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_arrays_give_the_batches_of_one_process_in_every_pass(size: int) -> None:
    ranks = shards(rows, size, batch_size=8 // size, seed=5)
    (one,) = shards(lambda: rows()[:], 1, batch_size=8, seed=5)
    passes = []
    for _ in range(3):
        mine = [batches(data) for data in ranks]
        together = [np.concatenate(parts) for parts in zip(*mine, strict=True)]
        passes.append(np.concatenate(together))
        for step, expected in zip(together[:2], batches(one)[:2], strict=True):
            np.testing.assert_array_equal(step, expected)
        assert len(set(passes[-1])) == len(passes[-1]) == 23 // size * size
    assert (passes[0][:16] != passes[1][:16]).any()


def test_arrays_keep_their_order_and_all_rows_for_evaluation() -> None:
    mine = [batches(data) for data in shards(rows, 2, batch_size=4, shuffle=False)]
    assert [len(batch) for batch in mine[0]] == [4, 4, 4]
    assert [len(batch) for batch in mine[1]] == [4, 4, 3]
    np.testing.assert_array_equal(np.sort(np.concatenate([*mine[0], *mine[1]])), rows())
    np.testing.assert_array_equal(mine[1][0], [4, 5, 6, 7])


def test_arrays_of_any_structure_stay_aligned() -> None:
    x = {"image": np.arange(20.0).reshape(10, 2), "name": np.array([f"row {row}" for row in range(10)])}
    y, weight = np.arange(10), np.linspace(0, 1, 10)
    first, _ = shards(lambda: (x, y, weight), 2, batch_size=3)
    for inputs, target, weights in first:
        np.testing.assert_array_equal(inputs["image"][:, 0], 2.0 * target.numpy())
        assert [name.decode() for name in inputs["name"].numpy()] == [f"row {row}" for row in target.numpy()]
        np.testing.assert_allclose(weights, weight[target.numpy()], rtol=1e-6)
        assert inputs["image"].dtype == weights.dtype == keras.config.floatx()
    assert isinstance(first.element_spec, tuple)


def test_arrays_train_in_fit_with_validation_and_class_weight() -> None:
    x, y = np.random.default_rng(0).normal(size=(24, 3)), np.arange(24) % 2
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    first, _ = shards(lambda: (x, y), 2, batch_size=4)
    check, _ = shards(lambda: (x, y, None), 2, shuffle=False)
    history = model.fit(
        first, epochs=2, validation_data=check, class_weight={0: 1.0, 1: 2.0}, verbose=0, shuffle=False
    )
    assert len(history.history["val_accuracy"]) == 2
    assert int(model.optimizer.iterations.numpy()) == 2 * 3


def test_an_iterator_is_one_pass_however_long_it_lives() -> None:
    """`fit(steps_per_epoch=...)` keeps one iterator over several epochs; the order must not change within."""
    first, second = shards(rows, 2, batch_size=2, seed=1)
    for _ in range(2):
        seen = []
        for data in (first, second):
            iterator = iter(data)
            seen += [np.asarray(next(iterator)) for _ in range(len(data))]
        assert len(set(np.concatenate(seen))) == 22


def test_seed_follows_set_random_seed_and_rank_0() -> None:
    def order(seed: int, differ: Callable[[int, Any], Any] = lambda _, said: said) -> list[int]:
        keras.utils.set_random_seed(seed)
        with as_rank(1, 2, differ):
            data = shard(rows(), batch_size=4)
        return [int(row) for batch in data for row in batch]

    def rank_0_says_7(rank: int, said: Any) -> Any:
        return {**said, "proposal": 7} if rank == 0 else said

    assert order(1) == order(1) != order(2)
    assert order(1, rank_0_says_7) == order(2, rank_0_says_7)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([np.zeros(4), np.zeros(4)], "several inputs"),
        ((np.zeros(4), np.zeros(5)), "same number of rows"),
        ((np.zeros(4), None, np.zeros(4)), r"\(x, y, sample_weight\)"),
        (np.float32(1), "scalar"),
        (np.array([object(), object()]), "which numpy does not turn"),
        (tf.ragged.constant([[1], [2, 3]]), "RaggedTensor"),
        ((number for number in range(3)), "from_generator"),
        (lambda: iter([1]), "cannot split a generator"),
        (np.zeros(1), "1 rows for 2 ranks"),
    ],
)
def test_what_cannot_be_split_says_how_to_fix_it(data: Any, message: str) -> None:
    with as_rank(0, 2), pytest.raises(ValueError, match=message):
        shard(data)


@pytest.mark.parametrize(
    "arguments",
    [{"batch_size": 0}, {"shuffle": -1}, {"seed": -1}, {"remainder": "pad"}],
)
def test_invalid_arguments_raise(arguments: dict[str, Any]) -> None:
    with as_rank(0, 2), pytest.raises(ValueError, match=next(iter(arguments))):
        shard(rows(), **arguments)


def test_before_init() -> None:
    with pytest.raises(NotInitializedError):
        shard(rows())


def test_another_length_on_one_rank_is_named() -> None:
    def longer(rank: int, said: Any) -> Any:
        if rank != 1:
            return said
        return {**said, "facts": {**said["facts"], "structure and shapes": "int64[24]"}}

    with as_rank(0, 2, longer), pytest.raises(OutOfSyncError, match=r"rank 0 has 'int64\[23\]', rank 1 has"):
        shard(rows())


# --- tf.data --------------------------------------------------------------------------------------------


def unknown_length(dataset: Any) -> Any:
    return dataset.filter(lambda *_: True)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_dataset_elements_are_dealt_out_in_complete_rounds(size: int, known: bool) -> None:
    def make() -> Any:
        dataset = tf.data.Dataset.range(23).shuffle(100, seed=1)
        return dataset if known else unknown_length(dataset)

    for _ in range(2):
        ranks = [batches(data) for data in shards(make, size)]
        assert {len(mine) for mine in ranks} == {23 // size}
        dealt = [int(row) for round_ in zip(*ranks, strict=True) for row in round_]
        np.testing.assert_array_equal(dealt, batches(make())[: len(dealt)])


@pytest.mark.parametrize("known", [True, False])
def test_batched_dataset_gives_whole_batches_even_ragged(known: bool) -> None:
    def make() -> Any:
        dataset = tf.data.Dataset.range(22).map(lambda row: {"x": row, "y": tf.repeat(row, row)})
        dataset = dataset.ragged_batch(4)
        return dataset if known else unknown_length(dataset)

    first, second = (list(data) for data in shards(make, 2))
    assert [element["x"].numpy().tolist() for element in first] == [
        [0, 1, 2, 3],
        [8, 9, 10, 11],
        [16, 17, 18, 19],
    ]
    assert [element["x"].numpy().tolist() for element in second][-1] == [20, 21]
    assert isinstance(first[0]["y"], tf.RaggedTensor)


def test_sharding_before_and_after_batching_give_the_same_global_batches() -> None:
    def together(ranks: list[Any]) -> list[list[int]]:
        return [sorted(np.concatenate(parts)) for parts in zip(*map(batches, ranks), strict=True)]

    whole = tf.data.Dataset.range(24)
    expected = [sorted(batch) for batch in batches(whole.batch(8))]
    assert together(shards(lambda: whole.batch(4), 2)) == expected
    assert together([data.batch(4) for data in shards(lambda: whole, 2)]) == expected


def test_dataset_keeps_all_elements_on_request() -> None:
    first, second = (batches(data) for data in shards(lambda: tf.data.Dataset.range(7), 2, remainder="keep"))
    assert (first, second) == ([0, 2, 4, 6], [1, 3, 5])


def test_infinite_dataset() -> None:
    first, second = shards(lambda: tf.data.Dataset.range(6).repeat(), 2)
    assert [int(row) for row in first.take(4)] == [0, 2, 4, 0]
    assert int(second.cardinality()) == tf.data.INFINITE_CARDINALITY


def test_dataset_reshuffles_in_every_pass_alike() -> None:
    first, second = shards(lambda: tf.data.Dataset.range(20), 2, shuffle=True)
    passes = [(batches(first), batches(second)) for _ in range(2)]
    assert passes[0] != passes[1]
    for mine, theirs in passes:
        assert sorted(mine + theirs) == list(range(20))


def test_shuffling_a_dataset_of_unknown_length_wants_a_buffer() -> None:
    endless = tf.data.Dataset.range(6).repeat()
    with as_rank(0, 2), pytest.raises(ValueError, match="infinite length"):
        shard(endless, shuffle=True)
    first, second = shards(lambda: unknown_length(tf.data.Dataset.range(20)), 2, shuffle=5)
    assert sorted(batches(first) + batches(second)) == list(range(20))


@pytest.mark.parametrize(
    "make",
    [
        lambda d: d.shuffle(10).batch(2).prefetch(1),
        lambda d: tf.data.Dataset.zip((d, d.shuffle(3))).repeat(2),
        lambda d: d.interleave(lambda row: tf.data.Dataset.range(row).shuffle(9)),
        lambda d: tf.data.Dataset.sample_from_datasets([d, d]),
    ],
)
def test_unseeded_shuffle_is_refused(make: Callable[[Any], Any]) -> None:
    dataset = make(tf.data.Dataset.range(20))
    with as_rank(0, 2), pytest.raises(ValueError, match="without a seed"):
        shard(dataset)
    with as_rank(0, 1):
        assert shard(dataset) is dataset


def test_shuffle_is_seeded_by_the_global_seed() -> None:
    tf.random.set_seed(4)
    with as_rank(0, 2):
        shard(tf.data.Dataset.range(20).shuffle(10))


def test_stages_that_answer_out_of_order_are_refused() -> None:
    dataset = tf.data.Dataset.range(20)
    loose = tf.data.Options()
    loose.deterministic = False
    for made in (
        dataset.map(lambda row: row, num_parallel_calls=2, deterministic=False).batch(2),
        dataset.with_options(loose),
    ):
        with as_rank(0, 2), pytest.raises(ValueError, match="out of order"):
            shard(made)
    with as_rank(0, 2):
        shard(dataset.map(lambda row: row, num_parallel_calls=2))


def test_other_seeds_on_one_rank_are_named() -> None:
    def other(rank: int, said: Any) -> Any:
        name = "order (seeds of shuffles)"
        return {**said, "facts": {**said["facts"], name: [[87654321, 4]]}} if rank == 1 else said

    with as_rank(0, 2, other), pytest.raises(OutOfSyncError, match=r"seeds of shuffles.*rank 1 has"):
        shard(tf.data.Dataset.range(9).shuffle(9, seed=3))


def test_dataset_with_fewer_elements_than_ranks() -> None:
    with as_rank(0, 4), pytest.raises(ValueError, match="3 elements for 4 ranks"):
        shard(tf.data.Dataset.range(12).batch(4))


def test_batch_size_is_for_arrays() -> None:
    with as_rank(0, 2), pytest.raises(ValueError, match=r"dataset.batch\(8\)"):
        shard(tf.data.Dataset.range(9), batch_size=8)


# --- keras.utils.PyDataset ------------------------------------------------------------------------------


class Shuffling(keras.utils.PyDataset):
    """Batches of 2 of 14 rows; shuffles at the end of an epoch as Keras's own example does."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.order = np.arange(14)
        self.begun = 0

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        mine = self.order[2 * index : 2 * index + 2]
        return mine[:, None].astype("float32"), mine

    def on_epoch_begin(self) -> None:
        self.begun += 1

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


def test_py_dataset_shares_batches_and_hooks() -> None:
    ranks = shards(lambda: Shuffling(workers=2, max_queue_size=3), 2)
    assert [len(data) for data in ranks] == [3, 3]
    assert (ranks[0].workers, ranks[0].use_multiprocessing, ranks[0].max_queue_size) == (2, False, 3)
    orders = []
    for epoch in range(3):
        seen = []
        for number, data in enumerate(ranks):
            np.random.seed(number)  # ranks' own generators differ
            data.on_epoch_begin()
            seen += [int(row) for index in range(len(data)) for row in data[index][1]]
            data.on_epoch_end()
        assert len(set(seen)) == 12, f"overlap in epoch {epoch}"
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2]
    assert ranks[0].inner.begun == 3


def test_py_dataset_leaves_the_global_generators_alone() -> None:
    data, _ = shards(Shuffling, 2)
    np.random.seed(1)
    random.seed(1)
    expected = np.random.rand(), random.random()
    np.random.seed(1)
    random.seed(1)
    data.on_epoch_end()
    assert (np.random.rand(), random.random()) == expected


@pytest.mark.parametrize("workers", [1, 2])
def test_py_dataset_trains_in_fit(workers: int) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data, _ = shards(lambda: Shuffling(workers=workers), 2)
    model.fit(data, epochs=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 6


def test_py_dataset_rules() -> None:
    kept = shards(Shuffling, 2, remainder="keep")
    assert [len(data) for data in kept] == [4, 3]
    with as_rank(0, 2), pytest.raises(ValueError, match="on_epoch_end"):
        shard(Shuffling(), shuffle=True)
    with as_rank(0, 8), pytest.raises(ValueError, match="7 batches for 8 ranks"):
        shard(Shuffling())
    alone = Shuffling()
    with as_rank(0, 1):
        assert shard(alone) is alone


class Endless(keras.utils.PyDataset):
    @property
    def num_batches(self) -> None:
        return None

    def __getitem__(self, index: int) -> Any:
        return np.array([index])


def test_endless_py_dataset() -> None:
    _, second = shards(Endless, 2)
    assert second.num_batches is None
    assert [int(second[index][0]) for index in range(3)] == [1, 3, 5]


# --- a real world ---------------------------------------------------------------------------------------


def rows_seen(length: int) -> Any:
    """Rows that this rank reads in two passes; another length on rank 1 if `length` is negative."""
    import tfdist

    data = np.arange(abs(length) + (tfdist.rank() if length < 0 else 0))
    shuffled = tfdist.shard(data, batch_size=4)  # no seed: rank 0's draw counts
    return [[batch.numpy().tolist() for batch in shuffled] for _ in range(2)]


@on(("tf", 2))
def test_ranks_of_a_world_agree_on_the_order(world: World) -> None:
    passes = list(zip(*world.call(rows_seen, 21), strict=True))
    for mine, theirs in passes:
        together = [row for batch in [*mine, *theirs] for row in batch]
        assert len(set(together)) == len(together) == 20
        assert [len(batch) for batch in mine] == [len(batch) for batch in theirs] == [4, 4, 2]
    assert passes[0] != passes[1]


@on(("tf", 2))
def test_ranks_of_a_world_with_other_data_all_raise(world: World) -> None:
    for outcome in world.outcomes(rows_seen, -21):
        assert outcome.kind == "OutOfSyncError"
        assert "rank 1 has 'int64[22]'" in str(outcome.error)
