"""A kernel compiles for every architecture, knows its parameters, and rejects wrong arguments."""

import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuaccel
from gpuaccel.backends import use_backend
from gpuaccel.compiler import Kernel, kernel_files, kernel_names, kernel_root
from gpuaccel.compiler.launch import check_arguments, usual_values
from gpuaccel.errors import ArgumentError, CompileError
from gpuaccel.ops import clip
from gpuaccel.ops import embedding_backward as encoder
from gpuaccel.ops import token_sort as segments
from gpuaccel.ops.accumulate import (
    ADDRESSES,
    CHUNK,
    MAX_TENSORS,
    SIZES,
    SQUARES_THREADS,
    THREADS,
    accumulate_kernel,
)
from gpuaccel.optim import AdamW, update_rule
from gpuaccel.source import launch_bound, signature, struct_fields, without_comments

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
SCALE = """extern "C" __global__ void scale(float* x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= a;
}"""


# ---- compiling -----------------------------------------------------------------------------------

# Most files do not have the macro: for them the two would be one program.
FILES = [
    (path, grad_t)
    for path in kernel_files()
    for grad_t in (("float", "bf16") if "GRAD_T" in path.read_text() else ("float",))
]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("path, grad_t", FILES, ids=lambda p: getattr(p, "stem", p))
def test_every_kernel_compiles_for_every_architecture_without_spills(path, grad_t, arch):
    names = kernel_names(path.read_text())
    assert names, f"{path.name} has no kernel"
    for name in names:
        kernel = Kernel(path.stem, name, GRAD_T=grad_t)
        r = kernel.resources(arch)
        assert kernel.cubin(arch)[:4] == b"\x7fELF" and r.cubin_bytes > 0
        assert 0 < r.registers <= 255 and r.arch in (arch, arch + "a")
        assert (r.spill_store_bytes, r.spill_load_bytes) == (0, 0), f"{name} spills on {arch}: {r}"
        assert r.shared_bytes <= 48 * 1024


CONSTANTS = {
    "accumulate": dict(CHUNK=CHUNK, THREADS=THREADS, MAX_TENSORS=MAX_TENSORS),
    "clip": dict(CHUNK=CHUNK, THREADS=SQUARES_THREADS, MAX_TENSORS=clip.MAX_TENSORS),
    "optimizer": dict(CHUNK=CHUNK)
    | {name: getattr(update_rule, name) for name in ("MAX_TENSORS", "MAX_UPDATES")},
    "peers": dict(CHUNK=CHUNK),
    "settings": dict(MAX_VALUES=update_rule.MAX_VALUES),
    "segments": dict(PIECE=segments.PIECE, THREADS=segments.THREADS),
    "encoder": dict(PIECE=segments.PIECE)
    | {name: getattr(encoder, name) for name in ("THREADS", "QUADS", "COMBINE", "SPAN")},
}


@pytest.mark.parametrize("file", CONSTANTS)
def test_the_launcher_and_the_kernels_agree_on_their_constants(file):
    constants = CONSTANTS[file]
    (path,) = kernel_root().glob(f"{file}.cu*")
    source = without_comments(path.read_text())
    for name, value in constants.items():
        found = re.findall(rf"#define {name} +(\d+)", source)
        assert found == [str(value)], f"{name} in {path.name} is {found}, in {file}.py {value}"
    assert CHUNK % (4 * constants.get("THREADS", 1)) == 0


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_adamws_thread_blocks_take_a_chunk_in_whole_groups(version):
    kernel = AdamW.rule.kernel(version)
    assert CHUNK % (4 * kernel.bound) == 0 and kernel.bound == int(kernel.defines["THREADS"])


