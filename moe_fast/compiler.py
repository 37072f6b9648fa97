"""Compile a kernel variant, keep it on disk, load it again; also ahead of time, on a machine without a GPU.

A compiled variant is one object file (host launch code and cubin together), stored under

    $MOE_REF_CACHE or ~/.cache/moe-ref/kernels / <shape>-<key>.o

where the key is a hash of the shape, the kernel's sources and the DSL's version: a file that is found is right. What
`moe-ref compile` writes on a build machine is what a GPU machine loads instead of compiling. Behind the object stands
its checksum, in the same file, so that it goes wherever the file is carried: a kernel that lost bytes on the way is
compiled anew; the driver would run what is left of it.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import repeat
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from moe_fast.kernel.constants import LINE_BYTES, STAGES, TILE_COLUMNS, TILE_ROWS
from moe_fast.kernel.shapes import KernelShape
from moe_ref.errors import BackendUnavailable, UsageError

ARCH = "sm_90a"
SYMBOL = "moe_megakernel"
NVSHMEM_VERSION = "nvshmemi_device_lib_version_d"
"""The constant of NVSHMEM's device library that holds its version."""
SEAL = b"moe_ref sha256: "
"""Before the checksum, 32 bytes, at the end of an object file; what reads objects goes by their headers, no further."""
NVDISASM_PACKAGE = "nvidia-cuda-nvdisasm"
"""Where there is no CUDA toolkit: a package with the disassembler."""
SHARED_BYTES = 3072 + STAGES * (TILE_ROWS + TILE_COLUMNS) * LINE_BYTES + 2 * TILE_ROWS * LINE_BYTES
"""Most shared memory of a block: barriers, the task word and biases, pipeline stages, epilogue buffers."""


def check_compiler() -> None:
    """Raise BackendUnavailable where the CuTe DSL is not installed."""
    try:
        version("nvidia-cutlass-dsl")
    except PackageNotFoundError:
        raise BackendUnavailable(
            "compiling kernels needs the CuTe DSL, which is not installed; pip install -e '.[fused]' in the checkout"
        ) from None


def import_cutlass() -> Any:
    """The CuTe DSL, set to compile for Hopper whatever this machine has.

    Raises:
        BackendUnavailable: it isn't installed.
    """
    os.environ.setdefault("CUTE_DSL_ARCH", ARCH)
    try:
        import cutlass.cute
        from cutlass.cutlass_dsl import CuTeDSL
    except ImportError as error:
        raise BackendUnavailable(
            f"the CuTe DSL does not import ({error}); pip install -e '.[fused]' "
            "(nvidia-cutlass-dsl, not nvidia-cutlass)"
        ) from error
    # somebody may have imported it before us, without the variable
    CuTeDSL._get_dsl().envar.arch = ARCH
    return cutlass.cute


def cache_folder() -> Path:
    """Where compiled kernels live: $MOE_REF_CACHE, else ~/.cache/moe-ref/kernels."""
    return Path(os.environ.get("MOE_REF_CACHE") or Path.home() / ".cache" / "moe-ref" / "kernels")


@cache
def source_digest() -> str:
    """Hash of everything that decides the code of a kernel, apart from its shape."""
    import moe_ref.layout
    import moe_ref.runtime.encoding

    digest = hashlib.sha256(version("nvidia-cutlass-dsl").encode())
    files = [*sorted((Path(__file__).parent / "kernel").glob("*.py"))]
    files += [Path(moe_ref.layout.__file__), Path(moe_ref.runtime.encoding.__file__)]
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def object_path(shape: KernelShape, folder: Path | None = None) -> Path:
    """File of a compiled variant."""
    key = hashlib.sha256((source_digest() + repr(shape)).encode()).hexdigest()[:16]
    return (folder or cache_folder()) / f"{shape.name}-{key}.o"


def compile_shape(shape: KernelShape) -> Any:
    """Compile now; returns the DSL's compiled function (needs no GPU).

    Raises:
        BackendUnavailable: the DSL isn't installed, or NVSHMEM's device code, for a kernel that calls it.
    """
    cute = import_cutlass()
    if shape.put:
        device_library()  # in the middle of a compilation its absence would be an error of the compiler
    import cuda.bindings.driver as cuda
    from cutlass import Int32, Int64

    from moe_fast.kernel.megakernel import MegaKernel
    from moe_fast.kernel.signals import Args, Operands

    fakes: list[Any] = [Int64(1 << 20) if "Int64" in str(kind) else Int32(1) for kind in Args.__annotations__.values()]
    address = Int64(1 << 20)
    return cute.compile(
        MegaKernel(shape),
        Args(*fakes),
        Operands(*(address,) * len(Operands._fields)),
        Int32(1),
        Int32(1),
        cuda.CUstream(0),
    )


