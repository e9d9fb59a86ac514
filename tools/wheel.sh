#!/bin/bash
# Build the wheel, repair it for other distributions, then use it in a clean environment: with numpy alone, and with torch.
set -euo pipefail
unset PYTHONPATH FFPA_LIBRARY_PATH  # the package must stand on its own
# Without CUDA kernels unless asked for (CMAKE_ARGS=-DFFPA_CUDA=ON make wheel): `make cuda` compiles them for the tests.
export CMAKE_ARGS=${CMAKE_ARGS:--DFFPA_CUDA=OFF}
raw=build/wheel-raw venv=$PWD/build/wheel-venv

rm -rf dist "$raw"
CMAKE_GENERATOR=Ninja python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$raw" .
auditwheel repair --exclude 'libtorch*' --wheel-dir dist "$raw"/ffpa-*.whl
wheel=$(echo dist/ffpa-*.whl)
[[ $wheel == dist/ffpa-*-py3-none-manylinux_*.whl ]] || { echo "not a portable wheel: $wheel" >&2; exit 1; }

python -m venv --clear "$venv"
"$venv"/bin/pip install --quiet "numpy==$(python -c 'import numpy; print(numpy.__version__)')" "$wheel"
cd "$venv" # away from the source tree
bin/python - <<'PYTHON'
import sys
import numpy as np
import ffpa
import ffpa.numpy
assert "site-packages" in ffpa.__file__ and "torch" not in sys.modules
q, k, v = (np.random.default_rng(i).standard_normal((1, 2, 33, 80), dtype=np.float32) for i in range(3))
o = ffpa.numpy.attention(q, k, v)
s = np.einsum("bhid,bhjd->bhij", q, k, dtype=np.float64) / np.sqrt(80)
p = np.exp(s - s.max(-1, keepdims=True))
expected = np.einsum("bhij,bhjd->bhid", p / p.sum(-1, keepdims=True), v)
assert np.abs(o - expected).max() < 1e-5, np.abs(o - expected).max()
print("wheel with numpy alone: ok, ffpa", ffpa.__version__)
PYTHON

# torch is large: lend this environment the one that is installed already. ffpa itself is not there.
python -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])' > "$(echo lib/python3*/site-packages)/torch.pth"
bin/python - <<'PYTHON'
import torch
import torch.nn.functional as F
import ffpa
assert str(ffpa.__file__).startswith(__import__("sys").prefix), ffpa.__file__
q, k, v = (torch.randn(1, 2, 40, 512, requires_grad=True) for _ in range(3))
o = ffpa.scaled_dot_product_attention(q, k, v, is_causal=True)
o.sum().backward()
torch.testing.assert_close(o, F.scaled_dot_product_attention(q, k, v, is_causal=True))
assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v))
print("wheel with torch", torch.__version__, "ok")
PYTHON
