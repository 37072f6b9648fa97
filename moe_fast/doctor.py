"""The GPU part of `moe-ref doctor`: what the fused backend needs, found or missing, with the remedy."""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from moe_fast import compiler
from moe_fast.blocks import LEAST_BLOCKS
from moe_fast.engine_choice import DEFAULT_SCHEDULER
from moe_fast.heap import MINIMUM_NVSHMEM, check_version, device_problem
from moe_ref.doctor import Check
from moe_ref.errors import BackendUnavailable, UsageError

WANTED = (
    ("nvidia-cutlass-dsl", "the CuTe DSL that the kernel is written in"),
    ("nvshmem4py-cu13", "symmetric memory of several ranks"),
    ("nvidia-nvshmem-cu13", "NVSHMEM's host library"),
)


def gpu_checks() -> list[Check]:
    """Packages, NVSHMEM's versions, GPUs and whether they reach each other, the kernel cache."""
    return [*_packages(), _nvshmem(), _device_code(), _gpus(), _ranks_on_one(), _peers(), _cache()]


def _packages() -> list[Check]:
    out = []
    for name, why in WANTED:
        try:
            out.append(Check(name, "ok", version(name)))
        except PackageNotFoundError:
            out.append(Check(name, "optional", f"not installed: {why}", "pip install -e '.[fused]'"))
    return out


def _nvshmem() -> Check:
    name = "NVSHMEM host library"
    try:
        import nvshmem.core as nvshmem

        found = nvshmem.get_version()
        check_version(found)
    except ImportError as error:
        return Check(name, "optional", f"nvshmem4py does not import ({error})", "pip install -e '.[fused]'")
    except BackendUnavailable as error:
        return Check(name, "optional", str(error), "preload the newer libnvshmem_host.so.3 (LD_PRELOAD)")
    except Exception as error:  # its loader raises types of its own
        remedy = "check that libnvshmem_host.so.3 is found (LD_LIBRARY_PATH)"
        return Check(name, "optional", f"{type(error).__name__}: {error}", remedy)
    return Check(name, "ok", f"{found.libnvshmem_version} (need {'.'.join(map(str, MINIMUM_NVSHMEM))})")


def _device_code() -> Check:
    """NVSHMEM's device code, as installed and in the kernels that lie in the cache, against the host library."""
    name = "NVSHMEM device code"
    kernels = sorted(compiler.cache_folder().glob("*-put_signal-*.o"))
    try:
        import nvshmem.core as nvshmem

        host, installed = nvshmem.get_version(), compiler.nvshmem_installed()
        problem = device_problem(host, installed, "the installed device code")
        for path in kernels:
            inside = compiler.nvshmem_inside(compiler.cubin_of(path.read_bytes()))
            problem = problem or device_problem(host, inside, f"the device code in {path.name}")
    except ImportError as error:
        return Check(name, "optional", f"nvshmem4py does not import ({error})", "pip install -e '.[fused]'")
    except BackendUnavailable as error:
        remedy = 'pip install nvidia-nvshmem-cu13; until then several ranks need mapped peers (transport "stores")'
        return Check(name, "optional", str(error), remedy)
    except OSError as error:
        return Check(name, "optional", f"{path.name}: {error.strerror}", "see the compiled kernels")
    except ValueError as error:
        return Check(name, "optional", f"{path.name}: {error}", "delete the file; it is compiled again")
    except Exception as error:  # its loader raises types of its own
        return Check(name, "optional", f"{type(error).__name__}: {error}", "see the host library")
    if problem:
        return Check(name, "optional", problem, "preload the newer libnvshmem_host.so.3 (LD_PRELOAD)")
    counted = f", {len(kernels)} compiled kernel{'s' * (len(kernels) != 1)} as well" if kernels else ""
    return Check(name, "ok", f"{'.'.join(map(str, installed))} fits the host library{counted}")


