"""`init` and `shutdown`: resolve who we are, meet the other ranks, choose engine and strategy, hook Keras.

Everything is decided here, once; nothing below reads the environment again. `init` leaves TensorFlow's
context uninitialised, so that device settings made after it (`set_visible_devices`, memory growth, thread
counts), as every Horovod script makes them, still work.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import types
from collections.abc import Iterator, Mapping, Sequence

from tfdist import cluster, fit_hook, joint_step, keras_compat, resources, world
from tfdist.asynchronous import servers
from tfdist.asynchronous.fit_hook import AsynchronousHook
from tfdist.asynchronous.fleet import Fleet
from tfdist.collectives import select
from tfdist.collectives.base import Engine, Group
from tfdist.control import ControlPlane
from tfdist.control.watchdog import Watchdog
from tfdist.errors import BackendUnavailableError, TfdistError
from tfdist.last_windows import OneRankHook
from tfdist.placed_hook import PlacedHook
from tfdist.process_sets import ProcessSet, add_process_set, registered, require_distinct
from tfdist.strategies import asynchronous_roles, choice, devices, placed
from tfdist.strategies.asynchronous_roles import Roles

BACKENDS = ("auto", "tf", "horovod", "single")
DEFAULT_TIMEOUT = 300.0


def init(
    comm: None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    backend: str | None = None,
    strategy: str | None = None,
    timeout: float | None = None,
) -> None:
    """Starts this process's part of the world; every rank calls it, once, at the start of the script.

    Without a launcher the world has one rank and the script trains as it would without tfdist. Calling it
    again while initialised does nothing.

    Args:
        comm: kept for Horovod's signature; only None is accepted (use `process_sets` for subsets).
        process_sets: `tfdist.ProcessSet` objects to register, the same on all ranks. "dynamic" prepares Horovod
            over MPI for `tfdist.add_process_set` later; the other engines need no preparation.
        backend: `auto` (Horovod if it is installed and usable on every rank, else TensorFlow), `tf` or
            `horovod`. Default: the launcher's `--backend`, else `auto`.
        strategy: `ring`; `parameter_server(servers=k, dedicated=False, server_loss=False)` with k = 1 by default;
            `async_parameter_server(servers=k, max_staleness=None)`: rank 0 runs the script, the next k ranks keep
            the variables, the others compute; in those two `init` serves until the job ends, and never returns;
            `mirrored(devices=k)`, `multi_worker_mirrored(devices=k)` or `central_storage(devices=k)`, with k
            devices of each process, by default all; or `auto`, which takes the one that is fastest by
            `tfdist.cost` and fits into memory, and prints why.
            Default: the launcher's `--strategy`, else `ring`.
        timeout: bound in seconds of every wait for another rank, start-up included. Default: the launcher's
            `--timeout`, else 300.

    Raises:
        LauncherError: contradictory launcher variables, or ranks that disagree about the world.
        CollectiveTimeoutError: a rank did not start within `timeout`; the message names it.
        BackendUnavailableError: the backend cannot run on some rank; the message names rank and fix.
        TfdistError: another argument is wrong; the message says which and why.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> tfdist.rank(), tfdist.size()
        (0, 1)
    """
    if world.is_initialized():
        return
    if comm is not None:
        raise TfdistError(
            f"tfdist.init() takes no communicator, received comm={comm!r}. Start the ranks you want with the "
            "launcher, and use `tfdist.ProcessSet` for subsets of ranks."
        )
    environ = os.environ
    backend = _backend(backend, environ.get("TFDIST_BACKEND"))
    timeout = _seconds(timeout, environ.get("TFDIST_TIMEOUT"))
    _require_keras_on_tensorflow()
    sets = _process_sets(process_sets)

    spec = cluster.from_environment(environ)
    everyone = Group(tuple(range(spec.size)))
    strategy = _strategy(strategy, environ.get("TFDIST_STRATEGY"), spec.size)
    require_distinct([process_set.ranks for process_set in sets], size=spec.size)
    roles = asynchronous_roles.roles_of(strategy, spec.size)
    if roles is not None:
        _init_asynchronous(spec, roles, strategy, backend=backend, timeout=timeout)
        return
    is_placed = choice.places_replicas(strategy)
    if is_placed and spec.size > 1:
        backend = _backend_of_placed(backend, strategy)
    if spec.size == 1:
        engine = select.choose(spec, None, backend=backend, timeout=timeout)
        control, watchdog = None, None
    else:
        facts = {
            "strategy": strategy,
            "process_sets": select.DYNAMIC if process_sets == "dynamic" else [each.ranks for each in sets],
        }
        spec, control = _meet(spec, facts, backend=backend, timeout=timeout)
        try:
            engine = select.choose(spec, control, backend=backend, timeout=timeout)
        except BaseException as error:
            control.close(error=f"{type(error).__name__}: {error}")
            raise
        control.on_failure(engine.abort)
        watchdog = Watchdog(control, engine.abort, timeout=timeout)
    count: int | None = choice.option(strategy, "devices")
    _configure_devices(spec, environ, count or 1)
    dedicated = choice.dedicated(strategy) if spec.size > 1 else 0
    world.install(
        world.World(
            spec, engine, control, strategy, timeout, everyone, watchdog, dedicated,
            devices=devices.prepare_devices(count) if is_placed else 1, is_placed=is_placed,
        )
    )  # fmt: skip
    if is_placed:
        keras_compat.install_for_replicas(PlacedHook())
    elif spec.size > 1:
        keras_compat.install(fit_hook.FitHook())
    else:
        keras_compat.install_for_one_rank(OneRankHook())
    if spec.size > 1:
        _announce_crashes()
    atexit.register(shutdown)
    for process_set in sets:
        add_process_set(process_set)


def _init_asynchronous(
    spec: cluster.ClusterSpec, roles: Roles, strategy: str, *, backend: str, timeout: float
) -> None:
    """Starts the world of a strategy in which one rank runs the script; on the others it does not return."""
    servers.refuse_backend(backend)
    expendable = spec.rank in roles.workers
    spec, control = _meet(spec, {"strategy": strategy}, backend="tf", timeout=timeout, expendable=expendable)
    _configure_devices(spec, os.environ)
    if spec.rank > 0:
        servers.serve(spec, roles, control)
    try:
        distribution = servers.connect(spec, roles, control)
    except BaseException as error:
        control.close(error=f"{type(error).__name__}: {error}")
        raise
    # For everything else this world has one rank: no other one runs the script.
    engine = select.choose(cluster.ClusterSpec(), None, backend="auto", timeout=timeout)
    world.install(
        world.World(spec, engine, None, strategy, timeout, Group((0,)), None, choice.dedicated(strategy))
    )
    placed.use(distribution)
    keras_compat.install_asynchronous(
        AsynchronousHook(Fleet(distribution, roles, control), choice.option(strategy, "max_staleness")),
        distribution,
    )
    global _served_by
    _served_by = control
    _announce_crashes()
    atexit.register(shutdown)


def _meet(
    spec: cluster.ClusterSpec,
    facts: Mapping[str, object],
    *,
    backend: str,
    timeout: float,
    expendable: bool = False,
) -> tuple[cluster.ClusterSpec, ControlPlane]:
    """Meets the other ranks.

    Args:
        spec: place of this process, as far as the launcher tells.
        facts: what else this rank tells the others about itself.
        backend: the engine that is asked for.
        timeout: bound in seconds.
        expendable: whether the others go on without this rank.

    Returns:
        The place of this process, and the channel to the others.
    """
    hello = {"host": socket.gethostname(), "pid": os.getpid()}
    hello |= select.offer(spec, backend=backend, timeout=timeout)
    secret = os.environ.get("TFDIST_SECRET")
    control = ControlPlane.connect(
        spec, hello=hello | dict(facts), timeout=timeout, secret=bytes.fromhex(secret) if secret else None,
        host=os.environ.get("TFDIST_HOST"), expendable=expendable,
    )  # fmt: skip
    # Only now, from what the ranks told each other, is it known for sure which share a host.
    return cluster.with_hosts(spec, [str(place["host"]) for place in control.roster]), control


def shutdown() -> None:
    """Leaves the world: all ranks call it, or let the end of the script do it. Undoes the hook on Keras.

    A rank that is outside some process set waits here for the others, at most `init`'s timeout: that set may
    still run collectives, and would lose its engine with this rank.
    """
    if not world.is_initialized():
        return
    atexit.unregister(shutdown)
    ended = world.current()
    keras_compat.uninstall()
    placed.forget()
    world.install(None)
    global _served_by
    if _served_by is not None:
        _served_by.close(error=_crash, dismiss=True)
        _served_by = None
    if ended.watchdog is not None:
        ended.watchdog.stop()
    if ended.control is not None:
        if _crash is not None:
            # Before the engine: Horovod's end makes the peers fail at once, and then they must know why.
            ended.control.close(error=_crash)
        elif any(ended.spec.rank not in ranks for ranks in registered(ended)):
            ended.control.close(linger=ended.timeout)
    try:
        ended.engine.stop()
    finally:
        if ended.control is not None:
            ended.control.close(error=_crash)


@contextlib.contextmanager
def local() -> Iterator[None]:
    """Trains without the other ranks, on purpose.

    In a world of several ranks tfdist refuses to train a model whose optimizer is not wrapped, because that
    is how ranks silently drift apart. Inside this block it is allowed, for models that belong to one rank: a
    probe, a reference run.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> with tfdist.local():
        ...     pass  # probe.fit(...) on this rank alone
    """
    with joint_step.alone():
        yield


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """Where models and optimizers are made and compiled, or loaded; under every strategy.

    Under `mirrored`, `multi_worker_mirrored` and `central_storage` variables made inside are those of all devices,
    under `async_parameter_server` they are on the servers; elsewhere it does nothing. Under `multi_worker_mirrored`
    every rank enters it, and makes the same variables.

    Example:
        >>> import keras, tfdist
        >>> tfdist.init()
        >>> with tfdist.scope():
        ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        ...     model.compile(tfdist.DistributedOptimizer("sgd"), "mse")

    Reference: `tf.distribute.Strategy.scope`, which it enters.
    """
    here = world.current()
    bounded: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if here.is_placed and here.watchdog is not None:
        bounded = here.watchdog.watch("tfdist.scope")  # ranks meet where variables are made
    with bounded, placed.scope():
        yield


def _backend_of_placed(backend: str, strategy: str) -> str:
    if backend == "horovod":
        raise BackendUnavailableError(
            f'strategy="{strategy}" runs on TensorFlow\'s own collectives; received backend="horovod". Leave the '
            'backend out, or use strategy="ring" with Horovod.'
        )
    return "tf" if backend == "auto" else backend


def _backend(argument: str | None, launcher: str | None) -> str:
    chosen = argument if argument not in (None, "auto") else launcher or BACKENDS[0]
    if chosen not in BACKENDS:
        raise BackendUnavailableError(
            f"backend must be one of {', '.join(BACKENDS)}; received {chosen!r}"
            + ("." if argument not in (None, "auto") else " from the launcher (TFDIST_BACKEND).")
        )
    return chosen


def _strategy(argument: str | None, launcher: str | None, ranks: int) -> str:
    try:
        return choice.check(argument or launcher or "ring", ranks)
    except TfdistError as error:
        if argument or not launcher:
            raise
        raise TfdistError(f"{error} It came from the launcher (TFDIST_STRATEGY).") from None


def _process_sets(argument: Sequence[ProcessSet] | str | None) -> list[ProcessSet]:
    if argument is None or argument == "dynamic":
        return []
    if isinstance(argument, str) or not all(isinstance(member, ProcessSet) for member in argument):
        raise TfdistError(
            'init(process_sets=...) takes a list of tfdist.ProcessSet objects, or "dynamic"; received '
            f"{argument!r}."
        )
    return list(argument)


def _seconds(argument: float | None, launcher: str | None) -> float:
    try:
        value = float(argument if argument is not None else launcher or DEFAULT_TIMEOUT)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise TfdistError(f"timeout must be a positive number of seconds; received {argument or launcher!r}.")
    return value


def _require_keras_on_tensorflow() -> None:
    if importlib_missing("tensorflow"):
        raise BackendUnavailableError(
            "TensorFlow is not installed. tfdist trains Keras 3 on TensorFlow: install one build of it, "
            "`pip install tensorflow` (or tensorflow-cpu, or your vendor's)."
        )
    import keras

    if keras.backend.backend() != "tensorflow":
        raise BackendUnavailableError(
            f"Keras runs on {keras.backend.backend()!r}, but tfdist needs its TensorFlow backend: set "
            "KERAS_BACKEND=tensorflow before the first import of keras."
        )


def importlib_missing(module: str) -> bool:
    """Whether a top-level module can't be found."""
    import importlib.util

    return importlib.util.find_spec(module) is None


