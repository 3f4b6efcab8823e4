#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training of two tenants in PyTorch, in their quotas: training.py LIBRARY [JSON] [--no-kernels]

LIBRARY is examples/pytorch_tenants/tenants.cpp, built. A backward pass allocates on autograd's own
threads: that memory is its tenant's, it is no more than the quota, and the neighbour has none of
it. Then a small transformer learns in a tenant as it does without one; --no-kernels leaves that
out, for a stand-in of a device. JSON gets the figure, which bench/README.md defines. Exit code 4:
there is no PyTorch of the version that the library is made for, or no device that PyTorch can use.
"""
import copy
import gc
import json
import pathlib
import sys
import threading

try:
    import torch
except ImportError as why:
    print(f"not supported: {why}")
    sys.exit(4)
if not torch.cuda.is_available():
    print("not supported: PyTorch sees no device")
    sys.exit(4)

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "examples/pytorch_tenants")]
import gpushare_torch  # noqa: E402  pylint: disable=wrong-import-position,import-error

LIBRARY, *MORE = (a for a in sys.argv[1:] if a != "--no-kernels")
MIB = 1 << 20
QUOTA = 512 * MIB
TEXT = """
name=chat memory=512MiB compute=30%
name=batch memory=512MiB compute=70%
"""


def check(what, holds):
    print(f"{'ok' if holds else 'WRONG'}: {what}")
    if not holds:
        sys.exit(1)


class Grows(torch.autograd.Function):
    """Its backward pass takes `keeps` MiB more than the forward pass, on a thread of autograd's."""
    kept, threads = [], set()

    @staticmethod
    def forward(ctx, x, keeps):  # pylint: disable=arguments-differ
        ctx.keeps = keeps
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient):  # pylint: disable=arguments-differ
        Grows.threads.add(threading.get_native_id())
        for _ in range(ctx.keeps):
            Grows.kept.append(torch.empty(MIB, dtype=torch.uint8, device="cuda"))
        return torch.empty_like(gradient), None


def backward_of(keeps):
    x = torch.empty(MIB // 4, device="cuda", requires_grad=True)
    y = Grows.apply(x, keeps)
    y.backward(torch.empty_like(y))


def with_overrun(tenant, work):
    """What `work()` returns, and the bytes past the quota meanwhile: the peak of what PyTorch's own
    allocator gives, which no quota counts, and what the tenant is charged beyond its own."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    return result, torch.cuda.max_memory_allocated() - before + max(0, tenants.used(tenant) - QUOTA)


def drop_all():
    Grows.kept.clear()
    gc.collect()


def train(steps=5):
    model = copy.deepcopy(untrained).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = data.cuda()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


try:
    tenants = gpushare_torch.start(TEXT, library=LIBRARY)  # once; without a library it compiles one
except RuntimeError as why:
    print(f"not supported: {why}")
    sys.exit(4)

with tenants("chat"):
    backward_of(100)
check("the backward pass ran on a thread of autograd's", Grows.threads and threading.get_native_id() not in Grows.threads)
check(f"what it took there is its tenant's: {tenants.used('chat') // MIB} MiB", tenants.used("chat") >= 100 * MIB)
check("and nobody else's", tenants.used("batch") == 0 and torch.cuda.memory_allocated() < 100 * MIB)


def refused():
    try:
        backward_of(1000)
    except torch.OutOfMemoryError as e:
        return str(e)
    return ""


with tenants("batch"):
    WHY, overrun = with_overrun("batch", refused)
check(f"past the quota it is refused there, by name: {WHY}", "batch" in WHY)
check(f"with no byte more than the quota: {overrun}", overrun == 0 and tenants.refused("batch") > 0)
drop_all()
with tenants("batch"):
    backward_of(10)
check("and goes on", tenants.refused("chat") == 0)
drop_all()
with tenants("batch"):  # as if the calling thread alone were routed
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        _, leaked = with_overrun("batch", lambda: backward_of(100))
    other.synchronize()
check(f"a leak would be seen: {leaked // MIB} MiB", leaked >= 90 * MIB)
drop_all()

if "--no-kernels" not in sys.argv:
    torch.manual_seed(1)
    untrained = torch.nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    data = torch.randn(32, 64, 256)
    plain = train()

    def train_inside():
        with tenants("chat"):  # each thread, for each request
            inside = train()
        return inside

    inside, in_training = with_overrun("chat", train_inside)
    overrun = max(overrun, in_training)
    check(f"it learns inside as it does outside, {plain[-1]:.6f}",
          plain[-1] < plain[0] and all(abs(a - b) <= 1e-3 * abs(a) for a, b in zip(plain, inside)))
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # pylint: disable=protected-access
    gc.collect()
check("all is back", tenants.used("chat") == 0 and tenants.used("batch") == 0)

NAME = "gpu.torch_quota_overrun_bytes"
figures = {n: {"value": v, "is": "most", "unit": "B", "least": v, "most": v, "repeats": [v]}
           for n, v in ((NAME, overrun), (NAME + "_with_a_planted_fault", leaked))}
for n, f in figures.items():
    print(f"figure {n} {f['value']} B")
if MORE:
    pathlib.Path(MORE[0]).write_text(json.dumps({"figures": figures}), encoding="utf-8")
