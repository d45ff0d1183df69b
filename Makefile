# Every target installs what it needs. The machine needs only Python 3.11 and make.
# PYTHON=python3.12 make setup   chooses another interpreter.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready
RAY := .venv-ray
FLOWER := .venv-flower
METRICS := .venv-metrics
PAGE := .venv-page
ARRAYS := .venv-arrays
# 1.5 tests per core: a test that waits for a process leaves its core idle.
AT_ONCE = $(shell $(BIN)/python -c 'import os; print(os.cpu_count() * 3 // 2)')
SIDE_BY_SIDE = $(BIN)/python -m pytest --numprocesses $(AT_ONCE) --dist worksteal
SAMPLE ?= 8  # slow tests, and as many cases of the fault matrix, that `make test` draws at random

RAY_SAMPLE ?= 1  # slow tests on Ray that `make test-ray` draws at random; RAY_SAMPLE=99 runs all of them

# Without byte code, each of the many processes that tests start would compile the library again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-ray test-flower test-metrics test-page test-arrays lint audit wheel bench clean

help:            ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 16

setup: $(STAMP)  ## make .venv with paceline in it (quick when there is nothing to do)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "paceline needs Python 3.11 or newer; try: make setup PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing paceline and its tools into .venv (1.7 GB, a few minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: setup      ## train digits with 4 workers over slow links, under BSP and under R²SP: a minute, and a picture
	@$(BIN)/python scripts/demo.py

test: setup      ## the tests, with a sample of the slow ones: first on all cores, then those that must run alone
	@$(SIDE_BY_SIDE) -m 'not alone' --sample $(SAMPLE)
	@$(BIN)/python -m pytest -m 'alone and not matrix' --sample $(SAMPLE) $$(grep -rl --include='*.py' 'mark.alone' tests)

test-all: setup  ## all tests, with the whole fault matrix; an hour or more
	@PACELINE_SEARCH=1 $(SIDE_BY_SIDE) -m 'not alone'
	@$(BIN)/python -m pytest -m alone

test-ray: $(RAY)/.ready  ## the tests on Ray, with a sample of the slow ones, in an environment of their own (.venv-ray)
	@$(RAY)/bin/python -m pytest tests/on_ray --sample $(RAY_SAMPLE)

# As for Flower below: packages of .venv are used from there, and pip installs only Ray and what it needs besides.
$(RAY)/.ready: $(STAMP)
	@test -x $(RAY)/bin/python || $(BIN)/python -m venv $(RAY)
	@echo "installing paceline and Ray into $(RAY) (550 MB, a minute or two) ..."
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(RAY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth
	@$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	@touch $@

test-flower: $(FLOWER)/.ready  ## the tests on Flower, with a sample of the matrix, in an environment of their own (.venv-flower)
	@$(FLOWER)/bin/python -m pytest tests/on_flower --numprocesses auto -m 'not alone' --sample $(SAMPLE) \
	  -W ignore::DeprecationWarning  # of Flower's dependencies

# Packages of .venv whose versions suit Flower are used from there. pip installs the others beside them.
$(FLOWER)/.ready: $(STAMP)
	@test -x $(FLOWER)/bin/python || $(BIN)/python -m venv $(FLOWER)
	@echo "installing paceline and Flower into $(FLOWER) (170 MB, half a minute) ..."
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(FLOWER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth
	@$(FLOWER)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[flower]'
	@touch $@

test-metrics: $(METRICS)/.ready  ## the tests of MLflow, W&B and TensorBoard, in an environment of their own (.venv-metrics)
	@$(METRICS)/bin/python -m pytest tests/metrics --numprocesses auto

$(METRICS)/.ready: pyproject.toml
	@test -x $(METRICS)/bin/python || $(PYTHON) -m venv $(METRICS)
	@echo "installing paceline, MLflow, W&B and TensorBoard into $(METRICS) ..."
	@$(METRICS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -e '.[mlflow,prometheus,tensorboard,wandb]' mlflow tensorboard 'pytest>=8.2' 'pytest-xdist>=3.6'
	@touch $@

# Without Chromium, the tests in a browser are skipped, and the last lines say so.
test-page: $(PAGE)/.ready  ## the tests of the page, in an environment of their own (.venv-page); needs Chromium
	@$(PAGE)/bin/python -m pytest tests/page --numprocesses auto -rs

$(PAGE)/.ready: pyproject.toml
	@test -x $(PAGE)/bin/python || $(PYTHON) -m venv $(PAGE)
	@echo "installing paceline and Playwright into $(PAGE) (330 MB, half a minute) ..."
	@$(PAGE)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -e '.[browser,page]' 'pytest>=8.2' 'pytest-xdist>=3.6'
	@touch $@

test-arrays: setup $(ARRAYS)/.ready  ## the tests of JAX and Keras, in an environment without torch (.venv-arrays)
	@$(ARRAYS)/bin/python -m pytest tests/on_arrays

$(ARRAYS)/.ready: pyproject.toml
	@test -x $(ARRAYS)/bin/python || $(PYTHON) -m venv $(ARRAYS)
	@echo "installing paceline, JAX, Keras and TensorFlow into $(ARRAYS) (2.1 GB, a few minutes) ..."
	@$(ARRAYS)/bin/python -m pip install --quiet --disable-pip-version-check -e . 'jax[cpu]>=0.6' 'keras>=3.8' \
	  'optax>=0.2' 'tensorflow-cpu>=2.18' 'hypothesis>=6.100' 'pytest>=8.2' 'pytest-xdist>=3.6'
	@touch $@

wheel: setup     ## build the wheel, and run it in an empty environment, with torch and without
	@$(BIN)/python scripts/check_wheel.py

lint: setup      ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

audit: setup     ## look for known vulnerabilities in the installed packages; needs the internet
	@$(BIN)/python scripts/audit.py

bench: setup     ## the benchmarks of the simulator, of decisions and of training, and the lab (root)
	@$(BIN)/python benchmarks/simulator.py
	@$(BIN)/python benchmarks/decisions.py
	@$(BIN)/python benchmarks/metrics.py
	@$(BIN)/python benchmarks/staleness.py
	@$(BIN)/python benchmarks/staleness.py outer
	@$(BIN)/python benchmarks/training.py
	@$(BIN)/python benchmarks/lab.py

clean:           ## remove .venv, caches and the demo's picture
	rm -rf .venv .venv-arrays .venv-flower .venv-metrics .venv-page .venv-ray .pytest_cache .hypothesis .mypy_cache .ruff_cache demo.png
