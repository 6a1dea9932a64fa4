"""What the ranks of tests/test_distributed.py run: processes that live for the whole module, and the checks they are given by name."""

import contextlib
import datetime
import hashlib
import json
import multiprocessing as mp
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from types import SimpleNamespace
from unittest import mock

import savers
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

import gpuaccel as ga
from gpuaccel.distributed import p2p as peers
from gpuaccel.distributed import rendezvous
from gpuaccel.distributed import trace as exchange
from gpuaccel.distributed.config import weight_hashes

PATIENCE = 300  # seconds until a rank that waits for another gives up
HANG = 600  # seconds until a process or an event that does not come counts as hanging; nothing is judged by them
VOCAB, WIDE = 40, 16
own = []  # own[r]: a group of rank r alone


# ---- the processes --------------------------------------------------------------------------------------------------


def _serve(rank, world, path, line, backend):
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{path}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    groups = {n: dist.new_group(list(range(n))) for n in range(1, world + 1)}
    own.extend(dist.new_group([r]) for r in range(world))
    while (job := line.recv()) is not None:
        name, members, options = job
        try:
            line.send((True, globals()[name](rank, groups[members], **options)))
        except Exception as error:  # the parent tells
            line.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    line.close()
    os._exit(0)  # NCCL and gloo take their time to say goodbye


class Crew:
    """`world` ranks. crew(check, ranks, **options): the result of each rank; an error of theirs is an AssertionError here."""

    def __init__(self, world, backend="gloo"):
        context, self.path = mp.get_context("spawn"), pathlib.Path(tempfile.mkdtemp()) / "store"
        self.lines, self.processes = [], []
        for rank in range(world):
            mine, theirs = context.Pipe()
            self.lines.append(mine)
            self.processes.append(
                context.Process(
                    target=_serve, args=(rank, world, self.path, theirs, backend), daemon=True
                )
            )
            self.processes[-1].start()

    def __call__(self, check, ranks, errors=False, **options):
        for line in self.lines[:ranks]:
            line.send((check.__name__, ranks, options))
        found = []
        for rank, line in enumerate(self.lines[:ranks]):
            assert line.poll(2 * PATIENCE), (
                f"rank {rank} does not answer in {check.__name__}{options}"
            )
            found.append(line.recv())
        wrong = [(rank, what) for rank, (fine, what) in enumerate(found) if not fine]
        if errors:  # True: of all ranks; or how many
            assert len(wrong) == (ranks if errors is True else errors), (
                f"{ranks - len(wrong)} of {ranks} ranks went on"
            )
            return [(kind, message) for _, (kind, message, _) in wrong]
        assert not wrong, f"rank {wrong[0][0]}: {wrong[0][1][2]}" if wrong else ""
        return [what for _, what in found]

    def close(self):
        for line in self.lines:
            with contextlib.suppress(OSError):
                line.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


# ---- a model, and batches of it -------------------------------------------------------------------------------------


class Net(nn.Module):
    """Embedding, blocks, norm, a head that may be tied, and a tensor that only some batches use."""

    def __init__(self, tied=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, WIDE)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDE, 2 * WIDE), nn.GELU(), nn.Linear(2 * WIDE, WIDE, bias=False)
            )
            for _ in range(3)
        )
        self.norm = nn.LayerNorm(WIDE)
        self.head = nn.Linear(WIDE, VOCAB, bias=False)
        self.sometimes = nn.Parameter(torch.full((WIDE,), 0.5))
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


def micro_batch(number, sometimes=True):
    """Micro-batch `number` of the whole run: its rows, and how many of its targets count, differ from its neighbours'."""
    generator = torch.Generator().manual_seed(number)
    rows, T = 1 + number % 3, 6
    tokens = torch.randint(0, VOCAB - 1, (rows, T), generator=generator)
    if sometimes and number % 4 == 1:
        tokens[0, 0] = VOCAB - 1
    targets = torch.randint(0, VOCAB, (rows, T), generator=generator)
    targets[0, : number % 5] = -100
    return tokens, targets


