"""Training loops of transformers and accelerate clip gradients of an arena as any others."""

import math

import pytest
import torch
from helpers import forget_accelerator
from savers import VOCAB, llama

import gpuaccel as ga

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def settings_of_accelerate():
    yield
    forget_accelerator()


def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (6,), generator=generator) for _ in range(16)]


def arguments_of(folder, **options):
    """2 micro-batches of 2 sequences a step."""
    return transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", **options},
    )


def data():
    return [{"input_ids": x, "labels": x} for x in sequences()]


# ---- Trainer makes the optimizer: docs/trainer.md ----


def own_trainer(optimizer, folder, arena=False, max_norm=None, **options):
    """A Trainer over a model with these weights. optimizer: None: the one that it makes itself."""
    model = llama()
    options = {"max_steps": 8, "learning_rate": 1e-2, "weight_decay": 0.5, **options}
    arguments = arguments_of(folder, **options)
    made = {}
    if optimizer is not None:
        arguments_of_optimizer = {"lr": arguments.learning_rate, "max_norm": max_norm}
        made["optimizer_cls_and_kwargs"] = (optimizer, arguments_of_optimizer)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data(), eval_dataset=data()[:4], **made
    )
    # Of the test, as in a script: who made it keeps it.
    trainer.arena = ga.Arena(model) if arena else None
    return trainer


def logged(trainer, key):
    return [row[key] for row in trainer.state.log_history if key in row]


SCHEDULE = dict(lr_scheduler_type="cosine", warmup_steps=2)
EVALUATED = dict(label_smoothing_factor=0.1, eval_strategy="steps", eval_steps=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, max_norm, limit",
    [
        ({}, None, 1.0),
        ({**SCHEDULE, **EVALUATED}, None, 1.0),
        ({"bf16": True}, None, 1.0),
        ({"gradient_checkpointing": True}, None, 1.0),
        ({"torch_compile": True, "torch_compile_backend": "aot_eager"}, None, 1.0),
        ({"max_grad_norm": 0.1}, None, 0.1),
        ({"max_grad_norm": 0}, 0.1, 0.1),
        ({"max_grad_norm": 0.3}, 0.1, 0.1),
        ({"max_grad_norm": 0.1}, 0.3, 0.1),
    ],
    ids=[
        "plain",
        "evaluated",
        "bf16",
        "checkpointing",
        "compiled",
        "Trainer",
        "optimizer",
        "both",
        "both, less",
    ],
)
@pytest.mark.parametrize("arena", [False, True])
def test_trainer_trains_with_ga_adamw_what_it_trains_with_torchs(
    arena, options, max_norm, limit, tmp_path
):
    """Its groups for weight decay, its schedule; and whoever clips, to the smaller limit."""
    theirs = own_trainer(None, tmp_path, **{**options, "max_grad_norm": limit})
    ours = own_trainer(ga.AdamW, tmp_path, arena, max_norm, **options)
    theirs.train(), ours.train()
    assert isinstance(ours.optimizer.optimizer, ga.AdamW)
    state = theirs.model.state_dict()
    for name, p in ours.model.state_dict().items():
        torch.testing.assert_close(p, state[name], rtol=1e-5, atol=1e-6, msg=name)
    for key in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        assert logged(ours, key) == pytest.approx(logged(theirs, key), rel=1e-4), key
    assert min(logged(theirs, "grad_norm")) > 1.0
    clip = ours.optimizer.optimizer.clip_state
    if max_norm is not None:
        # What Trainer has left is clipped again.
        left = [logged(ours, "grad_norm")[-1], options["max_grad_norm"] or math.inf]
        assert float(clip.norm) == pytest.approx(min(left), rel=1e-4)
        assert float(clip.clipped_norm) == pytest.approx(limit, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize("saved, resumed", [("ga", "ga"), ("torch", "ga"), ("ga", "torch")])
def test_trainer_resumes_from_its_checkpoint(saved, resumed, arena, tmp_path):
    optimizers = {"ga": ga.AdamW, "torch": None}
    first = own_trainer(
        optimizers[saved], tmp_path, arena and saved == "ga", save_strategy="steps", **SCHEDULE
    )
    first.train()
    second = own_trainer(optimizers[resumed], tmp_path, arena and resumed == "ga", **SCHEDULE)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        if saved == resumed:
            assert torch.equal(p, q)
        else:
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# ---- a TrainStep of what a collator makes: docs/your-model.md ----


def test_a_collators_dict_counts_by_the_labels_that_the_model_shifts():
    """1 to 5 labels in each row: loss and gradient are those of the whole batch."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (8, 6))
    labels = tokens.clone()
    for row in range(8):
        labels[row, : 1 + row % 5] = -100
    batch = dict(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels)

    def collated_loss(model, micro):
        count = (micro["labels"][:, 1:] != -100).sum()
        return model(**micro).loss * count, count

    theirs, ours = llama(), llama()
    loss = theirs(**batch).loss
    loss.backward()
    torch.optim.SGD(theirs.parameters(), lr=1.0).step()
    opt = torch.optim.SGD(ours.parameters(), lr=1.0)
    with ga.TrainStep(ours, opt, collated_loss, micro_batches=4) as step:
        out = step(transformers.BatchEncoding(batch))
    assert int(out.tokens) == int((labels[:, 1:] != -100).sum())
    assert float(out.loss) == pytest.approx(loss.item(), rel=1e-5)
    for (name, p), q in zip(theirs.named_parameters(), ours.parameters()):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-5, msg=name)


# ---- accelerate ----


def accelerated(optimizer, clips, **settings):
    """A loop of docs/trainer.md."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **settings)
    model = llama().to(accelerator.device)
    inside = 0.1 if "optimizer" in clips else None
    if optimizer == "torch":
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    elif optimizer == "ga":
        opt = ga.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, max_norm=inside)
    else:
        arena = ga.Arena(model, decay=lambda name, p: True)
        opt = ga.AdamW(arena, lr=1e-2, weight_decay=0.1, max_norm=inside)
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=8)
    loader = torch.utils.data.DataLoader(torch.stack(sequences() * 2), batch_size=2)
    model, opt, loader, scheduler = accelerator.prepare(model, opt, loader, scheduler)
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=x, labels=x).loss)
            if accelerator.sync_gradients and clips != "optimizer":
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            scheduler.step()
            opt.zero_grad()
    weights = [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]
    # So that a next one may have other settings.
    accelerator.free_memory()
    accelerate.state.AcceleratorState._reset_state()
    return weights


def check_accelerated(optimizer, clips, mixed_precision):
    settings = {"mixed_precision": mixed_precision}
    want = accelerated("torch", "accelerate", **settings)
    got = accelerated(optimizer, clips, **settings)
    # A weight that differs in its last bit may be rounded to another bf16, which has 8 bits.
    atol = 2e-6 if mixed_precision == "no" else 2e-4
    for p, q in zip(got, want, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=atol)
    return [p.sum() for p in got]


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("clips", ["accelerate", "optimizer", "accelerate, optimizer"])
@pytest.mark.parametrize("optimizer", ["ga", "ga over an arena"])
def test_accelerate_trains_what_it_trains_with_torchs_adamw(optimizer, clips, mixed_precision):
    check_accelerated(optimizer, clips, mixed_precision)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["ga", "ga over an arena"])
def test_accelerate_trains_in_two_processes(optimizer):
    """Its DistributedDataParallel averages gradients; prepare() moves the weights of an arena."""
    first, second = ga.launch(
        check_accelerated, 2, (optimizer, "accelerate", "no"), backend="gloo", start=120.0
    )
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
