"""What figures depend on: the machine, its load, versions and the commit.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

PACKAGES = ("torch", "numpy", "transformers", "diffusers", "flash-attn", "ffpa-attn")


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def package_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def commit() -> str | None:
    """The commit of the checkout that holds this package, "-dirty" if files differ; None for an installed package.

    A package that was copied out of its checkout is told by the environment: FFPA_COMMIT.
    """
    if told := os.environ.get("FFPA_COMMIT"):
        return told
    here = Path(__file__).resolve().parent
    try:
        git = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        tracked = subprocess.run(
            ["git", "-C", str(here), "ls-files", "--error-unmatch", "__init__.py"],
            capture_output=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return git.stdout.strip() if tracked.returncode == 0 else None


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu")


def gpu() -> dict[str, str]:
    """What nvidia-smi says of the current GPU now: name, driver, clocks in MHz, power limit in W, degrees Celsius."""
    import torch

    query = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    identifier = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    try:
        out = subprocess.run([*query, "-i", identifier], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {"name": torch.cuda.get_device_name()}
    return dict(zip(_GPU_FIELDS, (field.strip() for field in out.splitlines()[0].split(",")), strict=True))


def describe() -> dict[str, object]:
    """Everything above as plain values for JSON."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cpus": usable_cpus(),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "commit": commit(),
    }
