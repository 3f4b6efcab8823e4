# SPDX-License-Identifier: Apache-2.0
# What Conan builds and runs against the package that it has just made: the consumer in ../find_package, which finds the
# package's own CMake files, and for other tools the description that Conan itself generates.
from pathlib import Path

from conan import ConanFile
from conan.errors import ConanException
from conan.tools.build import can_run
from conan.tools.cmake import CMake, cmake_layout


class GpushareTest(ConanFile):
    settings = "os", "compiler", "build_type", "arch"
    generators = "CMakeToolchain", "CMakeDeps", "PkgConfigDeps"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        cmake_layout(self)

    def build(self):
        cmake = CMake(self)
        cmake.configure(build_script_folder="../find_package")
        cmake.build()

    def test(self):
        described = (Path(self.generators_folder) / "gpushare-cuda-runtime.pc").exists()
        if described != bool(self.dependencies["gpushare"].options.with_cuda):
            raise ConanException("the CUDA runtime is described without the option with_cuda, or the other way round")
        if can_run(self):
            self.run(f"{self.cpp.build.bindir}/consumer", env="conanrun")
