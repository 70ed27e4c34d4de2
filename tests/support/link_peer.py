"""The peer process of a link: ``python -m tests.support.link_peer listen|connect|exit ADDRESS``.

Prints its address (or "up") to stdout, then echoes every message until it is killed or stdin ends. With ``exit`` it
connects, and its main thread ends after the first message, while the link is up."""

import sys
import threading

from cluster.messages import Hello, Role
from cluster.transport import connect, listen
from cluster.transport.base import LinkUp, Mailbox, Received


def main(mode: str, address: str) -> None:
    mailbox = Mailbox()
    if mode == "listen":
        listener = listen(address, mailbox, Hello(Role.TARGET, "child", 100, "tokenizer"))
        print(listener.address, flush=True)
    else:
        connect(address, mailbox, Hello(Role.DRAFTER, "child", 100, "tokenizer"))
    stopped = threading.Event()

    def await_end() -> None:
        sys.stdin.read()
        stopped.set()
        mailbox.wake()

    threading.Thread(target=await_end, daemon=True).start()
    while not stopped.is_set():
        mailbox.wait(60.0)
        for event in mailbox.drain():
            match event:
                case Received() if mode == "exit":
                    return
                case Received(link, message):
                    link.send(message)
                case LinkUp():
                    print("up", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
