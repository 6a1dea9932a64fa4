"""Checkpoints: a resumed run is bit-identical; no kill and no bad file harms a run."""

import copy
import errno
import json
import os
import random
import re
import struct

import numpy as np
import pytest
import torch
from helpers import FullDisk
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from gpuaccel import files
from gpuaccel.errors import ArgumentError, CheckpointError
from gpuaccel.optim.arena import Arena
from gpuaccel.training import checkpoint_file
from gpuaccel.training.checkpoint import (
    checkpoint_path,
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from gpuaccel.training.data import Batches


class Net(nn.Module):
    """Embedding, dropout, a norm with buffers, and a head that may be tied to the embedding."""

    def __init__(self, width=8, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(width, 16, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens).flatten(0, 1))
        return self.head(self.dropout(torch.tanh(x)))


class Run:
    """A small training run with everything whose state a checkpoint must hold."""

    def __init__(
        self, seed=0, width=8, tied=False, optimizer=torch.optim.AdamW, arena=False, **options
    ):
        torch.manual_seed(seed)
        self.model = Net(width, tied).to(torch.bfloat16 if arena == "bf16" else torch.float32)
        self.arena = Arena(self.model) if arena else None
        decayed = [self.model.embedding.weight]
        others = [p for p in self.model.parameters() if p is not self.model.embedding.weight]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
        groups = self.arena.parameter_groups() if arena else groups
        self.optimizer = optimizer(groups, lr=0.01, **options)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=100)
        self.batches = Batches(torch.arange(400) * 7 % 16, batch=3, T=5, seed=seed)

    def train(self, steps):
        losses = []
        for _ in range(steps):
            inputs, targets = next(self.batches)
            loss = nn.functional.cross_entropy(self.model(inputs).float(), targets.flatten())
            # The state of Python's and NumPy's generators counts, too.
            loss = loss * (1 + 0.01 * random.random() + 0.01 * np.random.rand())
            loss.backward()
            if self.arena:
                for parameter, master in zip(self.arena.module_parameters, self.arena.masters):
                    master.grad = parameter.grad.float()
            self.optimizer.step()
            self.model.zero_grad()
            self.scheduler.step()
            losses.append(struct.pack("<f", loss.item()).hex())
        return losses

    def parts(self):
        return dict(
            model=self.model,
            optimizer=self.optimizer,
            arena=self.arena,
            scheduler=self.scheduler,
            batches=self.batches,
        )

    def everything(self):
        """All state, as values that compare exactly."""
        tensors = dict(self.model.state_dict())
        if self.arena:
            tensors["arena"] = self.arena.weights
        options = []
        for i, group in enumerate(self.optimizer.param_groups):
            options.append({key: value for key, value in group.items() if key != "params"})
            for j, p in enumerate(group["params"]):
                state = self.optimizer.state.get(p, {})
                tensors.update(((i, j, key), value) for key, value in state.items())
        values = (
            {name: tensor.tolist() for name, tensor in tensors.items()},
            options,
            self.scheduler.state_dict(),
            self.batches.state_dict(),
            torch.get_rng_state().tolist(),
            random.getstate(),
            str(np.random.get_state()),
        )
        return copy.deepcopy(values)