@pytest.mark.parametrize(
    "kernel, packed",
    [
        (accumulate_kernel("accumulate_v3", torch.float32), ADDRESSES.size + SIZES.size),
        *[
            (clip.clip_kernel(name, 2.0, most), clip._pack_tensors[most].__self__.size)
            for name in ("squares_v2", "scale_v2")
            for most in (clip.MAX_TENSORS, clip.MANY_TENSORS)
        ],
        (update_rule.settings_kernel(), update_rule.VALUES.size),
        (AdamW.rule.kernel("begin"), update_rule.STEPS.size),
        (AdamW.rule.kernel("v2", ("AMSGRAD", 1)), AdamW.rule.update_struct.size),
    ],
    ids=lambda k: getattr(k, "name", ""),
)
def test_the_launcher_and_the_kernels_agree_on_their_structs(kernel, packed):
    """To the byte as the host compiler lays them out. A launch takes at most 4 KiB of arguments,
    with CUDA 12.1 up to 32,764 bytes."""
    ((_, size),) = kernel.load("fast").structs
    assert size == packed
    many = kernel.defines.get("MAX_TENSORS") == str(clip.MANY_TENSORS)
    assert size + 8 * len(kernel.params) <= (32764 if many else 4096)


def test_an_update_rule_reads_its_structs_from_the_source():
    assert AdamW.rule.settings == ["lr", "beta1", "beta2", "eps", "weight_decay", "direction"]
    assert AdamW.rule.coefficients == 10
    with pytest.raises(CompileError, match="there is no struct Missing"):
        struct_fields("struct Other { int a; };", "Missing")


def test_a_kernel_that_keeps_too_much_reports_its_spills():
    reads = "".join(f"float v{i} = x[{i} * n]; " for i in range(120))
    writes = "".join(f"x[{i} * n + 1] = v{i} * v{(i * 7) % 120}; " for i in range(120))
    head = 'extern "C" __global__ void __launch_bounds__(1024, 2) fat(float* x, int n) '
    kernel = gpuaccel.compile(f"{head}{{ {reads} __syncthreads(); {writes} }}")
    r = kernel.resources("sm_90")
    assert r.registers <= 32 and min(r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes) > 0


def test_a_string_becomes_a_kernel_with_the_common_helpers():
    kernel = gpuaccel.compile(
        'extern "C" __global__ void k(float* y, const bf16* x) { y[0] = as_float(x[0]); }'
    )
    assert kernel.name == "k" and repr(kernel) == "k(float* y, const bf16* x)  [<source>]"
    assert kernel.resources("sm_80").registers > 0


@pytest.mark.parametrize(
    "source, name, message",
    [
        (
            "__device__ int f() { return 1; }",
            None,
            r"say which kernel: <source> has none \(no __global__ function\)",
        ),
        (SCALE, "missing", "there is no kernel 'missing' here; kernels found: scale"),
        (
            "template <class T> __global__ void of(T* x) {}",
            "of",
            """'of' is a template: name it with its template arguments, as in "of<float>\"""",
        ),
        (SCALE + SCALE.replace("float a", "double a"), "scale", "several kernels are named scale"),
    ],
)
def test_a_string_without_a_usable_kernel_is_refused(source, name, message):
    with pytest.raises(CompileError, match=message):
        gpuaccel.compile(source, name)


def test_a_compile_error_names_the_line_of_the_callers_own_text():
    with pytest.raises(CompileError, match=r"cell 3\(2\): error"):
        gpuaccel.compile("__global__ void k(float* x) {\n  x[0] = z;\n}", filename="cell 3")
    with pytest.raises(CompileError, match=r"kernels_cu/accumulate.cu\(\d+\): error.*nonsense"):
        Kernel("accumulate", "accumulate_v1", GRAD_T="nonsense").cubin("sm_90")


@pytest.fixture
def headers(monkeypatch, tmp_path):
    """kernels_cu with two headers more; two.cuh includes one.cuh."""
    root = tmp_path / "kernels"
    shutil.copytree(kernel_root(), root)
    (root / "one.cuh").write_text("#define ONE 1\n__device__ float one() { return ONE; }\n")
    (root / "two.cuh").write_text(
        '#include "one.cuh"\n__device__ float two() { return one() + ONE; }\n'
    )
    monkeypatch.setenv("GPUACCEL_KERNELS", str(root))
    kernel_root.cache_clear()
    yield root
    kernel_root.cache_clear()


WITH_HEADERS = (
    '#include "two.cuh"\n#include "one.cuh"  // twice, but there once\n'
    'extern "C" __global__ void k(float* x) {\n    x[0] = two() + one();\n}\n'
)


