# SPDX-License-Identifier: Apache-2.0
"""What the clients that aren't anybody's ask by gRPC."""
import struct

import grpc
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc

OWN_CONNECTION = ('grpc.use_local_subchannel_pool', 1)  # or channels to one address share it


def stub_of(channel):
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def own_channel(server, *more):
    return grpc.insecure_channel(server.grpc, options=[OWN_CONNECTION, *more])


def row(number=1.0):
    """For the model that is busy. It throws for less than 0."""
    r = pb.ModelInferRequest(model_name='busy')
    r.inputs.add(name='INPUT', datatype='FP32', shape=[1, 1])
    r.raw_input_contents.append(struct.pack('<f', number))
    return r


def text(tokens):
    """To be continued by so many."""
    r = pb.ModelInferRequest(model_name='letters')
    r.inputs.add(name='text_input', datatype='BYTES', shape=[1])
    r.raw_input_contents.append(struct.pack('<I', 2) + b'hi')
    r.parameters['max_tokens'].int64_param = tokens
    return r
