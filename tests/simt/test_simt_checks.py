"""Planted bugs are reported with their line, correct kernels are not, and mutants are noticed."""

import functools
import re
import shutil
import struct
import warnings

import pytest
import torch
from simt_cases import (
    BUGS,
    GOOD,
    OUR_VARIANTS,
    OURS,
    VARIANTS,
    Call,
    Expect,
    Outcome,
    alone,
    functions,
    good_kernel,
    marked,
    our_kernel,
    program,
    reached,
    renamed,
    same_bits,
    with_headers,
)
from simt_pairs import counts_on_page, python

import gpuaccel as ga
from gpuaccel.backends import find_compiler
from gpuaccel.compiler.program import kernel_root
from gpuaccel.learn import BLOCK, EXERCISES
from gpuaccel.source import closing, kernel_names, without_comments

CLANG = find_compiler()[0] is not None and find_compiler()[0].kind in ("clang", "zig")
# What differs when clang++ compiles: bug -> what is reported then.
CLANG_EXPECTS = {
    # clang checks no alignment where it copies a whole struct; the CPU does not mind either
    "misaligned_float4": (),
    # clang makes one copy of a read into a variable and a write from it, at the line of the write
    "float4_tail": (
        Expect(
            ("out of bounds",), "BUG2", tensor="x", element=1001, thread=(58, 0, 0), block=(3, 0, 0)
        ),
    ),
}
# Like gcc, clang allows index == size where it copies a whole struct. gcc's -fsanitize=object-size
# sees it, clang's does not.
CLANG_SKIPS = {"local_groups_past_end", "shared_groups_past_end"}
ERRORS = [name for name, bug in BUGS.items() if not bug.note]
NOTES = [name for name, bug in BUGS.items() if bug.note]
BUG_TEXT, BUG_STARTS = program([bug.source for bug in BUGS.values()])
BUG_START = dict(zip(BUGS, BUG_STARTS))
pytestmark = pytest.mark.usefixtures("on_the_cpu")


def launch(kernel, call: Call):
    kernel[call.grid, call.block, call.shared](*call.args, tensors=call.tensors)


def tensors_of(call: Call):
    return [a for a in (*call.args, *call.tensors) if isinstance(a, torch.Tensor)]


def lines_of(bug, mark):
    return {line + BUG_START[bug.name] for line in marked(bug.source)[mark]}


def differs(bug, expect, report) -> str | None:
    """In which way a report is not the expected one; None: it is."""
    if report.kind not in expect.kinds:
        return f"kind {report.kind!r}, expected one of {expect.kinds}"
    lines, others = (
        lines_of(bug, expect.at),
        lines_of(bug, expect.other) if expect.other else {None},
    )
    if not (
        (report.line in lines and report.other_line in others)
        or (report.other_line in lines and report.line in others)
    ):
        return f"lines {report.line} and {report.other_line}, expected {lines} and {others}"
    for field in ("tensor", "element", "thread", "block"):
        wanted, found = getattr(expect, field), getattr(report, field)
        if wanted is not None and wanted != found:
            return f"{field} {found!r}, expected {wanted!r}"
    return None


def caught(name):
    """(what the launch of a planted bug raised, the call, copies of its tensors from before)."""
    call = BUGS[name].call()
    before = [t.clone() for t in tensors_of(call)]
    with ga.checked(), pytest.raises(ga.errors.KernelError) as info:
        launch(ga.compile(BUG_TEXT, name), call)
    return info.value, call, before


# ---- planted bugs --------------------------------------------------------------------------------


def test_there_are_enough_bugs_and_each_marks_its_lines():
    assert counts_on_page("BUGS") == [len(BUGS)] * 2
    for bug in BUGS.values():
        marks = marked(bug.source)
        assert {e.at for e in bug.expects} | {e.other for e in bug.expects if e.other} == set(
            marks
        ), bug.name
        assert all(len(lines) == 1 for lines in marks.values()), bug.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ERRORS)
