"""vLLM as the target: its engine in this process, stepped by our round. All that touches vLLM is in this folder.

`target.py` implements `engine.target.LoadedTarget`; `scheduler.py` makes vLLM schedule what the planner planned; `worker.py`
replaces its sampling by the rule of `engine.sampling`. docs/architecture.md says what vLLM's model runner V2 would need.
"""
