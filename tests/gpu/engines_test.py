#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""engines.py with imaginary PyTorches: it finds the libraries of the right one, and says why another one won't do."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

ENGINES = pathlib.Path(__file__).resolve().parents[2] / "bench" / "gpu" / "engines.py"


class EnginesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.site = pathlib.Path(folder.name, "site")
        self.program = pathlib.Path(folder.name, "engine_figures")
        self.program.write_text('#!/bin/sh\necho "$LD_LIBRARY_PATH $*"\nexit 7\n')
        self.program.chmod(0o755)
        pathlib.Path(folder.name, "engine_figures.libtorch").write_text("2.11\n")
        self.site.mkdir()

    def install(self, version, library="libtorch_cuda.so"):
        (self.site / "torch" / "lib").mkdir(parents=True)
        (self.site / "torch" / "lib" / library).touch()
        (self.site / "torch" / "__init__.py").write_text("raise RuntimeError('loaded')\n")
        (self.site / "nvidia" / "cu13" / "lib").mkdir(parents=True)
        info = self.site / f"torch-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")

    def run_it(self):
        # -S: without the packages of this machine
        return subprocess.run([sys.executable, "-S", ENGINES, self.program, "a.json", "--small"],
                              capture_output=True, text=True, check=False, env={"PYTHONPATH": str(self.site)})

    def test_the_program_gets_the_libraries_and_its_arguments(self):
        self.install("2.11.0+cu130")
        done = self.run_it()
        self.assertEqual(done.returncode, 7, done.stderr)
        folders, *arguments = done.stdout.split()
        self.assertEqual(folders.split(":")[:2], [f"{self.site}/torch/lib", f"{self.site}/nvidia/cu13/lib"])
        self.assertEqual(arguments, ["a.json", "--small"])

    def refused(self, why):
        done = self.run_it()
        self.assertEqual((done.returncode, done.stderr), (4, ""))
        self.assertRegex(done.stdout, "^not supported: .*" + why)

    def test_without_pytorch(self):
        self.refused("isn't installed")

    def test_another_version(self):
        self.install("2.12.1")
        self.refused("2.12.1, .* built for 2.11")

    def test_one_without_cuda(self):
        self.install("2.11.0", "libtorch_cpu.so")
        self.refused("without CUDA")


if __name__ == "__main__":
    unittest.main()
