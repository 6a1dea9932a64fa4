"""Every solution is right and every known mistake is found, on the CPU and on a GPU."""

import itertools
import re
import subprocess
import sys
import types
import zlib
from html import escape

import pytest
import torch

import gpuaccel as ga
from gpuaccel.learn import EXERCISES
from gpuaccel.learn.exercises import SIZES, Exercise, Result, checking, python_answers

KERNELS = [e for e in EXERCISES.values() if e.params]
PYTHON = [e for e in EXERCISES.values() if not e.params]
WRONG_KERNELS = [
    pytest.param(e, what, id=f"{e.name}-{what}") for e in KERNELS for what in e.wrong_answers
]
# On a GPU a kernel runs on the CPU first, where there is a C++ compiler.
on_cpu_and_gpu = pytest.mark.parametrize(
    "where",
    [
        "simt",
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cuda without a compiler", marks=pytest.mark.gpu),
    ],
    indirect=True,
)
WRONG_PYTHON = [
    pytest.param(e, what, id=f"{e.name}-{what}") for e in PYTHON for what in e.wrong_answers
]


@pytest.fixture(autouse=True)
def seed_of_a_check(monkeypatch, request):
    """A check without a seed draws the same data in every run of a test."""
    seed = zlib.crc32(request.node.nodeid.encode()) // 2
    monkeypatch.setattr(checking, "secrets", types.SimpleNamespace(randbelow=lambda n: seed))


NO_COMPILER = None, "neither g++ nor clang++ found"


@pytest.fixture
def where(request, monkeypatch):
    if request.param == "cuda without a compiler":
        monkeypatch.setattr(checking, "find_compiler", lambda: NO_COMPILER)
    with ga.use_backend(request.param.split()[0]):
        yield request.param


@pytest.fixture
def small_sizes_on_cpu(where, monkeypatch):
    """A wrong answer is found without a million elements, which take seconds on the CPU."""
    if where == "simt":
        monkeypatch.setattr(checking, "SIZES", SIZES[:-1])


def python(source, name):
    return python_answers.function_of(EXERCISES[name], source)


def test_there_are_exercises_with_mistakes_to_find():
    assert len(EXERCISES) >= 20
    assert all(len(e.wrong_answers) >= 6 for e in EXERCISES.values())
    assert {1, 255, 256, 257, 1000, 4096, 1_000_003} <= set(SIZES)


def test_without_gpu_and_compiler_a_kernel_is_only_compiled(monkeypatch):
    monkeypatch.setattr(checking, "find_compiler", lambda: NO_COMPILER)
    with ga.use_backend("torch", policy="off"):
        result = ga.check("scale", ga.compile(EXERCISES["scale"].solution, "scale"))
    assert result.passed is None and not result and result.launch is None
    assert "compiled, not run" in str(result) and "registers" in str(result)
    assert "(GPUACCEL_GPU=off); neither g++ nor clang++ found" in str(result)


@pytest.mark.parametrize("e", PYTHON, ids=lambda e: e.name)
def test_a_python_solution_passes_for_any_seed(e):
    for seed in range(5):
        result = ga.check(e.name, python(e.solution, e.name), seed=seed)
        assert result.passed, result


@pytest.mark.parametrize(
    "norm, words",
    [
        ("norms.to(norms.device).norm()", ""),
        ("norms[torch.arange(len(norms))].norm()", ""),
        ("torch.tensor(norms.norm().item())", "the host would wait for a value"),
        ("norms.norm() + 0.0 * norms.tolist()[0]", "the host would wait for a value"),
        ("norms.norm() * (1 + torch.equal(norms, 0 * norms))", "the host would wait for a value"),
        ("norms[norms == norms].norm()", "the shape of its result depends on values"),
    ],
)
def test_what_the_host_would_wait_for_is_refused_where_it_matters(norm, words):
    ratio = "torch.clamp(max_norm / (norm + 1e-6), max=1.0)"
    source = f"def global_scale(norms, max_norm):\n    norm = {norm}\n    return {ratio}\n"
    result = ga.check("global_scale", python(source, "global_scale"))
    assert bool(result) == (not words) and words in str(result)


def test_what_cannot_be_captured_is_told_once_with_its_line_and_what_to_do():
    for name, what, line in (
        ("guarded", "asks the host", 2),
        ("guarded", "`if` asks the device, too", 2),
        ("decay", "`max` and `int(count)` ask the device: use `.clamp(min=0)`", 2),
    ):
        result = ga.check(name, python(EXERCISES[name].wrong_answers[what], name))
        assert result.passed is False and result.summary == "not yet: it cannot be captured."
        assert len(result.lines) == 1 and f":{line} cannot" in result.lines[0][2]
        assert "the host would wait for a value of the device" in str(result)
        assert "Instead: keep the number on the device" in str(result)
    assert "the shape" in str(
        ga.check(
            "guarded", python(EXERCISES["guarded"].wrong_answers["picks by a mask"], "guarded")
        )
    )


def test_a_captured_answer_is_compared_after_each_replay():
    solution = python(EXERCISES["decay"].solution, "decay")
    assert "right in 12 replays" in str(ga.check("decay", solution, seed=1))
    for answer, words in (
        (lambda *given: None, "got None"),
        (lambda weight, *rest: weight[:0], "got a tensor of shape (0,)"),
        (lambda *given: 1 / 0, "ZeroDivisionError"),
    ):
        result = ga.check("guarded", answer)
        assert result.passed is False and words in str(result)


