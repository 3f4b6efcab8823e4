# SPDX-License-Identifier: Apache-2.0
"""An hour of load on the example server: both protocols, real engines, the file of tenants changed, models that fall asleep, engines
that throw, clients that vanish, a server that is killed. Afterwards: no more memory, files or threads than after the first minutes, and
what was billed is what was used.

    python soak.py SERVER [MINUTES [SEED]]
"""
import collections
import http.client
import json
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import grpc

from messages import own_channel, row, stub_of, text
from server import BATCH, CHAT, TENANTS, Server, eventually

GUEST = 'key-of-guest'
OPTIONS = ('--idle-after', '2')
ANSWERS = {200, 400, 401, 404, 413, 429, 500, 503, 504, 507}  # of HTTP
MIB = 1 << 20


def one(name, datatype, shape, data):
    return json.dumps({'inputs': [{'name': name, 'datatype': datatype, 'shape': shape, 'data': data}]})


class Load:
    """Threads that ask until they are told to stop. What isn't an answer that makes sense is kept in `wrong`."""

    def __init__(self, server, any):
        self.server, self.over, self.wrong, self.count = server, threading.Event(), [], collections.Counter()
        kinds = [self.http, self.http, self.grpc, self.stream, self.vanish, self.engines]
        self.threads = [threading.Thread(target=self.run, args=(k, random.Random(any.random()))) for k in kinds]
        for t in self.threads:
            t.start()

    def run(self, kind, any):
        while not self.over.is_set():
            try:
                kind(any)
            except (OSError, http.client.HTTPException, grpc.RpcError) as e:
                if not self.over.is_set() and 'UNAVAILABLE' not in str(e):
                    self.wrong.append(f'{kind.__name__}: {e!r}')
            # Bursts, and pauses in which models fall asleep.
            self.over.wait(any.choice([0.01, 0.01, 0.1, 5]))

    def end(self):
        self.over.set()
        for t in self.threads:
            t.join()

    def ask(self, any, path, body, key):
        c = http.client.HTTPConnection(self.server.http, timeout=60)
        try:
            c.request('POST', path, body, {'Authorization': f'Bearer {key}'})
            status = c.getresponse().status
            self.count[status] += 1
            if status not in ANSWERS:
                self.wrong.append(f'{path}: {status}')
        finally:
            c.close()

    def http(self, any):
        key = any.choice([CHAT, BATCH, GUEST, 'nobody'])
        for _ in range(any.randrange(1, 20)):
            self.ask(any, *any.choice([
                ('/v2/models/mlp/infer', one('INPUT', 'FP32', [2, 16], [any.random()] * 32)),
                ('/v2/models/busy/infer', one('INPUT', 'FP32', [1, 1], [any.choice([1, 1, 1, -1])])),  # it throws for less than 0
                ('/v2/models/block/infer', one('INPUT', 'FP32', [8, 64], [0.5] * 512)),
                ('/v2/models/letters/generate', json.dumps({'text_input': 'a', 'max_tokens': any.randrange(1, 100)})),
                ('/v2/models/mlp/infer', '{"inputs":' + '[' * any.randrange(100)),
                (f'/v2/models/{any.randrange(100)}/infer', '{}')]), key)

    def engines(self, any):
        key = any.choice([CHAT, BATCH])
        self.ask(any, '/v2/models/voice/infer', one('samples', 'FP32', [4000], [any.random() - 0.5] * 4000), key)
        self.ask(any, '/v2/models/reader/infer', one('image', 'UINT8', [64, 64], [any.randrange(256)] * 4096), key)

    def stub(self):
        channel = own_channel(self.server)
        return channel, stub_of(channel)

    def grpc(self, any):
        channel, stub = self.stub()
        with channel:
            r = row(any.choice([1, 1, 1, -1]))
            for _ in range(any.randrange(1, 20)):
                f = stub.ModelInfer.future(r, metadata=[('x-api-key', any.choice([CHAT, BATCH]))], timeout=any.choice([0.005, 30]))
                e = f.exception()
                self.count[e.code().name if e else 'OK'] += 1

    def stream(self, any):
        channel, stub = self.stub()
        with channel:
            requests = [text(any.randrange(1, 200)) for _ in range(3)]
            tokens = sum(1 for _ in stub.ModelStreamInfer(iter(requests), metadata=[('x-api-key', CHAT)], timeout=60))
            if tokens < 3:
                self.wrong.append(f'{tokens} tokens')

    def vanish(self, any):
        channel, stub = self.stub()
        with channel:
            answers = stub.ModelStreamInfer(iter([text(any.randrange(1, 200))] * 3), metadata=[('x-api-key', BATCH)], timeout=60)
            for _ in range(any.randrange(5)):
                next(answers, None)
            if any.random() < 0.5:
                answers.cancel()


