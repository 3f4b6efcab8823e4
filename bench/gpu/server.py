#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The example server on a GPU, asked over HTTP: server.py SERVER [JSON] [--seconds S] [--host]

SERVER is the program for CUDA, without gRPC; engines.py starts it with the libtorch of the PyTorch
that is installed. JSON gets the figures, which bench/README.md defines. An urgent tenant's requests
come at random: alone, and beside a batch tenant that always has some. Clients are processes of
their own, and so is server_models.py, which makes the models and has their device time from CUDA.
--host tries all of that on the host, with models of the server's own. Its figures mean nothing.
Exit code 4: there is no such PyTorch; 124, as `timeout` has it: a round takes longer than S; 1:
something went wrong.
"""
import argparse
import contextlib
import http.client
import json
import math
import os
import pathlib
import queue
import random
import re
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent


class Problem(Exception):
    """The message says all."""


class NoTime(Problem):
    pass


# ---- decisions, of values alone

def percentile(values, p):
    """As bench/percentile.hpp has it; `values` aren't empty."""
    return sorted(values)[min(len(values) - 1, int(p * len(values)))]


def arrivals(seed, per_second, begin, end):
    """When requests come, at random, in order: one at least."""
    chance, at, due = random.Random(seed), begin, []
    while (at := at + chance.expovariate(per_second)) < end:
        due.append(at)
    return due or [begin]


class Round(NamedTuple):
    """What was measured once. `busy`: the batch tenant, in answers a second."""
    alone_ms: list  # of each request, from when it was due
    beside_ms: list
    busy_alone: float
    busy_beside: float
    launch_ns: int  # of the batch tenant's launches, without their widths, in
    calls: int
    device_ms: float  # of one such call, by CUDA
    billed_of_time: float  # to both, beside each other; 1: all of the time
    memory_of_quota: float  # the most of any tenant


class Bar(NamedTuple):
    value: float
    at_most: bool

    def met_by(self, x):
        return x <= self.value if self.at_most else x >= self.value


class Planted(NamedTuple):
    """What the same code makes of a fault."""
    value: float
    fault: str


class Figure(NamedTuple):
    name: str
    unit: str
    values: list
    bar: Bar = None
    planted: Planted = None


def p99_ratio(beside_ms, alone_ms):
    return percentile(beside_ms, 0.99) / percentile(alone_ms, 0.99)


def bill_error_pct(r):
    return 100 * abs(r.launch_ns / correct_bill_ns(r) - 1)


def correct_bill_ns(r):
    return 1e6 * r.calls * r.device_ms


def with_calls_missing(r):
    """Of a correct bill, so that the control doesn't depend on what was charged."""
    return r._replace(launch_ns=0.8 * correct_bill_ns(r))


def figures_of(rounds, late_ms, resting):
    """`late_ms`: requests of a tenant of no level beside the batch tenant; `resting`: what the
    batch tenant gets where its connections rest after each answer. Both were measured behind the
    first round."""
    first = rounds[0]

    def each(of):
        return [of(r) for r in rounds]

    return [
        Figure("gpu.server_p99_vs_alone", "x", each(lambda r: p99_ratio(r.beside_ms, r.alone_ms)),
               Bar(1.2, True), Planted(p99_ratio(late_ms, first.alone_ms), "a tenant of no level")),
        Figure("gpu.server_batch_pct", "%", each(lambda r: 100 * r.busy_beside / r.busy_alone),
               Bar(70, False), Planted(100 * resting / first.busy_alone,
                                       "as many clients that rest: half a call is under way")),
        Figure("gpu.server_bill_minus_device_pct", "%", each(bill_error_pct),
               Bar(1, True), Planted(bill_error_pct(with_calls_missing(first)),
                                      "a bill that lacks every fifth call")),
        Figure("gpu.server_alone_p99_us", "us", each(lambda r: 1e3 * percentile(r.alone_ms, 0.99))),
        Figure("gpu.server_alone_calls_per_s", "1/s", each(lambda r: r.busy_alone)),
        Figure("gpu.server_billed_of_time_pct", "%", each(lambda r: 100 * r.billed_of_time)),
        Figure("gpu.server_memory_of_quota_pct", "%", each(lambda r: 100 * r.memory_of_quota)),
    ]


