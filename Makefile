# `make` lists the targets. Everything that is installed goes below .venv/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST_ARGS ?=
BENCH_ARGS ?=
CHAOS_ARGS ?=
SOAK_ARGS ?=
FUZZ ?= 10000
MINUTES ?= 30

.DEFAULT_GOAL := help
.PHONY: help test test-rest test-side test-boxes demo bench bench-gate chaos fuzz soak deb clean $(VENV)

help: ## list the targets
	@sed -n 's/^\([a-z.-]*\):.*## /\1\t/p' Makefile | expand -t 12

# The stamp is last: an interrupted install is done again. pip learned --group in 25.1; -qq leaves
# its errors alone.
$(VENV)/.installed: pyproject.toml
	@echo "installing onebitd and its tools into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -qq --upgrade 'pip>=25.1'
	@$(PIP) install -qq --editable . --group lint --group test
	@touch $@

$(VENV): $(VENV)/.installed ## install onebitd, test and lint tools

test: $(VENV)/.installed ## run every test and check (PYTEST_ARGS=... to choose)
	@$(BIN)/python -m tests.tools.fetch_clients & clients=$$!; \
		$(BIN)/python -m tests.tools.fetch_llama all; status=$$?; wait $$clients && exit $$status
ifeq ($(PYTEST_ARGS),)
	@$(MAKE) --no-print-directory -j3 test-rest test-side test-boxes
else
	@$(BIN)/python -m tests.tools.fetch_boxes
	@$(BIN)/python -m pytest $(PYTEST_ARGS)
endif

# Three lanes at once, for two processors, that take about as long: most of what needs a real decoder;
# what often waits, for the timers of booted systemd boxes (where the Debian package is built once, also
# for those that look into it) or in a storm; and all else. What the first two say comes at their end.
BOX_TESTS := tests/systemd tests/repo/test_deb.py tests/chaos tests/fuzz \
	$(addprefix tests/e2e/test_,history.py page.py readme.py try_bench.py)
SIDE_TESTS := tests/contract tests/bench $(sort $(wildcard tests/e2e/test_*_real.py)) \
	$(addprefix tests/e2e/test_,clients.py conformance.py hybrid_e2e.py never_lose.py prefill_llama.py \
	prefill_numpy.py prefill_share.py shared_route.py terminal.py terminal_states.py)

# The log tells where the time goes.
SLOWEST := --durations=25 --durations-min=5

# A few hundred programs are started: each would compile this package anew.
unexport PYTHONDONTWRITEBYTECODE

test-rest:
	@$(BIN)/python -m pytest $(SLOWEST) $(addprefix --ignore=,$(SIDE_TESTS) $(BOX_TESTS))

test-side:
	@$(BIN)/python -m pytest $(SLOWEST) -p no:cacheprovider $(SIDE_TESTS) >$(VENV)/side.log 2>&1; \
		status=$$?; cat $(VENV)/side.log; exit $$status

test-boxes:
	@mkdir -p $(VENV)/boxes
	@$(BIN)/python -m tests.tools.fetch_boxes
	@$(BIN)/python -m pytest $(SLOWEST) -p no:cacheprovider $(BOX_TESTS) >$(VENV)/boxes/test.log 2>&1; \
		status=$$?; cat $(VENV)/boxes/test.log; exit $$status

demo: $(VENV)/.installed ## serve a small model with a handoff (ONCE=1: one request, then stop)
	@$(BIN)/python -m tests.tools.fetch_llama demo
	@ONCE='$(ONCE)' $(BIN)/python tests/tools/demo.py

bench: $(VENV)/.installed ## measure the HTTP side beside nginx, and the handoff against the plain decoder
	@$(BIN)/python -m tests.tools.fetch_llama demo
	@$(BIN)/python -m tests.bench $(BENCH_ARGS)

bench-gate: $(VENV)/.installed ## replay traces: is policy auto as fast as the better way? (20 min)
	@$(BIN)/python -m tests.tools.fetch_llama demo
	@$(BIN)/python -m tests.bench gate

chaos: $(VENV)/.installed ## clients in a storm of faults (CHAOS_ARGS='--requests 20000 --seed 7')
	@$(BIN)/python -m tests.chaos chaos $(CHAOS_ARGS)

fuzz: $(VENV)/.installed ## malformed and generated requests, more than the suite has (FUZZ=10000)
	@$(BIN)/python -m tests.tools.fetch_clients
	@FUZZ_CONNECTIONS=$(FUZZ) $(BIN)/python -m pytest -p no:cacheprovider tests/fuzz

soak: $(VENV)/.installed ## clients for MINUTES=30: memory and descriptors must not grow
	@$(BIN)/python -m tests.chaos soak --minutes $(MINUTES) $(SOAK_ARGS)

deb: ## build dist/onebitd_VERSION_all.deb with Debian's tools
	@$(PYTHON) units/debian/build.py

clean: ## remove all that was installed or built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
