# serve   start the shipped model on this machine (Ctrl-C drains); ARGS="topology=ep2" are Hydra overrides
# test    what CI runs: check, then all tests that this machine can run
# bench   the engine beside transformers, memory of a rank, time to ready; then ranks together, and a live fleet
# check   formatting, lint, and both type checkers
# setup   only make the virtual environment, with the development tools in it
#
# The first call makes the environment, later ones find its stamps. TORCH names another torch than the pinned one,
# as a requirement, a wheel, or a URL; PEGAHPC_TORCH in the environment does the same.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
# Without an NVIDIA device the CPU build and no other: under the plain name the default index has gigabytes of CUDA.
BUILD := $(if $(or $(wildcard /dev/nvidiactl),$(filter-out x86_64,$(shell uname -m))),,+cpu)
TORCH ?= $(or $(PEGAHPC_TORCH),torch==2.13.0$(BUILD))
ARGS ?=

BIN := $(VENV)/bin
PINS := $(VENV)/constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --use-pep517 --constraint $(PINS)

# One thread a process: under load two OpenMP threads are slower than one. Ours is never first on the path (-P).
export OMP_NUM_THREADS ?= 1
export PYTHONSAFEPATH := 1
export PATH := $(abspath $(BIN)):$(PATH)
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: serve test check format bench gpu setup clean
.DELETE_ON_ERROR:

serve: $(VENV)/.serve
	$(BIN)/pegahpc up $(ARGS)

test: check
	$(BIN)/pytest $(ARGS)

check: $(VENV)/.setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.setup
	HF_HUB_OFFLINE=1 PYTHONPATH=tools $(BIN)/python tools/bench_engine.py $(ARGS)
	HF_HUB_OFFLINE=1 PYTHONPATH=tools $(BIN)/python tools/bench_fleet.py $(ARGS)

gpu: $(VENV)/.setup
	$(BIN)/pytest -m "gpu or multi_gpu" $(ARGS)

setup: $(VENV)/.setup

clean:
	rm -rf $(VENV) build dist *.egg-info .coverage .*_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and without its pin, so that another one stays: pip leaves alone what satisfies pyproject.toml.
$(VENV)/.serve: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pegahpc needs Python 3.11 or later: make PYTHON=...")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	grep -v '^torch==' constraints.txt > $(PINS)
	@echo $(PIP) '$(TORCH)'; $(PIP) '$(TORCH)' || { printf '%s\n' \
	  "pip found no $(TORCH). The CPU build of torch is not on the default index: add PyTorch's index for CPUs to pip" \
	  "(its page Start Locally says how), or say what to install: make TORCH=torch==2.13.0 takes your index's own build" \
	  "(with CUDA about 5 GB), make TORCH=/path/to/torch.whl a wheel."; exit 1; }
	$(PIP) --editable .
	touch $@

$(VENV)/.setup: $(VENV)/.serve
	$(PIP) --editable '.[dev]'
	touch $@