def test_headers_of_kernels_cu_are_included_once_and_in_order(headers):
    kernel = gpuaccel.compile(WITH_HEADERS)
    names = re.findall(r'^#line 1 "(.*)"$', kernel.source, re.M)
    common, two, one = (f"kernels_cu/{name}.cuh" for name in ("common", "two", "one"))
    assert list(dict.fromkeys(names)) == [common, "<source>", two, one]
    (headers / "one.cuh").write_text("#define ONE 2\n__device__ float one() { return ONE; }\n")
    with use_backend("simt"):
        x = torch.zeros(1)
        gpuaccel.compile(WITH_HEADERS)[1, 1](x)
    assert x.item() == 6.0


def test_an_error_names_the_line_of_the_file_or_header_where_it_is(headers):
    wrong = WITH_HEADERS.replace("one();\n}", "three();\n}")
    with pytest.raises(CompileError, match=r'<source>\(4\): error: identifier "three"'):
        gpuaccel.compile(wrong)
    (headers / "two.cuh").write_text('#include "one.cuh"\n\n__device__ float two() { return 1 }\n')
    with pytest.raises(CompileError, match=r"kernels_cu/two.cuh\(3\): error: expected a"):
        gpuaccel.compile(WITH_HEADERS)


def test_a_file_or_name_that_is_not_there_lists_what_is():
    with pytest.raises(
        CompileError, match=r"there is no file nothing.cu in kernels_cu; files: .*accumulate.cu"
    ):
        Kernel("nothing", "x")
    with pytest.raises(
        CompileError,
        match="there is no kernel 'accumulate_v9' here; kernels found: "
        "accumulate_v1, accumulate_v2, accumulate_v3",
    ):
        Kernel("accumulate", "accumulate_v9")


# ---- reading the signature -----------------------------------------------------------------------


def params(declaration, before="", **defines):
    return signature(f'{before}\nextern "C" __global__ void k({declaration}) {{ }}', "k", defines)


@pytest.mark.parametrize(
    "declared, pointer, code, dtypes, align",
    [
        ("float* x", True, None, (torch.float32,), 4),
        ("float *const x", True, None, (torch.float32,), 4),
        ("float x[16]", True, None, (torch.float32,), 4),
        ("const float x[4][4]", True, None, (torch.float32,), 4),
        ("volatile double* x", True, None, (torch.float64,), 8),
        ("const float3* x", True, None, (torch.float32,), 4),
        ("float4* x", True, None, (torch.float32,), 16),
        ("longlong2* x", True, None, (torch.int64,), 16),
        ("uchar4* x", True, None, (torch.uint8, torch.bool), 4),
        ("bf16* x", True, None, (torch.bfloat16,), 2),
        ("__nv_bfloat16* x", True, None, (torch.bfloat16,), 2),
        ("half* x", True, None, (torch.float16,), 2),
        ("half2* x", True, None, (torch.float16,), 4),
        ("const __nv_bfloat162* x", True, None, (torch.bfloat16,), 4),
        ("half4* x", True, None, None, 1),
        ("bool2* x", True, None, None, 1),
        ("void* x", True, None, None, 1),
        ("unsigned char* x", True, None, (torch.uint8, torch.bool), 1),
        ("const unsigned int* x", True, None, (torch.uint32, torch.int32), 4),
        ("signed char* x", True, None, (torch.int8,), 1),
        ("float** x", True, None, (torch.int64, torch.uint64), 8),
        ("float4** x", True, None, (torch.int64, torch.uint64), 8),
        ("const float* const* x", True, None, (torch.int64, torch.uint64), 8),
        ("Thing* x", True, None, None, 1),
        ("int x", False, "i", None, None),
        ("long x", False, "q", None, None),
        ("size_t x", False, "Q", None, None),
        ("unsigned short int x", False, "H", None, None),
        ("long unsigned int x", False, "Q", None, None),
        ("int long long const unsigned x", False, "Q", None, None),
        ("short signed int x", False, "h", None, None),
        ("char signed x", False, "b", None, None),
        ("char unsigned* x", True, None, (torch.uint8, torch.bool), 1),
        ("uint32_t x", False, "I", None, None),
        ("float x", False, "f", None, None),
        ("bool x", False, "?", None, None),
        ("const __grid_constant__ Sources x", False, None, None, None),
        ("float4 x", False, None, None, None),
    ],
)
def test_a_parameter_is_read_as_cuda_means_it(declared, pointer, code, dtypes, align):
    (found,) = params(declared)
    assert (found.name, found.pointer, found.code) == ("x", pointer, code), found
    if pointer:
        assert (found.dtypes, found.align) == (dtypes, align), found


