"""What the text and the PTX of a right kernel tell: too small an index, double precision."""

import re

from ...errors import GpuaccelError
from ...source import without_comments

# A declaration of whole numbers in a statement, and one of its variables with an initial value.
_DECLARATION = re.compile(
    r"(?:^|\()\s*(?:const\s+)?(unsigned(?:\s+int)?|int|long\s+long|size_t|auto)\s+(?=[a-z_])(.*)",
    re.S | re.I,
)
_INITIAL = re.compile(r"(\w+)\s*=\s*([^,=]*)")


def small_index(task, kernel) -> list[str]:
    """A sentence where an index is computed in 32 bits, and the task's n has 64."""
    if not task.params[-1].startswith("long long"):
        return []
    for statement in re.split("[;{}]", without_comments(kernel.text)):
        declared = _DECLARATION.search(statement)
        type_name, variables = declared.groups() if declared else ("", "")
        for name, value in _INITIAL.findall(variables):
            if "blockIdx" not in value or "*" not in value:
                continue
            if type_name == "int":
                return [f"`{name}` is an int, which ends at 2,147,483,647, and n a long long"]
            if not re.search(r"long|size_t|int64|\d[uU]?LL", value):
                return [
                    f"`{name}` is computed in 32 bits, which end at 4,294,967,295, and n is a long "
                    "long: the conversion belongs in front of blockIdx.x"
                ]
    return []


def double_precision(kernel, solution) -> list[str]:
    """A sentence where the machine computes in double precision, and for the solution nowhere."""
    line = _first_double(kernel)
    if line is None or _first_double(solution) is not None:
        return []
    return [
        f"line {line} computes in double precision, the solution nowhere: "
        "1.0 is a double, 1.0f a float"
    ]


def _first_double(kernel) -> int | None:
    """The first source line whose PTX computes in double precision; None: none does."""
    try:
        ptx = kernel.ptx()
    except GpuaccelError:
        # only the CPU can compile it
        return None
    files = re.findall(rf'\.file\s+(\d+) "[^"]*{re.escape(kernel.filename)}"', ptx)
    line = None
    for place in re.finditer(
        r"^\s*(?:\.loc\s+(\d+) (\d+)|((?:@!?%p\d+\s+)?\w[\w.]*\.f64))", ptx, re.M
    ):
        if place[3]:
            return line
        if place[1] in files:
            line = int(place[2])
    return None
