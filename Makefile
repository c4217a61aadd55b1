# Everything that a developer does, from a machine with Python 3.11 or newer, a C compiler and make.
# `make test ARGS="tests/comm -x"` passes arguments on.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Everything with another PyTorch, in an environment of its own: `make test TORCH=2.14.1`; `newest` is what pip finds.
TORCH ?=
VENV := .venv$(TORCH:%=-torch-%)
BIN := $(VENV)/bin
# In a terminal pip shows what it downloads and installs; in a log it is quiet.
PIP := $(BIN)/python -m pip $(if $(MAKE_TERMOUT),,--quiet) --disable-pip-version-check
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
# Done once, and again when what has to be installed changes.
READY := $(VENV)/.ready
# Libraries that tests run where they can be installed.
TRIED_DEEPSPEED := $(VENV)/.tried-deepspeed
TRIED_TORCHTITAN := $(VENV)/.tried-torchtitan
TRIED_RAY := $(VENV)/.tried-ray
TRIED_KUBEFLOW := $(VENV)/.tried-kubeflow

# Tests and demo start many processes, and without bytecode each compiles the package again (1.5 of 4.5 seconds).
export PYTHONDONTWRITEBYTECODE :=

.PHONY: environment setup deepspeed torchtitan ray kubeflow test sample long gpu proofs demo docs site wheel try-wheel bench lint types format clean

environment: $(READY)

setup: $(READY) $(TRIED_DEEPSPEED) $(TRIED_TORCHTITAN)

$(READY): pyproject.toml constraints.txt
	@echo "Installing terrazzo with PyTorch and the tools of its tests into $(VENV): some minutes, the first time" >&2
	$(call install,dev)

# The demo takes the environment of the tests, if it is there. Otherwise it makes one with what the demo needs; what tests
# need is added to it later.
READY_FOR_DEMO := $(or $(wildcard $(READY)),$(VENV)/.ready-for-demo)
$(VENV)/.ready-for-demo: pyproject.toml constraints.txt
	@echo "Installing terrazzo with PyTorch into $(VENV): a minute or more, the first time" >&2
	$(call install,demo)

# The package with an extra of pyproject.toml.
define install
test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
$(if $(TORCH),sed 's/^torch==.*/$(if $(filter newest,$(TORCH)),,torch==$(TORCH))/; /^setuptools==/d' constraints.txt >$(CONSTRAINTS))
$(PIP) install -c $(CONSTRAINTS) -e '.[$(1)]'
touch $@
endef

# Some tests compare with DeepSpeed.  It comes as sources that import torch when they are built: hence after the rest,
# and without isolation.  Where it cannot be installed those tests are skipped.
deepspeed: $(READY)
	$(PIP) install --retries 2 --timeout 30 -c $(CONSTRAINTS) --no-build-isolation deepspeed

# A test trains torchtitan's model.  It asks for versions of other packages than ours and for many that the test has no
# use for: hence by itself, with what it cannot be imported without.
torchtitan: $(READY)
	$(PIP) install --retries 2 --timeout 30 -c $(CONSTRAINTS) --no-deps torchtitan spmd_types tyro docstring_parser typeguard

# Half a gigabyte with what it needs: only `make proofs` installs it.
ray: $(READY)
	$(PIP) install --retries 2 --timeout 30 -c $(CONSTRAINTS) -e '.[ray]'

# The SDK of Kubeflow's Trainer, whose local processes run a job in a test: only `make proofs` installs it.
kubeflow: $(READY)
	$(PIP) install --retries 2 --timeout 30 -c $(CONSTRAINTS) 'kubeflow>=0.5'

$(VENV)/.tried-%: $(READY)
	$(MAKE) --no-print-directory $* || echo "NOTE: $* could not be installed (see above), so the tests that run it will be" \
	    "skipped; 'make $*' tries again" >&2
	touch $@

# If all tests that ARGS names are of these folders, DeepSpeed and torchtitan are not installed for them: none runs those.
WITHOUT_LIBRARIES := $(foreach folder,_torch benchmarks checkpoint comm demo fsdp launch layout optim publish tensor testing view \
	test_,tests/$(folder)%)
# Three processes, each with ranks of its own, since a third of the time one only waits; a file's tests stay together.
test: $(READY) $(if $(filter-out $(WITHOUT_LIBRARIES),$(or $(filter tests/%,$(ARGS)),all)),$(TRIED_DEEPSPEED) $(TRIED_TORCHTITAN))
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

