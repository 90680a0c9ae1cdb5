# `make train` and `make test` do all the set-up: they need Python 3.12 or later, and nothing else.
PYTHON ?= $(shell for p in python3 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
# Many containers set it: every process then parses all of its modules anew, 2.5 s of CPU instead of 0.8. Empty is unset.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test test-ci test-long test-all check reading golden golden-check

train: .venv/run
	$(BIN)/meshwright train

# One worker per core; each simulates eight devices and takes up to 3 GB.
PYTEST := $(BIN)/pytest -n logical --maxprocesses 16 --dist worksteal

test: .venv/dev
	$(PYTEST) -m "not exhaustive and not long"

test-ci: .venv/ci
	$(PYTEST) -m "not long" --durations=40

# A part of what is marked `long`, in about the time of `test-ci`. Each night one of the eight runs (.github/workflows/long.yml).
PART ?= 1/8
test-long: .venv/ci
	$(PYTEST) -m long --part $(PART) --durations=40

test-all: .venv/ci
	$(PYTEST) --durations=40

# The variable hides what the theme announces about its end in May 2027 (docs/log.md, "The theme of the docs").
check: .venv/docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# What a reader of the package meets, by room and by function. It asserts nothing.
reading: .venv/made
	$(BIN)/python bench/reading.py src/meshwright

.venv/made:
	@test -n "$(PYTHON)" || { echo "meshwright needs Python 3.12 or later: make train PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/run: .venv/made pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/dev: .venv/made pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ .venv/run

.venv/docs: .venv/dev
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@

.venv/ci: .venv/docs
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev-all]'
	@touch $@

# Outputs of transformers, peft and torch, written anew and compared with the committed ones, in an environment of their own.
PEERS := tests/golden/peers
golden: .venv-peers/made
	cd $(PEERS) && for script in architectures larger changed fields newer indexer_loss sizes layers adapters texts megatron_order distributed_checkpoint maxtext_checkpoint megatron_checkpoint; do ../../../.venv-peers/bin/python $$script.py ../files || exit 1; done

golden-check: .venv-peers/made
	.venv-peers/bin/python tests/golden/check.py

.venv-peers/made: tests/golden/peers.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -r tests/golden/peers.txt
	@touch $@
