"""The megakernel without a GPU: every variant compiles for sm_90a, and its device code is what it should be."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from optional import counted, cutlass_dsl

from moe_fast import compiler, doctor
from moe_fast.kernel.shapes import KernelShape
from moe_ref import cli
from moe_ref.config import MoEConfig
from moe_ref.errors import BackendUnavailable, UsageError
from moe_ref.placement import Placement
from moe_ref.placement.names import save

cutlass_dsl()

PAIR = Placement.from_replicas([[0, 1]] * 32, 2)
PAPER = MoEConfig(2048, 2048, 32, 2, activation="relu", gated=False, dtype="bfloat16")

# name, config, ranks, scheduler, more: together every role, activation, dtype and scheduler, and the sizes users have
VARIANTS = {
    "qwen3": (MoEConfig(2048, 768, 128, 8, dtype="bfloat16"), 2, "spare_warps"),
    "paper": (MoEConfig(2048, 2048, 8, 2, activation="relu", gated=False, dtype="bfloat16"), 2, "os_block"),
    "gelu": (MoEConfig(1024, 512, 60, 4, activation="gelu", gated=False, dtype="float16"), 1, "tickets"),
    "sigmoid": (
        MoEConfig(512, 256, 64, 8, dtype="float16", scoring="sigmoid", selection_bias=True, routed_scaling=2.5),
        4,
        "spare_warps",
    ),
    "tiny": (MoEConfig(128, 64, 32, 4, dtype="bfloat16"), 1, "spare_warps"),
    "gpt_oss": (
        MoEConfig(
            2880, 2880, 32, 4, "clamped_swiglu", expert_bias=True, router_bias=True, interleaved=True,
            top_k_order="before_scores", renormalize=False, dtype="bfloat16",
        ), 1, "spare_warps",
    ),
    "qwen2": (
        MoEConfig(2048, 1408, 60, 4, renormalize=False, shared_intermediate=5632, shared_gate=True, dtype="bfloat16"),
        2, "spare_warps",
    ),
    "deepseek": (
        MoEConfig(
            1024, 512, 256, 8, scoring="sigmoid", selection_bias=True, num_groups=8, top_groups=4,
            group_score="top2_sum", shared_intermediate=512, dtype="bfloat16",
        ), 2, "os_block",
    ),
    "replicas": (PAPER, 2, "spare_warps", {"placement": PAIR}),
    "fixed": (PAPER.replace(layout="fixed", capacity_factor=1.25), 2, "os_block"),
    "tokens": (
        MoEConfig(
            2048, 768, 128, 8, shared_intermediate=512, shared_gate=True, dtype="bfloat16", wire_format="tokens"
        ), 4, "spare_warps",
    ),
    "biases": (
        MoEConfig(
            512, 256, 60, 6, "gelu", gated=False, expert_bias=True, num_groups=4, top_groups=2,
            shared_intermediate=320, dtype="float16",
        ), 1, "tickets",
    ),
    "tf32": (MoEConfig(2048, 768, 128, 8), 1, "spare_warps"),
    "pairs": (MoEConfig(2048, 768, 128, 8, dtype="bfloat16"), 2, "spare_warps", {"paired": True}),
    "pairs, paper": (PAPER, 1, "tickets", {"paired": True}),
    "paper, tickets": (PAPER, 2, "tickets"),
    "many columns": (MoEConfig(4096, 14336, 8, 2, dtype="bfloat16"), 1, "spare_warps"),
    "traced": (MoEConfig(2048, 768, 128, 8, dtype="bfloat16"), 2, "spare_warps", {"trace": True}),
    "tf32, everything": (
        MoEConfig(
            512, 256, 60, 6, "gelu", gated=False, expert_bias=True, router_bias=True, num_groups=4, top_groups=2,
            shared_intermediate=320, shared_gate=True,
        ), 1, "tickets",
    ),
}  # fmt: skip
FP32_ROUTER = ("deepseek",)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_variant_compiles_for_hopper(name, tmp_path):
    """wgmma and TMA are there, nothing spills, shared memory fits: without a GPU."""
    config, ranks, scheduler, *more = VARIANTS[name]
    more = more[0] if more else {"fp32_router": name in FP32_ROUTER}
    shape = KernelShape.from_config(config, ranks, scheduler, **more)
    path = compiler.compile_to_file(shape, tmp_path)
    found = compiler.inspect_file(path)
    assert found["stack_bytes"] == 0, found
    assert found["registers"] == 168, found
    assert found["shared_bytes"] <= 232448, found
    assert counted(found)["wgmma"] >= 8, found
    assert found["tma_loads"] >= 9, found
    assert found["tma_stores"] >= 2, found
    assert found["spills"] == 0, found


def test_a_compiled_variant_is_found_again(tmp_path, monkeypatch):
    """The second call compiles nothing; another shape has another file."""
    shape = KernelShape.from_config(VARIANTS["tiny"][0], 1, "tickets")
    first = compiler.compile_to_file(shape, tmp_path)
    monkeypatch.setattr(compiler, "compile_shape", lambda shape: pytest.fail("compiled again"))
    assert compiler.compile_to_file(shape, tmp_path) == first
    other = KernelShape.from_config(VARIANTS["tiny"][0], 2, "tickets")
    assert compiler.object_path(other, tmp_path) != first


@pytest.mark.slow
def test_a_kernel_carries_the_version_of_the_nvshmem_it_was_built_with(tmp_path, monkeypatch):
    """Read from its symbols, in a cache as well; the doctor holds it against the host library."""
    pytest.importorskip("nvshmem", reason="nvshmem4py (extra [fused]) is not installed")
    import nvshmem.core as nvshmem

    monkeypatch.setenv("MOE_REF_CACHE", str(tmp_path))
    shape = KernelShape.from_config(VARIANTS["tiny"][0], 2, "tickets", transport="put_signal")
    path = compiler.compile_to_file(shape)
    data, installed = path.read_bytes(), compiler.nvshmem_installed()
    assert len(installed) == 3
    assert compiler.nvshmem_inside(compiler.cubin_of(data)) == compiler.nvshmem_of(shape) == installed
    assert compiler.nvshmem_of(replace(shape, transport="stores")) is None
    monkeypatch.setattr(nvshmem, "get_version", lambda: ".".join(map(str, installed)))
    assert doctor._device_code().state == "ok"
    # built on a machine with a later NVSHMEM than this one has
    before = (installed[0], installed[1] - 1, 0)
    monkeypatch.setattr(nvshmem, "get_version", lambda: ".".join(map(str, before)))
    monkeypatch.setattr(compiler, "nvshmem_installed", lambda: before)
    check = doctor._device_code()
    assert check.state == "optional"
    assert f"{path.name} is of NVSHMEM {'.'.join(map(str, installed))}" in check.found
    assert "LD_PRELOAD" in check.remedy
    path.write_bytes(data[:10])
    assert path.name in doctor._device_code().found


def broken(whole: bytes) -> dict[str, bytes]:
    """A compiled kernel after what can happen to it on the way."""
    middle = len(whole) // 2
    return {
        "empty": b"",
        "no object": b"no object file" * 10,
        "broke off": whole[:70_000],
        "the end is missing": whole[:-1],
        "without its checksum": whole[: -32 - len(compiler.SEAL)],
        "zeros in the middle": whole[:middle] + bytes(4096) + whole[middle + 4096 :],
        "one bit": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "more behind it": whole + bytes(512),
    }


@pytest.mark.slow
def test_a_file_that_lost_something_is_compiled_anew(tmp_path, monkeypatch):
    """And what is written is for all users that the umask lets read it."""
    shape = KernelShape.from_config(VARIANTS["tiny"][0], 1, "tickets")
    path = compiler.compile_to_file(shape, tmp_path)
    whole = path.read_bytes()
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    # what reads objects doesn't mind the checksum behind them
    assert getattr(compiler.import_cutlass().runtime.load_module(str(path)), compiler.SYMBOL)
    assert compiler.resources(compiler.cubin_of(whole))["registers"] > 100
    again = SimpleNamespace(dump_to_object=lambda symbol: whole[: -32 - len(compiler.SEAL)])
    monkeypatch.setattr(compiler, "compile_shape", lambda shape: again)
    assert compiler.is_whole(path)
    for how, data in broken(whole).items():
        path.write_bytes(data)
        assert not compiler.is_whole(path), how
        assert compiler.compile_to_file(shape, tmp_path).read_bytes() == whole
    assert not list(tmp_path.glob("*.part"))


def test_a_folder_that_is_none_is_named(tmp_path, monkeypatch):
    """Nothing is compiled that can't be kept, and no error of the system comes out as it is."""
    shape = KernelShape.from_config(VARIANTS["tiny"][0], 1, "tickets")
    monkeypatch.setattr(compiler, "compile_shape", lambda shape: pytest.fail("compiled"))
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(UsageError, match=f"no kernels can be kept in {folder}"):
            compiler.compile_to_file(shape, folder)
    compiler.object_path(shape, tmp_path).mkdir()
    with pytest.raises(UsageError, match="can't be read: Is a directory"):
        compiler.compile_to_file(shape, tmp_path)


