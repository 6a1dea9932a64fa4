"""How often ranks fail, and how often to write a checkpoint.

    plan = checkpoints(gpus=1024, checkpoint_bytes=5.2e9)
    plan.failures_per_day, plan.interval_s, plan.lost

A failure of any rank stops all ranks; they start again from the last checkpoint. Failures are taken
as independent of each other and equally likely at any time.
"""

import math
from dataclasses import dataclass

from ..errors import ArgumentError

DAY = 86400.0
# 419 unexpected interruptions of 16,384 GPUs in 54 days: Llama Team, "The Llama 3 Herd of Models",
# 2024, section 3.3.4.
FAILURES_PER_GPU_DAY = 419 / (16384 * 54)
# Assumed: from a failure until all ranks train again.
RESTART_S = 300.0
# Assumed: GB/s at which a checkpoint is written.
STORAGE_GBS = 2.0


def young_interval(checkpoint_s: float, between_failures_s: float) -> float:
    """Seconds of training between two checkpoints that lose least, to first order.

    Args:
        checkpoint_s: seconds that a checkpoint stops the training.
        between_failures_s: mean seconds between two failures.

    Returns:
        sqrt(2 checkpoint_s between_failures_s).

    Source:
        J. W. Young, "A first order approximation to the optimum checkpoint interval",
        Communications of the ACM 17(9), 1974.
    """
    return math.sqrt(2 * checkpoint_s * between_failures_s)


def daly_interval(checkpoint_s: float, between_failures_s: float) -> float:
    """Seconds of training between two checkpoints that lose least, to higher order.

    Args:
        checkpoint_s: seconds that a checkpoint stops the training.
        between_failures_s: mean seconds between two failures.

    Returns:
        The interval; where a checkpoint takes twice the time between failures or more, that time.

    Source:
        J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
        Future Generation Computer Systems 22(3), 2006.
    """
    if checkpoint_s >= 2 * between_failures_s:
        return between_failures_s
    root = math.sqrt(checkpoint_s / (2 * between_failures_s))
    young = young_interval(checkpoint_s, between_failures_s)
    return young * (1 + root / 3 + root * root / 9) - checkpoint_s


def lost_share(
    interval_s: float, checkpoint_s: float, between_failures_s: float, restart_s: float
) -> float:
    """The share of all time that does not train: checkpoints, restarts, and steps done twice.

    Args:
        interval_s: seconds of training between two checkpoints.
        checkpoint_s: seconds that a checkpoint stops the training.
        between_failures_s: mean seconds between two failures.
        restart_s: from a failure until all ranks train again.

    Returns:
        From 0 to 1.

    Source:
        Daly (2006): the expected time until an interval and its checkpoint are done.
    """
    mean = between_failures_s
    try:
        spent = mean * math.exp(restart_s / mean) * math.expm1((interval_s + checkpoint_s) / mean)
    except OverflowError:
        return 1.0
    return 1 - interval_s / spent


@dataclass(frozen=True)
class CheckpointPlan:
    """Failures of a job, and the checkpoints that lose least.

    Attributes:
        failures_per_day: of any of its ranks.
        checkpoint_s: seconds that a checkpoint stops the training.
        interval_s: seconds of training between two checkpoints (Daly).
        lost: share of all time that does not train.
    """

    failures_per_day: float
    checkpoint_s: float
    interval_s: float
    lost: float


def checkpoints(
    gpus: int,
    checkpoint_bytes: float,
    storage_GBs: float = STORAGE_GBS,
    failures_per_gpu_day: float = FAILURES_PER_GPU_DAY,
    restart_s: float = RESTART_S,
) -> CheckpointPlan:
    """The checkpoint interval of a job.

    Args:
        gpus: each is a rank that may fail.
        checkpoint_bytes: that one checkpoint writes.
        storage_GBs: gigabytes (1e9) per second at which it is written.
        failures_per_gpu_day: mean number of failures of a GPU in a day.
        restart_s: from a failure until all ranks train again.

    Returns:
        A CheckpointPlan.

    Raises:
        ArgumentError: for numbers that are not positive.

    Example:
        >>> from gpuaccel.distributed.failures import checkpoints
        >>> plan = checkpoints(gpus=1024, checkpoint_bytes=5.2e9)
        >>> f"{plan.failures_per_day:.2f} failures a day, every {plan.interval_s / 60:.0f} minutes"
        '0.48 failures a day, every 16 minutes'
    """
    numbers = (gpus, checkpoint_bytes, storage_GBs, failures_per_gpu_day, restart_s)
    if not all(0 < number < math.inf for number in numbers):
        raise ArgumentError(
            f"gpus, checkpoint_bytes, storage_GBs, failures_per_gpu_day and restart_s are {numbers}"
            "; expected numbers above 0"
        )
    per_day = gpus * failures_per_gpu_day
    between = DAY / per_day
    seconds = checkpoint_bytes / storage_GBs / 1e9
    interval = daly_interval(seconds, between)
    return CheckpointPlan(
        per_day, seconds, interval, lost_share(interval, seconds, between, restart_s)
    )
