"""%%cuda: cells become kernels, and errors are shown as the compiler shows them."""

import re

import pytest
import torch

import gpuaccel as ga
from gpuaccel.compiler import nvrtc
from gpuaccel.learn.magics import compile_cell, parse_line

InteractiveShell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell

TWICE = """extern "C" __global__ void twice(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2;
}
"""
NEGATE = """extern "C" __global__ void negate(GRAD_T* x, long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = as_bf16(-as_float(x[i]));
}
"""


@pytest.fixture(scope="module")
def shell():
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "gpuaccel")
    return shell


def test_a_cell_binds_every_kernel_under_its_own_name(shell):
    done = shell.run_cell("%%cuda -D GRAD_T=bf16\n" + TWICE + NEGATE)
    assert done.success
    assert isinstance(shell.user_ns["twice"], ga.Kernel)
    assert [str(p) for p in shell.user_ns["negate"].params] == ["bf16* x", "long long n"]


def test_the_output_is_one_line_per_kernel_with_signature_and_registers(shell):
    lines = str(compile_cell("-D GRAD_T=bf16", TWICE + NEGATE)).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("twice(float* x, int n)")
    assert re.search(r"    \d+ registers", lines[0])
    # a time is one of a GPU
    assert ("ready in" in lines[0]) == (ga.backend().name == "cuda")
    html = compile_cell("", TWICE)._repr_html_()
    assert "twice(float* x, int n)" in html and "registers" in html


def test_a_name_takes_one_kernel_of_the_cell():
    made = compile_cell("twice -DGRAD_T=bf16", TWICE + NEGATE)
    assert list(made.kernels) == ["twice"]
    with pytest.raises(
        ga.errors.CompileError,
        match="no kernel 'thrice' in this cell; kernels found: twice, negate",
    ):
        compile_cell("thrice -DGRAD_T=bf16", TWICE + NEGATE)


def test_macros_are_set_as_a_compiler_sets_them():
    source = "#if FLAG == 1\n__global__ void put(T* x, N n) { x[0] = n; }\n#endif\n"
    made = compile_cell("put -D T=float -D 'N=long long' -DFLAG", source)
    assert list(map(str, made.kernels["put"].params)) == ["float* x", "long long n"]


@pytest.mark.parametrize(
    "line, words",
    [
        ("a b", "unrecognized arguments: b"),
        ("-D", "-D: expected one argument"),
        ("-O2", "-O2"),
        ("'", "quotation"),
        ("--check", "--check: expected one argument"),
    ],
)
def test_a_wrong_line_says_what_is_wrong_and_the_usage(line, words):
    with pytest.raises(ga.errors.CompileError) as caught:
        parse_line(line)
    assert words in str(caught.value) and "usage: %%cuda" in str(caught.value)


def test_a_compile_error_fails_the_cell_and_shows_line_and_caret_but_no_traceback(shell, capsys):
    done = shell.run_cell("%%cuda\n" + TWICE.replace("threadIdx.x;", "threadIdx.x"))
    assert not done.success
    assert isinstance(done.error_in_exec, ga.errors.CompileError)
    shown = capsys.readouterr()
    shown = shown.out + shown.err
    assert "cell(4): error" in shown  # the line in the editor, %%cuda being line 1
    assert "line 3: `int i = blockIdx.x * blockDim.x + threadIdx.x` needs a `;` at its end" in shown
    assert "^" in shown
    assert "Traceback" not in shown and ".py" not in shown


def test_a_failed_cell_leaves_the_kernel_that_was_there_and_says_so(shell, capsys):
    wrong = "%%cuda\n" + TWICE.replace("x[i]", "y[i]")
    words = "twice is still the kernel that it was before this cell"
    shell.user_ns.pop("twice", None)
    shell.run_cell(wrong)
    assert words not in capsys.readouterr().out
    shell.run_cell("%%cuda\n" + TWICE)
    before = shell.user_ns["twice"]
    shell.run_cell(wrong)
    assert shell.user_ns["twice"] is before
    assert words in capsys.readouterr().out


def test_a_cell_without_a_kernel_says_what_is_missing():
    with pytest.raises(ga.errors.CompileError, match="no kernel in this cell"):
        compile_cell("", "int x;\n")
    with pytest.raises(ga.errors.CompileError, match="expected its arguments, as in %%cuda of<flo"):
        compile_cell("", "template <class T> __global__ void of(T* x) {}\n")


def test_a_cell_may_be_a_whole_file(shell, capsys):
    file = """#include <cstdio>
    template <class T> __global__ void of(T* x, T by) { x[threadIdx.x] *= by; }
    int main() { float* x; cudaMalloc(&x, 128); of<float><<<1, 32>>>(x, 2); }
    """
    assert shell.run_cell(f"%%cuda of<float>\n{file}").success
    assert "left out:    main" in capsys.readouterr().out
    x = torch.ones(32)
    with ga.use_backend("simt"):
        shell.user_ns["of"][1, 32](x, 3.0)
    assert (x == 3).all()