def test_a_planted_bug_is_named_with_its_line(name):
    bug = BUGS[name]
    expects = CLANG_EXPECTS.get(name, bug.expects) if CLANG else bug.expects
    if CLANG and name in CLANG_SKIPS:
        pytest.skip("clang++ does not see it")
    if not expects:  # if a report comes some day, take it off the list
        with ga.checked():
            launch(ga.compile(BUG_TEXT, name), bug.call())
        return
    error, call, before = caught(name)
    reports = error.reports
    print(error)
    for expect in expects:
        differences = [differs(bug, expect, report) for report in reports]
        assert None in differences, f"nothing reported is {expect}: {differences}\n{error}"
    for report in reports:
        differences = [differs(bug, expect, report) for expect in expects]
        assert None in differences, f"{report} was not expected: {differences}\n{error}"
        assert report.count >= 1 and f"line {report.line}" in str(error)
        assert report.message and source_text(report.line) in str(error), (
            f"line {report.line} is not shown:\n{error}"
        )
        if report.kind == "race":
            assert (report.thread, report.block) != (report.other_thread, report.other_block), (
                report
            )
            assert source_text(report.other_line) in str(error)
    assert len({(r.kind, r.line) for r in reports}) == len(reports), (
        f"several reports of one kind and line:\n{error}"
    )
    for tensor, copy in zip(tensors_of(call), before):
        assert same_bits(tensor, copy), f"a tensor was changed: {tensor} was {copy}"


def source_text(line):
    return BUG_TEXT.split("\n")[line - 1].strip()


@pytest.mark.parametrize("name", NOTES)
def test_a_write_through_const_is_noted_and_the_launch_succeeds(name):
    bug, call = BUGS[name], BUGS[name].call()
    (line,) = lines_of(bug, "BUG")
    with ga.checked(), pytest.warns(UserWarning, match=rf"{name}: .*line {line}: .*const"):
        launch(ga.compile(BUG_TEXT, name), call)
    out, x = tensors_of(call)
    assert torch.equal(out, torch.arange(1.0, 33)) and not x.any()


def test_a_tensor_nobody_named_is_a_far_address():
    """The addresses in a table or struct have to be named: tensors=[...]."""
    bug = BUGS["past_end_in_a_struct"]
    call = bug.call()
    keep = call.tensors  # alive, but not named
    with ga.checked(), pytest.raises(ga.errors.KernelError, match="tensors=") as info:
        launch(ga.compile(BUG_TEXT, bug.name), Call(call.grid, call.block, call.args))
    assert [(r.kind, r.thread) for r in info.value.reports] == [("far", (0, 0, 0))] and len(
        keep
    ) == 2


# ---- correct kernels -----------------------------------------------------------------------------


def in_both_modes(kernel, run):
    """Pairs of outcomes, all right, of checked and of fast launches; these with several seeds."""
    with ga.checked():
        checked = list(run(kernel, 0, "cpu"))
    with ga.checked(False):
        fast, *more = (list(run(kernel, seed, "cpu")) for seed in range(3))
    for outcome in (*checked, *fast, *sum(more, [])):
        assert outcome.right, outcome
    return list(zip(checked, fast, strict=True))


@pytest.mark.parametrize("name", GOOD)
def test_a_correct_kernel_gets_no_report_and_the_bits_of_the_fast_mode(name, recwarn):
    good, kernel = GOOD[name], good_kernel(name)
    results = in_both_modes(kernel, good.run)
    assert not recwarn.list, recwarn.list[0].message
    for checked, fast in results:
        assert same_bits(checked.got, fast.got), f"{checked.label}: checked and fast differ"


@pytest.mark.parametrize("file, name, macros", OUR_VARIANTS, ids=str)
def test_our_own_kernels_get_no_report(file, name, macros):
    in_both_modes(*our_kernel(file, name, macros))


def test_tensors_that_share_memory_stay_one_and_results_go_into_views_and_nowhere_else():
    """In place, and two overlapping views: copies for the checks must not tear them apart."""
    add, x, whole = good_kernel("vec_add"), torch.arange(301.0), torch.zeros(100)
    with ga.checked():
        add[2, 256](x, x, x, 301)
        assert torch.equal(x, 2 * torch.arange(301.0))
        add[1, 150](x[151:], x[:150], x[1:151], 150)
        assert torch.equal(x[:151], 2 * torch.arange(151.0))
        assert torch.equal(x[151:], 4 * torch.arange(150.0) + 2)
        add[1, 64](whole[20:70], x[20:70], x[:50], 50)
    assert torch.equal(whole[20:70], x[20:70] + x[:50])
    assert not whole[:20].any() and not whole[70:].any()


def test_an_empty_tensor_is_no_problem():
    add, empty = good_kernel("vec_add"), torch.zeros(0)
    with ga.checked():
        add[1, 32](empty, empty, empty, 0)
    with ga.checked(), pytest.raises(ga.errors.KernelError, match="has 0 elements of float32"):
        add[1, 32](torch.zeros(1), empty, empty, 1)


