"""tfdist's own launcher, and horovodrun, whose variables have the same shape."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.spec import ClusterSpec, placed
from tfdist.cluster.variables import integers, show
from tfdist.errors import LauncherError


def read_tfdist(environ: Mapping[str, str]) -> ClusterSpec | None:
    names = ["TFDIST_RANK", "TFDIST_SIZE", "TFDIST_LOCAL_RANK", "TFDIST_LOCAL_SIZE"]
    values = integers(environ, names, by="tfdist run")
    cross = integers(environ, ["TFDIST_CROSS_RANK", "TFDIST_CROSS_SIZE"], by="tfdist run")
    if values is None:
        return None
    if values[1] > 1 and not (environ.get("TFDIST_JOB") or environ.get("TFDIST_RENDEZVOUS")):
        raise LauncherError(
            f"TFDIST_SIZE={values[1]} needs TFDIST_JOB (a name that only this run has) or TFDIST_RENDEZVOUS "
            "(file:///path or tcp://host:port), so that ranks find each other. `tfdist run` sets them."
        )
    return placed("tfdist", values, cross, "", show(environ, names))


def read_horovodrun(environ: Mapping[str, str]) -> ClusterSpec | None:
    names = ["HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"]
    values = integers(environ, names, by="horovodrun")
    cross = integers(environ, ["HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"], by="horovodrun")
    if values is None:
        return None
    if environ.get("HOROVOD_ELASTIC") == "1":
        raise LauncherError(
            "HOROVOD_ELASTIC=1: tfdist does not support elastic jobs, where ranks come and go. Start "
            "horovodrun with -np N only, without --min-np, --max-np and --host-discovery-script."
        )
    port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    job = f"horovodrun-{environ.get('HOROVOD_GLOO_RENDEZVOUS_ADDR', '')}-{port}" if port else ""
    return placed("horovodrun", values, cross, job, show(environ, names))
