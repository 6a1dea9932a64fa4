"""What a compiler's error means, in one sentence for readers of Python.

    slip = find_slip(error, text, exercise("saxpy").solution)
    slip.line, slip.sentence, slip.message
    # (6, "no `;` at the end of `y[i] = a * x[i] + y[i]`", 'line 7: expected a ";"')

SLIPS has the sentences. NVRTC and g++ use other words, so each pattern knows both.
"""

import re
from dataclasses import dataclass

from ...errors import CompileError, suggestion
from ...source import without_comments
from .results import Result

# Where an error is, what it says, the line that the compiler prints, and the caret below it.
_ERROR = re.compile(
    r"^(?:[^\n(:]*(?:\((\d+)\)|:(\d+)(?::\d+)?)|At end of source): (?:fatal )?error: "
    r"(.*(?:\n +operand types are.*)?)(?:\n( *)(\S.*)\n( *)\^)?",
    re.M,
)
_EXPECTED = r"expected (?:a \"|(?:',' or )?')"
# names of CUDA that are often misspelt
_NAMES = "threadIdx blockIdx blockDim gridDim __syncthreads as_float as_bf16 sqrtf fminf fmaxf expf"

# A pattern of "the compiler's message\nthe learner's line" -> a sentence. In it, {1} is the
# pattern's group, {meant} a name like it; {pointer} and {semicolon} are sentences of find_slip.
SLIPS = {
    r"\n.*#\s|preprocessing directive|stray '#'|\"#\" not": "a comment begins with `//` in C",
    r"pointer but has|unary '\*'.*\n.*\*\*": "C has no `**`: x * x is the square of x",
    r"\n.*\bfor\b[^;]*\bin\b": "C writes `for (int k = 0; k < n; k++)`, not `for k in range(n)`",
    r"\n.*=[^;]*\bif\b[^;]*\belse\b": "C writes `condition ? a : b`, not `a if condition else b`",
    r"\n\s*(if|while)\b(?!\s*\()|\n\s*(?:if|else|for|while)\b.*:\s*$": "C writes "
    "`if (i < n) { ... }`: the condition in parentheses, no `:`",
    r"[\"'](?:True|False|None)[\"']": "C writes `true` and `false`",
    r"[\"']elif[\"']": "C writes `else if (...)`, not `elif`",
    r"uint3|dim3|Index'": "`threadIdx`, `blockIdx` and `blockDim` have parts: `threadIdx.x`",
    r"^.*bf16": "C does not compute with bf16: `as_float(...)` reads one, `as_bf16(...)` makes one",
    r"arithmetic or|pointer with|\*[\"']": "{pointer}",
    f"{_EXPECTED};": "{semicolon}",
    rf"{_EXPECTED}([)\]])": "a `{1}` is missing",
    f"{_EXPECTED}}}": "a `}` is missing at the end",
    r"expected a? ?declaration": "there is one `}` too many: the kernel has ended before this line",
    r"pointer-to-object|'\w+\[\w+\]'": "this is one number, not a tensor: without `[` and `]`",
    r"integral or|array subscript": "an index is a whole number, in `[` and `]`",
    r"modifiable|read-only": "the kernel may only read what is `const`",
    r"apparent call|used as a function": "an element has square brackets, as `y[i]`",
    r"[\"'](\w+)[\"'](?: is undefined| was not decl).*\n\s*\1\s*=[^=]": "a new variable needs its "
    "type: `int {1} = ...` or `float {1} = ...`",
    r"[\"'](\w+)[\"'](?: is undefined| was not decl)": "there is no `{1}` here: a name is "
    "declared before it is used{meant}",
    r"already been decl|redeclaration": "it has its type already: write the type once",
    r"return value|return-statement": "a kernel returns nothing: it writes into a tensor",
}


@dataclass(frozen=True)
class Slip:
    """The first error of a compiler.

    Attributes:
        line: of the text, None where the compiler names none.
        sentence: what is wrong, "" where it is in no table.
        message: the compiler's own.
    """

    line: int | None
    sentence: str
    message: str


def find_slip(error: CompileError, text: str, solution: str = "") -> Slip:
    """The first error of a compiler, explained.

    Args:
        text: the source.
        solution: of the exercise, which shows how its tensors are used.
    """
    place = _ERROR.search(str(error))
    if place is None:
        return Slip(None, "", " ".join(str(error).split()))
    line = int(place[1] or place[2] or 0)
    says = " ".join(place[3].split())
    message = f"line {line}: {says}" if line else says
    indent, shown, caret = (words or "" for words in place.group(4, 5, 6))
    rest = re.sub("//.*", "", shown[len(caret) - len(indent) :]).strip()
    lines = without_comments(text).splitlines()
    if re.match(rf"{_EXPECTED}[;)\]]", says) and shown and indent == caret:
        # What is missing there is missing at the end of the line before.
        line = next(k for k in range(line - 1, 0, -1) if lines[k - 1].strip())
        rest = ""
    code, written = (
        both[line - 1].strip() if 0 < line <= len(both) else ""
        for both in (lines, text.splitlines())
    )
    if re.search("//.*;", written) and not rest:
        semicolon = "`//` begins a comment: `/` divides whole numbers"
    elif rest:
        semicolon = f"in front of `{rest}` an operator or a `;` is missing"
    else:
        semicolon = f"`{code}` needs a `;` at its end"
    words = {"pointer": _pointer(text, code, solution), "semicolon": semicolon}
    for pattern, sentence in SLIPS.items():
        found = re.search(pattern, f"{says}\n{code}")
        if found:
            words["1"] = name = found[1] if found.re.groups else ""
            names = {*_NAMES.split(), *re.findall(r"\w+", text)} - {name}
            words["meant"] = suggestion(name, sorted(names)).replace("'", "`") if name[2:] else ""
            sentence = re.sub(r"\{(\w+)\}", lambda match: words[match[1]], sentence)
            if sentence:
                return Slip(line or None, sentence, message)
    return Slip(line or None, "", message)


def _pointer(text, code, solution) -> str:
    """A sentence on a pointer of the kernel that stands in a line without its brackets, or ""."""
    pointers = re.findall(r"\*\s*(\w+)\s*[,)]", text.partition("{")[0])
    for name in re.findall(r"\b(\w+)\b(?!\s*[\[(\w])", code):
        if name in pointers:
            index = "0" if f"{name}[0]" in solution else "i"
            return f"`{name}` is an address: the number there is `{name}[{index}]`"
    return ""


def does_not_compile(task, error: CompileError, text: str) -> Result:
    """The result of an answer that does not compile."""
    slip = find_slip(error, text, task.solution)
    place = f"line {slip.line}" if slip.line else "the cell"
    lines: list[tuple[bool | None, str, str]] = [(False, place, slip.sentence or slip.message)]
    if slip.sentence:
        lines.append((None, "the compiler", slip.message))
    return Result(task.name, False, "it does not compile.", lines)
