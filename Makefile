# make place      place gnmt-4 on four P100s: the main job; installs what placing needs and nothing else
# make test       lint, types, layers and all tests but the long ones; installs all that tests need
# make bench     a page of benchmarks/results anew: make bench NAME=search OPTIONS='--budget 10s'
# make docs       the documentation as a site, in site/
# make schemas    the JSON Schemas in docs/schemas anew
# make pictures   the pictures of README and docs anew
# make test-torch VERSION=2.10.0   tests of all that calls PyTorch, with this version of it
PYTHON ?= python3
MODEL ?= gnmt-4
DEVICES ?= 4xp100-pcie-16g
BUDGET ?= 30s

# where it is set, every process compiles the modules that it imports anew: 3 s of each that loads PyTorch
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PLACING := .venv/placing
TESTING := .venv/testing
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile -c constraints.txt

.PHONY: place test test-long test-torch lint kernels bench docs schemas pictures clean

place: $(PLACING)
	@$(BIN)/gdp place $(MODEL) --devices $(DEVICES) --budget $(BUDGET)
	@echo "The plan is in $(CURDIR)"

# kernels are compiled on one core while the other checks types, so that the workers of tests find them
test: $(TESTING)
	@$(MAKE) --no-print-directory --jobs 2 lint kernels
	$(BIN)/pytest -n logical --maxprocesses 4 --dist loadfile

test-long: $(TESTING)
	$(BIN)/pytest -m long

# the other packages are the tested ones; a CUDA build of PyTorch takes 5 GB
test-torch:
	$(PYTHON) -m venv .venv-torch-$(VERSION)
	sed 's/^torch==.*/torch==$(VERSION)/' constraints.txt > .venv-torch-$(VERSION)/constraints.txt
	.venv-torch-$(VERSION)/bin/pip install --quiet -c .venv-torch-$(VERSION)/constraints.txt -e '.[dev]'
	.venv-torch-$(VERSION)/bin/pytest -n logical --maxprocesses 4 --dist loadfile tests/models tests/execute tests/parallel

lint: $(TESTING)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

kernels: $(TESTING)
	$(BIN)/python -c 'from gdp.planning.warm_up import warm_up; warm_up(("auto", "exact", "gdp-zero-shot"), num_devices=99)'

bench: $(TESTING)
	$(BIN)/python -m benchmarks $(NAME) $(OPTIONS)

schemas: $(TESTING)
	$(BIN)/python docs/json_documents.py

# what the page prints and its picture are of one run
pictures: $(TESTING)
	$(BIN)/python tests/doc_pages.py README.md

docs: $(TESTING)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# --no-compile: modules are compiled when they are first imported, and most of PyTorch's never are
$(PLACING): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("gdp needs Python 3.11 or newer; make PYTHON=... names another")'
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	@touch $@

$(TESTING): $(PLACING)
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps timm  # without torchvision, which brings gigabytes of CUDA; tests stand in for it
	@touch $@

clean:
	rm -rf .venv site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
