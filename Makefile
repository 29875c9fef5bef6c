# Each target does all of the set-up that it needs (tools/setup.sh) and skips what is done.
#   make test SUITES="lint unit"    only these suites
#   make demo DEMO_ARGS="--help"    arguments for the command behind a target (also BENCH_ARGS, GPU_CHECK_ARGS)
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test bench lint soak softroce asan tsan wheel gpu-bundle gpu-check

setup := @bash tools/setup.sh
run_tests := @.venv/bin/python tools/run_tests.py

help:
	@echo 'make demo   a real model served by one process, fetched and computed by another'
	@echo 'make test   the test suites, each against its minute budget (SUITES="lint unit" for some)'
	@echo 'make bench  speed, as JSON lines, baselines in the same run'
	@echo 'make lint   ruff, mypy, tidy'
	@echo 'make soak   what takes too long for make test'
	@echo 'make asan   all C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer'
	@echo 'make tsan   all C++ tests under ThreadSanitizer'
	@echo 'make softroce  the tests that need RDMA devices, in a guest with soft-RoCE'
	@echo 'make wheel  a self-contained wheel in dist/'
	@echo 'make gpu-bundle  gpu-bundle/: what a build on an offline machine with a GPU lacks, to travel with the checkout'
	@echo 'make gpu-check   builds, tests and measures on that machine (--dry-run lists the steps; GPU_CHECK_ARGS="--help")'

demo:
	$(setup) packages venv install model
	@.venv/bin/paramwire demo $(DEMO_ARGS)

test:
	$(setup) packages venv model
	$(run_tests) $(SUITES)

bench:
	$(setup) packages venv install model build:release
	@.venv/bin/paramwire bench fetch --json $(BENCH_ARGS)
	@.venv/bin/paramwire bench generate --json
	@.venv/bin/paramwire bench memory --json
	@.venv/bin/paramwire bench codec --json
	@.venv/bin/paramwire bench ready --json
	@.venv/bin/paramwire bench checkpoint --json
	@set -e; for program in build/release/bench/*_bench; do if [ -x "$$program" ]; then "$$program"; fi; done

lint:
	$(setup) packages venv
	$(run_tests) lint

soak:
	$(setup) packages venv model encoder
	$(run_tests) --soak

softroce:
	$(setup) packages venv
	$(run_tests) softroce

asan tsan:
	$(setup) packages venv
	$(run_tests) $@-all

wheel:
	$(setup) packages venv wheel

gpu-bundle:
	$(setup) packages venv
	@.venv/bin/python tools/gpu_bundle.py

# No set-up: the machine has no network. The + lets `make gpu-check --dry-run` list the steps, in the place of make's own list.
GPU_PYTHON ?= python3
gpu-check:
	+@$(GPU_PYTHON) tools/gpu_check.py $(if $(findstring n,$(firstword -$(MAKEFLAGS))),--dry-run) $(GPU_CHECK_ARGS)
