# Two commands: `make report` measures this machine and writes the page, `make test` runs the tests.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# Without bytecode files: most modules are never imported.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# For a networked machine without a GPU: TORCH_INDEX=URL of an index with CPU builds of torch.
ifdef TORCH_INDEX
PIP += --extra-index-url $(TORCH_INDEX)
endif

.PHONY: report test test-integrations lint format browser dist clean help

help:
	@echo 'make report    measure this machine, write stepscope-out/report.html'
	@echo 'make test      run the tests'
	@echo 'make test-integrations   install other libraries, run the tests of programs that use them'
	@echo 'make lint      style and types'
	@echo 'make browser   install Chromium for the tests of the page'
	@echo 'make dist      build wheel and sdist, try the wheel in an empty environment'

report: .venv/.use
	$(BIN)/stepscope run $(ARGS)

test: .venv/.dev browser
	$(BIN)/pytest -n 4 --dist worksteal $(ARGS)

# In one process: the tests of a program share its runs.
test-integrations: .venv/.integrations
	$(BIN)/pytest tests/integrations --timeout 1800 $(ARGS)

dist: .venv/.dev
	rm -rf dist build
	$(PIP) build twine
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	sh scripts/try_wheel.sh dist $(BIN)/python -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

browser:
	@sh scripts/install-chromium.sh

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed (apt-get install python3.11-venv)' >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.use: .venv/bin/python pyproject.toml constraints.txt
	@echo 'installing, about a minute the first time'
	$(PIP) -e .
	@touch $@

.venv/.dev: .venv/bin/python pyproject.toml constraints.txt
	@echo 'installing, about a minute the first time'
	$(PIP) -e '.[dev]'
	@touch .venv/.use $@

.venv/.integrations: .venv/.dev
	@echo 'installing transformers, Accelerate, PEFT, Lightning and a notebook kernel'
	$(PIP) -e '.[dev,integrations]'
	@touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache stepscope-out dist build