def mean_loss(model, micro):
    total, count = ga.token_loss(model, micro)
    return total / count.clamp(min=1)


def make_step(model, kind="adamw", micro_batches=2, **options):
    arena = ga.Arena(model)
    if kind == "adamw":
        opt = ga.AdamW(arena, lr=1e-2, weight_decay=0.1, max_norm=0.05)
    else:
        opt = torch.optim.SGD(arena.parameters(), lr=0.5)
    # "as if": products say that they have been added, as they do inside a compiled backward; only that nothing is compiled
    with (
        mock.patch("torch.compile", lambda fn, **_: fn)
        if options.get("compile") == "as if"
        else contextlib.nullcontext()
    ):
        return ga.TrainStep(
            model,
            opt,
            micro_batches=micro_batches,
            scheduler=ga.warmup_cosine(opt, 2, 9),
            **options,
        )


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def run(model, steps, ranks, rank, shares, **options):
    """`steps` steps, in each of which rank r has shares[r] micro-batches, number m * ranks + r of the step. rank None: one process has all."""
    rounds, outs = max(shares), []
    with make_step(
        model, micro_batches=rounds if rank is not None else rounds * ranks, **options
    ) as step:
        for nth in range(steps):
            members = [
                (m, r)
                for m in range(rounds)
                for r in range(ranks)
                if m < shares[r] and rank in (None, r)
            ]
            micros = [micro_batch((nth * rounds + m) * ranks + r) for m, r in members]
            out = step(micros or None)
            outs.append(
                [None if t is None else t.tolist() for t in (out.loss, out.tokens, out.norm)]
            )
        return weights(model), outs


def far(got, want):
    """(norm of the difference over the norm, name of the tensor that is farthest off)."""
    total = (
        sum(float((got[n] - want[n]).double().norm() ** 2) for n in want) ** 0.5
        / sum(float(w.double().norm() ** 2) for w in want.values()) ** 0.5
    )
    return total, max(want, key=lambda n: float((got[n] - want[n]).abs().max()))


@contextlib.contextmanager
def copied(wanted):
    """If wanted (how many elements at once), gradients are added up by copies, as on GPUs (peers.py), between files that all ranks have mapped into their memory."""
    made = {}

    def memory(how, numel, dtype):
        with tempfile.NamedTemporaryFile() as mine:
            paths = [None] * how.world
            dist.all_gather_object(paths, mine.name, group=how.group)
            mine.truncate(dtype.itemsize * numel)
            dist.barrier(how.group)
            homes = [torch.from_file(path, shared=True, size=numel, dtype=dtype) for path in paths]
            dist.barrier(how.group)
        return homes[how.rank], SimpleNamespace(
            get_buffer=lambda r, shape, dtype: homes[r].view(shape),
            barrier=lambda channel, wait: dist.barrier(how.group),
        )

    def allocate(how, arena):
        made.update(
            {
                name: memory(how, arena.numel, getattr(arena, name).dtype)
                for name in peers._read(how, arena)
            }
        )
        return {name: home for name, (home, _) in made.items()}

    instead = dict(
        SLAB=max(wanted, 4096),
        _allocate=allocate,
        _rendezvous=lambda how, homes: dict(made),
        _why_not=lambda how, arena: (
            True,
            "" if how.world > 1 and not how.ordered else "there is nothing to copy",
        ),
    )
    with (
        mock.patch.multiple("gpuaccel.distributed.p2p", **instead)
        if wanted
        else contextlib.nullcontext()
    ):
        yield


# ---- checks ---------------------------------------------------------------------------------------------------------


