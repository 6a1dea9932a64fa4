"""Every solution is right and every known mistake is found, on the CPU and on a GPU."""

import re

import pytest
import torch

import gpuaccel as ga
from gpuaccel.learn import EXERCISES
from gpuaccel.learn.exercises import ARCHS, SIZES, checking

KERNELS = [e for e in EXERCISES.values() if e.params]
PYTHON = [e for e in EXERCISES.values() if not e.params]
WRONG_KERNELS = [
    pytest.param(e, what, id=f"{e.name}-{what}") for e in KERNELS for what in e.wrong_answers
]
on_cpu_and_gpu = pytest.mark.parametrize(
    "where", ["simt", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
WRONG_PYTHON = [
    pytest.param(e, what, id=f"{e.name}-{what}") for e in PYTHON for what in e.wrong_answers
]


@pytest.fixture
def where(request):
    with ga.use_backend(request.param):
        yield request.param


@pytest.fixture
def small_sizes_on_cpu(where, monkeypatch):
    """A wrong answer is found without a million elements, which take seconds on the CPU."""
    if where == "simt":
        monkeypatch.setattr(checking, "SIZES", SIZES[:-1])


def python(source, name):
    space = {"torch": torch}
    exec(source, space)
    return space[name]


def test_there_are_exercises_with_mistakes_to_find():
    assert len(EXERCISES) >= 20
    assert all(len(e.wrong_answers) >= 4 for e in EXERCISES.values())
    assert {1, 255, 256, 257, 1000, 4096, 1_000_003} <= set(SIZES)


@pytest.mark.parametrize("e", KERNELS, ids=lambda e: e.name)
def test_every_kernel_stub_solution_and_mistake_compiles(e):
    for source in (e.stub, e.solution, *e.wrong_answers.values()):
        assert checking._parameters_differ(e, ga.compile(source, e.name)) is None


@pytest.mark.parametrize("e", KERNELS, ids=lambda e: e.name)
def test_without_gpu_and_compiler_a_kernel_is_only_compiled(e, monkeypatch):
    monkeypatch.setattr(checking, "find_compiler", lambda: (None, "neither g++ nor clang++ found"))
    with ga.use_backend("torch", policy="off"):
        result = ga.check(e.name, ga.compile(e.solution, e.name))
    assert result.passed is None and not result
    assert "compiled, not run" in str(result)
    assert "(GPUACCEL_GPU=off); neither g++ nor clang++ found" in str(result)
    known = [arch for arch in ARCHS if arch in ga.compiler.nvrtc.library().archs]
    assert result.lines[0][1] == f"{len(known)} architectures"


@pytest.mark.parametrize("e", PYTHON, ids=lambda e: e.name)
def test_a_python_solution_passes_for_any_seed(e):
    for seed in range(5):
        result = ga.check(e.name, python(e.solution, e.name), seed=seed)
        assert result.passed, result


def test_a_number_read_on_the_host_is_counted_where_it_matters():
    task = EXERCISES["global_scale"]
    for what in ("asks the host", "decides on the host"):
        result = ga.check(task.name, python(task.wrong_answers[what], task.name))
        assert "it reads 1 number: on a GPU the host waits for each" in str(result)
    assert "reads" not in str(ga.check(task.name, python(task.solution, task.name)))


def test_what_cannot_be_captured_is_told_once_with_its_line_and_what_to_do():
    for name, what, line in (
        ("guarded", "asks the host", 2),
        ("guarded", "asks in other words", 2),
        ("decay", "a number", 2),
    ):
        result = ga.check(name, python(EXERCISES[name].wrong_answers[what], name))
        assert result.passed is False and result.summary == "it cannot be captured."
        assert len(result.lines) == 1 and f":{line} cannot" in result.lines[0][2]
        assert "the host would wait for a value of the device" in str(result)
        assert "Instead: keep the number on the device" in str(result)
    assert "the shape" in str(
        ga.check(
            "guarded", python(EXERCISES["guarded"].wrong_answers["picks by a mask"], "guarded")
        )
    )


def test_a_captured_answer_is_compared_after_each_replay():
    task = EXERCISES["decay"]
    assert "wrong in replay 2 of 12" in str(
        ga.check("decay", python(task.wrong_answers["frozen"], "decay"), seed=1)
    )
    assert "wrong in replay 12 of 12" in str(
        ga.check("decay", python(task.wrong_answers["below zero"], "decay"), seed=1)
    )
    assert "right in 12 replays" in str(ga.check("decay", python(task.solution, "decay"), seed=1))
    for answer, words in (
        (lambda *given: None, "got None"),
        (lambda weight, *rest: weight[:0], "got a tensor of shape (0,)"),
        (lambda *given: 1 / 0, "ZeroDivisionError"),
    ):
        result = ga.check("guarded", answer)
        assert result.passed is False and words in str(result)


def test_a_check_of_a_capture_leaves_the_backend_alone():
    for name in ("torch", "simt"):
        with ga.use_backend(name):
            assert ga.check("decay", python(EXERCISES["decay"].solution, "decay"))
            assert ga.backend().name == name


@on_cpu_and_gpu
def test_a_write_where_nothing_was_to_be_done_is_seen(where, small_sizes_on_cpu):
    task = EXERCISES["rescale"]
    words = str(
        ga.check(task.name, ga.compile(task.wrong_answers["NaN returns, 1 does not"], task.name))
    )
    assert (
        words.count("were written, and none should be") == 2
        and "4,096, scale 1" in words
        and "1,000, scale NaN" in words
    )


@pytest.mark.parametrize("e, what", WRONG_PYTHON)
def test_a_known_python_mistake_fails_for_any_seed(e, what):
    for seed in range(5):
        assert ga.check(e.name, python(e.wrong_answers[what], e.name), seed=seed).passed is False


@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda means, counts: None, "got None"),
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
    with pytest.raises(ga.errors.ArgumentError, match="no exercise 'skale'; exercises: scale"):
        ga.check("skale", None)
    with pytest.raises(ga.errors.ArgumentError, match="takes a kernel .* got function"):
        ga.check("scale", lambda: None)
    with pytest.raises(ga.errors.ArgumentError, match="takes a Python function, got int"):
        ga.check("token_mean", 3)


@pytest.mark.parametrize("name", EXERCISES)
def test_hint_and_solution_are_folded_in_a_notebook_and_plain_elsewhere(name):
    for shown in (ga.hint(name), ga.solution(name)):
        assert shown._repr_html_().startswith("<details><summary")
        assert "<" not in str(shown).split("\n")[0] and shown.text in str(shown)
    assert ga.solution(name).text.strip() == EXERCISES[name].solution.strip()


def test_a_result_is_a_table_in_html_and_lines_in_text():
    result = ga.check("token_mean", python(EXERCISES["token_mean"].solution, "token_mean"))
    assert result and str(result).count("\n") == len(result.lines)
    assert result._repr_html_().count("<tr") == len(result.lines)


@on_cpu_and_gpu
@pytest.mark.parametrize("e", KERNELS, ids=lambda e: e.name)
def test_a_kernel_solution_passes(e, where):
    result = ga.check(e.name, ga.compile(e.solution, e.name))
    assert result.passed, result


@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
@pytest.mark.parametrize("e, what", WRONG_KERNELS)
def test_a_known_wrong_kernel_fails(e, what, where):
    result = ga.check(e.name, ga.compile(e.wrong_answers[what], e.name))
    assert result.passed is False
    if where == "simt" and what in ("no guard", "guards the first only", "one too many"):
        assert re.search(
            r"line \d+: thread \d+ of block \d+ (reads|writes) \w+\[-?\d+\]", str(result)
        ), result


@on_cpu_and_gpu
@pytest.mark.usefixtures("small_sizes_on_cpu")
@pytest.mark.parametrize("e", KERNELS, ids=lambda e: e.name)
def test_a_stub_fails_and_says_that_nothing_was_written(e, where):
    result = ga.check(e.name, ga.compile(e.stub, e.name))
    assert result.passed is False
    untouched = [e.data(n, torch.Generator(ga.default_device().type)) for n in checking.SIZES]
    assert [how for _, _, how in result.lines] == [
        "right; left alone" if case.expected is case.out else "nothing was written"
        for case in untouched
    ]
