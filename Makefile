# `make demo` and `make test` need python3 (3.11 or newer), make and pip. Everything stays inside this folder.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

export PYTHONNOUSERSITE := 1
export PIP_USER := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The demo: a limit that is too low to keep everything, so that stages recompute; long files are split, short ones packed.
DEMO_COMPILE := --stages 2 --memory 54MiB --max-length 3072 --batch-size 8 --steps 6
DEMO_RUN := --device cpu --lr 2e-3

.PHONY: demo test test-slow check format wheel docs clean

demo: $(INSTALLED)
	@rm -rf demo && mkdir demo
	$(BIN)/python examples/stdlib_dataset.py demo/dataset.jsonl
	cd demo && ../$(BIN)/infinipipe profile tiny --device cpu
	cd demo && ../$(BIN)/infinipipe compile dataset.jsonl $(DEMO_COMPILE)
	cd demo && ../$(BIN)/infinipipe inspect plan.msgpack --table
	cd demo && ../$(BIN)/infinipipe run plan.msgpack $(DEMO_RUN)
	$(BIN)/python examples/show_run.py demo/infinipipe-run/metrics.jsonl

test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m 'not slow'

# What takes longer than most changes need to wait for.
test-slow: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m slow

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Build the wheel, install it apart from the source tree and import it from there.
wheel: $(INSTALLED)
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(BIN)/python -m pip install --quiet --no-deps --target build/wheel/site build/wheel/infinipipe-*.whl
	cd build/wheel/site && PYTHONPATH=. ../../../$(BIN)/python -P -m infinipipe --version
	test -f build/wheel/site/infinipipe/py.typed

docs: $(INSTALLED)
	$(BIN)/python docs/make_cli.py > docs/cli.md

clean:
	rm -rf .venv build dist demo

# Made once; again only when what it holds changes.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; name a newer one with make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing InfiniPipe and its dependencies into .venv (once; PyTorch is large)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