def results_of(figures):
    """As bench/harness.hpp has them: a figure is void if its control meets the bar."""
    out = {"figures": {}, "void": {}}

    def add(name, values, unit):
        out["figures"][name] = {"value": statistics.median(values), "is": "median", "unit": unit,
                                "least": min(values), "most": max(values), "repeats": values}

    for f in figures:
        if f.planted is not None:
            if not math.isfinite(f.planted.value):
                out["void"][f.name] = "not found: " + f.planted.fault
                continue
            add(f.name + "_with_a_planted_fault", [f.planted.value], f.unit)
            if f.bar.met_by(f.planted.value):
                out["void"][f.name] = "not found: " + f.planted.fault
                continue
        add(f.name, f.values, f.unit)
    return out


def request_for(metadata):
    """A body for a model that the server describes so, and its headers. The values are random:
    numbers of nothing but zeros would keep a device cooler."""
    inputs, data = [], b""
    for t in metadata["inputs"]:
        shape = [max(1, n) for n in t["shape"]]
        values = values_of(t["datatype"], math.prod(shape))
        inputs.append({"name": t["name"], "datatype": t["datatype"], "shape": shape,
                       "parameters": {"binary_data_size": len(values)}})
        data += values
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return head + data, {"Inference-Header-Content-Length": str(len(head))}


def values_of(datatype, n):
    chance = random.Random(n)
    if datatype == "UINT8":
        return chance.randbytes(n)
    if datatype == "INT64":
        return struct.pack(f"<{n}q", *(chance.randrange(1000) for _ in range(n)))
    if datatype == "FP32":
        return struct.pack(f"<{n}f", *(chance.random() for _ in range(n)))
    raise Problem(f"no values of type {datatype}")


def billed(journal):
    """tenant -> ns of device time, of the journal's text (gpushare/serving/usage_journal.hpp)."""
    sums = {}
    for line in journal.splitlines():
        _, _, device_ns, _, _, _, _, tenant, _ = line.split(" ")
        sums[tenant] = sums.get(tenant, 0) + int(device_ns)
    return sums


# ---- clients: server.py --client, a process each

class Client:
    def __init__(self, job, body, headers):
        self.connection = http.client.HTTPConnection(job["address"], timeout=60)
        self.path, self.body = f"/v2/models/{job['model']}/infer", body
        self.headers = {"Authorization": "Bearer " + job["key"], **headers}

    def ask(self):
        self.connection.request("POST", self.path, self.body, self.headers)
        answer = self.connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise Problem(f"{self.path}: {answer.status} {said[:300]}")


def metadata_of(job):
    asked = urllib.request.Request(f"http://{job['address']}/v2/models/{job['model']}",
                                   headers={"Authorization": "Bearer " + job["key"]})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)


@contextlib.contextmanager
def on_threads(work, clients):
    """work(client), a thread for each, which end within the `with`. Raises what one of them raised."""
    wrong = []

    def guarded(client):
        try:
            work(client)
        except Exception as e:  # pylint: disable=broad-except
            wrong.append(e)

    threads = [threading.Thread(target=guarded, args=(c,)) for c in clients]
    for t in threads:
        t.start()
    yield
    for t in threads:
        t.join()
    if wrong:
        raise wrong[0]


def ask_at(clients, due):
    """A request at each of these times. Returns ms from then to each answer."""
    waiting, took = queue.SimpleQueue(), []

    def serve(client):
        while (at := waiting.get()) is not None:
            client.ask()
            took.append(1e3 * (time.monotonic() - at))

    with on_threads(serve, clients):
        for at in due:
            time.sleep(max(0, at - time.monotonic()))
            waiting.put(at)
        for _ in clients:
            waiting.put(None)
    return took


