"""FSDP2 as torchtitan sets it up: each block compiled and sharded by itself, then the whole.

>>> module = fully_sharded(bench, compiled=True, mesh=mesh_of(bench.device, alone=False))
>>> synchronize(module, last=False)              # before each micro-batch
>>> module(inputs, targets).backward()

fp32 weights in shards, bf16 copies of them for forward and backward, gradients reduced in fp32.
Parameters stay whole from forward to backward (reshard_after_forward=False), and between the
micro-batches of a step: then as many bytes are sent as by DDP. Embedding, blocks, and what comes
behind them with the loss are one group each, so that one is gathered while another one computes.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from training import build


class Tail(torch.nn.Module):
    """The last norm, the output layer and the mean loss, compiled together."""

    def __init__(self, model):
        super().__init__()
        self.norm = model.final_norm
        self.lm_head = model.lm_head

    def forward(self, x, targets):
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Parts(torch.nn.Module):
    """A llama's embedding, blocks and tail as modules that can be compiled and sharded."""

    def __init__(self, model, compiled: bool):
        super().__init__()

        def part(module):
            return torch.compile(module, dynamic=False) if compiled else module

        assert model.lm_head.weight is not model.embedding.weight, "tied weights are in two parts"
        self.embedding = model.embedding
        self.blocks = torch.nn.ModuleList(map(part, model.blocks))
        self.tail = part(Tail(model))
        self.register_buffer("rope", model.rope)

    def forward(self, inputs, targets):
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, self.rope)
        return self.tail(x, targets)


def mesh_of(device: str, alone: bool) -> DeviceMesh:
    """Of all ranks; alone: of this rank only. Collective."""
    if not alone:
        return init_device_mesh(device, (dist.get_world_size(),))
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return DeviceMesh.from_group(groups[dist.get_rank()], device)


def fully_sharded(bench, compiled: bool, mesh: DeviceMesh) -> Parts:
    module = Parts(build(bench.config, device=bench.device), compiled)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (module.embedding, *module.blocks, module.tail, module):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return module


def synchronize(module: Parts, last: bool):
    """Before a micro-batch: the last one of a step reduces the gradients of all of them."""
    module.set_requires_gradient_sync(last)
    module.set_is_last_backward(last)
    module.set_reshard_after_backward(last)


def local(t: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, in the same memory."""
    return t.to_local() if isinstance(t, DTensor) else t


def first_weights(bench, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's part of the weights that a model begins with."""
    model = Parts(build(bench.config, device=bench.device), compiled=False)
    return [
        local(distribute_tensor(p.detach(), t.device_mesh, t.placements, src_data_rank=None))
        for p, t in zip(model.parameters(), like, strict=True)
    ]
