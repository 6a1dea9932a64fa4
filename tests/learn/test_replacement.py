"""A kernel of one's own in the place of one of ours: what is accepted, refused, and launched."""

import functools
import os
import re
import subprocess
import sys

import pytest
import torch

import gpuaccel as ga
from gpuaccel.backends import backend
from gpuaccel.compiler import Kernel, kernel_files, kernel_names, replacements
from gpuaccel.compiler import kernel as kernel_module
from gpuaccel.compiler import launch as launch_module
from gpuaccel.errors import ArgumentError, CompileError, ReplacementError
from gpuaccel.learn import magics, replacement
from gpuaccel.learn.kernel_cases import CASES
from gpuaccel.source import definition

FP32 = [torch.float32]
CPU = torch.device("cpu")
ON_CPU = [name for name, cases in CASES.items() if all(case.on_cpu for case in cases)]


@pytest.fixture(autouse=True)
def nothing_stays_replaced():
    assert replacements() == ()
    yield
    left = replacements()
    replacement.restore()
    assert left == ()


@pytest.fixture
def on_simt():
    with ga.use_backend("simt"):
        yield


def source_of(name):
    for path in kernel_files():
        text = path.read_text()
        if name in kernel_names(text):
            start, end = definition(text, name)
            return text[start:end]
    raise AssertionError(name)


def edited(name, old, new):
    source = source_of(name)
    assert old in source, f"{name} has no {old!r} any more"
    return source.replace(old, new)


def launched_by(run):
    """Names of the kernels that are launched on the CPU while `run` runs."""
    names = set()
    launch_module.recorders.append(lambda launch, args, tensors: names.add(launch.kernel.name))
    try:
        run()
    finally:
        launch_module.recorders.pop()
    return names


# ---- the definition in a text --------------------------------------------------------------------


def test_the_definition_of_each_kernel_is_found_in_its_file():
    seen = []
    for path in kernel_files():
        text = path.read_text()
        for name in kernel_names(text):
            start, end = definition(text, name)
            assert text[start:end].startswith('extern "C" __global__')
            assert text[start:end].endswith("\n}"), text[start:end][-80:]
            seen.append(name)
    assert len(seen) == len(set(seen)) >= 40


# ---- which kernels -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPU)
def test_each_case_launches_its_kernel(name, on_simt):
    for case in CASES[name]:
        names = set()
        for n in replacement.CHECKED_SIZES:
            run = functools.partial(case.run, n, CPU, replacement._generator(n), FP32)
            names |= launched_by(run)
        assert name in names


@pytest.mark.slow
def test_every_kernel_that_a_step_launches_can_be_replaced(on_simt):
    def steps():
        for preset in ("tiny", "poly-7m"):
            config = ga.preset(preset, layers=1, hidden=64, intermediate=64, heads=2, kv_heads=2)
            model = config.build()
            ga.deterministic_embeddings(model)
            tokens = torch.randint(0, 256, (4, 16))
            for deterministic in (False, True):
                arena = ga.Arena(model)
                opt = ga.AdamW(arena, lr=1e-3, max_norm=1.0)
                options = dict(micro_batches=2, deterministic=deterministic)
                with ga.TrainStep(model, opt, **options) as step:
                    step((tokens, tokens))
                arena.release()
            opt = ga.optim.Lion(model.parameters(), lr=1e-4)
            ga.token_loss(model, (tokens, tokens))[0].backward()
            ga.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()

    names = launched_by(steps)
    assert len(names) >= 20
    assert names <= CASES.keys()


def test_a_kernel_that_no_step_launches_is_named_with_those_that_can_be_replaced():
    for wrong in ("squares_v1", "clip.squares_v2", 3):
        with pytest.raises(ArgumentError, match="no training step launches.*settings_write"):
            with ga.replaced(wrong, source_of("squares_v2")):
                pass


# ---- what is accepted ----------------------------------------------------------------------------

# It searches for both ends of a run, always.
SHORTER = """
extern "C" __global__ void segments_pieces(int* pieces, const uint2* order, int n, int vocab)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned token = order[i].y;
    int start = place_of(order, 0, i, token), stop = place_of(order, i, n, token + 1);
    int before = i - start, rest = stop - i, kind = 0;
    if (before % PIECE == 0) kind = min(rest, PIECE) + (before > 0 ? PIECE : 0);
    if (before == 0 && rest > PIECE) kind = -rest;
    pieces[i] = token < vocab ? kind : 0;
}
"""
OTHER_ORDER = (
    "squares_v2",
    "double sum = block_joined(magnitude(x), warps);",
    """__shared__ float parts[THREADS];
        float part = 0.0f;
        for (int k = 0; k < GROUPS_OF_FOUR; k++)
            part += x[k].x * x[k].x + x[k].y * x[k].y + x[k].z * x[k].z + x[k].w * x[k].w;
        parts[threadIdx.x] = part;
        __syncthreads();
        double sum = 0.0;
        if (threadIdx.x == 0) for (int t = THREADS - 1; t >= 0; t--) sum += parts[t];""",
)


