# SPDX-License-Identifier: Apache-2.0
"""Makes a package of AOTInductor for the example server: make_package(net, x, "net.pt2").

Needs PyTorch 2.11. The server takes batches of up to `most` rows. `x` is an example input with two or
more rows. Write the description NAME.json yourself: see torch_engines.hpp.
"""
import torch


def make_package(net, x, path, most=64):
    batch = torch.export.Dim("batch", max=most)
    program = torch.export.export(net.eval(), (x,), dynamic_shapes=({0: batch},))
    torch.set_num_threads(1)
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs={
        "aot_inductor.check_lowerbound": False, "aot_inductor.weight_use_caching_allocator": True})
