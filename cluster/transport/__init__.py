"""Links: long-lived, bidirectional, ordered streams of messages between two processes.

Three implementations of one contract, selected by address in ``cluster.transport.factory``: ``memory://name``,
``unix:///path`` and ``grpc://host:port``. A link never blocks its owner: ``send`` queues or raises, received messages
and link events go to the owner's ``Mailbox``, which the owner drains once per round.
"""
