"""The text of a whole program: a kernel's source with the headers and the standard names that it
uses, without code of the host.

    source, left_out = whole_program(text, "scale.cu", {"GRAD_T": "float"})
"""

import functools
import os
import pathlib
import re
from dataclasses import replace as replace_fields

from ..errors import CompileError
from ..host_code import LeftOut, declared_names, device_code
from ..source import (
    INCLUDE,
    active_text,
    check_possible,
    line_directive,
    line_number,
    without_comments,
)


@functools.cache
def kernel_root() -> pathlib.Path:
    """The folder of the .cu files: GPUACCEL_KERNELS, the installed package's, or the checkout's.

    Raises:
        CompileError: where the folder is in none of these places.
    """
    package = pathlib.Path(__file__).parents[1]
    chosen = os.environ.get("GPUACCEL_KERNELS")
    for root in (chosen, package / "kernels_cu", package.parent / "kernels_cu"):
        if root and pathlib.Path(root).is_dir():
            return pathlib.Path(root)
    raise CompileError(
        f"the folder kernels_cu is neither in {package} nor beside it; set GPUACCEL_KERNELS"
    )


def kernel_files() -> list[pathlib.Path]:
    """Every .cu file of kernels_cu, sorted."""
    return sorted(kernel_root().glob("*.cu"))


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"[^\n]*', re.M)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b[^\n]*", re.M)
_CONDITION = re.compile(r"^[ \t]*#[ \t]*(?:if|ifdef|ifndef|elif)\b[^\n]*", re.M)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)(?:\\\n|[^\n])*", re.M)
# Headers that are never a file of the user's, even in quotes.
_STANDARD_HEADERS = (
    r"[a-z_]+|c?(?:assert|ctype|errno|float|inttypes|limits|math|signal|stdarg|stdbool|stddef|"
    r"stdint|stdio|stdlib|string|time|unistd|sys/\w+|windows)\.h|cuda\w*\.h|device_\w+\.h|"
    r"vector_\w+\.h|math_\w+\.h|sm_\w+\.h|cu(?:blas|rand|fft|dnn|sparse|solver)\w*\.h"
)


# Headers of CUDA that declare names which kernels use and standard.cuh lacks.
_DEVICE_HEADERS = re.compile(
    r"cuda_(?:fp|bf)\d|cooperative_groups|cuda/|nv/|mma\.h|curand_|cub/|cuda_pipeline"
)
# Headers that a source may include for its host code -> what device code that needs them names.
_IF_USED = {
    r"cub/": r"\bcub\b",
    r"mma\.h": r"\bnvcuda\b|\bwmma\b",
    r"curand": r"\bcurand(?!_kernel)\w*",
    r"cuda_fp8": r"\b__nv_fp8|\bfp8",
    r"cuda_fp16": r"half|\b__h|\b__low2|\b__high2",
    r"cuda_bf16": r"bfloat",
}


def _standard(words: set[str], own: set[str]) -> str:
    """standard.cuh without the macros in `own`; "" if `words` name nothing of it."""
    text = (pathlib.Path(__file__).parent / "standard.cuh").read_text()
    language, _, library = text.partition("namespace std {")
    if "std" in words:
        language = text
    elif words.isdisjoint(declared_names(language)):
        return ""
    return _DEFINE.sub(lambda match: "" if match[1] in own else match[0], language)


def _only_used(source: str, ours: int) -> str:
    """The text without headers and macros that its code, from `ours` on, does not name."""
    plain = without_comments(INCLUDE.sub("", source))
    for header, word in _IF_USED.items():
        if not re.search(word, plain):
            include = re.compile(rf'^[ \t]*#[ \t]*include[ \t]*[<"]{header}.*', re.M)
            source = include.sub("", source)
    used = set(re.findall(r"\w+", _DEFINE.sub("", source[:ours]) + source[ours:]))
    pieces = []
    end = ours
    # From the last one up: a macro uses only macros above it.
    for macro in reversed(list(_DEFINE.finditer(source, 0, ours))):
        if macro[1] in used:
            used.update(re.findall(r"\w+", macro[0]))
        else:
            pieces.append(source[macro.end() : end])
            end = macro.start()
    pieces.append(source[:end])
    return "".join([*reversed(pieces), source[ours:]])


