# SPDX-License-Identifier: Apache-2.0
"""Clients that know nothing of the example server, unmodified: Triton's over HTTP and gRPC, KServe's, promtool, wrk, MLPerf's load
generator, a browser.

    python clients.py SERVER [NAME...]
"""
import asyncio
import json
import multiprocessing
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

from browser import Page
from server import BATCH, CHAT, eventually, refused, running

ROWS = np.linspace(-1, 1, 3 * 16, dtype=np.float32).reshape(3, 16)


def close_to(a, b):
    assert np.allclose(a, b, atol=1e-6), (a, b)


def triton_models(client, key, inference):
    """What both of Triton's clients do alike."""
    assert client.is_server_live() and client.is_server_ready()
    headers = {'authorization': f'Bearer {key}'}
    assert client.is_model_ready('mlp', headers=headers)
    client.load_model('mlp', headers=headers)
    one = inference.InferInput('INPUT', ROWS.shape, 'FP32')
    one.set_data_from_numpy(ROWS)
    answer = client.infer('mlp', [one], request_id='42', headers=headers)
    output = answer.as_numpy('OUTPUT')
    assert output.shape == (3, 4) and output.any()
    asked = [inference.InferRequestedOutput('OUTPUT')]
    close_to(output, client.infer('mlp', [one], outputs=asked, model_version='1', headers=headers).as_numpy('OUTPUT'))
    text = inference.InferInput('text_input', [1], 'BYTES')
    text.set_data_from_numpy(np.array([b'hello'], dtype=np.object_))
    said = client.infer('letters', [text], headers=headers).as_numpy('text_output')
    assert len(said[0]) == 16
    block = inference.InferInput('INPUT', [8, 64], 'FP32')
    block.set_data_from_numpy(np.ones((8, 64), dtype=np.float32))
    assert client.infer('block', [block], headers=headers).as_numpy('OUTPUT').shape == (8, 64)
    client.unload_model('block', headers=headers)
    return headers, output, said[0].decode()


def triton_http(server):
    import tritonclient.http as inference
    from tritonclient.utils import InferenceServerException
    client = inference.InferenceServerClient(server.http, concurrency=4)
    _, output, _ = triton_models(client, CHAT, inference)
    headers = {'authorization': f'Bearer {CHAT}'}  # anew: the client leaves the length of a request's header in it
    assert client.get_server_metadata()['name'] == 'gpushare'
    assert client.get_model_metadata('mlp', headers=headers)['inputs'][0]['shape'] == [-1, 16]
    assert client.get_model_config('mlp', headers=headers)['max_batch_size'] == 32
    states = {m['name']: m['state'] for m in client.get_model_repository_index(headers=headers)}
    assert states['mlp'] == 'READY' and states['block'] == 'UNAVAILABLE', states
    as_json = inference.InferInput('INPUT', ROWS.shape, 'FP32')
    as_json.set_data_from_numpy(ROWS, binary_data=False)
    asked = [inference.InferRequestedOutput('OUTPUT', binary_data=False)]
    close_to(output, client.infer('mlp', [as_json], outputs=asked, headers=headers).as_numpy('OUTPUT'))
    for one in [client.async_infer('mlp', [as_json], headers=headers) for _ in range(20)]:
        close_to(output, one.get_result().as_numpy('OUTPUT'))
    for key, model in ('wrong-key', 'mlp'), (CHAT, 'nothing'):
        refused(InferenceServerException, client.infer, model, [as_json], headers={'authorization': f'Bearer {key}'})
    client.close()


