"""TF_CONFIG: chief first, then the workers, in the order of their addresses."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.spec import ClusterSpec
from tfdist.errors import LauncherError


def read_tf_config(environ: Mapping[str, str]) -> ClusterSpec | None:
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        return None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise LauncherError(f"TF_CONFIG is not valid JSON ({error}): {text!r}") from None
    cluster, task = _cluster_and_task(config, text)
    if not cluster:
        return ClusterSpec(launcher="tf_config")
    roles = {*cluster, str(task.get("type", "worker"))} - {"chief", "master", "worker"}
    if roles:
        raise LauncherError(
            f"tfdist runs the chief and worker tasks of a TF_CONFIG only, not {', '.join(sorted(roles))}. "
            f"Remove those tasks, or start them without tfdist. Received TF_CONFIG={text!r}"
        )
    chiefs = [*cluster.get("chief", []), *cluster.get("master", [])]
    addresses = (*chiefs, *cluster.get("worker", []))
    kind, index = task.get("type"), task.get("index")
    group = chiefs if kind in ("chief", "master") else cluster.get("worker", []) if kind == "worker" else None
    if group is None or not isinstance(index, int) or not 0 <= index < len(group) or len(chiefs) > 1:
        raise LauncherError(
            "TF_CONFIG must hold at most one chief, and a task whose type is 'chief' or 'worker' and whose "
            f"index is one of that type's addresses; received task {task!r} and cluster {cluster!r}."
        )
    if len(set(addresses)) != len(addresses):
        raise LauncherError(f"TF_CONFIG names the same address twice: {', '.join(addresses)}.")
    rank = index if kind != "worker" else len(chiefs) + index
    hosts = [address.rpartition(":")[0] for address in addresses]
    names = list(dict.fromkeys(hosts))
    return ClusterSpec(
        rank=rank,
        size=len(addresses),
        local_rank=hosts[:rank].count(hosts[rank]),
        local_size=hosts.count(hosts[rank]),
        cross_rank=names.index(hosts[rank]),
        cross_size=len(names),
        launcher="tf_config",
        job=f"tf_config-{hashlib.sha256(' '.join(addresses).encode()).hexdigest()[:16]}",
        addresses=addresses,
    )


def _cluster_and_task(config: Any, text: str) -> tuple[dict[str, list[str]], dict[str, Any]]:
    cluster = config.get("cluster") if isinstance(config, dict) else None
    task = config.get("task") if isinstance(config, dict) else None
    well_formed = isinstance(config, dict) and all(
        value is None or isinstance(value, dict) for value in (cluster, task)
    )
    for addresses in (cluster or {}).values() if well_formed else ():
        well_formed = well_formed and isinstance(addresses, list)
        well_formed = well_formed and all(
            isinstance(a, str) and re.fullmatch(r".+:\d+", a) for a in addresses
        )
    if not well_formed:
        raise LauncherError(
            'TF_CONFIG must read like {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", '
            f'"index": 0}}}}. Received {text!r}.'
        )
    return {kind: list(listed) for kind, listed in (cluster or {}).items() if listed}, dict(task or {})