def compile_to_file(shape: KernelShape, folder: Path | None = None) -> Path:
    """Compile unless the file is there, and whole; returns it.

    Raises:
        UsageError: nothing can be written there.
    """
    path = object_path(shape, folder)
    if not is_whole(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"no kernels can be kept in {path.parent}: {error.strerror}; name another folder"
            ) from error
        data = sealed(compile_shape(shape).dump_to_object(SYMBOL))
        # written beside and moved into place: another rank may be looking for the same file
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except OSError as error:
            raise UsageError(f"{path} can't be written: {error.strerror}; name another folder") from error
        finally:
            part.unlink(missing_ok=True)
    return path


def is_whole(path: Path) -> bool:
    """Whether an object file is there with all its bytes as they were written, which it is not after a copy that broke
    off, nor with a hole in it.

    Raises:
        UsageError: it is there, but can't be read.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UsageError(
            f"{path} can't be read: {error.strerror}; see to that, or name another folder (MOE_REF_CACHE)"
        ) from error
    end = len(data) - hashlib.sha256().digest_size - len(SEAL)
    return end > 0 and sealed(data[:end]) == data


def sealed(data: bytes) -> bytes:
    """An object with its checksum behind it."""
    return data + SEAL + hashlib.sha256(data).digest()


def compile_all(shapes: Sequence[KernelShape], folder: Path | None = None, jobs: int = 1) -> Iterator[Path]:
    """Compile several variants with `jobs` processes; their files in the order of `shapes`, each once it is there.

    Raises:
        BackendUnavailable: see `compile_shape`; what isn't compiled by then is given up.
        UsageError: one of the processes was killed.
    """
    if jobs == 1 or len(shapes) < 2:
        yield from (compile_to_file(shape, folder) for shape in shapes)
        return
    # fresh processes: a fork would share the DSL's state, and whatever CUDA has started
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(shapes)), fresh, initializer=_begin_worker) as pool:
        try:
            yield from pool.map(compile_to_file, shapes, repeat(folder))
        except BrokenProcessPool as error:
            raise UsageError(
                f"one of the {jobs} processes that compile was killed, most likely for want of memory; "
                "lower --jobs and start again: what is compiled already is kept"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker() -> None:
    """A process that compiles: Ctrl-C ends it at once and without a word, what is said then, its parent says; and it
    doesn't outlive a parent that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


@cache
def load(shape: KernelShape, folder: Path | None = None) -> Any:
    """The callable of a variant, from disk if it is there, else compiled and written there first.

    Set MOE_REF_NO_CACHE=1 to compile in this process and touch no file.
    """
    cute = import_cutlass()
    if os.environ.get("MOE_REF_NO_CACHE") == "1":
        return compile_shape(shape)
    path = compile_to_file(shape, folder)
    module = cute.runtime.load_module(str(path))
    return getattr(module, SYMBOL)


# --- what is in a compiled kernel ---------------------------------------------------------------------------------


def cubin_of(data: bytes) -> bytes:
    """The device code inside an object file (or the bytes themselves if they are device code)."""
    at = data.find(b"\x7fELF")
    while at >= 0:
        if int.from_bytes(data[at + 18 : at + 20], "little") == 190:  # EM_CUDA
            return data[at:]
        at = data.find(b"\x7fELF", at + 4)
    raise ValueError("no device code (ELF for EM_CUDA) in this file")


def _sections(cubin: bytes) -> list[tuple[str, int, bytes]]:
    """(name, index of the section that it links to, content) of every section of an ELF file."""
    (offset,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + i * size) for i in range(count)]
    content = [cubin[header[4] : header[4] + header[5]] for header in headers]
    return [(_text(content[names_at], h[0]), h[6], c) for h, c in zip(headers, content, strict=True)]


