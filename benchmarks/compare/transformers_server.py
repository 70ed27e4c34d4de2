"""transformers' `generate` behind the two paths that the comparison asks, since transformers is measured without a server of
its own. One request at a time. Runs in our environment:

python transformers_server.py FOLDER PORT DTYPE plain|ngram|DRAFT_FOLDER NGRAM_LEN DRAFT_LEN
"""

import json
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PLAIN, NGRAM = "plain", "ngram"


class Generator:
    """Greedy answers of exactly the tokens asked for, with the n-gram or draft-model assistance of `generate`."""

    def __init__(self, folder: str, dtype: str, assistance: str, ngram_len: int, draft_len: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        if assistance == NGRAM:
            self._options |= {"prompt_lookup_num_tokens": draft_len, "max_matching_ngram_size": ngram_len}
        elif assistance != PLAIN:
            assistant: Any = AutoModelForCausalLM.from_pretrained(assistance, dtype=getattr(torch, dtype)).eval()
            assistant.generation_config.num_assistant_tokens = draft_len
            assistant.generation_config.eos_token_id = None
            self._options["assistant_model"] = assistant
        self.model.generation_config.eos_token_id = None
        self.lock = threading.Lock()

    def generate(self, prompt: list[int], num_tokens: int, streamer: Any) -> None:
        import torch

        ids = torch.tensor([prompt])
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, streamer=streamer, **self._options
        )


class Streamer:
    """Sends the text of each new token as an event."""

    def __init__(self, handler: "Handler", tokenizer: Any) -> None:
        self._handler, self._tokenizer = handler, tokenizer
        self._token_ids: list[int] = []
        self._sent = ""
        self._is_prompt = True
        self.num_tokens = 0

    def put(self, value: Any) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self._token_ids.extend(value.reshape(-1).tolist())
        self.num_tokens = len(self._token_ids)
        text = self._tokenizer.decode(self._token_ids)
        self._handler.send_event({"choices": [{"index": 0, "text": text[len(self._sent) :]}]})
        self._sent = text

    def end(self) -> None: ...


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    generator: Generator

    def do_GET(self) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with self.generator.lock:
            streamer = Streamer(self, self.generator.tokenizer)
            self.generator.generate(body["prompt"], body["max_tokens"], streamer)
        self.send_event({"choices": [], "usage": {"completion_tokens": streamer.num_tokens}})
        self._send(b"data: [DONE]\n\n")
        self._send(b"")

    def send_event(self, event: dict[str, Any]) -> None:
        self._send(b"data: " + json.dumps({"object": "text_completion"} | event).encode() + b"\n\n")

    def _send(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None: ...


def main() -> None:
    folder, port, dtype, assistance, ngram_len, draft_len = sys.argv[1:]
    Handler.generator = Generator(folder, dtype, assistance, int(ngram_len), int(draft_len))
    print("transformers serves", flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
