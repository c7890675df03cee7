#!/usr/bin/env python3
"""Prints a list of contents in CycloneDX JSON as a table: kind, name, version, licences."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def licences(component: dict[str, Any]) -> str:
    said = component.get("licenses", [])
    names = [row.get("expression") or row["license"].get("id") or row["license"]["name"] for row in said]
    return ", ".join(names) or "see /usr/share/doc"


def main(path: str) -> None:
    components = json.loads(Path(path).read_text())["components"]
    for component in components:
        kind = component["purl"].partition(":")[2].partition("/")[0]
        print(f"  {kind:5} {component['name']:30.30} {component['version']:28.28} {licences(component):.70}")
    print(f"{len(components)} packages and distributions")


if __name__ == "__main__":
    main(*sys.argv[1:])