@pytest.mark.parametrize(
    "name, what, words",
    [
        (
            "decay",
            "the learning rate stays 0.1",
            "wrong in replay 2 of 12, where count is 1, the learning rate 0.09;",
        ),
        (
            "decay",
            "the learning rate falls below zero",
            "wrong in replay 12 of 12, where count is 11, the learning rate 0;",
        ),
        (
            "decay",
            "`weight` is a new tensor: in place is weight -= ...",
            "the learning rate 0.1; no element was changed in place",
        ),
        ("decay", "`count` stays as it is", "after replay 1 of 12 `count` holds 0, expected 1"),
        (
            "decay",
            "`count` is a new tensor: in place is count += 1",
            "after replay 1 of 12 `count` holds 0, expected 1",
        ),
        ("guarded", "NaN passes", "wrong in replay 4 of 6, where the loss is NaN;"),
        (
            "guarded",
            "a loss at the limit is skipped: ask `<=`",
            "wrong in replay 3 of 6, where the loss is at the limit;",
        ),
    ],
)
def test_a_wrong_replay_is_told_with_what_is_special_about_it(name, what, words):
    answer = python(EXERCISES[name].wrong_answers[what], name)
    assert any(words in line[2] for line in ga.check(name, answer, seed=1).lines)


def test_a_check_of_a_capture_leaves_the_backend_alone():
    for backend, name in itertools.product(("torch", "simt"), ("decay", "update")):
        with ga.use_backend(backend):
            assert ga.check(name, python(EXERCISES[name].solution, name))
            assert ga.backend().name == backend


def test_a_mistake_of_a_launched_kernel_is_told_with_its_name_and_line():
    what = "`clip_scale` adds `n` sums, and there are `blocks` of them"
    words = str(ga.check("update", python(EXERCISES["update"].wrong_answers[what], "update")))
    assert "clip_scale, line 5: thread 0 of block 0 reads sums[1]: sums has 1 element" in words


def test_launches_are_not_tried_without_a_compiler(monkeypatch):
    monkeypatch.setattr(checking, "find_compiler", lambda: NO_COMPILER)
    result = ga.check("update", python(EXERCISES["update"].stub, "update"))
    assert result.passed is None and str(result).startswith("update: not tried: its kernels run")
    assert result.function.__name__ == "update"


@on_cpu_and_gpu
def test_a_write_where_nothing_was_to_be_done_is_seen_and_its_nan_named(where, small_sizes_on_cpu):
    task = EXERCISES["clipped_step"]
    for what in ("NaN reaches the weights", "NaN counts as 0"):
        words = str(ga.check(task.name, ga.compile(task.wrong_answers[what], task.name)))
        assert words.count("have changed, and none should; ") == 2
        assert "4,096, scale 0" in words and "1,000, scale NaN" in words
        assert "of them are NaN now" in words


@pytest.mark.skipif(checking.find_compiler()[0] is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "old, new, has_barrier",
    [
        ("for (int", "__syncthreads(); for (int", True),
        ("if (t == 0)", "__syncthreads(); if (t == 0)", True),
        ("// your line", "// __syncthreads() is missing", False),
    ],
)
def test_a_race_beside_a_barrier_says_what_a_barrier_orders(old, new, has_barrier):
    source = EXERCISES["block_sum"].stub.replace(old, new)
    with ga.use_backend("simt"):
        result = ga.check("block_sum", ga.compile(source), seed=0)
    assert result.passed is False
    assert "race: " in str(result)
    assert ("only if it is between them and all threads reach it" in str(result)) is has_barrier


def test_two_blocks_that_share_an_element_are_told_without_fences():
    task = EXERCISES["clipped_step"]
    index = "(long long)blockIdx.x * blockDim.x + threadIdx.x"
    assert index in task.solution
    kernel = ga.compile(task.solution.replace(index, "threadIdx.x"), task.name)
    with ga.use_backend("simt"):
        words = str(ga.check(task.name, kernel))
    assert "nothing orders two blocks: each needs elements of its own" in words
    assert "__threadfence" not in words


@pytest.mark.parametrize("e, what", WRONG_PYTHON)
def test_a_known_python_mistake_fails_for_any_seed(e, what, monkeypatch):
    answer = python(e.wrong_answers[what], e.name)
    result = ga.check(e.name, answer, seed=0)
    assert result.passed is False
    # of two that do the same none is named
    assert result.summary.partition(" A known mistake: ")[2] in ("", f"{what}."), result
    monkeypatch.setattr(python_answers, "known_mistake", lambda *given: "")
    for seed in range(1, 5):
        assert ga.check(e.name, answer, seed=seed).passed is False


@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda means, counts: None, "got None"),
        (
            lambda means, counts: (means[0], 1),
            "got a tuple of 2 items",
        ),
        (lambda means, counts: means[0].abs() * 0, "wrong; the first is [0]: got 0, expected"),
        (lambda means, counts: means[0] / 0 * 0, "wrong; the first is [0]: got nan, expected"),
        (lambda means, counts: 1 / 0, "ZeroDivisionError"),
        (lambda means, counts: means[0][:0], "got a tensor of shape (0,)"),
    ],
)
def test_an_answer_that_raises_or_returns_something_else_fails_in_words(answer, words):
    result = ga.check("token_mean", answer)
    assert result.passed is False and words in str(result)


