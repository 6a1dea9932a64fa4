"""What of kernels_cu depends on the GPU's architecture: the CPU runs what an sm_75 runs."""

import functools
import re
import subprocess

import pytest
from simt_cases import functions

from gpuaccel.backends import find_compiler
from gpuaccel.compiler.program import kernel_files, whole_program

# The least architecture of an instruction in kernels_cu: PTX ISA, "Target ISA Notes".
SINCE = {
    "cp.async": 80,
    "cvt.f32.f16": 53,
    "cvt.rn.bf16": 80,
    "cvt.rn.f16.f32": 53,
    "ex2.approx": 20,
    "ldmatrix": 75,
    "mma.sync.aligned.m16n8k16": 80,
    "rcp.approx": 20,
    "tanh.approx.f32": 75,
}


@functools.cache
def preprocessed(path, *options):
    """The text that a compiler sees of a file: [(a function's head, its body)], and all else."""
    compiler, why = find_compiler()
    if compiler is None:
        pytest.skip(f"needs a C++ preprocessor: {why}")
    source, _ = whole_program(path.read_text(), path.name)
    done = subprocess.run(
        [*compiler.command, "-E", "-P", "-x", "c++", *options, "-"],
        input=source,
        capture_output=True,
        text=True,
        check=True,
    )
    # A pragma about loops is no code.
    text = re.sub(r"(?m)^#pragma.*$", "", done.stdout)
    spans = sorted(span for places in functions(text).values() for span in places)
    heads_and_bodies, rest, position = [], [], 0
    for start, end in spans:
        head, brace, body = text[start:end].partition("{")
        # How a function is compiled is no part of what it computes.
        head = re.sub(r"__forceinline__|__noinline__", "", head)
        heads_and_bodies.append((" ".join(head.split()), " ".join((brace + body).split())))
        rest.append(text[position:start])
        position = end
    rest.append(text[position:])
    return heads_and_bodies, " ".join("".join(rest).split())


def on(path, arch, *options):
    return preprocessed(path, f"-D__CUDA_ARCH__={arch}0", *options)


def instructions(body):
    return re.findall(r'asm\s*(?:volatile\s*)?\(\s*"([^"]*)', body)


VERSIONS = [
    (path, options)
    for path in kernel_files()
    for options in (
        (("-DVERSION=1",), ("-DVERSION=2",)) if "VERSION ==" in path.read_text() else ((),)
    )
]
every_file = pytest.mark.parametrize(
    "path, options", VERSIONS, ids=[path.stem + "".join(options) for path, options in VERSIONS]
)


@every_file
def test_the_cpu_runs_what_an_sm_75_runs_but_for_single_instructions(path, options):
    """Each function with PTX is one instruction, and the CPU has the same in C++."""
    ours, rest = preprocessed(path, *options)
    theirs, their_rest = on(path, 75, *options)
    assert rest == their_rest and len(ours) == len(theirs) > 0
    for (head, body), (their_head, their_body) in zip(ours, theirs):
        assert head == their_head
        if body != their_body:
            assert len(instructions(their_body)) == 1 and "asm" not in body, head


@every_file
def test_gpus_from_sm_80_to_sm_89_run_one_text_and_no_instruction_comes_too_early(path, options):
    texts = [on(path, arch, *options) for arch in (80, 86, 89)]
    assert texts[0] == texts[1] == texts[2]
    for arch, (bodies, _) in ((75, on(path, 75, *options)), (80, texts[0])):
        for head, body in bodies:
            for instruction in instructions(body):
                known = [since for name, since in SINCE.items() if instruction.startswith(name)]
                assert not instruction or (known and max(known) <= arch), (head, instruction)
