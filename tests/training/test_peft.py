"""Adapters of peft train with an Arena, ga.AdamW and a TrainStep, as with torch's AdamW."""

import functools

import pytest
import torch
import torch.nn.functional as F
from helpers import EVERYWHERE, KERNELS, close, generator
from savers import VOCAB as V
from savers import llama
from torch import nn

import gpuaccel as ga
from gpuaccel.errors import ArgumentError, CaptureError
from gpuaccel.nn import fused_forward
from gpuaccel.training import Replay

peft = pytest.importorskip("peft")
STEPS, MICRO_BATCHES = 4, 2
HOW = {"lr": 1e-2, "weight_decay": 0.1}


class Mlp(nn.Module):
    """Tokens (B, T) -> logits (B, T, V): two blocks of two linear layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, 16)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(16, 24), "down": nn.Linear(24, 16)}) for _ in range(2)
        )
        self.head = nn.Linear(16, V)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block["down"](F.gelu(block["up"](x)))
        return self.head(x)


TARGETS = {llama: ["q_proj", "v_proj"], Mlp: ["up", "down"]}
# max_norm: of blocks and of factors some have a larger norm, others a smaller one.
LIMITS = {llama: 0.06, Mlp: 0.28}
both = pytest.mark.parametrize("kind", TARGETS, ids=lambda kind: kind.__name__)


def base(kind, dtype=torch.float32):
    torch.manual_seed(0)
    return kind().to(dtype)


def adapted(kind, device="cpu", dtype=torch.float32, **how):
    """With factors as after some training: peft's B is zero at first."""
    settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS[kind])
    model = peft.get_peft_model(base(kind, dtype), settings, **how)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.3, generator=generator(len(name)))
    return model.to(device).train()


def tokens(k, device="cpu"):
    return torch.randint(0, V, (4, 9), generator=generator(k)).to(device)


def loss_fn(model, x):
    y = model(x[:, :-1])
    return F.cross_entropy(getattr(y, "logits", y).float().flatten(0, 1), x[:, 1:].flatten())


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def frozen(model):
    return {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}


def block_of(name):
    """`blocks.0` of `base_model.model.blocks.0.up.lora_A.default.weight`."""
    words = name.split(".")
    at = next(i for i, word in enumerate(words) if word in ("layers", "blocks"))
    return ".".join(words[at : at + 2])


GROUPS = {"global": lambda name: "", "tensor": lambda name: name, "block": block_of}


@functools.cache
def by_torch(kind, scope):
    """(losses, {group: norm} of each step, factors at the end)."""
    model = adapted(kind)
    params = trained(model)
    opt = torch.optim.AdamW(params.values(), **HOW)
    groups = {}
    for name, p in params.items():
        groups.setdefault(GROUPS[scope](name), []).append(p)
    losses, norms, limit = [], [], LIMITS[kind]
    for k in range(STEPS):
        total = 0.0
        for micro in tokens(k).chunk(MICRO_BATCHES):
            loss = loss_fn(model, micro) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(
            {name: nn.utils.clip_grad_norm_(some, limit).item() for name, some in groups.items()}
        )
        opt.step(), opt.zero_grad()
    return losses, norms, {name: p.detach() for name, p in params.items()}


def optimizer(model, scope="global", max_norm=0.1):
    arena = ga.Arena(model, decay=lambda name, p: True)
    return ga.AdamW(arena, max_norm=max_norm, scope=scope, **HOW)


LOOPS = ["loop", "launched", "deterministic", "replayed"]
# Without our kernels nothing is replayed on a CPU.
RUNS = [
    pytest.param(how, device, marks=[pytest.mark.gpu] if device == "cuda" else [])
    for how in LOOPS
    for device in ("cpu", "simt", "cuda")[how == "replayed" :]
]