def _configure_devices(spec: cluster.ClusterSpec, environ: Mapping[str, str], count: int = 1) -> None:
    """Gives each of several ranks on a host its share: `count` GPUs each, or an equal part of the cores."""
    if spec.local_size == 1:
        return
    import tensorflow as tf

    # Settings after TensorFlow's context exists raise; then the user's script has chosen already.
    with contextlib.suppress(RuntimeError):
        gpus = tf.config.list_physical_devices("GPU")
        if gpus:
            first = spec.local_rank * count
            own = [gpus[number % len(gpus)] for number in range(first, first + min(count, len(gpus)))]
            tf.config.set_visible_devices(own, "GPU")
            for gpu in own:
                tf.config.experimental.set_memory_growth(gpu, True)
    with contextlib.suppress(RuntimeError):
        share = max(1, resources.usable_cores() // spec.local_size)
        threading = tf.config.threading
        if "TF_NUM_INTRAOP_THREADS" not in environ and not threading.get_intra_op_parallelism_threads():
            threading.set_intra_op_parallelism_threads(share)
        if "TF_NUM_INTEROP_THREADS" not in environ and not threading.get_inter_op_parallelism_threads():
            threading.set_inter_op_parallelism_threads(max(2, share))


_crash: str | None = None
_served_by: ControlPlane | None = None  # to the ranks that serve this one


def _announce_crashes() -> None:
    """Makes peers of a rank that dies of an exception learn at once that, and of what, it died."""
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        global _crash
        _crash = f"{kind.__name__}: {error}"
        previous(kind, error, trace)

    sys.excepthook = excepthook


def mpi_built() -> bool:
    """Whether the installed Horovod was built with MPI; False without Horovod."""
    return _horovod_feature("mpi_built")


def gloo_built() -> bool:
    """Whether the installed Horovod was built with Gloo; False without Horovod."""
    return _horovod_feature("gloo_built")


def nccl_built() -> bool:
    """Whether the installed Horovod was built with NCCL; False without Horovod."""
    return _horovod_feature("nccl_built")


def cuda_built() -> bool:
    """Whether the installed Horovod was built with CUDA; False without Horovod."""
    return _horovod_feature("cuda_built")


def rocm_built() -> bool:
    """Whether the installed Horovod was built with ROCm; False without Horovod."""
    return _horovod_feature("rocm_built")


def ccl_built() -> bool:
    """Whether the installed Horovod was built with oneCCL; False without Horovod."""
    return _horovod_feature("ccl_built")


def ddl_built() -> bool:
    """Whether the installed Horovod was built with IBM DDL; False without Horovod."""
    return _horovod_feature("ddl_built")


def mpi_enabled() -> bool:
    """Whether the running engine is Horovod over MPI."""
    return _engine_feature("mpi_enabled")


def gloo_enabled() -> bool:
    """Whether the running engine is Horovod over Gloo."""
    return _engine_feature("gloo_enabled")


def mpi_threads_supported() -> bool:
    """Whether the running engine is Horovod over an MPI that supports threads."""
    return _engine_feature("mpi_threads_supported")


def is_homogeneous() -> bool:
    """Whether every host runs the same number of ranks."""
    spec = world.current().spec
    return spec.local_size * spec.cross_size == spec.size


def _horovod_feature(name: str) -> bool:
    if importlib_missing("horovod"):
        return False
    try:
        from horovod.tensorflow import mpi_ops
    except Exception:  # a Horovod built for another TensorFlow does not load: then nothing of it is usable
        return False
    return bool(getattr(mpi_ops, name)())


def _engine_feature(name: str) -> bool:
    engine: Engine = world.current().engine
    return engine.name == "horovod" and _horovod_feature(name)
