"""What a learner hears of a cell that does not compile: the words of NVRTC and of g++."""

import pytest

from gpuaccel.compiler import Kernel
from gpuaccel.errors import CompileError
from gpuaccel.learn import EXERCISES
from gpuaccel.learn.exercises import find_slip

SAXPY = "float* y, const float* x, float a, int n"
ACCUMULATE = "float* acc, const bf16* grad, long long n"
STEP = "float* w, const float* grad, const float* scale, float lr, long long n"
I = "int i = blockIdx.x * blockDim.x + threadIdx.x;"
PYTHON_FOR = "C writes `for (int k = 0; k < n; k++)`"
PYTHON_IF = "C writes `if (i < n) { ... }`"
COMMENT = "a comment begins with `//` in C"
BF16 = "C does not compute with bf16: `as_float(...)` reads one"
SCALE = "`scale` is an address: the number there is `scale[0]`"

# (parameters, the body behind its first line, the line that is named, how the sentence begins)
SLIPS = [
    (
        SAXPY,
        f"{I}\nif (i < n)\n    y[i] = a * x[i] + y[i]",
        5,
        "`y[i] = a * x[i] + y[i]` needs a `;`",
    ),
    (
        SAXPY,
        f"{I[:-1]}\n\n// a line\nif (i < n) y[i] = a;",
        3,
        f"`{I[:-1]}` needs a `;` at its end",
    ),
    (SAXPY, f"{I}\nif (i < n) y[i] = a x[i];", 4, "in front of `x[i];` an operator or a `;`"),
    (SAXPY, f"{I}\ny[i] = a  // for all in x\n", 4, "`y[i] = a` needs a `;` at its end"),
    (SAXPY, f"{I}\nfloat b = 0;\nif (i < n) b = a else b = 1;", 5, "in front of `else b = 1;`"),
    (ACCUMULATE, f"{I}\nacc[i] = as_float(grad[i]", 4, "a `)` is missing"),
    (SAXPY, f"{I}\nint b = i // 4;\nif (i < n) y[i] = b;", 4, "`//` begins a comment"),
    (SAXPY, f"{I}\nif (i < n) y = a * x + y;", 4, "`y` is an address: the number there is `y[i]`"),
    (
        SAXPY,
        f"{I}\nif (i < n) y[i] = a * x + y[i];",
        4,
        "`x` is an address: the number there is `x",
    ),
    (SAXPY, f"{I}\nif (i < n) y[i] = x;", 4, "`x` is an address: the number there is `x[i]`"),
    (STEP, f"{I}\nif (i < n && scale > 0.0f) w[i] -= lr * scale[0] * grad[i];", 4, SCALE),
    (STEP, "float s = scale;\nw[0] = s;", 3, SCALE),
    (SAXPY, f"# the index\n{I}\ny[i] = a;", 3, COMMENT),
    (SAXPY, f"{I}\n# if (i < n)\ny[i] = a;", 4, COMMENT),
    (SAXPY, f"{I}\nif (i < n) y[i] = a;  # the line", 4, COMMENT),
    (SAXPY, f"{I}\nif (i < n) y[i] = a * x[i] ** 2;", 4, "C has no `**`"),
    (SAXPY, "for i in range(n):\n    y[i] = a * x[i] + y[i]", 3, PYTHON_FOR),
    (SAXPY, "for (int i in range(n)) y[i] = a;", 3, PYTHON_FOR),
    (SAXPY, f"{I}\nif i < n:\n    y[i] = a;", 4, PYTHON_IF),
    (SAXPY, f"{I}\nif i < n y[i] = a;", 4, PYTHON_IF),
    (SAXPY, f"{I}\ny[i] = x[i] if i < n else 0.0f;", 4, "C writes `condition ? a : b`"),
    (SAXPY, f"{I}\nif (i < n and True) y[i] = a;", 4, "C writes `true` and `false`"),
    (SAXPY, f"{I}\nif (i < n) y[i] = a;\nelif (i > n) y[i] = 0;", 5, "C writes `else if (...)`"),
    (ACCUMULATE, f"{I}\nif (i < n) acc[i] += grad[i];", 4, BF16),
    (ACCUMULATE, f"{I}\nif (i < n) acc[i] += (float)grad[i];", 4, BF16),
    (SAXPY, "if (i < n) y[i] = a;", 3, "there is no `i` here"),
    (SAXPY, "i = threadIdx.x;\ny[i] = a;", 3, "a new variable needs its type: `int i = ...`"),
    (
        SAXPY,
        "int i = threadidx.x;\ny[i] = a;",
        3,
        "there is no `threadidx` here: a name is declared "
        "before it is used; did you mean `threadIdx`?",
    ),
    (SAXPY, "int i = blockIdx * blockDim + threadIdx;\ny[i] = a;", 3, "`threadIdx`, `blockIdx`"),
    (SAXPY, f"{I}\ny(i) = a;", 4, "an element has square brackets, as `y[i]`"),
    (SAXPY, f"{I}\ny[i] = a[i];", 4, "this is one number, not a tensor"),
    (SAXPY, f"{I}\nfloat j = i / 2;\ny[j] = a;", 5, "an index is a whole number"),
    (SAXPY, f"{I}\nif (i < n) y[i] = (a * x[i];", 4, "a `)` is missing"),
    (SAXPY, f"{I}\nif (i < n) x[i] = a;", 4, "the kernel may only read what is `const`"),
    (SAXPY, f"{I}\nint i = 3;\ny[i] = a;", 4, "it has its type already"),
    (SAXPY, f"{I}\nreturn a * x[i];", 4, "a kernel returns nothing"),
    (SAXPY, f"{I}\ny[i] = a; }}", None, "there is one `}` too many"),
    (SAXPY, f"{I}\nif (i < n) {{ y[i] = a;", None, "a `}` is missing at the end"),
]
# What both compilers take, and what only g++ refuses.
TAKEN = f"{I}\nif (i < n and not (a < 0 or n < 0)) y[i] = a;"
ONLY_GCC = f"{I}\nif (i < n && scale > 0) w[i] -= lr * scale[0] * grad[i];"


