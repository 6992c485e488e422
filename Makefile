# `make demo` and `make test` work in a fresh clone: they install everything into .venv first, if need be.
# Written for GNU make 3.81 (macOS) and later. Useful settings: PYTHON=/path/to/python3.12, ARGS="...", PYTEST_ARGS="...".

SHELL := /bin/sh
VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DOCS := $(VENV)/.installed-docs
ARGS ?=
PYTEST_ARGS ?=

# The package index is the only thing ever fetched from: a model or data set that is asked for by name fails at once.
OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1

PYTEST := $(OFFLINE) OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest -q -n auto --maxprocesses=4 --dist loadfile --durations=10

.DEFAULT_GOAL := help

# The stamp holds the folder that was installed from. A clone that was moved or copied since is installed anew, and so is
# an environment whose interpreter has gone.
ifneq ($(shell $(VENV_PYTHON) -c pass 2>/dev/null && cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): FORCE
endif

.PHONY: help install demo test test-all bench docs lint format doctor release engines planted clean distclean FORCE

help:
	@echo "make demo       train, fine-tune and evaluate a captioner on the generated world (4 to 12 minutes on two cores)"
	@echo "make test       run the tests that take seconds, on up to four cores; make test-all also runs those marked slow"
	@echo "make bench      speed and memory against baselines of the same run (ARGS=\"--only cider --json FILE\")"
	@echo "make docs       the documentation as a site in site/, tutorials with their output (minutes)"
	@echo "make lint       ruff (rules and format) and mypy"
	@echo "make format     let ruff format and mend what it can"
	@echo "make engines    other frameworks for real, each in an environment of its own (minutes, gigabytes; ARGS=ms_swift)"
	@echo "make planted    plant known faults one after the other, and see which of them the tests catch (an hour)"
	@echo "make doctor     versions, devices, what is missing and what that costs"
	@echo "make release    check and build a release into dist/, try the wheel, print what is left (URL=https://HOST/OWNER/NAME)"
	@echo "make install    install into $(VENV) (the targets above do it by themselves)"
	@echo "make clean      delete caches and build products; make distclean deletes $(VENV) too"

install: $(STAMP)

demo: $(STAMP)
	$(OFFLINE) $(VENV_PYTHON) -m rl_caption run demo $(ARGS)

test: $(STAMP)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: $(STAMP)
	$(PYTEST) $(PYTEST_ARGS)

bench: $(STAMP)
	$(OFFLINE) $(VENV_PYTHON) -m benchmarks $(ARGS)

docs: $(DOCS) $(patsubst %.py,%.md,$(wildcard docs/tutorials/*.py))
	$(VENV_PYTHON) -m mkdocs build --strict

$(DOCS): $(STAMP)
	$(VENV_PYTHON) -m pip install --disable-pip-version-check -e '.[docs]'
	touch $(DOCS)

# A tutorial is run, in a folder of its own, when its source is newer than its page.
docs/tutorials/%.md: docs/tutorials/%.py | $(DOCS)
	rm -rf build/tutorials/$* && mkdir -p build/tutorials/$*
	$(OFFLINE) PYTHONWARNINGS=ignore $(VENV_PYTHON) -m jupytext --to ipynb --set-kernel python3 --execute \
		--run-path build/tutorials/$* --output docs/tutorials/$*.ipynb $<
	$(VENV_PYTHON) -m nbconvert --to markdown --CoalesceStreamsPreprocessor.enabled=True docs/tutorials/$*.ipynb

lint: $(STAMP)
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy

format: $(STAMP)
	$(VENV_PYTHON) -m ruff format .
	$(VENV_PYTHON) -m ruff check --fix .

engines: $(STAMP)
	$(VENV_PYTHON) -m tests.engines $(ARGS)

planted: $(STAMP)
	$(VENV_PYTHON) -m tests.planted check $(ARGS)

doctor: $(STAMP)
	$(VENV_PYTHON) -m rl_caption doctor

# What can be said at once comes first. The wheel is that of the source distribution. Nothing is tagged or uploaded.
# A package index shows README.md without the files beside it, so its links become those of the repository at URL.
release: version = $(shell $(VENV_PYTHON) -c 'import rl_caption; print(rl_caption.__version__)')
release: $(STAMP)
	@fail() { echo "error: $$1" >&2; exit 1; }; \
	test -n "$(URL)" || fail "URL is not set: make release URL=https://HOST/OWNER/NAME, the address of the repository"; \
	test -z "$$(git status --porcelain)" || fail "the working tree is not clean (git status)"; \
	test -z "$$(git tag --list v$(version))" || fail "v$(version) is tagged: raise __version__ in rl_caption/__init__.py"; \
	grep -qF "## [$(version)] - 20" CHANGELOG.md || fail "CHANGELOG.md has no heading '## [$(version)] - YYYY-MM-DD'"; \
	grep -qxF "version: $(version)" CITATION.cff || fail "CITATION.cff has no line 'version: $(version)'"
	$(MAKE) lint test-all
	rm -rf build dist
	mkdir -p build/source && git archive HEAD | tar -x -C build/source
	sed -E -i.bak -e 's#!\[([^]]*)\]\(([^):]+)\)#![\1]($(URL)/raw/v$(version)/\2)#g' \
		-e 's#\]\(([^):]+)\)#]($(URL)/blob/v$(version)/\1)#g' build/source/README.md && rm build/source/README.md.bak
	cd build/source && $(CURDIR)/$(VENV_PYTHON) -c \
		"from setuptools import build_meta; build_meta.build_sdist('$(CURDIR)/dist')"
	$(VENV_PYTHON) -m pip wheel --no-deps --wheel-dir dist dist/*.tar.gz
	$(VENV_PYTHON) -m venv --clear build/release
	build/release/bin/python -m pip install "$$(echo dist/*.whl)[clip]"
	build/release/bin/rl-caption doctor --mend
	RL_CAPTION_INSTALLED=build/release/bin $(OFFLINE) $(VENV_PYTHON) -m pytest -q tests/core/integration/test_wheel.py
	@ls -l dist
	@echo "Left to you: read the changelog once more, then"
	@echo "  git tag -a v$(version) -m 'rl-caption $(version)' && git push origin v$(version)"
	@echo "  python -m twine upload dist/*"
	@echo "and open a section '## [Unreleased]' in CHANGELOG.md."

# The stamp is removed first and written last, so that an installation that was interrupted does not count as done.
$(STAMP): pyproject.toml
	@set -e; \
	moved=no; \
	if [ -f $(STAMP) ] && [ "$$(cat $(STAMP))" != "$(CURDIR)" ]; then moved=yes; fi; \
	rm -f $(STAMP); \
	if [ $$moved = yes ] || ! $(VENV_PYTHON) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
		chosen=; \
		for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11); do \
			if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
				chosen="$$candidate"; break; \
			fi; \
		done; \
		if [ -z "$$chosen" ]; then \
			echo "error: Python 3.11 or newer is needed, and none of these is one:" \
				"$(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11)." \
				"Install one, or name it: make $(or $(firstword $(MAKECMDGOALS)),install) PYTHON=/path/to/python3.12" >&2; \
			exit 1; \
		fi; \
		echo "creating $(VENV) with $$chosen ($$("$$chosen" --version))"; \
		"$$chosen" -m venv --clear $(VENV); \
	fi; \
	echo "installing into $(VENV): about 2 GB and a few minutes the first time"; \
	$(VENV_PYTHON) -m pip install --disable-pip-version-check -e '.[dev]'; \
	$(VENV_PYTHON) -m rl_caption.cli.torchvision_remedy; \
	printf '%s\n' "$(CURDIR)" > $(STAMP)

FORCE:

clean:
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf docs/tutorials/*.md docs/tutorials/*.ipynb docs/tutorials/*_files
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
