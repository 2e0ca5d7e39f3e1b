# What one does with this repository. `make help` says what each target is for.
#
# Everything is installed into $(VENV), with the versions of constraints.txt; a second run of a target installs nothing.

PYTHON    ?= $(shell command -v python3.11 || command -v python3)
VENV      ?= .venv
BIN       := $(VENV)/bin
# Three more than there are cores: many tests wait for processes, few compute.
JOBS      ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 3)
SEEDS     ?= 10000
# Of `make mutants`: files of the server (none: those that it knows), and how many changes are drawn.
ROOM      ?=
# The seed of `make mutants` (1) and of the first run of `make test-again` (drawn), and how often that runs the suite.
SEED      ?=
RUNS      ?= 10
COUNT     ?= 1500
PYTEST    ?= $(BIN)/python -m pytest
STAMPS    := $(VENV)/.made
PIP       := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt
LOCK      := $(BIN)/uv pip compile --constraint constraints.txt --python-version 3.11 --generate-hashes --no-header \
             --no-annotate --quiet --no-emit-package marserve-client
# What the server's lock has too is left out, and setuptools, which torch wants for compiling extensions alone.
LOCK_TORCH = $(LOCK) --python-platform x86_64-manylinux_2_28 \
             $(foreach name,filelock fsspec setuptools typing-extensions,--no-emit-package $(name))
# Whole files side by side, each collected by the runner that runs it; those that share
# what is slow to start by one runner (tests/support/by_file.py).
PARALLEL  := --numprocesses $(JOBS) --maxprocesses 5 --dist loadgroup --by-file \
             -o console_output_style=classic