def _gpus() -> Check:
    if not torch.cuda.is_available():
        return Check("GPUs for the megakernel", "optional", "none", "run it on an H100 or H200")
    fit, other = [], []
    for i in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(i)
        (fit if capability == (9, 0) else other).append(
            f"{torch.cuda.get_device_name(i)} {capability[0]}.{capability[1]}"
        )
    if not fit:
        remedy = "the megakernel uses wgmma and TMA: compute capability 9.0 (H100, H200)"
        return Check("GPUs for the megakernel", "optional", "; ".join(other), remedy)
    return Check("GPUs for the megakernel", "ok", f"{len(fit)} x {fit[0]}")


def _ranks_on_one() -> Check:
    """How many ranks one GPU can hold: each needs blocks of its own, a block a whole SM."""
    name, least = "several ranks on one GPU", LEAST_BLOCKS[DEFAULT_SCHEDULER]
    sizes = [
        torch.cuda.get_device_properties(i).multi_processor_count
        for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        if torch.cuda.get_device_capability(i) == (9, 0)
    ]
    if not sizes:
        return Check(name, "optional", "no GPU for the megakernel", "run it on an H100 or H200")
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        found = f"CUDA_LAUNCH_BLOCKING={os.environ['CUDA_LAUNCH_BLOCKING']}: launches wait for their kernels"
        return Check(name, "optional", found, "unset it: the ranks' kernels wait for each other")
    return Check(name, "ok", f"up to {min(sizes) // least} in a simulated world (times say nothing)")


def _peers() -> Check:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        remedy = (
            "one rank needs no peer, nor do ranks simulated on one GPU (--ranks N without torchrun); for a GPU each "
            "take a host with two or more H100 or H200, linked by NVLink"
        )
        return Check("peer access", "optional", f"{count} GPU{'s' * (count != 1)}: nothing to reach", remedy)
    missing = [
        f"{a}->{b}"
        for a in range(count)
        for b in range(count)
        if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if missing:
        remedy = "ranks must reach each other's memory: use GPUs linked by NVLink, or check PCIe ACS and IOMMU settings"
        return Check("peer access", "optional", f"missing: {', '.join(missing)}", remedy)
    multicast = "off" if os.environ.get("NVSHMEM_DISABLE_NVLS") == "1" else "not switched off (set by the backend)"
    return Check("peer access", "ok", f"all pairs of {count}; NVLink multicast {multicast}")


def _cache() -> Check:
    """Whether kernels can be read from their folder and kept there, by doing it."""
    name, folder = "compiled kernels", compiler.cache_folder()
    remedy = "name a folder that can be written (MOE_REF_CACHE), or see to its permissions"
    try:
        kernels = sorted(path for path in folder.iterdir() if path.suffix == ".o")
        broken = [path.name for path in kernels if not compiler.is_whole(path)]
        tried = folder
    except FileNotFoundError:
        # made when the first kernel is compiled, wherever there is something to make it in
        kernels, broken = [], []
        tried = next(parent for parent in folder.absolute().parents if os.path.exists(parent))
        if folder.is_symlink():
            return Check(name, "optional", f"{folder} is a link that leads nowhere", remedy)
    except NotADirectoryError:
        return Check(name, "optional", f"{folder} is a file, or lies below one", remedy)
    except (OSError, UsageError) as error:
        why = str(error) if isinstance(error, UsageError) else f"{folder} can't be read: {error.strerror}"
        return Check(name, "optional", why, remedy)
    if problem := _cannot_write(tried):
        what = f"{len(kernels)} in {folder}, and none can be added" if kernels else f"none can be kept in {folder}"
        return Check(name, "optional", f"{what}: {problem}", remedy)
    tool = compiler.find_nvdisasm()
    note = "" if tool else f"; no nvdisasm (pip install {compiler.NVDISASM_PACKAGE}): instructions can't be counted"
    if broken:
        found = f"{len(kernels)} in {folder}, of these {len(broken)} broken or older: {broken[0]}"
        return Check(name, "optional", found + note, "nothing to do: they are compiled anew when they are needed")
    return Check(name, "ok", f"{len(kernels)} in {folder}{note}")


def _cannot_write(folder: Path) -> str | None:
    """Why nothing can be made in a folder; None if it can."""
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)
