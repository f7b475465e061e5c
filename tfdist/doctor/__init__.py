"""`tfdist doctor`: does training work here, and if not, what has to be done?

Problem: a job that hangs or trains each rank alone rarely says why. Most causes are known and can be seen
beforehand: two TensorFlows in one environment, a Horovod that was built for another one, a host name that
leads nowhere.

Solution: `facts` collects what a maintainer would ask for, without judging; `findings` judges, as pure
functions of those facts, and gives a fix for each problem; `trials` runs a real all-reduce between two
processes on each backend, which no amount of inspection replaces; `command` prints.
"""

from __future__ import annotations

from tfdist.doctor.command import main

__all__ = ["main"]
