"""Links: long-lived, bidirectional, ordered streams of messages between two processes.

Three implementations, selected by address in ``cluster.transport.factory``. A link never blocks its owner: ``send``
queues or raises, and the owner drains messages and link events from its ``Mailbox`` once per round.
"""