def ask_always(clients, begin, end, rests):
    """A request after the other on each connection, one at least, and behind each answer a rest of
    `rests` times as long as it took. Returns answers a second."""
    answered = []

    def ask(client):
        time.sleep(max(0, begin - time.monotonic()))
        at = begin
        while at < end:
            asked = time.monotonic()
            client.ask()
            at = time.monotonic()
            answered.append(at)
            if rests:
                time.sleep(rests * (at - asked))
                at = time.monotonic()

    with on_threads(ask, clients):
        pass
    return len(answered) / (max(answered) - begin)


def client_process():
    """Reads a job, says "ready", reads when to begin and to end, and writes what came of it."""
    job = json.loads(sys.stdin.readline())
    body, headers = request_for(metadata_of(job))
    clients = [Client(job, body, headers) for _ in range(job["connections"])]
    for c in clients:
        c.ask()
    print("ready", flush=True)
    begin, end = json.loads(sys.stdin.readline())
    if job["per_second"]:
        due = arrivals(job["seed"], job["per_second"], begin, end)
        result = {"ms": ask_at(clients, due)}
    else:
        result = {"per_second": ask_always(clients, begin, end, job["rests"])}
    print(json.dumps(result | {"took": max(time.monotonic(), end) - begin}), flush=True)


@contextlib.contextmanager
def sigterm_waits():
    """A SIGTERM that comes within the `with` takes effect at its end."""
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if came:
            signal.raise_signal(signal.SIGTERM)


class Child:
    """A process that the ExitStack `children` ends, whatever the rest of a constructor raises."""

    def __init__(self, children, command, **more):
        with sigterm_waits():  # else nobody would know of a process that has just begun
            self.process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, **more)
            children.callback(self.end)

    def end(self):
        self.process.kill()
        self.process.wait()


class ClientProcess(Child):
    def __init__(self, children, job):
        super().__init__(children, [sys.executable, __file__, "--client"], stdin=subprocess.PIPE)
        self.tell(job)

    def tell(self, value):
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def hear(self):
        line = self.process.stdout.readline()
        if not line:
            raise Problem("a client ended before its answer")
        return line


# ---- the server, and the models' time

class Server(Child):
    def __init__(self, children, command, folder, tenants):
        self.journal = pathlib.Path(folder, "usage")
        pathlib.Path(folder, "tenants").write_text(tenants)
        super().__init__(
            children,
            [*command, "--tenants", f"{folder}/tenants", "--journal", self.journal, "--port", "0",
             "--grpc-port", "0", "--admin-port", "0", "--idle-after", "3600"])
        said = self.process.stdout.readline()
        found = re.match(r"HTTP http://(\S+), operators http://(\S+)", said)
        if found is None:
            raise Problem(f"the server doesn't begin: '{said}'")
        self.address, self.operators = found.groups()

    def tenants(self):
        with urllib.request.urlopen(f"http://{self.operators}/status.json", timeout=60) as answer:
            return {t["name"]: t for t in json.load(answer)["tenants"]}

    def settled(self):
        """What tenants have, as soon as nobody waits and nothing is charged any more."""
        before = None
        for _ in range(300):
            now = self.tenants()
            seen = [(t["device_ns"], t["requests"]) for t in now.values()]
            if seen == before and all(t["waiting"] == 0 for t in now.values()):
                return now
            before = seen
            time.sleep(0.1)
        raise Problem("the server goes on for half a minute after the last answer")

    def stop(self):
        """Its bills have to be what its counters said."""
        counted = {name: t["device_ns"] for name, t in self.settled().items()}
        self.process.send_signal(signal.SIGTERM)
        if status := self.process.wait(60):
            raise Problem(f"the server ended with status {status}")
        bills = billed(self.journal.read_text())
        if any(bills.get(name, 0) != ns for name, ns in counted.items()):
            raise Problem(f"the bills are of {bills} ns, and the tenants were charged {counted}")


