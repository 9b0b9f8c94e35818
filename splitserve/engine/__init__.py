"""engine *schedules*: queues, the token budget of a step, chunked prefill, preemption, abort."""
