"""Fixtures for tests on a real llama-server and a real model, over every build and model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.rig import Prepared, prepare
from tests.llama_builds import BUILDS, MODELS, LlamaBuild, LlamaModel, short_temporary_directory


@pytest.fixture(params=BUILDS, ids=lambda build: f"build-{build.name}")
def llama_build(request: pytest.FixtureRequest) -> LlamaBuild:
    """Each llama-server build in turn; skipped (under CI failed) when it is not installed."""
    build: LlamaBuild = request.param
    build.require()
    return build


@pytest.fixture(params=MODELS, ids=lambda model: model.name)
def llama_model(request: pytest.FixtureRequest) -> LlamaModel:
    """Each model in turn; skipped (under CI failed) when it is not installed."""
    model: LlamaModel = request.param
    model.require()
    return model


@pytest.fixture
def some_build() -> LlamaBuild:
    """Some installed build, for tests that do not depend on which."""
    for build in BUILDS:
        if build.program.exists():
            return build
    BUILDS[0].require()
    raise AssertionError("require() returned for a program that is not there")


@pytest.fixture
def smollm2() -> LlamaModel:
    """The small model without a sliding window."""
    MODELS[0].require()
    return MODELS[0]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A temporary directory short enough for Unix sockets below it."""
    with short_temporary_directory() as path:
        yield path


@pytest.fixture(scope="session")
def reference_provider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference provider of this checkout, whatever is installed."""
    path = tmp_path_factory.mktemp("provider") / "onebit-prefill-llama"
    path.write_text(
        f"#!{sys.executable}\n"
        "import sys\nfrom onebitd.prefill_llama import main\nsys.exit(main())\n"
    )
    path.chmod(0o755)
    return path


@pytest.fixture(scope="session")
def parts() -> tuple[LlamaBuild, LlamaModel]:
    """The build and the model of the fault tests."""
    BUILDS[0].require()
    MODELS[0].require()
    return BUILDS[0], MODELS[0]


@pytest.fixture(scope="session")
def prepared(parts: tuple[LlamaBuild, LlamaModel]) -> Prepared:
    """Cold replies and good state files, made by the decoder alone."""
    return prepare(*parts)