KINDS = {
    "adamw": {},
    "adamw_tensor_lr": {"foreach": False, "lr_tensor": True},
    "tied": {"tied": True},
    "amsgrad": {"amsgrad": True},
    "sgd": {"optimizer": torch.optim.SGD, "momentum": 0.9},
    "arena": {"arena": "fp32"},
    "arena_bf16": {"arena": "bf16"},
    "arena_tied": {"arena": "bf16", "tied": True},
    "nadam": {"optimizer": torch.optim.NAdam},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The order of torch's sums, and so the bits, depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seeds():
    seed_all(1)


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def make(kind, **options):
    options = {**KINDS[kind], **options}
    lr_tensor = options.pop("lr_tensor", False)
    run = Run(**options)
    if lr_tensor:
        for group in run.optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_bit_identical(kind, tmp_path):
    run = make(kind)
    run.train(7)
    extra = {"a": (1, [2.5, None])}
    path = save_checkpoint(
        tmp_path / "deep" / "er" / "one.safetensors", **run.parts(), step=7, extra=extra
    )
    before = run.everything()
    expected = run.train(9)
    after = run.everything()

    def addresses(run):
        return [p.data_ptr() for p in [*run.model.parameters(), *run.optimizer.state]]

    seed_all(99)
    other = make(kind, seed=5)
    other.train(2)  # it need not be fresh
    before_load = addresses(other)
    loaded = load_checkpoint(path, **other.parts())
    assert loaded == {"step": 7, "extra": extra}
    assert other.everything() == before
    assert other.train(9) == expected
    assert other.everything() == after
    assert addresses(other) == before_load
    if other.arena:
        other.arena.check()
        start = other.arena.weights.data_ptr()
        stop = start + 4 * other.arena.numel
        assert all(start <= p.data_ptr() < stop for p in other.arena.parameters())


def test_schedulers_with_tuples_counters_and_nesting_come_back_exactly(tmp_path):
    def make_scheduler(optimizer):
        lr_scheduler = torch.optim.lr_scheduler
        parts = [
            lr_scheduler.LinearLR(optimizer),
            lr_scheduler.MultiStepLR(optimizer, [3, 3, 9]),
        ]
        return lr_scheduler.SequentialLR(optimizer, parts, [2])

    run, other = make("adamw"), make("adamw", seed=2)
    run.scheduler, other.scheduler = make_scheduler(run.optimizer), make_scheduler(other.optimizer)
    run.train(5)
    path = save_checkpoint(tmp_path / "c", **run.parts())
    before, expected, after = run.everything(), run.train(8), run.everything()
    load_checkpoint(path, **other.parts())
    assert other.everything() == before
    assert other.train(8) == expected and other.everything() == after


def test_a_learning_rate_tensor_is_filled_in_place(tmp_path):
    run = make("adamw_tensor_lr")
    run.train(3)
    path = save_checkpoint(tmp_path / "c", **run.parts())
    other = make("adamw_tensor_lr", seed=1)
    lr = other.optimizer.param_groups[0]["lr"]
    load_checkpoint(path, **other.parts())
    assert other.optimizer.param_groups[0]["lr"] is lr and lr == run.optimizer.param_groups[0]["lr"]


def test_implementation_flags_stay_as_built(tmp_path):
    run = Run(foreach=True)
    run.train(2)
    path = save_checkpoint(tmp_path / "c", **run.parts())
    other = Run(seed=2, foreach=False)
    load_checkpoint(path, **other.parts())
    assert other.optimizer.param_groups[0]["foreach"] is False
    other.train(1)


def test_a_checkpoint_of_step_0_clears_the_optimizer(tmp_path):
    run = make("adamw")
    path = save_checkpoint(tmp_path / "c", **run.parts())
    before = run.everything()
    run.train(3)
    load_checkpoint(path, **run.parts())
    assert run.everything() == before


def test_weights_alone_can_be_read_and_by_safetensors_too(tmp_path):
    run = make("arena_bf16")
    run.train(2)
    path = save_checkpoint(tmp_path / "c.safetensors", **run.parts(), step=2)
    tensors = load_file(path)
    for name, tensor in run.model.state_dict().items():
        stored = tensors[f"model.{name}"]
        assert torch.equal(stored, tensor) and stored.dtype == tensor.dtype
    for name, tensor in run.arena.named_master().items():
        assert torch.equal(tensors[f"master.{name}"], tensor)
    model = Net().bfloat16()
    state = torch.get_rng_state()
    load_checkpoint(path, model=model, restore_rng=False)
    assert torch.equal(model.head.weight, run.model.head.weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_shape_and_dtype_survives(tmp_path):
    model = nn.Module()
    values = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "one": torch.ones(1),
        "ints": torch.arange(3),
        "slice": torch.arange(9.0)[3:5],
        "flags": torch.tensor([True, False]),
        "bytes": torch.arange(7).byte(),
        "nans": torch.tensor([float("nan"), -0.0, float("inf")]),
        "strided": torch.rand(6, 4).t(),
    }
    float8 = (torch.float8_e4m3fn, torch.float8_e5m2)
    for dtype in (torch.float64, torch.float16, torch.bfloat16, *float8):
        values[str(dtype).replace(".", "_")] = torch.rand(5).to(dtype)
    for name, value in values.items():
        model.register_buffer(name, value.clone() if name != "strided" else value)
    path = save_checkpoint(tmp_path / "c", model=model)
    other = copy.deepcopy(model)
    for buffer in other.buffers():
        buffer.zero_()
    load_checkpoint(path, model=other)

    def raw(tensor):
        return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()

    for name, value in values.items():
        loaded = getattr(other, name)
        assert loaded.dtype == value.dtype and raw(loaded) == raw(value), name


def test_tied_weights(tmp_path):
    tied, untied = Net(tied=True), Net(tied=False)
    path = save_checkpoint(tmp_path / "tied", model=tied)
    load_checkpoint(path, model=untied)
    assert torch.equal(untied.head.weight, untied.embedding.weight)
    path = save_checkpoint(tmp_path / "untied", model=Net(tied=False))
    before = tied.head.weight.clone()
    with pytest.raises(
        CheckpointError, match="model.head.weight and model.embedding.weight are one tensor"
    ):
        load_checkpoint(path, model=tied)
    assert torch.equal(tied.head.weight, before) and tied.head.weight is tied.embedding.weight


@pytest.mark.parametrize("call", [save_checkpoint, load_checkpoint])
def test_batches_without_a_position_are_refused(call, tmp_path):
    loader = torch.utils.data.DataLoader(torch.zeros(4, 2))
    with pytest.raises(ArgumentError, match="batches is a DataLoader.*StatefulDataLoader"):
        call(tmp_path / "c", model=nn.Linear(1, 1), batches=loader)
    assert os.listdir(tmp_path) == []


# ---- files that must be refused ------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True])
def test_a_file_of_torchs_is_refused_in_words(old, tmp_path):
    state = nn.Linear(1, 1).state_dict()
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
    message = "a.pt is not a safetensors file; read .pt files by torch.load"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "a.pt", model=nn.Linear(1, 1))


