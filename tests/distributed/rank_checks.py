"""What the ranks of these tests run: checks for the Workers, and functions for ga.launch."""

import contextlib
import errno
import hashlib
import json
import logging
import multiprocessing
import os
import pathlib
import signal
import threading
import time
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from file_memory import FileMemory
from rank_workers import Rank
from torch import nn

import gpuaccel as ga
from gpuaccel.distributed import collectives, heartbeat, p2p
from gpuaccel.distributed.agreement import weight_hashes
from gpuaccel.distributed.buckets import join_blocks

VOCAB, WIDTH = 40, 16


# ---- a model, and batches of it ------------------------------------------------------------------


class Net(nn.Module):
    """Embedding, blocks, norm, a head that may be tied, and a tensor that only some batches use."""

    def __init__(self, tied=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False)
            )
            for _ in range(3)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.sometimes = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.never = nn.Parameter(torch.ones(5))
        self.register_buffer("seen", torch.zeros(3))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        if (tokens == VOCAB - 1).any():
            x = x * self.sometimes
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class Twice(Net):
    """A weight that a product uses, and something else."""

    def forward(self, tokens):
        return super().forward(tokens) * (1 + self.blocks[2][0].weight.mean())


class ProductsOnly(nn.Module):
    """Products, and nothing beside them."""

    def __init__(self, tied=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def adapted(tied=False, seed=0):
    """With adapters of peft on the queries and values; all else is frozen."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    sizes = dict(vocab=VOCAB, hidden=WIDTH, intermediate=WIDTH, layers=2, heads=2, kv_heads=1)
    model = ga.preset("tiny", head_dim=8, T=8, **sizes).build()
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["w_q", "w_v"]))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model


class LargerHead(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB + 1, bias=False)


class Checkpointed(Net):
    """Blocks that are computed again in backward, each in a backward of its own inside."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))


class SharedInside(Checkpointed):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.blocks[0][0].weight = self.blocks[2][0].weight


def micro_batch(number):
    """Micro-batch `number` of the whole run. Its rows, and how many of its targets count, differ
    from its neighbours'."""
    generator = torch.Generator().manual_seed(number)
    rows, T = 1 + number % 3, 6
    tokens = torch.randint(0, VOCAB - 1, (rows, T), generator=generator)
    if number % 4 == 1:
        tokens[0, 0] = VOCAB - 1
    targets = torch.randint(0, VOCAB, (rows, T), generator=generator)
    targets[0, : number % 5] = -100
    return tokens, targets


def mean_loss(model, micro):
    total, count = ga.token_loss(model, micro)
    return total / count.clamp(min=1)


def make_step(model, kind="adamw", micro_batches=2, **options):
    """compile="as if": products say that they have been added, as they do inside a compiled
    backward, only that nothing is compiled."""
    arena = ga.Arena(model)
    if kind == "adamw":
        opt = ga.AdamW(arena, lr=1e-2, weight_decay=0.1, max_norm=0.05)
    else:
        opt = torch.optim.SGD(arena.parameters(), lr=0.5)
    compiler = contextlib.nullcontext()
    if options.get("compile") == "as if":
        compiler = mock.patch("torch.compile", lambda fn, **_: fn)
    with compiler:
        return ga.TrainStep(
            model,
            opt,
            micro_batches=micro_batches,
            scheduler=ga.training.warmup_cosine(opt, 2, 9),
            **options,
        )


def small_transformer():
    config = ga.training.Config(
        vocab=64, hidden=64, intermediate=128, layers=2, heads=2, kv_heads=2, T=16
    )
    return config.build()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def moments(step):
    return [t.clone() for state in step.optimizers[0].state.values() for t in state.values()]


def run(model, steps, ranks, rank, shares, **options):
    """Take steps in which rank r has shares[r] micro-batches: number m * ranks + r of the step.

    rank None: one process has all. Returns (weights, [[loss, tokens, norm] of each step])."""
    rounds, outs = max(shares), []
    micro_batches = rounds if rank is not None else rounds * ranks
    with make_step(model, micro_batches=micro_batches, **options) as step:
        for number in range(steps):
            mine = [
                micro_batch((number * rounds + m) * ranks + r)
                for m in range(rounds)
                for r in range(ranks)
                if m < shares[r] and rank in (None, r)
            ]
            out = step(mine or None)
            values = (out.loss, out.tokens, out.norm)
            outs.append([None if t is None else t.tolist() for t in values])
            # The next step overwrites what this one has left: NaN in its place do no harm.
            for sums in step.arena.gradients.views:
                sums.fill_(float("nan"))
        return weights(model), outs


def distance(actual, expected):
    """(norm of the difference over the norm, name of the tensor that is farthest off)."""
    squares = sum(float((actual[n] - expected[n]).double().norm() ** 2) for n in expected)
    norm = sum(float(w.double().norm() ** 2) for w in expected.values()) ** 0.5
    worst = max(expected, key=lambda n: float((actual[n] - expected[n]).abs().max()))
    return squares**0.5 / norm, worst


@contextlib.contextmanager
def copies_between_files(slab):
    """Gradients are reduced by copies as on GPUs (p2p.py), between files that all ranks map.

    slab: elements that are added at once; 0: no copies."""
    replaced = contextlib.nullcontext()
    if slab:
        replaced = mock.patch.multiple(
            p2p,
            SLAB=max(slab, 4096),
            SymmetricMemory=FileMemory,
            can_copy=lambda config, device: config.backend == "gloo",
        )
    with replaced:
        yield


# ---- checks: sums --------------------------------------------------------------------------------


def as_one_process(
    rank: Rank,
    shares,
    backend="torch",
    tied=False,
    plain=True,
    steps=3,
    low=torch.float32,
    net=Net,
    config=None,
    slab=0,
    **options,
):
    """Ranks with these shares of the micro-batches, and one process with all of them.

    plain: that process has no ga.Distributed; else it is in ordered mode.
    slab: of copies_between_files()."""
    bucketed = {"bucket_mb": 0.004, "check_every": 1, **(config or {})}
    info = mock.patch.object(p2p.log, "info")
    with ga.use_backend(backend), copies_between_files(slab), info as info:
        mine = net(tied, seed=rank.rank).to(low)
        distributed = ga.Distributed(group=rank.group, **bucketed)
        actual, outs = run(
            mine, steps, rank.ranks, rank.rank, shares, distributed=distributed, **options
        )
        alone = None if plain else ga.Distributed(group=rank.alone, ordered=True)
        start = net(tied, seed=0).to(low)
        expected, expected_outs = run(
            start, steps, rank.ranks, None, shares, distributed=alone, **options
        )
    off, name = distance(actual, expected)
    return {
        "same": all(torch.equal(actual[n], expected[n]) for n in expected),
        "off": off,
        "name": name,
        "log": [call.args[0] % call.args[1:] for call in info.call_args_list],
        "outs": outs,
        "expected_outs": expected_outs,
        "moved": distance(expected, weights(net(tied, seed=0).to(low)))[0],
        "hash": [hashlib.sha256(t.float().numpy().tobytes()).hexdigest() for t in actual.values()],
    }


def added_by_a_graph(rank: Rank):
    """Sums of 64 MB, made by a replayed graph: are they those of sums_in_order(), bit for bit?"""
    arena = ga.Arena(torch.nn.Linear(4096, 4096, bias=False).cuda())
    buckets = join_blocks(arena.blocks, 32e6)
    copies = p2p.PeerToPeer.of(ga.Distributed(group=rank.group), arena, buckets)

    def add():
        for bucket in buckets:
            copies.send(bucket)
        copies.join_sums()
        torch.cuda.current_stream().wait_stream(copies.stream)
        copies.join()

    arena.grads.zero_()
    add()
    graph, same = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        add()
    for first in (0, rank.ranks):
        everyone = [gradients_of(first + r, arena.numel).cuda() for r in range(rank.ranks)]
        arena.grads.copy_(everyone[rank.rank])
        graph.replay()
        same.append(torch.equal(arena.grads, sums_in_order(everyone)))
    graph.reset()
    arena.release()
    return same


def gradients_of(rank, numel):
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-6, 6, (numel,), generator=generator)
    return torch.randn(numel, generator=generator) * 10.0**exponents


