# SPDX-License-Identifier: Apache-2.0
"""Noisy neighbours come and go: what a tenant's requests take meanwhile, and what the neighbours get done, as one picture. With real engines on
two cores, each way in turn:

    no neighbour   the tenant alone
    plain threads  each tenant has a server of its own, and the operating system divides the cores
    priority       tenants of one device with an SM for each core: the tenant goes first, as soon as a neighbour's call comes to a point where it can
    SM kept        the same, and one of the two SMs takes no long calls of the neighbours': keeps=50% in the file of tenants

The tenant's requests come by chance, half a second of sound each, whether or not others have been answered; one neighbour has pages read, the other one
single lines, or a language model's texts, four at a time each.

    python3 demo.py SERVER PICTURE.svg [--gemma-terms-accepted]
"""
import bisect
import http.client
import json
import math
import queue
import random
import struct
import sys
import threading
import time
from contextlib import ExitStack

from server import CHAT, running

PAGES, TEXTS = 'key-of-pages', 'key-of-texts'
LASTS, COMES, GOES = 18.0, 6.0, 12.0  # seconds
RATE, WINDOW = 60, 1.0  # requests a second, seconds that a P99 is of
OPTIONS = ('--sms', '2')


def tenant(name, key, share, more=''):
    return f'name={name} api_key={key} memory=512MiB compute={share}% queue_limit=1000 {more}\n'


def body(name, datatype, shape, data):
    head = ('{"inputs":[{"name":"%s","datatype":"%s","shape":%s,"parameters":{"binary_data_size":%d}}]}' %
            (name, datatype, shape, len(data))).encode()
    return head + data, {'Inference-Header-Content-Length': str(len(head))}


def bars(rows):
    """Where lines of text would be: they are found and read, whatever they say."""
    return body('image', 'UINT8', [rows, 320], b''.join(
        bytes(0 if y % 80 > 60 and 30 < x < 250 and x % 18 > 8 else 255 for x in range(320)) for y in range(rows)))


SOUND = body('samples', 'FP32', [8000], struct.pack('<8000f', *(0.1 * math.sin(i / 7) for i in range(8000))))
PAGE = '/v2/models/reader/infer', *bars(320)
LINE = '/v2/models/reader/infer', *bars(96)
TEXT = '/v2/models/gemma/generate', json.dumps({'text_input': 'Once upon a time', 'max_tokens': 32}), {}


class Client:
    def __init__(self, address, key, path, body, headers):
        self.connection = http.client.HTTPConnection(address, timeout=60)
        self.path, self.body, self.headers = path, body, {'Authorization': f'Bearer {key}', **headers}
        self.ask()  # which loads the model

    def ask(self):
        self.connection.request('POST', self.path, self.body, self.headers)
        answer = self.connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise RuntimeError(f'{answer.status}: {said}')


def measure(mine, neighbours):
    """Points (seconds, ms) of the requests to `mine`, and when each request of `neighbours` was answered: (address, key, what they ask)."""
    clients, points, due = [Client(mine, CHAT, '/v2/models/voice/infer', *SOUND) for _ in range(24)], [], queue.Queue()
    wrong = []  # what a thread ended with
    noise = [(Client(address, key, *what), done) for address, key, what in neighbours for done in [[]] for _ in range(4)]
    begin = time.monotonic() + 0.2

    def guarded(work, *args):
        try:
            work(*args)
        except Exception as e:
            wrong.append(e)

    def serve(client):
        while (at := due.get()) is not None:
            client.ask()
            points.append((at - begin, 1e3 * (time.monotonic() - at)))

    def disturb(client, done):
        time.sleep(max(0, begin + COMES - time.monotonic()))
        while time.monotonic() < begin + GOES:
            client.ask()
            done.append(time.monotonic() - begin)

    threads = [threading.Thread(target=guarded, args=(serve, c)) for c in clients] + [threading.Thread(target=guarded, args=(disturb, *n)) for n in noise]
    for t in threads:
        t.start()
    any, at, asked = random.Random(7), begin, 0
    while (at := at + any.expovariate(RATE)) < begin + LASTS:
        time.sleep(max(0, at - time.monotonic()))
        due.put(at)
        asked += 1
    for _ in clients:
        due.put(None)
    for t in threads:
        t.join()
    if wrong:
        raise wrong[0]
    if len(points) != asked:
        raise RuntimeError(f'{len(points)} of {asked} requests were answered')
    return sorted(points), [noise[i][1] for i in range(0, len(noise), 4)]


def p99_of(some):
    return some[min(len(some) - 1, int(0.99 * len(some)))]


def p99(points):
    """(seconds, ms) every tenth of a second, each of the last WINDOW."""
    times, line = [t for t, _ in points], []
    for i in range(int(10 * WINDOW), int(10 * LASTS) + 1):
        some = sorted(ms for _, ms in points[bisect.bisect(times, i / 10 - WINDOW):bisect.bisect(times, i / 10)])
        if some:
            line.append((i / 10, p99_of(some)))
    return line


