"""`DistributedOptimizer`: a Keras optimizer that applies the gradients of all ranks.

It is a transparent proxy (wrapt.ObjectProxy) around the user's optimizer: attributes, class, configuration,
variables and saved files are the inner optimizer's, so `model.save` writes a plain Adam that plain Keras
loads, stock callbacks find what they look for, and no method of Keras has to be imitated. Only `apply` and
`apply_gradients` differ: they combine gradients over the ranks first. Clipping, weight decay, moving averages
and loss scaling live in the inner `apply` and therefore act on the global gradient.

Horovod forged a subclass from the optimizer's `__dict__` and overrode hooks that Keras 3 no longer calls:
every rank silently trained alone. A proxy has no such seam.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
import wrapt

from tfdist import joining, joint_step, keras_compat, world
from tfdist.accumulation import PassAccumulator
from tfdist.collectives.base import ReduceOp
from tfdist.compression import Compression
from tfdist.errors import TfdistError
from tfdist.gradients import DEFAULT_BUCKET_BYTES, GradientReducer
from tfdist.reduction_arguments import make_reducer
from tfdist.strategies import choice
from tfdist.variables import array_of, broadcast_model


class DistributedOptimizer(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """Wraps a Keras optimizer so that every update uses the gradients of all ranks.

    Every rank must make the same sequence of updates. Each update moves 2(N-1)/N·K bytes per rank for K bytes
    of gradients (ring all-reduce). With one rank it updates as the inner optimizer does, except that duplicate
    rows of sparse gradients are summed first (see `tfdist.gradients`).

    Args:
        optimizer: a `keras.optimizers.Optimizer`, or the name of one.
        name: prefix of the collectives' names; equal on all ranks.
        device_dense: device for dense collectives.
        device_sparse: device for sparse collectives.
        compression: `tfdist.Compression.none`, `.fp16` or `.bf16`, for the bytes on the wire; Horovod's Gloo
            has no sum of bfloat16, so there `.bf16` costs precision and saves nothing.
        sparse_as_dense: reduce embeddings' gradients as whole tables.
        gradient_predivide_factor: with `op=tfdist.Average`, divide by it before the sum and multiply by
            factor/size after the sum, against overflow of small floats.
        op: `tfdist.Average` (equal to one process whose loss is a mean over the global batch), `tfdist.Sum`,
            or `tfdist.Adasum` (Horovod engine only).
        backward_passes_per_step: passes to accumulate on the rank before one reduction and one update; in
            `fit()` each counts by its samples. Schedules, moving averages and `iterations` advance per update.
        average_aggregated_gradients: whether accumulated passes are averaged. Default True, so that k passes
            equal one k-times batch; Horovod's default is False.
        num_groups: older name of an integer `groups`.
        groups: None (buckets of `bucket_bytes`), a number of buckets, or a list of lists of variables.
        process_set: `tfdist.ProcessSet` to reduce over; None for the whole world.
        scale_local_gradients: whether gradients of variables registered with `register_local_var` are divided
            by the number of ranks.
        bucket_bytes: bytes per collective when `groups` is None.
        last_window: what becomes of passes at the end of an epoch that are fewer than `backward_passes_per_step`.
            "apply": `fit()` makes an update of them, before validation, weighed by what they hold. "carry": the
            next epoch, or the next `fit()`, goes on with them. A loop of your own calls `apply_last_window`, or
            `tfdist.join`, which applies unless they are carried. When a rank stops training, or fails, before the
            end of an epoch, the passes since the last update are dropped on all ranks.

    Raises:
        NotInitializedError: `tfdist.init()` was not called.
        TypeError: `optimizer` is no Keras 3 optimizer, or is wrapped already.
        ValueError: an argument has no meaning here; the message says which and why.

    Example:
        >>> import keras, tfdist
        >>> tfdist.init()
        >>> optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(1e-3))
        >>> isinstance(optimizer, keras.optimizers.Adam)
        True

    Reference: Sergeev and Del Balso 2018, "Horovod: fast and easy distributed deep learning in TensorFlow".
    """

    def __init__(
        self,
        optimizer: Any,
        name: str | None = None,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        op: ReduceOp = ReduceOp.AVERAGE,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = True,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[Any]] | None = None,
        process_set: Any = None,
        scale_local_gradients: bool = True,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        last_window: str = "apply",
    ) -> None:
        here = world.current()
        inner = _keras_optimizer(optimizer)
        if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
            raise ValueError(
                f"backward_passes_per_step must be an integer >= 1; received {backward_passes_per_step!r}."
            )
        if last_window not in ("apply", "carry"):
            raise ValueError(f'last_window must be "apply" or "carry"; received {last_window!r}.')
        _refuse_double_accumulation(inner, backward_passes_per_step)
        super().__init__(inner)
        reducer = make_reducer(
            name or "DistributedOptimizer",
            op=op,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set,
            device_dense=device_dense,
            device_sparse=device_sparse,
            scale_local_gradients=scale_local_gradients,
            bucket_bytes=bucket_bytes,
        )
        self._self_reducer = reducer
        self._self_strategy = choice.make(here.strategy, reducer, reducer.group or here.everyone)
        self._self_strategy.refuse({"backward_passes_per_step": backward_passes_per_step})
        self._self_accumulator = PassAccumulator(
            backward_passes_per_step, average=average_aggregated_gradients
        )
        self._self_accumulators: dict[int, PassAccumulator] = {}  # of each device
        self._self_carries = last_window == "carry"
        self._self_last_update: Any = None
        self._self_loop = joining.LoopSteps(self._close_in_loop)
        self._self_reduced = False
        self._self_variables: list[Any] = []
        self._self_gathered: dict[int, Any] = {}
        if inner.built:
            self._take_over(inner)

    @property
    def inner_optimizer(self) -> Any:
        """The wrapped optimizer; under `LossScaleOptimizer` the one that it wraps in turn, as callbacks expect."""
        inner = self.__wrapped__
        return inner.inner_optimizer if isinstance(inner, keras.optimizers.LossScaleOptimizer) else inner

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the optimizer's variables, as the strategy divides them among the ranks."""
        self._self_strategy = self._self_strategy.settle(self.__wrapped__, variables)
        self._self_strategy.build(self.__wrapped__, variables)
        self._self_variables = list(variables)

    def _take_over(self, inner: Any) -> None:
        """Divides the state of an optimizer that has trained before, as one that was loaded."""
        variables = list(inner._trainable_variables)
        self._self_strategy = self._self_strategy.settle(inner, variables)
        if not self._self_strategy.divides_state:
            return
        values = [array_of(variable) for variable in inner.variables]
        keras_compat.unbuild(inner)
        self.build(variables)
        self._self_strategy.restore(inner.variables, values)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Puts moving averages into the variables, where the optimizer keeps them; every rank calls it."""
        self._self_strategy.finalize(self.__wrapped__, var_list)

    def save_own_variables(self, store: Any) -> None:
        """What `model.save` calls. Where ranks divide the state, all of them call it, and the first writes."""
        self.save_through(self.__wrapped__, store, self.__wrapped__.save_own_variables)

    def load_own_variables(self, store: Any) -> None:
        """What `keras.models.load_model` calls, on every rank."""
        self.load_through(self.__wrapped__, store, self.__wrapped__.load_own_variables)

    def save_through(self, outer: Any, store: Any, write: Callable[[Any], None]) -> None:
        """Writes the state of `outer`, the inner optimizer or one around this; `write` does it for one rank."""
        if not self._self_strategy.divides_state:
            write(store)
            return
        with self.state_of_all_ranks(outer):
            for place, variable in enumerate(outer.variables):
                store[str(place)] = self._self_gathered[id(variable)]

    def load_through(self, outer: Any, store: Any, read: Callable[[Any], None]) -> None:
        """Reads the state of `outer`; `read` does it for one rank."""
        if not self._self_strategy.divides_state or len(store.keys()) != len(outer.variables):
            read(store)
            return
        values = [store[str(place)] for place in range(len(outer.variables))]
        self._self_strategy.restore(outer.variables, values)

    @contextlib.contextmanager
    def state_of_all_ranks(self, outer: Any) -> Iterator[bool]:
        """Inside, the rank that writes files has all of the state of `outer`, gathered once; all ranks call it.

        Yields:
            Whether this rank writes: where ranks divide the state, the first does.
        """
        strategy = self._self_strategy
        if not strategy.divides_state or self._self_gathered:
            yield True
            return
        values = strategy.gather(outer.variables)
        self._self_gathered = {
            id(variable): value for variable, value in zip(outer.variables, values, strict=True)
        }
        try:
            yield world.rank() == strategy.group.ranks[0]
        finally:
            self._self_gathered = {}
            strategy.written()

    # AutoGraph would rewrite this Python, which decides everything while tracing, for nothing.
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Combines `grads` over the ranks, then lets the inner optimizer apply them; every rank calls it.

        Args:
            grads: this rank's gradients: tensors, `tf.IndexedSlices` or None, one per variable.
            trainable_variables: the variables; may be omitted once the optimizer is built.
        """
        return self._apply(grads, trainable_variables, self.__wrapped__.apply)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply_gradients(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> Any:
        """`apply` for (gradient, variable) pairs.

        Returns:
            The inner optimizer's iteration counter.
        """
        gradients, variables = zip(*grads_and_vars, strict=True)
        self._apply(
            gradients,
            variables,
            lambda reduced, variables: self.__wrapped__.apply_gradients(zip(reduced, variables, strict=True)),
        )
        return self.__wrapped__._iterations

    def _apply(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        inner: Callable[[Sequence[Any], Sequence[Any]], Any],
    ) -> Any:
        if self._self_reduced:
            return inner(gradients, variables)  # type: ignore[arg-type]
        if keras_compat.captured(self, gradients, variables):
            return None
        return self.update_through(self.__wrapped__, gradients, variables, inner)

    def update_through(
        self,
        outer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        apply: Callable[[Sequence[Any], Sequence[Any]], Any],
    ) -> Any:
        """Reduces, then applies with `apply`, in which this wrapper's own `apply` no longer reduces.

        Args:
            outer: the optimizer whose update it is: the inner one, or a LossScaleOptimizer around this one.
            gradients: this rank's gradients.
            variables: what they belong to; None for those that `outer` was built with.
            apply: applies reduced gradients to variables.
        """
        if variables is None:
            variables = self._self_variables or outer._trainable_variables
        variables = list(variables)
        if self._self_strategy.places_replicas():
            self._update_replica(outer, gradients, variables, apply)
            return None
        step = joint_step.current()
        if step is None and (self._self_reducer.group or world.current().everyone).size > 1:
            return self._self_loop.step(
                gradients, lambda given: self.update_through(outer, given, variables, apply)
            )
        # Variables can't be made inside the branches of a graph.
        if not outer.built:
            (self if outer is self.__wrapped__ else outer).build(variables)

        self._note_window(outer, variables, apply)
        return self._self_accumulator.add(gradients, variables, self._flush(outer, variables, apply))

    def _note_window(self, outer: Any, variables: Sequence[Any], apply: Any) -> None:
        """Lets the end of an epoch find what is accumulated."""
        if self._self_accumulator.passes == 1:
            return
        self._self_last_update = outer, variables, apply
        GradientReducer.reductions += 1  # an eager pass that only waits is no step without the other ranks
        step = joint_step.current()
        if step is not None and all(each is not self for each in step.windows):
            step.windows.append(self)

    def _flush(self, outer: Any, variables: Sequence[Any], apply: Any) -> Callable[[list[Any], Any], Any]:
        """What reduces and applies a window in the current step."""
        step = joint_step.current()

        def apply_reduced(reduced: Sequence[Any], chosen: Sequence[Any]) -> Any:
            with self._already_reduced():
                if step is not None:
                    return step.update(lambda: apply(reduced, chosen))
                return apply(reduced, chosen)

        return lambda window, share: self._self_strategy.update(
            window, variables, apply_reduced, optimizer=outer, weighed_by=share
        )

    @property
    def passes_held(self) -> int:
        """Passes of this rank that wait for an update; 0 outside a window."""
        accumulators = [self._self_accumulator, *self._self_accumulators.values()]
        return max(each.passes_held for each in accumulators)

    def close_window(self, passes: int, *, carries: bool | None = None) -> None:
        """Ends an epoch, eagerly, as `last_window` says; every rank calls it in the same step.

        Args:
            passes: the largest of all ranks' `passes_held`.
            carries: in place of `last_window`.
        """
        if self._self_last_update is None:
            return
        outer, variables, apply = self._self_last_update
        if self._self_carries if carries is None else carries:
            for each in [self._self_accumulator, *self._self_accumulators.values()]:
                each.carry(passes)
        elif self._self_strategy.places_replicas():
            self._self_strategy.on_each_device(
                outer,
                variables,
                lambda chosen, number: self._self_accumulators[number].close(
                    passes, self._flush(outer, chosen, apply)
                ),
            )
        else:
            self._self_accumulator.close(passes, self._flush(outer, variables, apply))

    def apply_last_window(self) -> None:
        """Makes an update of accumulated passes that are fewer than `backward_passes_per_step`, if there are any.

        For the end of an epoch in a loop of your own, outside any tf.function; `fit()` needs none of it. Every
        rank calls it.

        Example:
            >>> import keras, tensorflow as tf, tfdist
            >>> tfdist.init()
            >>> weight = keras.Variable(1.0)
            >>> optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.5), backward_passes_per_step=4)
            >>> optimizer.apply([tf.constant(1.0)], [weight])
            >>> optimizer.apply_last_window()
            >>> float(weight)
            0.5
        """
        if not self._self_loop.is_used:
            self.close_window(self.passes_held, carries=False)
            return
        self._close_in_loop(carries=False)

    def _close_in_loop(self, *, carries: bool | None = None) -> None:
        """`close_window` outside `fit()`, in a world of several ranks."""
        if self._self_accumulator.passes == 1:
            return
        control = world.current().control
        assert control is not None
        group = self._self_reducer.group or world.current().everyone
        held = control.exchange(
            f"last window of {self._self_reducer.name} on ranks {list(group.ranks)}", self.passes_held,
            ranks=group.ranks, describe="the last window of accumulated passes",
        )  # fmt: skip
        with self._self_loop.closing():
            self.close_window(max(held), carries=carries)

    def _update_replica(
        self,
        outer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        apply: Callable[[Sequence[Any], Sequence[Any]], Any],
    ) -> None:
        """`update_through` in a replica: sums over the replicas, then each device accumulates and applies alone."""
        if not outer.built:
            (self if outer is self.__wrapped__ else outer).build(variables)

        self._note_window(outer, variables, apply)

        def update(total: Sequence[Any], chosen: Sequence[Any], device: int) -> None:
            if device not in self._self_accumulators:
                self._self_accumulators[device] = self._self_accumulator.another()
            self._self_accumulators[device].add(total, chosen, self._flush(outer, chosen, apply))

        self._self_strategy.run(gradients, variables, outer, update)

    @contextlib.contextmanager
    def _already_reduced(self) -> Iterator[None]:
        self._self_reduced = True
        try:
            yield
        finally:
            self._self_reduced = False

    def register_local_var(self, variable: Any) -> None:
        """Leaves a variable's gradient to its rank: it is not combined with the other ranks'."""
        if self._self_strategy.places_replicas():
            raise TfdistError(
                f"Strategy {world.current().strategy} gives every replica the same gradients, so no variable can "
                'be local. Use strategy="ring".'
            )
        if self._self_strategy.divides_state:
            raise TfdistError(
                f"Strategy {world.current().strategy} has one rank update each variable, and gives the others its "
                'value, so no variable can be local. Use strategy="ring".'
            )
        self._self_reducer.local_variables.add(id(variable))

    def __repr__(self) -> str:
        return f"<DistributedOptimizer of {self.__wrapped__!r}>"


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a Keras model and wraps its optimizer, slots and iterations kept, to go on training on all ranks.

    Each rank that calls it reads the file. Files written by `model.save` under a `DistributedOptimizer` and by
    plain Keras are the same.

    Args:
        filepath: what `keras.models.load_model` takes.
        custom_optimizers: optimizer classes that Keras doesn't know.
        custom_objects: names and classes or functions that Keras doesn't know.
        compression: passed to `DistributedOptimizer`.
        legacy_opts: only False: Keras 3 has no legacy optimizers.

    Returns:
        The compiled model.

    Raises:
        ValueError: the file holds no compiled optimizer, or `legacy_opts` is set.

    Example:
        >>> import keras, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(tfdist.DistributedOptimizer("adam"), "mse")
        >>> model.save("/tmp/model.keras")
        >>> model = tfdist.load_model("/tmp/model.keras")
    """
    if legacy_opts:
        raise ValueError("legacy_opts=True: Keras 3 has no legacy optimizers; leave it False.")
    objects = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects or None)
    if getattr(model, "optimizer", None) is None:
        raise ValueError(
            f"{filepath} holds no compiled model, so there is no optimizer to wrap. Load it with "
            "keras.models.load_model and compile it with tfdist.DistributedOptimizer."
        )
    model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    model.train_function = None
    return model


def broadcast_state(model: Any, root_rank: int = 0, *, skip: Sequence[Any] = ()) -> None:
    """`tfdist.variables.broadcast_model`, and the parts of a divided state that the root has just loaded.

    Args:
        model: a built `keras.Model`.
        root_rank: the rank whose state all get.
        skip: variables that stay as they are on each rank.
    """
    broadcast_model(model, root_rank, skip=skip)
    for wrapper in _wrappers(model.optimizer) if getattr(model, "optimizer", None) is not None else ():
        if wrapper is not None:
            wrapper._self_strategy.spread(model.optimizer.variables, root_rank)


def is_distributed(optimizer: Any) -> bool:
    """Whether every update through `optimizer` is combined over the ranks."""
    wrappers = _wrappers(optimizer)
    return bool(wrappers) and None not in wrappers


def divides_state(optimizer: Any) -> bool:
    """Whether ranks keep different parts of the optimizer's slots, so that saving takes all of them."""
    return any(each is not None and each._self_strategy.divides_state for each in _wrappers(optimizer))


def served_loss(optimizer: Any) -> Any:
    """Computes the loss of all ranks' outputs, where the strategy has one rank do so; None elsewhere."""
    for wrapper in _wrappers(optimizer):
        if wrapper is not None and wrapper._self_strategy.served_loss is not None:
            return wrapper._self_strategy.served_loss
    return None


def leave(optimizer: Any, failure: str) -> bool:
    """Notes that `fit()` has failed, here or, with an empty text, on another rank.

    Returns:
        Whether the others were waiting for this rank to save with them, and know now.
    """
    wrappers = [wrapper for wrapper in _wrappers(optimizer) if wrapper is not None]
    told = [wrapper._self_strategy.leave(failure) for wrapper in wrappers]  # by each of them
    return any(told)


def has_reduced(optimizer: Any) -> bool:
    """Whether an update through `optimizer` has combined gradients before."""
    return any(wrapper._self_reducer.calls for wrapper in _wrappers(optimizer) if wrapper is not None)


def ranks_of(optimizer: Any) -> list[int]:
    """World ranks that updates through `optimizer` are combined over; all of them without a wrapper."""
    everyone = world.current().everyone
    groups = [each._self_reducer.group or everyone for each in _wrappers(optimizer) if each is not None]
    return list(max(groups, key=lambda group: group.size, default=everyone).ranks)


def local_variables(optimizer: Any) -> set[int]:
    """Keys (`id`) of the variables whose gradients stay on their rank."""
    found: set[int] = set()
    for wrapper in _wrappers(optimizer):
        if wrapper is not None:
            found |= wrapper._self_reducer.local_variables
    return found


def _wrappers(optimizer: Any) -> list[DistributedOptimizer | None]:
    """The wrappers that updates of `optimizer` go through; None for each part that has none."""
    parts = keras_compat.innermost(optimizer, until=DistributedOptimizer)
    return [each if isinstance(each, DistributedOptimizer) else None for each in parts]


def _keras_optimizer(optimizer: Any) -> Any:
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    if any(wrapper is not None for wrapper in _wrappers(optimizer)):
        raise TypeError(
            "The optimizer is wrapped in a DistributedOptimizer already; wrapping it twice would combine "
            "gradients twice. Wrap it once."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        hint = ""
        if type(optimizer).__module__.startswith(("tf_keras", "tensorflow.python.keras", "keras.src.legacy")):
            hint = " It comes from Keras 2: take the optimizer of the same name from keras.optimizers."
        elif isinstance(optimizer, type):
            hint = " It is a class: pass an instance."
        raise TypeError(
            "DistributedOptimizer wraps an instance of keras.optimizers.Optimizer or the name of one; received "
            f"{optimizer!r} of type {type(optimizer).__module__}.{type(optimizer).__qualname__}.{hint}"
        )
    return optimizer


def _refuse_double_accumulation(optimizer: Any, passes: int) -> None:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = getattr(inner, "gradient_accumulation_steps", None)
    if passes > 1 and steps:
        raise ValueError(
            f"Gradients would be accumulated twice: backward_passes_per_step={passes} here and "
            f"gradient_accumulation_steps={steps} in the Keras optimizer. Use one; backward_passes_per_step "
            "communicates once per window."
        )
