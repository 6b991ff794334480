# Everything that a person types. `make help` lists it. All of it but `help` and `lint` needs root on Linux x86_64.

# Where `make bench` and `make bench-storage` write their figures, how long `make fuzz` runs, the port of `make serve`, and
# the folder of `make serve` and `make clean-node`.
OUT ?= bench.json
SECONDS ?= 60
PORT ?= 8000
STATE ?= /var/lib/aenv

CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/aenv
AENV_BIN_DIR ?= $(shell scripts/setup.sh --print-bin-dir)
CARGO_TARGET_DIR ?= $(CACHE)/target
# As in scripts/setup.sh: what set-up installed, then the system's own.
PATH := $(CACHE)/tools/bin:$(or $(CARGO_HOME),$(HOME)/.cargo)/bin:$(PATH):/usr/local/sbin:/usr/sbin:/sbin
# Tests look for the programs in AENV_BIN_DIR, the server in its own setting.
AENV_SERVER_BIN_DIR ?= $(AENV_BIN_DIR)
export PATH STATE AENV_BIN_DIR CARGO_TARGET_DIR AENV_SERVER_BIN_DIR

PYTHON := uv run --frozen --extra server python
PYTHON_SOURCES := src tests bench

.DEFAULT_GOAL := help
.PHONY: help demo test bench bench-storage fuzz lint serve clean-node setup lint-python lint-rust test-rust test-python

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  variables:   OUT=$(OUT) SECONDS=$(SECONDS) PORT=$(PORT) STATE=$(STATE)"

demo: setup ## A sandbox is set up, sleeps, wakes, is snapshotted and forked 16 times; takes minutes the first time
	$(PYTHON) -m bench.demo

test: setup lint test-rust fuzz test-python ## Everything that is checked: style, types, Rust and Python tests with real microVMs

bench: setup ## Measure a node of its own and write the figures to OUT
	$(PYTHON) -m bench.bench --out $(OUT)

bench-storage: setup ## Measure storage alone, beside plain files (takes a quarter of an hour, needs fio); figures to OUT
	$(PYTHON) -m bench.storage --out $(OUT)

fuzz: ## Feed hostile layers, archives and descriptors to our readers for SECONDS
	fuzz/run $(SECONDS)

lint: lint-python lint-rust ## Style and types

serve: ## Run a node in the foreground on 127.0.0.1:PORT with its state in STATE
	@scripts/setup.sh >&2
	@exec uv run --frozen --extra server aenv server --listen 127.0.0.1:$(PORT) --state $(STATE) --ensure-base

clean-node: setup ## Remove the node in STATE: its sandboxes, daemons, namespaces, mounts and files
	uv run --frozen --extra server aenv server clean --state $(STATE)

setup:
	@scripts/setup.sh

lint-python:
	uv run --frozen --extra server ruff check $(PYTHON_SOURCES)
	uv run --frozen --extra server ruff format --check $(PYTHON_SOURCES)
	uv run --frozen --extra server mypy

lint-rust:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings

test-rust:
	cargo test --workspace --locked

test-python:
	uv run --frozen --extra server pytest
