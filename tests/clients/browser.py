# SPDX-License-Identifier: Apache-2.0
"""A page as Chromium shows it, driven through a pipe by its own protocol (https://chromedevtools.github.io/devtools-protocol/)."""
import base64
import json
import os
import select
import signal
import subprocess
import tempfile


class Page:
    """What its scripts throw is in `wrong`."""

    def __init__(self, url):
        self.profile = tempfile.TemporaryDirectory(prefix='gpushare_browser_', ignore_cleanup_errors=True)
        theirs, to = os.pipe()
        answers, said = os.pipe()
        self.process = subprocess.Popen(
            ['bash', '-c', f'exec "$@" 3<&{theirs} 4>&{said}', 'bash', 'chromium', '--headless', '--no-sandbox', '--disable-gpu',
             '--window-size=1280,900', f'--user-data-dir={self.profile.name}', '--remote-debugging-pipe'],
            pass_fds=(theirs, said), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        os.close(theirs)
        os.close(said)
        self.to, self.answers = open(to, 'wb', buffering=0), open(answers, 'rb', buffering=0)
        self.heard, self.last, self.wrong, self.session = b'', 0, [], {}
        target = self.ask('Target.createTarget', url='about:blank')['targetId']
        self.session = {'sessionId': self.ask('Target.attachToTarget', targetId=target, flatten=True)['sessionId']}
        self.ask('Runtime.enable')
        self.ask('Page.navigate', url=url)

    def ask(self, method, **parameters):
        self.last += 1
        self.to.write(json.dumps({'id': self.last, 'method': method, 'params': parameters, **self.session}).encode() + b'\0')
        while True:
            message = json.loads(self.message())
            if message.get('method') == 'Runtime.exceptionThrown':
                self.wrong.append(message['params']['exceptionDetails'])
            if message.get('id') == self.last:
                return message['result']

    def message(self):
        while (end := self.heard.find(b'\0')) < 0:
            if not select.select([self.answers], [], [], 60)[0]:
                raise RuntimeError('the browser says nothing for a minute')
            more = self.answers.read(1 << 16)
            if not more:
                raise RuntimeError('the browser ended')
            self.heard += more
        text, self.heard = self.heard[:end], self.heard[end + 1:]
        return text

    def evaluate(self, expression):
        return self.ask('Runtime.evaluate', expression=expression, returnByValue=True)['result'].get('value')

    def picture(self):
        """As PNG."""
        return base64.b64decode(self.ask('Page.captureScreenshot')['data'])

    def close(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.to.close()
        self.answers.close()
        self.profile.cleanup()
