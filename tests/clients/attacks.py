# SPDX-License-Identifier: Apache-2.0
"""The example server before those who mean harm: without a key, and as one tenant. A neighbour asks over both protocols meanwhile, and is answered.

    python attacks.py SERVER [--json FILE] [NAME...]

Nothing but Python's own library. Each attack is a process of its own, lasts seconds and ends by itself; all go to loopback.
"""
import functools
import gzip
import json
import multiprocessing
import os
import resource
import socket
import struct
import sys
import threading
import time

import raw_http2 as h2
from raw_http2 import Connection, frame
from server import BATCH, CHAT, eventually, running

MIB = 1 << 20
SECONDS = 2.0
MANY = 3000
# Keys of many tenants: what a key costs mustn't be up to how many there are.
TENANTS = (f'name=chat  api_key={CHAT}  memory=64MiB compute=50% priority=1\n'
           f'name=batch api_key={BATCH} memory=64MiB compute=30%\n'
           'name=others memory=1MiB compute=1%\n' + ''.join(f'  api_key=one-of-many-keys-{i:06}\n' for i in range(MANY)))
ROW = h2.row_of_mlp()
BODY = json.dumps({'inputs': [{'name': 'INPUT', 'datatype': 'FP32', 'shape': [1, 16], 'data': [0.5] * 16}]}).encode()


def http(address, timeout=30):
    host, port = address.rsplit(':', 1)
    s = socket.create_connection((host, int(port)), timeout=timeout)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s


def request(key=None, body=BODY, path='/v2/models/mlp/infer', method='POST', more=''):
    authorization = f'Authorization: Bearer {key}\r\n' if key else ''
    return f'{method} {path} HTTP/1.1\r\nHost: x\r\n{authorization}{more}Content-Length: {len(body)}\r\n\r\n'.encode() + body


def answer(s):
    """The status and the body."""
    said = b''
    while b'\r\n\r\n' not in said:
        some = s.recv(65536)
        if not some:
            raise ConnectionError('closed')
        said += some
    head, _, body = said.partition(b'\r\n\r\n')
    length = next((int(line.split(b':')[1]) for line in head.split(b'\r\n') if line.lower().startswith(b'content-length')), 0)
    while len(body) < length:
        body += s.recv(65536)
    return int(head.split()[1]), body