def compiled(compiler, params, body):
    """(CompileError or None, text) of a kernel whose second line has its parameters."""
    text = f"\n__global__ void k({params}) {{\n{body}\n}}\n"
    kernel = Kernel.from_source(text, "k", "cell")
    try:
        kernel.resources() if compiler == "nvrtc" else kernel.load("checked")
    except CompileError as error:
        return error, text
    return None, text


@pytest.mark.parametrize("compiler", ["nvrtc", "host"])
@pytest.mark.parametrize("params, body, line, words", SLIPS)
def test_a_common_slip_has_its_line_and_a_plain_sentence(compiler, params, body, line, words):
    error, text = compiled(compiler, params, body)
    slip = find_slip(error, text, EXERCISES["clipped_step"].solution)
    assert slip.sentence.startswith(words), (slip, str(error))
    assert line in (None, slip.line), (slip, str(error))
    assert slip.message and "\n" not in slip.message


def test_what_only_one_compiler_refuses_is_explained_too():
    assert compiled("nvrtc", SAXPY, TAKEN)[0] is None
    assert compiled("host", SAXPY, TAKEN)[0] is None
    assert compiled("nvrtc", STEP, ONLY_GCC)[0] is None
    error, text = compiled("host", STEP, ONLY_GCC)
    assert find_slip(error, text, EXERCISES["clipped_step"].solution).sentence == SCALE


def test_an_error_in_no_table_keeps_the_compilers_words():
    error, text = compiled("nvrtc", SAXPY, "y[0] = min(a, 1);")
    slip = find_slip(error, text)
    assert (slip.line, slip.sentence) == (3, "")
    assert slip.message.startswith("line 3: more than one instance of overloaded function")
