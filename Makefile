# `make demo` and `make test` do all set-up in .venv, on a machine with Python, g++ and make.
#   make demo          train on 2 processes and prove that it equals one
#   make test          lint, types and the suite, Horovod included
#   make test-all      the same with every combination of engine, world size and option: twice as long
#   make test-oldest   the suite on the oldest supported TensorFlow, in .venv-oldest
#   make constraints   refresh the pinned versions in constraints/
#   make bench         measure what BENCHMARKS.md reports
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints/newest.txt
HOROVOD_FEATURES ?= gloo,mpi

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PACKAGE := setup.cfg pyproject.toml $(CONSTRAINTS)

.PHONY: demo test test-all test-oldest lint suite horovod bench constraints clean

demo: $(VENV)/.demo
	$(BIN)/tfdist run -np 2 --backend tf examples/digits.py

test: lint suite

test-all:
	$(MAKE) test PYTEST_OPTIONS=--thorough

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tests that leave cores idle share the machine, two at a time; those in worlds of several ranks have it alone.
suite: $(VENV)/.test horovod
	result=0; \
	$(BIN)/python -m pytest -m "not alone" --numprocesses 2 --dist loadfile $(PYTEST_OPTIONS) || result=1; \
	$(BIN)/python -m pytest -m alone $(PYTEST_OPTIONS) || result=1; \
	exit $$result

horovod: $(VENV)/.test
	$(BIN)/tfdist build-horovod --with $(HOROVOD_FEATURES)

test-oldest:
	$(MAKE) suite VENV=.venv-oldest CONSTRAINTS=constraints/oldest.txt

# tf_keras, the legacy peer, asks for the package tensorflow beside whatever build of it is installed.
bench: $(VENV)/.test horovod
	$(PIP) install --quiet --no-deps "tf_keras==$$($(BIN)/python -c 'from importlib.metadata import version as v; print(v("tensorflow-cpu").rsplit(".", 1)[0])').*"
	$(BIN)/tfdist bench fit
	$(BIN)/tfdist bench allreduce
	$(BIN)/tfdist bench allreduce --only tf tf-unsplit -np 2 --sizes 64MB

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "tfdist needs Python 3.10 or newer, and this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.python $(PACKAGE)
	$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[cpu,examples]'
	touch $@

$(VENV)/.test: $(VENV)/.python $(PACKAGE)
	$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[cpu,test]'
	touch $@

# Resolves the newest versions that the declared ranges allow, and writes them down.
constraints:
	./constraints/refresh $(PYTHON)

clean:
	rm -rf .venv .venv-oldest build dist tfdist.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
