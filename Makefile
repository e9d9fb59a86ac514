# `make demo` and `make test` each take a machine with a C++ compiler, CMake and Python >= 3.10 to their end.
# SPDX-License-Identifier: Apache-2.0
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := demo
.NOTPARALLEL:
.DELETE_ON_ERROR:

PYTHON ?= python3
JOBS ?= $(shell nproc)
CTEST_JOBS ?= $(JOBS)
FUZZ_SECONDS ?= 60

# Every step sees the virtual environment first, and the libraries of the cpu preset.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PYTHONPATH := $(CURDIR)/python
export FFPA_LIBRARY_PATH := $(CURDIR)/build/cpu/lib
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test system lint build ctest pytest examples docs asan fuzz wheel cuda bench pack clean

# One line a target; the steps of `make test` stand in the order in which they fail soonest.
demo: build .venv/demo  ## real models with torch's attention and with ours, then a short bench with its plot
	python demo/demo.py --out build/demo

test: system lint build ctest pytest examples docs asan fuzz wheel cuda  ## everything that continuous integration checks
	@echo "make test: all steps passed"

# ----------------------------------------------------------------------------------------------------------- environment

# .venv/NAME is a stamp: requirements/NAME.txt, and the files that it includes, are installed.
.venv/bin/python:
	@tools/system.sh demo
	$(PYTHON) -m venv .venv
.venv/build: requirements/build.txt
.venv/demo: requirements/demo.txt requirements/build.txt
.venv/test: requirements/test.txt requirements/demo.txt requirements/build.txt
.venv/build .venv/demo .venv/test: .venv/%: | .venv/bin/python
	python -m pip install --quiet -r $<
	touch $@

# ----------------------------------------------------------------------------------------------------------------- steps

system:  ## system packages, before anything long
	@tools/system.sh test

lint: .venv/test  ## format, style and types
	git ls-files -co --exclude-standard -- '*.h' '*.hpp' '*.c' '*.cc' '*.cpp' '*.cu' '*.cuh' | xargs -r clang-format --dry-run -Werror
	ruff check python tests demo tools
	ruff format --check python tests demo tools
	mypy

build: .venv/build  ## libffpa.so and libffpa_torch.so in build/cpu/lib
	cmake --preset cpu --log-level=WARNING
	cmake --build --preset cpu -j $(JOBS) --target ffpa ffpa_torch

ctest: build  ## C++ tests
	cmake --build --preset cpu -j $(JOBS)
	ctest --preset cpu -j $(CTEST_JOBS) --no-tests=error

pytest: build .venv/test  ## Python tests
	python -m pytest

examples: build  ## C, C++, pkg-config and Rust programs outside the build tree
	tools/examples.sh build/cpu build/examples

docs:  ## links of the documents; docs/KERNELS.md against kernels.def
	$(PYTHON) tools/check_docs.py

asan: .venv/build  ## C++ tests again under AddressSanitizer and UndefinedBehaviorSanitizer
	cmake --preset asan-ubsan --log-level=WARNING
	cmake --build --preset asan-ubsan -j $(JOBS)
	ctest --preset asan-ubsan -j $(CTEST_JOBS) --no-tests=error

fuzz: .venv/build  ## libFuzzer on the C ABI, FUZZ_SECONDS in all
	cmake --preset fuzz --log-level=WARNING
	cmake --build --preset fuzz -j $(JOBS)
	tools/fuzz.sh build/fuzz $(FUZZ_SECONDS)

wheel: .venv/test  ## dist/ffpa-*.whl for any Python >= 3.10, repaired, then used in a clean environment
	tools/wheel.sh

cuda: .venv/test  ## compile every CUDA kernel and look at its registers, stack and wgmma (no GPU needed)
	tools/cuda.sh $(JOBS)

bench: build .venv/demo  ## the CPU figures of the README
	python -m ffpa.cli bench --set cpu --json build/bench.json --plot build/bench.png

pack: .venv/build  ## .gpu/: programs, package and tests for a machine with a GPU
	tools/pack.sh

clean:
	rm -rf build dist .gpu
