"""RMSNorm with the addition in its kernel: float64's values, torch's rounding, deterministic sums,
and torch's own operations wherever the kernels do not fit."""

import itertools
import logging
import shutil

import pytest
import torch
import torch.nn.functional as F
from helpers import CUDA, KERNELS, differ, generator, no_waiting, same
from torch import nn

import gpuaccel as ga
from gpuaccel.compiler import kernel as kernels
from gpuaccel.errors import ArgumentError
from gpuaccel.nn import fused_add_norm
from gpuaccel.ops import add_rms_norm
from gpuaccel.ops import rms_norm as module

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit of the last place of a number, and what sums in fp32 lose, relative to the largest.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11 + 1e-6}
everywhere = pytest.mark.parametrize("device", ["cpu", *KERNELS], indirect=True)
on_kernels = pytest.mark.parametrize("device", KERNELS, indirect=True)


def tensors(rows, width, dtype=torch.float32, device="cpu", seed=0):
    """x, residual, weight, and the gradients dy and ds."""
    random = generator(seed)
    shapes = [(rows, width), (rows, width), (width,), (rows, width), (rows, width)]
    return [torch.randn(shape, generator=random).to(device, dtype) for shape in shapes]


def results(x, residual, weight, dy, ds, function=add_rms_norm):
    """(y, s, dx, dweight) of function(x, residual, weight, EPS)."""
    x, residual, weight = (
        None if t is None else t.detach().requires_grad_() for t in (x, residual, weight)
    )
    y, s = function(x, residual, weight, EPS)
    torch.autograd.backward([y, s], [dy, ds])
    if residual is not None:
        same(residual.grad, x.grad, "both terms of the sum have one gradient")
    return y.detach(), s.detach(), x.grad, weight.grad


def results_of_chain(function, given):
    """y, s and the gradients by x, the residual and the weight, all of them given."""
    x, residual, weight, dy, ds = given
    inputs = [t.detach().requires_grad_() for t in (x, residual, weight)]
    y, s = function(*inputs, EPS)
    torch.autograd.backward([y, s], [dy, ds])
    return [y.detach(), s.detach(), *(t.grad for t in inputs)]


def exact_results(s, weight, dy, ds):
    """y, dx and dweight in float64, of a sum that is rounded already."""
    s, weight = s.double().requires_grad_(), weight.double().requires_grad_()
    y = F.rms_norm(s, weight.shape, weight, EPS)
    torch.autograd.backward([y, s], [dy.double(), ds.double()])
    return y.detach(), s.grad, weight.grad


def close(got, want, tolerance, what):
    bound = tolerance * float(want.abs().max())
    assert float((got.double() - want).abs().max()) <= bound, f"{what}: {differ(got, want)}"


def launched(work):
    """Names of the kernels that a function launches on the CPU."""
    names = []

    def note(launch, args, tensors):
        names.append(launch.kernel.name.removeprefix("rms_norm_"))

    kernels.recorders.append(note)
    try:
        work()
    finally:
        kernels.recorders.remove(note)
    return names


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize(
    # One to 16 warps per row; widths with and without a rest; more rows for each thread block.
    "rows, width",
    [(1, 1), (17, 259), (35, 1024), (3, 8192), (2051, 24)],
)
@everywhere
def test_values_and_gradients_are_those_of_float64(device, rows, width, with_residual, dtype):
    x, residual, weight, dy, ds = tensors(rows, width, dtype, device)
    if not with_residual:
        residual = None
    y, s, dx, dweight = results(x, residual, weight, dy, ds)
    same(s, x + residual if with_residual else x, "s")
    wanted = [t.cpu() for t in exact_results(s, weight, dy, ds)]
    # torch's eager backward rounds once more, before it adds ds.
    roundings = 1 if module.rms_norm_runs(x.device, dtype, width) else 2
    for name, got, want in zip(("y", "dx", "dweight"), (y, dx, dweight), wanted):
        close(got.cpu(), want, roundings * TOLERANCE[dtype], name)