def sums_in_order(everyone):
    total = everyone[0].clone()
    for grads in everyone[1:]:
        total += grads
    return total


def copies_refused(rank: Rank, machines=None, config=None, full=(), slab=1 << 22):
    """What is added by where copies cannot be; then the error of peer_to_peer=True.

    machines: the number of each rank's, as torchrun has it; None: there is one. full: ranks that
    have no memory to share."""
    machine = {} if machines is None else {"GROUP_RANK": machines[rank.rank]}
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    no_memory = mock.patch("os.posix_fallocate", side_effect=error if rank.rank in full else None)
    with copies_between_files(slab), mock.patch.dict(os.environ, machine), no_memory:
        with make_step(
            Net(), distributed=ga.Distributed(group=rank.group, **(config or {}))
        ) as step:
            copies = step.reducer.p2p
        return copies, error_of(lambda: made(rank, {"peer_to_peer": True, **(config or {})}))


def on_with_other_shards(rank: Rank, backend, low, before, after):
    """Two steps, sharded if `before`; the step is closed, two more are taken, sharded if `after`.
    Whether weights, masters and moments are bit-identical to those of steps without shards."""
    results = []
    for shards in ((before, after), (False, False)):
        with ga.use_backend(backend):
            model = Net().to(low)
            config = ga.Distributed(group=rank.group, sharded=shards[0], bucket_mb=0.1)
            with make_step(model, distributed=config) as step:
                for number in range(2):
                    step([micro_batch(4 * number + rank.rank)])
            config = ga.Distributed(group=rank.group, sharded=shards[1], bucket_mb=0.1)
            with ga.TrainStep(
                model, step.optimizers[0], micro_batches=2, distributed=config
            ) as step:
                masters = [step.arena.weights.clone()]
                for number in range(2, 4):
                    step([micro_batch(4 * number + rank.rank)])
                with step.gathered():
                    whole = [*moments(step), step.arena.weights.clone(), *weights(model).values()]
            results.append([*masters, *whole])
    return all(map(torch.equal, *results))


