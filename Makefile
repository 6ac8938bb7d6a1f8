# Every target works from a clean clone with Python 3.11+, make and a package index; the second run is quick.
# Override: PYTHON=python3.13   ACCEL=cpu|cuda13   VENV=.venv   NB=notebooks/00_quickstart.ipynb

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# `cpu` adds nothing on macOS, where plain MLX brings Metal.
ACCEL ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda13 || echo cpu)
NB ?= notebooks

DEMO := $(VENV)/.demo-$(ACCEL)
LAB := $(VENV)/.lab-$(ACCEL)
DEV := $(VENV)/.dev-$(ACCEL)

.DEFAULT_GOAL := help
.PHONY: help demo lab test lint unit nbval invariance notebooks site clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(DEMO)  ## show on a real model that the last seed wins, and that keyed sampling ends it
	$(BIN)/toolkit demo

lab: $(LAB)  ## open JupyterLab on the first notebook
	$(BIN)/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/00_quickstart.ipynb

test: $(DEV)  ## all that CI runs: lint, unit, nbval; one that fails does not hide the others
	@failed=; for part in lint unit nbval; do $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; done; \
	if [ -n "$$failed" ]; then echo "make test: failed:$$failed"; exit 1; fi; echo "make test: all passed"

lint: $(DEV)  ## style, import layers, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

unit: $(DEV)  ## tests, with the real model and the browser
	$(BIN)/python -m pytest -q -ra

nbval: $(DEV)  ## notebooks give the outputs they were committed with (NB= for one)
	$(BIN)/python -m pytest -q --nbval --nbval-current-env --nbval-cell-timeout=300 $(NB)

invariance: $(DEV)  ## 32 requests in every way that must give the same bits; a table (some 15 minutes)
	$(BIN)/python scripts/invariance.py

notebooks: $(DEV)  ## run the notebooks in fresh kernels and store their outputs (NB= for one)
	$(BIN)/python scripts/refresh_notebooks.py $(filter %.ipynb,$(NB))

site: $(DEV)  ## the course as pages to read offline, in _site/
	$(BIN)/python scripts/build_site.py

clean:  ## remove the environment; fetched models stay in the user's cache
	rm -rf $(VENV)

$(BIN)/python:
	@scripts/make_venv.sh $(VENV)

$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable ".[$(ACCEL)]"
	@touch $@

$(LAB): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable ".[$(ACCEL),lab,distributed]"
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable ".[$(ACCEL),lab,distributed,audit]" --group dev
	@touch $@
