# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 by hand, for clients that mean no good, and for one that measures: frames, heads without compression, messages of bytes."""
import socket
import struct

PREFACE = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS = 1, 1, 4


def frame(kind, flags=0, stream=0, payload=b''):
    return struct.pack('>I', len(payload))[1:] + bytes([kind, flags]) + struct.pack('>I', stream) + payload


def _number(n, prefix):
    if n < (1 << prefix) - 1:
        return bytes([n])
    out, n = [(1 << prefix) - 1], n - (1 << prefix) + 1
    while n >= 128:
        out.append(n % 128 + 128)
        n //= 128
    return bytes(out + [n])


def field(name, value):
    """Of a head; nothing is put into the table."""
    return b'\0' + b''.join(_number(len(x), 7) + x for x in (name.encode(), value.encode()))


def head(method, key=None, **more):
    fields = {':method': 'POST', ':scheme': 'http', ':path': '/inference.GRPCInferenceService/' + method, ':authority': 'x', 'te': 'trailers',
              'content-type': 'application/grpc'}
    if key:
        fields['authorization'] = 'Bearer ' + key
    fields.update({k.replace('_', '-'): v for k, v in more.items()})
    return b''.join(field(k, v) for k, v in fields.items())


def message(body, flag=0):
    return bytes([flag]) + struct.pack('>I', len(body)) + body


def _part(number, body):
    return _number(number * 8 + 2, 8) + _varint(len(body)) + body


def _varint(n):
    out = b''
    while n >= 128:
        out, n = out + bytes([n % 128 + 128]), n // 128
    return out + bytes([n])


def row_of_mlp():
    """A request for the smallest model."""
    tensor = _part(1, b'INPUT') + _part(2, b'FP32') + _part(3, b'\x01\x10')
    return _part(1, b'mlp') + _part(5, tensor) + _part(7, struct.pack('<16f', *[0.5] * 16))


class Connection:
    """Calls one after the other, or whatever is sent by hand."""

    def __init__(self, to, settings=b'', timeout=30):
        """To an address, or by a socket that is connected."""
        if isinstance(to, str):
            host, port = to.rsplit(':', 1)
            to = socket.create_connection((host.strip('[]'), int(port)), timeout=timeout)
        self.socket = to
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.bytes, self.stream = b'', -1
        self.send(PREFACE + frame(SETTINGS, payload=settings) + frame(WINDOW, payload=struct.pack('>I', (1 << 31) - 65536)))

    def send(self, some):
        self.socket.sendall(some)

    def open(self, method, key=None, end=False, **more):
        """A call's head. Its messages are sent by say()."""
        self.stream += 2
        self.send(frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), self.stream, head(method, key, **more)))
        return self.stream

    def say(self, stream, body, end=True, flag=0):
        whole = message(body, flag)
        parts = [whole[i:i + 16384] for i in range(0, len(whole), 16384)]
        self.send(b''.join(frame(DATA, END_STREAM if end and p is parts[-1] else 0, stream, p) for p in parts))

    def next(self):
        """The next frame: its kind, flags, stream and payload. Raises ConnectionError at the end."""
        while len(self.bytes) < 9 or len(self.bytes) < 9 + int.from_bytes(self.bytes[:3], 'big'):
            some = self.socket.recv(65536)
            if not some:
                raise ConnectionError('closed')
            self.bytes += some
        size = int.from_bytes(self.bytes[:3], 'big')
        kind, flags, stream = self.bytes[3], self.bytes[4], int.from_bytes(self.bytes[5:9], 'big')
        payload, self.bytes = self.bytes[9:9 + size], self.bytes[9 + size:]
        if kind == SETTINGS and not flags & ACK:
            self.send(frame(SETTINGS, ACK))
        if kind == PING and not flags & ACK:
            self.send(frame(PING, ACK, payload=payload))
        return kind, flags, stream, payload

    def end_of(self, stream):
        """All that came of the call until its end. It ends without a word where it is reset."""
        said = b''
        while True:
            kind, flags, which, payload = self.next()
            if which == stream and kind in (DATA, HEADERS):
                said += payload
                if flags & END_STREAM:
                    return said
            if which == stream and kind == RST:
                return said

    def ask(self, method, key, body):
        stream = self.open(method, key)
        self.say(stream, body)
        return self.end_of(stream)

    def close(self):
        self.socket.close()