def as_one_process(
    rank,
    group,
    shares,
    backend="torch",
    tied=False,
    plain=True,
    steps=3,
    low=torch.float32,
    net=Net,
    how=None,
    copies=False,
    **options,
):
    """Reducer with these shares of the micro-batches against one process with all of them."""
    ranks = dist.get_world_size(group)
    with ga.use_backend(backend), copied(copies):
        mine = net(tied, seed=rank).to(low)
        how = ga.Distributed(group=group, **{"bucket_mb": 0.004, "check_every": 1, **(how or {})})
        alone = ga.Distributed(group=own[rank], ordered=True) if plain is False else None
        start = net(tied, seed=0).to(low)
        got, outs = run(mine, steps, ranks, rank, shares, distributed=how, **options)
        want, wanted = run(start, steps, ranks, None, shares, distributed=alone, **options)
    distance, name = far(got, want)
    return {
        "same": all(torch.equal(got[n], want[n]) for n in want),
        "far": distance,
        "name": name,
        "outs": outs,
        "wanted": wanted,
        "moved": far(want, weights(net(tied, seed=0).to(low)))[0],
        "hash": [hashlib.sha256(t.float().numpy().tobytes()).hexdigest() for t in got.values()],
    }


def attempt(
    rank, group, how=None, groups=None, net=None, step=None, all=None, sgd=False, **options
):
    """A step made with options that differ: what the error says. net, step, how: of rank 1; options: of all."""
    other = rank == 1
    model = (net if other and net else Net)()
    how = ga.Distributed(group=group, **(all or {}), **(how or {} if other else {}))
    arena = ga.Arena(model)
    opt = (
        torch.optim.SGD(arena.parameters())
        if sgd
        else ga.AdamW(arena, lr=1e-2 if other and groups else 1e-3)
    )
    with ga.TrainStep(model, opt, distributed=how, **{**options, **(step or {} if other else {})}):
        return None


class Twice(Net):
    """A weight that a product uses, and something else."""

    def forward(self, tokens):
        return super().forward(tokens) * (1 + self.blocks[2][0].weight.mean())


class Bare(nn.Module):
    """Products, and nothing beside them."""

    def __init__(self, tied=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDE), nn.Linear(WIDE, VOCAB, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(3))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDE, bias=False)
        self.head = nn.Linear(WIDE, VOCAB + 1, bias=False)


class Low(Net):
    def __init__(self):
        super().__init__()
        self.blocks[1].to(torch.bfloat16)


def nan_on(
    rank,
    group,
    who,
    backend,
    mode,
    ordered,
    where="blocks.0",
    copies=False,
    sharded=False,
    **options,
):
    """One step with a NaN that rank `who` makes in backward, between two good ones; each rank's weights, and what is said."""
    with ga.use_backend(backend), copied(copies):
        model = Net()
        how = ga.Distributed(group=group, ordered=ordered, sharded=sharded, bucket_mb=0.004)
        with make_step(model, accumulate=mode, distributed=how, **options) as step:
            step([micro_batch(rank)])
            before, said = weights(model), [step.opt.last_skip()]
            bad = [None]

            if where == "norm":  # one tensor alone
                model.norm.weight.register_hook(
                    lambda grad: grad * float("nan") if bad[0] and rank == who else None
                )
            else:
                model.blocks[1].register_full_backward_hook(
                    lambda m, gi, go: (
                        tuple(g * float("nan") for g in gi) if bad[0] and rank == who else None
                    )
                )
            bad[0] = True
            out = step([micro_batch(rank + 4)])
            bad[0] = None
            same = all(torch.equal(a, b) for a, b in zip(before.values(), weights(model).values()))
            said += [step.opt.last_skip(), step.reducer.last_nonfinite()]
            step([micro_batch(rank + 8)])
            moved = not torch.equal(before["head.weight"], model.head.weight)
            return {
                "same": same,
                "moved": moved,
                "said": said,
                "finite": bool(out.finite),
                "skipped": int(step.opt.skipped),
                "hash": weight_hashes(step.arena).tolist(),
            }