@pytest.mark.parametrize("width", [64, 1001])
@pytest.mark.parametrize("dtype", DTYPES)
@on_kernels
def test_the_norm_is_rounded_as_torch_rounds_it(device, dtype, width):
    """Once, from fp32: nearly all are bit-identical, the others differ in the last places."""
    x, residual, weight, _, _ = tensors(64, width, dtype, device)
    y, s = add_rms_norm(x, residual, weight, EPS)
    want = F.rms_norm(s, weight.shape, weight, EPS)
    differences = (y.double() - want.double()).abs()
    last_place = torch.finfo(dtype).eps * want.double().abs()
    places = 8 if dtype == torch.float32 else 1
    assert (differences <= places * last_place).all(), differ(y, want)
    if dtype != torch.float32:
        assert (differences > 0).float().mean() < 0.01, differ(y, want)


@pytest.mark.parametrize("dtype", DTYPES)
@on_kernels
def test_results_are_deterministic_and_a_row_does_not_depend_on_the_others(device, dtype):
    """Nor on its alignment: a matrix one element behind 16 bytes takes the other path."""
    x, residual, weight, dy, ds = tensors(50, 264, dtype, device)
    whole = results(x, residual, weight, dy, ds)
    for name, a, b in zip("y s dx dweight".split(), whole, results(x, residual, weight, dy, ds)):
        same(a, b, name)

    def shifted(t):
        return torch.empty(t.numel() + 1, dtype=dtype, device=device)[1:].view(t.shape).copy_(t)

    for name, a, b in zip(
        "y s dx dweight".split(), whole, results(*map(shifted, (x, residual, weight, dy, ds)))
    ):
        same(a, b, f"{name}, not aligned")
    for rows in (slice(0, 7), slice(7, 8), slice(8, 50)):
        part = results(x[rows], residual[rows], weight, dy[rows], ds[rows])
        for name, a, b in zip(("y", "s", "dx"), whole, part):
            same(a[rows], b, f"{name}, rows {rows}")


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,), (2, 3, 8)])
@everywhere
def test_any_number_of_dimensions_and_rows(device, shape):
    x, residual, dy, ds = (torch.randn(shape, device=device) for _ in range(4))
    weight = torch.randn(8, device=device)
    y, s, dx, dweight = results(x, residual, weight, dy, ds)
    assert y.shape == s.shape == dx.shape == shape and dweight.shape == (8,)
    wanted = exact_results(s, weight, dy, ds)
    for got, want in zip((y, dx, dweight), wanted):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@everywhere
def test_rows_of_zeros_are_zeros_by_eps_and_nan_stays_in_its_row(device):
    x, residual, weight, dy, ds = tensors(40, 72, device=device)
    clean = results(x, residual, weight, dy, ds)
    x, residual = x.clone(), residual.clone()
    x[3], residual[3] = 0.0, 0.0
    x[20, 5] = float("nan")
    y, _, dx, dweight = results(x, residual, weight, dy, ds)
    assert not y[3].any() and torch.isfinite(dx[3]).all()
    assert y[20].isnan().all() and dx[20].isnan().all() and dweight.isnan().all()
    others = [i for i in range(40) if i not in (3, 20)]
    for name, got, want in (("y", y, clean[0]), ("dx", dx, clean[2])):
        same(got[others], want[others], name)


@everywhere
def test_strides_of_any_kind(device):
    x, residual, weight, dy, ds = tensors(24, 40, device=device)
    want = results(x, residual, weight, dy, ds)

    def strided(t):
        return torch.stack([t, t], -1)[..., 0]

    got = results(strided(x), residual.t().contiguous().t(), weight, strided(dy), strided(ds))
    for name, a, b in zip("y s dx dweight".split(), got, want):
        same(a.contiguous(), b, name)
    expanded = results(x[:1].expand(24, 40), residual, weight, dy, ds[:1].expand(24, 40))
    assert torch.isfinite(expanded[2]).all()


# ---- what is computed, and where -----------------------------------------------------------------


