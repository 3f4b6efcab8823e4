# SPDX-License-Identifier: Apache-2.0
"""The example server's gRPC from outside, by clients that mean no good. A neighbour asks all the while, and is answered.

    python grpc_outside.py SERVER [SEED]
"""
import random
import socket
import sys
import threading
import time

import grpc
from tritonclient.grpc import service_pb2 as pb

from messages import OWN_CONNECTION, own_channel, row, stub_of, text
from server import BATCH, CHAT, eventually, refused, running

MIB = 1 << 20
BIG = [('grpc.max_send_message_length', -1), OWN_CONNECTION]


def metadata(key):
    return [('authorization', f'Bearer {key}')]


def code(call, *args, **named):
    return refused(grpc.RpcError, call, *args, **named).code()


def wrong_keys(server, stub, _):
    assert code(stub.ModelInfer, row()) == grpc.StatusCode.UNAUTHENTICATED
    assert code(stub.ModelInfer, row(), metadata=metadata('nobody')) == grpc.StatusCode.UNAUTHENTICATED
    with grpc.insecure_channel(server.grpc, options=BIG) as channel:  # the connection doesn't survive it
        code(stub_of(channel).ModelInfer, row(), metadata=metadata('x' * 100_000))
    assert code(stub.RepositoryIndex, pb.RepositoryIndexRequest()) == grpc.StatusCode.UNAUTHENTICATED
    assert code(next, stub.ModelStreamInfer(iter([row()]))) == grpc.StatusCode.UNAUTHENTICATED
    assert stub.ModelInfer(row(), metadata=[('x-api-key', CHAT)]).outputs


def wrong_requests(server, stub, _):
    def changed(**fields):
        r = row()
        for name, value in fields.items():
            setattr(r, name, value)
        return r

    def contents(datatype, **values):
        r = row()
        r.ClearField('raw_input_contents')
        r.inputs[0].datatype = datatype
        for name, value in values.items():
            getattr(r.inputs[0].contents, name).extend(value)
        return r

    def input(**fields):
        r = row()
        for name, value in fields.items():
            if name == 'shape':
                del r.inputs[0].shape[:]
                r.inputs[0].shape.extend(value)
            else:
                setattr(r.inputs[0], name, value)
        return r

    many = row()
    for i in range(100):
        many.inputs.add(name=f'{i}', datatype='FP32', shape=[0])
    twice = row()
    twice.raw_input_contents.append(b'1234')
    unasked = row()
    unasked.outputs.add(name='NOTHING')
    again = row()
    again.inputs.append(again.inputs[0])
    again.raw_input_contents.append(again.raw_input_contents[0])
    shared, classes, ranked = row(), row(), row()
    shared.inputs[0].parameters['shared_memory_region'].string_param = 'mine'
    classes.outputs.add(name='OUTPUT').parameters['classification'].int64_param = 3
    ranked.parameters['priority'].int64_param = -1
    negative = row()
    negative.parameters['timeout'].int64_param = -1
    invalid = [input(shape=[-1, 1]), input(shape=[1 << 62, 1 << 62]), input(shape=[2, 1]), input(shape=[1] * 9), input(shape=[]),
               input(datatype='FP31'), input(datatype='BYTES'), input(name=''), input(name='x' * 10_000), many, twice, unasked, negative, again, shared, classes, ranked,
               contents('FP32', fp32_contents=[1, 2]), contents('FP32', int_contents=[1]), contents('INT8', int_contents=[300]),
               contents('FP32')]
    for r in invalid:
        assert code(stub.ModelInfer, r, metadata=metadata(CHAT)) == grpc.StatusCode.INVALID_ARGUMENT, r
    assert code(stub.ModelInfer, changed(model_name='../../etc/passwd'), metadata=metadata(CHAT)) == grpc.StatusCode.NOT_FOUND
    assert code(stub.ModelInfer, changed(model_version='7'), metadata=metadata(CHAT)) == grpc.StatusCode.NOT_FOUND
    assert code(stub.ModelInfer, row(-1), metadata=metadata(CHAT)) == grpc.StatusCode.INTERNAL  # the engine throws
    assert stub.ModelInfer(row(), metadata=metadata(CHAT)).outputs  # and the next one has a new engine