def cache_check(monkeypatch, folder):
    monkeypatch.setenv("MOE_REF_CACHE", str(folder))
    return doctor._cache()


def test_the_doctor_tries_the_folder_of_compiled_kernels(tmp_path, monkeypatch):
    """What it calls ok can be read and written; it leaves nothing behind."""
    check = cache_check(monkeypatch, tmp_path)
    assert (check.state, check.found.split(";")[0]) == ("ok", f"0 in {tmp_path}")
    check = cache_check(monkeypatch, tmp_path / "not" / "yet")
    assert check.state == "ok"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for folder, why in (
        (tmp_path / "file", "is a file, or lies below one"),
        (tmp_path / "file" / "below", "is a file, or lies below one"),
        (tmp_path / "link", "is a link that leads nowhere"),
        (Path("/proc/nowhere"), "none can be kept in /proc/nowhere"),
    ):
        check = cache_check(monkeypatch, folder)
        assert (check.state, bool(check.remedy)) == ("optional", True)
        assert why in check.found
        assert str(folder) in check.found


def test_the_doctor_names_kernels_that_lost_something(tmp_path, monkeypatch):
    (tmp_path / "a.o").write_bytes(compiler.sealed(b"\x7fELF" + bytes(100)))
    assert cache_check(monkeypatch, tmp_path).state == "ok"
    (tmp_path / "b.o").write_bytes(b"\x7fELF" + bytes(100))
    check = cache_check(monkeypatch, tmp_path)
    assert check.state == "optional"
    assert "2 in" in check.found
    assert "1 broken or older: b.o" in check.found


