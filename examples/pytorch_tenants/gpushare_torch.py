# SPDX-License-Identifier: Apache-2.0
"""Tenants in PyTorch: quotas of memory that hold on autograd's threads, too.

    tenants = gpushare_torch.start("name=chat memory=2GiB compute=30%")  # a line for each tenant
    with tenants("chat"):  # each thread, for each request
        loss.backward()

The lines are those of gpushare/tenant/specification_text.hpp. A thread that is inside works on the
tenant's stream. Where the tenant has no more memory, PyTorch throws torch.OutOfMemoryError with the
tenant's figures. Tensors may outlive the `with`; they stay charged. start() compiles tenants.cpp by
torch.utils.cpp_extension at its first call, or takes the library at `library`.
"""
import contextlib
import ctypes
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
INCLUDE = HERE.parents[1] / "include"


def build(directory=None):
    """Compiles the library for the PyTorch that runs, in a minute, and returns its path."""
    from torch.utils import cpp_extension  # pylint: disable=import-outside-toplevel
    options = {"build_directory": str(directory)} if directory else {}
    return cpp_extension.load("gpushare_torch_tenants", [str(HERE / "tenants.cpp")], with_cuda=True, is_python_module=False,
                              extra_include_paths=[str(INCLUDE), str(HERE.parent)], extra_cflags=["-std=c++20", "-O2"], **options)


class Tenants:
    """Those of a library that is loaded. Safe from any thread."""

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
        """The calling thread is inside within the `with`, which ends on the same thread."""
        inside = self._of.tenants_enter(name.encode())
        if inside is None:
            raise RuntimeError(self._problem())
        try:
            yield
        finally:
            self._of.tenants_leave(inside)

    def used(self, name):
        """Bytes that the tenant's tensors have."""
        return self._number(self._of.tenants_used(name.encode()))

    def refused(self, name):
        """How many allocations of the tenant were refused."""
        return self._number(self._of.tenants_refused(name.encode()))

    def give_back(self):
        """Keeps no memory for the next tensor, as torch.cuda.empty_cache()."""
        self._of.tenants_give_back()

    def stop(self):
        """Behind all tensors and threads. A program that ends needn't call it."""
        self._of.tenants_stop()

    def _number(self, n):
        if n == 2**64 - 1:
            raise RuntimeError(self._problem())
        return n

    def _problem(self):
        return self._of.tenants_problem().decode()


def start(text, device=0, library=None):
    """Admits the text's tenants on that device, and returns them. Once in a process."""
    import torch  # pylint: disable=import-outside-toplevel
    torch.cuda.init()
    tenants = Tenants(ctypes.CDLL(str(library or build())))
    tenants.start(device, text, torch.__version__)
    return tenants
