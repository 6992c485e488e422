"""An OpenAI-compatible endpoint on this machine, whose answers are a function of the request."""

import json
import math
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def endpoint(
    answer,
):
    """Context manager of an OpenAI-compatible endpoint; yields its options.

    ``answer`` is a function of the request's body. It returns status, content (an
    object of JSON, or bytes), and headers, if any.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body |= {"path": self.path, "key": self.headers.get("Authorization")}
            status, content, *headers = answer(body)
            data = (
                content if isinstance(content, bytes) else json.dumps(content).encode()
            )
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            for name, value in headers[0].items() if headers else ():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {
            "url": f"http://127.0.0.1:{server.server_port}/v1",
            "model": "m",
            "attempts": 2,
            "timeout": 5.0,
        }
        server.shutdown()


def listing(**masses):
    """An answer of the endpoint, with probabilities of tokens."""
    listed = [
        {"token": token, "logprob": math.log(mass)} for token, mass in masses.items()
    ]
    content = [{"token": "A", "logprob": 0.0, "top_logprobs": listed}]
    choice = {"message": {"content": "A"}, "logprobs": {"content": content}}
    return {"choices": [choice], "usage": {"total_tokens": 50}}


def writing(text):
    """An answer of the endpoint that is a text."""
    return {"choices": [{"message": {"content": text}}], "usage": {"total_tokens": 50}}