@pytest.mark.parametrize(
    "params, words",
    [
        (
            "float* out, const float* x, int n",
            "differ at parameter 3, `int n` where `float factor` belongs",
        ),
        (
            "float* out, const bf16* x, float factor, int n",
            "`const bf16* x` where `const float* x` belongs",
        ),
        ("float* out, const float* x, float factor, float n", "`float n` where `int n` belongs"),
        (
            "float* out, const float* x, float factor, int n, int m",
            "`int m` where `nothing` belongs",
        ),
    ],
)
def test_wrong_parameters_are_named_before_anything_runs(params, words):
    kernel = ga.compile(f'extern "C" __global__ void scale({params}) {{}}')
    result = ga.check("scale", kernel)
    assert result.passed is False and words in str(result)


def test_names_const_and_wider_numbers_of_parameters_are_free():
    kernel = ga.compile(
        'extern "C" __global__ void mine(float* y, float* z, float f, long long count) {}'
    )
    assert checking._parameters_differ(EXERCISES["scale"], kernel) is None


def test_an_unknown_exercise_or_an_answer_of_another_kind_is_an_error_in_words():
    with pytest.raises(
        ga.errors.ArgumentError, match="no exercise 'skale'; exercises: saxpy, scale"
    ):
        ga.check("skale", None)
    with pytest.raises(ga.errors.ArgumentError, match="takes a kernel .* got function"):
        ga.check("scale", lambda: None)
    with pytest.raises(ga.errors.ArgumentError, match="takes a Python function, got int"):
        ga.check("token_mean", 3)


def test_a_wrong_answer_gets_hint_and_solution_folded():
    e = EXERCISES["add_pair"]
    html = Result(e.name, False, "not yet.")._repr_html_()
    folded = re.findall(r"<details><summary.*?</details>", html, re.DOTALL)
    assert [">A hint<" in folded[0], ">A solution<" in folded[1]] == [True, True]
    assert escape(e.hint) in folded[0] and escape(e.solution.strip()) in folded[1]
    assert "<details>" not in Result(e.name, True, "right.")._repr_html_()


def test_a_result_is_a_table_in_html_and_lines_in_text():
    result = ga.check("token_mean", python(EXERCISES["token_mean"].solution, "token_mean"))
    assert result and str(result).count("\n") == len(result.lines)
    assert result._repr_html_().count("<tr") == len(result.lines)
    words = Result("scale", False, "not yet", [(False, "1", "`out` < `x`")])._repr_html_()
    assert "<code>out</code> &lt; <code>x</code>" in words


@on_cpu_and_gpu
@pytest.mark.parametrize("e", KERNELS, ids=lambda e: e.name)
def test_a_kernel_solution_passes_and_costs_what_the_solution_costs(e, where):
    result = ga.check(e.name, ga.compile(e.solution, e.name))
    assert result.passed and result.remarks == [], result
    if where != "cuda without a compiler":
        assert result.cost and all(mine == theirs for _, mine, theirs in result.cost)
        assert "(the solution: the same)" in str(result)


@pytest.mark.slow
@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
@pytest.mark.parametrize("e, what", WRONG_KERNELS)
def test_a_known_wrong_kernel_fails(e, what, where, monkeypatch):
    kernel = ga.compile(e.wrong_answers[what], e.name)
    result = ga.check(e.name, kernel)
    if result.passed and where == "cuda without a compiler":
        # Unchecked, a race or a read beside a tensor may be right by luck.
        monkeypatch.undo()
        with ga.use_backend("simt"):
            seen = str(ga.check(e.name, kernel))
        assert re.search(r"race: |thread \d+ of block \d+ reads \w+\[-?\d+\]", seen), result
        return
    assert result.passed is False
    # of two that do the same none is named
    assert result.summary.partition(" A known mistake: ")[2] in ("", f"{what}."), result
    if where != "cuda without a compiler" and what in (
        "no guard",
        "guards the first only",
        "one too many",
    ):
        assert re.search(
            r"line \d+: thread \d+ of block \d+ (reads|writes) \w+\[-?\d+\]", str(result)
        ), result


@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
@pytest.mark.parametrize("e", KERNELS, ids=lambda e: e.name)
def test_a_stub_fails_and_says_that_nothing_was_written(e, where):
    result = ga.check(e.name, ga.compile(e.stub, e.name))
    assert result.passed is False
    if e.name == "block_sum":
        # Its stub is a kernel with a race, which a CPU's checks name.
        assert where == "cuda without a compiler" or "race: " in str(result)
        return
    for n, (passed, _, outcome) in zip(checking.SIZES, result.lines):
        case = e.data(n, torch.Generator(ga.default_device().type))
        if case.expected is case.out:
            assert passed and outcome == "right; no element has changed"
        elif case.begins_empty:
            assert outcome == "nothing was written"
        else:
            assert re.fullmatch(r"`\w+` is as it was before", outcome)


# ---- what is said of answers that a learner writes ----------------------------------------------

SCALE = "float* out, const float* x, float factor, int n"
SQUARES = "float* sums, const float* x, int n"
BLOCK_SUM = "float* out, const float* x, int n"
ACCUMULATE = "float* acc, const bf16* grad, long long n"
I = "int i = blockIdx.x * blockDim.x + threadIdx.x;\n"


def answer(name, params, body):
    return ga.compile(f'extern "C" __global__ void {name}({params})\n{{\n{body}\n}}\n', name)


