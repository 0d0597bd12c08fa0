# A clean clone needs Python >= 3.11 and make; every target sets up what it uses. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Tests run offline, and on one thread a process: two test processes share the cores.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false TRL_EXPERIMENTAL_SILENCE=1 \
            HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest
PARALLEL := -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-e2e doctest lint format clean

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

install: $(INSTALLED)  ## set up .venv with the package (editable), its extras and the pinned test versions

# pip keeps what already satisfies the constraints, so a second run is quick.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "trimtab needs Python >= 3.11 and '$(PYTHON)' is not one; name another: make PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[trl,verl,math,report,dev]'
	@touch $@

demo: $(INSTALLED)  ## train the quickstart recipe on the CPU, from the start, into runs/demo
	OMP_NUM_THREADS=1 $(BIN)/trimtab run quickstart --fresh --output runs/demo

test: lint doctest  ## lint, types, import contracts, doctests, every test but end-to-end and GPU ones
	$(PYTEST) $(PARALLEL) -m 'not e2e and not gpu'

test-fast: $(INSTALLED)  ## the tests of a few seconds each
	$(PYTEST) $(PARALLEL) -m 'not slow and not e2e and not gpu'

test-e2e: $(INSTALLED)  ## the tests that train a model
	$(PYTEST) -m 'e2e and not gpu'

doctest: $(INSTALLED)  ## the examples in the docstrings
	$(PYTEST) --doctest-modules shared/trimtab

lint: $(INSTALLED)  ## ruff, mypy (strict, on shared/trimtab), import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)  ## let ruff fix and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove builds and caches; .venv and runs/ stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
