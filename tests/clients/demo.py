# SPDX-License-Identifier: Apache-2.0
"""A noisy neighbour comes and goes: what a tenant's requests take meanwhile, as one picture. Three times, with real engines on one core:

    off            both tenants' requests as they come: nobody is told from anybody
    plain threads  each tenant has a server of its own, and the operating system divides the core
    gated          tenants of one device: the voice detector's has a higher priority

The client has the other cores. Its requests come by chance, half a second of sound each; the neighbour has pages read, four at a time.

    python3 demo.py SERVER PICTURE.svg
"""
import bisect
import http.client
import math
import os
import queue
import random
import struct
import sys
import threading
import time

from server import BATCH, CHAT, running

LASTS, COMES, GOES = 18.0, 6.0, 12.0  # seconds
RATE, WINDOW = 60, 1.0  # requests a second, seconds that a P99 is of
OPTIONS = ('--sms', '1', '--memory', '1024')


def tenant(name, key, share, more=''):
    return f'name={name} api_key={key} memory=512MiB compute={share}% queue_limit=1000 {more}\n'


def body(name, datatype, shape, data):
    head = ('{"inputs":[{"name":"%s","datatype":"%s","shape":%s,"parameters":{"binary_data_size":%d}}]}' %
            (name, datatype, shape, len(data))).encode()
    return head + data, {'Inference-Header-Content-Length': str(len(head))}


SOUND = body('samples', 'FP32', [8000], struct.pack('<8000f', *(0.1 * math.sin(i / 7) for i in range(8000))))
# Bars where lines of text would be: they are found and read, whatever they say.
PAGE = body('image', 'UINT8', [320, 320], b''.join(
    bytes(0 if y % 80 > 60 and 30 < x < 250 and x % 18 > 8 else 255 for x in range(320)) for y in range(320)))


class Client:
    def __init__(self, address, key, model, what):
        self.connection = http.client.HTTPConnection(address, timeout=60)
        self.path, (self.body, headers) = f'/v2/models/{model}/infer', what
        self.headers = {'Authorization': f'Bearer {key}', **headers}
        self.ask()  # which loads the model

    def ask(self):
        self.connection.request('POST', self.path, self.body, self.headers)
        answer = self.connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise RuntimeError(f'{answer.status}: {said}')


def measure(mine, others, key):
    """Points (seconds, ms) of the requests to `mine`, while a neighbour asks `others` for pages from COMES to GOES."""
    clients, points, due = [Client(mine, CHAT, 'voice', SOUND) for _ in range(24)], [], queue.Queue()
    pages = [Client(others, key, 'reader', PAGE) for _ in range(4)]
    begin = time.monotonic() + 0.2

    def serve(client):
        while (at := due.get()) is not None:
            client.ask()
            points.append((at - begin, 1e3 * (time.monotonic() - at)))

    def disturb(client):
        time.sleep(max(0, begin + COMES - time.monotonic()))
        while time.monotonic() < begin + GOES:
            client.ask()

    threads = [threading.Thread(target=serve, args=(c,)) for c in clients] + [threading.Thread(target=disturb, args=(c,)) for c in pages]
    for t in threads:
        t.start()
    any, at = random.Random(7), begin
    while (at := at + any.expovariate(RATE)) < begin + LASTS:
        time.sleep(max(0, at - time.monotonic()))
        due.put(at)
    for _ in clients:
        due.put(None)
    for t in threads:
        t.join()
    return sorted(points)


def p99(points):
    """(seconds, ms) every tenth of a second, each of the last WINDOW."""
    times, line = [t for t, _ in points], []
    for i in range(int(10 * WINDOW), int(10 * LASTS) + 1):
        some = sorted(ms for _, ms in points[bisect.bisect(times, i / 10 - WINDOW):bisect.bisect(times, i / 10)])
        if some:
            line.append((i / 10, some[min(len(some) - 1, int(0.99 * len(some)))]))
    return line


