"""llama.cpp's server by the bindings `xllamacpp`, which bring no command of their own. Runs in the environment of llama.cpp:

python llama_server.py GGUF PORT NUM_SLOTS CONTEXT_LEN NGRAM_LEN DRAFT_LEN        DRAFT_LEN 0: without speculation
"""

import signal
import sys
import threading


def main() -> None:
    import xllamacpp

    model, *numbers = sys.argv[1:]
    port, num_slots, context_len, ngram_len, draft_len = map(int, numbers)
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = num_slots
    params.n_ctx = num_slots * context_len
    if draft_len:
        kinds = type(params.speculative.types[0])
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n = ngram_len
        params.speculative.ngram_simple.size_m = draft_len
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    server = xllamacpp.Server(params)
    print(f"llama.cpp serves {server.listening_address}", flush=True)
    stop.wait()


if __name__ == "__main__":
    main()
