# SPDX-License-Identifier: Apache-2.0
"""Writes the bill of materials of a wheel beside it, in CycloneDX's JSON.

wheel_sbom.py dist/fastamp-0.1.0-py3-none-manylinux_2_28_x86_64.whl: the wheel, each library and
module in it with its SHA-256 and the torch and CUDA that it was built for, and what pip installs
beside it. Equal wheels have equal bills. Needs cyclonedx-python-lib, of the extra "wheel".
"""

from __future__ import annotations

import argparse
import hashlib
import json
import uuid
import zipfile
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL


def sha256(content: bytes) -> list[HashType]:
    """Returns the hash of a file's content as a component has it."""
    digest = hashlib.sha256(content).hexdigest()
    return [HashType(alg=HashAlgorithm.SHA_256, content=digest)]


def libraries(archive: zipfile.ZipFile) -> Iterator[Component]:
    """Yields the machine code in a wheel, with what it was built for."""
    for name in sorted(archive.namelist()):
        if ".so" not in Path(name).name:
            continue
        facts = json.loads(archive.read(f"{'/'.join(name.split('/')[:3])}/build_info.json"))
        built_for = {"torch": facts["torch_version"], "cuda": facts["cuda_version"] or "none"}
        yield Component(
            name=name,
            type=ComponentType.FILE,
            bom_ref=name,
            hashes=sha256(archive.read(name)),
            properties=[
                *(Property(name=f"fastamp:{what}", value=is_) for what, is_ in built_for.items()),
                Property(name="fastamp:compiler", value=facts["compiler"]),
            ],
        )


def requirements(metadata: str) -> Iterator[Component]:
    """Yields the packages that pip installs beside a wheel, by its metadata."""
    for requirement in message_from_string(metadata).get_all("Requires-Dist", []):
        if "extra ==" in requirement:
            continue
        name = requirement.split("<")[0].split(">")[0].split("!")[0].split("=")[0].strip()
        yield Component(
            name=name,
            bom_ref=name,
            purl=PackageURL("pypi", name=name),
            properties=[Property(name="fastamp:requirement", value=requirement)],
        )


def bill_of(wheel: Path) -> str:
    """Returns the bill of materials of a wheel as JSON.

    Raises:
        KeyError: A library lies in no part with a build_info.json.
    """
    content = wheel.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(path).decode()
        version = message_from_string(metadata)["Version"]
        whole = Component(
            name="fastamp",
            version=version,
            type=ComponentType.LIBRARY,
            bom_ref="fastamp",
            purl=PackageURL("pypi", name="fastamp", version=version),
            licenses=[LicenseExpression("Apache-2.0")],
            hashes=sha256(content),
            properties=[Property(name="fastamp:file", value=wheel.name)],
        )
        parts, needed = list(libraries(archive)), list(requirements(metadata))
    serial = uuid.UUID(bytes=hashlib.sha256(content).digest()[:16], version=4)
    bom = Bom(components=[*parts, *needed], serial_number=serial)
    bom.metadata.component = whole
    bom.register_dependency(whole, [*parts, *needed])
    written = json.loads(JsonV1Dot6(bom).output_as_string())
    del written["metadata"]["timestamp"]
    return json.dumps(written, indent=1, sort_keys=True) + "\n"


def main() -> None:
    """Writes NAME.whl.cdx.json beside NAME.whl."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel
    bill = wheel.with_name(f"{wheel.name}.cdx.json")
    bill.write_text(bill_of(wheel), encoding="utf-8")
    print(f"{bill.name}: {len(json.loads(bill.read_text(encoding='utf-8'))['components'])} parts")


if __name__ == "__main__":
    main()