def run(model, opt, how, device, steps=range(STEPS)):
    """Train; (loss, norms) of each step."""
    results = []
    if how == "loop":
        for k in steps:
            losses = [loss_fn(model, micro) / 2 for micro in tokens(k, device).chunk(2)]
            for loss in losses:
                loss.backward()
            opt.step(), opt.zero_grad()
            results.append((sum(loss.item() for loss in losses), opt.clip_state.norm.tolist()))
        return results
    replay = Replay("require") if how == "replayed" else "eager"
    options = {"replay": replay, "deterministic": how == "deterministic"}
    with ga.TrainStep(model, opt, loss_fn, micro_batches=MICRO_BATCHES, **options) as step:
        for k in steps:
            output = step(tokens(k, device))
            results.append((output.loss.item(), output.norm.tolist()))
        assert step.replays == ("graph" if how == "replayed" else "eager"), step.reason
    return results


@pytest.mark.parametrize("scope", GROUPS)
@both
@pytest.mark.parametrize("how, device", RUNS, indirect=["device"])
def test_a_step_is_that_of_torchs_adamw_and_clip(how, device, kind, scope):
    """Each block, or each factor, is clipped by its own norm; the base weights keep every bit."""
    losses, norms, factors = by_torch(kind, scope)
    clipped = [norm > LIMITS[kind] for step in norms for norm in step.values()]
    assert any(clipped) and (scope == "global" or not all(clipped))
    model = adapted(kind, device)
    before, opt = frozen(model), optimizer(model, scope, LIMITS[kind])
    arena = opt.arena
    names = {
        "global": [""],
        "tensor": [segment.name for segment in arena.segments],
        "block": [block_of(block.name) for block in arena.blocks],
    }[scope]
    for got, loss, norm in zip(run(model, opt, how, device), losses, norms, strict=True):
        assert got[0] == pytest.approx(loss, rel=1e-4)
        by_group = dict(zip(names, got[1] if scope != "global" else [got[1]], strict=True))
        assert by_group == pytest.approx(norm, rel=1e-3)
    for name, p in trained(model).items():
        torch.testing.assert_close(p.cpu(), factors[name], rtol=1e-3, atol=2e-5, msg=name)
    for name, p in frozen(model).items():
        assert torch.equal(p, before[name]), name


@both
def test_the_products_of_the_factors_add_into_the_arena(kind):
    """peft's factors are plain linear layers; nothing else of the model is trained."""
    model = adapted(kind)
    opt = optimizer(model)
    with ga.TrainStep(model, opt, loss_fn, deterministic=True):
        layers = {name for name, part in model.named_modules() if fused_forward(part)}
        assert {f"{name}.weight" for name in layers} == trained(model).keys()


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_factors_of_a_bf16_model_are_replayed_with_the_bits_of_a_launched_step(device, dtype, kind):
    """In fp32, as peft makes them, or in bf16, with fp32 masters in the arena."""
    if kind.__name__ == "llama" and device == "cuda":
        pytest.skip("transformers takes another attention while a graph is captured")
    results = []
    for how in ("deterministic", "replayed"):
        options = {"autocast_adapter_dtype": dtype == torch.float32}
        model = adapted(kind, device, torch.bfloat16, **options)
        assert {p.dtype for p in trained(model).values()} == {dtype}
        steps = run(model, optimizer(model, "block"), how, device)
        results.append((steps, [p.tolist() for p in trained(model).values()]))
    assert results[0] == results[1]
    assert len({loss for loss, _ in results[0][0]}) == STEPS


@both
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_an_adapter_that_is_saved_in_an_arena_is_loaded_and_resumed(device, kind, tmp_path):
    """peft saves the factors, a checkpoint the optimizer."""
    model = adapted(kind, device)
    opt = optimizer(model)
    run(model, opt, "loop", device, range(2))
    model.save_pretrained(tmp_path / "adapter")
    torch.save(opt.state_dict(), tmp_path / "optimizer")

    again = peft.PeftModel.from_pretrained(base(kind), tmp_path / "adapter", is_trainable=True).to(
        device
    )
    for name, p in trained(again.train()).items():
        assert torch.equal(p, trained(model)[name]), name
    other = optimizer(again)
    other.load_state_dict(torch.load(tmp_path / "optimizer", weights_only=True))
    wanted = run(model, opt, "deterministic", device, range(2, STEPS))
    assert run(again, other, "deterministic", device, range(2, STEPS)) == wanted
    for name, p in trained(again).items():
        assert torch.equal(p, trained(model)[name]), name


