# The two commands that a newcomer needs are `make demo` and `make test`; both set themselves up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo test test-transfer check bench docs nightly clean

demo: $(VENV)/.base
	@$(BIN)/splitserve demo

test: $(VENV)/.dev
	$(BIN)/splitserve model pull
	$(BIN)/python -m pytest -m "not nightly and not transfer" --durations=5

# All transports and tiers that install here. A redis server and mooncake's libraries are Debian's:
# redis-server, libibverbs1 librdmacm1 libnuma1 liburing2.
test-transfer: $(VENV)/.transports
	$(BIN)/splitserve model pull
	$(BIN)/python -m pytest -m "transfer and not nightly" --durations=10

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

nightly: $(VENV)/.transports
	$(BIN)/splitserve model pull
	$(BIN)/python -m pytest -m nightly --durations=10
	$(MAKE) bench

bench: $(VENV)/.dev
	$(BIN)/splitserve model pull
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build *.egg-info

# torch first, at the version that the constraints name: without them pip takes gigabytes of CUDA.
$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "splitserve needs Python 3.11 or newer; set PYTHON=...")'
	@echo "installing into $(VENV) (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.transports: $(VENV)/.dev
	@$(PIP) install -c constraints.txt -e '.[dev,transports]'
	@touch $@