def picture(panels):
    """`panels`: (title, points of requests)."""
    width, height, left, top = 330, 240, 60, 56
    most = max(ms for _, points in panels for _, ms in points)
    low, high = 0, math.ceil(math.log10(most))
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + 3 * (width + 24)} {top + height + 62}" font-family="sans-serif" font-size="13">',
           '<rect width="100%" height="100%" fill="white"/>',
           f'<text x="{left}" y="22" font-size="16">A noisy neighbour comes and goes: P99 of the other tenant\'s requests, ms</text>']
    for n, (title, points) in enumerate(panels):
        x0 = left + n * (width + 24)

        def x(t, x0=x0):
            return x0 + width * t / LASTS

        def y(ms):
            return top + height * (1 - (math.log10(max(ms, 1)) - low) / (high - low))

        out.append(f'<text x="{x0}" y="{top - 10}" font-weight="bold">{title}</text>')
        out.append(f'<rect x="{x(COMES):.1f}" y="{top}" width="{x(GOES) - x(COMES):.1f}" height="{height}" fill="#f3e3cf"/>')
        out.append(f'<text x="{x(COMES) + 6:.1f}" y="{top + 16}" fill="#8a5a14">the neighbour</text>')
        for power in range(low, high + 1):
            out.append(f'<line x1="{x0}" x2="{x0 + width}" y1="{y(10 ** power):.1f}" y2="{y(10 ** power):.1f}" stroke="#ccc"/>')
            if n == 0:
                out.append(f'<text x="{x0 - 8}" y="{y(10 ** power) + 4:.1f}" text-anchor="end">{10 ** power}</text>')
        for second in range(0, int(LASTS) + 1, 3):
            out.append(f'<text x="{x(second):.1f}" y="{top + height + 18}" text-anchor="middle">{second}</text>')
        out += [f'<circle cx="{x(t):.1f}" cy="{y(ms):.1f}" r="1.2" fill="#9db7d5"/>' for t, ms in points]
        line = ' '.join(f'{x(t):.1f},{y(ms):.1f}' for t, ms in p99(points))
        out.append(f'<polyline points="{line}" fill="none" stroke="#123f7a" stroke-width="2"/>')
    out.append(f'<text x="{left}" y="{top + height + 42}" fill="#555">seconds; dots: single requests; line: P99 of the last {WINDOW:g} s. '
               f'{RATE} requests/s of half a second of sound; neighbour: pages read, four at a time; one core</text>')
    return '\n'.join(out + ['</svg>\n'])


def panel(title, points):
    beside = sorted(ms for t, ms in points if COMES + 1 <= t < GOES)
    alone = sorted(ms for t, ms in points if 1 <= t < COMES)
    print(f'  {title}: P99 alone {alone[int(0.99 * len(alone))]:.1f} ms, beside the neighbour {beside[int(0.99 * len(beside))]:.1f} ms', flush=True)
    return title, points


def demo(program):
    cores = sorted(os.sched_getaffinity(0))

    def started(tenants):
        return running(program, tenants=tenants, options=OPTIONS, cores=cores[:1])

    os.sched_setaffinity(0, cores[1:] or cores)
    both = tenant('chat', CHAT, 60, 'priority=1 slo=50ms') + tenant('batch', BATCH, 40)
    with started(tenant('everybody', CHAT, 100)) as server:
        yield panel('off: first come, first served', measure(server.http, server.http, CHAT))
    with started(tenant('chat', CHAT, 100)) as one, started(tenant('batch', BATCH, 100)) as other:
        yield panel('plain threads: the operating system', measure(one.http, other.http, BATCH))
    with started(both) as server:
        yield panel('gated', measure(server.http, server.http, BATCH))


if __name__ == '__main__':
    drawn = picture(list(demo(sys.argv[1])))
    with open(sys.argv[2], 'w') as f:
        f.write(drawn)
    print(sys.argv[2])
