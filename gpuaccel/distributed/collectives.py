"""torch.distributed's collectives under one name each, and with one kind of error.

    all_gather(everyone, mine, group=group)
    all_reduce(sums, group=group)

A collective fails when another rank has ended or does not answer in time. NCCL and the stores raise
a `torch.distributed.DistError` then; gloo raises a plain RuntimeError. These functions turn gloo's
error into a `torch.distributed.DistBackendError`: a lost rank is told by the type of the error.
"""

import functools

import torch.distributed as dist


def raises_dist_error(function):
    """`function`, which may be a collective or consist of some, with one kind of error.

    Args:
        function: its plain RuntimeErrors become DistBackendErrors.

    Returns:
        A function with the same arguments and result.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            # Subclasses say what they are: a DistError, out of memory, a CUDA error.
            if type(error) is not RuntimeError:
                raise
            raise dist.DistBackendError(str(error)) from error

    return call


# torch 2.13 has the names all_gather_single and reduce_scatter_single, and warns of the older ones.
all_gather = raises_dist_error(
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter = raises_dist_error(
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
all_reduce = raises_dist_error(dist.all_reduce)
all_to_all = raises_dist_error(dist.all_to_all_single)
broadcast = raises_dist_error(dist.broadcast)
_gather_objects = raises_dist_error(dist.all_gather_object)


def gather_objects(mine, group, world: int) -> list:
    """`mine` of each of the group's ranks, in their order.

    Args:
        mine: an object that can be pickled.
        group: a process group; None: the default one.
        world: number of its ranks.
    """
    everyone = [mine] * world
    if world > 1:
        _gather_objects(everyone, mine, group=group)
    return everyone
