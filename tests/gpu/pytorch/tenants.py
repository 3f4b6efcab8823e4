#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch as two tenants, on a device: tenants.py PLUGIN [JSON] (plugin.cpp, built; where its figures go).

Trains a small transformer in each tenant's MemPool, and in PyTorch's own memory: the same losses. One tenant asks for more than its
quota: it alone is refused, by torch.OutOfMemoryError, and goes on. Both then multiply matrices in turns, of 30 and 70 % of the
device's time. In the end all is back. Exit code 4: there is no PyTorch, or no device that it can use.
"""
import copy
import ctypes
import gc
import json
import statistics
import sys
import threading
import time

try:
    import torch
except ImportError as why:
    print(f"not supported: {why}")
    sys.exit(4)
if not torch.cuda.is_available():
    print("not supported: PyTorch sees no device")
    sys.exit(4)

plugin = ctypes.CDLL(sys.argv[1])
for name in "chat_used", "batch_used", "batch_refused", "unfreed", "stream_of", "device_time_of":
    getattr(plugin, name).restype = ctypes.c_uint64
MIB = 1 << 20
QUOTA = {"chat": 2048 * MIB, "batch": 1024 * MIB}


def used(tenant):
    return getattr(plugin, tenant + "_used")()


def pool_of(tenant):
    # docs/recipes.md has these lines, and the first two of tenant_thread.
    functions = torch.cuda.memory.CUDAPluggableAllocator(sys.argv[1], tenant + "_malloc", tenant + "_free")  # 1
    pool = torch.cuda.MemPool(functions.allocator())  # 2
    return functions, pool


# Drawn once: threads share PyTorch's generators.
torch.manual_seed(1)
untrained = torch.nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
data = torch.randn(32, 64, 256)


def train(steps=10):
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


def check(what, holds):
    print(f"{'ok' if holds else 'WRONG'}: {what}")
    if not holds:
        sys.exit(1)


plain = train()
check("it learns", plain[-1] < plain[0])

pools = {tenant: pool_of(tenant) for tenant in QUOTA}
results = {}


def tenant_thread(tenant, stream):
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pools[tenant][1]):  # 3
        results[tenant] = train()
        results[tenant + " used"] = used(tenant)
        if tenant == "batch":
            kept = []
            try:
                while True:
                    kept.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                results["held"] = len(kept) * 64 * MIB
            results["at the limit"] = used(tenant)
            del kept
            results["batch again"] = train()
    stream.synchronize()


threads = [threading.Thread(target=tenant_thread, args=(t, torch.cuda.Stream())) for t in QUOTA]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

check("both tenants finished", {"chat", "batch", "batch again"} <= results.keys())
for tenant in "chat", "batch", "batch again":
    check(f"losses of '{tenant}' are those without tenants, {plain[-1]:.6f}",
          all(abs(a - b) <= 1e-3 * abs(a) for a, b in zip(plain, results[tenant])))
check(f"chat was charged {results['chat used'] / MIB:.0f} MiB", 0 < results["chat used"] <= QUOTA["chat"])
check(f"batch got {results['held'] / MIB:.0f} MiB more and no byte beyond its quota: {results['at the limit'] / MIB:.0f} MiB charged",
      QUOTA["batch"] / 2 < results["held"] < QUOTA["batch"] and results["at the limit"] <= QUOTA["batch"])
check("batch was refused, and went on", plugin.batch_refused() > 0)

# ---- turns

WORK = {"chat": (4096, 4), "batch": (8192, 2)}  # the size of square matrices, and products a turn: turns of different lengths


def worker(number, tenant):
    size, products = WORK[tenant]
    stream = torch.cuda.ExternalStream(plugin.stream_of(number))
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    torch.cuda.synchronize()

    def enqueue():
        with torch.cuda.stream(stream):
            for _ in range(products):
                torch.mm(a, a, out=out)

    return ctypes.CFUNCTYPE(None)(enqueue)


def turns(number, function, until):
    count = 0
    while time.monotonic() < until:
        plugin.run(number, function)
        count += 1
    plugin.finish(number)
    return count


functions = [worker(number, tenant) for number, tenant in enumerate(WORK)]
alone = []
for number in range(2):  # ms a turn
    turns(number, functions[number], time.monotonic() + 0.2)
    before = time.monotonic()
    count = turns(number, functions[number], before + 1)
    alone.append((time.monotonic() - before) / count)


def beside_each_other(seconds):
    """Share of the first by the length of its turns alone, in percent; charged share; how busy the device was."""
    counts = [0, 0]
    before = [plugin.device_time_of(number) for number in range(2)]
    begin = time.monotonic()

    def both(number):
        counts[number] = turns(number, functions[number], begin + seconds)

    threads = [threading.Thread(target=both, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lasted = time.monotonic() - begin
    times = [count * each for count, each in zip(counts, alone)]
    charged = [plugin.device_time_of(number) - b for number, b in enumerate(before)]
    print(f"# turns of {1e3 * alone[0]:.2f} and {1e3 * alone[1]:.2f} ms alone; {counts[0]} and {counts[1]} within {lasted:.2f} s, "
          f"charged {charged[0] / 1e6:.0f} and {charged[1] / 1e6:.0f} ms")
    return 100 * times[0] / sum(times), 100 * charged[0] / sum(charged), 100 * sum(times) / lasted


figures = {}


def figure(name, values, unit):
    value = statistics.median(values)
    print(f"figure gpu.{name} {value:.4g} {unit}")
    figures["gpu." + name] = {"value": value, "is": "median", "unit": unit, "least": min(values), "most": max(values), "repeats": values}


runs = [beside_each_other(1.5) for _ in range(5)]
figure("pytorch_share_error_pp", [abs(share - 30) for share, _, _ in runs], "pp")
figure("pytorch_charged_share_error_pp", [abs(share - 30) for _, share, _ in runs], "pp")
figure("pytorch_device_busy_pct", [busy for _, _, busy in runs], "%")
if len(sys.argv) > 2:
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump({"figures": figures}, file)

del functions, pools
gc.collect()
torch.cuda.synchronize()
torch._C._cuda_clearCublasWorkspaces()  # which lie in the pool of whoever multiplied first
torch.cuda.empty_cache()
check(f"all is back: {used('chat')} and {used('batch')} bytes charged, {plugin.unfreed()} unfreed",
      used("chat") == 0 and used("batch") == 0 and plugin.unfreed() == 0)
