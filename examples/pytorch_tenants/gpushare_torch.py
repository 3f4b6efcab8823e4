# SPDX-License-Identifier: Apache-2.0
"""Tenants in PyTorch, whose memory quotas also hold on autograd's threads.

    tenants = gpushare_torch.start("name=chat memory=2GiB compute=30%")  # a line for each tenant
    with tenants("chat"):  # each thread, for each request
        loss.backward()

gpushare/tenant/specification_text.hpp describes the lines. Inside the `with`, a thread works on the
tenant's stream. If the tenant has no more memory, PyTorch throws torch.OutOfMemoryError with the
tenant's figures. Tensors may outlive the `with`; they stay charged. The first call of start()
compiles tenants.cpp by torch.utils.cpp_extension, or loads the library at `library`.
"""
import contextlib
import ctypes
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
INCLUDE = HERE.parents[1] / "include"


def build(directory=None):
    """Compiles the library for the running PyTorch, which takes a minute, and returns its path."""
    from torch.utils import cpp_extension  # pylint: disable=import-outside-toplevel
    options = {"build_directory": str(directory)} if directory else {}
    return cpp_extension.load("gpushare_torch_tenants", [str(HERE / "tenants.cpp")], with_cuda=True, is_python_module=False,
                              extra_include_paths=[str(INCLUDE), str(HERE.parent)], extra_cflags=["-std=c++20", "-O2"], **options)


class Tenants:
    """The tenants of a loaded library. Safe from any thread."""

    def __init__(self, library):
        self._of = library
        for name in "tenants_torch", "tenants_problem":
            getattr(library, name).restype = ctypes.c_char_p
        for name in "tenants_used", "tenants_refused":
            getattr(library, name).restype = ctypes.c_uint64
        library.tenants_enter.restype = ctypes.c_void_p
        library.tenants_leave.argtypes = [ctypes.c_void_p]

    def start(self, device, text, torch_version):
        made_for = self._of.tenants_torch().decode()
        if torch_version.split(".")[:2] != made_for.split("."):
            raise RuntimeError(f"the library is made for PyTorch {made_for}, and this one is {torch_version}")
        if self._of.tenants_start(device, text.encode()) != 0:
            raise RuntimeError(self._problem())

    @contextlib.contextmanager
    def __call__(self, name):
        """The calling thread works for the tenant until the `with` ends, on the same thread."""
        inside = self._of.tenants_enter(name.encode())
        if inside is None:
            raise RuntimeError(self._problem())
        try:
            yield
        finally:
            self._of.tenants_leave(inside)

    def used(self, name):
        """The bytes of the tenant's tensors."""
        return self._number(self._of.tenants_used(name.encode()))

    def refused(self, name):
        """The number of the tenant's refused allocations."""
        return self._number(self._of.tenants_refused(name.encode()))

    def give_back(self):
        """Gives back cached memory, as torch.cuda.empty_cache() does."""
        self._of.tenants_give_back()

    def stop(self):
        """Ends the tenants. Call this after all tensors are gone and all threads have left. A program that ends needn't call it."""
        self._of.tenants_stop()

    def _number(self, n):
        if n == 2**64 - 1:
            raise RuntimeError(self._problem())
        return n

    def _problem(self):
        return self._of.tenants_problem().decode()


def start(text, device=0, library=None):
    """Admits the text's tenants on that device, and returns them. Call this once in a process."""
    import torch  # pylint: disable=import-outside-toplevel
    torch.cuda.init()
    tenants = Tenants(ctypes.CDLL(str(library or build())))
    tenants.start(device, text, torch.__version__)
    return tenants
