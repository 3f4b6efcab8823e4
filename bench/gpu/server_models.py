#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the models of server.py as TorchScript, with random weights: server_models.py FOLDER [--small]

FOLDER gets text.pt, a BERT-base of one text of 128 tokens, and pictures.pt, a ResNet-50 of 64
pictures, each with its NAME.json: the sizes of bench/gpu/engines/models.hpp, in half precision.
Clients send pictures of 56 x 56 bytes, and the model enlarges them, so that HTTP isn't what limits
a batch tenant. Then it prints "made". Each line that it reads is a number of seconds; for each it
prints how many ms a call of pictures.pt takes, copies to and from the device included: between two
CUDA events around calls back to back. --small: small ones, on the host, by its clock.
"""
import json
import pathlib
import sys
import time

import torch
from torch import nn
from torch.nn import functional


class EncoderLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.behind_attention, self.behind_all = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = heads

    def by_head(self, x):
        return x.reshape(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x):
        seen = functional.scaled_dot_product_attention(
            self.by_head(self.query(x)), self.by_head(self.key(x)), self.by_head(self.value(x)))
        y = self.behind_attention(x + self.out(seen.transpose(1, 2).flatten(2)))
        return self.behind_all(y + self.down(functional.gelu(self.up(y))))


class Bert(nn.Module):
    def __init__(self, layers, width, heads, tokens, words):
        super().__init__()
        self.words, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.positions = nn.Parameter(torch.randn(1, tokens, width))
        self.layers = nn.Sequential(*(EncoderLayer(width, heads) for _ in range(layers)))
        self.pooler = nn.Linear(width, width)

    def forward(self, tokens):
        x = self.layers(self.norm(self.words(tokens) + self.positions))
        return torch.tanh(self.pooler(x[:, 0])).float()


def convolution(inputs, outputs, size, stride):
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs, narrow, stride):
        super().__init__()
        self.first = convolution(inputs, narrow, 1, 1)
        self.second = convolution(narrow, narrow, 3, stride)
        self.third = convolution(narrow, 4 * narrow, 1, 1)
        changes = stride != 1 or inputs != 4 * narrow
        self.past = convolution(inputs, 4 * narrow, 1, stride) if changes else nn.Identity()

    def forward(self, x):
        y = self.second(self.first(x).relu()).relu()
        return (self.third(y) + self.past(x)).relu()


class ResNet(nn.Module):
    def __init__(self, channels, blocks, side, classes):
        super().__init__()
        self.side, self.stem = side, convolution(3, channels, 7, 2)
        body, inputs, narrow = [], channels, channels
        for n in blocks:
            for i in range(n):
                body.append(Bottleneck(inputs, narrow, 2 if i == 0 and narrow != channels else 1))
                inputs = 4 * narrow
            narrow *= 2
        self.body, self.head = nn.Sequential(*body), nn.Linear(inputs, classes)

    def forward(self, pixels):
        x = (pixels.to(self.head.weight.dtype) - 127.5) / 64
        x = functional.interpolate(x, size=[self.side, self.side]).contiguous(memory_format=torch.channels_last)
        x = functional.max_pool2d(self.stem(x).relu(), 3, 2, 1)
        return self.head(functional.adaptive_avg_pool2d(self.body(x), 1).flatten(1)).argmax(1)


def on(model, device, dtype):
    """Batch norms stay of single precision, as cuDNN wants them."""
    model = model.eval().to(device, dtype).to(memory_format=torch.channels_last)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.float()
    return model


def save(folder, name, model, sample, takes, gives):
    with torch.no_grad():
        traced = torch.jit.trace(model, sample.to(next(model.parameters()).device))
        result = traced(sample.to(next(model.parameters()).device))
    traced.save(str(folder / f"{name}.pt"))
    described = {"inputs": [{"name": takes[0], "datatype": takes[1], "shape": list(sample.shape)}],
                 "outputs": [{"name": gives[0], "datatype": gives[1], "shape": list(result.shape)}]}
    (folder / f"{name}.json").write_text(json.dumps(described))


def timed_on_device(model, sample, seconds):
    sample = sample.pin_memory()
    stream, begin, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.inference_mode(), torch.cuda.stream(stream):
        result = model(sample.cuda()).cpu().pin_memory()

        def call():
            result.copy_(model(sample.to("cuda", non_blocking=True)), non_blocking=True)

        for _ in range(10):
            call()
        stream.synchronize()
        calls, until = 0, time.monotonic() + seconds
        begin.record()
        while time.monotonic() < until:
            call()
            calls += 1
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / calls


def timed_on_host(model, sample, seconds):
    calls, begin = 0, time.monotonic()
    with torch.inference_mode():
        while calls == 0 or time.monotonic() < begin + seconds:
            model(sample)
            calls += 1
    return 1e3 * (time.monotonic() - begin) / calls


def main(folder, small=False):
    folder = pathlib.Path(folder)
    device, dtype = ("cpu", torch.float) if small else ("cuda", torch.half)
    torch.manual_seed(1)
    bert = Bert(2, 64, 4, 16, 1000) if small else Bert(12, 768, 12, 128, 30522)
    net = ResNet(8, [1, 1, 1, 1], 64, 10) if small else ResNet(64, [3, 4, 6, 3], 224, 1000)
    tokens = torch.randint(1000, (1, bert.positions.shape[1]))
    pixels = torch.randint(256, (2, 3, 16, 16) if small else (64, 3, 56, 56), dtype=torch.uint8)
    save(folder, "text", on(bert, device, dtype), tokens, ("tokens", "INT64"), ("pooled", "FP32"))
    save(folder, "pictures", on(net, device, dtype), pixels, ("pixels", "UINT8"), ("classes", "INT64"))
    print("made", flush=True)
    model = torch.jit.load(str(folder / "pictures.pt"), map_location=device)
    timed = timed_on_host if small else timed_on_device
    for line in sys.stdin:
        print(timed(model, pixels, float(line)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], small=sys.argv[2:] == ["--small"])
