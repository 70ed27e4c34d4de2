"""A discrete-event simulator in virtual time.

What is decided is decided by the code that serves. What is computed is modelled: passes and drafts by cost models, proposals
by recorded or synthetic agreement.
"""
