"""vLLM as the target: its engine in this process, stepped by our round. All that touches vLLM is in this folder.

`target.py` implements `engine.target.TargetEngine`; `scheduler.py` makes vLLM schedule what the planner planned; `worker.py`
replaces its sampling by the rule of `engine.sampling`. Model runner V1, which vLLM calls deprecated. Version 2 would need
`ModelState.custom_sampler` instead of `worker.py`, and draft tokens handed to the worker instead of the scheduler.
"""