@pytest.mark.parametrize("device", ["simt"], indirect=True)
def test_a_frozen_weight_costs_nothing_and_an_unused_sum_is_not_filled_with_zeros(device):
    x, residual, weight, dy, _ = tensors(20, 64)
    given = []
    launch_backward = module.launch_backward

    def work(frozen):
        inputs = [t.clone().requires_grad_() for t in (x, residual)]
        own = weight.clone().requires_grad_(not frozen)
        add_rms_norm(*inputs, own, EPS)[0].backward(dy)
        given.append([t.grad for t in (*inputs, own)])

    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr(
            module,
            "launch_backward",
            lambda dx, dw, dy, ds, *rest: launch_backward(dx, dw, dy, given.append(ds), *rest),
        )
        assert launched(lambda: work(False)) == ["forward_v3", "backward_v3", "weight_v3"]
        assert launched(lambda: work(True)) == ["forward_v3", "backward_v3"]
    first_ds, all_grads, second_ds, frozen_grads = given
    assert first_ds is None and second_ds is None and frozen_grads[2] is None
    for a, b in zip(all_grads[:2], frozen_grads):
        same(a, b)


@pytest.mark.parametrize("device", ["simt"], indirect=True)
def test_a_gradient_of_the_sum_alone_passes_through(device):
    x, residual, weight, _, ds = tensors(20, 64)
    inputs = [t.clone().requires_grad_() for t in (x, residual, weight)]
    add_rms_norm(*inputs, EPS)[1].backward(ds)
    same(inputs[0].grad, ds)
    same(inputs[1].grad, ds)
    assert inputs[2].grad is None


@pytest.mark.parametrize(
    "dtype, width", [(torch.float64, 8), (torch.float32, 8193), (torch.bfloat16, 16385)]
)
@pytest.mark.parametrize("device", ["simt"], indirect=True)
def test_what_no_kernel_takes_is_computed_by_torch(device, dtype, width):
    given = tensors(2, width, dtype)
    assert launched(lambda: results(*given)) == []
    for a, b in zip(results(*given), results(*given, function=module.reference_add_rms_norm)):
        same(a, b)
    assert launched(lambda: results(*tensors(2, 8192, torch.float32))) != []


