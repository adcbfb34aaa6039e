"""FAKE of the Hugging Face Jobs proxy: passes requests on to one server and strips ``Authorization``, as the real one.

Standard library only: ``python jobs_proxy.py PORT http://host:port [HEADER...]`` strips Authorization and each further
HEADER, and prints one JSON line a request: path, names of the headers that came, names of those that were stripped.
"""

from __future__ import annotations

import http.client
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

OWN = {"host", "connection", "content-length", "transfer-encoding", "keep-alive"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    target: ClassVar[str] = ""
    stripped: ClassVar[set[str]] = {"authorization"}

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        names = {name.lower() for name in self.headers}
        line = {"path": self.path, "came": sorted(names), "stripped": sorted(names & self.stripped)}
        print(json.dumps(line), flush=True)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in OWN | self.stripped}
        connection = http.client.HTTPConnection(urlsplit(self.target).netloc, timeout=600)
        try:
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            content = answer.read()
        except OSError:
            self.send_error(502)
            return
        finally:
            connection.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in OWN:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = _pass_on

    def log_message(self, *_arguments: object) -> None:
        pass


def main() -> None:
    port, Handler.target, *more = sys.argv[1:]
    Handler.stripped = {"authorization", *(name.lower() for name in more)}
    ThreadingHTTPServer(("0.0.0.0", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