def test_null_in_a_struct_stays_null_beside_an_empty_tensor():
    """An empty tensor's address may be 0, and it may be one of the tensors= of the launch."""
    kernel = ga.compile(
        "struct Two { float* a; float* b; };\n"
        'extern "C" __global__ void which(int* out, Two two) '
        "{ out[0] = two.a != 0; out[1] = two.b != 0; }"
    )
    x, out = torch.zeros(4), torch.full((2,), -1, dtype=torch.int32)
    with ga.checked():
        kernel[1, 1](out, struct.pack("QQ", x.data_ptr(), 0), tensors=[x, torch.zeros(0)])
    assert out.tolist() == [1, 0]


# ---- modes ---------------------------------------------------------------------------------------


FAST_FAULTS = {
    "null_pointer": "null",
    "wild_address": "far",
    "division_by_zero": "division by zero",
    "too_deep": "stack overflow",
    "large_local_array": "stack overflow",
    "barrier_against_shuffle": "deadlock",
    "lane_outside_its_mask": "shuffle",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST_FAULTS)
def test_in_fast_mode_what_stops_a_kernel_becomes_an_error_with_its_line(name):
    call = BUGS[name].call()
    with ga.checked(False), pytest.raises(ga.errors.KernelError) as info:
        launch(ga.compile(BUG_TEXT, name), call)
    (report,) = info.value.reports
    assert report.kind == FAST_FAULTS[name]
    # clang makes room for the array in runtime.h, around the kernel.
    if not (CLANG and name == "large_local_array"):
        lines = set().union(*(lines_of(BUGS[name], mark) for mark in marked(BUGS[name].source)))
        assert report.line in lines


# ---- the other compiler --------------------------------------------------------------------------


@pytest.mark.skipif(
    CLANG or not shutil.which("clang++"),
    reason="clang++ is not installed, or is what compiles already",
)
def test_clang_finds_the_same():
    wanted = "planted or correct_kernel or our_own"
    arguments = ["-q", "-p", "no:cacheprovider", __file__, "-k", wanted]
    run = python(f"import pytest; exit(pytest.main({arguments}))", GPUACCEL_CXX="clang++")
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


# ---- what is removed is noticed ------------------------------------------------------------------

ATOMICS = {"Add": "+", "Sub": "-", "And": "&", "Or": "|", "Xor": "^"}
SAVES_TIME = "it saves time only"
# (kernel, a part of the change) -> why neither the checks nor the values show it. The test fails
# when one of these is noticed.
UNNOTICED = {
    ("block_scan", "offset < blockDim.x"): (
        "one round more, in which no thread has a neighbour blockDim.x to the left: every value is "
        "copied as it is"
    ),
    ("scale_v2", "groups == 0 && (clip_results[0].x == 1.0f || (skip"): SAVES_TIME,
    ("peers_sum", "!nonfinite_sum -> false"): SAVES_TIME,
    ("adamw_begin", "!skip -> true"): "when the step is skipped, `step` is what stood there",
    ("segments_scatter", "step < 32"): "one round more: no lane has a neighbour 32 to the left",
    ("encoder_backward_v2", "warp >= bucket.y -> false"): SAVES_TIME,
    ("encoder_backward_v3", "place < end"): "one round more, whose rows nobody stores",
    ("encoder_backward_v3", "u < UNROLL; u++) {` (2)"): "one round more, in which no bit is set",
    ("encoder_backward_v3", "old_too -> true"): SAVES_TIME,
    ("encoder_backward_v3", "(old_too >> u & 1) -> true"): SAVES_TIME,
}


def unnoticed(mutant):
    """The keys of UNNOTICED that name a mutant."""
    name, what, *_ = mutant
    return [key for key in UNNOTICED if key[0] == name and key[1] in what]