def test_the_doctor_names_a_folder_that_is_not_ours(tmp_path, monkeypatch):
    """Whoever runs the tests may have all rights, so the system's answers are played."""

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.o").write_bytes(compiler.sealed(b"\x7fELF" + bytes(100)))
    with monkeypatch.context() as m:
        m.setattr(Path, "iterdir", refuse)
        assert "can't be read: Permission denied" in cache_check(m, tmp_path).found
    with monkeypatch.context() as m:
        m.setattr(Path, "read_bytes", refuse)
        assert "a.o can't be read: Permission denied" in cache_check(m, tmp_path).found
    with monkeypatch.context() as m:
        m.setattr(doctor.tempfile, "TemporaryDirectory", refuse)
        check = cache_check(m, tmp_path)
        assert check.found == f"1 in {tmp_path}, and none can be added: Permission denied"
        assert check.state == "optional"


def test_without_a_disassembler_the_package_is_named(tmp_path, monkeypatch, capfd):
    """Nothing was counted, which is not the same as none."""
    path = tmp_path / "k.o"
    monkeypatch.setattr(compiler, "compile_all", lambda shapes, out, jobs: iter([path] * len(shapes)))
    found = {"registers": 168, "stack_bytes": 0, "shared_bytes": 1, "wgmma": None, "tma_loads": None}
    monkeypatch.setattr(compiler, "inspect_file", lambda path: found)
    (tmp_path / "layer.json").write_text(json.dumps({"hidden": 128, "intermediate": 64, "experts": 4, "top_k": 1,
                                                     "dtype": "float16"}))  # fmt: skip
    arguments = ["compile", "--config", str(tmp_path / "layer.json"), "--ranks", "1"]
    with pytest.raises(SystemExit):
        cli.main(arguments)
    out, err = capfd.readouterr()
    assert "wgmma unknown" in out
    assert "None" not in out
    assert "pip install nvidia-cuda-nvdisasm" in err
    found["wgmma"] = 24
    with pytest.raises(SystemExit):
        cli.main(arguments)
    out, err = capfd.readouterr()
    assert "24 wgmma" in out
    assert "nvdisasm" not in err
    monkeypatch.setattr(compiler, "find_nvdisasm", lambda: None)
    assert "pip install nvidia-cuda-nvdisasm" in cache_check(monkeypatch, tmp_path).found


