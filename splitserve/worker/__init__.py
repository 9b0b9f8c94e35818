"""worker *hosts*: one worker process."""