@pytest.mark.parametrize(
    "declared, message",
    [
        ("float* x, float &y", "k: parameter `float &y` is a reference; a kernel takes pointers"),
        ("const Sources& x", "is a reference"),
        ("float (&x)[4]", "is a reference"),
        ("float (*x)[4]", r"`float \(\*x\)\[4\]` points to an array or a function"),
        ("float* x, int", "k: parameter `int` has no name; give it one"),
        *((text, "has no name") for text in ("float*", "const float* __restrict__", "float[]")),
        *((text, "has no name") for text in ("Sources", "struct Sources", "unsigned long = 4")),
    ],
)
def test_a_parameter_that_cannot_be_read_is_refused(declared, message):
    with pytest.raises(CompileError, match=message):
        params(declared)


def test_comments_strings_macros_and_line_breaks_do_not_disturb():
    source = """
// __global__ void not_this(int a) {}
/* extern "C" __global__ void nor_this(int a) {}
   over two lines */
#ifndef GRAD_T
#define GRAD_T float   // the default, with a comment
#endif
#define POINTER GRAD_T*
typedef unsigned long long big;
extern "C" __global__ void __launch_bounds__(256, (1 + 1)) first(
    POINTER out,         // (n) result, a comment with "quotes", commas, and ) parentheses
    const GRAD_T* __restrict__ in /* (n) */, big n)
{ printf("// no comment; __global__ void in_a_string(int) %s", "}"); }
extern "C" __global__ __launch_bounds__(128) void second(void) { char c = '"'; char d = '\\''; }
extern "C" __global__ void third() { printf("a"); }  extern "C" __global__ void
fourth(int n) { printf("b"); }
"""
    assert kernel_names(source) == ["first", "second", "third", "fourth"]
    assert without_comments(source).count("\n") == source.count("\n") and len(
        without_comments(source)
    ) == len(source)
    assert [str(p) for p in signature(source, "first", {})] == [
        "float* out",
        "const float* in",
        "unsigned long long n",
    ]
    low = signature(source, "first", {"GRAD_T": "bf16"})
    assert low[0].dtypes == low[1].dtypes == (torch.bfloat16,) and low[2].code == "Q"
    assert signature(source, "second", {}) == signature(source, "third", {}) == []
    assert [p.name for p in signature(source, "fourth", {})] == ["n"]


CONDITIONS = [
    *("7 / 2 == 3", "7 % 2 == 1", "(3 > 2) > 0", "!2 + 1", "!5 == 0", "!!5 == 1", "- -1", "+1"),
    *("(1 << 3) == 8", "-8 >> 1 == -4", "1 + 1 << 2 == 8", "6 & 3", "4 | 1", "!(2 & 1)"),
    *("0x1f == 31", "017 == 15", "0b11 == 3", "10uLL == 10", "true", "!false", "not 0 and 1"),
    *("0xffffffffffffffff > 0", "5 - 3 - 2 == 0", "0 == 00", "16L > 0xFul"),
    *("SUM * 2 == 3", "defined SUM && !defined(NONE)", "NONE == 0", "1 || 1 / 0", "!(0 && 1 / 0)"),
    *("1 || __CUDA_ARCH__ > 800", "!(defined(__CUDA_ARCH__) && SUM > 4)"),
]


@pytest.mark.filterwarnings("ignore::gpuaccel.errors.CompileWarning")
@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_has_the_value_that_c_gives_it(condition):
    source = f"""#define SUM 1 + 1
#if {condition}
#define T float
#else
#define T double
#endif
extern "C" __global__ void k(T* x) {{ static_assert(sizeof(T) == 4, ""); }}"""
    assert str(signature(source, "k", {})[0]) == "float* x"
    assert gpuaccel.compile(source).name == "k"