def refused(rank, group):
    """A second step on the same model is refused, and the first goes on as if nothing had been: its weights, and those of one that was left alone."""
    found = []
    with ga.use_backend("simt"), copied(1 << 22):
        for again in (True, False):
            model = Net()
            with make_step(model, distributed=ga.Distributed(group=group, sharded=True)) as step:
                step([micro_batch(rank)])
                if again:
                    try:
                        ga.TrainStep(
                            model, step.opt, distributed=ga.Distributed(group=group, sharded=True)
                        )
                    except ga.ArgumentError as error:
                        found.append(str(error))
                step([micro_batch(rank + 4)])
                found.append(weight_hashes(step.arena).tolist())
    return found


def drift(rank, group, who, backend="torch"):
    """Rank `who` changes one bit of a weight after two steps: what the next comparison says, and when."""
    with ga.use_backend(backend):
        model, how = Net(), ga.Distributed(group=group, check_every=2)
        with make_step(model, distributed=how) as step:
            for nth in range(1, 6):
                step([micro_batch(rank)])
                if nth == 2 and rank == who:
                    model.norm.weight.data.view(torch.int32)[3] ^= 1


def held(rank, group, find_unused):
    """A tensor gets its first gradient in the second step, on the last rank only."""
    model, last = Net(), rank == dist.get_world_size(group) - 1
    with make_step(model, distributed=ga.Distributed(group=group, find_unused=find_unused)) as step:
        step([micro_batch(0)])
        tokens, targets = micro_batch(0)
        if last:
            tokens[0, 0] = VOCAB - 1
        before = model.sometimes.detach().clone()
        step([(tokens, targets)])
        return not torch.equal(before, model.sometimes)


def start_equal(rank, group):
    """Every rank begins with rank 0's weights, frozen parameters and buffers."""
    model = Net(seed=rank)
    model.seen += rank
    model.never.requires_grad_(False)
    model.never += rank
    with make_step(model, distributed=ga.Distributed(group=group)):
        want = Net(seed=0)
        return all(
            torch.equal(a, b)
            for a, b in zip(model.state_dict().values(), want.state_dict().values())
        )


def order_of_buckets(rank, group, mode):
    """Which buckets were sent while backward still ran, and over what."""
    model, sent = Net(), []
    with make_step(
        model,
        accumulate=mode,
        distributed=ga.Distributed(group=group, bucket_mb=0.004),
        micro_batches=1,
    ) as step:
        send, reduce = step.reducer._send, step.reducer.reduce

        def noted():
            sent.append(step.reducer.next)
            send()

        def late(*given):
            sent.append("backward is over")
            return reduce(*given)

        step.reducer._send, step.reducer.reduce = noted, late
        step(micro_batch(1))
        buckets = step.reducer.buckets
        return (
            sent,
            [
                [step.arena.blocks[s.block].name for s in step.arena.segments[b.first : b.last]]
                for b in buckets
            ],
            [b.start for b in buckets[1:]] == [b.stop for b in buckets[:-1]]
            and buckets[-1].stop == step.arena.numel,
        )


def memory_of_moments(rank, group, backend):
    """(bytes of moments here, those of one process, those of what every rank keeps)."""
    with ga.use_backend(backend):
        model = Net()
        with make_step(
            model, distributed=ga.Distributed(group=group, sharded=True, bucket_mb=0.1)
        ) as step:
            step([micro_batch(rank)])
            moments = [
                t for state in step.opt.state.values() for key, t in state.items() if key != "step"
            ]
            kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in moments}
            return (
                sum(kept.values()),
                8 * step.arena.numel,
                8 * len(step.reducer.buckets) * dist.get_world_size(group) * ga.optim.arena.CHUNK,
            )


