"""Every decision, pure: functions and small classes over plain data and a cost model; no Ray, no torch, no clock."""
