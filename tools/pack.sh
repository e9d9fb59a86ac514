#!/bin/bash
# Gather what a GPU machine needs into .gpu/ (ignored by git, at most 64 MiB): libraries, test programs, package, Python tests.
# There: `.gpu/run.sh` runs all of it.  usage: tools/pack.sh
set -euo pipefail
cmake --preset cuda --log-level=WARNING
cmake --build --preset cuda -j "$(nproc)"

rm -rf .gpu
mkdir -p .gpu/bin .gpu/lib .gpu/tests
find build/cuda/bin -type f -executable -exec cp {} .gpu/bin/ \;
cp -L build/cuda/lib/libffpa.so.0 build/cuda/lib/libffpa_torch.so .gpu/lib/
strip --strip-unneeded .gpu/bin/* .gpu/lib/*
cp -r python .gpu/python
cp -r tests/python .gpu/tests/python
cp pyproject.toml .gpu/
git describe --always --dirty --exclude='*' --abbrev=12 > .gpu/COMMIT
find .gpu -name __pycache__ -prune -exec rm -rf {} +
cat > .gpu/run.sh <<'RUN'
#!/bin/bash
# C++ test programs, the self-test, then the Python tests. Arguments go to pytest.
set -uo pipefail
cd "$(dirname "$0")"
export PYTHONPATH=$PWD/python FFPA_LIBRARY_PATH=$PWD/lib
FFPA_COMMIT=$(cat COMMIT)
export FFPA_COMMIT
failed=0
for program in bin/*_tests; do "$program" --gtest_brief=1 || failed=1; done
python3 -m pytest tests/python "$@" || failed=1
exit $failed
RUN
chmod +x .gpu/run.sh
size=$(du -sm .gpu | cut -f1)
echo ".gpu: $size MiB"
((size <= 64)) || { echo ".gpu is larger than 64 MiB" >&2; exit 1; }