@pytest.mark.slow
def test_a_shorter_kernel_is_bit_identical_and_trains_the_same(on_simt):
    def losses():
        torch.manual_seed(0)
        config = ga.preset("tiny", layers=1, hidden=32, intermediate=64, heads=2, kv_heads=2)
        model = ga.training.Transformer(config)
        opt = ga.AdamW(ga.Arena(model), lr=1e-2, max_norm=1.0)
        tokens = torch.randint(0, 256, (4, 16))
        with ga.TrainStep(model, opt, micro_batches=2, deterministic=True) as step:
            return [step((tokens, tokens)).loss.item() for _ in range(5)]

    ours = losses()
    with ga.replaced("segments_pieces", SHORTER) as verdict:
        assert [name for name, _ in replacements()] == ["segments_pieces"]
        launched = [k for k in kernel_module._of_files if k.name == "segments_pieces"]
        assert launched and all("before % PIECE" in kernel.text for kernel in launched)
        yours = losses()
        with ga.ledger() as row:
            pass
        assert row.name == "your segments_pieces"
    with ga.ledger() as row:
        pass
    assert row.name == "step"
    assert verdict.identical and verdict.largest == 0.0
    assert "bit-identical to ours in all" in str(verdict)
    assert yours == ours and len(set(ours)) == 5


@pytest.mark.slow
def test_a_sum_in_another_order_is_equal_within_rounding(on_simt):
    with ga.replaced("squares_v2", edited(*OTHER_ORDER)) as verdict:
        pass
    assert not verdict.identical
    assert 0 < verdict.largest < 1e-6
    assert "equal to ours within rounding" in str(verdict)


@pytest.mark.slow
def test_a_kernel_without_launch_bounds_gets_the_threads_of_ours(on_simt):
    source = edited("adamw_v3", "__launch_bounds__(THREADS) ", "")
    with ga.replaced("adamw_v3", source) as verdict:
        assert verdict.identical


@pytest.mark.slow
def test_a_block_restores_what_was_before_and_new_kernels_run_what_is_there(on_simt):
    first, second = (f"{source_of('segments_pieces')}{end}" for end in ("\n", "\n// mine\n"))
    with ga.replaced("segments_pieces", first):
        with ga.replaced("segments_pieces", second):
            macros = dict(TOKEN_T="int", BITS=8, KEYS=4, THREADS=64)
            kernel = Kernel("segments", "segments_pieces", **macros)
            assert "// mine" in kernel.source
        assert dict(replacements()) == {"segments_pieces": first}
        assert "// mine" not in kernel.source


@pytest.mark.slow
def test_a_replayed_step_is_captured_again_and_ours_comes_back(on_simt):
    torch.manual_seed(0)
    config = ga.preset("tiny", layers=1, hidden=32, intermediate=64, heads=2, kv_heads=2)
    model = ga.training.Transformer(config)
    step = ga.TrainStep(model, ga.AdamW(ga.Arena(model), lr=1e-2), replay="graph")
    tokens = torch.randint(0, 256, (4, 16))
    with step:
        step((tokens, tokens))
        graphs = len(step.graphs)
        with ga.replaced("adamw_v3", source_of("adamw_v3") + "\n"):
            step((tokens, tokens))
            assert len(step.graphs) == graphs + 1
        step((tokens, tokens))
        assert len(step.graphs) == graphs + 1


def test_with_backend_torch_the_verdict_says_that_no_step_launches_it():
    with ga.use_backend("torch"):
        with ga.replaced("segments_pieces", source_of("segments_pieces")) as verdict:
            assert "no step here launches it: ga.use_backend('simt')" in str(verdict)


# ---- what is refused -----------------------------------------------------------------------------