def files_of_tenants(any):
    """As it was, with a guest, with other shares, broken."""
    more = f'name=guest api_key={GUEST} memory={any.choice([16, 64])}MiB compute=5%\n'
    return any.choice([TENANTS, TENANTS + more, TENANTS.replace('40%', '20%') + more, TENANTS + 'name=', TENANTS])


def billed(journal, since=0):
    """ns of device time by tenant, of the lines that were written since a time (ns since 1970)."""
    sums = collections.Counter()
    for path in sorted(Path(journal).parent.glob(Path(journal).name + '*')):
        for line in path.read_text(errors='replace').splitlines():
            words = line.split()
            if len(words) == 9 and words[0].isdigit() and int(words[0]) >= since:
                sums[words[7]] += int(words[2])
    return sums


def threads(server):
    return len(list(Path(f'/proc/{server.process.pid}/task').iterdir()))


def quiet(server):
    """What it has of the machine when nobody asks and all models sleep."""
    def asleep():
        tenants = json.loads(server.get('/status.json'))['tenants']
        return all(t['waiting'] == 0 and all(m['state'] == 'weights released' for m in t['models']) for t in tenants)
    eventually(asleep, 'all models sleep')
    time.sleep(2)
    return server.memory(), server.files(), threads(server)


def soak(program, minutes, any):
    with tempfile.TemporaryDirectory(prefix='gpushare_soak_') as folder:
        started = time.time_ns()  # before the first line begins
        server = Server(program, folder, options=OPTIONS)
        end, kills = time.monotonic() + 60 * minutes, 0
        round_lasts = max(15, min(300, 60 * minutes / 8))
        seen, answered = [], collections.Counter()
        try:
            server.start()
            while time.monotonic() < end:
                load, until = Load(server, any), time.monotonic() + round_lasts
                while time.monotonic() < until:
                    time.sleep(any.uniform(0.5, 5))
                    server.tenants.write_text(files_of_tenants(any))
                    if any.random() < 0.3:
                        server.process.send_signal(signal.SIGHUP)
                    server.get(any.choice(['/metrics', '/status.json', '/']))
                    assert server.process.poll() is None, f'it ended: {server.said()[-2000:]}'
                server.tenants.write_text(TENANTS)
                load.end()
                answered += load.count
                assert not load.wrong, load.wrong[:5]
                seen.append(quiet(server))
                usage = {t['name']: t['device_ns'] for t in json.loads(server.get('/status.json'))['tenants']}
                time.sleep(1.5)  # a line a second
                bill = billed(server.journal, started)
                for name, ns in usage.items():
                    if name != 'guest':  # who is new each time he comes
                        assert bill[name] == ns, f'{name}: {bill[name]} ns billed, {ns} used'
                memory, files, tasks = seen[-1]
                print(f'  {sum(answered.values())} answers; {memory / MIB:.0f} MiB, {files} files, {tasks} threads; bills are what was used', flush=True)
                if len(seen) >= 3 and len(seen) % 6 == 3 and time.monotonic() + 3 * round_lasts < end:  # killed, and back
                    before = billed(server.journal)
                    server.process.kill()
                    server.process.wait()
                    check_growth(seen)
                    seen, kills = [], kills + 1
                    started = time.time_ns()
                    server = Server(program, folder, options=OPTIONS)
                    server.start()
                    assert billed(server.journal) >= before, 'the journal lost lines'
            check_growth(seen)
            print(f'  {dict(answered)}; killed {kills} times; ended within {server.stop():.1f} s')
        finally:
            server.process.kill()


def check_growth(seen):
    """The first round warms up: it isn't looked at."""
    if len(seen) < 3:
        return
    first, last = seen[1], seen[-1]
    assert last[0] <= first[0] * 1.1 + 16 * MIB, f'memory grew from {first[0] / MIB:.0f} to {last[0] / MIB:.0f} MiB'
    assert last[1] <= first[1] + 4 and last[2] <= first[2] + 2, f'files or threads: {first[1:]}, then {last[1:]}'


if __name__ == '__main__':
    minutes = float(sys.argv[2]) if len(sys.argv) > 2 else 60
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else random.randrange(1 << 32)
    print(f'  {minutes:g} minutes, seed {seed}', flush=True)
    soak(sys.argv[1], minutes, random.Random(seed))
