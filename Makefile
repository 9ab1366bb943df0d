# Every target sets up .venv by itself; only Python 3.11+, git and make are needed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CONSTRAINTS ?= constraints.txt
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE # processes of tests would compile everything anew

.PHONY: demo test test-all check docs bench lock sbom advisories release-check clean

$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint $(CONSTRAINTS) --editable '.[dev]' # Python compiles what it imports
	@$(BIN)/python -c "import dp_accounting, hypothesis, matplotlib.pyplot, scipy.stats, sklearn.ensemble, torch._dynamo" # once, not in each process of tests
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/securevfl demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2

test-all: $(STAMP)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[test-all]'
	$(BIN)/python -m pytest -n 2 -m ""

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typecheck build/lib
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target build/typecheck .
	cd build/typecheck && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../mypy-cache -p securevfl
	$(BIN)/python -m pytest -q tests/test_imports.py

docs: $(STAMP)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[docs]'
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	@echo "the site: build/site/README.html"

bench: $(STAMP)
	$(BIN)/python -m benchmarks

lock: $(STAMP)
	$(BIN)/python docs/make_supply.py lock

sbom: $(STAMP)
	$(BIN)/python docs/make_supply.py sbom

advisories: $(STAMP)
	$(BIN)/python docs/make_supply.py advisories

# Installs what is locked, by hash, and then securevfl alone: what a release must be able to do.
release-check:
	rm -rf build/release
	$(PYTHON) -m venv build/release
	build/release/bin/pip install --quiet --require-hashes --no-deps -r requirements.lock
	build/release/bin/pip install --quiet --no-deps .
	build/release/bin/pip check
	build/release/bin/securevfl --help > /dev/null

clean:
	rm -rf $(VENV) build *.egg-info