@pytest.mark.parametrize(
    "condition",
    [
        "__CUDA_ARCH__ >= 800",
        "defined(__CUDA_ARCH__) || 0",
        '__has_include("x.h")',
        "MAX(1, 2) == 2",
        *("1 / 0", "1 +", "(1", "1)", "", "1.5 > 1", "'ab'", "1 ? 2", "1 << 64", "2 3"),
        # Python reads these in another way than C, or not at all.
        *("-7 / 2 == -3", "7 % -2 == 1", "1 < 2 < 3", "1 | 2 == 3", "~0 == -1", "-1 > 0u"),
        *("1 ? 0 : 1", "'A' == 65", "6 ^ 3", "1 if 1 else 0", "0 is 0"),
    ],
)
def test_a_condition_that_only_the_compiler_can_tell_leaves_nothing_out(condition):
    source = f"""#if {condition}
extern "C" __global__ void first() {{}}
#else
extern "C" __global__ void second() {{}}
#endif"""
    assert kernel_names(source) == ["first", "second"]


def test_macros_and_types_are_those_in_front_of_the_kernel():
    source = """
#define T float
#define BOUND 64
extern "C" __global__ void __launch_bounds__(BOUND) first(T* x) {}
#undef T
#undef BOUND
#define T double
#define BOUND 128
extern "C" __global__ void __launch_bounds__(BOUND) second(T* x) {}
#undef T
"""
    assert str(signature(source, "first", {})[0]) == "float* x"
    assert str(signature(source, "second", {})[0]) == "double* x"
    assert [launch_bound(source, name) for name in ("first", "second")] == [64, 128]
    assert str(params("T* x", "#undef T\n#define T double", T="float")[0]) == "double* x"
    for before in (
        "using T = float; template <class Q> struct H { using T = double; };",
        "typedef float T; __device__ void f() { typedef double T; { enum T { A }; } }",
        'extern "C" { typedef float T; } namespace n { using T = double; }',
        "namespace { using T = float; }",
        "namespace n { using T = float; } using namespace n;",
        "namespace m { namespace n { using T = double; } using T = float;",
        "typedef double T;\n#define T float",
    ):
        assert str(params("T* x", before)[0]) == "float* x", before
    assert str(params("T* x) {} typedef float T; void f(int n")[0]) == "T* x"


# ---- arguments that do not fit -------------------------------------------------------------------


@pytest.fixture(scope="module")
def scale():
    return gpuaccel.compile(SCALE)


X = torch.ones(8)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), r"scale takes 3 arguments \(float\* x, float a, int n\), got 0"),
        ((X, 1.0, 8, 1), "got 4"),
        (
            (X.double(), 1.0, 8),
            r"parameter `float\* x` expects dtype torch.float32, got torch.float64",
        ),
        (
            (torch.ones(8, 2)[:, 0], 1.0, 8),
            r"`float\* x` expects a contiguous tensor, got shape \(8,\) with strides \(2,\)",
        ),
        ((X, 1.0, 8), r"`float\* x` expects a tensor on a GPU, got one on cpu"),
        (([1.0], 1.0, 8), r"`float\* x` expects a torch tensor, got list"),
        (
            (None, X, 8),
            r"`float a` is passed by value and expects a number, got a tensor of shape \(8,\)",
        ),
        ((None, "1", 8), "`float a` expects a number, got '1'"),
        ((None, 1.0, 8.0), "`int n` expects a whole number, got 8.0"),
        ((None, 1.0, 2**31), "`int n` cannot hold 2147483648: "),
        ((None, 1e300, 8), r"`float a` cannot hold 1e\+300: "),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_expected(scale, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        check_arguments(scale, arguments)
    # A number's range is checked when it is packed.
    assert usual(scale, "cuda", arguments) is None or "cannot hold" in message


def test_a_tensor_whose_memory_was_given_back_is_refused(scale):
    x = torch.ones(8)
    # As a sharded parameter between two uses.
    x.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=r"`float\* x` expects a tensor with memory, got 8 "):
        check_arguments(scale, (x, 1.0, 8), "cpu")
    assert usual(scale, "cpu", (x, 1.0, 8)) is None
    assert check_arguments(scale, (torch.empty(0), 1.0, 0), "cpu") == (-1, [0, 1.0, 0])


def usual(kernel, device, arguments):
    """What a launch takes without check_arguments(); None: it calls that."""
    try:
        return usual_values(kernel.params, device)(*arguments)
    except (TypeError, AttributeError, RuntimeError):
        return None


