# Each target does its own set-up: a machine with Python 3.11+ and make needs nothing else.

PYTHON ?= python3
STORE  ?= ./quire-data
JOBS   ?= 3
NAME   ?=
ARGS   ?=
BUILD  ?= build
SECONDS ?= 300

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
FOUND := 'import sys; sys.exit(sys.version_info < (3, 11))'

# Bytecode is kept, whatever the environment says: without it every program that a test starts compiles quire again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup run test lint bench torture docs man dist pack clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install quire into it

# The build backend is pinned too: older pips take its version from PIP_CONSTRAINT, newer ones from PIP_BUILD_CONSTRAINT.
$(STAMP): pyproject.toml constraints.txt
	@python=; for each in $(PYTHON) python3.14 python3.13 python3.12 python3.11; do \
	  if "$$each" -c $(FOUND) 2>/dev/null; then python=$$each; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "quire needs Python 3.11 or newer, and '$(PYTHON)' is not: say which with make PYTHON=/path/to/python3" >&2; \
	  exit 1; \
	fi; \
	echo "setting up $(VENV) with $$("$$python" --version): downloads packages, once, for two or three minutes"; \
	"$$python" -m venv $(VENV)
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
	  $(BIN)/python -m pip install --quiet --quiet --no-input -e '.[dev,spark]'
	@touch $@

run: $(STAMP) ## take the tour in STORE (./quire-data), on local Spark
	@$(BIN)/quire tour --spark --store $(STORE)

test: $(STAMP) ## the fast tests
	@$(BIN)/python -m pytest -q -n $(JOBS) -m "not slow" $(ARGS)

lint: $(STAMP) ## style, types, import direction
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo "run $(BIN)/ruff format" >&2; exit 1; }
	@$(BIN)/mypy
	@report=$$($(BIN)/lint-imports --no-logo) || { echo "$$report"; exit 1; }

bench: $(STAMP) ## list the benchmarks, or run one: make bench NAME=manifest
	@$(BIN)/python -m bench $(NAME) $(ARGS)

# hypothesis marks its tests itself, so the properties are searched again with the larger budget.
torture: $(STAMP) ## the slow tests, more examples for the properties, the simulation, the soak and an outage for SECONDS (300)
	@QUIRE_HYPOTHESIS_PROFILE=torture QUIRE_SIMULATION_SECONDS=$(SECONDS) QUIRE_SOAK_SECONDS=$(SECONDS) \
	  QUIRE_AWAY_SECONDS=$(SECONDS) \
	  $(BIN)/python -m pytest -q -n $(JOBS) -m "slow or hypothesis" --timeout 3600 $(ARGS)

# The source directory is the repository, because pages link to README and CONTRIBUTING; docs/conf.py says which files are pages.
docs: $(STAMP) ## the documentation site, in build/site
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --quiet --no-input -e '.[docs]'
	@$(BIN)/python -m bench.draw > /dev/null && $(BIN)/python -m docs.api
	@$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs -d $(BUILD)/doctrees . $(BUILD)/site
	@echo "$(BUILD)/site/index.html"

man: $(STAMP) ## man pages of all commands, in build/man/man1
	@rm -rf $(BUILD)/man && $(BIN)/python -m quire.cli.man $(BUILD)/man/man1

# Times in the archives are those of hatchling, or SOURCE_DATE_EPOCH: two builds of one tree are the same bytes.
# The pure wheel, which any machine may install; from the source distribution the C part is built where it is installed.
dist: man ## the wheel, with man pages, and the source distribution, ready to publish, in dist
	@rm -rf dist && umask 022 && QUIRE_PURE=1 QUIRE_MAN=$(BUILD)/man/man1 $(BIN)/python -m hatchling build -d dist > /dev/null
	@cd dist && sha256sum *

# Of a virtual environment only bin/python is used by executors: that finds its packages wherever the archive is unpacked, as long as
# the same Python is installed there. Spark brings its own part of pyspark.
pack: $(STAMP) ## build/quire-env.tar.gz: quire and what it needs, for executors of a cluster
	@mkdir -p $(BUILD) && rm -rf $(BUILD)/env && $(BIN)/python -m venv $(BUILD)/env
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
	  $(BUILD)/env/bin/python -m pip install --quiet --quiet --no-input . 'pandas>=2.2,<3'
	@tar -cf - -C $(BUILD)/env . | gzip -1 > $(BUILD)/quire-env.tar.gz && rm -rf $(BUILD)/env
	@ls -lh $(BUILD)/quire-env.tar.gz | awk '{print $$5, $$NF}'

clean: ## remove what the other targets made, the tour's store included
	rm -rf $(VENV) build dist quire-data .hypothesis .mypy_cache .ruff_cache .import_linter_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