class Panel:
    def __init__(self, title, settings, measured):
        self.title, self.settings, (self.points, self.done) = title, settings, measured
        beside = sorted(ms for t, ms in self.points if COMES + 1 <= t < GOES)
        self.p99, self.median = p99_of(beside), beside[len(beside) // 2]
        self.rates = [sum(COMES + 1 <= t < GOES for t in done) / (GOES - COMES - 1) for done in self.done]
        print(f'  {title} ({settings}): median {self.median:.1f} ms, P99 {self.p99:.1f} ms; neighbours: '
              + (', '.join(f'{r:.1f}/s' for r in self.rates) or 'none'), flush=True)


def picture(panels, names):
    width, height, below, left, top, gap = 270, 220, 70, 68, 100, 24
    everything = [ms for p in panels for _, ms in p.points]
    low, high = math.floor(math.log10(min(everything))), math.ceil(math.log10(max(everything)))
    colours = '#c98a3d', '#7d9a54'
    # A neighbour's work over the most that it got done anywhere: what it asks for costs as it costs.
    most = [max((p.rates[n] for p in panels if p.done), default=1) or 1 for n in range(2)]
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + 4 * (width + gap)} {top + height + below + 96}" font-family="sans-serif" font-size="13">',
           '<rect width="100%" height="100%" fill="white"/>',
           f'<text x="{left}" y="26" font-size="17">Two noisy neighbours come and go: what a tenant waits, and what they get done</text>']
    for n, panel in enumerate(panels):
        x0, y1 = left + n * (width + gap), top + height + 44

        def x(t, x0=x0):
            return x0 + width * t / LASTS

        def y(ms):
            return top + height * (1 - (math.log10(ms) - low) / (high - low))

        out.append(f'<text x="{x0}" y="{top - 42}" font-weight="bold">{panel.title}</text>')
        out.append(f'<text x="{x0}" y="{top - 25}" font-size="11" fill="#555">{panel.settings}</text>')
        out.append(f'<text x="{x0}" y="{top - 8}">meanwhile: median {panel.median:.3g} ms, P99 <tspan font-weight="bold">{panel.p99:.3g} ms</tspan></text>')
        if panel.done:
            last = min(LASTS, max(t for done in panel.done for t in done))  # what was asked by then is still answered
            out.append(f'<rect x="{x(COMES):.1f}" y="{top}" width="{x(last) - x(COMES):.1f}" height="{height}" fill="#f3e3cf"/>')
            out.append(f'<text x="{x(COMES) + 5:.1f}" y="{top + 15}" font-size="11" fill="#8a5a14">neighbours</text>')
        for power in range(low, high + 1):
            out.append(f'<line x1="{x0}" x2="{x0 + width}" y1="{y(10.0 ** power):.1f}" y2="{y(10.0 ** power):.1f}" stroke="#ccc"/>')
            if n == 0:
                out.append(f'<text x="{x0 - 8}" y="{y(10.0 ** power) + 4:.1f}" text-anchor="end">{10.0 ** power:g}{" ms" if power == high else ""}</text>')
        for second in range(0, int(LASTS) + 1, 3):
            out.append(f'<text x="{x(second):.1f}" y="{top + height + 18}" text-anchor="middle">{second}</text>')
        out += [f'<circle cx="{x(t):.1f}" cy="{y(ms):.1f}" r="1.2" fill="#9db7d5"/>' for t, ms in panel.points]
        line = ' '.join(f'{x(t):.1f},{y(ms):.1f}' for t, ms in p99(panel.points))
        out.append(f'<polyline points="{line}" fill="none" stroke="#123f7a" stroke-width="2"/>')
        for k, rate in enumerate(panel.rates):
            bar = y1 + 30 * k
            out.append(f'<rect x="{x0}" y="{bar}" width="{width * rate / most[k]:.1f}" height="20" fill="{colours[k]}" fill-opacity="0.45"/>')
            out.append(f'<text x="{x0 + 6}" y="{bar + 15}">{rate:.1f} {names[k]}/s</text>')
    out.append(f'<text x="{left}" y="{top + height + below + 66}" fill="#555">Above: {RATE} requests/s of half a second of sound, by chance; dots: single requests, '
               f'from when each was due; line: P99 of the last {WINDOW:g} s; across: seconds.</text>')
    out.append(f'<text x="{left}" y="{top + height + below + 84}" fill="#555">Below: what the neighbours got done meanwhile, four requests each always under way; '
               'full width: the most of the three ways. Two cores for all, clients included.</text>')
    return '\n'.join(out + ['</svg>\n'])


def demo(program, gemma):
    second = TEXT if gemma else LINE
    options = OPTIONS + (('--gemma-terms-accepted',) if gemma else ())

    def started(stack, tenants):
        return stack.enter_context(running(program, tenants=tenants, options=options))

    with ExitStack() as stack:
        server = started(stack, tenant('chat', CHAT, 100))
        yield Panel('no neighbour', 'a device of its own', measure(server.http, []))
    with ExitStack() as stack:
        mine, pages, texts = (started(stack, tenant('one', key, 100)).http for key in (CHAT, PAGES, TEXTS))
        yield Panel('plain threads', 'a process each; the operating system decides', measure(mine, [(pages, PAGES, PAGE), (texts, TEXTS, second)]))
    for title, setting in ('gated, by priority alone', 'priority=1'), ('gated, an SM kept', 'priority=1 keeps=50%'):
        with ExitStack() as stack:
            server = started(stack, tenant('chat', CHAT, 20, setting) + tenant('pages', PAGES, 30) + tenant('texts', TEXTS, 50)).http
            yield Panel(title, f'{setting}; the others: priority=0', measure(server, [(server, PAGES, PAGE), (server, TEXTS, second)]))


if __name__ == '__main__':
    gemma = '--gemma-terms-accepted' in sys.argv[3:]
    drawn = picture(list(demo(sys.argv[1], gemma)), ('pages', 'texts' if gemma else 'lines'))
    with open(sys.argv[2], 'w') as f:
        f.write(drawn)
    print(sys.argv[2])
