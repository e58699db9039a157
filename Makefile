# make demo   see the idea on this machine            make test   prove the promises
# make test-slow  faults, examples, site, measuring     make test-integrations  frameworks and trackers
# make check  formatting, lint, types, layers         make bench  what it costs
# make docs   build the documentation                 make dist   wheel and sdist, checked
# make setup  everything for developers
#
# PYTHON       the interpreter to build .venv from (3.11 or newer)
# TORCH_INDEX  an index of PyTorch wheels, e.g. https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
FLOOR_VENV ?= .venv-floor
TESTS ?= tests
PAGES := build/docs
SIDE_BY_SIDE := $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8 --dist=worksteal
INTEGRATIONS := $(patsubst %,tests/integrations/test_%.py,accelerate_alone transformers ray streaming_data tensorflow trackers grafana \
	launchers launcher_schemas)
LONG := tests/property/test_exactly_once.py tests/property/test_weighting.py

.PHONY: setup demo test test-slow test-integrations test-floor check house format bench dist docs pages regen clean
.DELETE_ON_ERROR:
# Without bytecode, each of the thousand processes of the tests compiles the sources again.
unexport PYTHONDONTWRITEBYTECODE

setup: $(VENV)/.dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"evenstride needs Python 3.11 or newer; name one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# One stamp for each set of extras: the demo does not wait for the linters.
$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing evenstride and PyTorch into $(VENV); the first time takes a while ..."
	$(PIP_INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing evenstride, PyTorch and the developers' tools into $(VENV) ..."
	$(PIP_INSTALL) --editable '.[demo,dev]'
	@touch $@

$(VENV)/.integrations: pyproject.toml constraints.txt | $(VENV)/.dev
	@echo "installing transformers, Ray, TensorFlow, trackers and readers of streaming data into $(VENV) ..."
	$(PIP_INSTALL) --editable '.[demo,dev,integrations]'
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[docs]'
	@touch $@

# Exit code 3 says "measured, but the machine was disturbed": shown, and no reason to fail.
demo: $(VENV)/.demo
	$(BIN)/evenstride demo || test $$? -eq 3

# What measures has the machine to itself; the rest shares it. Each process of pytest may start
# four of its own, with torch.
test: $(VENV)/.dev
	@status=0; \
	$(SIDE_BY_SIDE) -m 'not alone and not slow' || status=1; \
	$(BIN)/python -m pytest -m 'alone and not slow' tests || status=1; \
	exit $$status

# Then 2,000 examples each of the properties that exactness rests on.
test-slow: $(VENV)/.dev
	@status=0; \
	$(SIDE_BY_SIDE) -m 'slow and not alone' tests || status=1; \
	$(BIN)/python -m pytest -m 'slow and alone' tests || status=1; \
	HYPOTHESIS_PROFILE=long $(SIDE_BY_SIDE) --timeout=600 $(LONG) || status=1; \
	exit $$status

# The integrations whose libraries `dev` does not install; without them, their tests are skipped.
# By files, as all tests of one share its cluster or its runs.
test-integrations: $(VENV)/.integrations
	@status=0; \
	$(SIDE_BY_SIDE) --dist=loadfile -m 'not alone' $(INTEGRATIONS) || status=1; \
	$(BIN)/python -m pytest -m alone $(INTEGRATIONS) || status=1; \
	exit $$status

test-floor: pyproject.toml
	$(PYTHON) -m venv $(FLOOR_VENV)
	$(FLOOR_VENV)/bin/python -m pip install --quiet 'torch==2.6.0' --editable '.[demo,dev]' \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(FLOOR_VENV)/bin/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff format --check src tests examples benchmarks tools
	$(BIN)/ruff check src tests examples benchmarks tools
	$(BIN)/mypy
	$(BIN)/lint-imports

# Wheel and sdist as they would be released, in dist.
dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist >/dev/null
	$(BIN)/python tools/check_dist.py dist

# Sizes, names, imports and state of the source, as figures; `--list` shows what is behind one.
house: | $(BIN)/python
	$(BIN)/python tools/house.py

format: $(VENV)/.dev
	$(BIN)/ruff format src tests examples benchmarks tools
	$(BIN)/ruff check --fix src tests examples benchmarks tools

bench: $(VENV)/.demo
	$(BIN)/python benchmarks/overhead.py --out runs/overhead.json

# The site is docs/ with the examples and the project's own pages beside it, so links to these are
# shortened. zensical stops at a link, an anchor or a page that is not there.
docs: $(VENV)/.docs
	rm -rf $(PAGES) && mkdir -p $(PAGES)
	cp -R docs/. $(PAGES)
	sed -i 's#](\.\./#](#g' $(PAGES)/*.md
	sed -i 's#](\.\./\.\./#](../#g' $(PAGES)/*/*.md
	sed -i 's#](\.\./\.\./\.\./#](../../#g' $(PAGES)/explanation/decisions/*.md
	cp -R examples ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md SECURITY.md CODE_OF_CONDUCT.md $(PAGES)
	sed -i 's#](\(\(\.\./\)*\)docs/#](\1#g' $(PAGES)/[A-Z]*.md $(PAGES)/examples/*.md $(PAGES)/examples/*/*.md
	find $(PAGES) -name __pycache__ -prune -exec rm -r {} + && rm $(PAGES)/*.py
	$(BIN)/zensical build --clean --strict

# The parts of the reference that follow from the code: commands, options, metrics.
pages: $(VENV)/.dev
	$(BIN)/python tools/reference_pages.py

# After an intended change of decisions or messages: write the pages, record the golden traces again,
# and the messages of the tests in TESTS. Then read the difference.
regen: pages
	$(BIN)/python -m tests.golden.recording
	$(SIDE_BY_SIDE) --record-messages $(TESTS)

clean:
	rm -rf $(VENV) $(FLOOR_VENV) site dist build runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