def left_alone(rank: Rank, backend):
    """A sharded step of bf16 weights that an error closes: whether this rank had old masters of
    other ranks' ranges before, and whether each master rounds to its weight after."""
    with ga.use_backend(backend):
        model = Net().to(torch.bfloat16)
        config = ga.Distributed(group=rank.group, sharded=True, bucket_mb=0.1)
        with contextlib.suppress(ZeroDivisionError), make_step(model, distributed=config) as step:
            for number in range(2):
                step([micro_batch(4 * number + rank.rank)])
            arena = step.arena
            stale = not torch.equal(arena.weights.bfloat16(), arena.bf16_weights)
            raise ZeroDivisionError
        return stale, torch.equal(arena.weights.bfloat16(), arena.bf16_weights)


def transformer(rank: Rank, device, replay, steps=4, **options):
    """A small transformer on whole batches, this rank's rows of each, and one process on all rows.

    options: low (a dtype of the weights) and compile; others are ga.Distributed's."""
    low = options.pop("low", None)
    compiled = options.pop("compile", False)
    config = ga.Distributed(group=rank.group, bucket_mb=0.05, find_unused=False, **options)
    results, left = {}, []
    for distributed in (config, None):
        torch.manual_seed(0)
        model = small_transformer().to(device, low)
        arena = ga.Arena(model)
        opt, losses = ga.AdamW(arena, lr=1e-2, max_norm=0.1), []
        with ga.TrainStep(
            model,
            opt,
            micro_batches=2 if distributed else 2 * rank.ranks,
            deterministic=True,
            compile=distributed is not None and compiled,
            replay=replay if distributed else "eager",
            scheduler=ga.training.warmup_cosine(opt, 2, 9),
            distributed=distributed,
        ) as step:
            if distributed and not config.ordered:
                note_buckets(step, left, lambda: products_left(step))
            for number in range(steps):
                generator = torch.Generator().manual_seed(number)
                rows = torch.randint(0, 64, (2, rank.ranks, 3, 17), generator=generator).to(device)
                rows = (rows[:, rank.rank] if distributed else rows).reshape(-1, 17)
                out = step((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
                losses.append(float(out.loss))
            if distributed:
                assert step.replays == replay, step.reason
                results = {
                    "copies": step.reducer.p2p is not None,
                    "hash": weight_hashes(arena, masters=low is None).tolist(),
                    "losses": losses,
                    "left": left,
                }
                actual = weights(model)
            else:
                results["off"] = distance(actual, weights(model))[0]
    return results


def note_buckets(step, notes, note):
    """Append note(), called when a bucket is sent."""
    send = step.reducer.send_next_bucket

    def send_and_note():
        notes.append(note())
        send()

    step.reducer.send_next_bucket = send_and_note


def products_left(step):
    """How many fused products backward still has to add; 0 behind it."""
    products = step.products
    if products is None or torch._C._current_graph_task_id() < 0:
        return 0
    return sum(products.added_before) - sum(products.added)


# ---- checks: a sharded optimizer, checkpoints ----------------------------------------------------


def memory_of_moments(rank: Rank, backend):
    """(bytes of moments here, those of one process, those of what every rank keeps)."""
    config = ga.Distributed(group=rank.group, sharded=True, bucket_mb=0.1)
    with ga.use_backend(backend), make_step(Net(), distributed=config) as step:
        step([micro_batch(rank.rank)])
        storages = {}
        for state in step.optimizers[0].state.values():
            for key, t in state.items():
                if key != "step":
                    storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        common = 8 * len(step.reducer.buckets) * rank.ranks * ga.optim.arena.CHUNK
        return sum(storages.values()), 8 * step.arena.numel, common


def state_dict_of_shards(rank: Rank):
    """opt.state_dict() before gathered(), whether it has every element inside, and behind."""
    config = ga.Distributed(group=rank.group, sharded=True, ordered=True)
    with make_step(Net(), distributed=config) as step:
        step([micro_batch(rank.rank)])
        opt = step.optimizers[0]
        before = error_of(opt.state_dict)
        with step.gathered():
            state = opt.state_dict()
            names = [name for group in state["param_groups"] for name in group["param_names"]]
            shapes = {name: p.shape for name, p in step.model.named_parameters()}
            # Tensors without a gradient have no state.
            whole = len(state["state"]) > 3 and all(
                moments["exp_avg"].shape == shapes[names[i]]
                for i, moments in state["state"].items()
            )
        return before, whole, error_of(opt.state_dict)


def trained(rank: Rank, folder, stops, ranks_then, sharded, steps=5, dropout=False):
    """ga.train in ordered mode with checkpoints, left after `stops` steps by `ranks_then` ranks and
    continued by all: the losses."""

    def go(ranks, group, last, resume):
        model = Net()
        if dropout:
            model.norm = nn.Sequential(nn.Dropout(), model.norm)
            torch.manual_seed(rank.rank + 10 * resume)
        config = ga.Distributed(group=group, ordered=True, sharded=sharded)
        with make_step(model, micro_batches=4 // ranks, distributed=config) as step:
            batches = token_batches(rank.rank, ranks)
            for _ in ga.train(
                step,
                batches,
                last,
                checkpoint_dir=folder,
                log=f"{folder}/lines.jsonl",
                resume=resume,
            ):
                pass

    if stops and rank.rank < ranks_then:
        go(ranks_then, rank.group if ranks_then == rank.ranks else rank.alone, stops, False)
    dist.barrier(rank.group)
    go(rank.ranks, rank.group, steps, bool(stops))
    return logged_losses(folder)


def token_batches(rank, ranks):
    """12 windows and 4 micro-batches in each step, over all ranks."""
    return ga.training.Batches(
        torch.arange(400) % VOCAB,
        12 // ranks,
        6,
        seed=3,
        rank=rank,
        ranks=ranks,
        micro_batches=4 // ranks,
    )


def logged_losses(folder):
    lines = pathlib.Path(folder, "lines.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


# ---- checks: the start, and errors ---------------------------------------------------------------


def start_equal(rank: Rank):
    """Whether the rank begins with rank 0's weights, frozen parameters and buffers."""
    model = Net(seed=rank.rank)
    model.seen += rank.rank
    model.never.requires_grad_(False)
    model.never += rank.rank
    with make_step(model, distributed=ga.Distributed(group=rank.group)):
        expected = Net(seed=0).state_dict()
        return all(map(torch.equal, model.state_dict().values(), expected.values()))


def made(rank: Rank, config=None, other=None, sgd=False, **options):
    """Make a step with options; in `other` those in which rank 1 differs: config (arguments of
    ga.Distributed), net, opt (arguments of the optimizer), and arguments of TrainStep."""
    other = dict(other or {}) if rank.rank == 1 else {}
    config = {**(config or {}), **other.pop("config", {})}
    model = other.pop("net", Net)()
    arena = ga.Arena(model)
    of_optimizer = other.pop("opt", {})
    opt = torch.optim.SGD(arena.parameters()) if sgd else ga.AdamW(arena, **of_optimizer)
    distributed = ga.Distributed(group=rank.group, **config)
    with ga.TrainStep(model, opt, distributed=distributed, **{**options, **other}):
        pass


def nan_on(
    rank: Rank,
    who,
    backend,
    products,
    ordered,
    where="blocks.0",
    slab=0,
    sharded=False,
    **options,
):
    """One step with a NaN that rank `who` makes in backward, between two good ones."""
    config = ga.Distributed(group=rank.group, ordered=ordered, sharded=sharded, bucket_mb=0.004)
    nan_now = False

    def spoiled(grad):
        return grad * float("nan") if nan_now and rank.rank == who else grad

    with ga.use_backend(backend), copies_between_files(slab):
        model = Net()
        with make_step(model, deterministic=products, distributed=config, **options) as step:
            step([micro_batch(rank.rank)])
            before, skips = weights(model), [step.optimizers[0].last_skip()]
            if where == "norm":
                # One tensor alone.
                model.norm.weight.register_hook(spoiled)
            else:
                model.blocks[1].register_full_backward_hook(
                    lambda module, inputs, outputs: tuple(map(spoiled, inputs))
                )
            nan_now = True
            out = step([micro_batch(rank.rank + 4)])
            nan_now = False
            same = all(map(torch.equal, before.values(), weights(model).values()))
            skips += [step.optimizers[0].last_skip(), step.reducer.last_nonfinite()]
            step([micro_batch(rank.rank + 8)])
            return {
                "same": same,
                "moved": not torch.equal(before["head.weight"], model.head.weight),
                "skips": skips,
                "finite": bool(out.finite),
                "skipped": int(step.optimizers[0].skipped),
                "hash": weight_hashes(step.arena).tolist(),
            }


def error_of(call) -> str:
    try:
        call()
    except ga.errors.ArgumentError as error:
        return str(error)
    return "no error"


def second_step(rank: Rank):
    """A second TrainStep takes the first one's place between two steps; one is refused; none is
    made: hashes of the weights, the refusal, the error of the first one's next step."""
    results = []
    with ga.use_backend("simt"), copies_between_files(1 << 22):
        for how in ("second", "refused", "one"):
            model, config = Net(), ga.Distributed(group=rank.group, sharded=True)
            step = make_step(model, distributed=config)
            first = step
            step([micro_batch(rank.rank)])
            if how == "second":
                step = ga.TrainStep(model, step.optimizers[0], distributed=config)
            elif how == "refused":
                opt = ga.AdamW(step.arena.masters[:1])
                results.append(error_of(lambda: ga.TrainStep(model, opt, distributed=config)))
            step([micro_batch(rank.rank + 4)])
            results.append(weight_hashes(step.arena).tolist())
            step.close()
            if how == "second":
                results.append(error_of(lambda: first([micro_batch(rank.rank)])))
    return results


def drift(rank: Rank, who, backend="torch"):
    """Rank `who` changes one bit of a weight after two steps."""
    model, config = Net(), ga.Distributed(group=rank.group, check_every=2)
    with ga.use_backend(backend), make_step(model, distributed=config) as step:
        for number in range(1, 6):
            step([micro_batch(rank.rank)])
            if number == 2 and rank.rank == who:
                model.norm.weight.data.view(torch.int32)[3] ^= 1


def late_tensor(rank: Rank, find_unused):
    """A tensor gets its first gradient in the second step, on the last rank only: did it move, and
    what is said, of a third step too."""
    model, errors = Net(), []
    last = rank.rank == rank.ranks - 1
    config = ga.Distributed(group=rank.group, find_unused=find_unused)
    with make_step(model, distributed=config) as step:
        step([micro_batch(0)])
        tokens, targets = micro_batch(0)
        if last:
            tokens[0, 0] = VOCAB - 1
        before = model.sometimes.detach().clone()
        # Without find_unused the other one does not wait for it.
        for _ in range(1 if find_unused or not last else 2):
            try:
                step([(tokens, targets)])
            except (ga.errors.ArgumentError, ga.errors.RankError) as error:
                errors.append((type(error).__name__, str(error)))
        return not torch.equal(before, model.sometimes), errors


def order_of_buckets(rank: Rank, products):
    """(of each bucket sent: its number, and whether backward runs; whether they are the arena)."""
    order = []
    config = ga.Distributed(group=rank.group, bucket_mb=0.004)
    with make_step(Net(), deterministic=products, distributed=config, micro_batches=1) as step:
        in_backward = lambda: torch._C._current_graph_task_id() >= 0  # noqa: E731
        note_buckets(step, order, lambda: (step.reducer.next, in_backward()))
        step(micro_batch(1))
        starts = [b.start for b in step.reducer.buckets]
        stops = [b.stop for b in step.reducer.buckets]
        return order, starts == [0, *stops[:-1]] and stops[-1] == step.arena.numel


def step_that_raises(rank: Rank):
    """A step that raises on every rank after the first bucket was sent; then another one: what they
    say."""
    messages = []
    config = ga.Distributed(group=rank.group, bucket_mb=0.004)
    with make_step(SharedInside(), distributed=config) as step:
        for _ in range(2):
            try:
                step([micro_batch(rank.rank)])
            except (ga.errors.ArgumentError, ga.errors.RankError) as error:
                messages.append(str(error))
    return messages


# ---- what ga.launch runs -------------------------------------------------------------------------


def nothing():
    pass


def raises():
    raise ValueError("no more data")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def leaves():
    os._exit(3)


def hangs():
    time.sleep(3600)


def fewer_steps(path, broadcast_buffers):
    """Rank 1 takes two steps of four. What rank 0 raises is written to a file."""
    config = ga.Distributed(broadcast_buffers=broadcast_buffers)
    with make_step(Net(), distributed=config) as step:
        try:
            for number in range(4 - 2 * config.rank):
                step([micro_batch(number)])
        except ga.errors.RankError as error:
            path.write_text(str(error))
            raise


def steps_with(trouble, who, steps=6):
    """Train, until in step 3 something happens to rank `who`: (rank, ranks, hashes)."""
    config = ga.Distributed()
    with make_step(Net(), distributed=config) as step:
        for number in range(steps):
            if number == 3 and config.rank == who:
                trouble()
            step([micro_batch(number * config.world + config.rank)])
        return config.rank, config.world, weight_hashes(step.arena).tolist()


def trouble_until_its_first_step_is_over(before, within):
    """Rank 1 calls before() before it makes its TrainStep, and within() in the second micro-batch,
    when ordered sums are under way."""
    config = ga.Distributed(ordered=True)
    losses = 0

    def loss_fn(model, micro):
        nonlocal losses
        losses += 1
        if config.rank == 1 and losses == 2:
            within()
        return ga.token_loss(model, micro)

    if config.rank == 1:
        before()
    with make_step(Net(), loss_fn=loss_fn, distributed=config) as step:
        for _ in range(3):
            step([micro_batch(config.rank), micro_batch(2 + config.rank)])
    return config.rank


def sleeps_or_loops(how, group):
    """Rank 1 does something else, and the other ranks wait for it in a collective.

    group: "all", or "of two", without rank 2."""
    members = dist.new_group([0, 1]) if group == "of two" else None
    if dist.get_rank() == 2 and members is not None:
        return
    if dist.get_rank() == 1 and how == "returns":
        return
    waits = dist.get_rank() != 1
    while not waits:
        if how == "sleeps":
            time.sleep(3600)
        elif how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(3), group=members)


def computes(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    return dist.get_rank()


def aborts_beside_one_that_hangs():
    """Rank 1 hangs in what torch.distributed calls, as FSDP a forward; rank 2 in a collective."""
    torchs = {"time": time}
    text = "def call(function): function()\ndef wait(): time.sleep(3600)"
    exec(compile(text, "/torch/distributed/calls.py", "exec"), torchs)
    if dist.get_rank() == 0:
        os.abort()
    if dist.get_rank() == 1:
        torchs["call"](hangs)
    torchs["wait"]()


def hangs_in_the_third_step(device, seconds, watched=True, **options):
    """Started as torchrun does it. Rank 1 takes two steps, and rank 0 waits for it in the third.

    On CPUs Heartbeats.watch() has the limit, in a thread as for NCCL, or, not `watched`, gloo."""
    cuda = device == "cuda"
    watched = watched and not cuda
    config = ga.Distributed(timeout=600.0 if watched else seconds, **options)
    if watched:
        watch = heartbeat.group_heartbeats.watch
        threading.Thread(target=watch, args=(seconds,), daemon=True).start()
    model = small_transformer().to(device)
    opt = ga.AdamW(ga.Arena(model))
    with ga.TrainStep(model, opt, replay="graph" if cuda else "eager", distributed=config) as step:
        generator = torch.Generator().manual_seed(config.rank)
        rows = torch.randint(0, 64, (3, 17), generator=generator).to(device)
        for number in range(3):
            if number == 2 and config.rank == 1:
                hangs()
            float(step((rows[:, :-1].contiguous(), rows[:, 1:].contiguous())).loss)


def fails_between_steps(folder):
    """Rank 1 raises between two steps, with a sharded optimizer and checkpoints."""
    config = ga.Distributed(sharded=True)
    batches = ga.training.Batches(torch.arange(400) % VOCAB, 2, 6, rank=config.rank, ranks=2)
    with make_step(Net(), distributed=config) as step:
        for reading in ga.train(step, batches, 50, checkpoint_dir=folder, checkpoint_every=2):
            if reading.step == 3 and config.rank == 1:
                raises()


# ---- a small model, and what a rank may do that others do not ------------------------------------


def small_step(rank, loss_fn, make_optimizer=None, config=None, **options):
    """(model, step) of a linear layer. make_optimizer: of an Arena; None: TrainStep's own."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(4, 2)])
    opt = make_optimizer(ga.Arena(model)) if make_optimizer else None
    group = rank.group if rank is not None else None
    distributed = ga.Distributed(group=group, **(config or {}))
    return model, ga.TrainStep(model, opt, loss_fn=loss_fn, distributed=distributed, **options)


def rows_of(seed):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))


def mean_of_squares(model, x):
    return model[0](x).square().mean()


def weighted(model, batch):
    """With tokens that are no whole numbers."""
    x, tokens = batch
    return (model[0](x).square().mean(1) * tokens).sum(), tokens.sum()


def only_rank_0_has_batches(rank: Rank, loss_fn):
    """What a rank says of its last step, and its weights."""
    tokens = torch.tensor([0.5, 1.7, 0.1, 0.2])
    model, step = small_step(rank, loss_fn, max_norm=1.0)
    with step:
        for i in range(3):
            batch = (rows_of(i), tokens) if loss_fn is weighted else rows_of(i)
            out = step(None if rank.rank else batch)
    tokens = None if out.tokens is None else float(out.tokens)
    return out.loss.dtype, tokens, float(out.loss), float(out.norm), model[0].weight.tolist()


def nobody_has_a_batch(rank: Rank):
    """In the second of three steps: whether that changes nothing, and weights are finite later."""

    def loss(model, x):
        return model[0](x).square().sum(), len(x)

    model, step = small_step(rank, loss, lambda arena: torch.optim.SGD(arena.parameters(), 0.1))
    with step:
        step(rows_of(0))
        before = model[0].weight.detach().clone()
        step(None)
        same = torch.equal(before, model[0].weight)
        step(rows_of(1))
    return same, bool(model[0].weight.isfinite().all())


def nonfinite_raises(rank: Rank, sharded):
    """Rank 1 has NaN in the second of four steps: what each step says."""
    kinds = []
    _, step = small_step(
        rank,
        mean_of_squares,
        lambda arena: ga.AdamW(arena, on_nonfinite="raise"),
        config=dict(sharded=sharded),
    )
    with step:
        for i in range(4):
            nan = i == 1 and rank.rank == 1
            try:
                step(rows_of(i) * (float("nan") if nan else 1.0))
                kinds.append("fine")
            except ga.errors.GpuaccelError as error:
                kinds.append(type(error).__name__)
    return kinds


def buffers_of_rank_0(rank: Rank, steps):
    """Buffers in dtypes that gloo does not send, of all ranks; before each step they differ."""
    model = torch.nn.Linear(4, 2)
    for dtype in (torch.int16, torch.uint16, torch.float8_e5m2, torch.bool, torch.complex64):
        model.register_buffer(str(dtype).removeprefix("torch."), torch.zeros(3).to(dtype))
    model.register_buffer("scalar", torch.tensor(0))
    model.register_buffer("strided", torch.zeros(3, 2).t()[:1, 1:])
    model.register_buffer("empty", torch.zeros(0))

    def differ():
        for buffer in model.buffers():
            buffer.copy_(torch.full(buffer.shape, 1.0 - rank.rank).to(buffer.dtype))

    differ()
    distributed = ga.Distributed(group=rank.group)
    with ga.TrainStep(model, loss_fn=lambda m, x: m(x).mean(), distributed=distributed) as step:
        for _ in range(steps):
            differ()
            step(torch.ones(2, 4))
    return [buffer.to(torch.complex64).tolist() for buffer in model.buffers()]


class Normed(nn.Module):
    """BatchNorm, whose running means are those of its rank's rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)


def square_of(model, x):
    return model(x).square().mean()


def normed_rows(step, rank, device="cpu"):
    """Of two micro-batches of three rows."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    return (torch.randn(6, 4, generator=generator) + 3 * rank).to(device)


def normed_by_ddp(rank: Rank, broadcast_buffers, device="cpu"):
    """State after four steps of two micro-batches, by torch's DistributedDataParallel."""
    model = Normed().to(device)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = nn.parallel.DistributedDataParallel(
        model, process_group=rank.group, broadcast_buffers=broadcast_buffers
    )
    for number in range(4):
        first, second = normed_rows(number, rank.rank, device).split(3)
        with wrapped.no_sync():
            (square_of(wrapped, first) / 2).backward()
        (square_of(wrapped, second) / 2).backward()
        opt.step(), opt.zero_grad()
    return state_of(model)


def normed_by_step(rank: Rank, broadcast_buffers, device="cpu", as_list=False, **options):
    """The same by a TrainStep."""
    model = Normed().to(device)
    opt = torch.optim.SGD(ga.Arena(model).parameters(), lr=0.1)
    config = ga.Distributed(group=rank.group, broadcast_buffers=broadcast_buffers)
    options.update(micro_batches=2, distributed=config)
    with ga.TrainStep(model, opt, lambda m, micro: square_of(m, *micro), **options) as step:
        for number in range(4):
            rows = normed_rows(number, rank.rank, device)
            step([(part,) for part in rows.split(3)] if as_list else (rows,))
    return state_of(model)


def state_of(model):
    return {name: t.double().tolist() for name, t in model.state_dict().items()}


def tries_again(rank: Rank):
    """Rank 1 raises in a forward, and takes the step with another batch: all ranks' weights."""
    model = Normed()
    opt = torch.optim.SGD(ga.Arena(model).parameters(), lr=0.1)
    raising = rank.rank == 1

    def loss(model, x):
        if raising:
            raise ValueError("a bad row")
        return square_of(model, x)

    config = ga.Distributed(group=rank.group)
    with ga.TrainStep(model, opt, loss_fn=loss, distributed=config) as step:
        for number in range(3):
            raising = rank.rank == 1 and number == 1
            try:
                step(normed_rows(number, rank.rank))
            except ValueError:
                raising = False
                step(normed_rows(number, rank.rank))
    return state_of(model)


def broadcasts(rank: Rank):
    """Broadcasts in a warm-up and three steps of a model with many buffers, and of one without."""
    counts = []
    for model in (nn.Sequential(Normed(), nn.BatchNorm1d(1)), nn.Linear(4, 1)):
        config = ga.Distributed(group=rank.group)
        with ga.TrainStep(model, loss_fn=square_of, distributed=config) as step:
            broadcast = collectives.broadcast
            with mock.patch.object(collectives, "broadcast", wraps=broadcast) as counted:
                # A warm-up may be a whole step, and is none.
                step.reducer.begin_step()
                for number in range(3):
                    step(normed_rows(number, rank.rank))
            counts.append(counted.call_count)
    return counts


def short_batches(rank: Rank, rows, micro_batches=4, device="cpu", **options):
    """Distance of the weights, and both runs' outputs: of ranks with so many rows in each step, and
    of one process that has the rows of all ranks as one batch. rows: (steps, ranks)."""
    config = options.pop("config", {})

    def trained(shares, distributed):
        model = Net().to(device)
        outs = []
        options.update(micro_batches=micro_batches, distributed=distributed)
        with make_step(model, "sgd", **options) as step:
            first = 0
            for count, before in shares:
                tokens = short_rows(first + before, count).to(device)
                first += 100
                out = step((tokens[:, :-1], tokens[:, 1:]) if count else None)
                outs.append([float(out.loss), float(out.tokens)])
        return weights(model), outs

    mine = [(step[rank.rank], sum(step[: rank.rank])) for step in rows]
    actual, outs = trained(mine, ga.Distributed(group=rank.group, **config))
    expected, expected_outs = trained([(sum(step), 0) for step in rows], None)
    moved = distance(expected, weights(Net().to(device)))[0]
    return distance(actual, expected)[0], moved, outs, expected_outs


def short_rows(first, count):
    """Rows number `first` ... of all, with their own tokens each."""
    rows = [
        torch.randint(0, VOCAB - 1, (7,), generator=torch.Generator().manual_seed(first + i))
        for i in range(count)
    ]
    return torch.stack(rows) if rows else torch.empty(0, 7, dtype=torch.int64)


def trained_to_the_end_of_batches(rank: Rank, folder, lengths, hidden):
    """Names of the checkpoints after a run whose batches end before its steps. hidden: the batches
    have no length."""
    _, step = small_step(rank, mean_of_squares)
    batches = [rows_of(i) for i in range(lengths[rank.rank])]
    with step:
        loop = ga.train(step, iter(batches) if hidden else batches, 100, checkpoint_dir=folder)
        count = sum(1 for _ in loop)
    return count, sorted(os.listdir(folder)) if os.path.isdir(folder) else []


# ---- functions for ga.launch ---------------------------------------------------------------------


def adds_to_what_it_gets(t, model):
    dist.barrier()
    t += 1 + dist.get_rank()
    with torch.no_grad():
        model.weight += 1
    dist.barrier()
    return t, model.weight


def raises_in_the_third_step(who):
    """A sharded step on ranks, of which `who` raise in the third step, closed in `finally`. Where
    all have caught the error: a sum of its moments."""
    steps = 0

    def loss(model, x):
        nonlocal steps
        steps += 1
        if steps == 3 and dist.get_rank() in who:
            raise ValueError("bad sample")
        return mean_of_squares(model, x)

    _, step = small_step(None, loss, config=dict(sharded=True))
    try:
        with contextlib.suppress(ValueError) if len(who) > 1 else contextlib.nullcontext():
            for i in range(5):
                step(rows_of(i))
    finally:
        step.close()
    states = step.optimizers[0].state.values()
    return sum(state["exp_avg"].abs().sum().item() for state in states)


def evaluates_beside_a_group_that_trains(seconds):
    """Ranks 0 and 1 train, rank 2 does something else, which takes longer than the time limit."""
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        time.sleep(seconds)
        return "evaluated"
    _, step = small_step(SimpleNamespace(group=group), mean_of_squares)
    with step:
        for i in range(5):
            step(rows_of(i))
    time.sleep(seconds)
    return "trained"


def trains_twice(most):
    """Steps of a second TrainStep, until all are asked to stop."""
    for steps in (20, most):
        _, step = small_step(None, mean_of_squares)
        with step:
            taken = 0
            while taken < steps and not step.reducer.asked_to_stop():
                step(rows_of(taken))
                taken += 1
                if steps == most:
                    if taken == 1 and dist.get_rank() == 0:
                        os.kill(multiprocessing.parent_process().pid, signal.SIGINT)
                    time.sleep(0.02)
    return taken


def loads_with_a_worker():
    rows = torch.utils.data.TensorDataset(torch.arange(8.0).view(8, 1))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sampler = torch.utils.data.DistributedSampler(rows, ranks, rank, shuffle=False)
    loader = torch.utils.data.DataLoader(rows, 2, num_workers=1, sampler=sampler)
    return [batch.flatten().tolist() for (batch,) in loader]


class NotUnpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


def returns_what_cannot_be_unpickled():
    return NotUnpicklable(1, 2)


# ---- checks: checkpoints of a loop of one's own --------------------------------------------------


def _plain_run(group, seed):
    """A model with dropout and BatchNorm, and a function that takes a step on this rank alone."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    opt = ga.AdamW(model.parameters())

    def step():
        model(torch.rand(6, 4)).square().sum().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
        opt.step()
        opt.zero_grad()

    return model, opt, step


def _weights(model):
    return [p.detach().clone() for p in model.parameters()]


def plain_save_and_resume(rank: Rank, folder):
    """Whether each rank goes on bit for bit after save_checkpoint without a TrainStep, and rank 0's
    running mean is what all of them load."""
    path = f"{folder}/a.safetensors"
    model, opt, step = _plain_run(None, seed=0)
    torch.manual_seed(rank.rank + 1)
    step()
    ga.save_checkpoint(path, model=model, optimizer=opt, step=1)
    mean = model[1].running_mean.clone()
    step()
    expected, after = _weights(model), torch.rand(3)

    model, opt, step = _plain_run(None, seed=5)
    loaded = ga.load_checkpoint(path, model=model, optimizer=opt)["step"]
    same_mean = torch.equal(model[1].running_mean, mean)
    step()
    same = all(map(torch.equal, expected, _weights(model))) and torch.equal(after, torch.rand(3))
    return loaded, same, same_mean, after.tolist()


def plain_save_that_fails(rank: Rank, folder, how):
    """What save_checkpoint says on this rank."""
    model = nn.Linear(2, 2)
    path, extra = f"{folder}/a.safetensors", None
    if how == "disk":
        path = "/proc/none/a.safetensors"
    if how == "extra" and rank.rank == 1:
        extra = object()
    if how == "paths":
        path = f"{folder}/{rank.rank}.safetensors"
    ga.save_checkpoint(path, model=model, extra=extra)


def step_without_distributed(rank: Rank, wrapped):
    """How often a TrainStep without distributed= warns."""
    model = nn.Linear(2, 2)
    if wrapped:
        model = nn.parallel.DistributedDataParallel(model, process_group=rank.group)
    with mock.patch.object(logging.getLogger("gpuaccel"), "warning") as warning:
        ga.TrainStep(model).close()
    return [call.args[0] for call in warning.call_args_list]
