# SPDX-License-Identifier: Apache-2.0
"""The example server behind nginx, by the configuration that its documents show: both protocols over TLS by one port.

    python proxy.py SERVER NGINX
"""
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import raw_http2 as h2
from attacks import ROW, answer, request
from server import BATCH, CHAT, running

CONFIGURATION = Path(__file__).parents[2] / 'examples' / 'inference_server' / 'nginx.conf'


def free_port():
    with socket.create_server(('127.0.0.1', 0)) as s:
        return s.getsockname()[1]


class Proxy:
    def __init__(self, program, server, folder):
        self.port = free_port()
        text = CONFIGURATION.read_text()
        for ours, theirs in ('127.0.0.1:8000', server.http), ('127.0.0.1:8001', server.grpc), ('listen 443', f'listen 127.0.0.1:{self.port}'):
            assert ours in text
            text = text.replace(ours, theirs)
        (folder / 'nginx.conf').write_text(re.sub('worker_processes auto', 'worker_processes 1', text))
        subprocess.run(['openssl', 'req', '-x509', '-newkey', 'rsa:2048', '-nodes', '-days', '1', '-subj', '/CN=localhost', '-addext',
                        'subjectAltName=DNS:localhost', '-keyout', folder / 'key.pem', '-out', folder / 'certificate.pem'],
                       check=True, capture_output=True)
        self.trusted = folder / 'certificate.pem'
        self.process = subprocess.Popen([program, '-p', folder, '-c', 'nginx.conf', '-g', 'daemon off;'])

    def connect(self, protocol):
        context = ssl.create_default_context(cafile=self.trusted)
        context.set_alpn_protocols([protocol])
        for _ in range(100):
            try:
                return context.wrap_socket(socket.create_connection(('127.0.0.1', self.port), timeout=30), server_hostname='localhost')
            except ConnectionRefusedError:
                time.sleep(0.1)
        raise AssertionError('nginx doesn\'t listen')


def http(proxy):
    s = proxy.connect('http/1.1')
    for key, status in (CHAT, 200), ('nobody', 401), (BATCH, 200):
        s.sendall(request(key))
        got = answer(s)
        assert got[0] == status, got
        if status != 200:
            s = proxy.connect('http/1.1')
    s.sendall(request(path='/metrics', body=b'', method='GET'))
    assert answer(s)[0] == 404
    # What could be read in two ways is nobody's second request.
    inner = request(CHAT, b'', '/v2/repository/index')
    for more in 'Transfer-Encoding: xchunked\r\n', 'Transfer-Encoding: chunked\r\nContent-Length: 4\r\n', 'Transfer-Encoding: \x0bchunked\r\n':
        s = proxy.connect('http/1.1')
        s.sendall(f'POST /v2/models/mlp/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {CHAT}\r\n{more}\r\n'.encode() + inner)
        assert answer(s)[0] in (400, 501), more


def grpc(proxy):
    c = h2.Connection(proxy.connect('h2'))
    for key in CHAT, 'nobody', BATCH:
        assert (b'OUTPUT' in c.ask('ModelInfer', key, ROW)) == (key != 'nobody'), key
    s = c.open('ModelStreamInfer', CHAT)
    c.say(s, ROW, end=False)
    c.say(s, ROW)
    assert c.end_of(s).count(b'OUTPUT') == 2


def main(program, nginx):
    with running(program) as server, tempfile.TemporaryDirectory(prefix='gpushare_proxy_') as folder:
        Path(folder).chmod(0o755)
        proxy = Proxy(nginx, server, Path(folder))
        try:
            for ask in http, grpc:
                ask(proxy)
                print(f'  {ask.__name__} over TLS, by nginx', flush=True)
        finally:
            proxy.process.terminate()
            proxy.process.wait(30)


if __name__ == '__main__':
    main(*sys.argv[1:3])
