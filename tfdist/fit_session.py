"""One `fit()` of all ranks: they begin, step, measure, decide and end together, or fail together.

Problem: `fit()` is a loop on each rank. A rank may have fewer batches than the others, its callback may stop
training or raise; the others would then wait in their next all-reduce for a rank that does not come.

Solution: ranks meet at fixed points, and a rank that has nothing to contribute still comes.

    begin ──> step, step, … ──> measured ──> decided ──┐ ──> ended
                ▲                                      │
                └──────────── next epoch ──────────────┘

Steps are met in the all-reduce of gradients (`joint_step`): a rank without data joins with an idle step, which
counts for nothing, until no rank has data left; a flag in the same message says that a rank stops or has failed.
The other points are exchanges over the control channel: `begin` compares what must be equal, `measured` adds up
metrics, `decided` makes all ranks stop after the same epoch. A rank that fails comes to the point where the
others wait, and tells them; all of them raise there, and can train again afterwards.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from tfdist import metric_merging, world
from tfdist.errors import CollectiveError, OutOfSyncError, PeerFailedError
from tfdist.joint_step import JointSteps
from tfdist.metric_merging import Measured
from tfdist.optimizer import leave, ranks_of

_GRACE = 3.0
"""Seconds in which the other ranks fail, too, if what failed here fails everywhere."""


class FitSession:
    """This rank's part in one `fit()`.

    Args:
        model: the model.
        steps: its joint steps.
        idle_step: takes part in one step without data.
        guard: runs something in which ranks meet.

    Attributes:
        callbacks: the list of callbacks that this `fit()` calls.
        ranks: ascending world ranks that train this model.
    """

    def __init__(
        self,
        model: Any,
        steps: JointSteps,
        idle_step: Callable[[], None],
        guard: Callable[[Callable[[], None]], Any],
    ) -> None:
        self.callbacks: Any = None
        self._model = model
        self._steps = steps
        self._idle_step = idle_step
        self._guard = guard
        self.ranks = ranks_of(model.optimizer)
        self._stepping = False
        self._over = False
        self._target: int | None = None  # steps of an epoch, where all ranks know theirs
        self._failure = ""
        self._count = 0

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank writes files and shows progress for all that train this model."""
        return world.rank() == self.ranks[0]

    # The points where ranks meet, in order.

    def begin(self, params: dict[str, Any]) -> None:
        """Compares what must be equal, and learns how many steps each rank will make."""
        execution = int(self._model.steps_per_execution)
        mine = {
            "steps": params.get("steps"),
            "epochs": params.get("epochs"),
            "steps_per_execution": execution,
        }
        answers = self._meet("begin", mine)
        for name in ("epochs", "steps_per_execution"):
            if len({answer[name] for answer in answers}) > 1:
                self._over = True
                listed = ", ".join(f"{answer[name]} on rank {r}" for r, answer in self._by_rank(answers))
                raise OutOfSyncError(f"All ranks must call fit() with the same {name}; received {listed}.")
        steps = [answer["steps"] for answer in answers]
        if None not in steps:
            self._target = -(-max(steps) // execution) * execution

    def begun(self, initial_epoch: int | None) -> int | None:
        """Learns from rank 0, whose callbacks alone read checkpoints, at which epoch training resumes."""
        answers = self._meet("begun", initial_epoch)
        return None if answers[0] is None else int(answers[0])

    def begin_epoch(self) -> None:
        """Starts the count of steps."""
        self._steps.begin_epoch()
        self._count = 0
        self._stepping = True

    @property
    def execution(self) -> int:
        """Number of the call of the train function in this epoch, the same on all ranks."""
        return self._count // int(self._model.steps_per_execution)

    def after_step(self) -> None:
        """Learns what a call of the train function came to; makes this rank stop or raise with the others."""
        outcome = self._steps.outcome
        self._count = outcome.count
        if outcome.failed:
            self._finish_steps()
            self._meet("failed", None)
        if outcome.stop:
            self._model.stop_training = True

    def finish_steps(self) -> None:
        """Joins the steps of ranks that still have data; idempotent within an epoch."""
        if self._stepping:
            if self._model.stop_training:
                self._steps.say(stop=True, failed=False)
            self._finish_steps()
            if self._steps.outcome.failed:
                self._meet("failed", None)
            self._close_windows()
            if self._steps.outcome.stop:
                self._model.stop_training = True

    def _close_windows(self) -> None:
        """Ends the last window of accumulated passes; steps in which somebody stopped update nothing."""
        windows = list(self._steps.windows)
        if not windows:
            return
        answers = self._meet("last window", [each.passes_held for each in windows])
        self._steps.say(stop=False, failed=False)  # of a stop after the last step all ranks learn later

        def close() -> None:
            for each, held in zip(windows, zip(*answers, strict=True), strict=True):
                with self._steps.step(None, closes=True):
                    each.close_window(max(held))

        self._guard(close)

    def measured(self, part: str, logs: dict[str, Any], mine: Measured) -> list[str]:
        """Makes `logs` those of all ranks' data.

        Args:
            part: `training` or `validation`.
            logs: changed in place.
            mine: this rank's measurements, whose logs are those to merge.

        Returns:
            Names of metrics for which a weighted mean had to do.
        """
        answers = self._meet(f"{part} metrics", mine.to_payload())
        return metric_merging.merge_into(logs, self._model, answers)

    def decided(self, epoch: int) -> None:
        """Ends training on all ranks after this epoch if one of them wants to."""
        stops = self._meet(f"end of epoch {epoch + 1}", bool(self._model.stop_training))
        self._model.stop_training = any(stops)

    def end(self) -> None:
        """Leaves together."""
        self._meet("end", None)
        self._over = True

    # Failure.

    def fail(self, error: Exception) -> None:
        """Tells the others, where they wait for this rank, that it has left with `error`."""
        if self._over or isinstance(error, CollectiveError | PeerFailedError):
            leave(self._model.optimizer, "")
            return  # the others know
        self._failure = _in_a_line(error)
        control = world.current().control
        if not (self._stepping and self._steps.is_midway):
            if leave(self._model.optimizer, self._failure):
                return
            # A model that is refused must make no step, and is so on all ranks as a rule.
            joins = not isinstance(error, OutOfSyncError)
            if joins and self._comes_to_the_others():
                return
            with contextlib.suppress(Exception):
                self._meet("failed", None, timeout=_GRACE)
                return
        # The others wait where this rank can't come, as in the middle of a step: the world ends for all.
        if control is not None:
            control.close(error=f"it left fit() with {self._failure}")

    def _comes_to_the_others(self) -> bool:
        try:
            if self._stepping:
                self._steps.say(stop=False, failed=True)
                self._finish_steps()
            self._meet("failed", None)
        except Exception:  # as when its model is not built yet
            return False
        return True

    # Steps without data.

    def _finish_steps(self) -> None:
        if not self._steps_are_over():
            with self._model_state_kept():
                while not self._steps_are_over():
                    self._idle_step()
                    self._count = self._steps.outcome.count
        self._stepping = False

    def _steps_are_over(self) -> bool:
        outcome = self._steps.outcome
        if outcome.active == 0 or (self._target is not None and outcome.count >= self._target):
            return True
        ends_execution = outcome.count % int(self._model.steps_per_execution) == 0
        return (outcome.stop or outcome.failed) and ends_execution

    @contextlib.contextmanager
    def _model_state_kept(self) -> Iterator[None]:
        """Restores what a forward pass on no data would change: metrics, moving statistics, random states."""
        kept = [(variable, variable.numpy()) for variable in _changed_by_forward_pass(self._model)]
        try:
            yield
        finally:
            for variable, value in kept:
                variable.assign(value)

    # Meeting.

    def _meet(self, point: str, value: Any, *, timeout: float | None = None) -> list[Any]:
        control = world.current().control
        if control is None:
            return [value]
        answers = control.exchange(
            f"fit on ranks {self.ranks}",
            {"point": point, "value": value, "failure": self._failure},
            ranks=self.ranks,
            timeout=timeout,
            describe=f"{point} of fit()",
        )
        failures = {rank: answer["failure"] for rank, answer in self._by_rank(answers) if answer["failure"]}
        if failures:
            self._over = True
            if not self._failure:
                raise PeerFailedError(_failed(failures, world.rank()))
            return []
        try:
            require_same_point({rank: answer["point"] for rank, answer in self._by_rank(answers)})
        except OutOfSyncError:
            self._over = True
            raise
        return [answer["value"] for answer in answers]

    def _by_rank(self, answers: list[Any]) -> list[tuple[int, Any]]:
        return list(zip(self.ranks, answers, strict=True))


def require_same_point(points: dict[int, str]) -> None:
    """Raises OutOfSyncError if ranks have met at different points; `points` are those by rank."""
    if len(set(points.values())) > 1:
        raise OutOfSyncError(
            "All ranks must go through the same fit(); received "
            + ", ".join(f"{point!r} on rank {rank}" for rank, point in points.items())
            + ". Give all ranks the same epochs, validation data and validation_freq."
        )


def _failed(failures: dict[int, str], own: int) -> str:
    listed = "; ".join(f"rank {rank} with {text}" for rank, text in failures.items())
    return (
        f"rank {own} leaves fit() because another rank did: {listed}. No rank has made the step in which this "
        "happened. Mend the error on that rank."
    )


def _in_a_line(error: Exception) -> str:
    """What went wrong, without the stack traces that TensorFlow puts into its messages."""
    lines = str(error).splitlines() or [""]
    causes = [line for line in lines if re.match(r"[A-Za-z_.]*(Error|Exception): ", line)]
    return f"{type(error).__name__}: {(causes or lines)[0]}"


def _changed_by_forward_pass(model: Any) -> list[Any]:
    """Variables that a train step changes beside weights and optimizer, of layers that don't share them."""
    frozen = {id(variable) for layer in model._flatten_layers() for variable in layer._trainable_variables}
    shared = {
        id(variable)
        for layer in model._flatten_layers()
        if getattr(layer, "synchronized_over_ranks", False)
        for variable in layer.variables
    }
    changed = [*model.non_trainable_variables, *model.metrics_variables]
    return [variable for variable in changed if id(variable) not in frozen | shared]