def _four_rounds(step, rank, ranks, first, last):
    for nth in range(first, last):
        step([micro_batch(nth * 4 + m * ranks + rank) for m in range(4 // ranks)])


def shares_to_file(rank, group, backend, folder):
    with ga.use_backend(backend):
        model = Net()
        with make_step(
            model, distributed=ga.Distributed(group=group, sharded=True, ordered=True)
        ) as step:
            _four_rounds(step, rank, 2, 0, 2)
            with step.opt.whole():
                if rank == 0:
                    ga.save_checkpoint(
                        f"{folder}/two.safetensors",
                        model=model,
                        optimizer=step.opt,
                        arena=step.arena,
                        scheduler=step.scheduler,
                        step=2,
                    )
            try:
                ga.save_checkpoint(
                    f"{folder}/cut-{rank}.safetensors",
                    model=model,
                    optimizer=step.opt,
                    arena=step.arena,
                )
            except ga.CheckpointError as error:
                assert "is sharded over 2 ranks" in str(error)
            else:
                raise AssertionError("a share was saved as if it were all")
            before = [t.clone() for state in step.opt.state.values() for t in state.values()]
            dist.barrier(group)
            with step.opt.whole():  # over a state that is there
                ga.load_checkpoint(
                    f"{folder}/two.safetensors",
                    model=model,
                    optimizer=step.opt,
                    arena=step.arena,
                    scheduler=step.scheduler,
                )
            assert all(
                torch.equal(a, b)
                for a, b in zip(
                    before, (t for state in step.opt.state.values() for t in state.values())
                )
            )
        if rank == 0:
            plain = Net()
            with make_step(plain, micro_batches=4) as step:
                _four_rounds(step, 0, 1, 0, 4)
                torch.save([p.detach() for p in plain.parameters()], f"{folder}/want.pt")


def savers_of_shares(rank, group, low, folder):
    """What savers of others write of a sharded step, inside gathered(): the bits of the same run without shares."""
    found = []
    for sharded in (True, False):
        model = Net().to(low)
        with make_step(
            model, distributed=ga.Distributed(group=group, sharded=sharded, ordered=True)
        ) as step:
            _four_rounds(step, rank, 2, 0, 2)
            with step.gathered():
                here = pathlib.Path(folder, f"{rank}-{sharded}")
                here.mkdir()
                torch.save(step.opt.state_dict(), here / "optimizer.pt")
                states = torch.load(here / "optimizer.pt", weights_only=True)["state"]
                bits = [savers.bits(state) for _, state in sorted(states.items())]
                for save in (
                    savers.by_torch_state_dict,
                    savers.by_torch_whole_model,
                    savers.by_pickle,
                    savers.by_deepcopy,
                    savers.by_safetensors_model,
                    savers.by_distributed_checkpoint,
                ):
                    (here / save.__name__).mkdir()
                    back = save(model, Net(seed=1).to(low), here / save.__name__)
                    bits.append(savers.bits(back.state_dict()))
                    assert bits[-1] == savers.bits(model.state_dict()), save.__name__
                found.append((bits, savers.bytes_below(here)))
            _four_rounds(step, rank, 2, 2, 3)
    (shared, size), (alone, expected) = found
    return shared == alone and abs(size - expected) < 2048


def shares_from_file(rank, group, backend, folder):
    ranks = dist.get_world_size(group)
    with ga.use_backend(backend):
        model = Net(seed=7)
        with make_step(
            model,
            micro_batches=4 // ranks,
            distributed=ga.Distributed(group=group, sharded=True, ordered=True),
        ) as step:
            with step.opt.whole() if ranks > 1 else contextlib.nullcontext():
                ga.load_checkpoint(
                    f"{folder}/two.safetensors",
                    model=model,
                    optimizer=step.opt,
                    arena=step.arena,
                    scheduler=step.scheduler,
                )
            _four_rounds(step, rank, ranks, 2, 4)
            return all(
                torch.equal(p, want)
                for p, want in zip(model.parameters(), torch.load(f"{folder}/want.pt"))
            )


def trained(rank, group, folder, stops, ranks_then, sharded, steps=5, dropout=False):
    """ga.train in ordered mode with checkpoints, left after `stops` steps by `ranks_then` ranks, and gone on with by this group's: the losses."""
    ranks = dist.get_world_size(group)

    def go(members, rank, group, last, resume):
        model = Net()
        if dropout:
            model.norm = nn.Sequential(nn.Dropout(), model.norm)
            torch.manual_seed(rank + 10 * resume)
        how = ga.Distributed(group=group, ordered=True, sharded=sharded)
        batches = ga.Batches(
            torch.arange(400) % VOCAB,
            12 // members,
            6,
            seed=3,
            rank=rank,
            ranks=members,
            micro_batches=4 // members,
        )
        with make_step(model, micro_batches=4 // members, distributed=how) as step:
            return [
                reading.loss
                for reading in ga.train(
                    step,
                    batches,
                    last,
                    checkpoint_dir=folder,
                    metrics=f"{folder}/lines.jsonl",
                    resume=resume,
                )
            ]

    if stops and rank < ranks_then:
        go(ranks_then, rank, group if ranks_then == ranks else own[rank], stops, False)
    dist.barrier(group)
    go(ranks, rank, group, steps, bool(stops))
    with open(f"{folder}/lines.jsonl") as lines:
        return [json.loads(line)["loss"] for line in lines]


class Head(nn.Module):
    """A head of more than 100 MB, which is a message of its own: the reference's coordinator refused it."""

    def __init__(self, tied, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = (
            nn.utils.skip_init(nn.Linear, *shape, bias=False)
            for shape in ((1, 1024), (1024, 26000))
        )
        with torch.no_grad():
            self.body.weight.copy_(torch.randn(1024, 1))
            self.head.weight.copy_(torch.linspace(-1, 1, 26000)[:, None].expand(-1, 1024))

    def forward(self, x):
        return self.head(self.body(x))


def large_head(rank, group):
    """The gradient of a large head over two ranks: the largest difference from that of one process, in units of its largest element."""

    def loss(model, x):
        return model(x).square().mean(), 1

    x, grads = torch.tensor([[1.0], [2.0]]), []
    for how, part in ((ga.Distributed(group=group), x[rank : rank + 1]), (None, x)):
        model = Head(False, 0)
        with ga.TrainStep(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            loss,
            micro_batches=1 if how else 2,
            distributed=how,
        ) as step:
            step(part)
            grads.append(model.head.weight.detach() - Head(False, 0).head.weight)
    return float((grads[0] - grads[1]).abs().max() / grads[1].abs().max()), 4 * grads[0].numel()


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


def broken_off(rank, group, net=Checkpointed):
    """A step that raises on every rank after the first bucket is gone; then another one."""
    with make_step(
        SharedInside(), distributed=ga.Distributed(group=group, bucket_mb=0.004)
    ) as step:
        said = []
        for _ in range(2):
            try:
                step([micro_batch(rank)])
            except (ga.ArgumentError, ga.RankError) as error:
                said.append(str(error))
        return said


def transformer(rank, group, device, replay, steps=4, **how):
    """A small transformer on whole batches, this rank's rows of each: its weights' hashes and losses, and how far it is from one process."""
    ranks, found, plain = dist.get_world_size(group), None, None
    options = {key: how.pop(key) for key in ("accumulate", "low", "compile") if key in how}
    left = []  # products still to come when a bucket is sent while backward runs
    for distributed in (
        ga.Distributed(group=group, bucket_mb=0.05, find_unused=False, **how),
        None,
    ):
        torch.manual_seed(0)
        model = (
            ga.Config(vocab=64, hidden=64, intermediate=128, layers=2, heads=2, kv_heads=2, T=16)
            .build()
            .to(device, options.get("low"))
        )
        arena = ga.Arena(model)
        opt, losses = ga.AdamW(arena, lr=1e-2, max_norm=0.1), []
        with ga.TrainStep(
            model,
            opt,
            micro_batches=2 if distributed else 2 * ranks,
            accumulate=options.get("accumulate", "arena"),
            deterministic=True,
            compile=distributed is not None and options.get("compile", False),
            replay=replay if distributed else "eager",
            scheduler=ga.warmup_cosine(opt, 2, 9),
            distributed=distributed,
        ) as step:
            if distributed:
                _watch_products(step, left)
            for nth in range(steps):
                rows = torch.randint(
                    0, 64, (2, ranks, 3, 17), generator=torch.Generator().manual_seed(nth)
                ).to(device)
                mine = rows[:, rank].reshape(-1, 17) if distributed else rows.reshape(-1, 17)
                losses.append(
                    float(step((mine[:, :-1].contiguous(), mine[:, 1:].contiguous())).loss)
                )
            if distributed:
                assert step.replays == replay, step.reason
                copies = step.reducer.p2p is not None
                found = (
                    weight_hashes(arena, masters="low" not in options).tolist(),
                    losses,
                    weights(model),
                )
            else:
                plain = weights(model)
    return {
        "hash": found[0],
        "losses": found[1],
        "far": far(found[2], plain)[0],
        "left": left,
        "copies": copies,
    }


def _watch_products(step, left):
    """Notes at each bucket that is sent while backward runs how many fused products are still to come in it."""
    send = step.reducer._send

    def watched():
        if step.reducer.missing is not None:
            left.append(sum(step.accumulator.usual) - sum(step.accumulator.uses))
        send()

    step.reducer._send = watched


def watched(rank, group, accumulate, backend, copies=False):
    """exchange.watch: the spans, how many buckets there are, and whether it changed a bit of what a plain step does."""
    with ga.use_backend(backend), copied(copies):
        weights_of = []
        for take in (lambda step, batch: step(batch), exchange.watch):
            with make_step(
                Net(),
                micro_batches=2,
                accumulate=accumulate,
                distributed=ga.Distributed(group=group, bucket_mb=0.004),
            ) as step:
                step([micro_batch(rank), micro_batch(2 + rank)])
                spans = take(step, [micro_batch(4 + rank), micro_batch(6 + rank)])
                weights_of.append(weight_hashes(step.arena).tolist())
                step([micro_batch(8 + rank)])
                assert (
                    not {"_sum", "_exchange", "_join"} & vars(step.reducer).keys()
                    and step.meter is None
                )
        return [tuple(s) for s in spans], len(step.reducer.buckets), weights_of[0] == weights_of[1]


# ---- what ga.launch runs --------------------------------------------------------------------------------------------


def tensors(values):
    return {"values": values + 1, "parameter": nn.Parameter(values.float())}


def not_sendable():
    return lambda: 5


def fewer_steps():
    how = ga.Distributed()
    with make_step(Net(), distributed=how) as step:
        for nth in range(4 - 2 * how.rank):
            step([micro_batch(nth)])


def steps_with(trouble, who, steps=6):
    """Train, until in step 3 something happens to rank `who`."""
    how = ga.Distributed()
    with make_step(Net(), distributed=how) as step:
        for nth in range(steps):
            if nth == 3 and how.rank == who:
                trouble()
            step([micro_batch(nth * how.world + how.rank)])
        return how.rank, how.world, weight_hashes(step.arena).tolist()


def nothing():
    pass


def yields(steps, trouble=nothing):
    """A generator, as ga.launch draws it: the readings of ga.train, then something may happen to rank 1; returns the number of the rank."""
    how = ga.Distributed()
    with make_step(Net(), distributed=how) as step:
        yield from ga.train(
            step, ([micro_batch(nth * how.world + how.rank)] for nth in range(steps)), steps
        )
    if how.rank == 1:
        trouble()
    return how.rank


def raises():
    raise ValueError("no more data")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def leaves():
    os._exit(3)


def hangs():
    time.sleep(3600)


def train_and_die(folder, at=None, who=1, steps=20):
    """ga.train with a checkpoint after every second step; rank `who` is killed `at` seconds after it has begun (None: not)."""
    how = ga.Distributed(ordered=True)
    batches = ga.Batches(
        torch.arange(400) % VOCAB,
        12 // how.world,
        6,
        seed=3,
        rank=how.rank,
        ranks=how.world,
        micro_batches=4 // how.world,
    )
    model = Net()
    with make_step(model, micro_batches=4 // how.world, distributed=how) as step:
        if at is not None and how.rank == who:
            threading.Timer(at, killed).start()
        for _ in ga.train(
            step,
            batches,
            steps,
            checkpoint_dir=folder,
            checkpoint_every=2,
            metrics=f"{folder}/lines.jsonl",
            resume=True,
        ):
            time.sleep(0.02)


def comes_late(where):
    """Rank 1 hangs before it makes its TrainStep, or in the second micro-batch of the first step, when sums in order are under way."""
    how = ga.Distributed(ordered=True)
    if how.rank == 1 and where == "before":
        hangs()

    def loss_fn(model, micro, seen=[]):
        seen.append(micro)
        if how.rank == 1 and len(seen) == 2:
            hangs()
        return ga.token_loss(model, micro)

    with make_step(Net(), loss_fn=loss_fn, distributed=how) as step:
        step([micro_batch(how.rank), micro_batch(2 + how.rank)])


def comes_no_more(device, how):
    """Started as torchrun does it: rank 1 comes to two steps, rank 0 to a third, where it waits. CPUs: only watch() has a time limit that ends soon."""
    cuda = device == "cuda"
    how = ga.Distributed(timeout=6.0 if cuda else 600.0, **how)
    if not cuda:
        threading.Thread(target=rendezvous.watch, args=(rendezvous.store, 6.0), daemon=True).start()
    model = (
        ga.Config(vocab=64, hidden=64, intermediate=128, layers=2, heads=2, kv_heads=2, T=16)
        .build()
        .to(device)
    )
    with ga.TrainStep(
        model, ga.AdamW(ga.Arena(model)), replay="graph" if cuda else "eager", distributed=how
    ) as step:
        rows = torch.randint(0, 64, (3, 17), generator=torch.Generator().manual_seed(how.rank)).to(
            device
        )
        for nth in range(3):
            if nth == 2 and how.rank == 1:
                hangs()
            float(step((rows[:, :-1].contiguous(), rows[:, 1:].contiguous())).loss)


def fails_in_the_loop(folder):
    """Rank 1 has an error of its own between two steps, with a sharded optimizer and checkpoints on the way."""
    how = ga.Distributed(sharded=True)
    batches = ga.Batches(torch.arange(400) % VOCAB, 2, 6, rank=how.rank, ranks=2)
    with make_step(Net(), distributed=how) as step:
        for reading in ga.train(step, batches, 50, checkpoint_dir=folder, checkpoint_every=2):
            if reading.step == 3 and how.rank == 1:
                raises()


# ---- the command line -----------------------------------------------------------------------------------------------


def lines_of(folder):
    return [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def gpuaccel(folder, *options, launcher=(sys.executable, "-m", "gpuaccel"), **settings):
    text = folder.parent / "text.txt"
    if not text.exists():
        text.write_text("The gradient of a sum is the sum of the gradients. " * 200)
    command = [
        *launcher,
        "train",
        "--text",
        str(text),
        "--batch",
        "4",
        "--micro-batches",
        "4",
        "--seq",
        "16",
        "--out",
        str(folder),
        "--no-progress",
        "--device",
        "cpu",
        *options,
    ]
    return subprocess.Popen(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
    )


def step_of(path) -> int:
    return int(path.stem.split("-")[1])


def children_of(pid) -> "list[int]":
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def listens_at(pid) -> "set[str]":
    """The addresses at which a process listens; "::" for any of IPv6."""
    links = [
        os.readlink(link) for link in pathlib.Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()
    ]
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:")}
    rows = [
        (version, line.split())
        for version in ("tcp", "tcp6")
        for line in pathlib.Path(f"/proc/{pid}/net/{version}").read_text().splitlines()[1:]
    ]
    return {
        socket.inet_ntoa(bytes.fromhex(row[1][:8])[::-1]) if version == "tcp" else "::"
        for version, row in rows
        if row[3] == "0A" and row[9] in own
    }


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
