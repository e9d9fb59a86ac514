"""libffpa.so through ctypes, the binding's file, and what `import ffpa` does with and without torch."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ffpa
from ffpa import _native

ROOT = Path(__file__).parents[2]
HEADER = (ROOT / "include/ffpa/ffpa.h").read_text()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


# -------------------------------------------------------------------------------------------------------- the C mirror


def fields_in_header(struct: str) -> list[str]:
    body = re.search(rf"typedef struct {struct} {{(.*?)}} {struct};", HEADER, re.DOTALL)
    assert body is not None
    text = re.sub(r"/\*.*?\*/", "", body[1], flags=re.DOTALL)
    names = []
    for declaration in text.split(";"):
        if declaration.strip():
            names += re.findall(r"(\w+)(?:\[\w+\])?\s*(?:,|$)", declaration.strip())
    return names


@pytest.mark.parametrize(
    ("struct", "mirror"),
    [
        ("ffpa_tensor", _native.Tensor),
        ("ffpa_forward_problem", _native.ForwardProblem),
        ("ffpa_backward_problem", _native.BackwardProblem),
        ("ffpa_plan", _native.Plan),
        ("ffpa_kernel_info", _native._KernelInfo),
        ("ffpa_device_info", _native._DeviceInfo),
    ],
)
def test_fields_are_the_headers(struct: str, mirror: type[ctypes.Structure]) -> None:
    names = [name.rstrip("_") for name, _ in mirror._fields_]
    assert names == fields_in_header(struct)


def test_names_are_the_headers() -> None:
    for prefix, names in (("FFPA_", _native.DTYPES[1:]), ("FFPA_ENGINE_", _native.ENGINES), ("FFPA_", _native.ANCHORS)):
        for name in names:
            value = re.search(rf"\b{prefix}{name.upper()} = (\d+)", HEADER)
            assert value is not None and int(value[1]) == names.index(name) + (
                names is not _native.ENGINES and names is not _native.ANCHORS
            ), name


def test_another_version_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(ctypes.Structure):
        _fields_ = (*_native.ForwardProblem._fields_, ("one_more", ctypes.c_int64))

    monkeypatch.setattr(_native, "ForwardProblem", Longer)
    _native.lib.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="different versions"):
            _native.lib()
    finally:
        _native.lib.cache_clear()


def test_kernels_and_devices() -> None:
    kernels = _native.kernels()
    assert {"ref_fwd_loops", "ref_bwd_loops"} <= {k.name for k in kernels if k.usable}
    for kernel in kernels:
        assert ("_fwd_" in kernel.name) == (kernel.pass_ == "forward") != ("_bwd_" in kernel.name)
        assert kernel.engine in ("ref", "cpu", "cuda") and kernel.summary and kernel.dtypes
    cpu = _native.devices()[0]
    assert (cpu.type, cpu.index) == ("cpu", 0) and cpu.name and cpu.processors >= 1 and cpu.memory_bytes > 2**28


def test_version() -> None:
    numbers = [re.search(rf"#define FFPA_VERSION_{part} (\d+)", HEADER) for part in ("MAJOR", "MINOR", "PATCH")]
    assert ffpa.__version__ == _native.version() == ".".join(n[1] for n in numbers if n)
    assert _native.library_path().name == "libffpa.so"


# ------------------------------------------------------------------------------------------------------ import of ffpa


def test_import_without_torch() -> None:
    result = run_python(
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, ffpa, ffpa.numpy\n"
        "x = np.ones((1, 1, 2, 4), np.float32)\n"
        "print(ffpa.__version__, ffpa.numpy.attention(x, x, x).sum(), 'attention' in dir(ffpa))\n"
        "try: ffpa.attention\n"
        "except ImportError as error: print(error)\n"
    )
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first == f"{ffpa.__version__} 8.0 True"
    assert "ffpa.attention needs torch" in second


def test_import_of_ops_before_or_after_torch() -> None:
    for order in ("import ffpa, torch", "import torch, ffpa"):
        result = run_python(f"{order}; x = torch.ones(1, 1, 2, 4); print(torch.ops.ffpa.forward(x, x, x)[0].sum())")
        assert result.stdout.strip() == "tensor(8.)", result.stderr


def test_library_that_is_not_there() -> None:
    result = run_python("import ffpa; ffpa.attention", FFPA_LIBRARY_PATH="/nonexistent")
    assert result.returncode != 0 and "/nonexistent/libffpa.so" in result.stderr


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        _ = ffpa.atention


def test_every_public_name_exists() -> None:
    for name in ffpa.__all__:
        assert getattr(ffpa, name) is not None and name in dir(ffpa)


# --------------------------------------------------------------------------------------------------------- the binding


def test_second_copy_of_the_binding_loads_harmlessly(tmp_path: Path) -> None:
    copy = tmp_path / "libffpa_torch.so"
    shutil.copy(_native.library_folder() / "libffpa_torch.so", copy)
    result = run_python(
        f"import torch, ffpa; ffpa.attention; torch.ops.load_library({str(copy)!r})\n"
        "print(ffpa.attention(*[torch.ones(1, 1, 2, 4)] * 3).sum())"
    )
    assert result.returncode == 0 and result.stdout.strip() == "tensor(8.)", result.stderr


def test_binding_needs_only_stable_names() -> None:
    """One file for every torch from 2.10 on: no C++ name of torch, no Python, no stub left behind."""
    if shutil.which("nm") is None or shutil.which("readelf") is None:
        pytest.skip("needs binutils")
    path = str(_native.library_folder() / "libffpa_torch.so")
    undefined = subprocess.run(
        ["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True
    ).stdout
    names = [line.split()[-1].split("@")[0] for line in undefined.splitlines()]
    assert not [name for name in names if "c10" in name or "2at" in name or name.startswith("Py")]
    declared = (ROOT / "python/binding/torch_shim.h").read_text()
    shims = [name for name in names if name.startswith(("aoti_torch_", "torch_"))]
    assert shims and all(f"{name}(" in declared for name in shims)
    stubs = (ROOT / "python/binding/torch_stub.c").read_text()
    assert all(f"STUB({name})" in stubs for name in shims)
    needed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in needed and "libpython" not in needed and "libtorch_python" not in needed


def test_declarations_are_torchs(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    include = Path(torch.__file__).parent / "include"
    command = [compiler, "-std=c++20", "-fsyntax-only", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    command += ["-I", str(ROOT / "python/binding"), "-isystem", str(include)]
    source = Path(__file__).with_name("shim_drift.cc")
    result = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    header = (ROOT / "python/binding/torch_shim.h").read_text()
    wrong = header.replace(
        "aoti_torch_get_dim(AtenTensorHandle tensor, int64_t*", "aoti_torch_get_dim(int tensor, int64_t*"
    )
    assert wrong != header
    (tmp_path / "torch_shim.h").write_text(wrong)
    command[command.index(str(ROOT / "python/binding"))] = str(tmp_path)
    assert subprocess.run([*command, str(source)], capture_output=True).returncode != 0  # the test can fail