def _text(table: bytes, at: int) -> str:
    """A string of an ELF string table."""
    return table[at : table.index(b"\0", at)].decode()


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack frame of the kernel, read from the cubin's ELF sections."""
    found = {"registers": 0, "stack_bytes": 0}
    for name, _, info in _sections(cubin):
        if name != ".nv.info":
            continue
        at = 0
        while at + 4 <= len(info):
            kind, attribute, length = struct.unpack_from("<BBH", info, at)
            if kind != 4:
                at += 4
                continue
            value = struct.unpack_from(f"<{length // 4}I", info, at + 4)
            if attribute == 0x2F:  # EIATTR_REGCOUNT
                found["registers"] = max(found["registers"], value[1])
            elif attribute == 0x11:  # EIATTR_FRAME_SIZE
                found["stack_bytes"] = max(found["stack_bytes"], value[1])
            at += 4 + length
    return found


def nvshmem_inside(cubin: bytes) -> tuple[int, ...] | None:
    """(major, minor, patch) of the NVSHMEM whose device code is in a kernel; None if it has none.

    NVSHMEM's device library carries its version as a constant of three words; it is read from where the cubin's symbol
    table says that it lies.
    """
    sections = _sections(cubin)
    for name, linked, symbols in sections:
        if name != ".symtab":
            continue
        for entry in range(0, len(symbols), 24):
            label, _, _, section, value, size = struct.unpack_from("<IBBHQQ", symbols, entry)
            if _text(sections[linked][2], label) == NVSHMEM_VERSION and size == 12:
                return struct.unpack_from("<3i", sections[section][2], value)
    return None


def device_library() -> Path:
    """NVSHMEM's device code for Hopper, which kernels that put with a signal are linked with.

    Raises:
        BackendUnavailable: it isn't installed.
    """
    try:
        from nvshmem.core.init_fini import find_device_bitcode_library

        return Path(find_device_bitcode_library(arch=90))
    except Exception as error:  # nvshmem4py's loader raises types of its own
        raise BackendUnavailable(
            f'NVSHMEM\'s device code is not found ({error}), and kernels with transport="put_signal" are linked with '
            "it: pip install nvidia-nvshmem-cu13, or compile them on a machine that has it and bring its kernel cache "
            "along (MOE_REF_CACHE)"
        ) from error


def nvshmem_installed() -> tuple[int, ...]:
    """(major, minor, patch) of the NVSHMEM whose device code a kernel that is compiled now is linked with.

    Raises:
        BackendUnavailable: there is none, or its headers don't say.
    """
    header = device_library().parents[1] / "include" / "non_abi" / "nvshmem_version.h"
    try:
        text = header.read_text()
    except OSError as error:
        raise BackendUnavailable(f"{header} can't be read ({error}); install nvidia-nvshmem-cu13 anew") from error
    parts = [re.search(rf"NVSHMEM_VENDOR_{part}_VERSION +(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    if not all(parts):
        raise BackendUnavailable(f"{header} names no version of NVSHMEM; install nvidia-nvshmem-cu13 anew")
    return tuple(int(part[1]) for part in parts if part)


def nvshmem_of(shape: KernelShape) -> tuple[int, ...] | None:
    """`nvshmem_inside` of the variant that `load` returned; None if it calls nothing of NVSHMEM."""
    if not shape.put:
        return None
    if os.environ.get("MOE_REF_NO_CACHE") == "1":
        return nvshmem_installed()
    return nvshmem_inside(cubin_of(object_path(shape).read_bytes()))


def find_nvdisasm() -> str | None:
    """NVIDIA's disassembler: on the PATH, or from the package nvidia-cuda-nvdisasm."""
    on_path = shutil.which("nvdisasm")
    if on_path:
        return on_path
    for folder in sys.path:
        for candidate in sorted(Path(folder).glob("nvidia/*/bin/nvdisasm")) if folder else []:
            return str(candidate)
    return None


def instructions(cubin: bytes) -> dict[str, int | None]:
    """How many wgmma, TMA and spill instructions the kernel has; None without a disassembler."""
    tool = find_nvdisasm()
    if tool is None:
        return dict.fromkeys(("wgmma", "tma_loads", "tma_stores", "spills"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    names = {
        "wgmma": r"\bHGMMA\b",
        "tma_loads": r"\bUTMALDG\b",
        "tma_stores": r"\bUTMASTG\b",
        "spills": r"\b(LDL|STL)\b",
    }
    return {name: len(re.findall(pattern, text)) for name, pattern in names.items()}


def inspect_file(path: Path) -> dict[str, int | None]:
    """registers, stack_bytes, shared_bytes, wgmma, tma_loads, tma_stores, spills of a compiled variant."""
    cubin = cubin_of(path.read_bytes())
    return {**resources(cubin), "shared_bytes": SHARED_BYTES, **instructions(cubin)}
