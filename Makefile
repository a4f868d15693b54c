PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# two ranks of a test already fill two cores
WORKERS ?= 2
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: demo test check bench clean

demo: $(READY)
	$(BIN)/tpplan dry-run llama.yaml --model benchmarks/configs/llama-3.1-8b.json --tp 8 --batch 1 --seq 8192
	$(BIN)/python -m benchmarks.demo

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks.host_overhead --check
	$(BIN)/python -m benchmarks.step_time --check

# the constraints pin torch to a build without CUDA where only a CPU is at hand
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