class Neighbour:
    """Asks by a schedule, over one connection of each protocol, each from a process of its own. These stand for machines of their own: they
    come before everything else on this machine's processors, where the system lets them."""

    def __init__(self, server):
        fork = multiprocessing.get_context('fork')
        self.over, self.clients = fork.Event(), {}
        for protocol, ask in (('http', self.by_http), ('grpc', self.by_grpc)):
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=self.run, args=(ask, server, theirs))
            process.start()
            self.clients[protocol] = process, ours
        for protocol, (_, ours) in self.clients.items():
            assert ours.recv() == 'asks', protocol

    @staticmethod
    def by_http(server):
        s = http(server.http)

        def ask():
            s.sendall(request(CHAT))
            status, body = answer(s)
            assert status == 200, body
        return ask

    @staticmethod
    def by_grpc(server):
        c = Connection(server.grpc)

        def ask():
            said = c.ask('ModelInfer', CHAT, ROW)
            assert b'OUTPUT' in said, said
        return ask

    def run(self, by, server, out):
        took = []
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        except OSError:
            pass
        try:
            ask = by(server)
            ask()
            out.send('asks')
            while not self.over.wait(0.01):
                begin = time.monotonic()
                ask()
                took.append(time.monotonic() - begin)
            out.send(took)
        except Exception as e:  # of whichever kind: it wasn't answered
            out.send(repr(e))

    def end(self):
        """P99 of each protocol, ms."""
        self.over.set()
        p99 = {}
        for protocol, (process, ours) in self.clients.items():
            took = ours.recv()
            process.join()
            assert isinstance(took, list), f'{protocol}: {took}'
            p99[protocol] = 1e3 * sorted(took)[len(took) * 99 // 100]
        return p99


# ---- attacks. Each is called with the server's addresses, in a process of its own.

def until_over():
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        yield


def quietly(f, *args, **named):
    """The server may close the connection at any time."""
    try:
        return f(*args, **named)
    except (OSError, ConnectionError):
        return None


@functools.cache
def bomb():
    return gzip.compress(bytes(1 << 30), 1)


def compressed(to, key):
    """A few megabytes that stand for gigabytes, said to be compressed, or not said."""
    for encoding in ('gzip', 'deflate', None):
        c = Connection(to.grpc)
        more = {'grpc_encoding': encoding} if encoding else {}
        s = c.open('ModelInfer', key, **more)
        quietly(c.say, s, bomb(), flag=1)
        quietly(c.end_of, s)
        c.close()
    s = http(to.http)
    quietly(s.sendall, request(key, bomb(), more='Content-Encoding: gzip\r\n'))
    if key:
        assert answer(s)[0] in (413, 415)


def endless_heads(to, key):
    """A head that never ends, in frames; one that repeats the table; one line that goes on."""
    sent = 0
    for begin in (h2.head('ModelInfer', key), b'\0\x7f\xff\xff\xff\x7f'):
        c = Connection(to.grpc)
        quietly(c.send, frame(h2.HEADERS, 0, 1, begin))
        more = frame(h2.CONTINUATION, 0, 1, h2.field('x', 'y' * 16000))[:9 + 16384] * 16
        for _ in range(600):  # 150 MiB
            if quietly(c.send, more) is None and quietly(c.socket.getpeername) is None:
                break
            sent += len(more)
        c.close()
    c = Connection(to.grpc)
    big = b'\x40' + h2._number(1, 7) + b'b' + h2._number(3900, 7) + b'z' * 3900  # into the table, then a byte each
    for s in range(1, 40, 2):
        quietly(c.send, frame(h2.HEADERS, h2.END_HEADERS, s, h2.head('ModelInfer', key) + big + b'\xbe' * 10000))
    c.close()
    s = http(to.http)
    quietly(s.sendall, b'GET /v2 HTTP/1.1\r\nHost: x\r\nX: ')
    for _ in range(1000):
        quietly(s.sendall, b'a' * 65536)


def silent(to, key):
    """More connections than there may be, of each protocol: some say nothing, some the beginning."""
    most = min(10_050, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 100) // 2)
    held = []
    for i in range(most):
        for address, words in ((to.http, b'POST /v2/models/mlp/infer HTTP/1.1\r\nHost: x\r\nX: ' + b'a' * 7000), (to.grpc, h2.PREFACE + frame(h2.SETTINGS))):
            s = quietly(http, address)
            if s is None:
                continue
            if i % 2:
                quietly(s.send, words)
            held.append(s)
    for address in to.http, to.grpc:  # whoever comes now is served
        s = http(address)
        s.close()
    h = http(to.http)
    h.sendall(request(CHAT))
    assert answer(h)[0] == 200
    assert b'OUTPUT' in Connection(to.grpc).ask('ModelInfer', CHAT, ROW)


def stalled_uploads(to, key):
    """Messages that are announced, begun and never ended."""
    held = []
    for _ in range(10 if key else 60):
        c = Connection(to.grpc)
        for _ in range(16):
            s = quietly(c.open, 'ModelInfer', key)
            if s is not None:
                quietly(c.send, b''.join(frame(h2.DATA, 0, s, p) for p in (b'\0\x03\xff\xff\xff' + bytes(16379), bytes(16384), bytes(16384))))
        held.append(c)
        s = http(to.http)
        quietly(s.sendall, request(key, bytes(8 * MIB))[:MIB])
        held.append(s)
    time.sleep(SECONDS)


def floods(to, key):
    """Calls begun and taken back, and frames that carry nothing, as many as go."""
    def flood(burst):
        while time.monotonic() < end:
            c = quietly(Connection, to.grpc)
            if c is None:
                continue
            stream = 1
            while time.monotonic() < end:
                if quietly(lambda: (c.send(burst(stream)), True)[1]) is None:
                    break
                stream += 200
            c.close()
    end = time.monotonic() + 3 * SECONDS
    short = h2.head('ModelInfer', key)
    bursts = [
        lambda s: b''.join(frame(h2.HEADERS, 4, s + 2 * i, short) + frame(h2.RST, 0, s + 2 * i, b'\0\0\0\x08') for i in range(100)),
        lambda s: b''.join(frame(h2.HEADERS, 4, s + 2 * i, short) for i in range(100)),
        lambda s: frame(h2.PING, payload=bytes(8)) * 500,
        lambda s: frame(h2.SETTINGS, payload=struct.pack('>HI', 1, 4096)) * 500,
        lambda s: frame(h2.PRIORITY, 0, s, struct.pack('>IB', 0, 1)) * 500,
        lambda s: frame(h2.WINDOW, payload=b'\0\0\0\x01') * 500,
        lambda s: frame(h2.HEADERS, 4, s, short) + frame(h2.DATA, 0, s) * 500,
        lambda s: frame(h2.HEADERS, 5, s, short) * 100,
    ]
    threads = [threading.Thread(target=flood, args=(b,)) for b in bursts for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def long_keys(to, key):
    """Keys that are longer than any, or nearly right, as many as go."""
    keys = ['k' * 7500, 'one-of-many-keys-00000x']

    def by_http():
        for _ in until_over():
            s = quietly(http, to.http)
            for k in keys:
                if s is not None and quietly(s.sendall, request(k)) is None:
                    quietly(s.recv, 4096)

    def by_grpc():
        for _ in until_over():
            c = quietly(Connection, to.grpc)
            for k in keys * 50:
                if c is None or quietly(c.ask, 'ModelInfer', k, ROW) is None:
                    break

    threads = [threading.Thread(target=f) for f in (by_http, by_grpc) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def calls_without_messages(to, key):
    """Calls that say nothing further, and calls whose answers nobody reads."""
    held = []
    for _ in range(50):
        c = Connection(to.grpc, settings=struct.pack('>HI', 4, 0))  # no room for an answer
        for i in range(90):
            s = quietly(c.open, ('ModelInfer', 'ServerLive', 'ModelStreamInfer')[i % 3], key)
            if i % 3 == 1 and s is not None:
                quietly(c.say, s, b'')
        held.append(c)
    time.sleep(SECONDS)


def nonsense(to, key):
    """What isn't HTTP, in either version, and heads that can be read in two ways."""
    twice = [request(key, more='Transfer-Encoding: chunked\r\n'), request(key, more='Content-Length: 1\r\n'), request(key, more='Host: y\r\n'),
             request(key, more='X-API-Key: another\r\n'), request(key, b'', more='Transfer-Encoding: xchunked\r\n')]
    for _ in until_over():
        for address in to.http, to.grpc:
            for words in [os.urandom(300), h2.PREFACE + os.urandom(300), b'GET / HTTP/1.1\r\n\r\n', b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r', *twice]:
                s = quietly(http, address)
                if s is not None:
                    quietly(s.sendall, words)
                    s.close()


def idle_streams(to, key):
    """A tenant's, as many as there may be and more."""
    held = [Connection(to.grpc) for _ in range(12)]
    for c in held:
        for _ in range(95):
            quietly(c.open, 'ModelStreamInfer', key)
    time.sleep(SECONDS)
    c = Connection(to.grpc)  # somebody else's stream is served
    s = c.open('ModelStreamInfer', CHAT)
    c.say(s, ROW)
    assert b'OUTPUT' in c.end_of(s)


def texts_left(to, key):
    """Texts whose reader goes: nobody makes their tokens."""
    body = json.dumps({'text_input': 'a', 'max_tokens': 4096}).encode()
    for i in range(60):
        s = http(to.http)
        s.sendall(request(key, body, '/v2/models/letters/' + ('generate', 'generate_stream')[i % 2]))
        time.sleep(0.01)
        s.close()


WITHOUT_A_KEY = compressed, endless_heads, silent, stalled_uploads, floods, long_keys, calls_without_messages, nonsense
AS_A_TENANT = compressed, endless_heads, stalled_uploads, floods, calls_without_messages, nonsense, idle_streams, texts_left


class Watch:
    """The most that the server had, beyond what it had before."""

    def __init__(self, server):
        self.server, self.before, self.most, self.over = server, server.memory(), 0, threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.over.wait(0.02):
            self.most = max(self.most, self.server.memory() - self.before)

    def end(self):
        self.over.set()
        self.thread.join()
        return self.most / MIB


def harm(what, server, key):
    """The attackers' processor time is no harm of theirs: they would have machines of their own."""
    os.nice(10)
    what(server, key)


def attack(server, what, key):
    """P99 of the neighbour by protocol, ms, and the memory that it took, MiB."""
    watch, neighbour = Watch(server), Neighbour(server)
    process = multiprocessing.get_context('fork').Process(target=harm, args=(what, server, key))
    process.start()
    process.join(180)
    if process.exitcode is None:
        process.kill()
    p99, most = neighbour.end(), watch.end()
    assert process.exitcode == 0, f'{what.__name__} failed, or took more than three minutes'
    assert server.process.poll() is None, f'{what.__name__} ended the server'
    return p99, most


def alone(server):
    neighbour = Neighbour(server)
    time.sleep(SECONDS)
    return neighbour.end()


def few_files(program):
    """A server with few descriptors: it answers while all are asked for, and afterwards."""
    def lowered():
        resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
    with running(program, tenants=TENANTS, before=lowered) as server:
        held = [quietly(http, a) for _ in range(400) for a in (server.http, server.grpc)]
        assert json.loads(server.get('/status.json'))['ready']
        server.tenants.write_text(TENANTS.replace(BATCH, 'another-key-of-batch'))  # it can be read
        eventually(lambda: status_of(server, 'another-key-of-batch') == 200, 'the file is read')
        assert status_of(server, BATCH) == 401
        assert b'OUTPUT' in Connection(server.grpc).ask('ModelInfer', CHAT, ROW)
        for s in held:
            s and s.close()
        eventually(lambda: b'OUTPUT' in Connection(server.grpc).ask('ModelInfer', CHAT, ROW), 'gRPC answers afterwards')


def status_of(server, key):
    s = http(server.http)
    try:
        s.sendall(request(key))
        return answer(s)[0]
    finally:
        s.close()


def revoked(server):
    """Streams of a key that is taken away are ended."""
    c = Connection(server.grpc)
    streams = [c.open('ModelStreamInfer', BATCH) for _ in range(50)]
    server.tenants.write_text(TENANTS.replace(BATCH, 'another-key-of-batch'))
    for s in streams:
        c.end_of(s)
    server.tenants.write_text(TENANTS)
    eventually(lambda: status_of(server, BATCH) == 200, 'the key is back')


def main(program, names, to_json):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kinds = [(what, key) for all, key in ((WITHOUT_A_KEY, None), (AS_A_TENANT, BATCH)) for what in all if not names or what.__name__ in names]
    survived, memory, worst = 0, 0.0, {'http': 0.0, 'grpc': 0.0}
    bomb()  # made once, and not beside the neighbour
    with running(program, tenants=TENANTS) as server:
        usual = alone(server)
        before, said = server.memory(), server.said()
        print(f'  alone: P99 {usual["http"]:.1f} ms over HTTP, {usual["grpc"]:.1f} ms over gRPC', flush=True)
        for what, key in kinds:
            begin = time.monotonic()
            p99, most = attack(server, what, key)
            survived += 1
            who = 'a tenant' if key else 'a stranger'
            print(f'  {what.__name__}, by {who}: {time.monotonic() - begin:.1f} s, {most:.0f} MiB; the neighbour\'s P99 '
                  f'{p99["http"]:.1f} ms over HTTP, {p99["grpc"]:.1f} ms over gRPC', flush=True)
            if not key:
                assert most <= 64, f'{most:.0f} MiB without a key'
                memory = max(memory, most)
                worst = {p: max(worst[p], p99[p]) for p in worst}
        revoked(server)
        eventually(lambda: server.tenant('batch')['waiting'] == 0, 'nothing waits')
        tokens = [0, 1]
        eventually(lambda: tokens.append(server.tenant('batch')['tokens']) or tokens[-1] == tokens[-2], 'no tokens are made')
        eventually(lambda: server.memory() - before < 32 * MIB, 'memory comes back')
        strange = [line for line in server.said()[len(said):].splitlines() if 'tenants:' not in line]
        assert not strange, strange[:3]  # nobody outside writes into the log
    few_files(program)
    survived += 2
    if to_json:
        with open(to_json, 'w') as out:
            json.dump({'survived': survived, 'memory_mib': memory, 'alone_ms': usual, 'worst_ms': worst}, out)


if __name__ == '__main__':
    words = sys.argv[2:]
    at = words.index('--json') if '--json' in words else None
    target = words[at + 1] if at is not None else None
    main(sys.argv[1], [w for i, w in enumerate(words) if at is None or i not in (at, at + 1)], target)
