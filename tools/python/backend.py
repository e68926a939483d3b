"""Builds the wheel for pip (PEP 517): `pip install ./tools/python` in a clone, or `make wheel` for a file to hand on.

The library is plain C and uses only functions that every glibc since 2.14 has. So one wheel is enough for all Pythons
on a processor; CC may be a compiler for another processor.
"""

import base64
import hashlib
import os
import re
import subprocess
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
METADATA = """Metadata-Version: 2.1
Name: chunkflow
Version: {version}
Summary: Chunk packing, schedules and chunk by chunk training for sequences of very different lengths
License: MIT
Requires-Python: >=3.9
Requires-Dist: cffi
Requires-Dist: numpy
Provides-Extra: torch
Requires-Dist: torch~=2.15.0; extra == "torch"
Provides-Extra: huggingface
Requires-Dist: torch~=2.15.0; extra == "huggingface"
Requires-Dist: transformers~=5.23.0; extra == "huggingface"
Provides-Extra: trainer
Requires-Dist: torch~=2.15.0; extra == "trainer"
Requires-Dist: transformers~=5.23.0; extra == "trainer"
Requires-Dist: accelerate>=1.1.0; extra == "trainer"
Requires-Dist: datasets; extra == "trainer"
Requires-Dist: trl~=1.16.0; extra == "trainer"
Requires-Dist: peft~=0.21.2; extra == "trainer"
Provides-Extra: lengths
Requires-Dist: transformers~=5.23.0; extra == "lengths"
Requires-Dist: jinja2; extra == "lengths"
Requires-Dist: pyarrow; extra == "lengths"
"""


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    header = (TOP / "chunkflow.h").read_text(encoding="utf-8")
    version = re.search('#define CHUNKFLOW_VERSION "(.*)"', header)[1]
    compiler = os.environ.get("CC", "cc")
    machine = subprocess.run([*compiler.split(), "-dumpmachine"], check=True, capture_output=True, text=True).stdout
    tag = f"py3-none-manylinux2014_{machine.split('-')[0]}"
    with tempfile.TemporaryDirectory() as build:
        subprocess.run(["make", "-s", "-C", TOP, "shared", f"BUILD={build}", f"CC={compiler}"], check=True)
        files = {f"chunkflow/{path.name}": path.read_bytes()
                 for path in [*HERE.glob("chunkflow/*.py"), HERE / "chunkflow" / "py.typed",
                              *Path(build).glob("libchunkflow.[sh]*")]}
    info = f"chunkflow-{version}.dist-info"
    files[f"{info}/METADATA"] = METADATA.format(version=version).encode()
    files[f"{info}/LICENSE"] = (TOP / "LICENSE").read_bytes()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: chunkflow\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    rows = [f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
            for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    name = f"chunkflow-{version}-{tag}.whl"
    with zipfile.ZipFile(Path(wheel_directory) / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in files.items():
            wheel.writestr(zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0)), data)  # the same bytes whenever it is made
    return name


if __name__ == "__main__":
    import sys
    print(build_wheel(sys.argv[1]))