def any_bytes(server, stub, any):
    """Messages that are none, and those that nearly are."""
    channel = grpc.insecure_channel(server.grpc)
    call = channel.unary_unary('/inference.GRPCInferenceService/ModelInfer')
    load = channel.unary_unary('/inference.GRPCInferenceService/RepositoryModelLoad')
    nothing = channel.unary_unary('/inference.GRPCInferenceService/Nothing')
    assert code(nothing, b'') == grpc.StatusCode.UNIMPLEMENTED
    valid, count = row().SerializeToString(), 3000
    pending = []
    for i in range(count):
        m = bytearray(valid if i % 2 == 0 else any.randbytes(any.randrange(200)))
        for _ in range(any.randrange(6)):
            at = any.randrange(len(m) + 1)
            m[at:at + any.randrange(3)] = any.randbytes(any.randrange(3))
        pending.append((call if i % 5 else load).future(bytes(m), metadata=metadata(BATCH), timeout=60))
        if len(pending) == 30:
            for p in pending:
                p.exception()
            pending.clear()
    channel.close()
    return f'{count} messages'


def texts_that_are_none(server, stub, _):
    """They are refused, and nothing is written of them: nobody outside fills the log."""
    said = server.said()
    with grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary('/inference.GRPCInferenceService/ModelInfer')
        for _ in range(1000):
            code(infer, row().SerializeToString() + b'\x1a\x01\xff', metadata=metadata(CHAT))  # which one is up to gRPC
    assert server.said() == said, server.said()[len(said):]


def too_large(server, stub, _):
    with grpc.insecure_channel(server.grpc, options=BIG) as channel:
        infer = stub_of(channel).ModelInfer
        r = row()
        r.raw_input_contents[0] = bytes(65 * MIB)
        assert code(infer, r, metadata=metadata(CHAT)) == grpc.StatusCode.RESOURCE_EXHAUSTED
        r.raw_input_contents[0] = bytes(50 * MIB)
        assert code(infer, r, metadata=metadata(CHAT)) == grpc.StatusCode.INVALID_ARGUMENT


def uploads(server, stub, _):
    """Twenty clients upload as much as they may, at once."""
    before, most = server.memory(), 0
    r = row()
    r.raw_input_contents[0] = bytes(50 * MIB)
    channels = [grpc.insecure_channel(server.grpc, options=BIG + [('n', i)]) for i in range(20)]
    calls = [stub_of(c).ModelInfer.future(r, metadata=metadata(BATCH), timeout=60) for c in channels]
    while not all(c.done() for c in calls):
        most = max(most, server.memory() - before)
        time.sleep(0.01)
    for c in channels:
        c.close()
    assert most < 700 * MIB, f'{most / MIB:.0f} MiB'
    return f'{most / MIB:.0f} MiB at most'