@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
@pytest.mark.parametrize(
    "name, params, body, right_from_zeros",
    [
        ("scale", SCALE, I + "if (i < n) out[i] += factor * x[i];", True),
        ("scale", SCALE, I + "if (i < n) atomicAdd(&out[i], factor * x[i]);", True),
        ("scale", SCALE, I + "if (i < n) out[i] -= factor * x[i];", False),
        ("scale", SCALE, I + "if (i < n && !(out[i] == 0.0f)) out[i] = factor * x[i];", False),
        ("squares", SQUARES, I + "if (i < n) atomicAdd(&sums[blockIdx.x], x[i] * x[i]);", True),
        (
            "group_starts",
            "int* starts, const int* tokens, int n",
            I + "if (i < n) starts[i] += i == 0 || tokens[i - 1] != tokens[i];",
            True,
        ),
    ],
)
def test_an_output_that_is_read_before_it_is_written_is_named(
    name, params, body, right_from_zeros, where
):
    result = ga.check(name, answer(name, params, body), seed=1)
    assert result.passed is False and "nothing was written" not in str(result)
    output = params.split()[1].strip(",")
    held = "-1" if name == "group_starts" else "NaN"
    # Atomics of several threads may be added in another order on a GPU.
    if name != "squares" or where != "cuda without a compiler":
        sentence = f"`{output}` was read before it was written: it holds {held}, not 0"
        assert sentence in str(result)
        assert ("with 0 the result would be right" in str(result)) == right_from_zeros


@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
def test_an_output_that_has_values_may_be_read(where):
    body = I + "if (i < n) atomicAdd(&acc[i], as_float(grad[i]));"
    result = ga.check("accumulate", answer("accumulate", ACCUMULATE, body))
    assert result.passed, result


@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
@pytest.mark.parametrize(
    "body, words",
    [
        (I + "out[i] = factor * x[i];", "thread 1 of block 0 reads x[1]"),
        (I + "if (i <= n) out[i] = factor * x[i];", "thread 1 of block 0 reads x[1]"),
        (I + "if (i < n) out[i] = factor * x[i + 1];", "thread 0 of block 0 reads x[1]"),
        (I + "if (i < n) out[i + 1] = factor * x[i];", "thread 0 of block 0 writes out[1]"),
        (I + "if (i < n) out[i - 5000] = x[i];", "thread 0 of block 0 writes out[-5000]"),
        (I + "if (i < n) out[i] = x[i + 100000000];", "thread 0 of block 0 reads x[100000000]"),
    ],
)
def test_an_access_out_of_bounds_is_named_before_it_reaches_a_gpu(body, words, where):
    if where == "cuda without a compiler":
        pytest.skip("a GPU alone would be stopped by some of these")
    result = ga.check("scale", answer("scale", SCALE, body))
    assert result.passed is False and words in str(result) and "tensors=" not in str(result)
    assert result.summary.startswith("not yet: ")


@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
@pytest.mark.parametrize(
    "body, words",
    [
        (
            I + "if (threadIdx.x == 0) return;\nif (i < n) out[i] = factor * x[i];",
            r"4 elements wrong; the first is \[0\]: not written, expected",
        ),
        (
            "int i = blockIdx.x * 128 + threadIdx.x;\nif (i < n) out[i] = factor * x[i];",
            r"360 elements wrong; the first is \[640\]: not written, expected",
        ),
        (
            I + "if (i < n) out[i] = factor * x[n - 1 - i];",
            r"1,000 elements wrong; the first is \[0\]: got \S+, expected",
        ),
        (I + "if (i < n) out[i] = x[i] - x[i];", r"\[0\]: got 0, expected"),
        (I + "if (i < n) out[i] = 0.0f / (x[i] - x[i]);", r"\[0\]: got nan, expected"),
    ],
)
def test_the_first_wrong_element_is_named(body, words, where):
    outcome = ga.check("scale", answer("scale", SCALE, body)).lines[4]
    assert outcome[:2] == (False, "n = 1,000") and re.search(words, outcome[2]), outcome


SWISH = ", ".join(EXERCISES["swish_backward"].params)


@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
@pytest.mark.parametrize(
    "s, right",
    [
        ("0.5f * (1.0f + tanhf(0.5f * k[0] * x[i]))", True),
        ("u < -20.0f ? 0.0f : 1.0f / (1.0f + expf(-u))", True),
        ("1.0f / (1.0f + expf(-u)) + 1e-5f", False),
    ],
)
def test_a_sigmoid_that_is_rounded_as_one_is_passes(s, right, where):
    body = (
        I + "if (i >= n) return;\nfloat u = k[0] * x[i];\n"
        f"float s = {s};\ndx[i] = dy[i] * (s + u * s * (1.0f - s));"
    )
    result = ga.check("swish_backward", answer("swish_backward", SWISH, body))
    assert bool(result) == right, result


@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
def test_an_element_that_kept_its_value_is_told_from_one_not_written(where):
    body = I + "if (threadIdx.x > 0 && i < n) acc[i] += as_float(grad[i]);"
    result = ga.check("accumulate", answer("accumulate", ACCUMULATE, body))
    assert result.lines[0][2] == "`acc` is as it was before"
    assert re.search(r"first is \[0\]: got \S+, as before, expected", result.lines[4][2])


@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
def test_a_sum_in_another_order_is_told_from_a_sum_of_other_numbers(where):
    e = EXERCISES["embedding_gradient"]
    result = ga.check(e.name, ga.compile(e.wrong_answers["the last row is added first"], e.name))
    assert "it differs by roundings, as a sum in another order or type does" in str(result)
    result = ga.check(e.name, ga.compile(e.wrong_answers["the last row is left out"], e.name))
    assert "by roundings" not in str(result)
    # A result in bf16, of an exercise without a sum.
    e = EXERCISES["stochastic"]
    for wrong in e.wrong_answers.values():
        assert "by roundings" not in str(ga.check(e.name, ga.compile(wrong, e.name)))