@pytest.fixture
def saved(tmp_path):
    run = make("adamw")
    run.train(3)
    return save_checkpoint(checkpoint_path(tmp_path, 3), **run.parts(), step=3, extra="kept")


def refuse(path, match, run=None, **changes):
    """Loading raises CheckpointError that names the file, and changes nothing at all."""
    run = run or make("adamw", seed=8)
    run.train(1)
    before = run.everything()
    with pytest.raises(CheckpointError, match=match) as error:
        load_checkpoint(path, **{**run.parts(), **changes})
    assert str(path) in str(error.value)
    assert run.everything() == before


def test_truncated(saved):
    data = saved.read_bytes()
    for size in (0, 3, 8, 100, len(data) // 2, len(data) - 1):
        saved.write_bytes(data[:size])
        refuse(saved, "cannot be read as safetensors")
    saved.write_bytes(data + b"x")
    refuse(saved, "cannot be read as safetensors")


def test_a_flipped_bit_anywhere_is_found(saved):
    data = saved.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    run = make("adamw")
    before = run.everything()
    generator = random.Random(0)
    offsets = [generator.randrange(header) for _ in range(150)]
    offsets += [generator.randrange(len(data)) for _ in range(50)]
    for offset in offsets:
        damaged = bytearray(data)
        damaged[offset] ^= 1 << generator.randrange(8)
        saved.write_bytes(damaged)
        # What damage to a header does is found by whoever reads it first.
        words = " is damaged: it has sha256 [0-9a-f]{64}, expected [0-9a-f]{64}$"
        match = re.escape(str(saved)) + (words if offset >= header else "")
        with pytest.raises(CheckpointError, match=match):
            load_checkpoint(saved, **run.parts())
    assert run.everything() == before


def test_not_a_checkpoint(tmp_path):
    path = tmp_path / "x.safetensors"
    refuse(path, "is not a file")
    refuse(tmp_path, "manifest.safetensors is not a file")
    path.write_text("some text that is long enough to look like a header")
    refuse(path, "cannot be read as safetensors")
    torch.save({"a": torch.ones(2)}, path)
    refuse(path, "is not a safetensors file; read .pt files by torch.load")
    save_file({"a": torch.ones(2)}, path)
    refuse(path, "not a checkpoint of this version: its format is None")
    save_file({"a": torch.ones(2)}, path, {"format": "gpuaccel-checkpoint-9"})
    refuse(path, "gpuaccel-checkpoint-9")


def test_another_model_dtype_or_optimizer(saved):
    refuse(
        saved,
        r"model.embedding.weight is F32 \[16, 8\] in the file, expected F32 \[16, 12\] \(and",
        Run(width=12),
    )
    refuse(
        saved,
        r"model.embedding.weight is F32 \[16, 8\] in the file, expected BF16",
        model=Net().bfloat16(),
    )
    refuse(
        saved,
        r"model.weight is nothing in the file, expected F32 \[2, 2\]",
        model=nn.Linear(2, 2, bias=False),
    )
    partly = Net()
    del partly.head
    refuse(saved, r"model.head.weight is F32 \[16, 8\] in the file, expected nothing", model=partly)
    refuse(saved, "holds the state of AdamW, expected SGD", Run(optimizer=torch.optim.SGD))
    run = make("adamw")
    refuse(
        saved,
        r"its groups have \[1, 3\] parameters, expected \[4\]",
        optimizer=torch.optim.AdamW(run.model.parameters()),
        model=run.model,
    )
    refuse(
        saved,
        "holds the state of OneCycleLR, expected StepLR",
        scheduler=torch.optim.lr_scheduler.StepLR(run.optimizer, 1),
    )
    refuse(
        saved,
        "that is not in the model",
        optimizer=torch.optim.AdamW([nn.Parameter(torch.ones(3))]),
    )
    refuse(
        saved,
        "sequences=79, expected sequences=39",
        batches=Batches(torch.arange(200) % 16, batch=3, T=5),
    )
    refuse(saved, "T=5, expected T=1", batches=Batches(torch.arange(80) % 16, batch=3, T=1))
    refuse(
        saved, "does not fit this arena: master", make("arena_bf16"), model=Net(), optimizer=None
    )


def test_asking_for_what_the_file_lacks(tmp_path):
    path = save_checkpoint(tmp_path / "c", model=Net())
    refuse(path, "holds no optimizer state, expected that of a AdamW")
    refuse(path, "holds no batches state", optimizer=None, scheduler=None)


def test_values_that_need_pickle_are_refused_before_writing(tmp_path):
    cases = (
        ({"f": print}, r"extra\['f'\] is a builtin"),
        ({"s": {1}}, r"extra\['s'\] is a set"),
    )
    for extra, name in cases:
        with pytest.raises(CheckpointError, match=name):
            save_checkpoint(tmp_path / "c", model=Net(), extra=extra)
    with pytest.raises(CheckpointError, match="model.a is .*sparse"):
        model = nn.Module()
        model.register_buffer("a", torch.eye(2).to_sparse())
        save_checkpoint(tmp_path / "c", model=model)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_version_whose_digest_fits(saved):
    tensors = load_file(saved)
    with safe_open(saved, "pt") as file:
        metadata = file.metadata()
    state = json.loads(metadata["state"])
    del metadata["sha256"], state["optimizer"]["groups"]
    checkpoint_file._write(saved, tensors, {**metadata, "state": json.dumps(state)})
    refuse(saved, r"is damaged: its content is not what save_checkpoint writes \(.*groups")


class Stubborn:
    """A state that is changed before the error."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        if self.value == "refused":
            raise KeyError("value")


@pytest.mark.parametrize("stubborn", ["batches", "scheduler"])
def test_a_state_that_is_refused_while_it_is_loaded_is_put_back(tmp_path, stubborn):
    """That of the others, too."""
    parts = {name: Stubborn("loaded") for name in ("batches", "scheduler")}
    parts[stubborn] = Stubborn("refused")
    path = save_checkpoint(tmp_path / "c", model=Net(), **parts)
    changes = {name: Stubborn("before") for name in parts}
    refuse(path, r"does not fit this Stubborn: KeyError\('value'\)", optimizer=None, **changes)
    assert [thing.value for thing in changes.values()] == ["before"] * 2


# ---- disks and kills -----------------------------------------------------------------------------


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_checkpoint(checkpoint_path(tmp_path / "runs", 1), model=Net())


def raises(error):
    def function(*args, **kwargs):
        raise error

    return function


@pytest.mark.parametrize(
    "module, name, function, error",
    [
        (files, "open", raises(PermissionError(errno.EACCES, "Permission denied")), "Permission"),
        (files, "open", lambda *args: FullDisk(open(*args)), "No space left on device"),
        (os, "fsync", raises(OSError(errno.EIO, "Input/output error")), "Input/output error"),
        (os, "replace", raises(OSError(errno.EIO, "Input/output error")), "Input/output error"),
        (checkpoint_file, "host_bytes", raises(KeyboardInterrupt), None),
    ],
)
def test_a_save_that_fails_anywhere_leaves_the_old_file(
    module, name, function, error, tmp_path, monkeypatch
):
    path = save_checkpoint(checkpoint_path(tmp_path, 1), model=Net(), step=1)
    before = path.read_bytes()
    message = f"{re.escape(str(path))} cannot be written .{error}.*; what was there before is unt"
    with monkeypatch.context() as patch:
        patch.setattr(module, name, function, raising=False)
        with pytest.raises(
            CheckpointError if error else KeyboardInterrupt, match=error and message
        ):
            save_checkpoint(path, model=Net(), step=2)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]
    assert load_checkpoint(latest_checkpoint(tmp_path), model=Net())["step"] == 1


def test_latest_and_prune(tmp_path):
    assert latest_checkpoint(tmp_path / "absent") is None and latest_checkpoint(tmp_path) is None
    for step in (5, 100, 20, 123456789):
        save_checkpoint(checkpoint_path(tmp_path, step), model=nn.Linear(1, 1), step=step)
    for name in (
        "best.safetensors",
        "step-00000100.safetensors.tmp-7",
        "step-999999999.safetensors.tmp-7",
        "step-1.safetensors",
    ):
        (tmp_path / name).write_text("")
    assert latest_checkpoint(str(tmp_path)) == checkpoint_path(tmp_path, 123456789)
    newest = checkpoint_path(tmp_path, 123456789)
    gone = {path.name for path in prune_checkpoints(newest, keep=2)}
    assert gone == {
        "step-00000005.safetensors",
        "step-00000020.safetensors",
        "step-00000100.safetensors.tmp-7",
    }
    assert len(os.listdir(tmp_path)) == 5
    # A run that has gone on from an older checkpoint, or a new one: later steps are not its own.
    saved = checkpoint_path(tmp_path, 60)
    for step in (40, 50, 60):
        save_checkpoint(checkpoint_path(tmp_path, step), model=nn.Linear(1, 1), step=step)
    gone = prune_checkpoints(saved, keep=2)
    assert gone == [checkpoint_path(tmp_path, 40)] and saved.exists()
    assert checkpoint_path(tmp_path, 100).exists()
    with pytest.raises(CheckpointError, match="keep is 0"):
        prune_checkpoints(saved, keep=0)
