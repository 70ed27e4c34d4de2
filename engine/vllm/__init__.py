"""vLLM as the target: its engine in this process, stepped by our round. All that touches vLLM is in this folder.

`target.py` implements `engine.target.LoadedTarget`; `scheduler.py` makes vLLM schedule what the planner planned; `worker.py`
makes the model runners of `runner_v1.py` or `runner_v2.py`, which sample by the rule of `engine.sampling`.
"""