@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
def test_a_wrong_rounding_is_told_with_the_halves_that_were_to_be_added(where):
    e = EXERCISES["stochastic"]

    def outcomes(what):
        return [
            line[2] for line in ga.check(e.name, ga.compile(e.wrong_answers[what], e.name)).lines
        ]

    halves = r"the lower half of x\[(\S+)\] is (\S+), noise\[\1\] is (\S+): (\S+) (.+)$"
    for what in ("cuts off", "always up"):
        index, lower, noise, total, words = re.search(halves, outcomes(what)[1]).groups()
        total = int(total.replace(",", ""))
        assert total == int(lower.replace(",", "")) + int(noise.replace(",", ""))
        assert words == ("carries" if total >= 65_536 else "does not carry")
        assert words == {"cuts off": "carries", "always up": "does not carry"}[what]
    assert re.search(r"got inf, expected nan; x\[\d+\] is nan$", outcomes("NaN is cut off")[4])
    assert re.search(r"expected -inf; x\[\d+\] is -inf$", outcomes("infinity becomes NaN")[4])


@pytest.mark.parametrize(
    "where", ["simt", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
def test_a_kernel_that_does_not_end_is_stopped_and_run_no_more(where, monkeypatch):
    monkeypatch.setattr(checking, "SECONDS", 0.5)
    body = "for (int i = 0; n > 0; i ^= 1) out[i] = factor * x[0];"
    result = ga.check("scale", answer("scale", SCALE, body))
    assert result.passed is False
    assert result.summary == (
        "not yet: with 1 element it was stopped after 0.5 s: too slow, or a loop without an end."
    )
    assert [line[1:] for line in result.lines] == [("n = 1", "stopped in line 3")]
    assert result.launch is None


@pytest.mark.gpu
def test_a_gpu_that_does_not_end_is_not_waited_for():
    """In a process of its own: its GPU works until it is killed."""
    script = (
        "import os, gpuaccel as ga\n"
        "from gpuaccel.learn.exercises import checking\n"
        "checking.find_compiler = lambda: (None, 'none')\n"
        "checking.SECONDS_GPU = 1.0\n"
        'source = """extern "C" __global__ void scale(float* out, const float* x, float factor, '
        'int n)\n{ for (volatile int i = 0; n > 0; i ^= 1) out[0] = x[0]; }"""\n'
        "print(ga.check('scale', ga.compile(source, 'scale')).summary, flush=True)\n"
        "os._exit(0)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        words = process.stdout.readline()
    finally:
        process.kill()
    assert "restart the notebook's kernel" in words


@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
@pytest.mark.parametrize(
    "name, params, body, words",
    [
        (
            "scale",
            SCALE,
            "if (blockIdx.x + threadIdx.x > 0) return;\n"
            "for (int i = 0; i < n; i++) out[i] = factor * x[i];",
            "one thread did all the work: it makes 1,200 accesses; "
            "no thread of the solution makes more than 2",
        ),
        (
            "squares",
            SQUARES,
            "if (threadIdx.x > 0) return;\nfloat sum = 0.0f;\n"
            "for (int i = blockIdx.x * 256; i < min(n, (int)(blockIdx.x + 1) * 256); i++)\n"
            "    sum += x[i] * x[i];\nsums[blockIdx.x] = sum;",
            "one thread of each block did all the work: it makes up to 257 accesses",
        ),
        (
            "scale",
            SCALE,
            I + "if (i < n) out[i] = 0.0f * (x[0] + x[n - 1]) + factor * x[i];",
            "it reads 3 times the bytes of the solution (7,200 and 2,400)",
        ),
        (
            "reverse",
            "float* out, const float* x, int n",
            I + "int j = min(i, n - 1);\nout[j] = x[n - 1 - j];",
            "wrote the same value",
        ),
    ],
)
def test_a_right_answer_hears_what_it_costs(name, params, body, words, where):
    result = ga.check(name, answer(name, params, body), seed=1)
    assert result.passed, result
    if where == "cuda without a compiler":
        assert not result.remarks and not result.cost
    else:
        assert words in str(result), result
        assert result.summary == f"right for every size; but {result.remarks[0]}."


@pytest.mark.parametrize(
    "body",
    [
        "__shared__ float part[256];\nint t = threadIdx.x;\n"
        + I
        + "part[t] = i < n ? x[i] : 0.0f;\n"
        "for (int half = 128; half > 0; half /= 2)\n"
        "    if (t < half) {\n        __syncthreads();\n        part[t] += part[t + half];\n    }\n"
        "if (t == 0) out[blockIdx.x] = part[0];",
        "__shared__ float part[256];\nint t = threadIdx.x;\n"
        + I
        + "part[t] = i < n ? x[i] : 0.0f;\nif (t >= 128) return;\n"
        "for (int half = 128; half > 0; half /= 2) {\n"
        "    __syncthreads();\n    if (t < half) part[t] += part[t + half];\n}\n"
        "if (t == 0) out[blockIdx.x] = part[0];",
    ],
)
def test_a_barrier_that_not_all_threads_reach_is_a_failure(body):
    with ga.use_backend("simt"):
        result = ga.check("block_sum", answer("block_sum", BLOCK_SUM, body))
    assert result.passed is False and not result.remarks
    assert result.summary.startswith("not yet: not all threads of a block reach the barrier")
    assert "thread 128 of block 0 has ended when others reach this barrier" in str(result)


def test_narrow_accesses_to_the_same_bytes_are_no_remark():
    body = (
        "long long first = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);\n"
        "for (int k = 0; k < 4; k++)\n"
        "    if (first + k < n) acc[first + k] += as_float(grad[first + k]);"
    )
    with ga.use_backend("simt"):
        result = ga.check("accumulate4", answer("accumulate4", ACCUMULATE, body))
    assert result.passed and result.remarks == []
    assert "1,200 reads, 600 writes, 6,000 bytes read and written" in str(result)
    words = "(the solution: 300, 150, the same, 3); the bytes are the same: a float4 is one read"
    assert words in str(result)


@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
def test_a_float4_that_is_stored_at_once_is_one_write(where):
    e = EXERCISES["accumulate4"]
    last = "store4(acc, first / 4, make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w));"
    assert last in e.solution
    added = "a.x += b.x; a.y += b.y; a.z += b.z; a.w += b.w;"
    stored = "reinterpret_cast<float4*>(acc + first)[0] = a;"
    result = ga.check(e.name, ga.compile(e.solution.replace(last, f"{added}\n    {stored}")))
    assert result.passed and result.remarks == []


@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
@pytest.mark.parametrize(
    "index, remark",
    [
        ("int i = blockIdx.x * blockDim.x + threadIdx.x;", "`i` is an int, which ends at 2,147,"),
        ("const int t = threadIdx.x, i = blockIdx.x * 256 + t;", "`i` is an int, which ends at "),
        (
            "long long i = blockIdx.x * blockDim.x + threadIdx.x;",
            "`i` is computed in 32 bits, which end at 4,294,967,295,",
        ),
        ("unsigned i = blockDim.x * blockIdx.x + threadIdx.x;", "`i` is computed in 32 bits"),
        ("long long i = blockIdx.x * 256LL + threadIdx.x;", None),
        ("auto i = (long long)blockIdx.x * blockDim.x + threadIdx.x;", None),
        ("int b = blockIdx.x; long long i = (long long)b * blockDim.x + threadIdx.x;", None),
    ],
)
def test_an_index_that_is_too_small_for_n_is_named(index, remark, where):
    body = index + "\nif (i < n) acc[i] += as_float(grad[i]);"
    result = ga.check("accumulate", answer("accumulate", ACCUMULATE, body))
    assert result.passed
    assert bool(result.remarks) == bool(remark), result
    assert remark is None or result.remarks[0].startswith(remark)
    # With an int n it is large enough.
    body = (
        index.replace("long long", "int").replace("LL", "") + "\nif (i < n) out[i] = factor * x[i];"
    )
    assert ga.check("scale", answer("scale", SCALE, body)).remarks == []


@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
@pytest.mark.parametrize(
    "name, old, new, line",
    [
        ("swish_backward", "1.0f", "1.0", 5),
        ("clip_scale", "float total", "double total", 5),
        # These are float: sqrt has a version for it, and the product is rounded once either way.
        ("clip_scale", "sqrtf(", "sqrt(", 0),
        ("saxpy", "a * x[i]", "1.0 * a * x[i]", 4),
        ("scale", "factor * x[i]", "(float)(0.5 * (2.0f * factor)) * x[i]", 0),
    ],
)
def test_double_precision_is_named_where_the_machine_computes_in_it(name, old, new, line, where):
    e = EXERCISES[name]
    result = ga.check(e.name, ga.compile(e.solution.replace(old, new), e.name), seed=1)
    assert result.passed, result
    words = f"line {line} computes in double precision, the solution nowhere"
    assert any(words in remark for remark in result.remarks) == bool(line), result


@pytest.mark.parametrize(
    "name, source, argument",
    [
        (
            "token_mean",
            "for i, (mean, count) in enumerate(zip(means, counts)):\n"
            "        if count: means[i] = mean.float() * count\n"
            "    return sum(m for m, count in zip(means, counts) if count) / sum(counts)",
            "means",
        ),
        (
            "token_mean",
            "total = sum(m.float() * c for m, c in zip(means, counts) if c) / sum(counts)\n"
            "    means.clear()\n    return total",
            "means",
        ),
        (
            "ordered_sum",
            "total = grads[0, 0]\n    for grad in grads.flatten(0, 1)[1:]:\n"
            "        total += grad\n    return total",
            "grads",
        ),
        (
            "guarded",
            "weight -= torch.where(loss <= limit, 0.1 * grad, 0.0)\n    return weight",
            "weight",
        ),
        (
            "decay",
            "grad *= 0.1 * (1 - count / steps).clamp(min=0)\n    weight -= grad\n    count += 1",
            "grad",
        ),
    ],
)
def test_an_argument_that_is_changed_in_place_is_named(name, source, argument):
    header = EXERCISES[name].solution.partition(":\n")[0]
    result = ga.check(name, python(f"{header}:\n    {source}\n", name), seed=1)
    assert result.passed
    assert result.remarks == [f"it changes its argument `{argument}` in place"]


def test_an_argument_that_a_wrong_answer_changes_is_named_too():
    body = "    t = grads[0, 0]\n    for g in grads[0]:\n        t += g\n    return t"
    source = f"def ordered_sum(grads):\n{body}"
    result = ga.check("ordered_sum", python(source, "ordered_sum"), seed=1)
    assert result.passed is False
    assert all(
        line[2].endswith("; it changes its argument `grads` in place") for line in result.lines
    )


def test_a_ring_that_passes_on_a_sum_says_what_was_expected():
    e = EXERCISES["ring_sum"]
    result = ga.check(e.name, python(e.wrong_answers["passes on the sum"], e.name), seed=1)
    assert result.passed is False
    assert "expected `mine`, or what was received last" in str(result)


def test_a_mean_that_was_summed_in_bf16_is_said_to_differ_by_roundings():
    e = EXERCISES["token_mean"]
    words = {
        w: str(ga.check(e.name, python(e.wrong_answers[w], e.name), seed=0))
        for w in e.wrong_answers
    }
    in_bf16 = words["summed in bf16: the means may be bf16, the result is fp32"]
    assert in_bf16.count("; it differs by roundings to bf16") == 2
    assert "roundings" not in words["the sum is not divided by the number of tokens"]
    assert "roundings" not in words["it is divided by the number of micro-batches, not of tokens"]


def test_a_loop_over_elements_is_named_in_a_python_answer(monkeypatch):
    def cases(generator):
        x, dy = torch.randn(2, 100, generator=generator)
        yield "100", (dy, x), 2.0 * x.double() * dy.double()

    solution = "def slope(dy, x):\n    return 2.0 * x * dy\n"
    task = Exercise("slope", "The slope.", "", "", solution, {}, cases=cases)
    monkeypatch.setitem(EXERCISES, "slope", task)
    assert ga.check("slope", python(solution, "slope")).remarks == []

    def loop(dy, x):
        return torch.stack([2.0 * x[i] * dy[i] for i in range(len(x))])

    result = ga.check("slope", loop)
    assert result.passed
    assert result.summary.endswith("it runs 401 operations of torch, the solution 2.")


@pytest.mark.parametrize(
    "body, words",
    [
        (I + "if (i < n) out[i] = factor * x[i];", "writes elements 0 to 99"),
        (I + "out[i] = factor * x[i];", "OUTSIDE: elements 100 to 127 of 100"),
    ],
)
def test_a_result_shows_the_kernel_on_a_small_size(body, words):
    with ga.use_backend("simt"):
        result = ga.check("scale", answer("scale", SCALE, body))
    assert words in str(result.show())
    html = result._repr_html_()
    assert "<details" in html and "<svg" in html
    # A style is one of the whole page.
    assert "--ink-strong:var(--jp-" in html and "prefers-color-scheme:dark" in html


def test_a_result_without_a_kernel_shows_nothing():
    result = ga.check("token_mean", python(EXERCISES["token_mean"].solution, "token_mean"))
    assert "<svg" not in result._repr_html_()
    with pytest.raises(ga.errors.ArgumentError, match="expected a kernel that ga.check has run"):
        result.show()


# ---- known mistakes, written in a learner's way

KNOWN_KERNELS = {
    "saxpy": (
        "float* y, const float* x, float a, int n",
        {
            I + "if (i < n) y[i] = y[i] - x[i] * a;": "the product is subtracted, not added",
            I + "if (i < n) y[i] = -y[i] + a * x[i];": "`y[i]` is subtracted, not added",
            I + "if (i < n) { y[i] = x[i]; y[i] *= a; }": "`+ y[i]` is missing: what was in `y` is",
            "for (int k = 0; k < n; k++) y[k] += a * x[k];": "no loop is needed: each thread",
            I + "if (i < n) y[i] = 2 * a * x[i] + y[i];": "",
        },
    ),
    "reverse": (
        "float* out, const float* x, int n",
        {I + "int j = n - i;\nif (i < n) out[i] = x[j];": "`n - i` is one too far"},
    ),
    "blur": (
        "float* out, const float* x, int n",
        {
            I + "float sum = i < n ? x[i] : 0.0f;\nif (i > 0 && i < n) sum += x[i - 1];\n"
            "if (i + 1 < n) sum += x[i + 1];\nif (i < n) out[i] = 1 / 3 * sum;": "1 / 3 is 0, as"
        },
    ),
    "clip_scale": (
        "float* scale, const float* sums, float max_norm, int n",
        {
            "if (blockIdx.x + threadIdx.x > 0) return;\nfloat norm = 0.0f;\n"
            "for (int b = 0; b < n; b++) norm += sums[b];\n"
            "scale[0] = norm > max_norm || isnan(norm) ? max_norm / norm : 1.0f;": "that is the "
            "sum of the squares: the root is missing"
        },
    ),
    "accumulate": (
        ACCUMULATE,
        {
            "long long i = threadIdx.x + (long long)blockIdx.x * 256;\nif (i >= n) return;\n"
            "float g = as_float(grad[i]);\nacc[i] = g;": "that is `grad` alone: what was in `acc`"
        },
    ),
    "swish_backward": (
        "float* dx, const float* dy, const float* x, const float* k, int n",
        {
            I + "if (i >= n) return;\nfloat s = 1 / (1 + expf(-k[0] * x[i]));\n"
            "dx[i] = (s + x[i] * s * (1 - s)) * dy[i];": "forgets k"
        },
    ),
}
KNOWN_FUNCTIONS = {
    "ring_sum": {
        "total, x = 0 * mine, mine\nfor _ in range(ranks + 1): total, x = total + x, pass_on(x)\n"
        "return total": "a round too many: ranks - 1 of them",
    },
    "update": {
        "squares[len(sums), 256](sums, g, len(w))\n"
        "clip_scale[1, 1](scale, sums, max_norm, len(sums))\n"
        "clipped_step[1, 256](w, g, scale, lr, len(w))\n"
        "bf16_weights.copy_(w)": "one block of `clipped_step` is 256 weights",
        "squares[len(sums), 256](sums, g, len(w))\n"
        "clip_scale[1, 1](scale, sums, max_norm, len(w))\n"
        "clipped_step[len(sums), 256](w, g, scale, lr, len(w))": "`clip_scale` adds `n` sums",
    },
    "token_mean": {
        "m = [m.nan_to_num() * c for m, c in zip(means, counts)]\n"
        "return sum(x.float() for x in m) / sum(counts)": "",
        "return sum(m.float() * c for m, c in zip(means, counts)) / sum(counts)": "the NaN of the "
        "micro-batch without tokens is in it: leave that one out",
        "return sum(means) / len(means)": "",
    },
    "ordered_sum": {
        "t = 0 * grads[0, 0]\nfor r in range(grads.shape[1]):\n"
        "    for m in range(len(grads)): t = t + grads[m, r]\nreturn t": "rank by rank",
    },
}


def hears_of(result, words):
    assert result.passed is False
    known = result.summary.partition(" A known mistake: ")[2]
    assert known.startswith(words) if words else not known, result


@pytest.mark.parametrize(
    "name, params, body, words",
    [
        pytest.param(name, params, body, words, id=f"{name}-{words or 'unknown'}")
        for name, (params, bodies) in KNOWN_KERNELS.items()
        for body, words in bodies.items()
    ],
)
@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
def test_a_kernel_with_a_known_mistake_hears_which(name, params, body, words, where):
    if where == "cuda without a compiler" and name in ("saxpy", "reverse"):
        pytest.skip("only the CPU's checks see a race, or an element outside")
    hears_of(ga.check(name, answer(name, params, body)), words)


@pytest.mark.parametrize(
    "name, body, words",
    [(name, *item) for name, bodies in KNOWN_FUNCTIONS.items() for item in bodies.items()],
)
def test_a_function_with_a_known_mistake_hears_which(name, body, words):
    header = EXERCISES[name].solution.partition("\n")[0]
    source = f"{header}\n    " + body.replace("\n", "\n    ")
    hears_of(ga.check(name, python(source, name)), words)


def test_an_answer_that_writes_nothing_is_compared_with_no_other_one(monkeypatch):
    """Run All does without these compilations."""
    monkeypatch.setattr(checking, "known_mistake", None)
    body = "long long first = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);"
    with ga.use_backend("simt"):
        hears_of(ga.check("accumulate4", answer("accumulate4", ACCUMULATE, body)), "")
        hears_of(ga.check("block_sum", ga.compile(EXERCISES["block_sum"].stub)), "")


def test_an_answer_that_does_what_the_stub_does_hears_of_no_mistake():
    e = EXERCISES["block_sum"]
    with ga.use_backend("simt"):
        for source in (e.stub, e.stub.replace("// your line", ";")):
            hears_of(ga.check(e.name, ga.compile(source, e.name)), "")


def test_equal_tensors_do_not_end_a_ring():
    def ring_sum(mine, ranks, pass_on):
        total, x = mine.clone(), pass_on(mine)
        while not torch.equal(x, mine):
            total, x = total + x, pass_on(x)
        return total

    failed = [label for passed, label, _ in ga.check("ring_sum", ring_sum).lines if not passed]
    assert failed == ["3 ranks, equal tensors"]


def test_every_row_of_a_sum_in_another_order_says_so():
    e = EXERCISES["embedding_gradient"]
    kernel = ga.compile(e.wrong_answers["the last row is added first"], e.name)
    with ga.use_backend("simt"):
        for seed in (1, 3):
            lines = ga.check(e.name, kernel, seed=seed).lines
            assert all("it differs by roundings" in line[2] for line in lines if not line[0])


def test_a_race_is_named_once_and_by_itself():
    e = EXERCISES["block_sum"]
    with ga.use_backend("simt"):
        result = ga.check(e.name, ga.compile(e.stub, e.name))
    first = result.lines[0][2]
    assert first.count("line ") == 2 and first.startswith(
        "line 6: race: thread 1 of block 0 writes"
    )
    html = result._repr_html_()
    assert "open>" not in html and "<svg" in html and "bank" not in html
    # The picture does not say the same once more.
    assert html.count("race: ") == 1 and "which no thread of its block has written" not in html
    assert "bank" in result.show().picture() and "race: " in result.show().picture()


def test_rows_that_differ_only_in_numbers_are_one():
    lines = [
        (False, str(n), f"{n} element{'s' * (n > 1)} wrong: got -{n}.5e-07") for n in (1, 2, 3)
    ]
    assert str(Result("scale", False, "no.", lines)).splitlines()[1:3] == [
        "  ✗ 1       1 element wrong: got -1.5e-07",
        "  ✗ 2 more  the same, with other numbers",
    ]


@pytest.mark.parametrize("far, what", [(4, "scores above 200"), (5, "scores below -200")])
def test_a_softmax_without_its_largest_score_fails_where_exp_ends(far, what):
    e = EXERCISES["attend"]
    with ga.use_backend("simt"):
        lines = ga.check(
            e.name, ga.compile(e.wrong_answers["no largest score"], e.name), seed=1
        ).lines
    assert [passed for passed, _, _ in lines[:4]] == [True] * 4
    assert what in lines[far][1] and "got nan" in lines[far][2]