# (kernel, old text, new text, what the refusal says)
WRONG = [
    ("settings_write", "values.value[i]", "values.value[0]", "elements? wrong"),
    ("squares_v2", "partials[chunk] = sum", "partials[chunk] = (float)sum * 1.0001f", "norm"),
    ("reduce_v2", "sum = block_joined(sum, warps);", "__syncthreads();", "wrong: got"),
    ("reduce_v2", "sqrt(sum)", "sum", "wrong: got"),
    ("reduce_v2", "i < stop", "i < stop - 1", "elements? wrong"),
    # Wrong only where a thread adds more than one sum.
    ("reduce_v2", "sum = joined(sum, part);", "sum = part;", "norm of gradients of 1,100 tensors"),
    ("reduce_v2", "i += 1024", "i += 512", "norm of gradients of 1,100 tensors"),
    ("reduce_v2", "ratio >= 1.0", "!(ratio < 1.0)", "elements? wrong"),
    ("reduce_v2", "(norm + eps)", "norm", "scale near eps .* wrong"),
    ("reduce_v2", "warp < 32", "warp < 31", "first with NaN: 1 element wrong"),
    ("scale_v2", "|| (skip && result.w == 0.0f)) continue", ") continue", "elements? wrong"),
    ("adamw_v3", "{exp_avg, exp_avg_sq};", "{exp_avg_sq, exp_avg};", "elements? wrong"),
    ("adamw_v3", "w, g, state, copy,", "w, g, state, 0,", "elements? wrong"),
    ("adamw_v3", "first, last, offset);", "first, last - 1, offset);", "elements? wrong"),
    ("adamw_v2", "update_list<", "if (blockIdx.x > 0) update_list<", "elements? wrong"),
    ("adamw_begin", "skip_nonfinite, divisor", "0, divisor", "wrong: got"),
    (
        "encoder_forward",
        "token >= 0 && token < vocab",
        "true",
        "elements? wrong|has [0-9,]+ elements?|lies in no tensor|outside",
    ),
    ("encoder_forward", "row % T * C", "row * C", "elements? wrong|has [0-9,]+ elements?"),
    (
        "encoder_backward_v3",
        "place + u - start + 1",
        "place + u - start",
        "elements? wrong|type",
    ),
    ("encoder_backward_v3", "& ~INVALID", "& 7u", "elements? wrong"),
    ("encoder_combine_v3", "int w = 1;", "int w = 2;", "elements? wrong"),
    (
        "encoder_combine_v3",
        "warps[warp][lane] = sum;\n        }\n        __syncthreads();",
        "warps[warp][lane] = sum;\n        }",
        "race",
    ),
    # Only with more than 128 channels does another block take those behind them.
    ("encoder_combine_v3", "group = blockIdx.y * 32 + lane", "group = lane", "race"),
    ("encoder_wpe", "int b = 1;", "int b = 0;", "elements? wrong"),
    ("segments_count", "__popc(same)", "1", "elements? wrong|race|has [0-9,]+ elements?"),
    (
        "segments_scatter",
        "(1u << lane) - 1",
        "(2u << lane) - 1",
        "elements? wrong|has [0-9,]+ elements?|race",
    ),
    ("segments_pieces", "first ? 0 : PIECE", "PIECE", "elements? wrong"),
    ("glu_backward", "__fmul_rn(dvalue, activation)", "dvalue", "elements? wrong"),
    ("glu_forward", "height(point<true>(one, a), a)", "1.0f", "elements? wrong"),
    ("richards_finish", "d[M] = -k * S1", "d[M] = k * S1", "elements? wrong"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, old, new, words", WRONG, ids=[f"{edit[0]}-{i}" for i, edit in enumerate(WRONG)]
)
def test_a_wrong_edit_is_refused(name, old, new, words, on_simt):
    with pytest.raises(ReplacementError, match=f"^{name} is refused: ") as caught:
        with ga.replaced(name, edited(name, old, new)):
            raise AssertionError("it was installed")
    # In one line: a long message is wrapped.
    assert re.search(words, " ".join(str(caught.value).split())), caught.value
    assert replacements() == ()


@pytest.mark.slow
@pytest.mark.parametrize("elements", [7, 4000, 20_000])
def test_an_element_that_is_not_written_holds_nothing_of_the_run_before(elements, on_simt):
    stores = "store_group(h + here.row * hidden, here.q, hidden, v);"
    fewer = edited(
        "glu_forward", stores, f"if (here.row * hidden + here.q < {elements}) {{ {stores} }}"
    )
    before = torch.utils.deterministic.fill_uninitialized_memory
    with pytest.raises(ReplacementError, match="got nan, expected"):
        with ga.replaced("glu_forward", fewer):
            raise AssertionError("it was installed")
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == before


@pytest.mark.parametrize(
    "name, old, new, words",
    [
        (
            "accumulate_v1",
            "+= as",
            "= as",
            "that is the gradient alone: what was in the sum before",
        ),
        ("accumulate_v2", "add4(acc[i], load4(grad, i))", "load4(grad, i)", "gradient alone"),
        ("accumulate_v1", "acc[i] += as_float(grad[i])", "acc[i] += acc[i]", None),
        ("accumulate_v2", "add4(acc[i], load4(grad, i))", "add4(acc[i], acc[i])", None),
    ],
)
def test_a_lost_sum_is_refused_in_the_words_of_the_exercises(name, old, new, words, on_simt):
    with pytest.raises(ReplacementError) as caught:
        with ga.replaced(name, edited(name, old, new)):
            raise AssertionError("it was installed")
    said = " ".join(str(caught.value).split())
    assert re.search(
        r"refused: sum of [\d,]+ elements?, gradient in torch\.float32: [\d,]+ elements? wrong; "
        r"the first is \[0\]: got \S+, expected",
        said,
    )
    assert words is None or words in said
    assert ("alone" in said) == bool(words)


def test_a_kernel_that_does_not_end_is_refused(on_simt, monkeypatch):
    monkeypatch.setattr(replacement, "LAUNCH_LIMIT", 0.5)
    endless = edited("segments_pieces", "pieces[i] = kind;", "while (n > 0) pieces[i] = kind++;")
    with pytest.raises(ReplacementError, match="(?s)segments_pieces is refused: .*after 0.5 s"):
        with ga.replaced("segments_pieces", endless):
            pass


@pytest.mark.slow
def test_a_kernel_that_is_far_slower_is_refused(on_simt, monkeypatch):
    """The seconds are made up: a busy machine holds up either kernel."""
    run = replacement._run

    def timed(*case):
        return run(*case)[0], 100.0 if replacements() else 1.0

    monkeypatch.setattr(replacement, "_run", timed)
    with pytest.raises(ReplacementError, match="it is right, but .* 100 times as long as with our"):
        with ga.replaced("segments_pieces", source_of("segments_pieces") + "\n"):
            pass


@pytest.mark.slow
def test_a_kernel_that_was_held_up_once_is_not_refused(on_simt, monkeypatch):
    """As on a busy machine. Of our own kernel's two runs the second counts."""
    run, seconds = replacement._run, iter([1.0, 1.0, 1.0, 100.0] + [1.0] * 100)

    def held_up(case, n, device):
        result = run(case, n, device)[0]
        # The run of the expected values comes first, in torch.
        return result, 1.0 if backend().name == "torch" else next(seconds)

    monkeypatch.setattr(replacement, "_run", held_up)
    source = edited("segments_pieces", "pieces[i] = kind;", "pieces[i] = kind + 0;")
    with ga.replaced("segments_pieces", source):
        assert replacements()


def test_other_parameters_another_name_and_a_compile_error_are_refused(on_simt):
    source = source_of("segments_pieces")
    with pytest.raises(CompileError, match="they differ at parameter 3, `long long n`"):
        with ga.replaced("segments_pieces", source.replace("int n, int", "long long n, int")):
            pass
    with pytest.raises(CompileError, match=r"cell\(8\)"):
        with ga.replaced("segments_pieces", source.replace("return;", "return", 1)):
            pass
    with pytest.raises(CompileError, match="there is no kernel 'segments_pieces'"):
        with ga.replaced("segments_pieces", source.replace("segments_pieces", "other")):
            pass
    assert replacements() == ()


@pytest.mark.slow
def test_an_error_while_a_kernel_is_replaced_keeps_the_one_before(on_simt):
    mine = source_of("segments_pieces") + "\n"
    with ga.replaced("segments_pieces", mine):
        with pytest.raises(ReplacementError):
            replacement.install("segments_pieces", edited("segments_pieces", "kind;", "kind + 1;"))
        assert dict(replacements()) == {"segments_pieces": mine}


def test_tensor_core_kernels_are_refused_without_a_gpu(on_simt):
    with pytest.raises(ReplacementError, match="poly_forward_v3 runs on tensor cores"):
        with ga.replaced("poly_forward_v3", source_of("poly_forward_v3")):
            pass


# ---- in a notebook -------------------------------------------------------------------------------


class Shell:
    """The part of IPython's shell that the magics use."""

    def __init__(self):
        self.user_ns = {}

    def register_magic_function(self, function, kind, name):
        assert (kind, name) == ("line_cell", "cuda")
        self.cuda = function


@pytest.fixture
def cuda():
    shell = Shell()
    magics.load_ipython_extension(shell)
    return shell.cuda


@pytest.mark.slow
def test_the_magic_replaces_and_restores(cuda, on_simt, capsys):
    verdict = cuda("--replace segments_pieces", source_of("segments_pieces"))
    assert verdict.identical
    assert "bit-identical" in verdict._repr_html_()
    assert [name for name, _ in replacements()] == ["segments_pieces"]
    cuda("--restore")
    assert replacements() == ()
    cuda("--restore segments_pieces")
    out = capsys.readouterr().out
    assert (
        "checking your segments_pieces:\n  on the CPU, every access checked: right\n  5 elements"
        in out
    )
    assert "ours again: segments_pieces\nno kernel was replaced" in out


@pytest.mark.slow
def test_the_magic_refuses_in_words_and_without_a_traceback(cuda, on_simt):
    wrong = edited("segments_pieces", "pieces[i] = kind;", "pieces[i] = kind + 1;")
    with pytest.raises(ReplacementError, match="elements? wrong") as caught:
        cuda("--replace segments_pieces", wrong)
    # whole numbers are shown as whole numbers
    with pytest.raises(ReplacementError, match="got 1,000,000,001, expected 1$"):
        cuda("--replace segments_pieces", wrong.replace("kind + 1;", "kind + 1000000000;"))
    assert caught.value._render_traceback_() == str(caught.value).splitlines()
    with pytest.raises(CompileError, match="expected a kernel of that name in this cell"):
        cuda("--replace segments_count", wrong)
    with pytest.raises(CompileError, match="usage: %%cuda"):
        cuda("--replace", wrong)
    with pytest.raises(CompileError, match="required: --restore; usage: "):
        cuda("--undo")
    with pytest.raises(ArgumentError, match="no training step launches"):
        cuda("--restore squares_v1")


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(CASES))
def test_gpu_our_own_kernel_is_bit_identical_to_ours(name):
    try:
        with ga.replaced(name, source_of(name) + "\n") as verdict:
            assert verdict.identical, verdict
    except ReplacementError as error:
        # v2 of the attention is for GPUs before and after Hopper, v3 for Hopper.
        assert "takes another kernel" in str(error) and name.startswith("poly_"), error