def triton_grpc(server):
    import tritonclient.grpc as inference
    from tritonclient.utils import InferenceServerException
    client = inference.InferenceServerClient(server.grpc)
    headers, output, said = triton_models(client, CHAT, inference)
    assert client.get_server_metadata().name == 'gpushare'
    assert list(client.get_model_metadata('mlp', headers=headers).inputs[0].shape) == [-1, 16]
    config = client.get_model_config('letters', headers=headers).config
    assert config.model_transaction_policy.decoupled and config.input[0].data_type == 13, config
    states = {m.name: m.state for m in client.get_model_repository_index(headers=headers).models}
    assert states['mlp'] == 'READY' and states['block'] == 'UNAVAILABLE', states
    one = inference.InferInput('INPUT', ROWS.shape, 'FP32')
    one.set_data_from_numpy(ROWS)
    answers = queue.Queue()
    for _ in range(20):
        client.async_infer('mlp', [one], lambda result, error: answers.put((result, error)), headers=headers)
    for _ in range(20):
        result, error = answers.get(timeout=30)
        assert error is None, error
        close_to(output, result.as_numpy('OUTPUT'))
    for key, model, status in ('wrong-key', 'mlp', 'UNAUTHENTICATED'), (CHAT, 'nothing', 'NOT_FOUND'):
        e = refused(InferenceServerException, client.infer, model, [one], headers={'authorization': f'Bearer {key}'})
        assert status in e.status(), e
    # A text as a stream of tokens, then an answer in one piece, by one stream.
    client.start_stream(lambda result, error: answers.put((result, error)), headers=headers)
    text = inference.InferInput('text_input', [1], 'BYTES')
    text.set_data_from_numpy(np.array([b'hello'], dtype=np.object_))
    client.async_stream_infer('letters', [text], request_id='a', parameters={'max_tokens': 20}, enable_empty_final_response=True)
    client.async_stream_infer('mlp', [one], request_id='b')
    tokens = ''
    while True:
        result, error = answers.get(timeout=30)
        assert error is None, error
        response = result.get_response()
        assert response.id == 'a'
        if response.parameters['triton_final_response'].bool_param:
            break
        tokens += result.as_numpy('text_output')[0].decode()
    assert len(tokens) == 20 and tokens.startswith(said), (tokens, said)
    result, error = answers.get(timeout=30)
    assert error is None and result.get_response().id == 'b', error
    close_to(output, result.as_numpy('OUTPUT'))
    client.async_stream_infer('nothing', [one], request_id='c')
    assert answers.get(timeout=30)[1] is not None
    client.stop_stream()
    client.close()


def kserve(server):
    from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

    async def ask():
        def request(**more):
            return InferRequest(model_name='mlp', infer_inputs=[InferInput('INPUT', [3, 16], 'FP32', **more)])

        rest = InferenceRESTClient(RESTConfig(protocol='v2'))
        base, headers = f'http://{server.http}', {'Authorization': f'Bearer {BATCH}'}
        assert await rest.is_server_live(base) and await rest.is_server_ready(base)
        assert await rest.is_model_ready(base, 'mlp', headers=headers)
        listed = await rest.infer(base, request(data=ROWS.flatten().tolist()), model_name='mlp', headers=headers)
        await rest.close()
        grpc = InferenceGRPCClient(server.grpc)
        metadata = [('authorization', f'Bearer {BATCH}')]
        assert await grpc.is_server_live() and await grpc.is_server_ready()
        assert await grpc.is_model_ready('mlp', headers=metadata)
        as_list = await grpc.infer(request(data=ROWS.flatten().tolist()), headers=metadata)
        as_bytes = await grpc.infer(request(data=ROWS), headers=metadata)
        await grpc.close()
        for a in as_list, as_bytes:
            close_to(a.outputs[0].as_numpy(), listed.outputs[0].as_numpy())

    asyncio.run(ask())


def engines(server):
    """Real models, where the server has them."""
    import tritonclient.grpc as inference
    client = inference.InferenceServerClient(server.grpc)
    headers = {'authorization': f'Bearer {CHAT}'}
    if 'voice' not in {m.name for m in client.get_model_repository_index(headers=headers).models}:
        raise SystemExit('the server was built without OpenVINO')
    sound = inference.InferInput('samples', [16000], 'FP32')
    sound.set_data_from_numpy(np.zeros(16000, dtype=np.float32))
    speech = client.infer('voice', [sound], headers=headers).as_numpy('speech')
    assert speech.shape == (32,) and (speech < 0.5).all(), speech  # silence
    page = inference.InferInput('image', [200, 320], 'UINT8')
    page.set_data_from_numpy(np.full((200, 320), 255, dtype=np.uint8))
    assert client.infer('reader', [page], headers=headers).as_numpy('text').shape == (0,)  # an empty one
    used = server.tenant('chat')['used']
    assert used > 5 << 20, f'{used} bytes charged for the engines\' weights'
    client.unload_model('voice', headers=headers)
    client.unload_model('reader', headers=headers)
    assert server.tenant('chat')['used'] < used
    client.close()