NUMBERS = (8, -1, 1.5, True, None, "1", b"12345678", b"", 1j)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_arguments_of_the_usual_kinds_are_taken_as_check_arguments_takes_them(data):
    """Whatever is given: the short way takes nothing that the long way refuses, and the values of
    both are the same."""
    kernel = gpuaccel.compile(
        """struct S { int a; float b; };
        extern "C" __global__ void k(float* x, const double2* y, void* z, float a, int n, S s) {}"""
    )
    memory = torch.zeros(64)
    without_memory = torch.zeros(64)
    without_memory.untyped_storage().resize_(0)
    tensors = [
        memory,
        memory[1:],
        memory[::2],
        memory.double(),
        memory.double()[1:],
        memory.bfloat16(),
        memory.to_sparse(),
        torch.nn.Parameter(memory),
        torch.empty(0),
        without_memory,
        torch.zeros(8, device="meta"),
    ]
    arguments = [data.draw(st.sampled_from([*tensors, *NUMBERS])) for _ in range(6)]
    fitting = [memory, memory.double(), memory, 1.5, 3, b"12345678"]
    for i in range(6):
        if data.draw(st.booleans()):
            arguments[i] = fitting[i]
    taken = usual(kernel, "cpu", arguments)
    if taken is not None:
        assert taken == check_arguments(kernel, arguments, "cpu")
    assert usual(kernel, "cpu", fitting) == check_arguments(kernel, fitting, "cpu")
    assert usual(kernel, "cpu", fitting) is not None
    assert usual(kernel, "cpu", fitting[:-1]) is None
    assert usual(kernel, "cuda", fitting) is None


def test_what_fits_is_taken(scale):
    for a, n in ((1, 8), (1.5, True), (np.float32(2), np.int64(8)), (float("nan"), 0), (-1, -1)):
        check_arguments(scale, (None, a, n))


@pytest.mark.parametrize(
    "shape, message",
    [
        (
            (0, 32),
            "scale: grid is 0; expected 1 to 3 whole numbers from 1 to 2147483647, 65535, 65535",
        ),
        ((-1, 32), "grid is -1"),
        (((), 32), r"grid is \(\)"),
        (((1, 1, 1, 1), 32), "grid is"),
        (((1, 65536), 32), "grid is"),
        ((1, 0), "block is 0"),
        ((1, 1025), "block is 1025"),
        ((1, (1, 1, 65)), "block is"),
        ((1, (32, 33)), r"block is \(32, 33\), 1056 threads; a block has 1024 at most"),
        ((1, 32, 300_000), "shared_bytes is 300000; expected .* of bytes, 0 to 232,448"),
        ((1, 32, "x"), "shared_bytes is 'x'"),
    ],
)
def test_a_grid_or_block_that_cannot_be_is_refused(scale, shape, message):
    with pytest.raises(ArgumentError, match=message):
        scale[shape]


def test_brackets_take_grid_and_block(scale):
    for shape in (8, (8,), (1, 2, 3, 4)):
        with pytest.raises(
            ArgumentError,
            match=r"scale\[...\] takes \[grid, block\] or \[grid, block, shared_bytes\], got",
        ):
            scale[shape]
    with pytest.raises(ArgumentError, match=r"with its grid and block: scale\[grid, block\]"):
        scale(X, 1.0, 8)
    launch = scale[(2, 3), torch.Size([4, 5, 6]), 1024]
    assert launch.shape == (2, 3, 1, 4, 5, 6, 1024)
    bounded = gpuaccel.compile(
        "#define MOST 64\n__global__ void __launch_bounds__(MOST, 2) k(int n) {}"
    )
    assert bounded[1, 64].shape[3] == 64
    with pytest.raises(ArgumentError, match="65 threads; its __launch_bounds__ allow 64 at most"):
        bounded[1, 65]
    with use_backend("simt"), pytest.raises(ArgumentError, match="cannot hold 1099511627776"):
        bounded[1, 1](2**40)
    with (
        use_backend("simt"),
        pytest.raises(ArgumentError, match="tensors.0. expects a torch tenso"),
    ):
        bounded[1, 1](1, tensors=[[1.0]])
    assert usual(bounded, "cuda", (3,)) == (None, [3])


