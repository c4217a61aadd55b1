# Everything that a developer does, from a machine with Python 3.11 or newer, a C compiler and make.
# `make test ARGS="tests/comm -x"` passes arguments on.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Done once, and again when what has to be installed changes.
READY := $(VENV)/.ready

.PHONY: setup test demo bench lint types format clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

demo: $(READY)
	$(BIN)/python -m terrazzo.demo $(ARGS)

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