def test_missing_device_code_is_named_with_the_remedy(tmp_path, monkeypatch):
    """Before any compilation, and by the doctor."""
    init_fini = pytest.importorskip("nvshmem.core.init_fini", reason="nvshmem4py (extra [fused]) is not installed")

    def missing(**_):
        raise RuntimeError("Tried: libnvshmem_device_sm_90.bc")

    monkeypatch.setattr(init_fini, "find_device_bitcode_library", missing)
    monkeypatch.setenv("MOE_REF_CACHE", str(tmp_path))
    shape = KernelShape.from_config(VARIANTS["tiny"][0], 2, "tickets", transport="put_signal")
    with pytest.raises(BackendUnavailable, match=r"libnvshmem_device_sm_90.*pip install nvidia-nvshmem-cu13.*CACHE"):
        compiler.compile_to_file(shape)
    assert not list(tmp_path.iterdir())
    assert "libnvshmem_device_sm_90" in doctor._device_code().found


def test_compile_command(tmp_path, capsys):
    """moe-ref compile --config FILE --json: one object on stdout, naming each kernel's resources."""
    from moe_ref.cli import main

    config = tmp_path / "layer.json"
    config.write_text(json.dumps({"hidden": 128, "intermediate": 64, "experts": 4, "top_k": 1, "dtype": "float16"}))
    arguments = ["compile", "--config", str(config), "--ranks", "1", "--out", str(tmp_path), "--json"]
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code in (0, None)
    result = json.loads(capsys.readouterr().out)
    (kernel,) = result["kernels"]
    assert {"name", "registers", "stack_bytes", "shared_bytes", "wgmma", "tma_loads", "tma_stores"} <= set(kernel)
    assert (tmp_path / kernel["file"]).stat().st_size > 50_000


@pytest.mark.slow
def test_compile_command_for_replicas_and_puts(tmp_path, capsys):
    """Two processes; the files are those that a layer with such a placement looks for."""
    pytest.importorskip("nvshmem", reason="nvshmem4py (extra [fused]) is not installed")
    from moe_ref.cli import main

    values = {"hidden": 128, "intermediate": 64, "experts": 4, "top_k": 1, "dtype": "float16"}
    (tmp_path / "layer.json").write_text(json.dumps(values))
    arguments = ["compile", "--config", str(tmp_path / "layer.json"), "--ranks", "2", "--out", str(tmp_path), "--json"]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--placement", "symmetric", "--transport", "stores,put_signal", "--jobs", "2"])
    assert end.value.code in (0, None)
    config, placement = MoEConfig(**values), Placement.from_replicas([[0, 1]] * 4, 2)
    wanted = [
        KernelShape.from_config(config, 2, "spare_warps", placement=placement, transport=way)
        for way in ("stores", "put_signal")
    ]
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert [tmp_path / k["file"] for k in kernels] == [compiler.object_path(shape, tmp_path) for shape in wanted]
    assert all(k["wgmma"] > 0 and (tmp_path / k["file"]).exists() for k in kernels)


