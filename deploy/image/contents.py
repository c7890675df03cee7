"""Prints what this Debian tree and a Python environment in it consist of, as CycloneDX JSON.

Usage: contents.py SITE_PACKAGES. A component is a Debian package or a Python distribution, with name, version, package
URL and licences: those of Debian's machine-readable copyright file, or those of the distribution's metadata. A package
whose copyright file is not machine-readable has none listed: its file is in /usr/share/doc.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from debian.deb822 import Deb822
from packageurl import PackageURL

DOCUMENTS = Path("/usr/share/doc")
FIELDS = "${db:Status-Status}\t${Package}\t${Version}\t${Architecture}\n"


def debian_packages() -> Iterator[Component]:
    """The Debian packages that are installed in this tree."""
    said = subprocess.run(["dpkg-query", "-W", "-f", FIELDS], check=True, capture_output=True, text=True).stdout
    for line in said.splitlines():
        state, name, version, architecture = line.split("\t")
        if state == "installed":
            url = PackageURL("deb", "debian", name, version, {"arch": architecture})
            yield component(name, version, url, debian_licences(DOCUMENTS / name / "copyright"))


def debian_licences(path: Path) -> set[str]:
    """Short names of the licences in a machine-readable copyright file; none for another form."""
    if not path.is_file():
        return set()
    with path.open(encoding="utf-8", errors="replace") as file:
        paragraphs = list(Deb822.iter_paragraphs(file))
    if not paragraphs or "Format" not in paragraphs[0]:
        return set()
    names = (paragraph.get("License", "").partition("\n")[0].strip() for paragraph in paragraphs)
    return {name for name in names if name}


def python_distributions(site: str) -> Iterator[Component]:
    """The Python distributions in a folder."""
    for found in metadata.distributions(path=[site]):
        name, version = found.metadata["Name"], found.version
        yield component(name, version, PackageURL("pypi", None, name.lower(), version), python_licences(found.metadata))


def python_licences(said: metadata.PackageMetadata) -> set[str]:
    """By the newest of the three fields that a distribution has: an expression, classifiers, or a text's first line."""
    fields = said.json
    if expression := fields.get("license_expression"):
        return {str(expression)}
    classifiers = [str(word) for word in fields.get("classifier", []) if str(word).startswith("License ::")]
    if classifiers:
        return {word.rpartition(" :: ")[2] for word in classifiers}
    text = str(fields.get("license", "")).strip()
    return {text.partition("\n")[0]} if text else set()


def component(name: str, version: str, url: PackageURL, licences: Iterable[str]) -> Component:
    """One row of the list. One licence may be an SPDX expression; of several each is a name."""
    factory, chosen = LicenseFactory(), sorted(licences)
    found = [factory.make_from_string(chosen[0])] if len(chosen) == 1 else map(factory.make_with_name, chosen)
    return Component(name=name, version=version, type=ComponentType.LIBRARY, purl=url, bom_ref=str(url), licenses=found)


def main(site: str) -> None:
    bom = Bom(components=[*debian_packages(), *python_distributions(site)])
    own = next(found for found in bom.components if found.name == "kvfuse")
    whole = Component(name="kvfuse", version=own.version, type=ComponentType.CONTAINER, bom_ref="image")
    bom.metadata.component = whole
    bom.register_dependency(whole, bom.components)
    print(make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