def many_small_things(server, stub, _):
    """Messages of so many empty ones that reading them takes a hundred times their bytes, by somebody whom nobody knows and by a tenant."""
    few, rather, many = (b'\x2a\x00' * (n // 2) for n in (1000, 3 * MIB, 60 * MIB))
    of_texts = row()
    of_texts.ClearField('raw_input_contents')
    of_texts.inputs[0].contents.bytes_contents.extend([b''] * (3 * MIB // 2))
    unknown = b'\xf8\x07\x01' * (20 * MIB)
    code_of = grpc.StatusCode
    before, most, over = server.memory(), 0, threading.Event()

    def watch():
        nonlocal most
        while not over.wait(0.002):
            most = max(most, server.memory() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with grpc.insecure_channel(server.grpc, options=BIG) as channel:
            def ask(method, message, key):
                return code(channel.unary_unary('/inference.GRPCInferenceService/' + method), message, metadata=metadata(key), timeout=60)

            def stream(message, key):
                call = channel.stream_stream('/inference.GRPCInferenceService/ModelStreamInfer')
                return pb.ModelStreamInferResponse.FromString(next(call(iter([message]), metadata=metadata(key), timeout=60))).error_message

            for message in few, rather, many, unknown:
                assert ask('ModelInfer', message, 'nobody') == code_of.UNAUTHENTICATED
            assert ask('ModelInfer', few, BATCH) == ask('ModelInfer', rather, BATCH) == ask('ModelInfer', many, BATCH) == code_of.INVALID_ARGUMENT
            assert ask('ModelInfer', unknown, BATCH) == code_of.RESOURCE_EXHAUSTED
            assert ask('ModelInfer', of_texts.SerializeToString(), BATCH) == code_of.INVALID_ARGUMENT
            assert ask('ModelReady', unknown, 'nobody') == code_of.UNAUTHENTICATED
            assert ask('ModelReady', unknown, BATCH) == ask('RepositoryModelLoad', unknown, BATCH) == code_of.RESOURCE_EXHAUSTED
            assert '64 tensors' in stream(many, BATCH)
            assert 'too large' in stream(unknown, BATCH)
    finally:
        over.set()
        watching.join()
    assert most < 400 * MIB, f'{most / MIB:.0f} MiB'
    return f'{most / MIB:.0f} MiB at most'


def deadlines(server, stub, _):
    """A call that can't be served in time is ended then, and its tenant's others aren't."""
    begin = time.monotonic()
    calls = [stub.ModelInfer.future(row(), metadata=metadata(BATCH), timeout=0.02) for _ in range(60)]
    codes = {c.exception() and c.exception().code() for c in calls}
    assert codes <= {None, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}, codes
    assert time.monotonic() - begin < 60
    eventually(lambda: server.tenant('batch')['waiting'] == 0, 'those that are late are gone')


def vanishing(server, stub, any):
    """Clients that go in the middle of a stream."""
    r = text(4096)
    for i in range(50):
        channel = own_channel(server)
        answers = stub_of(channel).ModelStreamInfer(iter([r, r, r]), metadata=metadata(BATCH))
        for _ in range(any.randrange(20)):
            next(answers)
        if i % 2:
            answers.cancel()
        channel.close()
    eventually(lambda: server.tenant('batch')['waiting'] == 0, 'nothing waits')
    # Nobody makes tokens for those that are gone.
    tokens = [0, 1]
    eventually(lambda: tokens.append(server.tenant('batch')['tokens']) or tokens[-1] == tokens[-2], 'no tokens are made')


def connections(server, stub, _):
    """Thousands that say nothing, or nonsense."""
    host, port = server.grpc.split(':')
    before, files = server.memory(), server.files()
    some = []
    for i in range(2000):
        s = socket.create_connection((host, int(port)), timeout=30)
        if i % 2:
            s.sendall(b'GET / HTTP/1.1\r\n\r\n' if i % 4 == 1 else bytes(100))
        some.append(s)
    assert stub.ModelInfer(row(), metadata=metadata(CHAT), timeout=60).outputs
    more = server.memory() - before
    assert more < 512 * MIB, f'{more / MIB:.0f} MiB'
    eventually(lambda: server.files() <= files + 20, 'those that say nothing are closed')
    for s in some:
        s.close()
    return f'{more / 2000 / 1024:.1f} KiB each'


def streams(server, stub, _):
    """More open streams than a tenant may have: the last ones are refused, and all others work on."""
    stop = threading.Event()
    channels = [own_channel(server, ('n', i)) for i in range(4)]

    def silent():
        stop.wait(60)
        yield from ()

    calls = [stub_of(channels[i // 95]).ModelStreamInfer(silent(), metadata=metadata(BATCH))
             for i in range(350)]
    eventually(lambda: sum(c.done() for c in calls) == 100, 'a hundred are refused')
    assert {c.code() for c in calls if c.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert stub.ModelInfer(row(), metadata=metadata(CHAT), timeout=60).outputs
    stop.set()
    for c in calls:
        c.cancel()
    for c in channels:
        c.close()


class Neighbour(threading.Thread):
    """Asks, one request after the other. All have to be answered."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.stub = stub_of(grpc.insecure_channel(server.grpc, options=BIG))
        self.over, self.answered, self.failed, self.longest = threading.Event(), 0, [], 0.0
        self.start()

    def run(self):
        while not self.over.wait(0.01):
            begin = time.monotonic()
            try:
                self.stub.ModelInfer(row(), metadata=metadata(CHAT), timeout=60)
                self.answered += 1
            except grpc.RpcError as e:
                self.failed.append(str(e))
            self.longest = max(self.longest, time.monotonic() - begin)

    def end(self):
        self.over.set()
        self.join()
        assert self.answered and not self.failed, (self.answered, self.failed[:3])


ALL = wrong_keys, wrong_requests, any_bytes, texts_that_are_none, too_large, uploads, many_small_things, deadlines, vanishing, connections, streams

if __name__ == '__main__':
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 32)
    print(f'  seed {seed}')
    any = random.Random(seed)
    with running(sys.argv[1]) as server, grpc.insecure_channel(server.grpc) as channel:
        stub = stub_of(channel)
        for what in ALL:
            neighbour = Neighbour(server) if what not in (wrong_keys, wrong_requests) else None
            begin = time.monotonic()
            note = what(server, stub, any)
            if neighbour:
                neighbour.end()
            print(f'  {what.__name__}: {time.monotonic() - begin:.1f} s' + (f', {note}' if note else '')
                  + (f'; the neighbour waited {1e3 * neighbour.longest:.0f} ms at most' if neighbour else ''), flush=True)