def promtool(server):
    checked = subprocess.run(['promtool', 'check', 'metrics'], input=server.get('/metrics'), text=True, capture_output=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def browser(server):
    """The status page in Chromium, beside a client: what it says after some seconds, and that its charts have lines."""
    body = json.dumps({'inputs': [{'name': 'INPUT', 'datatype': 'FP32', 'shape': [3, 16], 'data': ROWS.flatten().tolist()}]})
    request = urllib.request.Request(f'http://{server.http}/v2/models/mlp/infer', body.encode(), {'Authorization': f'Bearer {CHAT}'})
    page, longest = Page(f'http://{server.admin}/'), 'Math.max(...[...document.querySelectorAll("polyline")].map(l => l.points.length))'
    try:
        def drawn():
            urllib.request.urlopen(request, timeout=30).read()
            return (page.evaluate(longest) or 0) >= 4
        eventually(drawn, 'the charts have lines')
        assert page.evaluate('document.getElementById("state").textContent') == '2 SMs, 2 tenants'
        assert page.evaluate('document.querySelectorAll("polyline").length') == 12  # six charts of two tenants
        rows = page.evaluate('[...document.querySelectorAll("tbody tr")].map(r => [...r.cells].map(c => c.textContent))')
        assert [r[0] for r in rows] == ['batch', 'chat'] and 'mlp' in rows[1][-1] and float(rows[1][5]) > 0, rows
        assert not page.wrong, page.wrong
    finally:
        page.close()


def wrk(server):
    script = Path(tempfile.gettempdir()) / f'gpushare_wrk_{server.process.pid}.lua'
    body = '{"inputs":[{"name":"INPUT","datatype":"FP32","shape":[1,16],"data":[' + ','.join(['0.5'] * 16) + ']}]}'
    script.write_text(f'''wrk.method = "POST"
wrk.body = '{body}'
wrk.headers["Authorization"] = "Bearer {BATCH}"
wrk.headers["Content-Type"] = "application/json"
''')
    try:
        said = subprocess.run(['wrk', '-t1', '-c32', '-d3s', '-s', script, f'http://{server.http}/v2/models/mlp/infer'],
                              capture_output=True, text=True, check=True).stdout
    finally:
        script.unlink()
    assert 'Socket errors' not in said and 'Non-2xx' not in said, said
    rate = next(line.split()[1] for line in said.splitlines() if line.startswith('Requests/sec'))
    assert float(rate) > 1, said
    return f'{rate} requests/s'


def loadgen(server):
    import mlperf_loadgen as lg
    import tritonclient.grpc as inference
    client = inference.InferenceServerClient(server.grpc)
    headers = {'authorization': f'Bearer {CHAT}'}
    one = inference.InferInput('INPUT', [1, 16], 'FP32')
    one.set_data_from_numpy(ROWS[:1])
    errors = []

    def issue(samples):
        for sample in samples:
            def done(result, error, name=sample.id):
                if error is not None:
                    errors.append(str(error))
                lg.QuerySamplesComplete([lg.QuerySampleResponse(name, 0, 0)])
            client.async_infer('mlp', [one], done, headers=headers)

    settings = lg.TestSettings()
    settings.scenario, settings.mode = lg.TestScenario.Server, lg.TestMode.PerformanceOnly
    settings.server_target_qps, settings.server_target_latency_ns = 100, 1_000_000_000
    settings.min_duration_ms, settings.min_query_count = 5000, 100
    folder = tempfile.mkdtemp(prefix='gpushare_loadgen_')
    try:
        output = lg.LogOutputSettings()
        output.outdir, output.copy_summary_to_stdout = folder, False
        log = lg.LogSettings()
        log.log_output, log.enable_trace = output, False
        sut, qsl = lg.ConstructSUT(issue, lambda: None), lg.ConstructQSL(16, 16, lambda _: None, lambda _: None)
        lg.StartTestWithLogSettings(sut, qsl, settings, log)
        lg.DestroyQSL(qsl)
        lg.DestroySUT(sut)
        summary = (Path(folder) / 'mlperf_log_summary.txt').read_text()
    finally:
        shutil.rmtree(folder)
    client.close()
    assert not errors, errors[:3]
    assert 'Result is : VALID' in summary, summary
    p99 = next(int(line.split(':')[1]) for line in summary.splitlines() if line.startswith('99.00 percentile latency'))
    return f'valid at 100 requests/s, P99 {p99 / 1e6:.1f} ms'


def in_process(client, server):
    """In one of its own: Triton's and KServe's messages have the same names."""
    context = multiprocessing.get_context('fork')
    notes = context.SimpleQueue()
    process = context.Process(target=lambda: notes.put(client(server)))
    process.start()
    process.join(300)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0, f'{client.__name__} failed, or took more than 5 minutes'
    return notes.get()


ALL = triton_http, triton_grpc, kserve, engines, promtool, browser, wrk, loadgen

if __name__ == '__main__':
    chosen = [c for c in ALL if c.__name__ in sys.argv[2:]] or ALL
    with running(sys.argv[1]) as server:
        for client in chosen:
            begin = time.monotonic()
            note = in_process(client, server)
            print(f'  {client.__name__}: {time.monotonic() - begin:.1f} s' + (f', {note}' if note else ''), flush=True)
        eventually(lambda: server.tenant('chat')['waiting'] == 0, 'nothing waits')
