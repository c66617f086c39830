# make demo | test | lint | soak | clean. Everything is prepared by .ci/environment.py; see its --help.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
DURATION ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
# The version the demo runs and those the tests run.
SGLANG ?= 0.5.20
SGLANG_TESTED ?= 0.5.6 0.5.10 0.5.12 0.5.16 0.5.18 0.5.20 0.5.23
# Those that only make soak runs.
SGLANG_SOAKED ?= 0.5.9 0.5.11

ENVIRONMENT := $(PYTHON) .ci/environment.py
DEV := .venvs/dev/bin

.PHONY: help python demo test lint soak clean environment-test

help:
	@echo 'make demo [DURATION=40]   the real SGLang with EAGLE-3 on the CPU, the exporter and Prometheus, with traffic'
	@echo '                          (DURATION in seconds; without it until Ctrl-C; DEMO_ARGS="--topk 4 --overlap")'
	@echo 'make test                 ruff, mypy and all tests, the real SGLang included (PYTEST_ARGS="-k registry")'
	@echo 'make lint                 ruff and mypy only'
	@echo 'make soak                 all tests, the long ones too'
	@echo 'make clean                remove .venvs and caches of the checkout (not the shared cache)'
	@echo
	@echo 'Each prepares what it needs, from a fresh machine, and says what it installs: $(ENVIRONMENT) --help'

python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo 'error: $(PYTHON) not found; Python 3.10 or newer is needed (make PYTHON=...)' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: $$($(PYTHON) --version) is too old; Python 3.10 or newer is needed (make PYTHON=...)" >&2; exit 1; }

demo: python
	@$(ENVIRONMENT) sglang==$(SGLANG) prometheus
	@.venvs/sglang-$(SGLANG)/bin/python -m eagle_exporter demo $(if $(DURATION),--duration $(DURATION)) $(DEMO_ARGS)

environment-test: python
	@$(ENVIRONMENT) --require dev wheels prometheus alertmanager chromium curl docker-compose systemd $(addprefix sglang==,$(SGLANG_TESTED))

lint: python
	@$(ENVIRONMENT) dev
	$(DEV)/ruff check .
	$(DEV)/ruff format --check .
	$(DEV)/mypy

test: environment-test lint
	$(DEV)/pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder $(PYTEST_ARGS)

soak: environment-test lint
	@$(ENVIRONMENT) --require victoria-metrics $(addprefix sglang==,$(SGLANG_SOAKED))
	EAGLE_EXPORTER_SOAK=1 $(DEV)/pytest --timeout=3600 $(PYTEST_ARGS)

clean:
	rm -rf .venvs build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
