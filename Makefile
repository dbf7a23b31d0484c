# Everything here works in a fresh clone: each target sets up .venv first, which takes minutes once and nothing later.
# Pass options of the command behind a target with ARGS: make demo ARGS="--chunks 20"

SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
STAMP := .venv/.ready
ARGS ?=
JOBS ?= 2

# Modules that write files from the code; with --check they only compare.
GENERATORS := contracts.make_docs contracts.make_schemas tests.support.make_faults_page

# The stamp holds the folder that it was made for: a .venv that was moved, copied or has lost its Python is set up anew.
MADE_FOR := $(shell $(BIN)/python -c 'print(open("$(STAMP)").read(), end="")' 2>/dev/null)
ifneq "$(MADE_FOR)" "$(CURDIR)"
.PHONY: $(STAMP)
endif

.PHONY: help setup demo test lint format types imports docs-check generate check bench soak clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## install everything into .venv

# The stamp is written last: a set-up that was interrupted is done again from an empty .venv.
$(STAMP): pyproject.toml constraints.txt
	@set -eu -o pipefail; \
	if [ "$$(cat $(STAMP) 2>/dev/null)" != '$(CURDIR)' ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		python=; \
		for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14); do \
			if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
				python=$$candidate; break; \
			fi; \
		done; \
		if [ -z "$$python" ]; then \
			echo 'worldline needs Python 3.11 or newer and found none; name one: make setup PYTHON=/path/to/python3' >&2; \
			exit 1; \
		fi; \
		echo "setting up .venv with $$("$$python" --version); once, some minutes: PyTorch is large"; \
		"$$python" -m venv --clear .venv || { \
			echo 'could not make .venv; Debian and Ubuntu need the package python3-venv for it' >&2; \
			exit 1; \
		}; \
	fi; \
	rm -f $(STAMP); \
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[embedded,worker,lingbot,dev]' \
		| { grep -v 'already satisfied' || true; }; \
	printf '%s' '$(CURDIR)' > $(STAMP)

demo: $(STAMP) ## drive a world on an embedded broker; pictures in demo-out/
	@$(BIN)/worldline demo $(ARGS)

test: $(STAMP) ## run the tests
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --durations 10 -m 'not soak' $(ARGS)

lint: $(STAMP) ## style and likely bugs (ruff)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(STAMP) ## let ruff repair what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(STAMP) ## static types (mypy, strict)
	@$(BIN)/mypy

imports: $(STAMP) ## who may import whom (import-linter)
	@$(BIN)/lint-imports

docs-check: $(STAMP) ## links, commands and generated pages of the documentation
	@for generator in $(GENERATORS); do $(BIN)/python -m $$generator --check || exit; done
	@$(BIN)/python -m pytest -q tests/docs

generate: $(STAMP) ## write the pages and schemas that are made from the code
	@for generator in $(GENERATORS); do $(BIN)/python -m $$generator || exit; done

check: lint types imports docs-check test ## all of the above

bench: $(STAMP) ## measure; prints one table a benchmark
	@for script in benchmarks/bench_*.py; do \
		[ -e "$$script" ] || { echo 'there is no benchmark in benchmarks/'; break; }; \
		$(BIN)/python "$$script" $(ARGS) || exit; \
	done

soak: $(STAMP) ## the tests that run for minutes
	@$(BIN)/python -m pytest -m soak $(ARGS)

clean: ## remove what can be made again; .worldline/ (your sessions) stays
	@rm -rf .venv build dist demo-out *.egg-info
	@rm -rf .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