class Reference(Child):
    """server_models.py: makes the models, and says what a call of the batch tenant's takes."""

    def __init__(self, children, folder):
        super().__init__(children, [sys.executable, HERE / "server_models.py", folder],
                         stdin=subprocess.PIPE)
        if self.process.stdout.readline() != "made\n":
            raise Problem("the models can't be made")

    def device_ms(self, seconds):
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise Problem("server_models.py ended")
        return float(line)


class HostsBusyModel:
    """Without a device: as long as the server's model of that name keeps a thread busy."""

    def device_ms(self, _):
        return 2.0


class Cast(NamedTuple):
    """Who asks for what, and for how long: seconds."""
    urgent: str
    batch: str
    memory: dict  # of each tenant
    requests: float
    busy: float
    reference: float
    most_rounds: int
    connections: int = 4  # of the batch tenant, a call on each


ON_CUDA = Cast("text", "pictures", {"urgent": "2GiB", "batch": "8GiB", "late": "2GiB"},
               requests=6, busy=5, reference=1.5, most_rounds=5)
ON_HOST = Cast("mlp", "busy", {"urgent": "64MiB", "batch": "64MiB", "late": "64MiB"},
               requests=0.5, busy=0.3, reference=0, most_rounds=1)
COMPUTE = {"urgent": "40% priority=1", "batch": "50%", "late": "10%"}
UTILISATION = 0.25  # of the time, by urgent requests
WARM_UP = 50  # requests, one after the other


def tenants_of(cast):
    return "".join(f"name={name} api_key=key-of-{name} memory={cast.memory[name]} compute={compute}\n"
                   for name, compute in COMPUTE.items())


class Rig:
    def __init__(self, cast, server, reference):
        self.cast, self.server, self.reference = cast, server, reference
        for name in "late", "batch":
            self.warm_up(name)
        self.per_second = UTILISATION * 1e3 / statistics.median(self.warm_up("urgent"))
        print(f"# the server: {self.per_second:.1f} requests a second of the urgent tenant", flush=True)

    def job(self, tenant, **more):
        return {"address": self.server.address, "key": "key-of-" + tenant, "seed": 0, "per_second": 0,
                "rests": 0, "connections": 1,
                "model": self.cast.batch if tenant == "batch" else self.cast.urgent} | more

    def requests(self, tenant, seed):
        return self.job(tenant, seed=seed, per_second=self.per_second, connections=16)

    def busy(self):
        return self.job("batch", connections=self.cast.connections)

    def warm_up(self, tenant):
        """ms of each. The first one has the model loaded."""
        job = self.job(tenant)
        client = Client(job, *request_for(metadata_of(job)))
        took = []
        for _ in range(WARM_UP):
            begin = time.monotonic()
            client.ask()
            took.append(1e3 * (time.monotonic() - begin))
        return took

    def together(self, jobs, seconds):
        """Clients of these jobs, at the same time. Returns what they say, and what the server says
        of the tenants before and after."""
        with contextlib.ExitStack() as children:
            clients = [ClientProcess(children, job) for job in jobs]
            for c in clients:
                c.hear()
            before = self.server.settled()
            begin = time.monotonic() + 0.05
            for c in clients:
                c.tell([begin, begin + seconds])
            said = [json.loads(c.hear()) for c in clients]
            return said, before, self.server.settled()

    def beside(self, tenant, seed):
        return self.together([self.requests(tenant, seed), self.busy()], self.cast.requests)

    def round(self, seed):
        device_ms = self.reference.device_ms(self.cast.reference)
        (busy,), before, after = self.together([self.busy()], self.cast.busy)
        launch_ns, calls = (charged(before, after, "batch", what) for what in ("launch_ns", "requests"))
        (alone,), _, _ = self.together([self.requests("urgent", seed)], self.cast.requests)
        (urgent, batch), before, after = self.beside("urgent", seed)
        both = sum(charged(before, after, tenant, "device_ns") for tenant in after)
        return Round(alone["ms"], urgent["ms"], busy["per_second"], batch["per_second"], launch_ns, calls,
                     device_ms, both / (1e9 * max(urgent["took"], batch["took"])),
                     max(t["used"] / t["memory"] for t in after.values()))

    def least_seconds(self):
        """A round, and what is planted. Models are loaded by then."""
        c = self.cast
        return 1.2 * (c.reference + 2 * c.busy + 3 * c.requests)

    def planted(self):
        """A tenant of no level beside the batch tenant, in ms; answers a second to the batch tenant
        where each of its N connections rests for 2N - 1 times as long as the answer took. Half a
        call is under way then, on average, so that the device idles at least half of the time."""
        (late, _), _, _ = self.beside("late", 0)
        rests = 2 * self.cast.connections - 1
        (resting,), _, _ = self.together([self.busy() | {"rests": rests}], self.cast.busy)
        return late["ms"], resting["per_second"]


