"""Check compiled Hopper kernels without a GPU: registers, stack, and wgmma instructions of every instance.

    python3 tools/check_sm90.py FILE...       objects, libraries or programs that hold sm_90a code

Fails if a kernel uses more registers than its launch bounds allow, keeps more than STACK_LIMIT bytes on the stack
(spills of the main loop show there), has no tensor-core instruction, or has one that is not wgmma. Needs cuobjdump and
nvdisasm on PATH (wheels nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm). SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

KERNEL = re.compile(r"sm90_(?:fwd|bwd)_\w+?(?=INS)")
STACK_LIMIT = 256  # bytes; instances with every option are the largest


def listing(file: str, *flags: str) -> str:
    return subprocess.run(["cuobjdump", *flags, file], capture_output=True, text=True, check=True).stdout


def main(files: list[str]) -> int:
    failed = checked = 0
    for file in files:
        usage: dict[str, tuple[int, int]] = {}
        name = ""
        for line in listing(file, "--dump-resource-usage").splitlines():
            if match := re.search(r"Function (\S+):", line):
                name = match[1]
            elif (match := re.search(r"REG:(\d+) STACK:(\d+)", line)) and KERNEL.search(name):
                usage[name] = int(match[1]), int(match[2])
        tensor: dict[str, Counter[str]] = {}
        for line in listing(file, "--dump-sass").splitlines():
            if match := re.search(r"Function : (\S+)", line):
                name = match[1]
            elif match := re.search(r"\b([HQI]?G?MMA)\.(\w+)", line):
                tensor.setdefault(name, Counter())[f"{match[1]}.{match[2]}"] += 1
        for kernel, (registers, stack) in usage.items():
            counts = tensor.get(kernel, Counter())
            faults = []
            if registers > 168:
                faults.append(f"{registers} registers at entry")
            if stack > STACK_LIMIT:
                faults.append(f"{stack} bytes of stack")
            if not counts:
                faults.append("no tensor-core instruction")
            if any(not op.startswith("HGMMA") for op in counts):
                faults.append("tensor-core instructions that are not wgmma")
            checked += 1
            failed += bool(faults)
            shapes = ", ".join(f"{count} {op}" for op, count in sorted(counts.items()))
            verdict, reason = ("FAIL", ": " + "; ".join(faults)) if faults else ("ok", "")
            print(f"{verdict}  {kernel}: stack {stack}, {shapes}{reason}")
    print(f"{checked} kernels, {failed} failed")
    return failed != 0 or checked == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
