"""Where NVIDIA's wheels have their headers, and what curand_kernel.h needs beside its own."""

import os
import site
import sys
import sysconfig

# What curand_kernel.h asks of the C++ library of NVIDIA, or of the host.
_TRAITS = """
template <bool, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <class A, class B> struct is_same { static constexpr bool value = false; };
template <class A> struct is_same<A, A> { static constexpr bool value = true; };
"""
# Header -> text, for NVRTC where NVIDIA's own is not there.
CURAND_STUBS = {
    # Its macros are built in.
    "nv/target": "",
    "cuda/std/type_traits": f"#pragma once\nnamespace cuda {{ namespace std {{{_TRAITS}}} }}\n",
}
# Header -> text, for a host compiler, which takes the branches of the host: no PTX.
HOST_STUBS = {
    **dict.fromkeys(("math.h", "memory.h", "stdlib.h", "string.h"), ""),
    "cuda_runtime.h": "#pragma once\nenum libraryPropertyType {};\n"
    "typedef struct CUstream_st* cudaStream_t;\n",
    "type_traits": f"#pragma once\nnamespace std {{{_TRAITS}}}\n",
    "nv/target": """#pragma once
#define SIMT_ALL(...) { __VA_ARGS__ }
#define SIMT_NOTHING(...)
#define NV_IS_DEVICE(yes, no) no
#define NV_IS_HOST(yes, no) yes
#define NV_PROVIDES_SM_35(yes, no) no
#define NV_PROVIDES_SM_61(yes, no) no
#define NV_IF_ELSE_TARGET(condition, yes, no) { condition(yes, no) }
#define NV_IF_TARGET(condition, ...) condition(SIMT_ALL, SIMT_NOTHING)(__VA_ARGS__)
""",
}


def wheel_roots() -> list[str]:
    """The folders of installed packages that have wheels of NVIDIA's."""
    roots = dict.fromkeys(
        [
            sysconfig.get_paths()["purelib"],
            sysconfig.get_paths()["platlib"],
            *sys.path,
            *site.getsitepackages(),
            site.getusersitepackages(),
        ]
    )
    return [root for root in roots if root and os.path.isdir(os.path.join(root, "nvidia"))]


def folders_with(header: str, names: tuple[str, ...]) -> list[str]:
    """The folders that have a header of NVIDIA's: of wheels with these names, and of a toolkit."""
    folders = [
        os.path.join(root, "nvidia", name, "include") for root in wheel_roots() for name in names
    ]
    folders.append(os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include"))
    return [folder for folder in folders if os.path.isfile(os.path.join(folder, header))]


def curand_folder() -> str | None:
    """The folder that has curand_kernel.h; None without one."""
    return next(iter(folders_with("curand_kernel.h", ("curand", "cu13", "cu12"))), None)