def whole_program(
    text: str,
    filename: str,
    defines: dict[str, str] | None = None,
    folders: tuple[str, ...] = (),
) -> tuple[str, LeftOut]:
    """(the compiled text, what is left out): common.cuh, then `text` with its headers.

    A header replaces its #include, one of kernels_cu only the first. Headers are searched in the
    folder of the including file, in kernels_cu, then in the working folder. Every part begins with
    a #line, so that messages have the line numbers of the files. The cache key is made from this
    text, so an edited header recompiles.

    Macros are defined after common.cuh, so that one named T does not change it, except those that
    it tests for (NORM).

    A text that is not of kernels_cu keeps only what its kernels need (host_code.py), preceded by
    standard.cuh.

    Args:
        filename: the text's name in messages; if it is a path, headers are searched beside it
        defines: macros
        folders: searched last for headers
    """
    root = kernel_root()
    is_own = filename.startswith("kernels_cu/")
    included = {root / "common.cuh"}
    missing: list[str] = []

    def find(header, name, folder):
        """The file that an #include "header" names, or None: then the compiler reports it."""
        ours = root / header if header == os.path.basename(header) else None
        if name.startswith("kernels_cu/"):
            return ours if ours and ours.is_file() else None
        beside = folder and pathlib.Path(folder, header)
        if beside and beside.is_file() and beside.resolve().parent != root.resolve():
            return beside.resolve()
        if ours and ours.is_file():
            return ours
        places = (pathlib.Path(place, header) for place in ("", *folders))
        return next((place.resolve() for place in places if place.is_file()), None)

    def expanded(text, name, folder=None, above=()):
        """The text with its headers in the place of their #includes."""
        if folder is None and os.path.isdir(os.path.dirname(name)):
            folder = os.path.dirname(os.path.abspath(name))
        # Comments are blank, all positions stay.
        plain = without_comments(text, strings=True)
        pieces = []
        position = 0
        for match in _INCLUDE.finditer(plain):
            path = find(match[1], name, folder)
            if path is None:
                continue
            content = ""
            header = path.read_text("utf-8", errors="replace")
            is_ours = path.parent == root
            if path not in above and not (path in included and (is_ours or _ONCE.search(header))):
                included.add(path)
                shown = f"kernels_cu/{path.name}" if is_ours else match[1]
                content = expanded(_ONCE.sub("", header), shown, path.parent, (*above, path))
                content = f"{line_directive(1, shown)}{content}\n"
            content += line_directive(text.count("\n", 0, match.end()) + 1, name)
            pieces += [text[position : match.start()], content]
            position = match.end()
        return "".join([*pieces, text[position:]])

    def without_host_headers(text):
        """Remove #includes of headers that neither compiler has or needs."""
        plain = without_comments(text, strings=True)
        # From the end, so that earlier positions stay valid.
        for match in reversed(list(INCLUDE.finditer(plain))):
            header = match[1]
            if _DEVICE_HEADERS.match(header) or any(
                os.path.isfile(os.path.join(folder, header)) for folder in folders
            ):
                continue
            if '"' in match[0] and not re.fullmatch(_STANDARD_HEADERS, header):
                # Else an #if leaves it out.
                if active_text(f"{text[: match.start()]}x", defines).endswith("x"):
                    missing.append(header)
            instead = " " * len(match[0])
            if re.match(r"cublas|cudnn", header):
                # These headers include the half types.
                line = line_number(text, match.start()) + 1
                instead = f"#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#line {line}"
            text = text[: match.start()] + instead + text[match.end() :]
        return text

    theirs = expanded(text, filename)
    theirs = f"{line_directive(1, filename)}{theirs if is_own else without_host_headers(theirs)}"
    common = (root / "common.cuh").read_text()
    tested = set(re.findall(r"\w+", " ".join(_CONDITION.findall(without_comments(common)))))
    macros = {name: f"#define {name} {value}" for name, value in sorted((defines or {}).items())}
    words = set(re.findall(r"\w+", " ".join([theirs, *macros.values()])))
    own = {match[1] for match in _DEFINE.finditer(theirs)} | macros.keys()
    standard = "" if is_own else _standard(words, own)
    parts = []
    if standard:
        parts.append(f"{line_directive(1, 'standard.cuh')}{standard}")
    has_headers = any(path.parent == root for path in included - {root / "common.cuh"})
    if is_own or has_headers or not words.isdisjoint(declared_names(common)):
        parts += [macro for name, macro in macros.items() if name in tested]
        parts.append(f"{line_directive(1, 'kernels_cu/common.cuh')}{common}")
        parts += [macro for name, macro in macros.items() if name not in tested]
    else:
        parts += macros.values()
    source = "\n".join([*parts, theirs])
    if is_own:
        return source, LeftOut()
    source, left_out = device_code(source, len(source) - len(theirs))
    source = _only_used(source, len(source) - len(theirs))
    check_possible(source, filename)
    return source, replace_fields(left_out, headers=tuple(dict.fromkeys(reversed(missing))))