def test_a_cell_that_only_the_cpu_can_compile_is_shown(monkeypatch):
    monkeypatch.setattr(nvrtc, "include_folders", lambda: ())
    source = "#include <cuda_fp16.h>\n__global__ void zero(half* x) { x[threadIdx.x] = half(0); }\n"
    with ga.use_backend("simt"):
        assert "zero(half* x)    compiled for the CPU" in str(compile_cell("", source))


@pytest.mark.gpu
def test_a_kernel_from_a_cell_runs():
    kernel = compile_cell("", TWICE).kernels["twice"]
    x = torch.randn(1000, device="cuda")
    expected = 2 * x
    kernel[4, 256](x, 1000)
    torch.testing.assert_close(x, expected, rtol=0, atol=0)


SAXPY = """extern "C" __global__ void saxpy(float* y, const float* x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = @;
}
"""


def trained(shell):
    """What the name saxpy does in the notebook."""
    y, x = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    with ga.use_backend("simt"):
        shell.user_ns["saxpy"][1, 32](y, x, -0.5, 2)
    return y.tolist()


def test_an_answer_is_tried_in_its_own_cell_and_bound_when_it_is_right(shell):
    with ga.use_backend("simt"):
        done = shell.run_cell("%%cuda --check saxpy\n" + SAXPY.replace("@", "y[i] + a * x[i] + 0"))
    assert done.result.passed and "ours" not in str(done.result)
    assert shell.user_ns["saxpy"].text.count("+ 0") == 1


@pytest.mark.parametrize(
    "cell, words",
    [
        (SAXPY.replace("@", "a * x[i]"), "A known mistake: `+ y[i]` is missing"),
        (SAXPY.replace("@", "a * x[i] + y[i"), "it does not compile."),
        (SAXPY.replace("saxpy", "sxpy"), "no kernel 'saxpy' in this cell; kernels found: sxpy"),
        ("def saxpy(y, x, a, n):\n    pass\n", "there is no kernel in this cell"),
    ],
)
def test_until_an_answer_is_right_the_notebook_goes_on_with_ours(shell, cell, words):
    shell.user_ns.pop("saxpy", None)
    with ga.use_backend("simt"):
        done = shell.run_cell(f"%%cuda --check saxpy\n{cell}")
    assert done.success and done.result.passed is False and words in str(done.result)
    assert "Until yours is right, saxpy is our kernel" in str(done.result)
    assert trained(shell) == [-4.0, -8.0]


def test_a_wrong_answer_shows_hint_solution_and_picture_folded(shell):
    with ga.use_backend("simt"):
        result = shell.run_cell("%%cuda --check saxpy\n" + SAXPY.replace("@", "a * x[i]")).result
        html = result._repr_html_()
    assert "hint: " in str(result) and "<svg" in html
    assert html.count("<details") == 3 and " open>" not in html


@pytest.mark.parametrize(
    "name, cell, line, sentence, says",
    [
        (
            "saxpy",
            SAXPY.replace("@;", "a * x[i] + y[i]"),
            4,
            "<code>if (i &lt; n) y[i] = a * x[i] + y[i]</code> needs a <code>;</code> at its end",
            "line 5: expected a &quot;;&quot;",
        ),
        (
            # NVRTC takes it, g++ does not.
            "clipped_step",
            ga.learn.EXERCISES["clipped_step"].solution.replace("s > 0.0f", "scale > 0"),
            6,
            "<code>scale</code> is an address: the number there is <code>scale[0]</code>",
            "line 6: ordered comparison of pointer",
        ),
    ],
)
def test_an_answer_that_does_not_compile_is_a_verdict(shell, name, cell, line, sentence, says):
    """The line is the one beside the cell, of which `%%cuda` is line 1."""
    with ga.use_backend("simt"):
        html = shell.run_cell(f"%%cuda --check {name}\n{cell}").result._repr_html_()
    row = html.index(f">line {line}<")
    assert row < html.index(sentence) < html.index("the compiler") < html.index(says)
    assert html.index(says) < html.index("A hint") < html.index("A solution")


@pytest.mark.parametrize(
    "line, words",
    [
        ("--check", "usage: "),
        ("--check saxpy scale", "usage: "),
        ("--check sxpy", "there is no exercise 'sxpy'"),
        ("--check token_mean", "token_mean is a Python function"),
    ],
)
def test_a_check_that_cannot_be_made_says_why(shell, capsys, line, words):
    assert not shell.run_cell(f"%%cuda {line}\n{SAXPY.replace('@', '0')}").success
    shown = capsys.readouterr()
    assert words in shown.out + shown.err
