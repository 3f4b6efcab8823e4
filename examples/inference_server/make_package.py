# SPDX-License-Identifier: Apache-2.0
"""A package of AOTInductor for the example server: make_package(net, x, "net.pt2").

By PyTorch 2.11. The server takes batches of up to `most` rows; `x` has two or more. NAME.json is
yours to write: see torch_engines.hpp.
"""
import torch


def make_package(net, x, path, most=64):
    batch = torch.export.Dim("batch", max=most)
    program = torch.export.export(net.eval(), (x,), dynamic_shapes=({0: batch},))
    torch.set_num_threads(1)
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs={
        "aot_inductor.check_lowerbound": False, "aot_inductor.weight_use_caching_allocator": True})