@pytest.mark.slow
def test_a_killed_compiler_is_one_error(tmp_path, monkeypatch):
    """Not a wait for a result that never comes."""
    shapes = [KernelShape.from_config(VARIANTS["tiny"][0], 1, name) for name in ("tickets", "os_block")]
    killed = threading.Event()

    def kill():
        while not killed.is_set():
            for child in multiprocessing.active_children():
                child.kill()
                killed.set()
            time.sleep(0.05)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(UsageError, match="killed, most likely for want of memory"):
            list(compiler.compile_all(shapes, tmp_path, jobs=2))
    finally:
        killed.set()
        killer.join()


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--ranks", "x"], "--ranks has 'x'"),
        (["--ranks", "1,0"], "--ranks has '0'"),
        (["--jobs", "0"], "--jobs is 0"),
        (["--transport", "pigeons"], "--transport has 'pigeons', expected some of stores, put_signal"),
        (["--scheduler", "tickets,"], "--scheduler has ''"),
        (["--out", "small"], "--out small is a file"),
        (["--replicas", "3"], "add --placement symmetric"),
        (["--placement", "other", "--replicas", "3"], "add --placement symmetric"),
        (["--placement", ""], "--placement '' is no file"),
        (["--placement", "nowhere.json"], "--placement 'nowhere.json' is no file"),
        (["--config", "small", "--ranks", "2", "--placement", "other"], "8 experts on 4 ranks, the layer has 4 and"),
        (["--config", "small", "--ranks", "2", "--placement", "symmetric", "--replicas", "9"], "replicas"),
        (["--config", "small", "--ranks", "2", "--placement", "symmetric", "--replicas", "0"], "replicas is 0"),
        (["--config", "/nowhere/c.json"], "no file /nowhere/c.json"),
        (["--config", "empty"], "holds an empty list"),
        (["--config", "numbers"], "holds a int"),
    ],
)
def test_wrong_use_is_one_line(arguments, wrong, tmp_path, monkeypatch, capfd):
    """Before anything is compiled."""
    (tmp_path / "empty").write_text("[]")
    (tmp_path / "small").write_text('{"hidden": 128, "intermediate": 64, "experts": 4, "top_k": 1, "dtype": "float16"}')
    save(Placement.contiguous(8, 4), tmp_path / "other")
    (tmp_path / "numbers").write_text("[1, 2]")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["compile", *arguments])
    out, err = capfd.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    assert wrong in err


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [([], [1, 2]), (["--placement", "symmetric"], [2]), (["--placement", "other"], [4]), (["--ranks", "3"], [3])],
)
def test_without_ranks_they_are_those_of_the_placement(arguments, ranks, tmp_path, monkeypatch, capsys):
    """A rank alone holds no two replicas of an expert, and a file is for one number of ranks."""
    (tmp_path / "small").write_text('{"hidden": 128, "intermediate": 64, "experts": 8, "top_k": 1, "dtype": "float16"}')
    save(Placement.contiguous(8, 4), tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    asked = []

    def compile_all(shapes, out, jobs):
        asked.extend(shape.ranks for shape in shapes)
        return [tmp_path / "kernel.o" for _ in shapes]

    monkeypatch.setattr(compiler, "compile_all", compile_all)
    monkeypatch.setattr(compiler, "inspect_file", lambda path: {"wgmma": 1})
    with pytest.raises(SystemExit) as stopped:
        cli.main(["compile", "--config", "small", *arguments, "--json"])
    assert stopped.value.code in (0, None)
    assert asked == ranks
    assert len(json.loads(capsys.readouterr().out)["kernels"]) == len(ranks)


ORPHANS = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from moe_fast.compiler import _begin_worker
if __name__ == "__main__":
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_begin_worker) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 600).result()
"""


def test_processes_that_compile_end_with_a_parent_that_was_killed(tmp_path):
    (tmp_path / "orphans.py").write_text(ORPHANS)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "orphans.py")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for _ in range(100):
        if not is_running(worker):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlived its parent by 10 s")


def is_running(process: int) -> bool:
    """Whether a process exists and is no zombie that nobody has collected."""
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