# Of `make test-lowest` and `make test-newest`: files or folders of tests; none: all.
TESTS     ?=
# What a worker imports, also under the oldest Python of `allowed_interpreters`: mypy reports only on files that it is given.
OLDEST    := $(wildcard server/marserve/*.py) server/marserve/worker server/marserve/archive/writing/python_source.py \
             handlers/marserve_handlers
# What `make test` runs.
QUICK     := not long and not system and not browser and not ready and not clients

.DEFAULT_GOAL := help

# Tests start servers by the hundred: what they import is compiled once, also where the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE
.DELETE_ON_ERROR:

.PHONY: help
help:  ## say what each target is for
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

.PHONY: serve
serve: $(STAMPS)/serve  ## start a server with the digits model on http://127.0.0.1:8080; Ctrl-C stops it
	$(BIN)/marserve start --foreground --ts-config config.properties

.PHONY: test
test: $(STAMPS)/test  ## run the tests that every change must pass (minutes)
	$(PYTEST) $(PARALLEL) -m "$(QUICK)"

.PHONY: test-system
test-system: $(STAMPS)/test  ## run what `make test` has a shorter case of: roll-outs, stores, clusters, platforms (minutes)
	$(PYTEST) --numprocesses $(JOBS) --maxprocesses 4 --dist loadfile -m "system and not long" \
	    $$(grep -rl --include='test_*.py' 'mark\.system' tests)

.PHONY: test-browser
test-browser: $(STAMPS)/browser  ## open /docs and the dashboard in a headless Chromium (apt-get install chromium); pictures in build/browser
	$(PYTEST) -m browser tests/end_to_end/test_docs_page.py tests/end_to_end/test_dashboard*.py \
	    tests/end_to_end/test_slow_requests_page.py -rs

.PHONY: test-prometheus
test-prometheus: $(STAMPS)/test  ## put rules, alerts and dashboards to a real Prometheus (apt-get install prometheus)
	$(PYTEST) tests/deploy/test_monitoring.py tests/deploy/test_monitoring_live.py -rs

.PHONY: test-ready
test-ready: $(STAMPS)/ready  ## run the ready handlers beside their libraries (transformers, scikit-learn, …)
	$(PYTEST) tests/handlers/ready tests/end_to_end/test_ready_handlers.py -m "ready or not ready" --timeout 900 -rs

.PHONY: test-clients
test-clients: $(STAMPS)/clients  ## run real clients (tritonclient, kserve, mlserver, LitServe's, curl, …), each in its environment
	$(PYTEST) tests/clients -m clients --timeout 900 -rs

.PHONY: test-contract
test-contract: $(STAMPS)/test  ## play all that a real TorchServe answered against this server (minutes)
	$(PYTEST) tests/contract --numprocesses 2 --dist load

.PHONY: test-long
test-long: $(STAMPS)/long  ## run the long suites: exact time bounds, soak, big models, many drawn examples
	$(PYTEST) -m long --timeout 1800
	$(PYTEST) -m "hypothesis and not long" --hypothesis-profile long --timeout 1800

.PHONY: test-cost
test-cost: $(STAMPS)/test  ## run the tests and say which files take the most seconds of a processor
	rm -f .pytest_cache/cost.jsonl
	mkdir -p .pytest_cache
	$(PYTEST) $(PARALLEL) -m "$(QUICK)" -q --cost .pytest_cache/cost.jsonl
	$(BIN)/python tests/support/cost.py .pytest_cache/cost.jsonl

.PHONY: test-again
test-again: $(STAMPS)/test  ## run the tests RUNS times (10) in random order and say what failed how often (SEED=7 RUNS=1)
	$(BIN)/python tests/support/again.py --runs $(RUNS) $(if $(SEED),--seed $(SEED)) --history .test-again/runs.jsonl -- \
	    $(PYTEST) $(PARALLEL) -m "$(QUICK)" -q

.PHONY: package-test
package-test: $(STAMPS)/test  ## install the wheel alone into empty environments and follow the README (minutes)
	$(PYTEST) tests/packaging --timeout 1800

.PHONY: test-lowest
.PHONY: test-newest
test-lowest: RESOLUTION = lowest-direct
test-newest: RESOLUTION = highest
test-lowest: $(STAMPS)/uv  ## run the tests with the oldest versions that pyproject.toml allows (PYTHON=python3.12: there)
test-newest: $(STAMPS)/uv  ## run the tests with the newest versions of the index (PYTHON as above)
test-lowest test-newest: LIKE = build/$(@:test-%=%)
test-lowest test-newest:
	$(BIN)/uv venv --quiet --clear --python "$$("$(PYTHON)" -c 'import sys; print(sys.executable)')" $(LIKE)
	@if $(LIKE)/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then \
	    $(BIN)/python -m pip --python $(LIKE)/bin/python --disable-pip-version-check install -qq \
	        torch==$$(sed -n 's/^torch==//p' constraints.txt); \
	else echo "Without torch, which is tested with Python 3.11: its tests are skipped."; fi
	echo "torch; python_version < '3'" > $(LIKE)/without-torch.txt
	$(BIN)/uv pip install --quiet --python $(LIKE)/bin/python --resolution $(RESOLUTION) --only-binary :all: --no-binary marserve-client \
	    --override $(LIKE)/without-torch.txt -r pyproject.toml --group test \
	    $(foreach extra,onnx grpc otlp cloud hf security gpu export examples,--extra $(extra))
	$(BIN)/uv pip install --quiet --python $(LIKE)/bin/python hatchling
	$(BIN)/uv pip install --quiet --python $(LIKE)/bin/python --no-deps --editable .
	$(BIN)/uv pip list --python $(LIKE)/bin/python
	$(LIKE)/bin/python -m pytest $(PARALLEL) -m "$(QUICK)" -o filterwarnings=default $(TESTS)

.PHONY: test-beside
test-beside: $(STAMPS)/test $(STAMPS)/uv  ## install clients' packages beside the server, before it and after it (PYTHON=python3.12: there)
	MARSERVE_BESIDE_PYTHON="$(PYTHON)" $(PYTEST) tests/packaging/test_beside.py --timeout 1800 -rs

.PHONY: test-interpreters
test-interpreters: $(STAMPS)/test  ## serve models under other Pythons: those of PATH and pyenv, or PYTHONS=/a/python,/b/python
	MARSERVE_OTHER_PYTHONS="$(PYTHONS)" $(PYTEST) tests/end_to_end/test_interpreters.py -m "long or not long" -rs

.PHONY: image-test
image-test: $(STAMPS)/images  ## build the cpu image, look into it and run it, without a Docker engine (minutes, as root)
	$(PYTEST) tests/images -m "long or not long" --timeout 1800 -rP

.PHONY: image-locks
image-locks: $(STAMPS)/images  ## write docker/locks anew; TORCH_INDEX is the index of torch's CPU builds
	$(LOCK) --universal $(foreach extra,grpc otlp cloud hf security gpu,--extra $(extra)) -o docker/locks/server.txt pyproject.toml
	$(LOCK) --universal $(foreach name,numpy packaging protobuf,--no-emit-package $(name)) \
	    -o docker/locks/onnx.txt docker/locks/onnx.in
	$(LOCK) --python-platform x86_64-manylinux_2_28 \
	    $(foreach name,numpy packaging protobuf,--no-emit-package $(name)) \
	    -o docker/locks/onnx-gpu.txt docker/locks/onnx-gpu.in
	$(LOCK) --universal -o docker/locks/build.txt docker/locks/build.in
	$(LOCK) --universal -o docker/locks/sbom.txt docker/locks/sbom.in
	$(LOCK) --universal -o docker/locks/pip.txt docker/locks/pip.in
	$(LOCK) --universal --group test --group lint -o docker/locks/dev.txt docker/locks/dev.in pyproject.toml
	$(LOCK_TORCH) -o docker/locks/torch-gpu.txt docker/locks/torch.in
	$(LOCK_TORCH) $(if $(TORCH_INDEX),--index $(TORCH_INDEX)) -o docker/locks/torch-cpu.txt docker/locks/torch.in

.PHONY: protos
protos:  ## compile the .proto files after a change of theirs
	"$(PYTHON)" -m venv build/protos
	build/protos/bin/pip install -q -c constraints.txt grpcio-tools
	cd server/marserve/api/grpc/protos && files=$$(find . -name '*.proto' -printf '%P\n' | LC_ALL=C sort) && \
	    $(CURDIR)/build/protos/bin/python -m grpc_tools.protoc -I. --descriptor_set_out=messages.binpb $$files && \
	    sha256sum $$files > messages.sha256

.PHONY: test-gpu
test-gpu: $(STAMPS)/test  ## run the tests that need an accelerator; without one they say so and are skipped
	$(PYTEST) tests/gpu -m "gpu and (long or not long)" -rs

.PHONY: gpu-kit
gpu-kit: $(STAMPS)/venv  ## gather wheels for a machine with a GPU and no package index; tests/gpu_kit/run.py runs there
	cd tests && ../$(BIN)/python -m gpu_kit.gather

.PHONY: azurite
azurite: $(STAMPS)/venv  ## install the stand-in for Azure with npm; without it its tests are skipped
	npm install --no-audit --no-fund --loglevel error --prefix $(VENV)/azurite azurite@3.37.0

.PHONY: lint
lint: $(STAMPS)/lint  ## check style and formatting with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: format
format: $(STAMPS)/lint  ## let ruff mend style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: types
types: $(STAMPS)/lint $(STAMPS)/test  ## check types with mypy, strictly
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 $(OLDEST)

.PHONY: floors
floors: $(STAMPS)/lint $(STAMPS)/test  ## check who imports whom, and the house rules of tests/test_house.py
	$(BIN)/lint-imports
	$(PYTEST) tests/test_house.py

.PHONY: coverage
coverage: $(STAMPS)/test  ## run the tests and say which lines they never reach
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not long and not contract and not browser and not ready and not clients"
	$(BIN)/coverage combine
	$(BIN)/coverage report

.PHONY: simulate
simulate: $(STAMPS)/test  ## run the simulation of pools with SEEDS seeds (10000)
	MARSERVE_SIMULATION_SEEDS=$(SEEDS) $(PYTEST) tests/pool/dispatch/test_simulation.py --timeout 3600

.PHONY: mutants
mutants: $(STAMPS)/test  ## change the code in COUNT small ways and say what no test notices (about an hour; ROOM=pool/queue)
	PYTHONPATH=tests $(BIN)/python -m mutants $(ROOM) --seed $(or $(SEED),1) --count $(COUNT) $(if $(AGAIN),--again)

.PHONY: bench
bench: $(STAMPS)/test  ## measure what docs/benchmarks.md describes, beside others, in one run
	$(BIN)/python benchmarks/run.py

.PHONY: digits
digits: $(STAMPS)/test  ## train the digits model again and rebuild model_store/digits.mar
	$(BIN)/python examples/digits/train.py --store model_store

.PHONY: clean
clean:  ## remove caches and what was built, but not the environment
	rm -rf build dist logs htmlcov .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

.PHONY: clean-all
clean-all: clean  ## remove the environment, too, and the history of test-again
	rm -rf $(VENV) .test-again

# ------------------------------------------------------------------------------------------------- the environment

$(STAMPS)/venv: constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "marserve needs Python 3.11 or newer; set PYTHON=...")'
	@echo "Making an environment in $(VENV) ..."
	@"$(PYTHON)" -m venv $(VENV)
	@$(PIP) --upgrade pip hatchling editables
	@mkdir -p $(STAMPS) && touch $@

# torch by its name first: an index that offers a build for this machine under that version is then followed.
$(STAMPS)/serve: $(STAMPS)/venv pyproject.toml client/pyproject.toml
	@echo "Installing marserve and torch ..."
	@$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	@$(PIP) --no-build-isolation --editable ./client --editable ".[torch,grpc]"
	@touch $@

$(STAMPS)/test: $(STAMPS)/serve
	@echo "Installing what the tests need ..."
	@$(PIP) --no-build-isolation --editable ./client \
	    --editable ".[torch,onnx,grpc,otlp,cloud,hf,export,examples,gpu,ray]" --group test
	@touch $@

$(STAMPS)/browser: $(STAMPS)/test
	@echo "Installing what drives a browser ..."
	@$(PIP) --group browser
	@touch $@

$(STAMPS)/long: $(STAMPS)/test
	@echo "Installing what the long suites need: libraries that optimise models, py-spy, what draws requests ..."
	@$(PIP) --no-build-isolation --editable ./client --editable ".[optimise]" --group long
	@touch $@

# torch is there already, and nothing of the group asks for another one.
$(STAMPS)/ready: $(STAMPS)/test
	@echo "Installing the libraries of the ready handlers ..."
	@$(PIP) --group ready
	@touch $@

# Each client has an environment of its own below $(VENV)/clients; only those whose line has changed are made again.
$(STAMPS)/clients: $(STAMPS)/test tests/clients/environments.py
	@echo "Installing clients into environments of their own ..."
	@PYTHONPATH=tests $(BIN)/python -m clients.environments $(VENV)/clients
	@touch $@

$(STAMPS)/uv: $(STAMPS)/venv
	@$(PIP) uv
	@touch $@

$(STAMPS)/images: $(STAMPS)/test
	@echo "Installing what locks and checks images ..."
	@$(PIP) --group images
	@touch $@

$(STAMPS)/lint: $(STAMPS)/serve
	@echo "Installing the checkers ..."
	@$(PIP) --group lint
	@touch $@
