#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/gpu/server.py without a device: its figures of made-up rounds, and all of it with a toy in place of the server."""
import contextlib
import importlib.util
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "bench" / "gpu" / "server.py"
found = importlib.util.spec_from_file_location("server", PROGRAM)
server = importlib.util.module_from_spec(found)
found.loader.exec_module(server)

# Answers each call at once, and charges 1 ms for it, of launches that take 2 ms. FAULT is what it does wrong.
# Where that is to hang, it takes no notice of SIGTERM, as a server does that hasn't begun to wait for one.
TOY = '''
import http.server, json, os, re, signal, sys, threading
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
tenants = {name: {"name": name, "device_ns": 0, "launch_ns": 0, "requests": 0, "waiting": 0, "used": 1, "memory": 4}
           for name in re.findall("name=([a-z]+)", open(options["--tenants"]).read())}
fault, lock = os.environ.get("FAULT"), threading.Lock()

def hang():
    print("hangs", file=sys.stderr, flush=True)
    threading.Event().wait()

if fault in ("silent", "stutters", "stuck"):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
if fault == "silent":
    hang()
if fault == "stutters":
    print("HTTP soon", flush=True)
    hang()

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer as one packet
    def log_message(self, *_): pass
    def answer(self, status, value):
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def do_GET(self):
        with lock:
            if self.path == "/status.json":
                self.answer(200, {"tenants": list(tenants.values())})
            else:
                self.answer(200, {"inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 16]}]})
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        head = int(self.headers["Inference-Header-Content-Length"])
        asked = json.loads(body[:head])["inputs"][0]
        with lock:
            mine = tenants[self.headers["Authorization"].removeprefix("Bearer key-of-")]
            if fault == "refuses" and mine["requests"] > 60:
                self.answer(429, {"error": "the queue is full"})
                return
            if fault == "dies":
                os._exit(1)
            if fault == "stuck" and mine["requests"] > 60:
                hang()
            mine["requests"] += 1
            mine["device_ns"] += 1_000_000
            mine["launch_ns"] += 2_000_000
        good = asked["shape"] == [1, 16] and asked["parameters"]["binary_data_size"] == 64 == len(body) - head
        self.answer(200 if good and self.path in ("/v2/models/mlp/infer", "/v2/models/busy/infer") else 400, {})

def bill(*_):
    with open(options["--journal"], "w") as f:
        for t in tenants.values():
            charged = t["device_ns"] - (fault == "forgets" and t["name"] == "batch")
            f.write(f"1 2 {charged - 7} 0 0 1 0 {t['name']} sum\\n" f"2 3 7 0 0 1 0 {t['name']} sum\\n")
    os._exit(0)

signal.signal(signal.SIGTERM, bill)
ends = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
for end in ends:
    threading.Thread(target=end.serve_forever, daemon=True).start()
print(*(f"{what} http://127.0.0.1:{end.server_port}" for what, end in zip(("HTTP", "operators"), ends)), sep=", ", flush=True)
threading.Event().wait()
'''


def round_of(**more):
    """A P99 of 100 ms, 40 calls a second of 10 ms."""
    return server.Round(**dict(alone_ms=list(range(101)), beside_ms=list(range(101)), busy_alone=40.0, busy_beside=30.0,
                               launch_ns=4_000_000_000, calls=400, device_ms=10.0, billed_of_time=0.9, memory_of_quota=0.5) | more)


