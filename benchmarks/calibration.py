"""The numbers of docs/planning.md, of what ddp.py has measured on two GPUs.

>>> results = json.loads(path.read_text())["results"]["2"]         # results/*/ddp_2gpus.json
>>> workload, machine = calibrated(model, results, memory_GBs=4251)
"""

import math
from dataclasses import replace

import numpy as np
from torch import nn

from gpuaccel.distributed.plan import Link, Machine, Workload, predict, slowest_of

# Of a message from GPU to GPU inside a machine, in us: as NCCL's src/graph/tuning.cc has it for
# the ring with NVLink.
HOP_US = 3.4
# Bytes. A smaller all-reduce that Python launches takes as long as its launch.
LEAST_LAUNCHED = 16 << 20


def calibrated(
    module: nn.Module, results: dict, memory_GBs: float = math.inf
) -> tuple[Workload, Machine]:
    """The step and the machine of two GPUs that ddp.py has measured.

    The step of one GPU and the all-reduces alone are measured. `nccl_slow` is fitted to NCCL's step
    of one micro-batch. `spread` is fitted to what a peer-to-peer step of four micro-batches takes
    longer than one of one: three micro-batches that do not communicate, and the wait for the other
    rank.

    Args:
        module: the model that was measured, which may be on the meta device.
        results: `["results"]["2"]` of the file that ddp.py wrote.
        memory_GBs: as for Machine; clip.py measures it as "copy_GB_per_s".

    Returns:
        (the workload with one micro-batch, a machine with two GPUs whose network is its link).
    """
    steps = results["groups"]["ours, replayed"]
    alone_1, alone_4 = (steps[count]["one GPU"]["ms"] for count in ("1", "4"))
    copies_1, copies_4 = (steps[count]["all-reduce"]["ms"] for count in ("1", "4"))
    nccl_1 = steps["1"]["all-reduce by NCCL"]["ms"]
    sizes = [m for m in results["bandwidth"].values() if m["bytes"] >= LEAST_LAUNCHED]
    points = np.array([(m["bytes"], m["all_reduce"]["ms"]) for m in sizes]).T
    # The line whose relative errors have the least sum of squares.
    slope, fixed = np.polyfit(points[0], points[1], 1, w=1 / points[1])
    micro_ms = (alone_4 - alone_1) / 3
    workload = Workload.of(module, micro_ms, alone_1 - micro_ms)
    link = Link(1 / float(slope) / 1e6, HOP_US)
    waited = (copies_4 - copies_1) / (3 * micro_ms) - 1
    machine = Machine(
        gpus=2,
        link=link,
        network=link,
        # A hop's latency is in what an all-reduce costs beside its bytes.
        start_us=max(0.0, 1e3 * float(fixed) - 2 * HOP_US),
        memory_GBs=memory_GBs,
        spread=max(0.0, waited / slowest_of(2)),
    )
    low, high = 0.0, 8.0
    for _ in range(60):
        middle = (low + high) / 2
        slowed = replace(machine, nccl_slow=middle)
        too_fast = predict(workload, slowed, 2, peer_to_peer=False).step_ms < nccl_1
        low, high = (middle, high) if too_fast else (low, middle)
    return workload, replace(machine, nccl_slow=low)