def test_a_launch_without_a_gpu_runs_on_the_cpu(scale):
    for name in ("torch", "simt"):
        x = torch.ones(1000)
        with use_backend(name):
            scale[4, 256](x, 3.0, 900)
        assert x[:900].eq(3).all() and x[900:].eq(1).all()


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_gpu_arguments_that_need_a_device_to_be_checked(scale):
    x = torch.ones(8, device="cuda")
    wide = gpuaccel.compile('extern "C" __global__ void wide(float4* x, int n) { x[0].x = n; }')
    with pytest.raises(
        ArgumentError,
        match=r"`float4\* x` expects an address that is a multiple of 16 bytes, got one 4 off",
    ):
        wide[1, 1](x[1:], 1)
    for a, n, who in ((1.0, 2**31, "int n"), (1.0, -(2**31) - 1, "int n"), (1e300, 8, "float a")):
        with pytest.raises(ArgumentError, match=f"scale: parameter `{who}` cannot hold"):
            scale[1, 32](x, a, n)
    with pytest.raises(
        ArgumentError, match=r"`float\* x` expects a tensor on a GPU, got one on cpu"
    ):
        scale[1, 32](X, 1.0, 8)
    with pytest.raises(ArgumentError, match="strides"):
        scale[1, 32](torch.ones(8, 2, device="cuda")[:, 0], 1.0, 8)
    torch.cuda.synchronize()
    assert x.eq(1).all()
    wide[1, 1](x, 5)
    assert x[0].item() == 5


@pytest.mark.gpu
def test_gpu_launch_goes_to_torchs_current_stream(scale):
    """A launch on another stream would read the values from before the side stream's work."""
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 24, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            x.add_(1)
        scale[-(-x.numel() // 256), 256](x, 2.0, x.numel())
        x.add_(1)
    stream.synchronize()
    assert x.eq(41).all(), x.unique()


@pytest.mark.gpu
def test_gpu_launch_is_captured_into_a_graph(scale):
    x = torch.ones(256, device="cuda")
    scale[1, 256](x, 1.0, 256)  # loads the module: not while capturing
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale[1, 256](x, 2.0, 256)
        x[:16].zero_()
    assert x.eq(1).all(), "a capture must not run"
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert x[:16].eq(0).all() and x[16:].eq(8).all()


@pytest.mark.gpu
def test_gpu_two_threads_launch_one_kernel(scale):
    """Each thread has its own tensor, number and stream; the shared buffer must not mix them."""
    tensors = [torch.zeros(4, device="cuda") for _ in range(4)]
    add = gpuaccel.compile(
        'extern "C" __global__ void add(float* x, float a) { x[threadIdx.x] += a; }'
    )
    torch.cuda.synchronize()

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(2000):
                add[1, 4](tensors[i], i + 1)
            torch.cuda.current_stream().synchronize()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    torch.cuda.synchronize()
    assert [t.tolist() for t in tensors] == [[2000.0 * (i + 1)] * 4 for i in range(4)]


@pytest.mark.gpu
def test_gpu_a_launch_may_be_the_first_thing_a_thread_does(scale):
    """A fresh thread has no CUDA context until torch does something there."""
    x, y = torch.ones(256, device="cuda"), torch.ones(256, device="cuda")
    scale[1, 256](x, 1.0, 256)
    torch.cuda.synchronize()
    fresh = gpuaccel.compile(SCALE.replace("*=", "+="))
    for kernel, values in ((scale, x), (fresh, y)):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(kernel[1, 256], values, 2.0, 256).result()
    assert x.eq(2).all() and y.eq(3).all()


@pytest.mark.gpu
def test_gpu_a_launch_is_little_work_for_the_host():
    """Few Python functions, no allocation, no wait. benchmarks/accumulate.py measures the time."""
    kernel = Kernel("accumulate", "accumulate_v1")
    acc, grad = torch.zeros(256, device="cuda"), torch.ones(256, device="cuda")
    kernel[1, 256](acc, grad, 256)
    launch, seen = kernel[1, 256], []
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    sys.setprofile(
        lambda frame, event, _: seen.append(frame.f_code.co_name) if event == "call" else None
    )
    try:
        launch(acc, grad, 256)
    finally:
        sys.setprofile(None)
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    assert len(seen) <= 8, seen
    assert acc.eq(2).all()