class FiguresTest(unittest.TestCase):
    def figures(self, *rounds, late_ms=(300.0,), resting=20.0):
        return server.results_of(server.figures_of(rounds, list(late_ms), resting))

    def values(self, *rounds):
        return {name: f["value"] for name, f in self.figures(*rounds)["figures"].items()}

    def test_values(self):
        values = self.values(round_of())
        for name, value in {"p99_vs_alone": 1, "batch_pct": 75, "bill_minus_device_pct": 0, "alone_p99_us": 99_000, "alone_calls_per_s": 40,
                            "billed_of_time_pct": 90, "memory_of_quota_pct": 50, "p99_vs_alone_with_a_planted_fault": 300 / 99,
                            "batch_pct_with_a_planted_fault": 50, "bill_minus_device_pct_with_a_planted_fault": 20}.items():
            self.assertAlmostEqual(values.pop("gpu.server_" + name), value, msg=name)
        self.assertEqual(values, {})

    def test_what_is_worse_is_worse_than_the_bars(self):
        values = self.values(round_of(beside_ms=[2.0 * x for x in range(101)], busy_beside=10.0, launch_ns=4_400_000_000))
        self.assertAlmostEqual(values["gpu.server_p99_vs_alone"], 2)
        self.assertAlmostEqual(values["gpu.server_batch_pct"], 25)
        self.assertAlmostEqual(values["gpu.server_bill_minus_device_pct"], 10)
        self.assertAlmostEqual(self.values(round_of(launch_ns=3_600_000_000))["gpu.server_bill_minus_device_pct"], 10)

    def test_the_control_of_the_bill_does_not_depend_on_the_bill(self):
        results = self.figures(round_of(launch_ns=5_000_000_000))
        self.assertEqual(results["void"], {})
        for end, value in ("", 25), ("_with_a_planted_fault", 20):
            self.assertAlmostEqual(results["figures"]["gpu.server_bill_minus_device_pct" + end]["value"], value)

    def test_the_median_of_rounds(self):
        f = self.figures(*(round_of(busy_beside=b) for b in (20.0, 32.0, 28.0)))["figures"]["gpu.server_batch_pct"]
        self.assertEqual((f["value"], f["least"], f["most"], f["repeats"]), (70, 50, 80, [50, 80, 70]))

    def test_a_figure_whose_control_meets_the_bar_is_void(self):
        for more, name in ({"late_ms": [109.0]}, "p99_vs_alone"), ({"resting": 28.0}, "batch_pct"), ({"resting": math.nan}, "batch_pct"):
            results = self.figures(round_of(), **more)
            self.assertEqual(list(results["void"]), ["gpu.server_" + name])
            self.assertNotIn("gpu.server_" + name, results["figures"])

    def test_requests_come_at_random_at_the_rate_that_is_asked_for(self):
        due = server.arrivals(3, 100.0, 50.0, 150.0)
        self.assertEqual(due, sorted(due))
        self.assertTrue(50 < due[0] and due[-1] < 150)
        self.assertTrue(9500 < len(due) < 10500, len(due))
        self.assertEqual(due, server.arrivals(3, 100.0, 50.0, 150.0))
        self.assertEqual(server.arrivals(3, 1e-9, 1.0, 2.0), [1.0])

    def test_clients_rest_after_each_answer(self):
        clock = unittest.mock.Mock(now=100)

        def pass_by(seconds):
            clock.now += seconds

        clock.monotonic, clock.sleep = lambda: clock.now, pass_by
        client = unittest.mock.Mock(ask=lambda: pass_by(1))
        for rests, answers, end in (0, 32, 132), (7, 4, 125):
            clock.now = 100
            with unittest.mock.patch.object(server, "time", clock):
                self.assertEqual(server.ask_always([client], 100, 132, rests), answers / (end - 100))

    def test_clients_that_rest_are_as_many_as_those_that_do_not(self):
        rig = server.Rig.__new__(server.Rig)
        rig.cast, rig.server, rig.per_second = server.ON_CUDA, unittest.mock.Mock(), 1
        answers = [({"ms": [1]}, {}), None, None], [({"per_second": 5},), None, None]
        with unittest.mock.patch.object(rig, "together", side_effect=answers) as together:
            self.assertEqual(rig.planted(), ([1], 5))
        (resting,), _ = together.call_args.args
        self.assertEqual(resting, rig.busy() | {"rests": 7})

    def test_bills_are_sums_of_lines(self):
        self.assertEqual(server.billed("1 2 30 4 5 6 7 a x\n1 2 40 4 5 6 7 b x\n2 3 50 0 0 0 0 a x\n"), {"a": 80, "b": 40})


class ClientsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.toy, self.json = pathlib.Path(folder.name, "toy"), pathlib.Path(folder.name, "json")
        self.toy.write_text(f"#!{sys.executable}\n{TOY}")
        self.toy.chmod(0o755)
        self.temporary = pathlib.Path(folder.name, "temporary")
        self.temporary.mkdir()

    def run_it(self, *options, fault=""):
        return subprocess.run([sys.executable, PROGRAM, self.toy, self.json, "--seconds", "3600", *options],
                              capture_output=True, text=True, check=False, env=os.environ | {"FAULT": fault})

    def test_each_figure_has_a_row(self):
        done = self.run_it("--host")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        results = json.loads(self.json.read_text())
        names = {name.removesuffix("_with_a_planted_fault") for name in [*results["figures"], *results["void"]]}
        self.assertEqual(len(names), 7)
        rows = (ROOT / "bench" / "README.md").read_text().split("\n## What makes a figure fail")[0]
        for name in names:
            self.assertIn(f"`{name}`", rows)
        # All calls take as long as they are billed for, whatever else this machine does.
        self.assertEqual(results["figures"]["gpu.server_bill_minus_device_pct"]["value"], 0)
        self.assertEqual(results["figures"]["gpu.server_memory_of_quota_pct"]["value"], 25)
        self.assertIn("figure gpu.server_bill_minus_device_pct 0 %", done.stdout)

    def test_what_goes_wrong_is_said(self):
        for fault, why in ("forgets", "the bills are of "), ("refuses", "a client ended before its answer"), \
                ("dies", r"[A-Z]\w+: "), ("absent", "FileNotFoundError: .*toy"):
            if fault == "absent":
                self.toy.unlink()
            done = self.run_it("--host", fault=fault)
            self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
            self.assertRegex(done.stderr, "(?m)^WRONG: " + why)
            self.assertFalse(self.json.exists())

    def test_a_round_that_would_take_too_long_is_not_begun(self):
        done = self.run_it("--host", "--seconds", "0")
        self.assertEqual(done.returncode, 124, done.stdout + done.stderr)
        self.assertIn("no time: ", done.stderr)
        self.assertFalse(self.json.exists())

    def begin(self, fault):
        """In a process group of its own, whose processes all end with the test."""
        process = subprocess.Popen([sys.executable, PROGRAM, self.toy, self.json, "--host", "--seconds", "3600"], text=True,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
                                   env=os.environ | {"FAULT": fault, "TMPDIR": str(self.temporary)})

        def end():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

        self.addCleanup(end)
        return process

    def check_that_nothing_is_left_of(self, process):
        self.assertEqual(process.wait(), 1)
        with self.assertRaises(ProcessLookupError, msg="a process goes on"):
            os.killpg(process.pid, 0)
        self.assertEqual(list(self.temporary.iterdir()), [])

    def test_a_signal_ends_all_processes_and_removes_the_folder(self):
        # At the server's first line, and amid clients. `timeout` sends two signals.
        for fault in "silent", "stuck":
            process = self.begin(fault)
            while (line := process.stderr.readline()) != "hangs\n":
                self.assertNotEqual(line, "")
            for _ in range(2):
                process.send_signal(signal.SIGTERM)
            self.check_that_nothing_is_left_of(process)

    def test_a_server_that_says_something_else_is_ended(self):
        process = self.begin("stutters")
        self.check_that_nothing_is_left_of(process)
        self.assertIn("WRONG: the server doesn't begin: 'HTTP soon\n'", process.stderr.read())

    def begun(self, raises, work, meanwhile=lambda: None):
        """The processes that work() began until it raised."""
        begun, popen = [], subprocess.Popen

        def noted(*arguments, **named):
            process = popen(*arguments, **named)
            begun.append(process)
            self.addCleanup(process.communicate)
            self.addCleanup(process.kill)
            meanwhile()
            return process

        with unittest.mock.patch.object(subprocess, "Popen", noted), raises:
            work()
        return begun

    def test_models_that_cannot_be_made_leave_no_process(self):
        self.toy.with_name("server_models.py").write_text("print('too large', flush=True)\ninput()\n")
        with unittest.mock.patch.object(server, "HERE", self.toy.parent):
            begun = self.begun(self.assertRaisesRegex(server.Problem, "the models can't be made"),
                               lambda: server.run(server.ON_CUDA, [str(self.toy)], 0, on_host=False))
        self.assertEqual([p.returncode for p in begun], [-signal.SIGKILL])

    def test_clients_that_take_no_job_are_ended(self):
        with unittest.mock.patch.object(server.ClientProcess, "tell", side_effect=[None, BrokenPipeError]):
            begun = self.begun(self.assertRaises(BrokenPipeError),
                               lambda: server.Rig.together(None, [{}] * 3, 1))
        self.assertEqual([p.returncode for p in begun], 2 * [-signal.SIGKILL])

    def test_a_signal_that_comes_while_a_process_begins_ends_it(self):
        self.addCleanup(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, server.end_early))
        begun = self.begun(self.assertRaises(SystemExit), lambda: server.Rig.together(None, [{}] * 3, 1),
                           meanwhile=lambda: signal.raise_signal(signal.SIGTERM))
        self.assertEqual([p.returncode for p in begun], [-signal.SIGKILL])
        signal.raise_signal(signal.SIGTERM)  # the second one of `timeout`: cleaning up goes on

    def test_without_that_pytorch_it_is_left_out(self):
        self.toy.with_name("toy.libtorch").write_text("0.0\n")
        done = self.run_it()
        self.assertEqual(done.returncode, 4, done.stdout + done.stderr)
        self.assertRegex(done.stdout, "^not supported: ")


if __name__ == "__main__":
    unittest.main()