@everywhere
def test_second_derivatives_are_those_of_float64(device):
    x, residual, weight, _, _ = tensors(6, 16, device=device)

    def second(function, *given):
        given = [t.detach().requires_grad_() for t in given]
        y, s = function(*given, EPS)
        first = torch.autograd.grad((y.sin() * s).sum(), given, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), given)

    got = second(add_rms_norm, x, residual, weight)
    want = second(module.reference_add_rms_norm, *(t.double() for t in (x, residual, weight)))
    for a, b in zip(got, want):
        close(a, b, 1e-5, "second derivative")


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(residual=torch.zeros(4, 8, dtype=torch.bfloat16)),
            "residual is torch.bfloat16 on cpu",
        ),
        (dict(weight=torch.zeros(8, dtype=torch.float64)), "weight is torch.float64 on cpu"),
        (dict(residual=torch.zeros(8)), r"residual has shape \(8,\); expected \(4, 8\)"),
        (dict(weight=torch.zeros(4)), r"weight has shape \(4,\) and x \(4, 8\)"),
        (dict(weight=torch.zeros(4, 8)), r"weight has shape \(4, 8\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, message):
    given = dict(x=torch.zeros(4, 8), residual=torch.zeros(4, 8), weight=torch.zeros(8)) | change
    with pytest.raises(ArgumentError, match=message):
        add_rms_norm(**given, eps=EPS)


# ---- torch.compile -------------------------------------------------------------------------------


@everywhere
def test_opcheck_passes(device):
    x, residual, weight, dy, ds = tensors(20, 24, device=device)
    ops = torch.ops.gpuaccel
    y, s, rstd = torch.zeros_like(x), torch.zeros_like(x), torch.zeros(20, device=device)
    for total, added in ((s, residual), (None, None)):
        given = y, total, rstd, x, added, weight, EPS
        torch.library.opcheck(ops.add_rms_norm_out.default, given)
        ops.add_rms_norm_out(*given)
    dx = torch.zeros_like(x)
    for dweight, upper in ((torch.zeros_like(weight), ds), (None, None)):
        given = dx, dweight, dy, upper, s, weight, rstd, EPS
        torch.library.opcheck(ops.rms_norm_backward_out.default, given)


@on_kernels
def test_a_batch_of_gradients_is_that_of_each(device):
    x, residual, weight, dy, _ = tensors(5, 24, device=device)
    inputs = x.requires_grad_(), weight.requires_grad_()
    y, _ = add_rms_norm(x, residual, weight, EPS)
    ask = dict(inputs=inputs, retain_graph=True)
    douts = torch.stack([dy, 2 * dy, x.detach()])
    batch = torch.autograd.grad(y, grad_outputs=douts, is_grads_batched=True, **ask)
    for i, dout in enumerate(douts):
        for got, want in zip(batch, torch.autograd.grad(y, grad_outputs=dout, **ask)):
            torch.testing.assert_close(got[i], want)


@on_kernels
def test_a_compiled_forward_in_torch_has_a_right_backward_on_the_kernels(device):
    x, residual, weight, dy, ds = tensors(20, 24, device=device)
    compiled = torch.compile(add_rms_norm, fullgraph=True, dynamic=False, backend="aot_eager")
    want = results(x, residual, weight, dy, ds, compiled)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    with ga.use_backend("torch"):
        y, s = compiled(x, residual, weight, EPS)
    torch.autograd.backward([y, s], [dy, ds])
    torch.testing.assert_close([x.grad, weight.grad], want[2:])


@pytest.mark.parametrize("with_residual", [True, False])
@on_kernels
def test_compiled_whole_it_is_bit_identical(device, with_residual):
    x, residual, weight, dy, ds = tensors(20, 24, torch.bfloat16, device)
    given = x, residual if with_residual else None, weight, dy, ds
    want = results(*given)
    compiled = torch.compile(add_rms_norm, fullgraph=True, dynamic=False, backend="aot_eager")
    try:
        for name, a, b in zip("y s dx dweight".split(), results(*given, function=compiled), want):
            same(a, b, name)
    finally:
        torch._dynamo.reset()


_numbers = itertools.count()


def new_operation(backward):
    """A copy, as an operation that nobody has compiled before; backward(dy) is its gradient."""

    def clone(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    op = torch.library.custom_op(f"gpuaccel_test::clone_{next(_numbers)}", clone, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, dy: backward(dy))
    return op


def compiled_chain(norms, given):
    """The results of a chain of norms in inductor, and the texts that its log makes of operations.

    An operation stands behind the last norm, and another behind the first one's gradient."""

    def chain(x, residual, weight, eps):
        y, s = first(x), residual
        for _ in range(norms):
            y, s = add_rms_norm(y, s, weight, eps)
        return last(y), s

    first = new_operation(new_operation(torch.clone))
    last = new_operation(torch.clone)
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    log = logging.getLogger("torch._inductor.graph")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    torch._dynamo.reset()
    try:
        with torch.compiler.config.patch(force_disable_caches=True):
            compiled = torch.compile(chain, fullgraph=True, dynamic=False)
            return results_of_chain(compiled, given), results_of_chain(chain, given), texts
    finally:
        torch._dynamo.reset()
        log.removeHandler(handler)
        log.setLevel(level)


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))),
    reason="inductor needs a C++ compiler, and there is none",
)
@on_kernels
def test_inductor_copies_nothing_and_the_text_of_an_operation_does_not_grow_with_each_norm(device):
    """torch 2.11 makes that text for its log whatever the level: a text that doubled with each norm
    was never finished."""
    given = tensors(20, 24, device=device)
    missed = torch._dynamo.utils.ReinplaceCounters
    missed.clear()
    longest = []
    for norms in (2, 8):
        got, want, texts = compiled_chain(norms, given)
        for name, a, b in zip("y s dx dresidual dweight".split(), got, want, strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")
        lengths = [len(text) for text in texts if "target: gpuaccel_test.clone_" in text]
        assert len(lengths) == 3, texts
        longest.append(max(lengths))
    assert missed.get_total_missed() == 0
    assert longest[1] < 1.5 * longest[0], longest


# ---- in the place of a module --------------------------------------------------------------------


def norm_and_inputs(device, dtype=torch.float32):
    x, residual, weight, _, _ = tensors(12, 16, dtype, device)
    norm = nn.RMSNorm(16, eps=EPS).to(device, dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
    return norm, x.requires_grad_(), residual.requires_grad_()


@pytest.mark.parametrize("device", ["simt"], indirect=True)
def test_a_module_is_one_launch_and_a_tensor_hook_sees_its_gradient(device):
    norm, x, residual = norm_and_inputs(device)
    seen = []
    norm.weight.register_hook(lambda g: seen.append(g.clone()) or 2 * g)
    assert launched(lambda: fused_add_norm(x, residual, norm)) == ["forward_v3"]
    y, s = fused_add_norm(x, residual, norm)
    (y.sum() + s.sum()).backward()
    same(norm.weight.grad, 2 * seen[0])
    with ga.use_backend("torch"):
        plain, x2, residual2 = norm_and_inputs("cpu")
        y2, s2 = fused_add_norm(x2, residual2, plain)
        (y2.sum() + s2.sum()).backward()
    torch.testing.assert_close(seen[0], plain.weight.grad)
    torch.testing.assert_close(x.grad, x2.grad)


class Own(nn.RMSNorm):
    def forward(self, x):
        return 3 * super().forward(x)


def _autocast(norm, x, residual):
    with torch.autocast("cpu", torch.bfloat16):
        return fused_add_norm(x, residual, norm)


def _hooked(norm, x, residual):
    norm.register_forward_hook(lambda module, given, y: y + 1)
    return fused_add_norm(x, residual, norm)


def _pre_hooked(norm, x, residual):
    norm.register_forward_pre_hook(lambda module, given: (2 * given[0],))
    return fused_add_norm(x, residual, norm)


def _replaced(norm, x, residual):
    norm.forward = lambda x: 2 * x
    return fused_add_norm(x, residual, norm)


PLAIN = {
    "autocast": _autocast,
    "forward hook": _hooked,
    "pre-hook": _pre_hooked,
    "forward replaced": _replaced,
    "subclass": lambda norm, x, residual: fused_add_norm(x, residual, Own(16, eps=EPS)),
    "other module": lambda norm, x, residual: fused_add_norm(x, residual, nn.LayerNorm(16)),
    "no weight": lambda norm, x, residual: fused_add_norm(
        x, residual, nn.RMSNorm(16, elementwise_affine=False)
    ),
    "eps by dtype": lambda norm, x, residual: fused_add_norm(x, residual, nn.RMSNorm(16)),
    "two dimensions": lambda norm, x, residual: fused_add_norm(x, residual, nn.RMSNorm((12, 16))),
    "broadcast": lambda norm, x, residual: fused_add_norm(x, residual[:1], norm),
    "weight of another dtype": lambda norm, x, residual: fused_add_norm(
        x.bfloat16(), residual.bfloat16(), norm
    ),
    "torch.func": lambda norm, x, residual: torch.func.vmap(
        lambda x, residual: fused_add_norm(x, residual, norm)
    )(x.detach(), residual.detach()),
    "forward mode": lambda norm, x, residual: torch.func.jvp(
        lambda x: fused_add_norm(x, residual.detach(), norm), (x.detach(),), (x.detach(),)
    )[1],
}


@pytest.mark.parametrize("call", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("device", ["simt"], indirect=True)
def test_the_module_itself_is_called_where_the_kernel_would_differ(device, call, monkeypatch):
    assert launched(lambda: call(*norm_and_inputs(device))) == []
    got = call(*norm_and_inputs(device))
    with ga.use_backend("torch"):
        want = call(*norm_and_inputs(device))
    for a, b in zip(got, want):
        same(a.detach(), b.detach())


@pytest.mark.parametrize("device", ["simt"], indirect=True)
def test_another_weight_in_the_parameters_place_is_used(device):
    norm, x, residual = norm_and_inputs(device)
    other = torch.randn(16, requires_grad=True)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            return fused_add_norm(x, residual, self.norm)[0]

    y = torch.func.functional_call(Layer(), {"norm.weight": other}, (x,))
    torch.testing.assert_close(y, F.rms_norm(x + residual, (16,), other, EPS))
    y.sum().backward()
    assert other.grad is not None and norm.weight.grad is None


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_captured_it_is_replayed_on_other_values_and_nothing_waits(device, dtype):
    given = tensors(4096, 1024, dtype, device)
    results_of_chain(add_rms_norm, given)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with no_waiting():
        results_of_chain(add_rms_norm, given)
    with torch.cuda.graph(graph):
        found = results_of_chain(add_rms_norm, given)
    for seed in (1, 2):
        new = tensors(4096, 1024, dtype, device, seed)
        for t, value in zip(given, new):
            t.copy_(value)
        graph.replay()
        wanted = results_of_chain(add_rms_norm, new)
        for name, a, b in zip("y s dx dresidual dweight".split(), found, wanted, strict=True):
            same(a, b, name)
