# SPDX-License-Identifier: Apache-2.0
"""The example server as a process of its own, for clients that know nothing of it."""
import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

CHAT, BATCH = 'key-of-chat', 'key-of-batch'
TENANTS = f'''name=chat  api_key={CHAT}  memory=512MiB compute=60% priority=1 slo=50ms
name=batch api_key={BATCH} memory=256MiB compute=40% queue_limit=64
'''


class Server:
    def __init__(self, program, folder, tenants=TENANTS, options=(), cores=None, before=None):
        self.tenants, self.journal = Path(folder) / 'tenants.conf', Path(folder) / 'usage'
        self.tenants.write_text(tenants)
        self.log = open(Path(folder) / 'log', 'w+')
        self.process = subprocess.Popen(
            [program, '--tenants', self.tenants, '--journal', self.journal, '--port', '0', '--grpc-port', '0', '--admin-port', '0',
             '--memory', '2048', *options], stdout=subprocess.PIPE, stderr=self.log, text=True,
            preexec_fn=before or (cores and (lambda: os.sched_setaffinity(0, cores))))

    def start(self):
        self.http, self.admin = re.match(r'HTTP http://(\S+), operators http://(\S+)', self.process.stdout.readline()).groups()
        self.grpc = re.match(r'gRPC (\S+)', self.process.stdout.readline())[1]

    def get(self, path):
        with urllib.request.urlopen(f'http://{self.admin}{path}', timeout=30) as answer:
            return answer.read().decode()

    def tenant(self, name):
        return next(t for t in json.loads(self.get('/status.json'))['tenants'] if t['name'] == name)

    def memory(self):
        """Bytes that are the process's own."""
        fields = Path(f'/proc/{self.process.pid}/statm').read_text().split()
        return (int(fields[1]) - int(fields[2])) * 4096

    def files(self):
        return len(list(Path(f'/proc/{self.process.pid}/fd').iterdir()))

    def stop(self):
        """Ends it as an operator does, and says how long that took."""
        begin = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        assert status == 0, f'the server ended with {status}: {self.said()}'
        return time.monotonic() - begin

    def said(self):
        self.log.seek(0)
        return self.log.read()


@contextlib.contextmanager
def running(program, **more):
    with tempfile.TemporaryDirectory(prefix='gpushare_clients_') as folder:
        server = Server(program, folder, **more)
        try:
            server.start()
            yield server
            server.stop()
        except BaseException:
            print('the server said:\n' + server.said())
            raise
        finally:
            server.process.kill()
            server.process.wait()


def eventually(holds, what):
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError(f'{what}: not within a minute')


def refused(kinds, call, *args, **named):
    """The exception that a call has to end with."""
    try:
        call(*args, **named)
    except kinds as e:
        return e
    raise AssertionError(f'{call} wasn\'t refused')
