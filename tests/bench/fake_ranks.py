"""Ranks without TensorFlow, for tests of how the bench starts, stops, asks and ends its contenders."""

from __future__ import annotations

import os
import time
from typing import Any

from tfdist.bench.ranks import Channel


def main(channel: Channel, options: dict[str, Any]) -> None:
    """Misbehaves as `options["fault"]` says, else answers with what it was asked and told."""
    fault = options.get("fault")
    if fault == "raise" and channel.rank == 1:
        raise RuntimeError("rank 1 does not feel well")
    if fault == "late" and channel.rank == 1:
        time.sleep(600)
    seen = channel.exchange(channel.rank * 10)
    channel.ready()
    for request in channel.requests():
        if fault == "exit":
            os._exit(3)
        channel.answer(
            {
                "rank": channel.rank,
                "pid": os.getpid(),
                "seen": seen,
                "word": request["word"],
                "legacy": os.environ.get("TF_USE_LEGACY_KERAS"),
                "tfdist": sorted(name for name in os.environ if name in ("TFDIST_RANK", "TFDIST_SIZE")),
                "threads": os.environ.get("TF_NUM_INTRAOP_THREADS"),
            }
        )
