#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How well the library is adopted, as `./dev bench adoption` measures it: bench/README.md says what each figure is.

  adoption.py BUILD_DIR JSON     BUILD_DIR: of the preset host, with the tests of interop and the consumers' projects
"""
import datetime
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "docs" / "recipes.md"

# Engines of docs/recipes.md: the tests that prove memory, compute, and both at once, each with the engine's own library. None: there is
# no such test here.
INTEROP = "tests/test_interop"
TORCH = "tests/interop/test_torch_tenant"
ENGINES = {
    "OpenVINO": [(INTEROP, "tensors of OpenVINO lie in a tenant's memory")]
                + 2 * [(INTEROP, "calls of OpenVINO are submissions, in its own memory and in a tenant's")],
    "ONNX Runtime": [(INTEROP, "a session of ONNX Runtime itself computes in its tenant's memory, or is refused")]
                    + 2 * [(INTEROP, "calls of ONNX Runtime itself are submissions, in its own memory and in a tenant's")],
    "libtorch": [(TORCH, "memory"), (TORCH, "compute"), (TORCH, "both")],
    "ggml": [(INTEROP, "buffers of ggml lie in a tenant's arena, or are refused"),
             (INTEROP, "each token of an engine on ggml is a submission"),
             (INTEROP, "an engine on ggml uses a tenant's arena and takes the tenant's turns")],
    "TensorRT": [None, None, None],  # its library needs a device: only its interface is tested
}


def engines_passing(build):
    passing = 0
    for engine, tests in ENGINES.items():
        cells = []
        for cell, test in zip(("memory", "compute", "both"), tests):
            program = build / test[0] if test else None
            if not test or not program.exists():
                cells.append(f"{cell}: not tested")
                continue
            name = [test[1].replace(",", "\\,"), "-w", "NoTests"] if test[0] == INTEROP else [test[1]]  # a comma is Catch's "or"
            done = subprocess.run([program, *name], capture_output=True, text=True)
            passing += done.returncode == 0
            cells.append(f"{cell}: {'passes' if done.returncode == 0 else 'FAILS'}")
        print(f"# {engine}: {', '.join(cells)}")
    return passing, 3 * len(ENGINES)


def lines_changed():
    """The most lines that a recipe changes. They are marked in its code by a comment that begins with their number: // 2, # 1: why,
    // 1 and 2. The table above the recipes says the same, or this raises."""
    text, counts = RECIPES.read_text(), {}
    for section in re.split(r"\n## ", text)[1:]:
        code = "".join(re.findall(r"```.*?\n(.*?)```", section, re.S))
        numbers = re.findall(r"(?://|#) (?:line )?(\d+)(?: and (\d+))?(?=[:,]|$)", code, re.M)
        marked = {int(n) for found in numbers for n in found if n}
        if marked:
            counts[section.splitlines()[0]] = len(marked)
    for engine, said in re.findall(r"^\| ([^|]+?) \|[^|]*\|[^|]*\| ([0-9][^|]*) \|", text, re.M):
        first = re.split(r"[ ,]", engine)[0]
        found = [count for heading, count in counts.items() if heading.startswith(first)]
        if found != [sum(map(int, re.findall(r"\d+", said)))]:
            raise SystemExit(f"adoption: docs/recipes.md says of {engine} '{said}', and marks {found} lines")
    print(f"# lines changed: {', '.join(f'{name} {count}' for name, count in counts.items())}")
    return max(counts.values())


def undocumented():
    return len(subprocess.run([ROOT / "docs/reference/undocumented.sh"], capture_output=True, text=True, check=True).stdout.splitlines())


def first_program(scratch):
    """Seconds that README's first block of commands takes, and where: in a bare Debian 12, or without one where nothing is installed."""
    readme = (ROOT / "README.md").read_text()
    block = lambda language: re.search(rf"\n```{language}\n(.*?)```", readme, re.S)[1]
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / "home").mkdir(parents=True)
    debian, home, commands = scratch / "debian", scratch / "home", block("sh")
    if os.geteuid() == 0 and shutil.which("debootstrap") and subprocess.run(
            ["debootstrap", "--variant=minbase", "bookworm", debian], stdout=(scratch / "debootstrap.log").open("w")).returncode == 0:
        home, where = debian / "root", "a bare Debian 12"
        command = ["chroot", debian, "sh", "-c", f"cd /root && {{ {commands}}}"]
    else:
        where = "an empty folder; g++ was there"
        commands = "\n".join(line for line in commands.splitlines() if not line.startswith("apt-get")) + "\n"
        command = ["sh", "-c", f"cd {home} && {{ {commands}}}"]
    subprocess.run(["git", "clone", "--quiet", ROOT, home / "gpushare"], check=True)
    (home / "quickstart.cpp").write_text(block("cpp"))
    begin, before = time.monotonic(), processor_seconds()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"})
    took = time.monotonic() - begin
    others = 100 * max(0, processor_seconds() - before) / took / os.cpu_count()
    print(f"# first program: in {where}, while others had {others:.0f} % of the cores")
    if done.returncode != 0 or not done.stdout.endswith(block("text")):
        raise SystemExit(f"adoption: README's commands failed in {where}:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    shutil.rmtree(scratch)
    return took, where, others


def processor_seconds():
    """Of all processes but those begun here."""
    busy = sum(int(x) for i, x in enumerate(Path("/proc/stat").read_text().split()[1:9]) if i not in (3, 4))
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    return busy / os.sysconf("SC_CLK_TCK") - own.ru_utime - own.ru_stime


def consumers_passing(build, scratch):
    file = scratch / "consumers.json"
    subprocess.run([ROOT / "bench/consumers.sh", build, file], stdout=subprocess.DEVNULL, check=True)
    figure = json.loads(file.read_text())["figures"]["cuda.consumers_passing"]
    return figure["value"], int(figure["unit"].split()[1])


def processor():
    """As bench/machine.hpp has it."""
    info = Path("/proc/cpuinfo").read_text()
    field = lambda name: re.search(rf"^{name}\s*: (.*)$", info, re.M)[1].strip()
    return f"{field('model name')}, family {field('cpu family')}, model {field('model')}, {os.cpu_count()} cores"


def main():
    build, file = Path(sys.argv[1]), Path(sys.argv[2])
    file.parent.mkdir(parents=True, exist_ok=True)
    load, figures = os.getloadavg()[0], {}

    def figure(name, value, unit):
        print(f"figure adoption.{name} {value:.4g} {unit}", flush=True)
        figures[f"adoption.{name}"] = {"value": value, "is": "median", "unit": unit, "least": value, "most": value, "repeats": [value]}

    passing, cells = engines_passing(build)
    figure("engines_passing", passing, f"of {cells}")
    figure("lines_changed_max", lines_changed(), "count")
    figure("undocumented_public_names", undocumented(), "count")
    took, where, others = first_program(file.parent / "first_program")
    void = {}
    if others > 5:
        void["adoption.first_program_s"] = f"others had {others:.0f} % of the cores"
        print(f"# void: adoption.first_program_s: {void['adoption.first_program_s']}")
    else:
        figure("first_program_s", round(took, 1), "s")
    passing, all_ = consumers_passing(build, file.parent)
    figure("consumers_passing", passing, f"of {all_}")
    result = {"configuration": f"tests of the preset host; the first program in {where}",
              "commit": os.environ.get("GPUSHARE_BENCH_COMMIT", "unknown"), "date": str(datetime.date.today()), "processor": processor(),
              "compiler": "", "flags": "", "load": {"average_before": load}, "settings": {}, "void": void, "texts": {}, "figures": figures}
    file.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