@pytest.mark.gpu
def test_gpu_training_with_a_kernel_of_ones_own_is_bit_identical():
    def losses(replay):
        torch.manual_seed(0)
        model = ga.training.Transformer(ga.preset("tiny")).cuda()
        ga.deterministic_embeddings(model)
        opt = ga.AdamW(ga.Arena(model), lr=1e-2, max_norm=1.0)
        tokens = torch.randint(0, 256, (4, 64), device="cuda")
        with ga.TrainStep(model, opt, micro_batches=2, deterministic=True, replay=replay) as step:
            return [step((tokens, tokens)).loss.item() for _ in range(5)]

    ours = losses("eager")
    with ga.replaced("segments_pieces", SHORTER) as verdict:
        assert verdict.identical
        assert losses("eager") == ours
        assert losses("graph") == ours
    with ga.replaced("squares_v2", edited(*OTHER_ORDER)) as verdict:
        assert not verdict.identical and verdict.largest < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("edit", range(0, len(WRONG), 4))
def test_gpu_a_wrong_edit_is_refused(edit):
    name, old, new, _ = WRONG[edit]
    with pytest.raises(ReplacementError, match=f"^{name} is refused: "):
        with ga.replaced(name, edited(name, old, new)):
            raise AssertionError("it was installed")


CRASH = """
import gpuaccel as ga
from test_replacement import edited

only_on_a_gpu = '''
#ifdef __CUDA_ARCH__
    pieces[(long long)i << 30] = kind;
#else
    pieces[i] = kind;
#endif
'''
source = edited("segments_pieces", "pieces[i] = kind;", only_on_a_gpu)
try:
    with ga.replaced("segments_pieces", source):
        print("it was installed")
except ga.errors.ReplacementError as error:
    print(error)
"""


@pytest.mark.gpu
def test_gpu_a_kernel_that_crashes_the_gpu_says_how_to_go_on():
    here = os.path.dirname(__file__)
    paths = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", CRASH],
        capture_output=True,
        text=True,
        timeout=300,
        env=dict(os.environ, PYTHONPATH=paths),
    )
    assert "the GPU stopped it" in run.stdout, run
    assert "restart the notebook's kernel" in run.stdout