@both
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_a_checkpoint_of_the_package_holds_the_adapter_too(device, kind, tmp_path):
    model, again = adapted(kind, device), adapted(kind, device)
    opt, other = optimizer(model), optimizer(again)
    run(model, opt, "loop", device, range(2))
    ga.save_checkpoint(tmp_path / "run.safetensors", model=model, optimizer=opt)
    ga.load_checkpoint(tmp_path / "run.safetensors", model=again, optimizer=other)
    wanted = run(model, opt, "deterministic", device, range(2, STEPS))
    assert run(again, other, "deterministic", device, range(2, STEPS)) == wanted


@both
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_merged_after_training_it_is_a_plain_model_of_the_same_outputs(device, kind):
    model = adapted(kind, device)
    opt = optimizer(model)
    run(model, opt, "deterministic", device)
    opt.arena.release()
    model.eval()
    x = tokens(9, device)
    with torch.no_grad():
        wanted = model(x)
        merged = model.merge_and_unload()
        assert type(merged) is type(base(kind))
        assert not any("lora" in name for name, _ in merged.named_parameters())
        got, plain = merged(x), base(kind).to(device).eval()(x)
    got, wanted, plain = (getattr(y, "logits", y) for y in (got, wanted, plain))
    close(got, wanted, "merged", 1e-4)
    assert (got - plain).abs().max() > 1e-2, "the factors say nothing"


@pytest.mark.parametrize(
    "layer, targets",
    [
        (lambda: ga.RichardsGLU(16, 24), ["w_in", "w_out"]),
        (lambda: ga.PolyAttention(16, 2, max_positions=8), ["w_qkv", "w_out"]),
    ],
    ids=["RichardsGLU", "PolyAttention"],
)
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_the_packages_layers_take_adapters(device, layer, targets):
    """Merged into the weights they compute the same, so forward has called them."""
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(layer()), settings).to(device)
    x = torch.randn(2, 8, 16, device=device)
    y = model(x)
    y.square().sum().backward()
    for name, p in trained(model).items():
        assert p.grad.abs().max() > 0, name
    with torch.no_grad(), model.disable_adapter():
        plain = model(x)
    assert (y - plain).abs().max() > 1e-2
    with torch.no_grad():
        close(model.merge_and_unload()(x), y.detach(), "merged", 1e-4)


# ---- what a user may get wrong -------------------------------------------------------------------


def test_an_arena_that_was_made_before_the_adapter_is_named():
    model = base(Mlp)
    opt = ga.AdamW(ga.Arena(model))
    adapter = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["up"]))
    with pytest.raises(ArgumentError, match="no optimizer holds .*up.lora_B.default.weight"):
        ga.TrainStep(adapter, opt, loss_fn)
    with pytest.raises(ArgumentError, match="up.lora_A.default.weight is not in the arena"):
        ga.TrainStep(model, opt, loss_fn)


def test_a_model_without_a_trained_adapter_has_nothing_to_lay_out():
    settings = peft.LoraConfig(r=2, target_modules=["up"], inference_mode=True)
    with pytest.raises(ArgumentError, match="PeftModel has no trainable parameter"):
        ga.Arena(peft.get_peft_model(base(Mlp), settings))


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_another_adapter_between_two_replays_is_refused(device):
    model = adapted(Mlp, device)
    opt = optimizer(model)
    replay = Replay("require")
    with ga.TrainStep(model, opt, loss_fn, micro_batches=2, replay=replay) as step:
        step(tokens(0, device))
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["up"]))
        model.set_adapter("second")
        with pytest.raises(CaptureError, match="lora_dropout.second did not exist at the capture"):
            step(tokens(1, device))
