# Every command sets up what it needs: .venv, the packages, the broker, Java. Nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

SEEDS ?= 1000
SEED_START ?= 0
MINUTES ?= 20
PROCESSES ?= auto
KINDS := gate real clock broker spark ray proofs fresh
BENCH ?= ingest
# PULSAR=4.0.8 runs tests on the broker of another release; it is fetched first.
PULSAR ?=
export KEYSHARD_TEST_PULSAR := $(PULSAR)
OLDEST_PYSPARK := 4.0.0 4.1.0 4.2.0
OLDEST := $(VENV)/oldest
# PySpark 4.0 leaves sockets to the garbage collector.
OLDEST_WARNINGS := -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning
OLDEST_TESTS := exactly_once.py schemas.py batch.py catalog.py write_batch.py write_formats.py

# Everything here starts many short processes. If Python wrote no bytecode, each would compile keyshard again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all $(KINDS:%=test-%) test-preempt landing cluster oldest unit simulate chaos lint format docs bench wheel protocol help
.DEFAULT_GOAL := help

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 13

demo: $(INSTALLED) ## 10 ranges over 5 partitions into Spark, with a broker killed on the way
	@$(BIN)/python -m examples.demo

test: test-gate test-real ## the gate: tests that are true on any machine, then a dozen with a real broker, Spark and Ray (10 minutes on 2 cores)

test-real: $(INSTALLED) ## the dozen tests of the gate with a real broker, Spark and Ray, in one process
	@$(BIN)/python -m pytest --kind real

test-all: $(INSTALLED) ## the gate, and all other kinds of tests, whatever fails (over one hour on 2 cores)
	@$(MAKE) --no-print-directory --keep-going $(KINDS:%=test-%)

test-gate: ## the part of the gate without a broker
test-clock: ## tests without a broker that measure elapsed time, take long, or need a browser
test-broker: ## the other tests that need a real broker; PULSAR=4.0.8 for that of another release
test-spark: ## the other tests that need Spark
test-ray: ## the other tests that need Ray
test-proofs: ## chaos, random topics, mutants and measured memory
test-gate test-clock test-broker test-spark test-ray test-proofs: test-%: $(INSTALLED)
	@$(BIN)/python -m pytest --kind $* -n $(PROCESSES)

test-fresh: $(INSTALLED) ## properties and simulations with fresh seeds
	@$(BIN)/python -m pytest --kind gate -m hypothesis --hypothesis-profile fresh -n $(PROCESSES)
	@$(BIN)/python -m tests.proofs simulation --seeds 20 --seed-start $$(date +%s)

test-preempt: $(INSTALLED) ## tests of the gate that have threads; the threads stop at random calls: SEED=... (half an hour)
	@KEYSHARD_TEST_FACTOR=$${KEYSHARD_TEST_FACTOR:-4} $(BIN)/python -m pytest --kind gate --preempt $(or $(SEED),$$(date +%s)) \
	  -n 8 tests/unit tests/runtime tests/contract tests/integration

landing: $(INSTALLED) ## what CI runs, in a fresh clone of HEAD; notes the commit in .venv/.landing if all is green
	@.ci/landing

oldest: $(INSTALLED) ## the main path of Spark on the oldest PySpark of each minor version (about 20 minutes on 2 cores)
	@# All other packages come from $(VENV), which stands after this environment on the path.
	@for version in $(OLDEST_PYSPARK); do \
	  echo "PySpark $$version"; \
	  $(PYTHON) -m venv $(OLDEST)/$$version && \
	  $(OLDEST)/$$version/bin/python -m pip install --quiet --disable-pip-version-check pyspark==$$version && \
	  $(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > "$$($(OLDEST)/$$version/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/others.pth" && \
	  $(OLDEST)/$$version/bin/python -m pytest $(OLDEST_WARNINGS) $(addprefix tests/spark/test_,$(OLDEST_TESTS)) || exit 1; \
	done

unit: $(INSTALLED) ## unit and property tests only (one minute on 2 cores)
	@$(BIN)/python -m pytest -n $(PROCESSES) tests/unit tests/property -m "not broker and not spark"

simulate: $(INSTALLED) ## seeded runs with faults: SEEDS=10000 SEED_START=0, WORLD=spark, handlers, workers or pipeline, or with -frames (not workers), VERBOSE=1
	@$(BIN)/python -m tests.proofs simulation --seeds $(SEEDS) --seed-start $(SEED_START) $(if $(WORLD),--world $(WORLD)) $(if $(VERBOSE),--verbose)
	@$(if $(WORLD)$(VERBOSE),:,$(BIN)/python -m tests.proofs fuzz --seeds $(SEEDS) --seed-start $(SEED_START))

chaos: $(INSTALLED) ## MINUTES of faults on a real broker (20), then the verdict; SEED=... repeats them, SUBJECT=stream|handlers|pipeline, WORKERS=embedded|processes:2, TRANSPORT=wire|client
	@$(BIN)/python -m tests.proofs chaos --fault-minutes $(MINUTES) $(if $(SEED),--seed-start $(SEED)) $(if $(SUBJECT),--subject $(SUBJECT)) $(if $(WORKERS),--workers $(WORKERS)) $(if $(TRANSPORT),--transport $(TRANSPORT)) --json chaos.json

cluster: $(INSTALLED) ## the contract, exactly-once tests and chaos on two brokers and two bookies; MINUTES=20, SEED=...
	@KEYSHARD_TEST_BROKERS=2 $(BIN)/python -m pytest tests/contract tests/spark/test_exactly_once.py -m "broker or spark"
	@$(BIN)/python -m tests.proofs chaos --brokers 2 --fault-minutes $(MINUTES) $(if $(SEED),--seed-start $(SEED)) --json chaos.json

lint: $(INSTALLED) ## format, lint, types, import rules and the release workflow
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m tests.page_types
	@$(BIN)/lint-imports --cache-dir $(VENV)/.import_linter
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/zizmor --offline --no-progress --quiet .github/workflows

format: $(INSTALLED) ## format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(INSTALLED) ## build the documentation site in build/site; a warning is an error (make test builds it too)
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env -b html -c docs -d build/doctrees . build/site
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b markdown -c docs -d build/doctrees . build/site
	@echo "Open build/site/docs/index.html"

bench: $(INSTALLED) ## BENCH=ingest (rows per second against a bare client); bench/README.md lists all
	@$(BIN)/python -m bench $(BENCH)

wheel: $(INSTALLED) ## sdist and wheel of this platform in dist/, tried in a clean environment without rustc (1 to 3 minutes)
	@$(BIN)/python packaging/make_distributions.py

protocol: ## generate keyshard/broker/wire/pulsar_api_pb2.py (this version's code runs with protobuf 4 to 7)
	@$(PYTHON) -m venv $(VENV)/.protoc
	@$(VENV)/.protoc/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools==1.62.3
	@$(VENV)/.protoc/bin/python -m grpc_tools.protoc -I. --python_out=. keyshard/broker/wire/pulsar_api.proto

$(INSTALLED): pyproject.toml $(wildcard keyshard/broker/wire/native/*.rs)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "keyshard needs Python 3.10 or newer as '$(PYTHON)'. Install it, or name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { \
	  echo "'$(PYTHON)' lacks the venv module. Install it (on Debian and Ubuntu: the package python3-venv)." >&2; exit 1; }
	@echo "Installing keyshard and what it needs into $(VENV): once, one to three minutes." >&2
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' || { \
	  echo "Could not install the packages. Check that a Python package index can be reached, then run the same command again." >&2; exit 1; }
	@touch $@
