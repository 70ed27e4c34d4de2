"""Links: long-lived, bidirectional, ordered streams of messages between two processes.

One contract, three implementations (``memory://name``, ``unix:///path``, ``grpc://host:port``), chosen by address in
``cluster.transport.factory``. A link never blocks its owner: ``send`` queues or raises, what arrives goes to the owner's
``Mailbox`` together with the coming and going of links, and the owner drains that once a round.
"""