# Some tests of each part, those nearest to PyTorch's own code, in a few minutes: for a PyTorch that is not the usual one.
SAMPLE := _torch comm test_ranks.py test_imports.py \
	tensor/test_dtensor.py tensor/test_redistribute.py tensor/test_import_swap.py tensor/test_foreach.py tensor/experimental \
	fsdp/test_against_torch.py fsdp/test_module.py fsdp/test_streams.py fsdp/test_errors.py fsdp/test_works_with.py \
	checkpoint/test_formats_dcp.py checkpoint/test_torch_storage.py checkpoint/test_torch_names.py checkpoint/test_async.py \
	checkpoint/test_save_load.py checkpoint/state_dict integrations/test_installing.py engine/test_engine.py
sample: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(SAMPLE:%=tests/%) $(ARGS)

# What says little more than a test, at length: on more ranks, through other people's programs (torchtitan, Lightning,
# Transformers, DeepSpeed; Ray and Kubeflow where they are installed).  CI runs these after the tests, as many as a slow
# machine can in MINUTES, others each time.
long: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --long -m long $(MINUTES:%=--minutes %) $(ARGS)

# On a machine with accelerators: the tests marked `gpu` and the benchmarks that make sense there, into
# docs/benchmarks-gpu.md. It installs nothing: it takes PYTHON, or the environment of `make setup`, or what `python` is.
# `make gpu DEVICE=late` runs the same on a device that imitates one, into build/; CI does.
DEVICE ?=
GIVEN_PYTHON := $(if $(filter command line environment,$(origin PYTHON)),$(PYTHON))
gpu:
	PYTHONPATH="$(CURDIR)/src:$(CURDIR)/tests$${PYTHONPATH:+:$$PYTHONPATH}" \
	    $(or $(GIVEN_PYTHON),$(wildcard $(BIN)/python),$(shell command -v python || command -v python3)) -m benchmarks.gpu \
	    $(DEVICE:%=--device %) $(if $(filter late,$(DEVICE)),--page build/benchmarks-late.md) $(ARGS)

# What takes too long for every change: tests marked so, random programs, the whole of PyTorch's op database, every way for
# a rank to fail, many thousands of damaged checkpoints, and scripts under DeepSpeed.
proofs: setup $(TRIED_RAY) $(TRIED_KUBEFLOW)
	$(BIN)/python -m pytest --proofs -m "long or proof" -o faulthandler_timeout=3600
	$(BIN)/python -m tests.tensor.fuzz --programs 10000
	$(BIN)/python -m tests.tensor.sweep --write docs/op-sweep.md
	$(BIN)/python -m tests.checkpoint.failing_matrix
	$(BIN)/python -m tests.checkpoint.fuzz --cases 20000
	$(BIN)/python tests/deepspeed/same.py
	$(BIN)/python -m tests.testing.late.mutations --write docs/late-mutations.md

# The documentation as a site in build/site.  Nothing is fetched; a link that leads nowhere and code that does not do what
# the page shows are errors.
docs: site
	$(BIN)/python -m pytest tests/test_doctests.py -k "pages or names or links"

site: $(READY)
	$(BIN)/python docs/pictures/draw.py --check
	$(BIN)/python -m sphinx -b html -n -W --keep-going -q docs build/site
	@echo "build/site/index.html"

demo: $(READY_FOR_DEMO)
	$(BIN)/python -m terrazzo demo $(ARGS)

# dist/terrazzo-VERSION-py3-none-any.whl, which pip installs, and dist/terrazzo-VERSION.tar.gz, the sources of it.
wheel: $(READY)
	rm -rf dist
	$(BIN)/python -m hatchling build -t sdist -t wheel -d dist

# Does the wheel alone do what the installation instructions say?  In a new environment, away from the sources.
try-wheel: wheel
	rm -rf build/tried && $(PYTHON) -m venv build/tried
	build/tried/bin/python -m pip --quiet --disable-pip-version-check install -c constraints.txt dist/*.whl
	cd build && tried/bin/terrazzo --version && tried/bin/terrazzo demo --steps 12 --out tried/demo

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

# The package and its tools; then a user's programs, as mypy --strict sees them.
types: $(READY)
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/typed.ini --cache-dir .mypy_cache/user tests/typed.py tests/fsdp/typed.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-torch-* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