def charged(before, after, tenant, what):
    return after[tenant][what] - before[tenant][what]


def measure(rig, until):
    """As many rounds as there is time for."""
    begin = time.monotonic()
    if begin + rig.least_seconds() > until:
        raise NoTime(f"{max(0, until - begin):.0f} s are left, and the least takes {rig.least_seconds():.0f} s")
    rounds = [rig.round(0)]
    took = time.monotonic() - begin
    late_ms, resting = rig.planted()
    while len(rounds) < rig.cast.most_rounds and time.monotonic() + 1.2 * took < until:
        rounds.append(rig.round(len(rounds)))
    print(f"# the server: {len(rounds)} rounds", flush=True)
    return figures_of(rounds, late_ms, resting)


def run(cast, command, until, on_host):
    with tempfile.TemporaryDirectory(prefix="gpushare_server_step_") as folder, \
            contextlib.ExitStack() as children:
        reference = HostsBusyModel() if on_host else Reference(children, folder)
        server = Server(children, command if on_host else [*command, "--torch", folder], folder,
                        tenants_of(cast))
        figures = measure(Rig(cast, server, reference), until)
        server.stop()
        return figures


def report(results, path):
    for name, f in results["figures"].items():
        print(f"figure {name} {f['value']:.4g} {f['unit']}")
    for name, why in results["void"].items():
        print(f"void {name}: {why}")
    if path is not None:
        pathlib.Path(path).write_text(json.dumps(results))


def end_early(*_):
    """On SIGTERM: `timeout` sends two at once, and the second must not end the cleaning up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit("WRONG: ended by SIGTERM")


def main():
    if sys.argv[1:] == ["--client"]:
        client_process()
        return
    options = argparse.ArgumentParser(description="The example server on a GPU, asked over HTTP.")
    options.add_argument("server")
    options.add_argument("json", nargs="?")
    options.add_argument("--seconds", type=float, default=100)
    options.add_argument("--host", action="store_true")
    o = options.parse_args()
    signal.signal(signal.SIGTERM, end_early)  # processes that this one begins have their own again
    until = time.monotonic() + o.seconds
    command = [o.server] if o.host else [sys.executable, str(HERE / "engines.py"), o.server]
    if not o.host:
        if code := subprocess.run([*command, "--find-device"], check=False).returncode:
            sys.exit(code)
        os.environ["PYTORCH_TENSOREXPR"] = "0"  # else kernels are compiled at a model's first calls
    report(results_of(run(ON_HOST if o.host else ON_CUDA, command, until, o.host)), o.json)


if __name__ == "__main__":
    try:
        main()
    except NoTime as why:
        print(f"no time: {why}", file=sys.stderr)
        sys.exit(124)
    except Problem as why:
        sys.exit(f"WRONG: {why}")
    except (OSError, http.client.HTTPException, subprocess.TimeoutExpired) as why:
        sys.exit(f"WRONG: {type(why).__name__}: {why}")