def parts(text, separator):
    """(start, end) of the pieces between separators that are outside all brackets."""
    depth, start, found, i = 0, 0, [], 0
    while i < len(text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(text[i], 0)
        if depth == 0 and text.startswith(separator, i):
            found.append((start, i))
            i = start = i + len(separator)
        else:
            i += 1
    return [*found, (start, len(text))]


def changes(source):
    """(start, end, replacement) of each barrier, fence, atomic or bound in a kernel's source."""
    text = without_comments(source)
    for m in re.finditer(r"__syncthreads\(\);|__syncwarp\([^()]*\);|__threadfence\(\);", text):
        yield m.start(), m.end(), ";"
    for m in re.finditer(
        rf"\batomic({'|'.join(ATOMICS)})\(", text
    ):  # the value before comes back, as from the atomic
        end = closing(text, m.end() - 1) - 1
        (_, split), (after, stop) = parts(text[m.end() : end], ",")
        target, value = (
            text[m.end() : m.end() + split].strip(),
            text[m.end() + after : m.end() + stop].strip(),
        )
        place = target[1:] if target[0] == "&" else f"(*({target}))"
        old = f"before_{m.start()}"
        yield (
            m.start(),
            end + 1,
            f"([&] {{ auto {old} = {place}; "
            f"{place} = {old} {ATOMICS[m[1]]} ({value}); return {old}; }}())",
        )
    for m in re.finditer(r"\bif \(", text):
        end = closing(text, m.end() - 1) - 1
        leaves = re.match(r"\s*return;", text[end + 1 :])
        for start, stop in parts(text[m.end() : end], "||" if leaves else "&&"):
            yield m.end() + start, m.end() + stop, "false" if leaves else "true"
    for m in re.finditer(r"\bfor \(", text):
        head = text[m.end() : closing(text, m.end() - 1) - 1]
        (_, _), (start, stop), _ = parts(head, ";")
        for a, b in parts(head[start:stop], "&&"):
            if " < " in head[start + a : start + b]:
                at = m.end() + start + a + head[start + a : start + b].index(" < ")
                yield at, at + 3, " <= "
    for m in re.finditer(r"[\w.]+ (?:<|>|<=|>=) [\w.]+(?= \?)", text):
        yield m.start(), m.end(), "true"


def mutants(kernels, source):
    """The mutants of all kernels of a source.

    Yields (changed kernel or function, change in words, kernels that run it, changed source).
    """
    places, words = functions(source), {}
    callers = {
        name: [kernel for kernel in kernels if name in reached(kernel, source)] for name in places
    }
    for start, end, new in sorted(changes(source)):
        owner = next(
            (name for name, spots in places.items() for a, b in spots if a <= start < b), None
        )
        by = callers.get(owner, kernels)
        if not by:
            continue
        name = by[0] if len(by) == 1 else owner
        line = source.rfind("\n", 0, start) + 1, source.find("\n", end)
        was, now = (
            source[start:end].strip(),
            "" if new == ";" else "plain" if new.startswith("([&]") else new.strip(),
        )
        where = re.sub(r"\s*//.*", "", source[line[0] : line[1]]).strip()
        what = (
            f"{was} -> {now or 'nothing'} in `{where}`"
            if where != was
            else f"{was} -> {now or 'nothing'}"
        )
        words[name, what] = words.get((name, what), 0) + 1
        yield (
            name,
            what + (f" ({words[name, what]})" if words[name, what] > 1 else ""),
            by,
            source[:start] + new + source[end:],
        )


def exercise_run(task):
    """A `run` as the correct kernels have one, on the exercise's own random data."""

    def run(kernel, seed, device):
        for n in (1, 255, 256, 257, 1000, 1003):  # an exercise has its special cases at round sizes
            case = task.data(n, torch.Generator().manual_seed(seed))
            out = case.out.clone()
            kernel[-(-n // (BLOCK * task.per_thread)), BLOCK](out, *case.inputs, *case.numbers, n)
            exact = (
                case.expected.dtype == out.dtype or not case.roundings
            )  # what must not be written, or rounded otherwise
            got, want = (
                t.double().nan_to_num(-7.0, 1e300, -1e300) if exact else t
                for t in (out, case.expected)
            )
            yield Outcome(f"n = {n}", got, want, 0.0 if exact else 1e-7 * case.roundings)

    return run


# kernel -> its source, and the runs with their macros: one of the runs has to notice a change
SOURCES = {name: good.source for name, good in GOOD.items()} | {
    task.name: f'extern "C" {task.solution}' for task in EXERCISES.values() if task.params
}


# Headers are in the place of the #include lines, so that they are changed too.
SOURCES |= {name: with_headers(kernel_root() / f"{file}.cu") for file, name in OURS}
RUNS = {name: [({}, good.run)] for name, good in GOOD.items()}
RUNS |= {task.name: [({}, exercise_run(task))] for task in EXERCISES.values() if task.params}
RUNS |= {
    name: [
        ({}, run),
        *((macros, functools.partial(run, **macros)) for macros in VARIANTS.get((file, name), ())),
    ]
    for (file, name), run in OURS.items()
}
MUTANTS = [
    mutant
    for source in dict.fromkeys(SOURCES.values())
    for mutant in mutants([k for k in SOURCES if SOURCES[k] == source], source)
]


# Mutants of a kernel that are compiled together: starting the compiler costs as much as one does.
TOGETHER = 8


@functools.cache
def mutant_texts(name):
    """Number of a mutant of this kernel -> the text of the program that it is in."""
    own = [k for k, (_, _, by, _) in enumerate(MUTANTS) if by == [name]]
    texts = {}
    for i in range(0, len(own), TOGETHER):
        some = own[i : i + TOGETHER]
        text = "\n".join(renamed(alone(name, MUTANTS[k][3]), f"_{k}") for k in some)
        texts |= dict.fromkeys(some, text)
    return texts


def test_each_kernel_has_something_to_remove():
    assert counts_on_page("MUTANTS") == [len(MUTANTS), len(MUTANTS) - len(UNNOTICED)]
    assert {name for _, _, by, _ in MUTANTS for name in by} >= {
        *(name for _, name in OURS),
        *(t.name for t in EXERCISES.values() if t.params),
    }
    named = [key for mutant in MUTANTS for key in unnoticed(mutant)]
    assert sorted(named) == sorted(UNNOTICED), "each entry is one mutant"
    source = SOURCES["scale_v2"]
    assert reached("scale_v2", source) == {"scale_v2", "scale_chunk", "load_chunk"}
    assert kernel_names(alone("scale_v2", source)) == ["scale_v2"]


def noticed(kernel, run, seeds) -> str | None:
    """The error, note or wrong value that shows the change, on one of several sets of data."""
    for seed in range(seeds):
        try:
            with ga.checked(seconds=10), warnings.catch_warnings(record=True) as notes:
                warnings.simplefilter("always")
                for outcome in run(kernel, seed, "cpu"):
                    if not outcome.right:
                        return f"values: {outcome}"
        except ga.errors.KernelError as error:
            return str(error)
        if notes:
            return str(notes[0].message)
    return None


@pytest.mark.slow
@pytest.mark.skipif(CLANG, reason="clang sees no copy of a whole struct past the end of an array")
@pytest.mark.parametrize(
    "k", range(len(MUTANTS)), ids=[f"{name}: {what}" for name, what, _, _ in MUTANTS]
)
def test_what_is_removed_is_noticed(k):
    name, what, by, text = MUTANTS[k]
    variants = [(kernel, macros, run) for kernel in by for macros, run in RUNS[kernel]]
    result = None
    for kernel, macros, run in variants:
        if by == [kernel] and not macros:
            changed = ga.Kernel.from_source(mutant_texts(name)[k], f"{kernel}_{k}")
        else:
            changed = ga.Kernel.from_source(alone(kernel, text), kernel, defines=macros)
        result = noticed(changed, run, 3 if len(variants) == 1 else 1)
        if result:
            break
    print(result)
    if unnoticed(MUTANTS[k]):
        assert result is None, f"it is noticed now; remove it from UNNOTICED:\n{result}"
    else:
        assert result, f"{name} passes with {what}: neither a report nor a wrong value"


def test_a_function_that_ends_without_its_return_is_named_and_no_other_code_runs(mode):
    kernel = ga.compile("""__device__ float half_of(float x) {
    if (x > 0) return 0.5f * x;
}
extern "C" __global__ void k(float* x) {
    x[threadIdx.x] = half_of(x[threadIdx.x]);
}""")
    x = torch.ones(4)
    kernel[1, 4](x)
    assert x.eq(0.5).all()
    x[3] = -1
    message = "(?s)thread 3 of block 0.*without a return"
    with pytest.raises(ga.errors.KernelError, match=message) as caught:
        kernel[1, 4](x)
    assert caught.value.reports[0].line in (1, 3)


@pytest.mark.parametrize("steps", [1.2, 1.6, 2.5, 4.5])
def test_an_index_that_is_wrong_by_the_size_of_a_tensor_does_not_lead_to_another_one(steps):
    kernel = ga.compile("""extern "C" __global__ void k(float* x, float* y, float* z, long long i) {
    x[i] = 1;
}""")
    x, y, z = (torch.zeros(1 << 18) for _ in range(3))
    with ga.use_backend("simt"), ga.checked():
        kernel[1, 1](x, y, z, len(x) - 1)
        for tensors in ((x, y, z), (y, x, z)):
            with pytest.raises(ga.errors.KernelError, match=r"x\[|in no\s+tensor"):
                kernel[1, 1](*tensors, int(steps * len(x)))
    assert not y.any() and not z.any()
