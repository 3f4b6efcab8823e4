# SPDX-License-Identifier: Apache-2.0
# Conan 2 recipe. The package holds the library's own CMake package, so that find_package means the same here as
# everywhere: find_package(gpushare COMPONENTS cuda_runtime). A CUDA toolkit, where one is asked for, is the machine's.
#
#   conan create . -s compiler.cppstd=20                              # -o "gpushare/*:compiled=True" for gpushare::compiled
import re
from pathlib import Path

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import load


class GpushareRecipe(ConanFile):
    name = "gpushare"
    description = "GPU sharing and scheduling primitives for one process"
    license = "Apache-2.0"
    topics = ("gpu", "cuda", "scheduling", "header-only")
    settings = "os", "compiler", "build_type", "arch"
    options = {
        "with_cuda": [True, False],  # describe the CUDA runtime to generators other than CMake's, too
        "compiled": [True, False],  # build the library of gpushare::compiled
    }
    default_options = {"with_cuda": False, "compiled": False}
    exports_sources = "CMakeLists.txt", "LICENSE", "cmake/*", "include/*"
    no_copy_source = True
    test_package_folder = "tests/consumers/conan"

    def set_version(self):
        text = load(self, Path(self.recipe_folder) / "include/gpushare/config.hpp")
        self.version = ".".join(re.findall(r"#define GPUSHARE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text))

    def configure(self):
        self.package_type = "static-library" if self.options.compiled else "header-library"

    def layout(self):
        cmake_layout(self)

    def validate(self):
        check_min_cppstd(self, 20)

    def generate(self):
        toolchain = CMakeToolchain(self)
        for part in "TESTS", "EXAMPLES", "BENCH":
            toolchain.cache_variables[f"GPUSHARE_BUILD_{part}"] = False
        toolchain.cache_variables["GPUSHARE_CUDA"] = False
        toolchain.cache_variables["GPUSHARE_COMPILED"] = bool(self.options.compiled)
        toolchain.generate()

    def package(self):
        cmake = CMake(self)
        cmake.configure()
        if self.options.compiled:
            cmake.build()
        cmake.install()

    def package_id(self):
        if not self.info.options.compiled:
            self.info.clear()

    def package_info(self):
        self.cpp_info.bindirs = []
        if not self.options.compiled:
            self.cpp_info.libdirs = []
        self.cpp_info.set_property("cmake_find_mode", "none")  # CMake finds the package's own files
        core = self.cpp_info.components["gpushare"]
        core.builddirs = ["share/cmake/gpushare"]
        core.set_property("pkg_config_name", "gpushare")
        core.system_libs = ["pthread"] if self.settings.os in ("Linux", "FreeBSD") else []
        if self.options.compiled:
            compiled = self.cpp_info.components["compiled"]
            compiled.requires = ["gpushare"]
            compiled.libs = ["gpushare_compiled"]
            compiled.defines = ["GPUSHARE_COMPILED", "GPUSHARE_COMPILED_HOST"]
        if self.options.with_cuda:
            runtime = self.cpp_info.components["cuda_runtime"]
            runtime.requires = ["gpushare"]
            runtime.system_libs = ["cudart"]
            runtime.set_property("pkg_config_name", "gpushare-cuda-runtime")
