"""Training loops of transformers and accelerate clip gradients of an arena as any others."""

import contextlib
import functools
import math
import types

import pytest
import torch
from helpers import products_add
from savers import VOCAB, llama

import gpuaccel as ga

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
# Who adds gradients into the arena.
ADDS = {"autograd": contextlib.nullcontext, "products": products_add}


def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (6,), generator=generator) for _ in range(16)]


def by_trainer(model, opt, max_norm, folder):
    """4 steps of 2 micro-batches by transformers' Trainer; returns each step's norm."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=max_norm,
        logging_steps=1,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"input_ids": x, "labels": x} for x in sequences()]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, optimizers=(opt, None))
    trainer.train()
    return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]


def by_accelerate(model, opt, max_norm, folder):
    """The same by a loop of one's own with accelerate.Accelerator."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, opt = accelerator.prepare(model, opt)
    norms = []
    for k in range(0, 16, 2):
        x = torch.stack(sequences()[k : k + 2])
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=x, labels=x).loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), max_norm))
            opt.step()
            opt.zero_grad()
    return norms


def trained(loop, optimizer, adds, max_norm, folder, dtype=torch.float32):
    """weights, norms: of a model trained in this loop. adds: None without an arena."""
    model = llama().to(torch.bfloat16).to(dtype)
    arena = model if adds is None else ga.Arena(model)
    if optimizer == "SGD":
        opt = torch.optim.SGD(arena.parameters(), lr=1.0, momentum=0.5)
    elif optimizer == "ga.AdamW" and adds is not None:
        opt = ga.AdamW(arena, lr=1e-2, weight_decay=0.0)
    else:
        opt = torch.optim.AdamW(arena.parameters(), lr=1e-2, weight_decay=0.0)
    with ADDS.get(adds, contextlib.nullcontext)(arena):
        norms = loop(model, opt, max_norm, folder)
    return types.SimpleNamespace(weights=dict(model.named_parameters()), norms=norms)


@functools.cache
def without_an_arena(loop, optimizer, max_norm, folder):
    return trained(loop, optimizer, None, max_norm, folder)


def distance(a, b):
    """Between the weights of both, as one vector."""
    differences = [a.weights[name].float() - p for name, p in b.weights.items()]
    return math.sqrt(sum(float(d.square().sum()) for d in differences))


@pytest.mark.slow
@pytest.mark.parametrize("loop", [by_trainer, by_accelerate])
@pytest.mark.parametrize("optimizer", ["SGD", "torch.AdamW", "ga.AdamW"])
@pytest.mark.parametrize("adds", ADDS)
def test_max_grad_norm_clips_a_bf16_model(adds, optimizer, loop, tmp_path, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    want = without_an_arena(loop, optimizer, 0.1, folder)
    unclipped = without_an_arena(loop, optimizer, 1e9, folder)
    assert min(want.norms) > 0.2
    got = trained(loop, optimizer, adds, 0.1, tmp_path, torch.bfloat16)
    # bf16 has 8 bits.
    torch.testing.assert_close(torch.tensor(got.norms), torch.tensor(want.norms), rtol=0.03, atol=0)
    assert all(p.dtype == torch.bfloat16 for p in got.weights.values())
    if optimizer == "SGD":
        # AdamW hardly depends on the scale of gradients.
        assert distance(got, want) < distance(want, unclipped) / 100


@pytest.mark.parametrize("loop", [by_trainer, by_accelerate])
@pytest.mark.parametrize("optimizer", ["SGD", "torch.AdamW", "ga.AdamW"])
@pytest.mark.parametrize("adds", ADDS)
def test_max_grad_norm_clips_as_it_does_without_an_arena(
    adds, optimizer, loop, tmp_path, tmp_path_factory
):
    folder = tmp_path_factory.getbasetemp()
    want = without_an_arena(loop, optimizer, 0.1, folder)
    unclipped = without_an_arena(loop, optimizer, 1e9, folder)
    got = trained(loop, optimizer, adds, 0.1, tmp_path)
    assert min(want.norms) > 0.2
    torch.testing.assert_close(torch.tensor(got.norms), torch.tensor(want.norms), rtol=1e-3, atol=0)
    assert any(
        not torch.allclose(p, unclipped.weights[name], atol=1e-3)
        for name, p in want.weights.items()
    )
    for name, p in got.weights.items():
        torch.testing.assert_close(p, want.weights[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("arena", [False, True])
def test_trainer_makes_ga_adamw_with_its_own_learning_rate_and_decay(tmp_path, arena):
    """The line of docs/your-model.md, against the optimizer that Trainer makes by itself."""
    held = []

    def weights(**optimizer):
        model = llama()
        if arena and optimizer:
            held.append(ga.Arena(model))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=8,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            weight_decay=0.5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        data = [{"input_ids": x, "labels": x} for x in sequences()]
        transformers.Trainer(model, arguments, train_dataset=data, **optimizer).train()
        return model.state_dict()

    ours = weights(optimizer_cls_and_kwargs=(ga.AdamW, {"lr": 1e-2}))
    torch.testing.assert_close(ours, weights(), rtol=1e-5, atol=1e-6)
